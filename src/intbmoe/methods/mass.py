"""MASS: early in training, experts whose gradients drift are duplicated; each token takes experts of a fixed mass.

Park and Park, "How Many Experts Are Enough? Towards Optimal Semantic Specialization for Mixture-of-Experts", AAAI 2026.

    r_t = softmax over the open experts of W_r x_t
    N_t = the smallest set of best experts with Σ_{N_t} r_{t,e} ≥ p
    y_t = Σ_{e∈N_t} (r_{t,e} / Σ_{N_t} r_t) f_e(x_t)
    loss = β Σ_{(i,j)} cos(w_i, w_j)² over the pairs (source, copy), w the rows of W_r; while the pool may grow

During the first tenth of the run (``expansion``), each layer does the following between backward and the optimizer's
step. W is the *first* matrix of an expert (the one before GELU; for SwiGLU the gate, the one before SiLU):

    γ_e = ‖∇W_e‖_F goes into a window of ω norms; once e has waited ``warmup`` steps,
    z_e = (γ_e − mean of window) / standard deviation of window (γ_e included, unbiased) goes into a second window of ω
    e drifts if its norm window is full, Σ z_e / √ω > Φ⁻¹(1 − significance) and |cos(W_e, ∇W_e)| < similarity

The drifting expert with the lowest index is copied, weights and router row, into the first free slot. Of ∇W_e and the
router row's gradient, the source keeps the component along its weights (for W unit by unit: the d weights of one hidden
unit) and the copy gets the full gradient; all other gradients stay with the source. The source waits again and keeps
its windows; the copy starts with empty windows and zero optimizer moments. Before the next expansion, the expert added
last must prove useful: if the loss of the same batch is no higher without it, it is closed, and ``patience`` drops by
one. The pool is final when patience has run out, the pool is full or the phase is over; its windows are then dropped.

The authors' scripts set the steps by the length of the run: warm-up max(100, 5 %) and ω = max(200, 9 %) on images,
max(30, 5 %) and max(60, 9 %) on text, where the first added expert is not checked. ``domain`` selects the script, and
``plan_steps`` turns the fractions into steps. The IntBMoE paper mentions "the previous 200 optimizer steps" and no
phase: use ``window=200`` for that, whatever the length. If a training loop never calls ``plan_steps``, windows have
their minimum length and the phase has 1000 steps, with a warning. A number given in place of None is used as it is.

Choices and differences. The paper weights by r; the authors' dispatcher renormalises in batches where some token has
two experts; we always renormalise, or never with ``renormalize=False``. The paper divides the redundancy loss by the
number of pairs; their code and ours do not. A sample is one optimizer step's gradient in ``.grad`` (theirs: one
backward's, before data parallelism reduces it), so call ``before_step`` before any clipping and after a GradScaler's
``unscale_``. Norms that are not finite are skipped; norms equal up to rounding give z = 0 (theirs divide by 0), and an
expert without any gradient does not drift. The usefulness check compares two evaluations with the same random numbers
(theirs compares one with the training loss); it needs ``before_step(…, reevaluate=f)``, where f() is the loss of the
batch without ``aux_loss``; without f no expert is ever closed. An expert closed when patience has run out is closed for
good and no longer counts (theirs is only masked). The redundancy loss is part of the edited gradients (theirs is added
afterwards). In their code the copy effectively gets the projected gradient too, because the edit overwrites a view of
the original. There is no balance loss, as in their language script, and nothing is dropped. All decisions use rank 0's
norms. A forward allocates N·E rows, of which the grouped kernel computes the chosen ones. Parameters sharded by FSDP2
are refused, because slots are single rows. ``active_parameters`` uses the mean number of experts in the last training
step; before training it assumes ⌈p·open⌉, as for a uniform router.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from intbmoe.layer import Result, Routing
from intbmoe.parts.linear import Linear
from intbmoe.parts.losses import sum_over_ranks
from intbmoe.parts.router import mask_choices, top_k
from intbmoe.parts.slots import PoolConfig, PoolLayer, reset_moments, unit
from intbmoe.precision import wide
from intbmoe.registry import register
from intbmoe.settings import MustBe, NonNegativeInt, Positive, PositiveInt, Probability


class Least(NamedTuple):
    """The minimum values in a script of the authors, however short the run."""

    warmup: int
    window: int
    check_after: int


LEAST = {"vision": Least(100, 200, 0), "language": Least(30, 60, 1)}
UNPLANNED_EXPANSION = 1000  # steps, if the length of the run is unknown
UNPLANNED = (
    "MASS sets its phases as fractions of the run, but does not know its length: the pool may grow in the first "
    f"{UNPLANNED_EXPANSION} steps, with the shortest windows. Call intbmoe.plan_steps(model, total_steps) first"
)
EARLY_WARMUP = 50  # for runs whose state holds no plan
ROUNDING = torch.finfo(torch.float32).eps  # a spread of norms below this fraction of the norm counts as zero


@dataclass(frozen=True, kw_only=True)
class MASSConfig(PoolConfig):
    """Top-p routing over a pool that grows to at most ``experts``."""

    top_p: Annotated[float, MustBe("a number in (0, 1]", lambda value: 0 < value <= 1)] = 0.5
    """p, the total routing mass of a token's experts."""
    renormalize: bool = True
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    redundancy: float = 0.01
    """β, the coefficient of the redundancy loss."""
    domain: Literal["vision", "language"] = "vision"
    """Which of the authors' scripts sets the options that are None."""
    expansion: Probability = 0.1
    """Fraction of the run in which the pool may grow."""
    expansion_steps: NonNegativeInt | None = None
    """The same as a number of optimizer steps; None to use the fraction."""
    window_share: Probability = 0.09
    """Length of a window as a fraction of the run, unless window is given."""
    window: Annotated[int, MustBe("an integer of at least 2, for a standard deviation", lambda n: n > 1)] | None = None
    """ω, optimizer steps per window; None for the fraction, at least 200 (vision) or 60 (language)."""
    warmup_share: Probability = 0.05
    """Length of a warm-up as a fraction of the run, unless warmup is given."""
    warmup: PositiveInt | None = None
    """Steps before an expert's drift counts, again after a copy; None for the fraction, at least 100 (text: 30)."""
    significance: Annotated[float, MustBe("a number in (0, 1)", lambda value: 0 < value < 1)] = 0.01
    """Largest p-value that counts as a drift."""
    similarity: Positive = 0.001
    """Largest |cosine| between an expert's weights and gradient at which it is copied."""
    patience: NonNegativeInt = 3
    """How many useless experts may be replaced before the pool is final."""
    check_after: NonNegativeInt | None = None
    """Number of added experts that are not checked for usefulness; None for 0 (vision) or 1 (language)."""

    def resolve_steps(self, total: int | None) -> tuple[int, int, int]:
        """Warm-up, window and expansion phase in steps, for a run of ``total`` steps; None if that is unknown."""
        least, known = LEAST[self.domain], total or 0
        warmup = self.warmup or max(least.warmup, int(known * self.warmup_share))
        window = self.window or max(least.window, int(known * self.window_share))
        phase = UNPLANNED_EXPANSION if total is None else int(total * self.expansion)
        return warmup, window, phase if self.expansion_steps is None else self.expansion_steps


