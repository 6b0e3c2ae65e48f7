"""The program that ``server.py`` starts: takes the settings and, with ``forked``, forks instead of new processes."""

import subprocess
import sys

from forked import ForkedPopen
from intbmoe.serve.settings import Settings
from intbmoe.serve.supervisor import serve

if sys.argv[2:] == ["forked"]:
    subprocess.Popen = ForkedPopen
serve(Settings.from_json(sys.argv[1]), lambda line: print(line, flush=True))  # noqa: T201
