"""README.md and docs/start.md as a newcomer types them: every command, in the order printed."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from intbmoe.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/start.md")}
SHELL = {
    name: [line for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    for name, text in PAGES.items()
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_and_their_runs_come_from_earlier_lines(page):
    made = set()
    for line in SHELL[page]:
        program, *args = shlex.split(line, comments=True)
        if program != "intbmoe":
            continue
        assert args[0] in COMMANDS, line
        used = [word for word in args[1:] if word.startswith("runs/") or word.endswith("-artifact")]
        target = args[args.index("--to") + 1] if "--to" in args else None
        assert set(used) - {target} <= made, line
        made |= {f"runs/{args[1]}/intbmoe/0"} if args[0] == "train" else {target}


@pytest.mark.slow
def test_the_start_runs_as_printed(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for line in SHELL["docs/start.md"]:
        program, *args = shlex.split(line)
        if program != "intbmoe":  # the installation: .ci/package installs what was built
            continue
        command = [sys.executable, "-m", "intbmoe.cli", *args]
        if args[0] == "serve":
            assert '"ready":' in served(command, tmp_path, environment).replace(" ", "")
            continue
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "runs/digits/compare/dense+switch+intbmoe/report.html").is_file()
    assert (tmp_path / "runs/digits/intbmoe/0/analysis/report.html").is_file()


def served(command, folder, environment):
    """What the server says of itself; on another port than the printed one, which may be taken."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*command, "--port", str(port)], cwd=folder, env=environment)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5) as answer:
                    return answer.read().decode()
            except OSError:
                time.sleep(0.5)
        return f"no answer, exit status {server.poll()}"
    finally:
        server.terminate()
        server.wait(60)
