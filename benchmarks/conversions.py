"""Measures conversions of a trained model: size, error of the layers' outputs, and quality on the test split.

    python benchmarks/conversions.py runs/digits/mixtral/0 --steps 1000

Prints a Markdown table: the run as trained, D²-MoE at several ratios, and IntBMoE of several sizes fitted to it; for a
run of ``--moe.name swiglu``, Dense2MoE with several k.
"""

import argparse
from statistics import fmean
from typing import Any

import torch

from intbmoe.conversion import fit_intbmoe, share_base, split_dense
from intbmoe.tasks import make_task
from intbmoe.train import RunDirectory
from intbmoe.train.distribution import Ranks
from intbmoe.train.evaluation import evaluate_split, load

RATIOS = (0.5, 0.25, 0.1, 0.05)
POOLS = (16, 8, 4, 2)
SPLIT = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a finished run of a method whose router chooses among experts")
    parser.add_argument("--batches", type=int, default=8, help="training batches; the last one measures the error")
    parser.add_argument("--steps", type=int, default=1000, help="steps of fitting each layer")
    given = parser.parse_args()
    run = RunDirectory.existing(given.run)
    recipe, model = run.recipe, load(run)
    task, ranks = make_task(recipe), Ranks(recipe.train.precision)
    examples, size = task.split("train"), recipe.train.batch
    batches = [examples.batch(range(i * size, (i + 1) * size), 0, 0) for i in range(given.batches)]

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        total, count = task.loss(model, task.prepare(batch, None))
        return total / count

    def quality(model: torch.nn.Module) -> float:
        return evaluate_split(task, model, "test", ranks, size, recipe.train.seed, 0).metrics[task.metric]

    print(
        f"| {recipe.moe.name} on {recipe.name} | parameters | of the mixtures | error of outputs | test {task.metric} |"
    )
    print("|---|---|---|---|---|")
    total = sum(p.numel() for p in model.parameters())
    print(f"| as trained | {total:,} | 100 % | 0 | {quality(model):.4f} |", flush=True)
    ways = []
    if recipe.moe.name in ("dense", "swiglu"):
        for k in range(SPLIT, 0, -1):
            options = {"experts": SPLIT, "top_k": k, "steps": given.steps}
            title = f"Dense2MoE, a quarter shared, {k} of {SPLIT} experts"
            ways.append((title, lambda options=options: split_dense(model, batches, loss, **options)))
    else:
        for ratio in RATIOS:
            ways.append((f"D²-MoE, ratio {ratio:g}", lambda ratio=ratio: share_base(model, batches, loss, ratio=ratio)))
        for pool in POOLS:
            options = {"experts": pool, "blocks": 8, "steps": given.steps}
            ways.append((f"IntBMoE, E = {pool}", lambda options=options: fit_intbmoe(model, batches, loss, **options)))
    for title, convert in ways:
        changed, report = convert()
        before, after = (sum(getattr(row, name) for row in report) for name in ("parameters", "parameters_after"))
        error = fmean(row.error for row in report)
        print(
            f"| {title} | {total - before + after:,} | {after / before:.0%} | {error:.3f} | {quality(changed):.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
