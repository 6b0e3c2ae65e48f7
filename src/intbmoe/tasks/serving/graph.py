"""A task's model as a function of tensors alone, for ONNX and AOTInductor: its inputs, and what may vary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Graph:
    """The inputs of the graph, in order; the first dimension of each is the batch, whose size is free."""

    names: tuple[str, ...]
    """Entries of a batch."""
    length_name: str | None = None
    """What the second dimension counts, if its size is free too."""
    longest: int | None = None
    """The largest size of that dimension."""
    whole: tuple[str, ...] = ()
    """Inputs without that dimension."""
    wrap: Callable[[nn.Module, Mapping[str, Tensor]], nn.Module] = lambda model, catalogue: model
    """(model, the catalogue's tensors) → the module that takes these inputs."""
    complete: Callable[[Batch], Batch] = lambda batch: batch
    """Adds to a batch what else the graph needs."""

    def inputs(self, batch: Batch, dtype: torch.dtype, length: int | None = None) -> tuple[Tensor, ...]:
        """Return the inputs from a batch of the task, cut to ``length`` if it is given."""
        batch = self.complete(batch)
        found = []
        for name in self.names:
            value = batch[name]
            if length is not None and name not in self.whole:
                value = value[:, :length].contiguous()
            found.append(value.to(dtype) if value.is_floating_point() else value)
        return tuple(found)

    def shapes_to_try(self, batch: Batch) -> list[tuple[int, int | None]]:
        """Return (rows, length) of parts of a batch to try: all of it, and small and odd ones."""
        sized = self.complete(batch)[next(name for name in self.names if name not in self.whole)]
        rows = len(sized)
        if self.longest is None:
            return [(count, None) for count in sorted({rows, 1, min(5, rows)})]
        longest = sized.shape[1]
        return [(rows, longest), (1, 1), (min(5, rows), max(1, longest // 2)), (1, longest)]

    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        batch = torch.export.Dim("batch", min=1, max=65_536)
        if self.length_name is None:
            return tuple({0: batch} for _ in self.names)
        length = torch.export.Dim(self.length_name, min=1, max=self.longest)
        return tuple({0: batch} if name in self.whole else {0: batch, 1: length} for name in self.names)
