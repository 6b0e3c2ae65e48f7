"""Replays a layer's forward on a GPU from a CUDA graph once an input shape repeats.

One forward of a layer is some thirty kernels. For few tokens, Python takes ten times as long to launch them as the GPU
takes to run them; a graph launches them all at once. The input is copied to where the graph reads, and the output is
copied from where it writes. The kernels are the same and read the parameters in place, so a graph sees parameters that
were trained since it was recorded. If a parameter moves, another graph is recorded.

Graphs are used only where the caller cannot tell the difference: in evaluation mode without gradients, or in training
with them (``training.py``), on the device's default stream (so never inside another capture), if nothing traces or
counts operations, and if all modules are known types without hooks or parametrisations. Large inputs run without a
graph, because the GPU is their bottleneck. Torch's flags that affect products keep the values from the recording,
except for the float32 precision and deterministic algorithms.

All inference graphs of a device share their memory. INTBMOE_GRAPHS=0 in the environment, or ``replay.enabled = False``,
switches graphs off.
"""

import os
import sys
import warnings
from collections.abc import Callable
from operator import is_
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from intbmoe.graphs.recording import CaptureError, Recorded, Recorder
from intbmoe.graphs.training import TrainingGraph, TrainingGraphs, has_room, one_at_a_time, replay_training, suits
from intbmoe.ops.eager import transformed, untouched
from intbmoe.ops.operation import observed
from intbmoe.precision import autocast_dtype
from intbmoe.statistics import Result

TORCH_MODULES = {nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.Linear, nn.LayerNorm}
OUR_MODULES = "intbmoe.parts.", "intbmoe.methods."
TENSORS = {Tensor, nn.Parameter}
MOST_ENTRIES = 1 << 21  # per input, in inference
MOST_GRAPHS = 32  # per layer, in inference

enabled = os.environ.get("INTBMOE_GRAPHS") != "0"

Forward = Callable[[Tensor, Tensor | None], Tensor]


class _Graph(NamedTuple):
    x: Tensor
    mask: Tensor | None
    y: Tensor
    replay: Recorded

    def run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        self.x.copy_(x)
        if mask is not None:
            self.mask.copy_(mask)
        self.replay()
        return self.y.clone()


class _Modules:
    """A layer's modules as first found, its graphs, and the keys that have been seen once."""

    def __init__(self, layer: nn.Module) -> None:
        modules = list(layer.modules())
        self._parts = [(module, type(module)) for module in modules[1:]]
        self._children = [(module._modules, tuple(module._modules.values())) for module in modules]
        self.tables = [table for module in modules for table in (module._parameters, module._buffers)]
        # FSDP1 keeps parameters outside the tables, as plain attributes, where ``place`` would not see them move.
        hidden = any(isinstance(value, Tensor) for module in modules for value in vars(module).values())
        self.known = not hidden and all(_known(kind) for _, kind in self._parts)
        self._count = len(self.tensors())
        self._places: dict[tuple, int] = {}
        self._last: tuple[list[Tensor], tuple, int | None] = [], (), None
        self.graphs: dict[tuple, _Graph | Literal["seen", "refused"]] = {}
        self.training = TrainingGraphs()
        self.recorder: Recorder | None = None
        self.shared: Recorder | None = None  # the device's, whose memory is freed when no layer uses it

    def same(self) -> bool:
        return not any(tuple(table.values()) != children for table, children in self._children)

    def untouched(self) -> bool:
        """Whether calling each module runs only its own forward: no hooks, no replaced forwards."""
        return all(untouched(*part) for part in self._parts) and not torch_module._has_any_global_hook()

    def place(self) -> int | None:
        """A number for the addresses and layouts of all parameters and buffers; None if any is not a plain tensor."""
        tensors = self.tensors()
        state = [each.data_ptr() for each in tensors], [(each.shape, each.is_contiguous()) for each in tensors]
        known, known_state, number = self._last
        # For the same tensors in the same memory, the slower code below would give the same number.
        if state == known_state and all(map(is_, tensors, known)):
            return number
        if len(tensors) != self._count or not TENSORS.issuperset(map(type, tensors)):
            return None
        if len(self._places) >= MOST_GRAPHS:  # parameters no longer have the earlier places
            self._places.clear()
            self.graphs.clear()
            self.training.clear()
        places = tuple((each.data_ptr(), each.dtype, each.shape, each.stride()) for each in tensors)
        number = self._places.setdefault(places, len(self._places))
        self._last = tensors, state, number
        return number

    def trained(self) -> list[Tensor]:
        """The parameters and buffers that need gradients, each once."""
        return list(dict.fromkeys(tensor for tensor in self.tensors() if tensor.requires_grad))

    def tensors(self) -> list[Tensor]:
        return [tensor for table in self.tables for tensor in table.values() if tensor is not None]


def _known(kind: type[nn.Module]) -> bool:
    if hasattr(kind, "replay_settings"):
        return False  # a layer in a layer has settings and statistics of its own
    ours = kind.__module__.startswith(OUR_MODULES) and vars(sys.modules[kind.__module__]).get(kind.__name__) is kind
    return ours or kind in TORCH_MODULES


