"""Commands of README.md and the guides, as a newcomer types them: each exists and finds what it needs."""

import inspect
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest

from intbmoe.cli import COMMANDS
from intbmoe.commands.training import PlanOptions
from intbmoe.serve.settings import Settings

ROOT = Path(__file__).parent.parent
START = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
SHELL = [line for block in re.findall(r"^```sh\n(.*?)^```", START, re.M | re.S) for line in block.splitlines()]
OPTIONS = {
    name: {
        f"--{parameter.replace('_', '-').removeprefix('as-')}" for parameter in inspect.signature(command).parameters
    }
    for name, command in COMMANDS.items()
}
OPTIONS["plan"] = {f"--{field.name}" for field in fields(PlanOptions)}
OPTIONS["serve"] = {f"--{field.name.replace('_', '-')}" for field in fields(Settings)}
GUIDES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))]


def commands(page):
    """The intbmoe commands in a page's code blocks, in order, without those with placeholders such as RUN."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?:    )?(?:\$ )?intbmoe (.*)$", text, flags=re.MULTILINE)
    found = [shlex.split(line, comments=True) for line in lines]
    return [args for args in found if args and not any(re.fullmatch(r"\[?[A-Z]{2,}\]?", word) for word in args)]


@pytest.mark.parametrize("page", ["README.md", *GUIDES])
def test_commands_exist_and_their_runs_come_from_earlier_lines(page):
    made = set()
    for command, *args in commands(page):
        assert command in COMMANDS, command
        options = [word.partition("=")[0] for word in args if word.startswith("--")]
        options = [option for option in options if "." not in option]  # settings of the recipe
        if command not in ("train", "compare"):  # test_training_docs.py parses their options
            assert set(options) <= OPTIONS[command] | {"--plugin"}, (command, options)
        if args and command in ("eval", "analyse", "export", "serve", "generate"):
            ready = args[0] in made or args[0].startswith(("zoo:", "runs/imagenet")) or not args[0].startswith("runs/")
            assert ready, f"{command} {args[0]}: no line above trains it"
        made |= {f"runs/{args[0].removesuffix('.yaml')}/{name}/0" for name in trained(command, args)}


PROGRAMS = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/results/tables.md", *GUIDES]


@pytest.mark.parametrize("page", PROGRAMS)
def test_other_programs_that_a_page_starts_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    modules = set(re.findall(r"python -m ((?:intbmoe|benchmarks)[\w.]*)", text))
    files = set(re.findall(r"python ((?:benchmarks|examples|docs)/\S+\.py)", text))
    targets = set(re.findall(r"^ *make ([a-z-]+)", text, re.MULTILINE)) | set(re.findall(r"`make ([a-z-]+)", text))
    tests = set(re.findall(r"\btests/[\w/]+\.py", text))
    paths = {name: ROOT / ("src" if name.startswith("intbmoe") else ".") / name.replace(".", "/") for name in modules}
    missing = [name for name, path in paths.items() if not (path.with_suffix(".py").is_file() or path.is_dir())]
    missing += [name for name in files | tests if not (ROOT / name).is_file()]
    missing += [name for name in targets if f"\n{name}:" not in (ROOT / "Makefile").read_text(encoding="utf-8")]
    assert missing == []


def trained(command, args):
    """The labels of the runs that a command creates."""
    if command == "train":
        given = [args[args.index(option) + 1] for option in ("--moe.label", "--moe.name") if option in args]
        return (given or ["intbmoe"])[:1]
    return args[args.index("--methods") + 1].split(",") if command == "compare" and "--methods" in args else []


@pytest.mark.slow
def test_the_start_runs_as_printed(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for line in SHELL:
        program, *args = shlex.split(line)
        if program != "intbmoe":  # the installation, which .ci/package tests
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
    """What the server says about itself, on a free port, because the printed one may be taken."""
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
