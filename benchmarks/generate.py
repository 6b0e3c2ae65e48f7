"""Measures text generation with the paper's 18-layer decoder: ms per token, and tokens per second for many texts.

    python benchmarks/generate.py                      # about two minutes on a GPU
    python benchmarks/generate.py --json figures.json  # also every figure
    python benchmarks/generate.py --sections steps     # some of: steps, writer

The decoder has the sizes of the MiniPile recipe and random weights in bfloat16. Prompts have 128 tokens, and decoding
is greedy.

- steps: time per token of ``Llama.generate``, captured and uncaptured, and of Hugging Face's ``generate`` with the same
  weights, without the time of the first tokens; captured times are the median of three calls. "equal" is the share of
  captured tokens that equal the uncaptured ones with the same weights in float32, where rounding matters less often.
- writer: a server's engine without HTTP. Each client sends its next request as soon as the last one is answered. Next
  to it is Hugging Face's ``generate``, with one batch after another of as many requests as there are clients.

A dry run without a GPU: python benchmarks/generate.py --device cpu --tiny
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_timing import describe, number, print_table, reason, say, synchronize
from measure import write
from torch import Tensor

import intbmoe
from intbmoe.models.llama import Llama, LlamaConfig
from intbmoe.precomposition import cast_for_serving
from intbmoe.tasks.language.continuation import Continuation, Writer
from intbmoe.tasks.language.vocabulary import ByteVocabulary
from intbmoe.tasks.serving import Encoded

BLOCKS = {"experts": 8, "blocks": 8, "top_k": 2, "code_dim": 32, "router_dim": 64, "hyper_dim": 16}
PRECOMPOSED = "IntBMoE precomposed"
WAYS = ("captured", "uncaptured", "Hugging Face")
BATCHES, GOALS = (1, 16), {1: 4.0, 16: 5.0}
CLIENTS = (1, 4, 16, 32, 64)
ROUNDS = 3
"""Requests of each client; also the number of captured calls whose median is taken."""


def decoders(device: torch.device, tiny: bool) -> dict[str, tuple[Llama, Llama]]:
    """Builds each decoder in float32 and as it is served: in bfloat16, except for routers."""
    sizes = LlamaConfig(vocabulary=300, dim=24, depth=2, heads=2, hidden=48) if tiny else LlamaConfig()
    width = 40 if tiny else 2844
    torch.manual_seed(0)
    with torch.device(device):
        mixture = Llama(sizes, lambda: intbmoe.create("intbmoe", sizes.dim, [width], **BLOCKS)).eval()
        dense = Llama(sizes).eval()
    # With small random weights the model repeats one token forever; with larger ones it does not.
    with torch.no_grad():
        for model in (mixture, dense):
            for parameter in model.layers.parameters():
                parameter.mul_(3 if parameter.dim() == 2 else 1)
    composed = intbmoe.precompose(mixture), intbmoe.precompose(mixture, torch.bfloat16)
    return {"dense": (dense, served(dense)), "IntBMoE": (mixture, served(mixture)), PRECOMPOSED: composed}


def served(model: Llama) -> Llama:
    half = copy.deepcopy(model)
    cast_for_serving(half, torch.bfloat16)
    return half


def seconds_of(call: Callable[[int], Tensor], tokens: int, device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    assert call(tokens).shape[-1] >= tokens
    synchronize(device)
    return time.perf_counter() - started


def step_ms(call: Callable[[int], Tensor], few: int, many: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Measures milliseconds per token: of the later tokens alone, and of a whole call."""
    seconds_of(call, few, device)
    if rounds > 1:
        seconds_of(call, many, device)
    pairs = [(seconds_of(call, few, device), seconds_of(call, many, device)) for _ in range(rounds)]
    later = statistics.median((long - short) / (many - few) for short, long in pairs)
    return {"step": 1e3 * later, "call": 1e3 * statistics.median(long for _, long in pairs) / many}


def huggingface(model: Llama) -> Callable[..., Tensor]:
    from intbmoe.huggingface.conversion import from_backbone

    theirs = from_backbone(model).eval()

    def generate(ids: Tensor, tokens: int) -> Tensor:
        with torch.inference_mode():
            new = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
            return theirs.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **new)[:, ids.shape[1] :]

    return generate