_found: WeakKeyDictionary[nn.Module, _Modules] = WeakKeyDictionary()
_shared: WeakValueDictionary[torch.device, Recorder] = WeakValueDictionary()  # each device's, for their memory


def replayed(layer: Any, x: Tensor, mask: Tensor | None, forward: Forward) -> Tensor | None:
    """Run ``forward(x, mask)`` of a ``MoELayer`` from a graph; None if there may not be one or none is recorded yet."""
    trains = torch.is_grad_enabled()
    if not (enabled and trains == layer.training and _applies(x, mask)) or observed((x, mask)) or transformed():
        return None
    settings = layer.replay_settings if "REPLAYS" in vars(type(layer)) and layer.REPLAYS else None
    dtype = autocast_dtype(x)
    if settings is None or not (suits(layer, x, dtype or x.dtype) if trains else x.numel() <= MOST_ENTRIES):
        return None
    modules = _found.get(layer)
    if modules is None or not modules.same():
        modules = _found[layer] = _Modules(layer)
    if not modules.known or not modules.untouched():
        return None
    place = modules.place()
    if place is None:
        return None
    how = dtype, torch.backends.cuda.matmul.fp32_precision, torch.are_deterministic_algorithms_enabled(), settings
    key = x.shape, x.dtype, x.device, None if mask is None else mask.shape, how, place, layer.config
    replay = _replay_training if trains else _replay
    return replay(modules, layer, x, mask, key, forward)


def forget(layer: Any) -> None:
    """Free the graphs of a layer."""
    _found.pop(layer, None)


def _applies(x: Tensor, mask: Tensor | None) -> bool:
    return (
        type(x) is Tensor
        and (mask is None or (type(mask) is Tensor and mask.dtype == torch.bool))
        and x.numel() > 0
        and _on_default_stream(x)
    )


def _on_default_stream(x: Tensor) -> bool:
    return x.is_cuda and torch._C._cuda_getCurrentRawStream(x.get_device()) == 0


def _replay(
    modules: _Modules, layer: Any, x: Tensor, mask: Tensor | None, key: tuple, forward: Forward
) -> Tensor | None:
    with one_at_a_time:
        found = modules.graphs.get(key)
        if found is None:
            if len(modules.graphs) >= MOST_GRAPHS:
                modules.graphs.clear()
            modules.graphs[key] = "seen"  # to be recorded if it comes again
        # Recording runs the forward three times, and ``record_routing`` would see all three.
        elif found == "seen" and not layer.statistics.wants(False):
            found = modules.graphs[key] = _record(modules, layer, x, mask, forward) or "refused"
        return found.run(x, mask) if isinstance(found, _Graph) else None


def _record(modules: _Modules, layer: Any, x: Tensor, mask: Tensor | None, forward: Forward) -> _Graph | None:
    if not _private(x.device):
        return None
    if modules.recorder is None:
        modules.recorder = Recorder(x.device, [layer.statistics], beside=_share(modules, x.device))
    # Inference tensors could not be written to outside inference mode.
    with torch.inference_mode(False), torch.no_grad():
        own_x, own_mask = x.clone(memory_format=torch.contiguous_format), None if mask is None else mask.clone()
        y = torch.empty_like(own_x)

        def run() -> None:
            y.copy_(forward(own_x, own_mask))

        try:
            return _Graph(own_x, own_mask, y, modules.recorder.record(run))
        except CaptureError as error:
            return _refuse(layer, error)


def _replay_training(
    modules: _Modules, layer: Any, x: Tensor, mask: Tensor | None, key: tuple, forward: Forward
) -> Tensor | None:
    parameters, statistics = modules.trained(), layer.statistics
    # ``record_routing`` sees ordinary forwards, and an ordinary one says that losses were not collected.
    if not (parameters or x.requires_grad) or statistics.wants(False) or statistics.uncollected:
        return None

    def record() -> TrainingGraph | None:
        if not (_private(x.device) and has_room(x.device)):
            return None
        shared = _share(modules, x.device)
        # What a forward leaves for its backward must not be overwritten by other graphs.
        recorders = [Recorder(x.device, [statistics], shared, apart=apart, constants=False) for apart in (True, False)]
        try:
            return TrainingGraph(forward, x, mask, parameters, modules.tables, statistics, recorders)
        except CaptureError as error:
            return _refuse(layer, error)

    with one_at_a_time:
        graph = modules.training.find((*key, x.requires_grad, tuple(map(id, parameters))), record)
        if graph is None:
            return None
        y, losses = replay_training(graph, x, mask, parameters, modules.tensors())
    sums = dict(graph.sums)
    tokens = sums.pop("tokens")
    statistics.keep(Result(y, None, losses, sums), tokens, tuple(x.shape[:-1]), True, type(layer).__name__)
    return y


def _private(device: torch.device) -> bool:
    """Whether the allocator keeps the memory of graphs from others; those of other libraries may not."""
    return device.type != "cuda" or torch.cuda.get_allocator_backend() == "native"


def _share(modules: _Modules, device: torch.device) -> Recorder:
    modules.shared = _shared.get(device) or Recorder(device)
    _shared[device] = modules.shared
    return modules.shared


def _refuse(layer: Any, error: CaptureError) -> None:
    warnings.warn(f"{type(layer).__name__} runs without a CUDA graph: {error}", stacklevel=2)
