"""Measures a running server under open-loop load: how many requests per second it answers within its latency budget.

    python benchmarks/serve.py                                      # two CPU cores, embedded journeys: half an hour
    python benchmarks/serve.py --variants precomposed --experts --seconds 300 --json figures.json
    python benchmarks/serve.py --recipe inttravel-like --device cuda --dtype bfloat16 --fronts 6 --seconds 560
    python benchmarks/serve.py --variants precomposed --experts --fronts 1 2 --seconds 300     # one front, then two

Each variant is exported and served by ``intbmoe serve`` on loopback. Requests are sent at rising rates until the budget
is exceeded (P99, mean or any error), then at rates between the last good one and the first bad one. A failing rate is
tried once more before it counts. ``benchmarks/README.md`` says how latency is counted.
"""

import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import serve_tables as tables
import tyro
from measure import machine, write
from rich.console import Console
from serve_artifacts import SWEEP, IntTravelLike, Journeys, Variant, make_variants, write_requests
from serve_clients import CLIENT_RATE, HEAD_START_S, Clients
from serve_load import Load
from serve_search import Budget, find_highest
from serve_server import Server, Watch
from serve_tables import Measured, Target, plain

console = Console(width=None if sys.stdout.isatty() else 165)
ENOUGH = 500
"""Requests that a step should have, if three times its usual length is enough for them."""
TRIES = 2
TARGET = Target(rate=5000, mean_ms=19.0, p99_ms=38.0)
"""The paper's figures."""
PROBES, ANSWERS = 4, 10
RESERVE_S = 8.0
"""Time to stop the last server and print the tables."""


@dataclass(frozen=True)
class Usual:
    """A recipe's default settings for the measurement."""

    rates: tuple[float, ...]
    p99_ms: float
    mean_ms: float | None
    experts: tuple[int, ...]
    fronts: int