def time_steps(
    models: dict[str, tuple[Llama, Llama]], device: torch.device, length: int, few: int, many: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for batch in BATCHES:
        ids = torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(batch)).to(device)
        rows = []
        for name, (exact, half) in models.items():
            entry = found[f"{name}, batch {batch}"] = time_model(exact, half, ids, few, many)
            cells = [number(entry[way][key], 2) if way in entry else "–" for way in WAYS for key in ("step", "call")]
            rows.append((name, *cells, f"{entry['equal']:.1%}"))
        over = ("", *(cell for way in WAYS for cell in (way, "")), "")
        header = ("model", *("step", "call") * 3, "equal")
        print_table(f"Batch {batch}: ms per token (goal {GOALS[batch]})", header, rows, over=over)
    return found


def time_model(exact: Llama, half: Llama, ids: Tensor, few: int, many: int) -> dict[str, Any]:
    calls = {
        "captured": lambda n: half.generate(ids, max_new_tokens=n, capture=True),
        "uncaptured": lambda n: half.generate(ids, max_new_tokens=n, capture=False),
    }
    try:
        theirs = huggingface(half)
        calls["Hugging Face"] = lambda n: theirs(ids, n)
    except Exception as error:
        say(f"Hugging Face left out: {reason(error)}")
    rounds = {"captured": ROUNDS}
    entry: dict[str, Any] = {
        way: step_ms(call, few, many, ids.device, rounds.get(way, 1)) for way, call in calls.items()
    }
    captured, plain = (exact.generate(ids, max_new_tokens=many, capture=way) for way in (True, False))
    exact.kept_slots = half.kept_slots = None
    return {**entry, "equal": float((captured == plain).double().mean()), "different_tokens": len(plain.unique())}


def time_writer(model: Llama, device: torch.device, length: int, many: int) -> dict[str, Any]:
    found, rows = {}, []
    try:
        theirs = huggingface(model)
    except Exception as error:
        say(f"Hugging Face left out: {reason(error)}")
        theirs = None
    random = np.random.default_rng(0)
    writer = Writer(model, ByteVocabulary(-1), CLIENTS[-1], length + many)
    started = time.perf_counter()
    writer.slots.record()
    say(f"{len(writer.slots.graphs)} graphs captured in {time.perf_counter() - started:.1f} s")
    for clients in CLIENTS:
        sizes = random.integers(length // 4, length + 1, clients * ROUNDS).tolist()
        requests = [_request(random, size, many) for size in sizes]
        synchronize(device)
        begin = time.perf_counter()
        going, firsts, steps = [], [], []
        while requests or going:
            while requests and len(going) < clients:
                going.append([Continuation(writer, [requests.pop()]), time.perf_counter(), False])
            started = time.perf_counter()
            for text in list(going):
                if next(text[0], None) is None:
                    going.remove(text)
                elif not text[2]:
                    text[2] = True
                    firsts.append(time.perf_counter() - text[1])
            steps.append(time.perf_counter() - started)
        ours = clients * ROUNDS * many / (time.perf_counter() - begin)
        entry = {"tokens_per_s": ours, "step_ms": 1e3 * statistics.median(steps)}
        entry["first_ms"] = 1e3 * statistics.median(firsts)
        if theirs is not None:
            ids = torch.randint(256, (clients, length), device=device)
            theirs(ids, 2)
            entry["huggingface_tokens_per_s"] = clients * many / seconds_of(lambda n, i=ids: theirs(i, n), many, device)
        found[clients] = entry
        figures = (entry["tokens_per_s"], entry["step_ms"], entry["first_ms"], entry.get("huggingface_tokens_per_s"))
        digits = (0, 2, 1, 0)
        rows.append((str(clients), *(number(one, places) for one, places in zip(figures, digits, strict=True))))
    header = ("clients", "tokens/s", "step ms", "first token ms", "Hugging Face tokens/s")
    print_table(f"Texts at a time: prompts of {length // 4} to {length} tokens, {many} new ones", header, rows)
    return found


def _request(random: np.random.Generator, size: int, many: int) -> Encoded:
    payload = {"ids": random.integers(0, 256, size), "max_tokens": many, "temperature": 0.0, "seed": 0}
    return Encoded(size + many, payload)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write every figure here")
    parser.add_argument("--sections", nargs="+", choices=("steps", "writer"), default=("steps", "writer"))
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, whose figures mean nothing")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    facts = describe(device)
    say(", ".join(f"{key} {value}" for key, value in facts.items()))
    models, results = decoders(device, arguments.tiny), {"facts": facts}
    length, few, many = (8, 2, 6) if arguments.tiny else (128, 16, 80)
    if "steps" in arguments.sections:
        results["steps"] = time_steps(models, device, length, few, many)
    if "writer" in arguments.sections:
        results["writer"] = time_writer(models[PRECOMPOSED][1], device, length, many)
    if arguments.json:
        write(arguments.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
