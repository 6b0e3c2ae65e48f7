"""Runs ``intbmoe serve`` as a separate process on a free loopback port, and reads its metrics."""

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
START_S = 180.0
STOP_S = 30.0
READY_ASKS = 10
ROLES = {"front_process": "fronts", "engine_process": "engines"}
HISTOGRAMS = ("intbmoe_batch_requests", "intbmoe_queue_seconds", "intbmoe_compute_seconds")


class Server:
    """``with Server(artifact, options) as server: server.port``; it is ready inside the block and stopped after it."""

    def __init__(self, artifact: Path, options: Sequence[str], fronts: int = 1, log_file: Path | None = None) -> None:
        """``options`` are those of ``intbmoe serve``; ``fronts`` is the number of fronts that they set.

        The server's output is appended to ``log_file``.
        """
        self._fronts, self._log_file = fronts, log_file
        self.command = [sys.executable, "-m", "intbmoe.cli", "serve", str(artifact), "--port", "0", *options]
        self.port = 0
        self.start_s = 0.0
        """Seconds until the server was ready."""
        self._log: deque[str] = deque(maxlen=40)

    def __enter__(self) -> "Server":
        paths = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
        started = time.monotonic()
        self._process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # so that Ctrl-C reaches only the benchmark, which then stops the server
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        try:
            self.port = self._wait_for_port(lines, started + START_S)
            while not self._all_ready():
                if time.monotonic() > started + START_S:
                    raise RuntimeError(f"the server was not ready in {START_S:g} s:\n{self.log}")
                time.sleep(0.05)
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.monotonic() - started
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its child processes then exit too
                self._process.wait()

    @property
    def log(self) -> str:
        return "".join(self._log)

    def get(self, path: str) -> tuple[int, bytes]:
        return self._ask("GET", path)

    def post(self, path: str, body: str) -> tuple[int, Any]:
        status, content = self._ask("POST", path, body.encode(), {"content-type": "application/json"})
        return status, json.loads(content)

    def figures(self) -> dict[str, float]:
        """Returns all values of ``/metrics``, by name with labels."""
        status, body = self.get("/metrics")
        if status != 200:
            raise RuntimeError(f"/metrics answers {status}: {body[:200]!r}")
        pairs = (line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    @property
    def pid(self) -> int:
        """The id of the supervisor process."""
        return self._process.pid

    def _all_ready(self) -> bool:
        """Checks many connections: fronts become ready separately, and the system chooses one for each connection."""
        return all(self.get("/health/ready")[0] == 200 for _ in range(READY_ASKS * self._fronts))

    def _ask(self, method: str, path: str, body: bytes | None = None, headers: Mapping = {}) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _wait_for_port(self, lines: "queue.Queue[str | None]", end: float) -> int:
        while True:
            try:
                line = lines.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"the server did not start in {START_S:g} s:\n{self.log}") from None
            if line is None:
                raise RuntimeError(f"the server ended with status {self._process.wait()}:\n{self.log}")
            if found := re.search(r"serving \S+ on http://127\.0\.0\.1:(\d+)", line):
                return int(found.group(1))

    def _read(self, lines: "queue.Queue[str | None]") -> None:
        with open(self._log_file or os.devnull, "a", buffering=1) as whole:
            for line in self._process.stdout:
                self._log.append(line)
                whole.write(line)
                lines.put(line)
        lines.put(None)


class Watch:
    """The server's counts, and the use of the machine's cores, from its creation until ``end``."""

    def __init__(self, server: Server, clients: Sequence[int]) -> None:
        """``clients`` are processes that send requests."""
        self._server, self._clients = server, clients
        self._figures, self._used, self._began = server.figures(), self._cpu_seconds(), time.monotonic()

    def _cpu_seconds(self) -> dict[str, float]:
        """Returns CPU time of fronts, engines, clients and all others; empty if the system does not report it."""
        if not Path("/proc/stat").exists():
            return {}
        used = dict.fromkeys((*ROLES.values(), "clients"), 0)
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                command = (folder / "cmdline").read_text()
            except OSError:  # the process has ended
                continue
            role = "clients" if int(folder.name) in self._clients else None
            if int(fields[1]) == self._server.pid:
                role = next((role for module, role in ROLES.items() if module in command), None)
            if role is not None:
                used[role] += int(fields[11]) + int(fields[12])
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        used["others"] = user + nice + system + irq + softirq + steal - sum(used.values())
        return {role: ticks / os.sysconf("SC_CLK_TCK") for role, ticks in used.items()}

    def end(self) -> dict[str, Any]:
        """Returns batches and their sizes, mean milliseconds in queue and model, and cores used."""
        after, used = self._server.figures(), self._cpu_seconds()
        seconds = time.monotonic() - self._began
        grown = {name: value - self._figures.get(name, 0.0) for name, value in after.items()}
        batches, queue_s, compute_s = (_mean(grown, name) for name in HISTOGRAMS)
        return {
            "batches": int(grown.get(f"{HISTOGRAMS[0]}_count", 0)),
            "batch_mean": batches,
            "batch_sizes": _sizes(grown, HISTOGRAMS[0]),
            "queue_ms": 1e3 * queue_s,
            "compute_ms": 1e3 * compute_s,
            "padding": _share(grown, "padding"),
            "cores": {role: round((used[role] - self._used[role]) / seconds, 3) for role in used},
            "outcomes": {
                name.split('outcome="')[1].split('"')[0]: int(value)
                for name, value in grown.items()
                if name.startswith("intbmoe_requests_total") and value
            },
        }


def _mean(grown: Mapping[str, float], name: str) -> float:
    count = grown.get(f"{name}_count", 0.0)
    return grown[f"{name}_sum"] / count if count else 0.0


def _sizes(grown: Mapping[str, float], name: str) -> dict[str, int]:
    """Returns how many batches are in each size bucket, up to its bound and above the previous one."""
    found, below = {}, 0.0
    bounds = [(key.split('le="')[1].split('"')[0], value) for key, value in grown.items() if f"{name}_bucket" in key]
    for bound, value in sorted(bounds, key=lambda pair: float(pair[0])):
        if value > below:
            found[bound] = int(value - below)
        below = value
    return found


def _share(grown: Mapping[str, float], use: str) -> float:
    """Returns the share of computed tokens that had one use, such as padding."""
    tokens = {key: value for key, value in grown.items() if key.startswith("intbmoe_tokens_total")}
    total = sum(tokens.values())
    return sum(value for key, value in tokens.items() if f'use="{use}"' in key) / total if total else 0.0