USUAL = {
    "journeys": Usual((50, 100, 200, 400), 60.0, None, SWEEP, 1),
    "inttravel-like": Usual((250, 1000, 2500, 5000), TARGET.p99_ms, TARGET.mean_ms, (), 6),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of the measurement."""

    recipe: Literal["journeys", "inttravel-like"] = "journeys"
    """inttravel-like: the paper's travel model with random weights and made-up places."""
    variants: tuple[Literal["dense", "precomposed", "composing"], ...] = ("precomposed", "dense", "composing")
    experts: tuple[int, ...] | None = None
    """Also measure these E, with random weights. Default: 1, 2, … 128 for journeys, none for inttravel-like."""
    seconds: float = 1800.0
    """Time limit; measurements that do not fit are left out."""
    rates: tuple[float, ...] | None = None
    """Initial rates in requests per second, rising. All variants are compared at the first. With several --fronts,
    these are for the smallest number; with twice as many fronts, rates begin twice as high."""
    most_rate: float = 20_000.0
    p99_ms: float | None = None
    """The budget, which is also passed to the server. Default: 60, for inttravel-like 38."""
    mean_ms: float | None = None
    """Default: none, for inttravel-like 19."""
    step_seconds: float = 6.0
    warm_seconds: float = 1.5
    resolution: float = 0.1
    """The search ends when the best good rate and the worst bad rate are this close."""
    arrivals: Literal["poisson", "fixed"] = "poisson"
    seed: int = 0
    places: int = 1_000_000
    """Of inttravel-like."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    workers: int = 1
    fronts: tuple[int, ...] | None = None
    """HTTP processes; several numbers are tried one after another."""
    connections: int = 64
    """Connections that all clients together keep open; more are opened if these are not enough."""
    client_rate: float = CLIENT_RATE
    """Maximum number of requests per second that one client process sends."""
    serve: str = ""
    """More options for intbmoe serve, as one string."""
    server_log: Path | None = None
    """File for the servers' output."""
    artifacts: Path | None = None
    """Folder where artifacts and runs are kept for reuse. Default: a temporary folder."""
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """File for all figures, written after each variant."""

    @property
    def usual(self) -> Usual:
        return USUAL[self.recipe]

    @property
    def budget(self) -> Budget:
        return Budget(self.p99_ms or self.usual.p99_ms, self.mean_ms or self.usual.mean_ms)

    @property
    def front_counts(self) -> tuple[int, ...]:
        return self.fronts or (self.usual.fronts,)

    def ladder(self, fronts: int) -> tuple[float, ...]:
        return tuple(rate * fronts / min(self.front_counts) for rate in sorted(self.rates or self.usual.rates))

    @property
    def patience_s(self) -> float:
        """How long to wait for answers: a server gives up on a request after ten budgets."""
        return 10 * self.budget.p99_ms / 1000 + 1

    def server_options(self, fronts: int | str) -> list[str]:
        options = {
            "--budget-ms": self.budget.p99_ms,
            "--workers": self.workers,
            "--fronts": fronts,
            "--device": self.device,
        }
        return [*(str(part) for pair in options.items() for part in pair), *shlex.split(self.serve)]

    def models(self, folder: Path) -> Journeys | IntTravelLike:
        if self.recipe == "journeys":
            return Journeys(folder, self.dtype)
        return IntTravelLike(folder, self.dtype, self.places, self.device)


class Bench:
    """Serves and measures one variant after another."""

    def __init__(self, options: Options, folder: Path, end: float) -> None:
        self._options, self._end = options, end
        self._models = options.models(options.artifacts or folder)
        self._requests = folder / "requests.json"

    def run(self, variants: Sequence[Variant], tell: Callable[[list[Measured]], None]) -> list[Measured]:
        """Measures as much as there is time for; ``tell`` gets all results so far after each variant."""
        done: list[Measured] = []
        pairs = list(product(variants, self._options.front_counts))
        with Clients(self._requests, self._options.client_rate) as clients:
            for number, (variant, fronts) in enumerate(pairs):
                # The recipe's own models get twice as much time as those of the sweep.
                weights = [1 if one.experts else 2 for one, _ in pairs[number:]]
                now = time.monotonic()
                until = now + (self._end - now) * weights[0] / sum(weights)
                if until - now < self._step_seconds(self._options.ladder(fronts)[0]):
                    console.print(f"no time left for {variant.name} with {fronts} fronts and later variants")
                    break
                measured = Measured(variant, self._models.artifact(variant), fronts)
                if not self._requests.exists():
                    write_requests(self._requests, self._models.requests(measured.artifact))
                try:
                    self._measure(measured, clients, until)
                except (RuntimeError, OSError) as error:  # the other variants can still be measured
                    measured.failure = str(error)
                done.append(measured)
                tell(done)
        return done

    def _measure(self, measured: Measured, clients: Clients, until: float) -> None:
        options = self._options
        fronts, path = measured.fronts, measured.artifact.path
        with Server(path, options.server_options(fronts), fronts, options.server_log) as server:
            measured.start_s = server.start_s
            self._probe(server)

            def holds(rate: float) -> bool | None:
                for _ in range(TRIES):
                    if time.monotonic() + self._step_seconds(rate) > until:
                        measured.out_of_time = True
                        return None
                    step = self._step(server, clients, rate, len(measured.steps))
                    measured.steps.append(step)
                    if step["breach"] is None:
                        return True
                return False

            most, rates = options.most_rate, options.ladder(fronts)
            measured.highest = find_highest(holds, rates, most=most, resolution=options.resolution)
            measured.reached_most = measured.highest == most

    def _counted_seconds(self, rate: float) -> float:
        usual = self._options.step_seconds
        return min(max(usual, ENOUGH / rate), 3 * usual)

    def _step_seconds(self, rate: float) -> float:
        return HEAD_START_S + self._options.warm_seconds + self._counted_seconds(rate) + self._options.patience_s

    def _step(self, server: Server, clients: Clients, rate: float, number: int) -> dict[str, Any]:
        options = self._options
        load = Load(
            port=server.port,
            rate=rate,
            seconds=self._counted_seconds(rate),
            warm_s=options.warm_seconds,
            arrivals=options.arrivals,
            seed=options.seed + number,
            connections=options.connections,
            patience_s=options.patience_s,
        )
        clients.start_for(rate)
        watch = Watch(server, clients.pids)
        step = clients.step(load)
        return {**plain(step), "breach": options.budget.breach(step), "server": watch.end()}

    def _probe(self, server: Server) -> None:
        """Checks that the server answers correctly, before it gets thousands of requests."""
        content = json.loads(self._requests.read_text())
        for body in content["bodies"][:PROBES]:
            status, answer = server.post(content["path"], body)
            if status != 200 or len(answer["results"]) != ANSWERS:
                raise RuntimeError(f"the server answers {status}: {answer}\n{server.log}")


def main(options: Options) -> None:
    end = time.monotonic() + options.seconds - RESERVE_S
    # sys.exit also ends the server and the clients.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"the {options.seconds:g} s of --seconds are over"))
    signal.setitimer(signal.ITIMER_REAL, options.seconds - RESERVE_S / 2)
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/serve.py", *sys.argv[1:]]),
        "machine": machine(options.device),
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()},
        "server_options": options.server_options("/".join(map(str, options.front_counts))),
        "budget": asdict(options.budget),
    }
    tables.print_about(console, about, options.recipe)

    def tell(done: list[Measured]) -> None:
        tables.print_steps(console, done[-1], options.budget)
        if options.json_file is not None:
            write(options.json_file, about | {"variants": [one.to_json() for one in done]})

    experts = options.usual.experts if options.experts is None else options.experts
    with tempfile.TemporaryDirectory(prefix="serve-benchmark-") as folder:
        done = Bench(options, Path(folder), end).run(make_variants(options.variants, experts), tell)
        tables.print_summary(console, done, options.ladder(min(options.front_counts))[0])
    if options.recipe == "inttravel-like":
        tables.print_target(console, done, TARGET)
    if any(measured.failure for measured in done):
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__.splitlines()[0], config=(tyro.conf.FlagCreatePairsOff,)))
