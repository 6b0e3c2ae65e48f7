"""State without gradients: buffers that ``family_after_step`` updates in small steps, and decoding state."""

from collections.abc import Callable, Iterator
from typing import Self

import torch
from torch import Tensor

from intbmoe.layer import MoELayer


class WideBuffers(MoELayer):
    """A layer whose own floating-point buffers stay in float32 or wider when the layer is cast to half precision.

    In bfloat16 a step of 0.001 on a value near 0.5 is lost, and a factor of 1.2 is rounded.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and old.is_floating_point():
                dtype = torch.promote_types(new.dtype, torch.float32)
                if dtype != new.dtype:  # from the old buffer, which has lost no digits; a meta buffer has none
                    self._buffers[name] = new.to(dtype) if old.is_meta else old.to(new.device, dtype)
        return self

    def kept_wide(self) -> Iterator[Tensor]:
        yield from super().kept_wide()
        yield from (buffer for buffer in self.buffers(recurse=False) if buffer.is_floating_point())


def check_batch(held: int, batch: int) -> None:
    """Raise if a decoding state holds another number of sequences (``held``) than the input (``batch``)."""
    if held != batch:
        raise ValueError(f"state was made for {held} sequences, but x holds {batch}: use new_state({batch})")
