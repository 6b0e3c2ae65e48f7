"""``python -m intbmoe`` is the command line, also where ``intbmoe`` is not on the path."""

from intbmoe.cli import main

if __name__ == "__main__":
    main()
