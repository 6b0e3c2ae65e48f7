"""Measures a running server that generates text: tokens per second and time to the first token, by number of clients.

    python benchmarks/serve_texts.py --device cuda --dtype bfloat16 --fronts 4
    python benchmarks/serve_texts.py --tiny --clients 1 2 --rounds 2 --new-tokens 4  # a dry run

``intbmoe serve`` serves the paper's 18-layer decoder with random weights on loopback. Each client reads streamed texts
and sends its next request as soon as the last one is answered. Tokens are drawn at temperature 1, so that texts take
different blocks. ``benchmarks/generate.py`` measures an engine without HTTP.
"""

import asyncio
import gc
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from measure import figures_table, machine, write
from rich.console import Console
from serve_artifacts import Texts, Variant
from serve_clients import percentile
from serve_load import post
from serve_readers import read_texts
from serve_server import Server, Watch

console = Console(width=None if sys.stdout.isatty() else 165)
LINES = "Accept: application/x-ndjson"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of the measurement."""

    clients: tuple[int, ...] = (1, 4, 16, 64)
    variant: Literal["precomposed", "dense", "composing"] = "precomposed"
    prompt_tokens: tuple[int, int] = (32, 128)
    """Smallest and largest number."""
    new_tokens: int = 80
    rounds: int = 6
    """Texts per client, on average."""
    length: int = 128
    """Maximum number of prompt tokens that the server allows, and also of new tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    fronts: int = 1
    serve: str = ""
    """More options for intbmoe serve, as one string."""
    tiny: bool = False
    """Use a tiny decoder, whose figures mean nothing."""
    server_log: Path | None = None
    artifacts: Path | None = None
    """Folder where the artifact is kept for reuse. Default: a temporary folder."""
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """File for all figures, written after each number of clients."""

    @property
    def server_options(self) -> list[str]:
        options = {"--streams": max(self.clients), "--fronts": self.fronts, "--device": self.device}
        return [*(str(part) for pair in options.items() for part in pair), *shlex.split(self.serve)]


def make_requests(texts: Texts, options: Options, count: int) -> list[bytes]:
    few, most = options.prompt_tokens
    sizes = np.random.default_rng(count).integers(few, most + 1, count).tolist()
    shared = {"max_tokens": options.new_tokens, "temperature": 1.0}
    bodies = [{"prompt": prompt, "seed": seed, **shared} for seed, prompt in enumerate(texts.prompts(sizes))]
    return [post("/v1/generate", json.dumps(body).encode(), LINES) for body in bodies]


def measure(server: Server, texts: Texts, options: Options, clients: int) -> dict[str, Any]:
    requests = make_requests(texts, options, clients * options.rounds)
    asyncio.run(read_texts(server.port, clients, requests[:clients]))  # not counted
    gc.collect()
    watch = Watch(server, [os.getpid()])
    written, seconds = asyncio.run(read_texts(server.port, clients, requests))
    seen = watch.end()
    tokens = sum(text.tokens for text in written)
    if tokens != len(requests) * options.new_tokens:
        raise RuntimeError(f"expected {len(requests)} texts of {options.new_tokens} tokens, got {tokens} tokens in all")
    firsts = sorted(1e3 * text.first for text in written)
    return {
        "clients": clients,
        "texts": len(written),
        "tokens_per_s": tokens / seconds,
        "token_ms": 1e3 * median(text.each for text in written),
        "first_ms": {"p50": median(firsts), "p95": percentile(firsts, 0.95), "max": firsts[-1]},
        "step_ms": seen["compute_ms"],
        "cores": seen["cores"],
    }


def show(found: Sequence[dict[str, Any]], options: Options) -> None:
    few, most = options.prompt_tokens
    title = f"Texts over HTTP: prompts of {few} to {most} tokens, {options.new_tokens} new ones"
    columns = ("tokens/s", "ms a token", "first token ms: P50", "P95", "max", "step ms", "cores: fronts", "engines")
    table = figures_table(title, "clients", *columns, "client")
    for one in found:
        first, cores = one["first_ms"], one["cores"]
        figures = (one["token_ms"], first["p50"], first["p95"], first["max"], one["step_ms"])
        used = (cores.get(role, float("nan")) for role in ("fronts", "engines", "clients"))
        cells = (f"{number:.2f}" for number in (*figures, *used))
        table.add_row(str(one["clients"]), f"{one['tokens_per_s']:,.0f}", *cells)
    console.print(table)


def main(options: Options) -> None:
    # sys.exit also ends the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/serve_texts.py", *sys.argv[1:]]),
        "machine": machine(options.device),
    }
    console.print(about["command"], markup=False, highlight=False)
    console.print(", ".join(f"{key} {value}" for key, value in about["machine"].items()), highlight=False)
    console.print("Random weights, made-up words: only time is measured here.")
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = options.artifacts or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-texts-")))
        started = time.monotonic()
        texts = Texts(folder, options.dtype, options.length, options.device, options.tiny)
        artifact = texts.artifact(Variant(options.variant))
        console.print(f"artifact ready after {time.monotonic() - started:.1f} s")
        server = stack.enter_context(Server(artifact.path, options.server_options, options.fronts, options.server_log))
        console.print(f"server ready after {server.start_s:.1f} s")
        stack.callback(lambda: show(found, options))  # also if it ends early
        for clients in options.clients:
            found.append(measure(server, texts, options, clients))
            if options.json_file is not None:
                write(options.json_file, about | {"server_start_s": server.start_s, "texts": found})


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__.splitlines()[0], config=(tyro.conf.FlagCreatePairsOff,)))
