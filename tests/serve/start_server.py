"""The program of ``server.py``'s servers."""

import sys

from intbmoe.serve.settings import Settings
from intbmoe.serve.supervisor import serve

serve(Settings.from_json(sys.argv[1]), lambda line: print(line, flush=True))  # noqa: T201
