"""The commands of ``intbmoe``, by what they are for; ``cli.py`` puts them together."""
