"""Shows where the time of a batch goes in one engine: the paper's travel model with random weights, by stage and size.

    python benchmarks/serve_profile.py --device cuda --dtype bfloat16 --artifacts /tmp/served --json stages.json
    python benchmarks/serve_profile.py --places 2000 --sizes 1 4 --rounds 2            # a dry run

Milliseconds are medians. On a GPU, the device times the stages between "copy in" and "copy out"; the host times the
others. "step" is all of ``Engine.step`` and the work before and after it in an engine's process, from messages to
messages. "ordinary" is the same answer with kernels launched one by one.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from measure import figures_table, machine, write
from rich.console import Console
from serve_artifacts import IntTravelLike, Variant

from intbmoe.serve import messages
from intbmoe.serve.engine import Engine, warm_up
from intbmoe.serve.settings import Settings
from intbmoe.tasks.serving.requests import Encoded, from_wire, to_wire
from intbmoe.tasks.travel.captured import CapturedSearch

console = Console(width=None if sys.stdout.isatty() else 165)
RESULTS = 10
ON_DEVICE = ("copy in", "model", "search", "copy out")
STAGES = ("read", "fill", *ON_DEVICE, "answers", "pack", "step", "ordinary")
FOREVER = 1e9


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of the profile."""

    variants: tuple[Literal["dense", "precomposed", "composing"], ...] = ("precomposed", "dense")
    places: int = 1_000_000
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    sizes: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    """Numbers of requests in a batch."""
    rounds: int = 30
    only_make: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Make the artifacts and exit."""
    artifacts: Path | None = None
    """Folder where artifacts are kept for reuse, like those of serve.py."""
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None


class Stages:
    """Times batches of one predictor."""

    def __init__(self, predictor: Any, engine: Engine, rounds: int) -> None:
        self._predictor, self._engine, self._rounds = predictor, engine, rounds
        self._graphs: CapturedSearch = predictor.captured
        self._on_gpu = predictor.device.type == "cuda"

    @torch.inference_mode()  # as in the engine: the graphs' buffers can only be written in this mode
    def measure(self, messages: Sequence[bytes]) -> dict[str, float]:
        """Measures milliseconds by stage for one batch."""
        batch = _read(messages)
        shape = self._graphs.shape_for(batch[: self._graphs.requests[-1]])
        found = {name: [] for name in STAGES}
        self._step(messages)
        for _ in range(self._rounds):
            found["read"].append(_timed(_read, messages))
            found["fill"].append(_timed(self._graphs.fill, batch, shape))
            for name, milliseconds in zip(ON_DEVICE, self._device_stages(batch, shape), strict=True):
                found[name].append(milliseconds)
            values, rows = (part[: len(batch), :RESULTS] for part in self._graphs.read(shape[0], RESULTS))
            found["answers"].append(_timed(self._answers, batch, values, rows))
            found["pack"].append(_timed(_pack, self._answers(batch, values, rows)))
            found["step"].append(_timed(self._step, messages))
        found["ordinary"] = [self._ordinary(batch) for _ in range(3)]
        return {name: median(times) for name, times in found.items()}

    def _answers(self, batch: Sequence[Encoded], values: np.ndarray, rows: np.ndarray) -> list[dict[str, Any]]:
        results, ids = self._predictor.described.results, self._predictor.fields.place.values
        found = zip(batch, rows, values, strict=True)
        return [results(places, scores, ids, encoded.payload["top_n"]) for encoded, places, scores in found]

    def _device_stages(self, batch: Sequence[Encoded], shape: tuple[int, int]) -> list[float]:
        graphs = self._graphs
        used = graphs.fill(batch, shape)
        parts: list[Callable[[], Any]] = [
            lambda: graphs.input.to_device(used),
            graphs.models[shape],
            graphs.searches[shape[0], RESULTS],
            lambda: graphs.read(shape[0], RESULTS),
        ]
        if not self._on_gpu:
            return [_timed(part) for part in parts]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        marks[0].record()
        for part, mark in zip(parts, marks[1:], strict=True):
            part()
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(marks)]

    def _step(self, requests: Sequence[bytes]) -> None:
        for number, message in enumerate(requests):
            self._engine.submit((0, number), FOREVER, message, False)
        answered = 0
        while answered < len(requests):
            replies = self._engine.step()
            answered += len([messages.pack(reply.kind, reply.key[1], *reply.content) for reply in replies])

    def _ordinary(self, batch: Sequence[Encoded]) -> float:
        self._predictor.captured = None
        try:
            return _timed(self._predictor.answer, batch)
        finally:
            self._predictor.captured = self._graphs


def _read(requests: Sequence[bytes]) -> list[Encoded]:
    return [from_wire(message) for message in requests]


def _pack(answers: Sequence[Any]) -> list[bytes]:
    return [messages.pack(messages.ANSWER, 1, answer) for answer in answers]


def _timed(function: Callable[..., Any], *args: Any) -> float:
    started = time.perf_counter()
    function(*args)
    return 1e3 * (time.perf_counter() - started)


def profile(options: Options, models: IntTravelLike, variant: Variant) -> dict[str, Any]:
    artifact = models.artifact(variant)
    started = time.perf_counter()
    predictor = artifact.predictor(options.device)
    most = max(options.sizes)
    settings = Settings(artifact="", budget_ms=FOREVER, batch_tokens=10**7, queue=max(most, 1024))
    engine = Engine(predictor, settings)
    loaded = time.perf_counter()
    warm_up(engine, artifact.golden)
    warm = time.perf_counter()
    if predictor.captured is None:  # on a CPU: the same stages without graphs
        with torch.inference_mode():
            predictor.captured = CapturedSearch(predictor, most)
    requests = models.requests(artifact)
    messages = [to_wire(predictor.encode(requests[number % len(requests)])) for number in range(most)]
    stages = Stages(predictor, engine, options.rounds)
    sizes = {size: stages.measure(messages[:size]) for size in options.sizes if size <= predictor.captured.requests[-1]}
    memory = torch.cuda.max_memory_allocated() / 2**30 if options.device.startswith("cuda") else None
    return {
        "name": variant.name,
        "load_s": loaded - started,
        "warm_up_s": warm - loaded,
        "graphs": len(predictor.captured),
        "peak_gib": memory,
        "stages_ms": sizes,
    }


def show(found: dict[str, Any]) -> None:
    title = f"{found['name']}: loaded in {found['load_s']:.1f} s, warm after {found['warm_up_s']:.1f} s more, "
    table = figures_table(f"{title}{found['graphs']} graphs; ms a batch", "requests", *STAGES, "step, µs a request")
    for size, stages in found["stages_ms"].items():
        cells = (f"{stages[name]:.3f}" for name in STAGES)
        table.add_row(str(size), *cells, f"{1e3 * stages['step'] / size:.1f}")
    console.print(table)


def main(options: Options) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory(prefix="serve-profile-") as folder:
        models = IntTravelLike(options.artifacts or Path(folder), options.dtype, options.places, options.device)
        done = []
        for kind in options.variants:
            if options.only_make:
                models.artifact(Variant(kind))
                continue
            done.append(profile(options, models, Variant(kind)))
            show(done[-1])
            if options.json_file is not None:
                write(options.json_file, {"machine": machine(options.device), "variants": done})


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__.splitlines()[0], config=(tyro.conf.FlagCreatePairsOff,)))
