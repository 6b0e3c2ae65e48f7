"""Compares the study's results with the paper's: methods against dense, ablations against the full method."""

from collections.abc import Mapping, Sequence
from typing import Any

from intbmoe.compare.pairs import paired
from intbmoe.report.numbers import NOTHING
from intbmoe.report.tables import Table

COUNTERPARTS = {"tiny-imagenet": ("Tiny-ImageNet", "ImageNet"), "wikipedia": ("Wikipedia", "MiniPile")}
"""The experiment of the paper that each study repeats on other data."""
FIGURES = """
dense               0.6640  2.8131
switch              0.7004  2.7156
deepseek            0.7078  2.7119
remoe               0.6971  2.7346
vmoe                0.7167  -
expert_choice       0.7170  -
dynmoe              0.6975  2.7108
mass                0.7008  2.7608
soft                0.7122  -
soft_causal         -       2.7112
smear               0.7178  -
smear_token         -       2.7165
lory                0.6956  2.7519
mumoe_cp            0.7012  2.7101
mumoe_tr            0.6962  2.7171
intbmoe             0.7376  2.6802
intbmoe-one_layer   0.6878  2.7174
intbmoe-fixed_scale 0.7244  2.6938
intbmoe-no_gate     0.6804  2.7660
intbmoe-no_shared   0.7332  2.7281
intbmoe-no_filter   0.7372  2.6829
intbmoe-softmax     0.7263  2.7071
"""
"""The paper's top-1 accuracies on ImageNet and losses on MiniPile."""
PAPER = {
    label: {study: None if value == "-" else float(value) for study, value in zip(COUNTERPARTS, values, strict=True)}
    for label, *values in map(str.split, FIGURES.strip().split("\n"))
}
ABLATION = "intbmoe-"  # prefix of the labels of ablations
Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def gains(found: Mapping[str, Rows], bases: Mapping[str, str]) -> Table:
    """Tabulates how much better methods are than the bases; if a base is IntBMoE, its ablations are compared.

    ``found`` has the runs of a study by label, ``bases`` the heading of the column against each base; the paper's
    column is against the first. A method is compared over the seeds that both have. Accuracies are in points, losses in
    nats; above zero is better.
    """
    titles = {label: runs[0]["title"] for rows in found.values() for label, runs in rows.items()}
    wanted = [label for label in PAPER if label not in bases and label.startswith(ABLATION) == ("intbmoe" in bases)]
    header, table = ["Method"], []
    for here, paper in COUNTERPARTS.values():
        header += [*(f"{here}, {name}" for name in bases.values()), f"{paper}, paper"]
    for label in wanted:
        if label in titles:
            cells = (cell for study in COUNTERPARTS for cell in _cells(study, found.get(study, {}), label, [*bases]))
            table.append([titles[label], *cells])
    return Table.of_texts("", header, table)


def _cells(study: str, rows: Rows, label: str, bases: Sequence[str]) -> list[str]:
    cells = []
    for base in bases:
        values = [{run["seed"]: run["test"][run["metric"]] for run in rows.get(name, ())} for name in (label, base)]
        both = values[0].keys() & values[1].keys()
        cells.append(_gain(study, float(paired(*values))) if both else NOTHING)
    value, base = (PAPER[name][study] for name in (label, bases[0]))
    return [*cells, NOTHING if value is None or base is None else _gain(study, value - base)]


def _gain(study: str, difference: float) -> str:
    text = f"{100 * difference:+.2f}" if study == "tiny-imagenet" else f"{-difference:+.3f}"
    return text.replace("-", "−")
