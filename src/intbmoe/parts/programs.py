"""When a layer's forward runs as a program (``ops/program.py``): eagerly on a GPU, as soon as a shape comes back.

Nothing that somebody could see may be left out. So all the layer's modules must be our own, of known types, without
hooks or parametrisations; nothing may trace, count, map or profile operations, or want the saved tensors of each; and
there must be something to gain, which is not so for large inputs: there the host is ahead of the device.

A shape that comes once is not recorded. Programs are shared by all layers of one configuration.

Off by default: outputs and gradients are the same bit for bit in Triton's interpreter, but programs have not yet run
on a GPU. ``python benchmarks/gpu_host.py --programs`` measures them there.
"""

from collections.abc import Hashable, Iterator, Sequence
from operator import is_
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from intbmoe.layer import MoELayer, Result, count_valid
from intbmoe.ops.backend import choose_backend, triton_runs
from intbmoe.ops.eager import transformed
from intbmoe.ops.launch import hooked
from intbmoe.ops.operation import observed
from intbmoe.ops.program import Program
from intbmoe.ops.recording import CannotRecordError
from intbmoe.parts.experts import SwiGLU
from intbmoe.parts.hypernetwork import Hypernetwork
from intbmoe.parts.linear import Linear
from intbmoe.parts.pool import Pool
from intbmoe.parts.router import MLPRouter
from intbmoe.parts.shared import LinearMap, SiLUNetwork, SummedExperts
from intbmoe.precision import autocast_dtype
from intbmoe.statistics import recomputing

MODULES = {
    nn.ModuleList, nn.ParameterList, nn.Linear, nn.LayerNorm,
    Linear, LinearMap, MLPRouter, Hypernetwork, Pool, SwiGLU, SiLUNetwork, SummedExperts,
}  # fmt: skip
TENSORS = {Tensor, nn.Parameter}
MOST_ENTRIES = 1 << 23  # of an input
MOST_PROGRAMS = 1024
ENABLED = False

_programs: dict[tuple, Program | Literal["seen", "never"]] = {}
"""By Config and kind of inputs: what has been recorded, has come once, or cannot be recorded."""


class _Tree:
    """A layer's modules, as they were when it was made."""

    def __init__(self, layer: nn.Module) -> None:
        modules = list(layer.modules())
        self._parts = [(module, type(module)) for module in modules[1:]]
        self._children = [(module._modules, tuple(module._modules.values())) for module in modules]
        self._tables = [table for module in modules for table in (module._parameters, module._buffers)]
        self.known = all(kind in MODULES for _, kind in self._parts)
        self.programs: dict[tuple, Program] = {}
        self._last: tuple[list[ref], tuple, int] = [], (), 0

    def current(self) -> bool:
        """Whether there are no other modules now."""
        return all(tuple(table.values()) == children for table, children in self._children)

    def untouched(self) -> bool:
        """Whether nobody has put himself between a module and its forward."""
        for module, kind in self._parts:
            if (
                type(module) is not kind
                or module._forward_hooks
                or module._forward_pre_hooks
                or module._backward_hooks
                or module._backward_pre_hooks
                or "forward" in module.__dict__
            ):
                return False
        return not torch_module._has_any_global_hook()

    def tensors(self) -> list[Tensor]:
        return [tensor for table in self._tables for tensor in table.values() if tensor is not None]

    def kind_of(self, tensors: list[Tensor]) -> int:
        """A number for the tensors' types, shapes, strides, devices and needs of gradients; 0: not plain tensors."""
        if not TENSORS.issuperset(map(type, tensors)):
            return 0
        # All of that takes a while to ask for. It has not changed for the same tensors in the same memory.
        addresses = [each.data_ptr() for each in tensors]
        state = addresses, [each.is_contiguous() for each in tensors], [each.requires_grad for each in tensors]
        known, known_state, number = self._last
        if state != known_state or not all(map(is_, tensors, [each() for each in known])):
            aligned = not any(address & 15 for address in addresses)
            number = _kinds.setdefault(tuple(map(_kind, tensors)), len(_kinds) + 1) if aligned else 0
            self._last = [ref(each) for each in tensors], state, number
        return number


def _kind(tensor: Tensor) -> tuple:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.get_device()


_kinds: dict[tuple, int] = {}
_counts: dict[tuple, Tensor] = {}
_trees: WeakKeyDictionary[nn.Module, _Tree] = WeakKeyDictionary()


