"""What a recipe's training step holds and sends on R devices: ``ddp``, ``fsdp``, ``pools``, and expert parallelism.

Parameters, FLOPs and tokens are counted on a model without storage. From them follows exactly what every rank sends of
parameters and gradients (a test counts the messages of two ranks): a gather or scatter of n numbers sends n·(R−1)/R of
them, an all-reduce twice that. With ``a`` micro-batches per step, P parameters, of which all but the last FSDP2 unit's
are gathered for forward and backward, and composed blocks of C numbers:

    ddp      2 P             in float32: one all-reduce of the gradients
    fsdp     (2a + 1) P      in float32: gathered for each micro-batch, forward and backward; scattered once
    pools    2 C             in the compute type, once per step; parameters outside pools as with fsdp
    experts  4 T k d         in the compute type: T tokens of a rank to their k experts and back, forward and backward,
                             if all experts get equally many; everything except the experts as with ddp

C = P_c·K·D: D weights of one expert, K blocks, P_c = 2 paths with the gate, 1 without. It does not depend on E. If R
does not divide E, the device with ⌈E/R⌉ experts sends 2 T k d (1 + (R−2)·⌈E/R⌉/E) instead of 4 T k d (R−1)/R. Soft MoE
sends slots and Expert Choice sends the tokens that experts chose; T k is then their number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from intbmoe.layer import MoELayer, moe_layers
from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.parallel.ways import WAYS, Way, refusals
from intbmoe.recipes.compute import training_flops
from intbmoe.tasks import make_task
from intbmoe.tasks.recipe import Recipe
from intbmoe.train.distribution import stacked_blocks

WIDE = 4  # bytes of a weight, a gradient or a moment
OVERLAPPED = ("ddp", "fsdp")  # schemes whose messages overlap with computing


@dataclass(frozen=True)
class Tensors:
    """Parameters that are treated alike: their shapes, and how often FSDP2 gathers them per micro-batch."""

    shapes: tuple[tuple[int, ...], ...]
    gathers: int = 2

    @property
    def count(self) -> int:
        return sum(map(prod, self.shapes))

    def padded(self, devices: int) -> int:
        """The count that is actually sent: a tensor with no divisible dimension is padded in its first."""
        whole = (prod(s) if any(n % devices == 0 for n in s) else prod(s[1:]) * _up(s[0], devices) for s in self.shapes)
        return sum(whole)


@dataclass(frozen=True)
class PoolShape:
    """One pool of a layer, sharded along i: weights (E, i, o), or biases (E, i), which have o = 1."""

    experts: int
    inputs: int
    outputs: int
    blocks: int
    paths: int
    bytes: int  # per composed number
    bias: bool = False

    @property
    def parameter(self) -> tuple[int, ...]:
        return (self.experts, self.inputs) if self.bias else (self.experts, self.inputs, self.outputs)

    def composed(self, devices: int) -> int:
        return self.blocks * _up(self.inputs, devices) * self.paths * self.outputs


@dataclass(frozen=True)
class Counted:
    """A recipe's model and step."""

    rest: tuple[Tensors, ...]  # parameters outside pools and routed experts
    pools: tuple[PoolShape, ...]
    experts: Tensors  # experts that can be sharded
    choices: float  # Σ over mixture layers of k·d: numbers a token sends to its experts
    tokens: int  # per example in a mixture layer
    flops: float  # of one example's forward
    batch: int  # examples per step, over all devices
    device_batch: int | None
    bytes: int  # per number in the compute type
    ways: tuple[Way, ...]  # the modes in which this model can be trained

    @property
    def compared(self) -> tuple[Way, ...]:
        """The model's modes; for IntBMoE also ``experts``, as a sparse mixture of the same d and k would use it."""
        return tuple(way for way in WAYS if way in self.ways or (way == "experts" and self.pools))

    def micro_batches(self, devices: int) -> int:
        share = -(-self.batch // devices)
        return -(-share // min(self.device_batch or share, share))

    def with_experts(self, experts: int) -> "Counted":
        return replace(self, pools=tuple(replace(pool, experts=experts) for pool in self.pools))


@dataclass(frozen=True)
class Estimate:
    """The estimate for one device and one step."""

    scheme: Way
    memory: int  # bytes of weights, gradients, both moments, and whole blocks or units
    sent: int  # bytes
    computing: float  # seconds
    sending: float

    @property
    def step(self) -> float:
        parts = self.computing, self.sending
        return max(parts) if self.scheme in OVERLAPPED else sum(parts)


def count_recipe(recipe: Recipe) -> Counted:
    """Build and run the recipe's model on fake tensors."""
    task = make_task(recipe)
    settings = recipe.train
    size = 2 if settings.precision == "bfloat16" else WIDE
    with torch.device("meta"):
        model = task.make_model().eval()
        layers = [layer for _, layer in moe_layers(model)]
        executed = {layer: layer.quantities().execution for layer in layers}
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")  # on the meta device FLOPs could not be counted
        inputs = task.example_inputs()
        # Fake tensors do not show which choices are padding or how many there are: count all, or the usual number.
        chooses = bool(layers) and layers[0].choices is not None and recipe.moe.name != "expert_choice"
        active = executed[layers[0]] if chooses else None
        flops = training_flops(model, inputs, settings.device_batch or settings.batch, active)
        why = refusals(model)
        mixtures = [layer for layer in layers if isinstance(layer, IntBMoE)]
        routed = {layer: executed[layer] for layer in layers if "experts" not in layer.REFUSES}
        tokens, sent = _tokens(model, inputs, routed)
        pools = [parameter for layer in mixtures for parameter in layer.pools.parameters()]
        experts = [parameter for layer in routed for parameter in layer.experts.parameters()]
        apart = set(pools + experts)
        units = [[p for p in block.parameters() if p not in apart] for block in stacked_blocks(model)]
        inside = {p for unit in units for p in unit}
        root = [p for p in model.parameters() if p not in apart | inside]
        composed = sum(executed[layer] * layer.config.dim for layer in mixtures)
        return Counted(
            rest=(*(_tensors(unit) for unit in units), _tensors(root, gathers=1)),
            pools=tuple(shape for layer in mixtures for shape in _pool_shapes(layer, size)),
            experts=_tensors(experts),
            choices=composed + sent,
            tokens=tokens,
            flops=flops,
            batch=settings.batch,
            device_batch=settings.device_batch,
            bytes=size,
            ways=tuple(way for way in WAYS if way not in why),
        )


def _tensors(parameters: Sequence[nn.Parameter], gathers: int = 2) -> Tensors:
    return Tensors(tuple(tuple(p.shape) for p in parameters if p.requires_grad), gathers)


def _pool_shapes(layer: IntBMoE, size: int) -> list[PoolShape]:
    c = layer.config
    weights = [PoolShape(c.experts, *p.weight.shape[1:], c.blocks, c.paths, size) for p in layer.pools]
    biases = [PoolShape(c.experts, p.bias.shape[1], 1, c.blocks, c.paths, WIDE, True) for p in layer.pools if c.bias]
    return weights + biases


def _tokens(model: nn.Module, inputs: tuple, routed: Mapping[MoELayer, int]) -> tuple[int, float]:
    """Tokens of one example in the first mixture, 0 without one; Σ of the k·d that a token sends to its experts.

    ``routed`` maps layers that send tokens to their experts per token. The number of rows would not do: methods that
    choose by a threshold allocate rows for all experts. If each expert has its own inputs, their number counts.
    """
    seen: list[int] = []
    numbers: list[float] = []

    def count(way: str, rows: int, layer: MoELayer) -> None:
        own = rows if way == "batch" else min(rows, routed[layer] * seen[-1])
        numbers.append(own / seen[-1] * layer.config.dim)

    layers = [layer for _, layer in moe_layers(model)]

    def see(layer: MoELayer, args: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
        seen.append(prod((args[0] if args else named["x"]).shape[:-1]))

    hooks = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in layers]
    for layer in routed:
        first = next(layer.experts.children())
        hooks.append(first.register_forward_pre_hook(lambda _, z, of=layer: count(z[1], prod(z[0].shape[:-1]), of)))
    with torch.no_grad():
        model(*inputs)
    for hook in hooks:
        hook.remove()
    return seen[0] if seen else 0, sum(numbers)


def sent_bytes(counted: Counted, scheme: Way, devices: int, tokens: int | None = None) -> int:
    """Bytes that one device sends per step; ``tokens`` per device replaces the recipe's number."""
    whole = Tensors(_pool_tensors(counted).shapes + counted.experts.shapes)
    micro = counted.micro_batches(devices)
    share = (devices - 1) / devices
    rest = sum(unit.count for unit in counted.rest)
    if scheme == "ddp":
        return round(share * WIDE * 2 * (whole.count + rest))
    if scheme == "experts":
        own = counted.batch / devices * counted.tokens if tokens is None else tokens
        largest = max((_up(shape[0], devices) / shape[0] for shape in counted.experts.shapes), default=1.0) / devices
        passes = 2 * (1 + (devices - 2) * largest)  # 4 (R − 1)/R if R divides E
        return round(share * WIDE * 2 * rest + passes * counted.bytes * own * counted.choices)

    def fsdp(unit: Tensors) -> float:
        return share * WIDE * (unit.gathers * micro + 1) * unit.padded(devices)

    total = sum(map(fsdp, counted.rest))
    if scheme == "fsdp":
        return round(total + fsdp(whole))
    return round(total + share * sum(2 * pool.bytes * pool.composed(devices) for pool in counted.pools))


def break_even_experts(counted: Counted, devices: int) -> int:
    """The smallest number of bases at which ``pools``, whose messages do not depend on E, sends less than ``fsdp``."""
    pools = sent_bytes(counted, "pools", devices)
    one, two = (sent_bytes(counted.with_experts(devices * n), "fsdp", devices) for n in (1, 2))
    return max(1, 1 + int((pools - (2 * one - two)) / ((two - one) / devices)))


def break_even_tokens(counted: Counted, devices: int) -> int:
    """The smallest number of tokens per device at which ``pools`` sends less than ``experts`` would."""
    none = sent_bytes(counted, "experts", devices, tokens=0)
    each = (sent_bytes(counted, "experts", devices, tokens=10**6) - none) / 10**6
    return 1 + int((sent_bytes(counted, "pools", devices) - none) / each)


def state_bytes(counted: Counted, scheme: Way, devices: int) -> int:
    """Bytes of weights, gradients and both moments, in float32, on the device that holds most of them."""
    pools, rest = _pool_tensors(counted), sum(unit.padded(devices) for unit in counted.rest)
    whole = sum(unit.count for unit in counted.rest)
    if scheme == "ddp":
        own = pools.count + counted.experts.count + whole
    elif scheme == "experts":
        own = whole + sum(prod(s[1:]) * _up(s[0], devices) for s in pools.shapes + counted.experts.shapes) // devices
    elif scheme == "pools":
        sliced = sum(pool.experts * _up(pool.inputs, devices) * pool.outputs for pool in counted.pools)
        own = (sliced + counted.experts.padded(devices) + rest) // devices
    else:
        own = (pools.padded(devices) + counted.experts.padded(devices) + rest) // devices
    return 4 * WIDE * own


def passing_bytes(counted: Counted, scheme: Way, devices: int) -> int:
    """Bytes of temporarily whole tensors: FSDP2's largest unit (weights and gradients), and composed blocks."""
    unit = max((unit.count for unit in counted.rest), default=0) if scheme in ("fsdp", "pools") else 0
    if scheme == "fsdp":  # pools and experts are parts of their layers' units
        unit += (_pool_tensors(counted).count + counted.experts.count) // max(1, len(counted.rest) - 1)
    blocks = sum(pool.bytes * pool.composed(devices) for pool in counted.pools) if scheme != "experts" else 0
    return 2 * WIDE * unit + blocks


def _pool_tensors(counted: Counted) -> Tensors:
    return Tensors(tuple(pool.parameter for pool in counted.pools))


def estimate(
    counted: Counted, scheme: Way, devices: int, bandwidth: float, tflops: float, tokens: int | None = None
) -> Estimate:
    """Estimate a step; ``bandwidth`` is Gbit/s per device, ``tflops`` is what it achieves; backward is 2 forwards."""
    sent = sent_bytes(counted, scheme, devices, tokens)
    held = state_bytes(counted, scheme, devices) + passing_bytes(counted, scheme, devices)
    computing = 3 * counted.flops * counted.batch / devices / (tflops * 1e12)
    return Estimate(scheme, held, sent, computing, sent * 8 / (bandwidth * 1e9))


def _up(number: int, devices: int) -> int:
    return -(-number // devices) * devices
