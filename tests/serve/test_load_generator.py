"""The benchmark's load generator: latency counts from the intended arrival, whatever the server and connections do."""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

from serve_clients import Clients, merge, percentile  # noqa: E402
from serve_load import LOST, NO_ANSWER, NO_CONNECTION, Load, due_times, post, send  # noqa: E402
from serve_search import Budget, find_highest  # noqa: E402

BODY = b'{"n": 1}'
REQUEST = post("/v1/recommend", BODY)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
FULL = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n"
LAST = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"


class Server:
    """Answers ``answer(request number)``; ``stall`` = (requests, seconds) is one pause after that many requests."""

    def __init__(self, answer=lambda number: OK, stall=None):
        self.answer, self.stall = answer, stall
        self.requests = self.connections = 0

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self.thread.start()
        started.wait()
        return self

    def _run(self, started):
        asyncio.set_event_loop(self.loop)
        listening = self.loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = listening.sockets[0].getsockname()[1]
        started.set()
        self.loop.run_forever()
        listening.close()
        serving = asyncio.all_tasks(self.loop)
        for task in serving:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*serving, return_exceptions=True))
        self.loop.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while await reader.readexactly(len(REQUEST)):
                self.requests += 1
                if self.stall and self.requests == self.stall[0]:
                    time.sleep(self.stall[1])  # no request is served meanwhile
                answer = self.answer(self.requests)
                if answer is None:
                    writer.close()
                    return
                writer.write(answer)
        except asyncio.IncompleteReadError:
            writer.close()

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


def run(server, **load):
    load = {"rate": 200, "seconds": 0.5, "arrivals": "fixed", "connections": 2, **load}
    load = Load(port=server.port, start=time.monotonic() + 0.1, **load)
    return merge([send(load, [REQUEST])], load.rate, load.seconds)


@pytest.mark.parametrize("most_connections", [1, 64])
def test_a_stall_shows_in_every_request_that_was_due_in_it(most_connections):
    stall = 0.2
    with Server(stall=(40, stall)) as server:
        load = Load(
            port=server.port,
            start=time.monotonic() + 0.1,
            rate=200,
            seconds=1.0,
            arrivals="fixed",
            connections=1,
            most_connections=most_connections,
        )
        figures = send(load, [REQUEST])
    latencies = figures["latencies_ms"]
    assert len(latencies) == figures["due"] == 200
    # While the server pauses for 0.2 s, 40 requests become due, one every 5 ms, and each waits at least for what
    # is left. Counting from when a request is sent would show one slow request for each connection.
    slowest = sorted(latencies, reverse=True)
    for number in range(int(200 * stall) - 1):
        assert slowest[number] >= 1e3 * (stall - (number + 1) / 200)
    step = merge([figures], 200, 1.0)
    assert step.p99_ms >= 1e3 * (stall - 2 / 200)
    assert step.p95_ms >= 1e3 * (stall - 11 / 200)


def test_every_outcome_is_counted():
    with Server(lambda number: FULL if number % 4 == 0 else None if number % 10 == 1 else OK) as server:
        step = run(server)
    assert step.due == 100
    assert step.errors["429"] == 25
    assert step.errors[LOST] == 10
    assert step.answered == 65
    assert set(step.errors) == {"429", LOST}


def test_no_answer_and_no_connection_are_errors():
    with Server(lambda number: OK if number <= 50 else b"") as server:
        silent = run(server, patience_s=0.4, most_connections=8)
        assert silent.errors == {NO_ANSWER: 50}
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = nobody.getsockname()[1]
        figures = send(Load(port=port, start=time.monotonic(), rate=100, seconds=0.2, patience_s=0.2), [REQUEST])
    assert figures["errors"] == {NO_CONNECTION: figures["due"]}


def test_connections_are_kept_and_renewed_when_the_server_closes_them():
    with Server() as server:
        step = run(server, most_connections=2)
        assert (step.answered, server.connections) == (100, 2)
    with Server(lambda number: LAST if number % 20 == 0 else OK) as server:
        step = run(server)
        assert (step.answered, step.errors) == (100, {})
        assert server.connections >= 5


def test_what_is_sent_to_warm_up_does_not_count():
    with Server() as server:
        step = run(server, warm_s=0.5)
        assert step.due == step.answered == 100
        assert server.requests == 200
    # Counting the warm-up would give 400. A few answers may fall on the other side of the window's edges.
    assert 0 < step.throughput < 300


