"""The five lines at the top of a comparison's page: what was compared, on what, what won, by how much, how sure.

The rule is one a reader can check in the table: two contenders whose 95 % intervals overlap are tied. That is stricter
than a test of their difference, which a table of many contenders needs. With one seed there is no interval, and
whatever is ahead is no claim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from intbmoe.report.numbers import format_difference, format_metric
from intbmoe.report.page import Answer, Verdict

MOST_NAMED, MOST_LISTED = 3, 13


@dataclass(frozen=True)
class Contender:
    title: str
    values: tuple[float, ...]
    mean: float
    interval: float | None  # half the width of the 95 % interval; None with one value
    flops: float | None = None
    params: float | None = None

    @property
    def seeds(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Question:
    recipe: str
    task: str
    metric: str
    higher_is_better: bool
    training: str  # how long each was trained, in words
    left_out: int = 0  # runs that should be there and are not


def answer_comparison(
    question: Question, contenders: Sequence[Contender], floors: Mapping[str, Mapping[str, float]] | None = None
) -> Answer:
    order = sorted(contenders, key=lambda one: -one.mean if question.higher_is_better else one.mean)
    best, others = order[0], order[1:]
    overlapping = [one for one in others if _overlap(best, one)]
    unknown = any(one.interval is None for one in order)
    verdict: Verdict = "win"
    if not others:
        verdict = "one run"
    elif unknown:
        verdict = "no claim"
    elif overlapping:
        verdict = "tie"
    lines = (
        ("What", _what(question, order)),
        ("On what", _on_what(question)),
        ("What won", _won(verdict, question, best, overlapping) + _below_floor(question, best, floors or {})),
        ("By how much", _how_much(question, order)),
        ("How sure", _how_sure(verdict, best, others, overlapping)),
    )
    leaders = tuple(one.title for one in (best, *overlapping)) if verdict in ("win", "tie") else ()
    return Answer(verdict, _headline(verdict, question, best, overlapping), lines, leaders)


def _overlap(one: Contender, other: Contender) -> bool:
    if one.interval is None or other.interval is None:
        return False
    return abs(one.mean - other.mean) <= one.interval + other.interval


def _what(question: Question, order: Sequence[Contender]) -> str:
    number = {one.seeds for one in order}
    seeds = _counted(number.pop(), "seed") + " each" if len(number) == 1 else f"{min(number)} to {max(number)} seeds"
    names = name_list([one.title for one in order]) if len(order) <= MOST_LISTED else f"{len(order)} variants"
    text = f"{names}; {seeds}, {_counted(sum(one.seeds for one in order), 'run')}."
    return f"{text} {_counted(question.left_out, 'run')} left out, named below." if question.left_out else text


def _on_what(question: Question) -> str:
    better = "higher" if question.higher_is_better else "lower"
    return (
        f"{question.recipe} ({question.task}), {question.training}; {question.metric} on the test split, "
        f"{better} is better."
    )


def _won(verdict: Verdict, question: Question, best: Contender, overlapping: Sequence[Contender]) -> str:
    found = f"{best.title}, {format_metric(question.metric, best.mean, best.interval)}"
    if verdict == "win":
        return f"{found}."
    if verdict == "tie":
        tied = name_list([one.title for one in overlapping], 2 * MOST_NAMED)
        return f"Nothing alone. The best mean is that of {found}; tied with it: {tied}."
    if verdict == "no claim":
        return f"Not decided. Ahead is {found}."
    return f"Nothing to win: {found}, stands alone."


def _below_floor(question: Question, best: Contender, floors: Mapping[str, Mapping[str, float]]) -> str:
    """Said only where it hurts: what does not beat a floor has learned nothing."""
    sign = 1 if question.higher_is_better else -1
    metric = question.metric
    unbeaten = {
        name: values[metric]
        for name, values in floors.items()
        if metric in values and sign * values[metric] >= sign * best.mean
    }
    if not unbeaten:
        return ""
    listed = name_list([f"{name} ({format_metric(metric, value)})" for name, value in unbeaten.items()])
    return f" It does not beat what needs no learning: {listed}."


def _how_much(question: Question, order: Sequence[Contender]) -> str:
    if len(order) == 1:
        return "There is nothing to measure it against."
    best, second = order[:2]
    if best.mean == second.mean:
        return f"Not at all: the mean of {second.title} is the same."
    worst = order[-1]
    text = f"{_gap(question, best, second)} over {second.title}, the next"
    if worst is not second:
        text += f"; {_gap(question, best, worst)} over {worst.title}, the last"
    return f"{text}.{_price(best, second)}"


def _gap(question: Question, one: Contender, other: Contender) -> str:
    return format_difference(question.metric, abs(one.mean - other.mean), "percentage points")


def _price(best: Contender, second: Contender) -> str:
    if not (best.flops and second.flops and best.params and second.params):
        return ""
    flops, params = best.flops / second.flops, best.params / second.params
    return f" It has {flops:.3g} times the FLOPs and {params:.3g} times the parameters of {second.title}."


def _how_sure(
    verdict: Verdict,
    best: Contender,
    others: Sequence[Contender],
    overlapping: Sequence[Contender],
) -> str:
    if verdict == "one run":
        return "No claim: a comparison needs two."
    if verdict == "no claim":
        single = [one.title for one in (best, *others) if one.interval is None]
        if len(single) == len(others) + 1:
            return "No claim: with one seed each, differences may be chance. More seeds give intervals (--seeds 3)."
        return f"No claim: one seed only of {name_list(single)}. More seeds give intervals (--seeds 3)."
    if verdict == "tie":
        behind = [one for one in others if one not in overlapping]
        text = (
            f"The 95 % interval{_s(overlapping)} of {_few(overlapping)} overlap{'' if _s(overlapping) else 's'} its own"
        )
        return f"{text}; clearly behind: {_few(behind)}." if behind else f"{text}."
    few = " With few seeds the intervals themselves are rough." if best.seeds < 5 else ""
    return f"Its 95 % interval overlaps no other ({_counted(best.seeds, 'seed')}, Student's t).{few}"


def _headline(verdict: Verdict, question: Question, best: Contender, overlapping: Sequence[Contender]) -> str:
    if verdict == "win":
        return f"{best.title} wins on {question.recipe}"
    if verdict == "tie":
        if len(overlapping) < MOST_NAMED:
            return f"A tie on {question.recipe}: {name_list([best.title, *(one.title for one in overlapping)])}"
        return f"A tie of {len(overlapping) + 1} on {question.recipe}, {best.title} among them"
    if verdict == "no claim":
        return f"{best.title} is ahead on {question.recipe}, which proves nothing yet"
    return f"{best.title} on {question.recipe}"


def name_list(names: Sequence[str], most: int = MOST_LISTED) -> str:
    """Names with commas and "and", semicolons where a name has a comma itself; of too many, the first."""
    comma = "; " if any(", " in name for name in names) else ", "
    if len(names) > most:
        return f"{comma.join(names[:most])} and {len(names) - most} more"
    return " and ".join(part for part in (comma.join(names[:-1]), names[-1]) if part)


def _few(contenders: Sequence[Contender]) -> str:
    return (
        name_list([one.title for one in contenders]) if len(contenders) <= MOST_NAMED else f"{len(contenders)} others"
    )


def _s(several: Sequence[object]) -> str:
    return "" if len(several) == 1 else "s"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
