"""Methods compared in pairs, on the same test examples and over the same seeds.

The metric of each method has a wide interval, mostly because some examples are hard for every method. That part cancels
in their difference. Two kinds of chance remain:

examples   Another test split would give another difference. This part comes from a bootstrap over the examples, with
           both methods on the same ones.
seeds      So would another training run. This part comes from the spread over a method's seeds, pooled over the
           methods of the table with their degrees of freedom (Student's t): two or three seeds say little by
           themselves, and for a bootstrap there are only ten ways to draw three of three. A method whose seeds differ
           much more than those of the others is left out and judged by its own spread (``find_unsteady``).

Chance that decides single examples in each training run is part of both, so intervals are rather too long.

If no method has two seeds, the second part is unknown and not in the interval (``Difference.over_seeds``). All
probabilities are two-sided, and Holm's rule corrects them for the number of pairs in a table.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import binomtest, f, norm, t

Outcomes = Mapping[str, np.ndarray]  # by name, (N,): what each example adds to the sums of the metrics
Runs = Mapping[int, Outcomes]  # by seed
Metric = Callable[[Mapping[str, float]], float]  # from the sums over some examples
Resampled = Mapping[str, Mapping[int, np.ndarray]]  # by label and seed: on all examples, then on draws of them
RESAMPLES = 1000
"""This many give a standard error to within about 2 %."""
DRAWN_NUMBERS = 5_000_000  # drawn at a time, to limit memory
UNSTEADY = 0.01  # the level of the test for methods whose seeds differ more than those of the others


@dataclass(frozen=True)
class Spread:
    """The standard deviation over the seeds of a method."""

    deviation: float
    freedom: int
    own: bool  # whether it is that of the method alone


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
    known = spreads([[float(one[0]) for one in of.values()] for of in values.values()])
    spread = dict(zip(values, known, strict=True))
    differences = {}
    for label, found in runs.items():
        seeds = [seed for seed in found if seed in base]
        if label == baseline or not seeds:
            continue
        difference = judge(paired(values[label], values[baseline]), len(seeds), (spread[label], spread[baseline]))
        if not difference.over_seeds and (hits := _hits(found[seeds[0]], base[seeds[0]], metric)):
            difference = replace(difference, p=mcnemar(*hits))
        differences[label] = replace(difference, examples=len(base[seeds[0]]["count"]))
    corrected = holm([difference.p for difference in differences.values()])
    return {label: replace(differences[label], p_holm=p) for label, p in zip(differences, corrected, strict=True)}


def paired(one: Mapping[int, np.ndarray], other: Mapping[int, np.ndarray]) -> np.ndarray:
    """Return the difference of two methods' values (``resampled``), averaged over the seeds that both have."""
    return np.mean([one[seed] - other[seed] for seed in one if seed in other], axis=0)


def judge(difference: np.ndarray, seeds: int, spread: tuple[Spread | None, Spread | None]) -> Difference:
    """Judge ``difference`` over ``seeds`` seeds: first on all examples, then on each resample of them, if any.

    ``spread`` is that of the method and of the baseline (``spreads``), or None if it is unknown.
    """
    value, (one, other) = float(difference[0]), spread
    examples = float(difference[1:].var(ddof=1)) if len(difference) > 2 else 0.0
    known = one is not None and other is not None
    first, second = (one.deviation**2 / seeds, other.deviation**2 / seeds) if known else (0.0, 0.0)
    variance = examples + first + second
    error = math.sqrt(variance)
    if error == 0:
        reach, p = 0.0, 1.0 if value == 0 else 0.0
    elif first + second == 0:
        reach, p = float(norm.ppf(0.975)) * error, 2 * float(norm.sf(abs(value) / error))
    else:
        # Satterthwaite: there are many examples, so only the variance over training runs is itself uncertain. If both
        # have the pooled spread, it is the same uncertain number twice.
        first, second = first / variance, second / variance
        apart = one.own or other.own
        uncertain = first**2 / one.freedom + second**2 / other.freedom if apart else (first + second) ** 2 / one.freedom
        reach, p = float(t.ppf(0.975, 1 / uncertain)) * error, 2 * float(t.sf(abs(value) / error, 1 / uncertain))
    return Difference(value, reach, p, p, seeds, 0, known)


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


def spreads(groups: Sequence[Sequence[float]], unsteady: Set[int] | None = None) -> list[Spread | None]:
    """Return the spread of each method from its values, one for each seed; None if nothing is known about it.

    Methods share one, pooled over all of them, except for those at the places ``unsteady`` (``find_unsteady``).
    """
    unsteady = find_unsteady(groups) if unsteady is None else unsteady
    pooled = _pool([group for place, group in enumerate(groups) if place not in unsteady])
    return [
        Spread(statistics.stdev(group), len(group) - 1, True) if place in unsteady else pooled
        for place, group in enumerate(groups)
    ]


def find_unsteady(groups: Sequence[Sequence[float]]) -> set[int]:
    """Return the places of groups whose variance is out of line with that of the others together.

    Of three or more groups with several values, the one with the most significant ratio (F-test, one-sided, with
    Bonferroni's correction) is set apart until none is left. This is Cochran's test for outlying variances, as 't Lam
    (2010) extended it to groups of different sizes. Two such groups can hide each other, and those that it does not
    find may still differ in their spread.
    """
    steady = [place for place, group in enumerate(groups) if len(group) > 1]
    variances = {place: statistics.variance(groups[place]) for place in steady}
    unsteady = set()
    while len(steady) > 2:
        own = np.array([variances[place] for place in steady])
        freedom = np.array([len(groups[place]) - 1 for place in steady])
        others = 1 - np.eye(len(steady))  # others @ x: for each group, the sum over all others
        freedom_of_others = others @ freedom
        pooled = others @ (own * freedom) / freedom_of_others
        # With few test examples, all others can have no variance, by chance. Then no group is out of line.
        ratios = np.divide(own, pooled, out=np.zeros_like(own), where=pooled > 0)
        chances = len(steady) * f.sf(ratios, freedom, freedom_of_others)
        worst = int(chances.argmin())
        if chances[worst] >= UNSTEADY:
            break
        unsteady.add(steady.pop(worst))
    return unsteady


def _pool(groups: Sequence[Sequence[float]]) -> Spread | None:
    """Return the spread within groups, pooled over all."""
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    if not freedom:
        return None
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in several)  # exactly 0 for equal values
    return Spread(math.sqrt(squares / freedom), freedom, False)


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
