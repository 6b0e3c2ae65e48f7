"""The commands of ``intbmoe``, grouped by purpose; ``cli.py`` puts them together."""