@register("mass", title="MASS", paper="Park and Park, 2026", code="psmiz/MASS", participation="sparse", dynamic=True)
class MASS(PoolLayer):
    """Top-p token choice, with a pool that grows where gradients drift."""

    Config = MASSConfig
    REPLAYS = True
    REFUSES: ClassVar = PoolLayer.REFUSES | {
        "experts": "it copies experts, their gradients and moments between slots, which could be on different ranks"
    }

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        self.router = Linear(c.dim, c.experts, bias=False)
        self.planned = None not in (c.warmup, c.window, c.expansion_steps)
        plan = c.resolve_steps(None)
        self.register_buffer("plan", torch.tensor(plan))  # steps of warm-up, window and phase
        # The open slots are always the first ones: only the expert added last is ever closed.
        self.register_buffer("source", torch.full((c.experts,), -1))
        self.register_buffer("norms", torch.zeros(c.experts, plan[1], dtype=torch.float32))
        self.register_buffer("scores", torch.zeros(c.experts, plan[1], dtype=torch.float32))
        self.register_buffer("norms_seen", torch.zeros(c.experts, dtype=torch.int64))
        self.register_buffer("scores_seen", torch.zeros(c.experts, dtype=torch.int64))
        self.register_buffer("waited", torch.zeros(c.experts, dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("patience", torch.tensor(c.patience))
        self.register_buffer("final", torch.tensor(False))

    def plan_steps(self, total: int) -> None:
        self.planned = True
        if self.steps > 0:
            return
        _, window, phase = plan = self.config.resolve_steps(total)
        if phase < window:
            warnings.warn(
                f"MASS can never add an expert in a run of {total} steps: its phase of {phase} steps ends before a "
                f"window of {window} is full. Increase moe.options.expansion or shorten the window",
                stacklevel=3,
            )
        self.plan.copy_(torch.tensor(plan))
        self._resize_windows(window)

    def fit_state(self, state: dict[str, Tensor], prefix: str) -> None:
        norms = state.get(f"{prefix}norms")
        if norms is None or norms.dim() != 2:
            return
        self._resize_windows(norms.shape[1])
        if f"{prefix}plan" not in state:
            early = [self.config.warmup or EARLY_WARMUP, norms.shape[1], self.config.resolve_steps(None)[2]]
            state[f"{prefix}plan"] = torch.tensor(early, device=norms.device)

    def _resize_windows(self, length: int) -> None:
        """Replace windows of another length by empty windows of ``length``."""
        for name in ("norms", "scores"):
            if (window := self._buffers[name]).shape[1] != length:
                self._buffers[name] = window.new_zeros(window.shape[0], length)

    def _expected_choices(self) -> float:
        return float(math.ceil(self.config.top_p * self.config.start))

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        tokens = x.reshape(-1, c.dim)
        logits = self.router(wide(tokens))
        probabilities = logits.masked_fill(~self.active, -torch.inf).softmax(-1)
        order = top_k(probabilities.detach(), c.experts)
        ranked = probabilities.gather(1, order)
        # The mass before each rank, as a masked sum: a float cumulative sum is not deterministic on every device.
        earlier = torch.ones(c.experts, c.experts, dtype=torch.bool, device=x.device).tril(-1)
        before = torch.where(earlier, ranked.detach().unsqueeze(1), 0).sum(-1)
        kept = (before < c.top_p) & self.active[order]
        ids = mask_choices(torch.where(kept, order, -1), mask)
        weights = torch.where(ids >= 0, ranked, 0)
        if c.renormalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / torch.where(total > 0, total, 1)  # masked tokens have no mass
        y, load = self.experts.route(tokens.to(dtype), ids, weights)
        losses = {"redundancy": c.redundancy * self._redundancy()} if self.training else {}
        return Result(y.view(x.shape), Routing(ids, weights), losses, {"load": load})

    def _redundancy(self) -> Tensor:
        """Σ cos² between the router rows of each copy and its source; 0 once the phase is over."""
        rows = unit(wide(self.router.weight))
        pairs = self.source.unsqueeze(1) == torch.arange(self.config.experts, device=rows.device)
        counted = pairs & (self.steps < self.plan[2])
        return torch.where(counted, (rows @ rows.t()).square(), 0).sum()

    @classmethod
    @torch.no_grad()
    def family_before_step(
        cls, layers: Sequence[Self], optimizer: Any, reevaluate: Callable[[], Tensor] | None
    ) -> None:
        for layer in layers:
            layer._require_whole_slots()
            if layer._is_over():
                layer._resize_windows(0)
            elif layer._first.requires_grad:
                if not layer.planned and layer.steps == 0:
                    warnings.warn(UNPLANNED, stacklevel=4)
                norms, cosines = layer._gradients()
                layer._observe(norms)
                source = layer._drifting(norms, cosines)
                if source is not None:
                    layer._expand(source, optimizer, reevaluate)

    @classmethod
    @torch.no_grad()
    def family_after_step(cls, layers: Sequence[Self], sums: Sequence[dict[str, Tensor]], optimizer: Any) -> None:
        for layer, recorded in zip(layers, sums, strict=True):
            layer._measure_choices(recorded["load"].sum(), recorded["tokens"])
            layer.steps += 1

    def _is_over(self) -> bool:
        """Whether the pool is final: the phase has ended, no slot is free or no patience is left."""
        return bool(self.final | self.active.all() | (self.steps >= self.plan[2]))

    @property
    def _first(self) -> nn.Parameter:
        """(E, d, h), the matrix whose gradient is watched."""
        return (self.experts.gate if self.config.expert == "swiglu" else self.experts.up).weight

    def _gradients(self) -> Tensor:
        """(2, E): the norm of each expert's gradient, in the windows' type, and its cosine with the weights."""
        if self._first.grad is None:
            raise RuntimeError("a MASS layer has no gradient: call intbmoe.before_step after loss.backward()")
        weight, grad = wide(self._first).flatten(1), wide(self._first.grad).flatten(1)
        norm = torch.linalg.vector_norm(grad, dim=1)
        found = torch.stack([norm.to(self.norms.dtype).to(norm.dtype), (unit(weight) * unit(grad)).sum(1)])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(found, src=0)  # already equal under DDP, but all ranks must decide alike
        return found

    def _observe(self, norms: Tensor) -> None:
        """Put this step's norms and z-scores into the windows of the open experts."""
        slots = torch.arange(self.config.experts, device=norms.device)
        seen = self.active & norms.isfinite()
        self._push(self.norms, self.norms_seen, slots, norms, seen)
        self.waited += seen
        window = self.norms.shape[1]
        count = self.norms_seen.clamp(max=window)
        held = torch.arange(window, device=norms.device) < count.unsqueeze(1)
        # Relative to the newest norm, so that equal norms deviate by exactly 0, however the mean is rounded.
        distance = torch.where(held, self.norms.double() - norms.double().unsqueeze(1), 0)
        mean = distance.sum(1) / count.clamp(min=1)
        variance = torch.where(held, (distance - mean.unsqueeze(1)).square(), 0).sum(1) / (count - 1).clamp(min=1)
        spread = variance.sqrt()
        scores = torch.where(spread > ROUNDING * norms.double(), -mean / spread, 0)
        self._push(self.scores, self.scores_seen, slots, scores, seen & (self.waited >= self.plan[0]))

    @staticmethod
    def _push(window: Tensor, pushed: Tensor, slots: Tensor, values: Tensor, where: Tensor) -> None:
        """Replace the oldest entry in the windows selected by ``where``."""
        place = pushed % window.shape[1]
        window[slots, place] = torch.where(where, values.to(window.dtype), window[slots, place])
        pushed += where

    def _drifting(self, norms: Tensor, cosines: Tensor) -> int | None:
        c, window = self.config, self.norms.shape[1]
        statistic = self.scores.double().sum(1) / math.sqrt(window)
        passes = (statistic > NormalDist().inv_cdf(1 - c.significance)) & (cosines.abs() < c.similarity)
        ready = self.active & (self.waited >= self.plan[0]) & (self.norms_seen >= window)
        found = (passes & ready & norms.isfinite() & (norms > 0)).nonzero()
        return int(found[0]) if len(found) else None

    def _expand(self, source: int, optimizer: Any, reevaluate: Callable[[], Tensor] | None) -> None:
        """Copy ``source``, after closing the expert added last if it proved useless."""
        opened = int(self.active.sum())
        c, last, added = self.config, opened - 1, opened - self.config.start
        unchecked = LEAST[c.domain].check_after if c.check_after is None else c.check_after
        if reevaluate is not None and added > unchecked and self._is_useless(last, reevaluate):
            self._vacate(last, optimizer)
            opened -= 1
            if self.patience == 0:
                self.final.fill_(True)
                return
            self.patience -= 1
            if source == last:
                return
        self._duplicate(source, opened, optimizer)

    def _is_useless(self, slot: int, reevaluate: Callable[[], Tensor]) -> bool:
        device = self.active.device
        losses = []
        for present in (True, False):
            self.active[slot] = present
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                losses.append(torch.as_tensor(reevaluate(), device=device).detach().double())
        self.active[slot] = True
        return bool(sum_over_ranks(losses[1] - losses[0]) <= 0)

    def _vacate(self, slot: int, optimizer: Any) -> None:
        self.active[slot] = False
        self.source[slot] = -1
        for record in (self.norms, self.scores, self.norms_seen, self.scores_seen, self.waited):
            record[slot] = 0
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad[slot] = 0
        reset_moments(optimizer, self.parameters(), torch.arange(len(self.active), device=self.active.device) == slot)

    def _duplicate(self, source: int, slot: int, optimizer: Any) -> None:
        """Open ``slot`` as a copy of ``source`` and split the gradients of the first matrix and the router row."""
        self._vacate(slot, optimizer)
        for parameter in self.parameters():
            parameter[slot] = parameter[source]
        self.active[slot] = True
        self.source[slot] = source
        self.waited[source] = 0
        for parameter in (self._first, self.router.weight):
            if parameter.grad is None:  # a frozen router
                continue
            weight, grad = wide(parameter[source]), wide(parameter.grad[source])
            scale = (weight * grad).sum(0) if weight.dim() == 2 else weight @ grad
            length = weight.square().sum(0)  # of the d weights of one unit, or of the router row
            parameter.grad[slot] = parameter.grad[source]
            parameter.grad[source] = scale / torch.where(length > 0, length, 1) * weight
