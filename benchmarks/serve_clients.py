"""Runs the client processes of the load generator (``serve_load.py``) and combines their figures."""

import itertools
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import serve_load
from serve_load import Load

HEAD_START_S = 0.6
"""Time between starting a step and its first arrival, for opening connections."""
CLIENT_RATE = 3000
"""Maximum number of requests per second for one client process."""
LATE_MS = 10.0
"""The generator does not keep up if one request in a hundred is later than this."""
BUSY = 0.95
"""A client that uses more than this share of a core has no time left."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the smallest value that a ``share`` of all values does not exceed; NaN without values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


@dataclass(frozen=True, kw_only=True)
class Step:
    """The combined figures of all clients at one rate."""

    rate: float
    seconds: float
    due: int
    answered: int
    throughput: float
    """Answers per second during the measured time."""
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    errors: dict[str, int]
    """By status or reason, for requests that were due during the measured time."""
    lateness_p50_ms: float
    lateness_p99_ms: float
    busiest_client: float
    """Share of a core."""
    clients: int
    connections: int
    waited_for_connection: int

    @property
    def generator_kept_up(self) -> bool:
        """Whether requests were sent when they were due, so that the figures describe the server."""
        return not self.lateness_p99_ms > LATE_MS and self.busiest_client < BUSY


def merge(parts: Sequence[dict[str, Any]], rate: float, seconds: float) -> Step:
    latencies = sorted(itertools.chain.from_iterable(part["latencies_ms"] for part in parts))
    lateness = sorted(itertools.chain.from_iterable(part["lateness_ms"] for part in parts))
    return Step(
        rate=rate,
        seconds=seconds,
        due=sum(part["due"] for part in parts),
        answered=len(latencies),
        throughput=sum(part["answered_in_window"] for part in parts) / seconds,
        mean_ms=sum(latencies) / len(latencies) if latencies else math.nan,
        p50_ms=percentile(latencies, 0.5),
        p95_ms=percentile(latencies, 0.95),
        p99_ms=percentile(latencies, 0.99),
        max_ms=percentile(latencies, 1),
        errors=dict(sum((Counter(part["errors"]) for part in parts), Counter())),
        lateness_p50_ms=percentile(lateness, 0.5),
        lateness_p99_ms=percentile(lateness, 0.99),
        busiest_client=max(part["busy"] for part in parts),
        clients=len(parts),
        connections=sum(part["connections"] for part in parts),
        waited_for_connection=sum(part["waited_for_connection"] for part in parts),
    )


class Clients:
    """Client processes, as many as a rate needs: ``with Clients(file) as clients: clients.step(load)``."""

    def __init__(self, requests: Path, client_rate: float = CLIENT_RATE) -> None:
        """``requests`` is a file of JSON: {"path": …, "bodies": [text, …]}."""
        self._requests = requests
        self._client_rate = client_rate
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start_for(self, rate: float) -> int:
        """Starts as many processes as a rate needs; returns their number."""
        count = max(1, math.ceil(rate / self._client_rate))
        while len(self._processes) < count:
            self._processes.append(self._start())
        return count

    def step(self, load: Load) -> Step:
        """Sends ``load.rate`` requests per second in all, starting ``HEAD_START_S`` from now."""
        count = self.start_for(load.rate)
        used = self._processes[:count]
        start = time.monotonic() + HEAD_START_S
        for number, process in enumerate(used):
            own = replace(
                load,
                rate=load.rate / count,
                start=start,
                phase=number / count,
                seed=load.seed + 1000 * number,
                connections=math.ceil(load.connections / count),
                most_connections=math.ceil(load.most_connections / count),
            )
            process.stdin.write(json.dumps(asdict(own)) + "\n")
            process.stdin.flush()
        return merge([self._read(process) for process in used], load.rate, load.seconds)

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, serve_load.__file__, str(self._requests)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read(process)  # waits until it is ready
        return process

    @staticmethod
    def _read(process: subprocess.Popen) -> dict[str, Any]:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a client of the load generator ended with status {process.wait()}")
        return json.loads(line)
