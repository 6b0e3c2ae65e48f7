"""Makes tables that show which differences of the study are more than chance: each method against some of the others.

Pairs are compared over the seeds that both methods have, as in ``intbmoe compare`` (``intbmoe/compare/pairs.py``). The
variance between trainings comes from the seeds, pooled over all methods of the study but those whose seeds differ much
more than the others'. The variance between test examples comes from a bootstrap, if both runs kept their outcomes
(``STEM.npz`` next to a summary; runs before 2026-11-17 did not). All p-values are two-sided, with Holm's correction for
all pairs of a table. If no method has two seeds, the p-values are McNemar's, which cover the test examples alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from intbmoe.compare.pairs import (
    UNSTEADY,
    Difference,
    Metric,
    Spread,
    compare_in_pairs,
    find_unsteady,
    holm,
    judge,
    paired,
    resampled,
    spreads,
)
from intbmoe.compare.summary import confidence_intervals
from intbmoe.recipes import recipe_from_dict
from intbmoe.report.numbers import NOTHING, format_metric
from intbmoe.report.tables import Table
from intbmoe.tasks import make_task
from intbmoe.train.outcomes import read_outcomes

Runs = Sequence[Mapping[str, Any]]  # summaries of one variant
Rows = Mapping[str, Runs]
Kept = dict[str, dict[int, Mapping[str, np.ndarray]]]  # outcomes by label and seed
SURE, LEAST = 0.05, 0.0001  # the level of a claim, and the smallest p-value that is written out


def values_text(rows: Rows, split: str, metric: str) -> dict[str, str]:
    """Returns each row's mean ± 95 % interval; the variance is pooled over rows that are steady on the test split."""
    values = [[run[split][metric] for run in found] for found in rows.values()]
    intervals = confidence_intervals(values, find_unsteady(_tested(rows, metric)))
    cells = zip(rows, values, intervals, strict=True)
    return {label: format_metric(metric, fmean(found), interval) for label, found, interval in cells}


def claims_text(rows: Rows, bases: Mapping[str, str], study: Rows, metric: str | None = None) -> str:
    """Returns a table of ``rows`` against those in ``bases`` (label → heading), and an explanation of its marks.

    The variance between seeds is pooled over these rows and all rows of the ``study`` (``row_spreads``).
    """
    bases = {label: heading for label, heading in bases.items() if label in rows}
    if len(rows) < 2 or not bases:
        return "Not measured yet."
    one = next(iter(rows.values()))[0]
    metric, higher = metric or one["metric"], one["higher_is_better"] and metric in (None, one["metric"])
    everything = {**study, **rows}
    tests = {split: values_text(everything, split, metric) for split in ("test", "valid")}
    spread = row_spreads(everything, metric)
    found, with_examples = differences(rows, list(bases), metric, spread)
    header = ["Method", f"{metric}, test", "valid", *bases.values(), "Seeds"]
    lines = []
    for label, runs in rows.items():
        cells = [NOTHING if label == base else _cell(found.get((label, base)), metric, higher) for base in bases]
        seeds = " ".join(str(run["seed"]) for run in runs)
        lines.append([runs[0]["title"], tests["test"][label], tests["valid"][label], *cells, seeds])
    note = f"{_note(found, with_examples, metric)}{name_unsteady(everything, metric)}"
    return f"{Table.of_texts('', header, lines).markdown()}\n\n{note}"


def row_spreads(rows: Rows, metric: str) -> dict[str, Spread | None]:
    """Returns the spread between the runs of each row on the test split."""
    return dict(zip(rows, spreads(_tested(rows, metric)), strict=True))


def name_unsteady(study: Rows, metric: str) -> str:
    """Returns a sentence about the rows that are judged by their own spread, if there are any."""
    rows = list(study.values())
    found = [rows[place][0]["title"] for place in sorted(find_unsteady(_tested(study, metric)))]
    if not found:
        return ""
    return (
        f" Left out of the pool and judged by its own spread: {' and '.join(found)}, whose runs differ much more "
        f"(F-test against the other rows; the chance to call any row so if all are alike is {100 * UNSTEADY:.0f} %)."
    )


