"""Measure the cost columns of the paper's tables: parameters, parameters that a token activates, FLOPs.

A ``Setting`` is a backbone with its paper's figures (``settings.py`` has the three); ``measure`` builds one row of it
and runs it at batch size 1, ``sweep_experts`` grows IntBMoE's pool. ``intbmoe cost`` prints and draws them
(``cost_report.py``).

Params      trainable parameters of the model.
Activated   those that one routed token uses: all except what the backbone keeps for other tokens and what the layer
            leaves idle (``layer.active_parameters()``).
FLOPs       ``flops`` follows the papers' formulation; ``flops_executed`` is what the fast path runs. Attention's score
            and value products are left out, as in most of the paper's rows, unless requested.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from intbmoe.counting import Shares, count, count_flops, peak_memory, shares_of
from intbmoe.methods.intbmoe import ComposedMoE, IntBMoE
from intbmoe.precomposition import precompose
from intbmoe.registry import find_method

PRECOMPOSED = "intbmoe_precomposed"
UNITS = {"params": 1e6, "activated": 1e6, "flops": 1e9}  # the unit of each printed column
SWEEP = (1, 2, 4, 8, 16, 32, 64, 128)
MIB = 2**20


@dataclass(frozen=True)
class Figures:
    """A paper's figures for one method, in M, M and G; None if it prints none."""

    params: float | None = None
    activated: float | None = None
    flops: float | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One of the paper's experiments: a backbone, the methods compared on it, and the paper's figures for them."""

    name: str
    title: str
    build: Callable[[str, int], nn.Module]  # method and the paper's E → the model
    inputs: Callable[[], tuple[Tensor, ...]]  # the model's inputs, a batch of one
    experts: int  # the paper's E
    methods: tuple[str, ...]  # registry names, and ``PRECOMPOSED``, in the order of the paper's table
    set_aside: Callable[[nn.Module], int] = lambda model: 0
    """Parameters that the backbone keeps for tokens that no mixture sees."""
    paper: Mapping[str, Figures] = field(default_factory=dict)
    active: Mapping[str, float] = field(default_factory=dict)
    """Assumed mean number of experts per token, for methods where that depends on a trained router."""
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What a reader of a method's row must know, above all why it differs from the paper's."""
    remarks: tuple[str, ...] = ()  # what a reader of any row must know
    without_storage: bool = False
    """Build and run on fake tensors, for models too large for memory: the counts are the same."""
    paper_sweep: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """The paper's figures for some E, by the column names of ``sweep_experts``, in G and MiB."""


@dataclass(frozen=True)
class Row:
    method: str
    title: str
    params: int
    activated: int
    flops: int
    flops_executed: int
    shares: Shares
    paper: Figures
    assumed_active: float | None  # assumed mean number of experts per token; None if the method fixes it
    notes: tuple[str, ...]

    @property
    def agrees(self) -> dict[str, bool | None]:
        """Whether each column rounds to the digits the paper prints; None if it prints none."""
        printed = asdict(self.paper)
        ours = {column: f"{getattr(self, column) / unit:.3f}" for column, unit in UNITS.items()}
        return {name: None if printed[name] is None else ours[name] == f"{printed[name]:.3f}" for name in ours}

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON, with its names in this order."""
        counts = {name: getattr(self, name) for name in ("method", "params", "activated", "flops", "flops_executed")}
        beside = {"assumed_active": self.assumed_active, "notes": list(self.notes)}
        return {**counts, **self.shares._asdict(), "paper": asdict(self.paper), "agrees": self.agrees, **beside}


def measure(setting: Setting, method: str, *, attention: bool = False) -> Row:
    """Build ``method``'s row of ``setting`` and run it once."""
    name = "intbmoe" if method == PRECOMPOSED else method
    active = setting.active.get(method)
    with _bench(setting):
        model = setting.build(name, setting.experts).eval()
        inputs = setting.inputs()
        if method == PRECOMPOSED:
            model = _precomposed(setting, model)
        counts = count(model, inputs, set_aside=setting.set_aside(model), active=active, attention=attention)
        shares = shares_of(model, inputs, active)
    title = find_method(name).title
    return Row(
        method=method,
        title=f"{title} (precomposed)" if method == PRECOMPOSED else title,
        **counts._asdict(),
        shares=shares,
        paper=setting.paper.get(method, Figures()),
        assumed_active=active,
        notes=setting.notes.get(method, ()),
    )


@contextmanager
def _bench(setting: Setting) -> Iterator[None]:
    """The context in which a setting's models are built and run: seeded, and with fake tensors if it says so."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode() if setting.without_storage else nullcontext():
        torch.manual_seed(0)
        yield


def _precomposed(setting: Setting, model: nn.Module) -> nn.Module:
    """``precompose(model)``; with fake tensors there is nothing to compose, and the layers are replaced in place."""
    if not setting.without_storage:
        return precompose(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, IntBMoE):
            model.set_submodule(name, ComposedMoE(module.config).eval())
    return model


@dataclass(frozen=True)
class Swept:
    """IntBMoE with E expert bases, as trained and precomposed: FLOPs of one sample, peak bytes of inference."""

    experts: int
    flops: int
    flops_precomposed: int
    memory: int
    memory_precomposed: int


def sweep_experts(setting: Setting, experts: int, *, attention: bool = False) -> Swept:
    with _bench(setting):
        model, inputs, flops, memory = setting.build("intbmoe", experts).eval(), setting.inputs(), [], []
        for precomposed in (False, True):
            model = _precomposed(setting, model) if precomposed else model
            flops.append(count_flops(model, *inputs).total(attention))
            memory.append(peak_memory(model, *inputs))
    return Swept(experts, *flops, *memory)
