"""Continues dense runs as they are and with their FFNs replaced, and compares the losses after equally many tokens.

    for seed in 0 1 2; do intbmoe train stdlib --moe.name dense --train.seed $seed; done
    python benchmarks/upcycle.py runs/stdlib/dense/0 runs/stdlib/dense/1 runs/stdlib/dense/2 --steps 200 --lr 3e-3

Every variant continues from the same weights, on the same batches in a new order, with a fresh AdamW, a warm-up of 5 %
and half a cosine. ``intbmoe.replace_ffn`` replaces the FFNs; ``--options`` are passed to IntBMoE. "wide" is the control
for parameters: one more dense FFN next to each, also starting at zero (DeepSeek with one expert). ``--side-by-side 5``
runs five continuations at a time, each in a separate process.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from statistics import fmean, stdev
from typing import Any

import torch

import intbmoe
from intbmoe.tasks import make_task
from intbmoe.train import RunDirectory
from intbmoe.train.build import learning_rate, make_optimizer
from intbmoe.train.data import derive_seed, plan_batches
from intbmoe.train.distribution import Ranks
from intbmoe.train.evaluation import evaluate_split
from intbmoe.train.step import Stepper, prepared_steps

VARIANTS: dict[str, dict[str, Any] | None] = {
    "dense continued": None,
    "wide, shared": {"method": "deepseek", "start": "shared", "experts": 1, "top_k": 1},
    "intbmoe, shared": {"method": "intbmoe", "start": "shared"},
    "deepseek, copy": {"method": "deepseek", "start": "copy", "experts": 8},
    "deepseek, copy, half redrawn": {"method": "deepseek", "start": "copy", "experts": 8, "redraw": 0.5},
    "switch, copy": {"method": "switch", "start": "copy", "experts": 8},
}
WARMUP = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="finished dense runs, one for each seed")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True, help="peak learning rate of the continuation")
    parser.add_argument("--options", type=json.loads, default={}, help="IntBMoE's options as JSON: '{\"experts\": 8}'")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--side-by-side", type=int, default=1, help="number of continuations at a time")
    given = parser.parse_args()
    jobs = [(run, variant, given.steps, given.lr, given.options) for run in given.runs for variant in given.variants]
    if given.side_by_side == 1:
        losses = [continued(*job) for job in jobs]
    else:  # a failure is reported at the end, when the others are done
        with ProcessPoolExecutor(given.side_by_side, get_context("spawn"), max_tasks_per_child=1) as pool:
            begun = [pool.submit(continued, *job) for job in jobs]
        losses = [job.result() for job in begun]
    results: dict[str, list[float]] = {}
    for (_, variant, *_), loss in zip(jobs, losses, strict=True):
        results.setdefault(variant, []).append(loss)
    base = results.get("dense continued")
    for variant, losses in results.items():
        spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
        against = f", {fmean(a - b for a, b in zip(losses, base, strict=True)):+.4f} against dense" if base else ""
        print(f"{variant}: {fmean(losses):.4f}{spread}{against}")


def continued(path: str, variant: str, steps: int, lr: float, options: dict[str, Any]) -> float:
    """Returns the validation loss after ``steps`` more; prints it with the effect of the replacement."""
    run = RunDirectory.existing(path)
    task, model = make_task(run.recipe), intbmoe.load(path)
    plan = plan_batches(len(task.split("train")), replace(run.recipe.train, steps=steps), 1)
    warmup = WARMUP * steps / plan.steps_per_epoch
    # Not the run's seed: the model has already seen the batches in that order.
    seed = run.recipe.train.seed + 1000
    settings = replace(run.recipe.train, steps=steps, lr=lr, warmup=warmup, seed=seed, workers=0)
    torch.manual_seed(derive_seed(settings.seed, "model"))
    changes = VARIANTS[variant]
    about = f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"
    if changes is not None:
        more = options if changes["method"] == "intbmoe" else {}
        report = intbmoe.replace_ffn(model, **changes, **more)
        about = f"{report.parameters[1]:,} parameters, largest change of a layer {report.largest_change:.3g}"
    ranks = Ranks(settings.precision)
    intbmoe.plan_steps(model.train(), steps)
    model = ranks.place(model, settings)
    optimizer = make_optimizer(model, settings)
    stepper = Stepper(task, model, optimizer, ranks, settings)
    for step, batches in enumerate(prepared_steps(task, task.split("train"), plan, ranks, settings)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings, plan)
        stepper.take(step + 1, batches, 0)
    loss = evaluate_split(task, model, "valid", ranks, plan.micro, settings.seed, 0).metrics["loss"]
    print(f"{path}: {variant}: validation loss {loss:.4f} ({about})", flush=True)
    return loss


if __name__ == "__main__":
    main()