def _tested(rows: Rows, metric: str) -> list[list[float]]:
    return [[run["test"][metric] for run in runs] for runs in rows.values()]


def differences(
    rows: Rows, bases: Sequence[str], metric: str, spread: Mapping[str, Spread | None]
) -> tuple[dict[tuple[str, str], Difference], int]:
    """Returns differences by label and base, and for how many the variance between test examples is known."""
    values = {label: {run["seed"]: np.array([run["test"][metric]]) for run in runs} for label, runs in rows.items()}
    kept, score = _read_kept(rows, metric)
    drawn, found, known = resampled(kept, score) if kept else {}, {}, 0
    for base in bases:
        examples = compare_in_pairs(kept, base, score, drawn) if spread[base] is None and base in kept else {}
        for label in rows:
            seeds = [seed for seed in values[label] if seed in values[base]]
            if label == base or not seeds:
                continue
            whole = all(seed in drawn.get(name, {}) for name in (label, base) for seed in seeds)
            known += whole
            one, other = ({s: (drawn if whole else values)[name][s] for s in seeds} for name in (label, base))
            difference = judge(paired(one, other), len(seeds), (spread[label], spread[base]))
            found[label, base] = replace(difference, p=examples[label].p) if label in examples else difference
    pairs = {frozenset(pair): difference.p for pair, difference in found.items()}  # one claim in either direction
    corrected = dict(zip(pairs, holm(list(pairs.values())), strict=True))
    return {pair: replace(one, p_holm=corrected[frozenset(pair)]) for pair, one in found.items()}, known


def _read_kept(rows: Rows, metric: str) -> tuple[Kept, Metric]:
    """Returns the outcomes that runs kept, and the metric as a function of their sums."""
    runs: Kept = {}
    for label, summaries in rows.items():
        for run in summaries:
            path = Path(run["file"]).with_suffix(".npz")
            if path.is_file():
                runs.setdefault(label, {})[run["seed"]] = read_outcomes(path)
                task = make_task(recipe_from_dict(run["recipe"]))
    return runs, lambda sums: task.metrics(sums)[metric]


def _cell(found: Difference | None, metric: str, higher: bool) -> str:
    if found is None:
        return NOTHING
    factor, digits = (100, 2) if metric.startswith("accuracy") else (1, 4 if metric.startswith("HR") else 3)
    value = f"{factor * found.value * (1 if higher else -1):+.{digits}f}".replace("-", "−")
    text = f"{value} ± {factor * found.interval_95:.{digits}f}"
    if found.over_seeds or not found.interval_95:
        return f"{text}{'*' * (found.over_seeds and found.p_holm < SURE)}"
    return f"{text} (p {f'= {found.p:.2g}' if found.p >= LEAST else f'< {LEAST}'})"


def _note(found: Mapping[Any, Difference], with_examples: int, metric: str) -> str:
    unit = "points" if metric.startswith("accuracy") else "nats" if metric == "loss" else metric
    told = f"Differences are in {unit}, averaged over the seeds that both methods have; positive is better."
    if not any(difference.over_seeds for difference in found.values()):
        return (
            f"{told} ± is the 95 % interval due to the test examples alone, and p is two-sided, for the same examples "
            "(McNemar's test for shares of them, otherwise a bootstrap), without correction. With one seed each, "
            "nothing is known about other training runs."
        )
    claims, chance = len({frozenset(pair) for pair in found}), "variation between training runs"
    if with_examples:
        examples = "test examples" if with_examples == len(found) else "test examples (where outcomes were kept)"
        chance = f"{chance} and between {examples}"
    return (
        f"{told} ± is the 95 % interval due to {chance}, with the spread between seeds pooled over all methods "
        f"(Student's t). * marks a two-sided p-value below {100 * SURE:.0f} % after Holm's correction for the "
        f"{claims} differences in this table."
    )
