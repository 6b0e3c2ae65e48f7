"""How numbers are written in tables, answers, captions and on axes."""

from collections.abc import Iterable

NOTHING = "–"


def format_metric(metric: str, value: float, interval: float | None = None) -> str:
    """Format a value, with ± if there is an interval; accuracies are in per cent."""
    percent = metric.startswith("accuracy")
    factor, digits, unit = (100, 2, " %") if percent else (1, 2 if metric == "perplexity" else 4, "")
    reach = "" if interval is None else f" ± {interval * factor:.{digits}f}"
    return f"{value * factor:.{digits}f}{reach}{unit}"


def format_difference(metric: str, difference: float, points: str, sign: str = "") -> str:
    """Format the difference of two values; for accuracies in percentage points, which the caller names ``points``."""
    if metric.startswith("accuracy"):
        return f"{100 * difference:{sign}.2f} {points}".replace("-", "−")
    return f"{difference:{sign}.4f}".replace("-", "−")


def axis_scale(metric: str) -> tuple[float, str]:
    """The factor for a metric on an axis, and what to add to the axis's title."""
    return (100, " (%)") if metric.startswith("accuracy") else (1, "")


def flops_unit(flops: Iterable[float]) -> tuple[float, str]:
    return (1e9, "G") if max(flops) >= 1e9 else (1e6, "M")
