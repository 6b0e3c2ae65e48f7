"""Times training steps of the study's variants, alone on the device, and records which of them fail.

    python -m benchmarks.study.timing --plan plan.json --only tiny-imagenet --data tiny-imagenet=FILE.tar

Each step uses the same batch of real data. Runs of the study share the GPU, so their times say little about a method;
these times do. The study plans with them, and the tables show them.
"""

import argparse
import json
import time
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.study.plan import RESULTS, SOURCE, TIMING, Entry, free_settings, read_plan, with_settings

from intbmoe.files import replace_file, to_json
from intbmoe.recipes import recipe_from_dict
from intbmoe.tasks import make_task
from intbmoe.tasks.base import Examples
from intbmoe.tasks.recipe import Recipe
from intbmoe.train.build import make_optimizer
from intbmoe.train.data import make_generator
from intbmoe.train.distribution import Ranks
from intbmoe.train.run import git_state
from intbmoe.train.step import Stepper

WARM_UPS = 5
STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure training steps alone on the device.")
    add = parser.add_argument
    add("--plan", type=Path, required=True)
    add("--only", required=True, help="one study of the plan")
    add("--stages", nargs="+", default=["first", "methods", "compute", "ablations"])
    add("--data", action="append", default=[], help="study=PATH of its data")
    add("--run-with", action="append", default=[], help="key=value of a setting that changes no result")
    add("--output", type=Path, default=RESULTS)
    add("--pack", type=Path, help="a second folder for the file, to copy back")
    add("--seconds", type=float, default=120.0, help="time limit; the next call measures the rest")
    add("--steps", type=int, default=STEPS)
    add("--commit", help="the commit of the source, if this is a copy of a checkout")
    options = parser.parse_args()
    began = time.monotonic()
    entries = [entry for entry in read_plan(options.plan) if entry.study == options.only]
    entries = list({e.label: e for e in reversed(entries) if e.stage in options.stages}.values())[::-1]
    data = dict(text.split("=", 1) for text in options.data)
    path = options.output / TIMING.format(options.only)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    timing: dict[str, Any] = {"study": options.only, "kind": kind, "rows": {}}
    if path.is_file() and (found := json.loads(path.read_text(encoding="utf-8")))["kind"] == kind:
        timing["rows"] = {label: row for label, row in found["rows"].items() if "step_ms" in row}
    timing["device"] = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
    timing["torch"] = torch.__version__
    examples, commit = None, options.commit or (git_state(SOURCE) or {}).get("commit")
    for entry in entries:
        if entry.label in timing["rows"] or time.monotonic() - began > options.seconds:
            continue
        recipe = _recipe(entry, data.get(entry.study), options.run_with)
        examples = examples or make_task(recipe).split("train")
        row = _measure(recipe, examples, options.steps)
        timing["rows"][entry.label] = {**row, "commit": commit, "date": datetime.now(UTC).date().isoformat()}
        shown = f"{row['step_ms']:.1f} ms" if "step_ms" in row else row["error"].splitlines()[-1]
        print(f"{time.monotonic() - began:6.0f} s  {entry.label:28} {shown}", flush=True)
        for folder in filter(None, (options.output, options.pack)):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / path.name, to_json(timing))


def _recipe(entry: Entry, path: str | None, run_with: list[str]) -> Recipe:
    recipe = with_settings(recipe_from_dict(entry.recipe), free_settings(run_with))
    return replace(recipe, data=replace(recipe.data, path=path)) if path else recipe


def _measure(recipe: Recipe, examples: Examples, steps: int) -> dict[str, Any]:
    try:
        return _time(recipe, examples, steps)
    except Exception:  # the file records it, and the next method is still measured
        return {"error": traceback.format_exc()}
    finally:
        torch.cuda.empty_cache()


def _time(recipe: Recipe, examples: Examples, steps: int) -> dict[str, Any]:
    settings, task = recipe.train, make_task(recipe)
    ranks = Ranks(settings.precision)
    torch.manual_seed(0)
    model = ranks.place(task.make_model().train(), settings)
    stepper = Stepper(task, model, make_optimizer(model, settings), ranks, settings)
    micro = settings.device_batch or settings.batch
    chosen = torch.randperm(len(examples), generator=make_generator(0, "timing"))[: settings.batch].tolist()
    reads = [examples.batch(chosen[at : at + micro], 0, 0) for at in range(0, len(chosen), micro)]
    batches = [task.prepare(ranks.to_device(batch), make_generator(0, "prepare")) for batch in reads]
    on_gpu = ranks.device.type == "cuda"
    times = []
    for step in range(WARM_UPS + steps):
        begin = time.perf_counter()
        stepper.take(step + 1, batches, 0)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return {
        "step_ms": median(times[WARM_UPS:]),
        "first_step_ms": times[0],
        "examples": len(chosen),
        "captured": getattr(settings, "capture", False),
    }


if __name__ == "__main__":
    main()
