"""The report of a replacement: sizes, costs and changes."""

from dataclasses import dataclass, field

from intbmoe.checks import counted


@dataclass(frozen=True)
class ReplacedFFN:
    """One FFN and the mixture in its place."""

    name: str
    ffn: str
    """The FFN's class and sizes."""
    parameters: tuple[int, int]
    """Before and after; an FFN that the layer keeps counts in both."""
    flops: tuple[int, int]
    """Per token, before and after: 2 × multiply-adds."""
    flops_per_forward: int
    """FLOPs of the layer that do not depend on the number of tokens: composition, which ``precompose`` does once."""
    change: float
    """Largest change of an output, in evaluation mode."""
    size: float
    """Largest output of the FFN on the same tokens."""
    scale: float = 1.0
    """The factor that ``start="copy"`` applied to the experts' last map."""


@dataclass(frozen=True)
class Report:
    """What ``replace_ffn`` did; printing it gives a table."""

    method: str
    start: str
    layers: tuple[ReplacedFFN, ...]
    parameters: tuple[int, int]
    """The model's parameters, before and after."""
    left: dict[str, str] = field(default_factory=dict)
    """Name of a module that has the shape of an FFN but was left alone → why."""
    output_change: float | None = None
    """Largest change of the model's first output on the ``example``; None without an example."""

    @property
    def largest_change(self) -> float:
        return max(layer.change for layer in self.layers)

    def __str__(self) -> str:
        titles = (
            "layer", "FFN", "parameters", "FLOPs per token", "composing, per forward", "largest change",
            "largest output",
        )  # fmt: skip
        rows = [
            (
                layer.name, layer.ffn, _both(layer.parameters), _both(layer.flops), _short(layer.flops_per_forward),
                f"{layer.change:.3g}", f"{layer.size:.3g}",
            )
            for layer in self.layers
        ]  # fmt: skip
        widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (titles, *rows)
        ]
        ffns = counted(len(rows), "FFN")
        lines.append(f"{self.method}, start={self.start!r}: {ffns}, model parameters {_both(self.parameters)}")
        if self.output_change is not None:
            lines.append(f"largest change of the model's output: {self.output_change:.3g}")
        lines += [f"left alone: {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(line.rstrip() for line in lines)


def _short(count: float) -> str:
    for unit in ("", " k", " M", " G", " T"):
        if count < 1000:
            return f"{count:.4g}{unit}"
        count /= 1000
    return f"{count:.4g} P"


def _both(counts: tuple[int, int]) -> str:
    return " → ".join(_short(count) for count in counts)
