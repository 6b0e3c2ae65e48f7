"""The five lines at the top of a comparison's page: what was compared, on what, what won, by how much, how sure.

Each contender is paired with the best one, on the same test examples and seeds. The two are tied if a difference this
large has a probability of 5 % or more, two-sided and corrected for the number of contenders (``pairs.py``). If runs
kept no outcomes, contenders whose 95 % intervals overlap are tied. With one seed, no lead is a claim.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from intbmoe.checks import counted
from intbmoe.compare.summary import trained_rows
from intbmoe.report.numbers import NOTHING, format_difference, format_metric
from intbmoe.report.page import Answer, Verdict
from intbmoe.report.trace import trained_for

MOST_NAMED, MOST_LISTED = 3, 13
ALIKE = 0.02  # costs that differ by less than this share are called about equal
COSTS = {"flops": "FLOPs", "params": "parameters"}
SURE, TEST = 0.05, "two-sided, 5 %, Holm's correction"
Data = Mapping[str, Any]  # a comparison as ``page.collect`` describes it, or a row of it


def answer_comparison(data: Data) -> Answer:
    order = sorted(trained_rows(data["rows"]), key=lambda row: row["mean"], reverse=data["higher_is_better"])
    best, others = order[0], order[1:]
    overlapping = [row for row in others if _overlap(best, row)]
    verdict: Verdict = "win"
    if not others:
        verdict = "one run"
    elif any(len(row["values"]) < 2 for row in order):
        verdict = "no claim"
    elif overlapping:
        verdict = "tie"
    lines = (
        ("What", _what(data, order)),
        ("On what", _on_what(data)),
        ("What won", _won(verdict, data["metric"], best, overlapping) + _below_floor(data, best)),
        ("By how much", _how_much(data["metric"], order)),
        ("How sure", _how_sure(verdict, best, others, overlapping)),
    )
    leaders = tuple(row["title"] for row in (best, *overlapping)) if verdict in ("win", "tie") else ()
    return Answer(verdict, _headline(verdict, data["recipe"], best, overlapping), lines, leaders)


def _overlap(one: Data, other: Data) -> bool:
    """Whether ``other`` cannot be distinguished from ``one``, the best."""
    if one["interval_95"] is None or other["interval_95"] is None:
        return False
    if paired := other.get("to_best"):
        return paired["p_holm"] >= SURE
    return abs(one["mean"] - other["mean"]) <= one["interval_95"] + other["interval_95"]


def _what(data: Data, order: Sequence[Data]) -> str:
    numbers = [len(row["values"]) for row in order]
    seeds = f"{min(numbers)} to {max(numbers)} seeds"
    if min(numbers) == max(numbers):
        seeds = f"{counted(numbers[0], 'seed')} each"
    names = name_list(_titles(order)) if len(order) <= MOST_LISTED else f"{len(order)} variants"
    text = f"{names}; {seeds}, {counted(sum(numbers), 'run')}."
    left_out = sum(bool(one["path"]) for one in data["left_out"])
    return f"{text} {counted(left_out, 'run')} left out, named below." if left_out else text


def _on_what(data: Data) -> str:
    better = "higher" if data["higher_is_better"] else "lower"
    length = trained_for({**data["runs"][0], "seconds": None})
    training = "not trained" if length == NOTHING else f"{length} each"
    return f"{data['recipe']} ({data['task']}), {training}; {data['metric']} on the test split, {better} is better."


def _won(verdict: Verdict, metric: str, best: Data, overlapping: Sequence[Data]) -> str:
    found = f"{best['title']}, {format_metric(metric, best['mean'], best['interval_95'])}"
    if verdict == "win":
        return f"{found}."
    if verdict == "tie":
        tied = name_list(_titles(overlapping), 2 * MOST_NAMED)
        return f"No single method. {found}, has the best mean, and {tied} cannot be told from it."
    if verdict == "no claim":
        return f"Not decided. Ahead is {found}."
    return f"Nothing to win: {found}, is the only one."


def _below_floor(data: Data, best: Data) -> str:
    """Return a warning if the best method does not beat a floor: then it has learned nothing."""
    sign, metric = 1 if data["higher_is_better"] else -1, data["metric"]
    reached = {name: values[metric] for name, values in data["floors"].items() if metric in values}
    unbeaten = {name: value for name, value in reached.items() if sign * value >= sign * best["mean"]}
    if not unbeaten:
        return ""
    listed = name_list([f"{name} ({format_metric(metric, value)})" for name, value in unbeaten.items()])
    return f" It does not beat baselines that need no learning: {listed}."


def _how_much(metric: str, order: Sequence[Data]) -> str:
    if len(order) == 1:
        return "There is nothing to measure it against."
    best, second, worst = *order[:2], order[-1]
    if best["mean"] == second["mean"]:
        return f"Not at all: the mean of {second['title']} is the same."
    gaps = [format_difference(metric, abs(best["mean"] - one["mean"]), "percentage points") for one in (second, worst)]
    text = f"{gaps[0]} over {second['title']}, the next"
    if worst is not second:
        text += f"; {gaps[1]} over {worst['title']}, the last"
    if not (best["flops"] and second["flops"] and best["params"] and second["params"]):
        return f"{text}."
    costs = " and ".join(_times(best[name], second[name], word) for name, word in COSTS.items())
    return f"{text}. It has {costs} as {second['title']}."


def _times(own: float, other: float, word: str) -> str:
    """Return a phrase such as "1.2 times as many FLOPs" or "about as many parameters"."""
    if own == other:
        return f"as many {word}"
    return f"about as many {word}" if abs(own / other - 1) < ALIKE else f"{own / other:.3g} times as many {word}"


def _how_sure(verdict: Verdict, best: Data, others: Sequence[Data], overlapping: Sequence[Data]) -> str:
    paired = all(row.get("to_best") for row in others)
    if verdict == "one run":
        return "No claim: a comparison needs two."
    if verdict == "no claim":
        single = _titles([row for row in (best, *others) if len(row["values"]) < 2])
        if len(single) == len(others) + 1:
            return "No claim: with one seed each, differences may be chance. More seeds give intervals (--seeds 3)."
        return f"No claim: there is only one seed of {name_list(single)}. More seeds give intervals (--seeds 3)."
    if verdict == "tie":
        behind = [row for row in others if row not in overlapping]
        one = len(overlapping) == 1
        text = f"The 95 % interval{'' if one else 's'} of {_few(overlapping)} overlap{'s' if one else ''} its own"
        if paired:
            text = f"On the same test examples its lead over {_few(overlapping)} may be chance ({TEST})"
        return f"{text}; clearly behind: {_few(behind)}." if behind else f"{text}."
    seeds = len(best["values"])
    if paired:
        return f"On the same test examples no lead is likely to be chance ({TEST}; {counted(seeds, 'seed')})."
    few = " With few seeds the intervals themselves are rough." if seeds < 5 else ""
    return f"Its 95 % interval overlaps no other ({counted(seeds, 'seed')}, Student's t).{few}"


def _headline(verdict: Verdict, recipe: str, best: Data, overlapping: Sequence[Data]) -> str:
    if verdict == "win":
        return f"{best['title']} wins on {recipe}"
    if verdict == "tie":
        if len(overlapping) < MOST_NAMED:
            return f"A tie on {recipe}: {name_list(_titles([best, *overlapping]))}"
        return f"A tie of {len(overlapping) + 1} on {recipe}, {best['title']} among them"
    if verdict == "no claim":
        return f"{best['title']} is ahead on {recipe}, which proves nothing yet"
    return f"{best['title']} on {recipe}"


def name_list(names: Sequence[str], most: int = MOST_LISTED) -> str:
    """Join names with commas and "and", or semicolons if a name contains a comma; of too many, name the first."""
    comma = "; " if any(", " in name for name in names) else ", "
    if len(names) > most:
        return f"{comma.join(names[:most])} and {len(names) - most} more"
    return " and ".join(part for part in (comma.join(names[:-1]), names[-1]) if part)


def _titles(rows: Sequence[Data]) -> list[str]:
    return [row["title"] for row in rows]


def _few(rows: Sequence[Data]) -> str:
    return name_list(_titles(rows)) if len(rows) <= MOST_NAMED else f"{len(rows)} others"
