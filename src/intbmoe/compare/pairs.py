"""Methods compared in pairs, on the same test examples and over the same seeds.

The metric of each method has a wide interval, mostly because some examples are hard for every method. That part cancels
in their difference. Two kinds of chance remain:

examples   Another test split would give another difference. This part comes from a bootstrap over the examples, with
           both methods on the same ones.
seeds      So would another training run. This part comes from the spread over a method's seeds, pooled over the
           methods of the table with their degrees of freedom (Student's t): two or three seeds say little by
           themselves, and for a bootstrap there are only ten ways to draw three of three.

If no method has two seeds, the second part is unknown and not in the interval (``Difference.over_seeds``). All
probabilities are two-sided, and Holm's rule corrects them for the number of pairs in a table.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from scipy.stats import binomtest, norm, t

Outcomes = Mapping[str, np.ndarray]  # by name, (N,): what each example adds to the sums of the metrics
Runs = Mapping[int, Outcomes]  # by seed
Metric = Callable[[Mapping[str, float]], float]  # from the sums over some examples
Resampled = Mapping[str, Mapping[int, np.ndarray]]  # by label and seed: on all examples, then on draws of them
RESAMPLES = 1000
"""This many give a standard error to within about 2 %."""
DRAWN_NUMBERS = 5_000_000  # drawn at a time, to limit memory


@dataclass(frozen=True)
class Difference:
    """A method's metric minus the baseline's, over the seeds that both have."""

    value: float
    interval_95: float  # half the width
    p: float  # two-sided: the probability of a difference this large if there is none
    p_holm: float  # corrected for all pairs of the table
    seeds: int
    examples: int
    over_seeds: bool  # whether it includes chance among training runs, or only among examples


def compare_in_pairs(
    runs: Mapping[str, Runs], baseline: str, metric: Metric, values: Resampled | None = None
) -> dict[str, Difference]:
    """Compare each method of ``runs`` with the baseline, if they have a seed in common.

    ``values`` are those of ``resampled``, if they have been computed already.
    """
    base, values = runs[baseline], values or resampled(runs, metric)
    spread = pooled_spread([[float(one[0]) for one in found.values()] for found in values.values()])
    differences = {}
    for label, found in runs.items():
        seeds = [seed for seed in found if seed in base]
        if label == baseline or not seeds:
            continue
        difference = judge(paired(values[label], values[baseline]), len(seeds), spread)
        if not difference.over_seeds and (hits := _hits(found[seeds[0]], base[seeds[0]], metric)):
            difference = replace(difference, p=mcnemar(*hits))
        differences[label] = replace(difference, examples=len(base[seeds[0]]["count"]))
    corrected = holm([difference.p for difference in differences.values()])
    return {label: replace(differences[label], p_holm=p) for label, p in zip(differences, corrected, strict=True)}


def paired(one: Mapping[int, np.ndarray], other: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return the difference of two methods' values (``resampled``), averaged over the seeds that both have."""
    return np.mean([one[seed] - other[seed] for seed in one if seed in other], axis=0)


def judge(difference: np.ndarray, seeds: int, spread: tuple[float | None, int]) -> Difference:
    """Judge ``difference`` over ``seeds`` seeds: first on all examples, then on each resample of them, if any.

    ``spread`` is the standard deviation over a method's seeds and its degrees of freedom (``pooled_spread``).
    """
    value, (deviation, freedom) = float(difference[0]), spread
    examples = float(difference[1:].var(ddof=1)) if len(difference) > 2 else 0.0
    trainings = 2 * deviation**2 / seeds if deviation is not None else 0.0  # of the method and of the baseline
    error = math.sqrt(examples + trainings)
    if error == 0:
        reach, p = 0.0, 1.0 if value == 0 else 0.0
    elif trainings == 0:
        reach, p = float(norm.ppf(0.975)) * error, 2 * float(norm.sf(abs(value) / error))
    else:
        # Satterthwaite: there are many examples, so only the variance over training runs is itself uncertain.
        own = freedom * ((examples + trainings) / trainings) ** 2
        reach, p = float(t.ppf(0.975, own)) * error, 2 * float(t.sf(abs(value) / error, own))
    return Difference(value, reach, p, p, seeds, 0, deviation is not None)


def mcnemar(one: np.ndarray, other: np.ndarray) -> float:
    """Exact, two-sided: among the examples that only one of the two gets right, is each as likely to have more?"""
    only_one, only_other = int((one > other).sum()), int((other > one).sum())
    return float(binomtest(only_one, only_one + only_other).pvalue) if only_one + only_other else 1.0


def holm(chances: Sequence[float]) -> list[float]:
    """Correct the p-values of several claims, so that any of them is wrong as rarely as a single claim would be."""
    order = sorted(range(len(chances)), key=lambda place: chances[place])
    corrected, largest = [0.0] * len(chances), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(chances) - rank) * chances[place]))
        corrected[place] = largest
    return corrected


def pooled_spread(groups: Sequence[Sequence[float]]) -> tuple[float | None, int]:
    """Return the standard deviation within groups, pooled over all, and its degrees of freedom; None if unknown."""
    freedom = sum(len(group) - 1 for group in groups)
    if freedom <= 0:
        return None, 0
    squares = sum((value - fmean(group)) ** 2 for group in groups for value in group)
    return math.sqrt(squares / freedom), freedom


def resampled(runs: Mapping[str, Runs], metric: Metric) -> Resampled:
    """Return the metric on all examples, then on each of ``RESAMPLES`` draws of them, the same for all runs."""
    _require_same_examples(runs)
    found = {label: {seed: [_metric(one, metric)] for seed, one in of.items()} for label, of in runs.items()}
    examples = len(next(one for of in runs.values() for one in of.values())["count"])
    random, at_once = np.random.default_rng(0), max(1, DRAWN_NUMBERS // examples)
    for start in range(0, RESAMPLES, at_once):
        draws = (random.integers(examples, size=examples) for _ in range(start, min(start + at_once, RESAMPLES)))
        weights = np.stack([np.bincount(draw, minlength=examples) for draw in draws]).astype(np.float64)
        for label, of in runs.items():
            for seed, one in of.items():
                sums = zip(*(weights @ values for values in one.values()), strict=True)
                found[label][seed] += [metric(dict(zip(one, row, strict=True))) for row in sums]
    return {label: {seed: np.array(values) for seed, values in of.items()} for label, of in found.items()}


def _metric(outcomes: Outcomes, metric: Metric) -> float:
    return metric({name: float(values.sum()) for name, values in outcomes.items()})


def _hits(one: Outcomes, other: Outcomes, metric: Metric) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the 0/1 columns whose mean is the metric, if it is a share of hits."""
    for name in one:
        both = one[name], other[name]
        shares = [_metric(found, metric) for found in (one, other)]
        binary = all(np.isin(values, (0, 1)).all() for values in both) and (one["count"] == 1).all()
        if name != "count" and binary and np.allclose(shares, [values.mean() for values in both], rtol=1e-12):
            return both
    return None


def _require_same_examples(runs: Mapping[str, Runs]) -> None:
    counts = {f"{label}, seed {seed}": one["count"] for label, found in runs.items() for seed, one in found.items()}
    (first, expected), *others = counts.items()
    for name, count in others:
        if count.shape != expected.shape or (count != expected).any():
            raise ValueError(f"{name} was not tested on the same examples as {first}, so they cannot be compared")
