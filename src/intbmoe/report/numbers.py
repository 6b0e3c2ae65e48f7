"""How numbers are written, in tables, answers, captions and on axes alike."""

from collections.abc import Iterable

NOTHING = "–"


def metric_scale(metric: str) -> tuple[float, int, str]:
    """What a metric is multiplied by, its digits and its unit: accuracies in per cent, all else as it is."""
    if metric.startswith("accuracy"):
        return 100, 2, " %"
    return 1, 2 if metric == "perplexity" else 4, ""


def format_metric(metric: str, value: float, interval: float | None = None) -> str:
    """The value with its unit, and ± where there is an interval."""
    factor, digits, unit = metric_scale(metric)
    reach = "" if interval is None else f" ± {interval * factor:.{digits}f}"
    return f"{value * factor:.{digits}f}{reach}{unit}"


def format_difference(metric: str, difference: float, points: str, sign: str = "") -> str:
    """The distance of two values; of accuracies in percentage points, which the caller has a word for."""
    if metric.startswith("accuracy"):
        return f"{100 * difference:{sign}.2f} {points}".replace("-", "−")
    return f"{difference:{sign}.4f}".replace("-", "−")


def format_number(value: float | None, digits: int) -> str:
    """With commas between thousands."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def axis_scale(metric: str) -> tuple[float, str]:
    """What a metric is multiplied by on an axis, and what is added to the axis's title."""
    return (100, " (%)") if metric.startswith("accuracy") else (1, "")


def flops_unit(flops: Iterable[float]) -> tuple[float, str]:
    """G or M, whichever suits the largest."""
    return (1e9, "G") if max(flops) >= 1e9 else (1e6, "M")