class ProgrammedLayer(MoELayer):
    """A layer whose forward may be a program. A class says so itself: what is derived from it may do anything."""

    PROGRAMMED: ClassVar[bool] = False
    """Whether the output depends on tensors, the Config and ``program_settings`` alone."""

    @property
    def program_settings(self) -> Hashable | None:
        """None: no program now."""
        return ()

    def forward(self, x: Tensor, mask: Tensor | None = None, state: Any = None, **inputs: Any) -> Tensor:
        found = None
        if (
            ENABLED
            and not torch.compiler.is_compiling()
            and not inputs
            and type(self).__dict__.get("PROGRAMMED", False)
        ):
            found = run(self, x, mask)
        if found is None:
            return super().forward(x, mask, state, **inputs)
        y, *load = found
        if load and self.statistics.wants(True):
            result = Result(y, sums={"load": load[0]})
            count = load[1] if mask is not None else _all_tokens(x)
            self.statistics.keep(result, count, tuple(x.shape[:-1]), True, type(self).__name__)
        return y


def run(layer: ProgrammedLayer, x: Tensor, mask: Tensor | None) -> Sequence[Tensor] | None:
    """``_answer`` by a program; None where it must not be one, or not yet."""
    settings = layer.program_settings
    if settings is None or not isinstance(x, Tensor) or not triton_runs(x.device, x.dtype):
        return None
    tree = _trees.get(layer)
    if tree is None or not tree.current():
        tree = _trees[layer] = _Tree(layer)
    if not tree.known or not tree.untouched() or layer.statistics.recorded:
        return None
    if observed((x, mask)) or transformed() or torch.is_anomaly_enabled() or hooked():
        return None
    grad, autocast = torch.is_grad_enabled(), autocast_dtype(x)
    if grad and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None  # checkpointing compares what a forward saves with what its repetition does
    tensors = tree.tensors()
    kind = tree.kind_of(tensors)
    if kind == 0 or x.data_ptr() & 15 or (mask is not None and mask.data_ptr() & 15):
        return None
    key = (
        grad, autocast, torch.backends.cuda.matmul.fp32_precision, layer.training, settings, kind, _kind(x),
        mask if mask is None else _kind(mask),
    )  # fmt: skip
    given = [x, *tensors] if mask is None else [x, mask, *tensors]
    program = tree.programs.get(key)
    if program is None:
        program = _find(layer, x, mask, given, key)
        if program is None:
            return None
        if len(tree.programs) >= MOST_PROGRAMS:
            tree.programs.clear()
        tree.programs[key] = program
    if autocast is None:
        return program(given)
    torch.set_autocast_enabled(x.device.type, False)
    try:
        return program(given)
    finally:
        torch.set_autocast_enabled(x.device.type, True)


def _answer(layer: ProgrammedLayer, x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """What a forward returns, and in training what it counts."""
    result = layer._answer(x, mask, None)
    counts = (result.sums["load"],) if mask is None else (result.sums["load"], count_valid(x, mask))
    return (result.y, *counts) if layer.training else (result.y,)


def _all_tokens(x: Tensor) -> Tensor:
    """``count_valid(x, None)``, one tensor for all calls: nobody writes to it."""
    key = x.device, x.shape[:-1]
    if key not in _counts:
        if _capturing(x):  # filled only when the graph is replayed
            return count_valid(x, None)
        if len(_counts) >= MOST_PROGRAMS:
            _counts.clear()
        _counts[key] = count_valid(x, None)
    return _counts[key]


def _find(
    layer: ProgrammedLayer, x: Tensor, mask: Tensor | None, given: Sequence[Tensor], key: tuple
) -> Program | None:
    """The program of any layer of this kind. It is recorded when a key comes for the second time."""
    if not 0 < x.numel() <= MOST_ENTRIES or recomputing() or _capturing(x):
        return None
    key = type(layer), layer.config, key
    found = _programs.get(key)
    if found is None:
        while len(_programs) >= MOST_PROGRAMS:
            del _programs[next(iter(_programs))]
        _programs[key] = "seen"
    elif found == "seen":
        found = _programs[key] = _record(layer, x, mask, given)
    return found if isinstance(found, Program) else None


def _record(
    layer: ProgrammedLayer, x: Tensor, mask: Tensor | None, given: Sequence[Tensor]
) -> Program | Literal["never"]:
    layer._check_input(x, mask)
    if choose_backend(x, autocast_dtype(x) or x.dtype) != "fused":
        return "never"

    def function(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        rest = iter(leaves)
        x, own_mask = next(rest), None if mask is None else next(rest)
        return _answer(_twin(layer, rest), x, own_mask)

    try:
        return Program(function, given)
    except (CannotRecordError, torch.OutOfMemoryError):  # recording keeps everything until it is done
        return "never"


def _capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured: what is recorded would run twice in it."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _twin(layer: nn.Module, tensors: Iterator[Tensor]) -> nn.Module:
    """The same modules once more, with ``tensors`` for their parameters and buffers."""
    twins = {}
    for module in layer.modules():
        twin = twins[module] = module.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        for name in ("_parameters", "_buffers"):
            table = getattr(module, name)
            twin.__dict__[name] = {key: None if tensor is None else next(tensors) for key, tensor in table.items()}
    for module, twin in twins.items():
        twin.__dict__["_modules"] = {name: twins.get(child) for name, child in module._modules.items()}
    return twins[layer]
