"""The tests that need a CUDA device, in several processes that share it: ``python tests/run_gpu.py``.

Most of their time is compilation, which one process does on one core. Every process collects all of them and takes the
next one that no other has taken, so that all end together. It needs pytest and the package; pytest-xdist, hypothesis
and the like may be missing, as on a machine that is only there for its GPU. What is not an option here goes to pytest:

    python tests/run_gpu.py --processes 8 tests/ops -k "not large"
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
CLAIMS = "INTBMOE_TEST_CLAIMS"
"""The folder in which a process says what it has taken; this file is its pytest plugin then."""


def pytest_runtestloop(session):
    """Run what no other process has taken; the next one is taken before, since pytest must know what to tear down."""
    if session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop says what is wrong
    mine = (item for item in sorted(session.items, key=_quick) if _claim(_unit(item)))
    item = next(mine, None)
    while item is not None and not session.shouldfail and not session.shouldstop:
        following = next(mine, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
    return True


def _quick(item):
    """Those that compile take longest, and go first."""
    return "compile" not in item.name


def _unit(item):
    """What one process must do: a test, or all tests that share what a fixture makes once for their file."""
    parameters = item.callspec.indices if hasattr(item, "callspec") else {}
    shared = [(name, parameters.get(name)) for name in item.fixturenames if _scope(item, name) == "module"]
    return f"{item.path} {shared}" if shared else item.nodeid


def _scope(item, name):
    definitions = item._fixtureinfo.name2fixturedefs.get(name)
    return definitions[-1].scope if definitions else None


_taken = {}


def _claim(unit):
    if unit not in _taken:
        name = hashlib.sha256(unit.encode()).hexdigest()
        try:
            os.close(os.open(os.path.join(os.environ[CLAIMS], name), os.O_CREAT | os.O_EXCL))
            _taken[unit] = True
        except FileExistsError:
            _taken[unit] = False
    return _taken[unit]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=max(1, cores // 2), help="at a time; default: half the cores")
    options, rest = parser.parse_known_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-tests-") as name:
        folder = Path(name)
        environment = _environment(folder, max(1, cores // options.processes))
        processes = [_start(folder, number, rest, environment) for number in range(options.processes)]
        statuses = [process.wait() for process in processes]
        for number, status in enumerate(statuses):
            if status:
                sys.stdout.write((folder / f"{number}.log").read_text(encoding="utf-8"))
        reports = [ElementTree.parse(path) for path in sorted(folder.glob("*.xml"))]
    tests = [case for report in reports for case in report.iter("testcase")]
    outcomes = Counter(next((part.tag for part in case if part.tag in _BAD), "passed") for case in tests)
    for case in sorted(tests, key=lambda case: -float(case.get("time")))[:20]:
        sys.stdout.write(f"{float(case.get('time')):7.1f} s  {case.get('classname')}::{case.get('name')}\n")
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "no test"
    sys.stdout.write(f"{counted} in {options.processes} processes and {time.monotonic() - began:.0f} s\n")
    return 0 if outcomes["passed"] and not any(statuses) else 1


_BAD = ("failure", "error", "skipped")


def _start(folder, number, rest, environment):
    own = ["-m", "gpu", "-p", "run_gpu", "-p", "no:cacheprovider", f"--junitxml={folder}/{number}.xml"]
    files = [] if any(Path(part.split("::")[0]).exists() for part in rest) else _files()
    command = [sys.executable, "-m", "pytest", *own, *rest, *files]
    with open(folder / f"{number}.log", "w", encoding="utf-8") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=TESTS.parent)


def _files():
    """Those with tests for a GPU; the others may need what is not installed."""
    marked = re.compile(r"mark\.gpu|on_device")
    return [str(path) for path in sorted(TESTS.rglob("test_*.py")) if marked.search(path.read_text(encoding="utf-8"))]


def _environment(folder, threads):
    """Compiled code goes to a folder of this run, since some tests look at what the compiler writes."""
    (folder / "claims").mkdir()
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        CLAIMS: f"{folder}/claims",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled",
    }


if __name__ == "__main__":
    sys.exit(main())
