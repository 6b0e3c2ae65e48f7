"""Processes without their four seconds of imports: forked from this one, which has torch and the package already.

``ForkedPopen`` in place of ``subprocess.Popen`` (the fixture ``forked``) forks for ``python -m intbmoe.cli …`` and for
``python script …``, and starts all else as ever. Output, signals, exit status and folder are those of a process of its
own. Not for tests of what a fresh process imports.
"""

import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback

import pytest

CLI = [sys.executable, "-m", "intbmoe.cli"]
AT_START = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGPIPE: signal.SIG_IGN,
}
"""What Python does with these signals when it starts."""


class ForkedPopen(subprocess.Popen):
    def __init__(self, args, *, env=None, **settings):
        words = [str(word) for word in args]
        if words[:3] == CLI:
            settings["preexec_fn"] = _child(words[2:], env)
        elif words[0] == sys.executable and words[1].endswith(".py"):
            settings["preexec_fn"] = _child(words[1:], env)
        super().__init__(args, env=env, **settings)


def _child(words, env):
    def run():  # in the child, with its folder, session and first three files as asked for
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # Popen waits until the child begins, and takes this for it
        for signum, handler in AT_START.items():
            signal.signal(signum, handler)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        sys.argv = words
        logging.root.handlers.clear()  # pytest's, who would keep what is logged to itself
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        os._exit(_code(words))

    return run


def _code(words):
    """The exit status, after the work and with all said."""
    code = 0
    try:
        if words[0] == "intbmoe.cli":
            from intbmoe.cli import main

            main(words[1:])
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            sys.stderr.write(code + "\n")
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


@pytest.fixture(scope="module")
def forked():
    """Every command of the package that the tests of this file start is forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", ForkedPopen)
        yield
