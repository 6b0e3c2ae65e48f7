"""Processes without four seconds of imports: forks of this one, which has already imported torch and the package.

``ForkedPopen`` in place of ``subprocess.Popen`` (the fixture ``forked``) forks for ``python -m intbmoe.MODULE …`` and
for ``python script …``, and starts everything else as usual. Output, signals, exit status, working directory and
inherited files are those of a separate process, named after the module. Not for tests of what a fresh process imports.
"""

import asyncio
import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

AT_START = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
    signal.SIGPIPE: signal.SIG_IGN,
}
"""What Python does with these signals when it starts."""
BY_ENVIRONMENT = ("prometheus_client", "intbmoe.serve", "fake_model")
"""Packages that read the environment when they are imported, and what holds on to them: imported again in a child."""


class ForkedPopen(subprocess.Popen):
    def __init__(self, args, *, env=None, pass_fds=(), **settings):
        words = [str(word) for word in args if word != "-P"]
        if words[:2] == [sys.executable, "-m"] and words[2].startswith("intbmoe."):
            settings["preexec_fn"] = _child(words[2:], env, pass_fds)
        elif words[0] == sys.executable and words[1].endswith(".py"):
            settings["preexec_fn"] = _child(words[1:], env, pass_fds)
        super().__init__(args, env=env, pass_fds=pass_fds, **settings)


def _child(words, env, kept):
    def run():  # in the child, which already has its folder, session and standard streams
        gc.freeze()  # collecting the parent's file objects would close the child's files of the same number
        _close_all_but(kept)  # closes the pipe on which Popen waits for the child to start
        asyncio._set_running_loop(None)
        signal.set_wakeup_fd(-1)
        for signum, handler in AT_START.items():
            signal.signal(signum, handler)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        sys.argv = words
        logging.root.handlers.clear()  # pytest's handlers would swallow the log
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        os._exit(_code(words))

    return run


def _close_all_but(kept):
    first = 3
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _code(words):
    """Run the command, flush its output and return its exit status."""
    code = 0
    try:
        if words[0] == "intbmoe.cli":
            from intbmoe.cli import main

            main(words[1:])
        elif words[0].endswith(".py"):
            runpy.run_path(words[0], run_name="__main__")
        else:
            Path("/proc/self/comm").write_text(words[0].rpartition(".")[2])
            for module in [module for module in sys.modules if module.startswith(BY_ENVIRONMENT)]:
                del sys.modules[module]
            runpy.run_module(words[0], run_name="__main__")
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
    """Fork every command of the package that the tests of this file start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", ForkedPopen)
        yield
