"""``intbmoe plan``: a table of the ways to train a recipe on many devices, a recommendation, and a picture."""

import sys
from collections.abc import Sequence
from pathlib import Path

from intbmoe.analysis.cost_report import Form
from intbmoe.analysis.scaling import (
    OVERLAPPED,
    Counted,
    Estimate,
    break_even_experts,
    break_even_tokens,
    count_recipe,
    estimate,
)
from intbmoe.report import require_matplotlib
from intbmoe.report.tables import Table
from intbmoe.tasks.recipe import Recipe

TITLES = {
    "ddp": "ddp: whole model on each",
    "fsdp": "fsdp: FSDP2",
    "pools": "pools: slices of pools, FSDP2",
    "experts": "experts: some of the experts, the rest whole",
}
ANOTHER = "a sparse mixture with experts, another model"
GB = 1e9


def print_plan(
    recipe: Recipe, devices: int, memory: float, bandwidth: float, tflops: float, picture: Path | None, form: Form
) -> None:
    if picture is not None:
        require_matplotlib()
    counted = count_recipe(recipe)
    plan_table(recipe, counted, devices, memory, bandwidth, tflops).print(form)
    if picture is not None:
        from intbmoe.analysis.drawing.scaling import draw_scaling
        from intbmoe.report.canvas import save_picture

        save_picture(draw_scaling(counted, recipe, devices), picture)
        sys.stderr.write(f"drawn: {picture}\n")


def plan_table(recipe: Recipe, counted: Counted, devices: int, memory: float, bandwidth: float, tflops: float) -> Table:
    rows = [estimate(counted, scheme, devices, bandwidth, tflops) for scheme in counted.compared]
    fitting = [row for row in rows if row.scheme in counted.ways and row.memory <= memory * GB]
    best = min(fitting, key=lambda row: row.step, default=None)
    records = [
        {
            "scheme": row.scheme,
            "memory_bytes": row.memory,
            "fits": row.memory <= memory * GB,
            "sent_bytes": row.sent,
            "computing_seconds": row.computing,
            "sending_seconds": row.sending,
            "step_seconds": row.step,
            "available": row.scheme in counted.ways,
            "taken": row is best,
        }
        for row in rows
    ]
    cells = [
        [
            TITLES[row.scheme] if row.scheme in counted.ways else ANOTHER,
            f"{row.memory / GB:.2f}{'' if row.memory <= memory * GB else ' too much'}",
            f"{row.sent / GB:.3f}",
            f"{row.computing * 1e3:.1f}",
            f"{row.sending * 1e3:.1f}",
            f"{row.step * 1e3:.1f}",
        ]
        for row in rows
    ]
    header = ["way", "memory (GB)", "sent per step (GB)", "computing (ms)", "sending (ms)", "step (ms)"]
    title = f"{recipe.name}, {recipe.moe.name}: one of {devices} devices, {bandwidth:g} Gbit/s, {tflops:g} TFLOP/s"
    marked = frozenset(place for place, row in enumerate(rows) if row is best)
    return Table.of_texts(
        title, header, cells, notes=notes(counted, rows, best, devices), marked=marked, records=records
    )


def notes(counted: Counted, rows: Sequence[Estimate], best: Estimate | None, devices: int) -> list[str]:
    found = []
    if best is None:
        found.append("Nothing fits: use more devices or a smaller model.")
    else:
        found.append(f"Use --train.parallel {best.scheme}: it has the shortest step of those that fit.")
    by_scheme = {row.scheme: row for row in rows}
    pools = by_scheme.get("pools")
    if pools is not None and devices > 1:
        less = pools.sent < by_scheme["fsdp"].sent
        found.append(
            f"pools sends {'less' if less else 'MORE'} than fsdp here, with E = {counted.pools[0].experts}; it sends "
            f"less from E = {break_even_experts(counted, devices)}."
        )
        own = round(counted.batch / devices * counted.tokens)
        turn = break_even_tokens(counted, devices)
        found.append(
            f"A sparse mixture of the same d and k that sends its tokens to their experts would send "
            f"{'more' if own > turn else 'LESS'} than pools: a device has {own:,} tokens per step, and pools sends "
            f"less from {turn:,} tokens."
        )
    if "experts" in by_scheme:
        found.append(
            "Bytes and step of experts assume that all experts get equally many tokens; a device that gets more delays "
            "the others."
        )
    count = counted.experts.shapes[0][0] if counted.experts.shapes else devices
    if count % devices:
        most = -(-count // devices)
        found.append(
            f"{devices} devices do not divide {count} experts: {-(-count // most)} of them hold {most} each, or what "
            f"is left, and also compute for the other devices."
        )
    waits = [row.scheme for row in rows if row.scheme not in OVERLAPPED]
    found.append(
        "Memory is that of weights, gradients, AdamW's moments and temporarily gathered tensors; activations come on "
        "top. Bytes are exact; times are estimates, FLOPs and bytes divided by the given rates, without latencies"
        + (f"; messages of {' and '.join(waits)} do not overlap with computing." if waits else ".")
    )
    return found
