"""Runs scripts as if each had a fresh Python: this program imports torch and the package once, then forks for each.

Nothing else of the package is imported, so that a script that forgets an import fails; a script may change what it
likes, and the next does not see it.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path


def run_each(scripts, first=""):
    """Exit status and output of each script, run in its own folder; the code ``first`` runs once before all."""
    command = [sys.executable, __file__, first, *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [tuple(found) for found in json.loads(done.stdout)]


def _run(script):
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.chdir(Path(script).parent)
            sys.path[0], sys.argv, code = str(Path(script).parent), [script], 1
            try:
                runpy.run_path(script, run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return status, output.read().decode(errors="replace")


if __name__ == "__main__":
    import torch

    import intbmoe  # noqa: F401

    torch.set_num_threads(1)
    exec(sys.argv[1], {})
    sys.stdout.write(json.dumps([_run(script) for script in sys.argv[2:]]))
