"""The study beside the paper: whose gains are compared, and with which sign."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.study import paper as study_paper


def texts(table):
    return [column.title for column in table.columns], [[cell.text for cell in row] for row in table.rows]


def test_gains_are_above_zero_where_a_method_is_better_than_the_base():
    def runs(title, metric, *values):
        return [{"title": title, "seed": seed, "metric": metric, "test": {metric: v}} for seed, v in enumerate(values)]

    found = {
        "tiny-imagenet": {
            "dense": runs("Dense", "accuracy", 0.30, 0.32),
            "dense-placed": runs("Placed", "accuracy", 0.32, 0.32),
            "intbmoe": runs("IntBMoE", "accuracy", 0.34, 0.35),
            "vmoe": runs("V-MoE", "accuracy", 0.31),
        },
        "wikipedia": {"dense": runs("Dense", "loss", 4.9), "intbmoe": runs("IntBMoE", "loss", 4.5)},
    }
    head, rows = texts(study_paper.gains(found, {"dense": "over dense", "dense-placed": "over placed"}))
    assert head[:4] == ["Method", "Tiny-ImageNet, over dense", "Tiny-ImageNet, over placed", "ImageNet, paper"]
    assert rows == [
        ["V-MoE", "+1.00", "−1.00", "+5.27", "–", "–", "–"],  # against dense's run of the same seed, not dense's mean
        ["IntBMoE", "+3.50", "+2.50", "+7.36", "+0.400", "–", "+0.133"],  # the paper's against the first base
    ]
    found["wikipedia"]["intbmoe-no_gate"] = runs("no gate", "loss", 4.6)
    assert texts(study_paper.gains(found, {"intbmoe": "here"}))[1] == [["no gate", "–", "−5.72", "−0.100", "−0.086"]]
