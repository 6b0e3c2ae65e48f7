"""The forward and backward pass of a micro-batch as a CUDA graph: recorded once, replayed at every step.

A step of a small model is hundreds of short kernels, and Python launches them more slowly than a large GPU runs them. A
replayed graph is a single launch. It runs the same kernels with the same random numbers as an ordinary step, so a
captured run ends with the same weights. Only the work between micro-batches still runs from Python: clipping, the
optimizer, and the methods' state, which lives in buffers that are updated in place.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from intbmoe.graphs.recording import addresses
from intbmoe.layer import moe_layers
from intbmoe.tasks.base import Batch
from intbmoe.train.errors import CaptureError, lacks_memory

WARM_UPS = 2
"""Passes before the recording, during which libraries choose their algorithms and kernels are compiled."""
MOST_GRAPHS = 16  # one for each batch shape; each holds its own memory


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    batch: Batch  # the tensors that the graph reads
    totals: Tensor
    gradients: list[Tensor | None]
    sums: list[dict[str, Tensor]]  # what each MoE layer counted
    addresses: list[int]  # of the model's tensors at recording time


class CapturedBackward:
    """Replays ``backward(batch)``, which returns a tensor and leaves gradients, from a recording."""

    def __init__(self, backward: Callable[[Batch], Tensor], model: nn.Module) -> None:
        self.backward, self.model = backward, model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.statistics = [layer.statistics for _, layer in moe_layers(model)]
        self.recordings: dict[tuple, _Recording] = {}  # by the names, shapes and types in the batch
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch) -> Tensor:
        """Add the batch's gradients to the existing ones; the returned tensor is valid until the next call."""
        signature = tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(batch.items()))
        recording = self.recordings.get(signature)
        if recording is None or recording.addresses != addresses(self.model):
            self.recordings.pop(signature, None)
            recording = self.recordings[signature] = self._record(batch)
        for name, value in batch.items():
            recording.batch[name].copy_(value)
        recording.graph.replay()
        self._hand_on(recording)
        return recording.totals

    def _record(self, batch: Batch) -> _Recording:
        if len(self.recordings) >= MOST_GRAPHS:
            raise CaptureError(
                f"train.capture records a graph for each batch shape, and the limit of {MOST_GRAPHS} is reached: "
                f"use --train.capture False for data of many lengths"
            )
        kept = [parameter.grad for parameter in self.parameters]
        pending = [statistics.exchange_pending({}) for statistics in self.statistics]
        random_state = torch.cuda.get_rng_state()
        fixed = {name: value.clone() for name, value in batch.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._forget()
                self.backward(fixed)
        torch.cuda.current_stream().wait_stream(side)
        self._forget()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                totals = self.backward(fixed)
        except RuntimeError as error:
            # Ending a failed capture raises another error; its context is the cause.
            cause = error.__context__ or error
            if lacks_memory(cause):
                raise cause from None
            raise CaptureError(f"the step cannot be captured, use --train.capture False: {cause}") from error
        gradients = [parameter.grad for parameter in self.parameters]
        sums = [
            statistics.exchange_pending(before) for statistics, before in zip(self.statistics, pending, strict=True)
        ]
        for parameter, gradient in zip(self.parameters, kept, strict=True):
            parameter.grad = gradient
        torch.cuda.set_rng_state(random_state)
        return _Recording(graph, fixed, totals, gradients, sums, addresses(self.model))

    def _forget(self) -> None:
        """Clear gradients and counts, so that a replay produces those of its own batch alone."""
        for parameter in self.parameters:
            parameter.grad = None
        for statistics in self.statistics:
            statistics.exchange_pending({})

    def _hand_on(self, recording: _Recording) -> None:
        """Put the replay's gradients and counts where an ordinary backward pass leaves them."""
        added, values = [], []
        for parameter, gradient in zip(self.parameters, recording.gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient  # the graph's own tensor: ``own_gradients`` copies it
            else:
                added.append(parameter.grad)
                values.append(gradient)
        if added:
            torch._foreach_add_(added, values)
        for statistics, sums in zip(self.statistics, recording.sums, strict=True):
            statistics.add(sums)

    def own_gradients(self) -> None:
        """Copy gradients that belong to a graph, so that the replay of the next micro-batch does not overwrite them."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