def test_arrivals_follow_rate_and_seed():
    load = Load(port=0, rate=500, seconds=20)
    due = due_times(load)
    assert due == due_times(load) != due_times(Load(port=0, rate=500, seconds=20, seed=1))
    assert len(due) == pytest.approx(10_000, rel=0.04)
    gaps = [after - before for before, after in itertools.pairwise(due)]
    spread = sum((gap * 500 - 1) ** 2 for gap in gaps) / len(gaps)
    assert spread == pytest.approx(1, abs=0.1)  # of an exponential, variance is the mean squared
    even = due_times(Load(port=0, rate=4, seconds=1, arrivals="fixed", phase=0.5))
    assert even == [0.125, 0.375, 0.625, 0.875]


def test_client_processes_share_a_rate(tmp_path):
    file = tmp_path / "requests.json"
    file.write_text(json.dumps({"path": "/v1/recommend", "bodies": [BODY.decode()]}))
    with Server() as server, Clients(file, client_rate=100) as clients:
        load = Load(port=server.port, rate=200, seconds=0.5, arrivals="fixed", connections=4)
        step = clients.step(load)
    assert (step.clients, step.due, step.answered, step.errors) == (2, 100, 100, {})


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
import serve_load
serve_load.main(sys.argv[1])
"""


def test_figures_of_many_requests_arrive_whole(tmp_path):
    """A pipe holds 65,536 bytes: a signal that interrupts a longer write must not cut the line, buffered or not."""
    file = tmp_path / "requests.json"
    file.write_text(json.dumps({"path": "/v1/recommend", "bodies": [BODY.decode()]}))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-c", INTERRUPTED, str(file)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with socket.socket() as nobody, subprocess.Popen(command, text=True, env=environment, **pipes) as client:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: every request fails at once
        load = Load(port=nobody.getsockname()[1], rate=30_000, seconds=0.5, arrivals="fixed", patience_s=0.2)
        client.stdin.write(json.dumps(asdict(load)) + "\n")
        client.stdin.close()
        time.sleep(2)  # the client waits for a reader meanwhile
        ready, figures = client.stdout.readlines()
    assert json.loads(ready) == {}
    assert len(figures) > 65_536
    assert json.loads(figures)["due"] == 15_000


def test_percentiles_are_values_that_occurred():
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1)] == [50, 95, 99, 100]


@pytest.mark.parametrize("limit", [3, 10, 55, 700, 12_345])
def test_search_comes_as_near_to_the_limit_as_it_says(limit):
    tried = []

    def measure(rate):
        tried.append(rate)
        return rate <= limit

    highest = find_highest(measure, (20, 50, 100), most=1e6, resolution=0.1)
    assert highest <= limit < 1.11 * highest
    assert tried[0] == 20


def test_search_ends_with_what_it_knows_when_time_is_over():
    answers = iter([True, True, None])
    assert find_highest(lambda rate: next(answers), (10, 20, 40), most=1e6, resolution=0.1) == 20
    assert find_highest(lambda rate: None, (10, 20), most=1e6, resolution=0.1) is None
    assert find_highest(lambda rate: True, (10, 20), most=25, resolution=0.1) == 25
    assert find_highest(lambda rate: False, (10,), most=25, resolution=0.1) is None


def test_a_budget_is_broken_by_latency_or_by_any_error():
    with Server(lambda number: FULL if number == 50 else OK) as server:
        step = run(server)
        clean = run(server)
    assert Budget(p99_ms=1e4).breach(step) == "1 of 100: 429"
    assert Budget(p99_ms=1e4).breach(clean) is None
    assert "P99" in Budget(p99_ms=1e-6).breach(clean)
    assert "mean" in Budget(p99_ms=1e4, mean_ms=1e-6).breach(clean)


@pytest.mark.slow
def test_the_profile_of_an_engine_runs_on_a_cpu(tmp_path):
    options = ["--variants", "precomposed", "--places", "200", "--sizes", "1", "3", "--rounds", "1"]
    command = [sys.executable, str(SCRIPTS / "serve_profile.py"), *options, "--json", str(tmp_path / "json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads((tmp_path / "json").read_text())["variants"]
    assert all(found["stages_ms"][size]["answers"] > 0 for size in ("1", "3"))
