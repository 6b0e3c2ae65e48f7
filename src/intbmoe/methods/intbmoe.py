"""IntBMoE: block-conditioned composition of all experts, sparse execution of a few blocks.

Cheng, Xu, Liu, Liu and Chu, "IntBMoE: Integrating Block-Level Conditioning into Expert Composition for
Full-Participation Mixture-of-Experts", 2026. In our letters (``docs/method.md`` explains them):

    coefficients  q_b = ReLU(LN(A c_b + a)),  α_b^p = A_p q_b + a_p              codebook c_b, paths p ∈ {v, g}
    compose       W_{b,p}^l = 1/√E Σ_e α_{b,e}^p W_e^l,  biases likewise         b = 1…K, l = 1…L
    route         r_t = MLP(x_t),  B_t = top-k(r_t),  π_t = softmax(r_t)         over all K, not renormalised
    filter        z^0 = x_t ⊙ sigmoid(W_x x_t + W_c c_b + b_f)
    DPRG          v = W_{b,v} z + b_{b,v},  g = RMSNorm(W_{b,g} z + b_{b,g}),  z̃ = v ⊙ (1 + λ SiLU(g))
    between       z^l = LN(z̃^l) for l < L,  z^L = z̃^L = F_b(x_t)
    output        y_t = Σ_{b ∈ B_t} π_{t,b} F_b(x_t) + S(x_t)                    S: shared SwiGLU, always on

The authors' released module has forms that the paper does not describe, all off by default: ``conditioning_dim`` (a
vector for the whole call, joined to every c_b above), ``shared_kind`` and ``shared_experts``, a linear
``hypernetwork``, a ``gate_norm`` other than RMSNorm, no ``bias``, no ``layer_norm``.

``BlockLayer.compute`` is the forward, and ``parts/blocks.py`` sends the tokens through the blocks. The simplest version
to read is ``ops/blocks/naive.py``, a loop over blocks: ``layer.backend = "naive"`` runs it, and every other backend is
tested against it.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.layer import LayerConfig, MoELayer, Quantities, Result, Routing, copy_hooks, require_whole
from intbmoe.ops import native
from intbmoe.ops.backend import BACKENDS, Backend, choose_backend
from intbmoe.ops.blocks import Blocks
from intbmoe.ops.branches import CODES, COEFFICIENTS, FILTER, NONE, ROUTER, Branches
from intbmoe.ops.choose import choose
from intbmoe.ops.filter_terms import filter_terms
from intbmoe.parts.blocks import run_blocks
from intbmoe.parts.conditioning import check_conditioning
from intbmoe.parts.hypernetwork import Hypernetwork
from intbmoe.parts.linear import Linear
from intbmoe.parts.pool import Pool, compose_pools
from intbmoe.parts.quantized import all_in_int8, weight_dtype
from intbmoe.parts.reference import from_reference, to_reference
from intbmoe.parts.router import MLPRouter, mask_choices
from intbmoe.parts.shared import SharedKind, make_shared, run_shared
from intbmoe.precision import autocast_off, cast, wide
from intbmoe.registry import register
from intbmoe.settings import AtMost, MustBe, NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class IntBMoEConfig(LayerConfig):
    """All settings of the layer; the defaults are the paper's for ImageNet."""

    hidden: Annotated[PositiveInt | tuple[PositiveInt, ...], MustBe("a positive integer or a tuple of them")]
    """Inner widths of a block, which has L = len(hidden) + 1 internal layers; an int is one inner width."""
    _: KW_ONLY
    experts: PositiveInt = 16
    """E, the number of expert bases in each internal layer's pool."""
    blocks: PositiveInt = 8
    """K, the number of codebook entries and so of composed blocks."""
    top_k: Annotated[PositiveInt, AtMost("blocks")] = 2
    """k, the number of blocks that each token is sent to."""
    code_dim: PositiveInt = 32
    """Width of a codebook entry."""
    router_dim: PositiveInt = 64
    """Inner width of the router's MLP."""
    hyper_dim: PositiveInt = 16
    """Inner width of the hypernetwork, which turns codebook entries into coefficients."""
    shared_hidden: PositiveInt | None = None
    """Inner width of a shared expert, unless it is linear; None gives it about as many weights as one expert."""
    residual_scale: float = 1.0
    """Initial value of λ."""
    learn_scale: bool = True
    """Whether λ is trained."""
    gate: bool = True
    """Whether a composed block has a gating path beside its value path; without it there is no λ."""
    filter: bool = True
    """Whether a token is filtered for each block that it enters."""
    shared: bool = True
    """Whether every token also goes through a shared expert. To use a module of your own: layer.shared = module."""
    coefficients: Literal["linear", "softmax"] = "linear"
    """Unconstrained with 1/√E, or a softmax over the bases for each path."""
    conditioning_dim: NonNegativeInt = 0
    """Width of the vector in layer(x, conditioning=vector), which is joined to every block's code; 0 for none."""
    hypernetwork: Literal["two_layer", "linear"] = "two_layer"
    """Two layers with a LayerNorm between them, or one linear map for each path."""
    gate_norm: Literal["rms", "layer", "none"] = "rms"
    """The gating path's norm: RMSNorm, LayerNorm or none."""
    layer_norm: bool = True
    """Whether there is a LayerNorm between internal layers."""
    bias: bool = True
    """Whether the expert bases, and so the blocks, have biases."""
    shared_kind: SharedKind = "swiglu"
    """The shared expert: SwiGLU without biases, an MLP with SiLU, or one linear map."""
    shared_experts: PositiveInt = 1
    """Number of shared experts, each of inner width shared_hidden; their outputs are added."""

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = self.hidden if isinstance(self.hidden, tuple) else (self.hidden,)
        object.__setattr__(self, "hidden", widths)

    @property
    def widths(self) -> tuple[int, ...]:
        """d_0 … d_L."""
        return (self.dim, *self.hidden, self.dim)

    @property
    def expert_weights(self) -> int:
        """Weights, biases not counted, of one expert: the same-index bases of all internal layers."""
        return sum(a * b for a, b in pairwise(self.widths))

    @property
    def shared_width(self) -> int:
        matrices = 3 if self.shared_kind == "swiglu" else 2
        return self.shared_hidden or max(1, round(self.expert_weights / (matrices * self.dim)))

    @property
    def code_width(self) -> int:
        """Width of a block's code, including the call's conditioning."""
        return self.code_dim + self.conditioning_dim

    @property
    def paths(self) -> int:
        return 2 if self.gate else 1

    @property
    def has_kernels(self) -> bool:
        """Whether the blocks have the paper's form, for which there are kernels and compiled code."""
        return (self.gate_norm == "rms" or not self.gate) and (self.layer_norm or not self.hidden)

    def make_hypernetwork(self) -> Hypernetwork:
        hidden = self.hyper_dim if self.hypernetwork == "two_layer" else None
        return Hypernetwork(self.code_width, hidden, self.experts, gate=self.gate, coefficients=self.coefficients)

    def ablations(self) -> dict[str, "IntBMoEConfig"]:
        """The paper's six ablations of this configuration, by name."""
        one_layer_experts = max(1, round(self.experts * self.expert_weights / self.dim**2))
        return {
            # The pool grows to keep the number of expert weights; the shared expert does not change.
            "one_layer": replace(self, hidden=(), experts=one_layer_experts, shared_hidden=self.shared_width),
            "fixed_scale": replace(self, learn_scale=False, residual_scale=1.0),
            "no_gate": replace(self, gate=False),
            "no_shared": replace(self, shared=False),
            "no_filter": replace(self, filter=False),
            "softmax": replace(self, coefficients="softmax"),
        }


class BlockLayer(MoELayer):
    """What IntBMoE and its precomposed form share: router, norms, λ, shared expert, and the forward."""

    Config = IntBMoEConfig
    blocks: Callable[..., Blocks]
    """``blocks(dtype, backend, conditioning, branches)`` returns the K blocks, with large tensors in ``dtype``, laid
    out for ``backend``. They may be read only after their ``branches`` are joined."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        config = self.config
        self.router = MLPRouter(config.dim, config.router_dim, config.blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in config.hidden if config.layer_norm)
        shared = config.shared_kind, config.dim, config.shared_width, config.shared_experts
        self.shared = make_shared(*shared) if config.shared else None
        gate_norm = config.gate_norm if config.gate else "none"
        self.gate_norms = nn.ParameterList(torch.ones(w) for w in config.widths[1:] if gate_norm != "none")
        self.gate_shifts = nn.ParameterList(torch.zeros(w) for w in config.widths[1:] if gate_norm == "layer")
        scale = torch.full((1,), float(config.residual_scale))
        if not config.gate:
            self.scale = None
        elif config.learn_scale:
            self.scale = nn.Parameter(scale)
        else:
            self.register_buffer("scale", scale)
        self._backend: Backend | None = None

    @property
    def backend(self) -> Backend | None:
        """One of ``ops.backend.BACKENDS``, of which "naive" is the specification; None chooses by the input."""
        return self._backend

    @backend.setter
    def backend(self, backend: Backend | None) -> None:
        require(backend in (None, *BACKENDS), "backend", backend, f"None or one of {', '.join(BACKENDS)}")
        self._backend = backend

    @property
    def choices(self) -> int:
        return self.config.blocks

    @property
    def replay_settings(self) -> tuple | None:
        return (self._backend, getattr(self, "recompute", False)) if self._backend in (None, "fused") else None

    def compute(
        self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype, conditioning: Tensor | None = None
    ) -> Result:
        rows = x.reshape(-1, self.config.dim)
        backend = choose_backend(rows, dtype, self._backend, has_native=self.config.has_kernels)
        branches = Branches(rows)
        routed, tokens = branches.enter(rows, dtype)
        with branches.branch(ROUTER, routed):
            scores, read = self.router(routed, dtype if tokens is None else routed.dtype, backend)
            ids, weights = choose(scores, self.config.top_k, backend)
            if mask is not None:
                ids = mask_choices(ids, mask)
                weights = torch.where(ids < 0, 0, weights)
        tokens = read if tokens is None else tokens
        shared = None if self.shared is None else run_shared(self.shared, tokens, backend, branches)
        blocks = self.blocks(dtype, backend, conditioning, branches)
        known = {"complete": mask is None, "dtype": x.dtype, "branches": branches}
        y, load = run_blocks(tokens, ids, weights, shared, blocks, backend, **known)
        return Result(y.view(x.shape), Routing(ids, weights), sums={"load": load})

    def quantities(self) -> Quantities:
        return Quantities(self.config.experts, self.config.top_k, self.config.blocks)

    def _row_parameters(self) -> dict[str, Any]:
        """The part of ``Blocks`` that all blocks share, in the wide type."""
        return {
            "has_kernels": self.config.has_kernels,
            "gains": tuple(wide(gain) for gain in self.gate_norms),
            "gate_shifts": tuple(wide(shift) for shift in self.gate_shifts),
            "scale": None if self.scale is None else wide(self.scale),
            "norms": tuple((wide(norm.weight), wide(norm.bias)) for norm in self.norms),
        }

    def extra_repr(self) -> str:
        c = self.config
        backend = self.backend or ("auto" if native.LIBRARY else "auto without the compiled library")
        shown = [(f.name, getattr(c, f.name), f.default) for f in fields(c) if f.name not in ("dim", "hidden")]
        always = "experts", "blocks", "top_k"
        options = [f"{name}={value}" for name, value, default in shown if name in always or value != default]
        return ", ".join(["→".join(map(str, c.widths)), *options, f"backend={backend}"])


@register(
    "intbmoe",
    title="IntBMoE",
    paper="Cheng et al., 2026",
    code="AMAP-ML/DreamX-Rec",
    participation="dense",
    composes=True,
)
class IntBMoE(BlockLayer):
    """The trainable layer: K blocks are composed from the pools at every forward."""

    REPLAYS = True
    KEPT_WIDE = ("router", "codebook", "hypernetwork")
    DECAY_GROUPS: ClassVar = {"router": "routers", "gate_norms": "norms", "scale": "scales"}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        self.codebook = nn.Parameter(torch.randn(c.blocks, c.code_dim))
        self.hypernetwork = c.make_hypernetwork()
        self.pools = nn.ModuleList(Pool(c.experts, a, b, bias=c.bias) for a, b in pairwise(c.widths))
        self.filter = Linear(c.dim + c.code_width, c.dim) if c.filter else None
        self.recompute = False
        """Whether the fused and grouped backends compose again in backward instead of keeping the composed weights."""

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.pools[0].weight.dtype

    def coefficients(self, conditioning: Tensor | None = None) -> list[Tensor]:
        """The composition coefficients (K, E) of each path, as they multiply the bases."""
        with autocast_off(self.codebook):
            return self.hypernetwork(self._codes(conditioning)).paths

    def blocks(
        self, dtype: torch.dtype, backend: Backend, conditioning: Tensor | None = None, branches: Branches = NONE
    ) -> Blocks:
        """Compose the K blocks in the wide type; the matrices are then cast once."""
        if self.recompute:  # weights are composed where they are used, on the main branch
            branches = NONE
        (codes,) = branches.take(CODES, self._codes(conditioning))
        branches.mark()
        with branches.branch(COEFFICIENTS, codes):
            coefficients = self.hypernetwork(codes, backend)
        weights, biases = compose_pools(self.pools, coefficients, dtype, backend, self.recompute, branches)
        filters = {"token_filter": None, "block_filter": None}
        if self.filter is not None:
            with branches.branch(FILTER, codes):
                token_term, term = filter_terms(self.filter.weight, self.filter.bias, codes, dtype, backend)
                filters = {"token_filter": token_term, "block_filter": term if backend == "fused" else term.to(dtype)}
        return Blocks(weights=weights, biases=biases, **filters, **self._row_parameters())

    def _codes(self, conditioning: Tensor | None) -> Tensor:
        """(K, code_width), in the wide type: the codebook, with the conditioning joined to every entry."""
        codes = wide(self.codebook)
        conditioning = check_conditioning(conditioning, self.config.conditioning_dim, codes)
        if conditioning is None:
            return codes
        return torch.cat([codes, conditioning.expand(len(codes), -1)], dim=1)

    @torch.no_grad()
    def start_as(self, module: nn.Module) -> None:
        """Make ``module`` the shared expert and zero the last pool, the only one with a gradient at the first step."""
        require(self.config.shared, "shared", self.config.shared, "True, because the module becomes the shared expert")
        self.shared = module
        for parameter in self.pools[-1].parameters():
            parameter.zero_()

    def precompose(self, dtype: torch.dtype | None = None, conditioning: Tensor | None = None) -> "ComposedMoE":
        """Return a frozen layer with the same outputs but no pools or hypernetwork: its cost does not depend on E.

        ``dtype`` is the type of its composed weights and inputs (default: this layer's). The router keeps its own
        type, so that a half-precision copy routes tokens as this layer does. A layer with ``conditioning_dim`` is
        composed for one ``conditioning``.
        """
        return ComposedMoE.of(self, dtype or self.weight_dtype, conditioning)

    def load_reference_state_dict(self, state: Mapping[str, Tensor]) -> list[str]:
        """Load parameters under the authors' names, strictly; return the keys that their module has but never uses.

        Unknown or missing keys, wrong shapes and unequal copies of one parameter raise before anything is changed.
        """
        own, unused = from_reference(self, state)
        self.load_state_dict(own)
        return unused

    def to_reference_state_dict(self) -> dict[str, Tensor]:
        """The parameters under the authors' names; those that their module never uses have its initial values."""
        return to_reference(self)


class ComposedMoE(BlockLayer):
    """IntBMoE for inference: it holds only composed blocks, has nothing to train, and does not depend on E.

    ``IntBMoE.precompose`` makes one; ``ComposedMoE(config)`` makes an empty one for ``load_state_dict``.
    """

    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c, paths = self.config, self.config.paths
        self.block_weights = nn.ParameterList(torch.zeros(c.blocks, a, paths * b) for a, b in pairwise(c.widths))
        self.block_biases = nn.ParameterList(torch.zeros(c.blocks, paths * b) for b in c.widths[1:] if c.bias)
        self.token_filter = nn.Parameter(torch.zeros(c.dim, c.dim)) if c.filter else None
        self.block_filter = nn.Parameter(torch.zeros(c.blocks, c.dim)) if c.filter else None
        self.requires_grad_(False)

    @classmethod
    @torch.inference_mode(False)  # its tensors could never be loaded into, nor take part in a backward
    def of(cls, layer: IntBMoE, dtype: torch.dtype, conditioning: Tensor | None = None) -> "ComposedMoE":
        """Compose ``layer``'s blocks, once."""
        require(isinstance(dtype, torch.dtype) and dtype.is_floating_point, "dtype", dtype, "a torch.dtype of floats")
        require_whole(layer, "cannot precompose")
        with torch.device("meta"):  # every tensor is replaced below; no random numbers are drawn
            composed = cls(layer.config).train(layer.training)
        with torch.no_grad(), autocast_off(layer.codebook):
            blocks = layer.blocks(dtype, "tiled", conditioning)
        for name in ("backend", "router", "norms", "gate_norms", "gate_shifts", "scale"):
            setattr(composed, name, copy.deepcopy(getattr(layer, name)))
        if dtype == torch.float64:  # the wide type, in which everything beside the products is computed
            composed.double()
        composed.shared = copy.deepcopy(layer.shared).to(dtype) if layer.shared is not None else None
        composed.block_weights = nn.ParameterList(blocks.weights)
        composed.block_biases = nn.ParameterList(blocks.biases if layer.config.bias else ())
        if blocks.token_filter is not None:
            composed.token_filter = nn.Parameter(blocks.token_filter.detach().to(dtype, copy=True))
            composed.block_filter = nn.Parameter(blocks.block_filter.detach())
        copy_hooks(layer, composed)
        return composed.requires_grad_(False)

    @property
    def weight_dtype(self) -> torch.dtype:
        return weight_dtype(self.block_weights)

    def blocks(
        self, dtype: torch.dtype, backend: Backend, conditioning: Tensor | None = None, _: Branches = NONE
    ) -> Blocks:
        if conditioning is not None:
            raise ValueError("a precomposed layer takes no conditioning: leave it out, or precompose again with it")
        stored = all_in_int8(self.block_weights) if backend == "native" else None
        weights, scales = stored or (tuple(cast(weight, dtype) for weight in self.block_weights), ())
        zeros = (weight.new_zeros(len(weight), weight.shape[2], dtype=dtype) for weight in weights)
        biases = self.block_biases if self.config.bias else zeros
        return Blocks(
            weights=weights,
            scales=scales,
            biases=tuple(wide(bias) for bias in biases),
            token_filter=self.token_filter,
            block_filter=None if self.block_filter is None else cast(self.block_filter, dtype),
            **self._row_parameters(),
        )

    def active_parameters(self) -> int:
        """All parameters except those of the blocks that a token does not visit."""
        per_block = [*self.block_weights, *self.block_biases]
        per_block += [] if self.block_filter is None else [self.block_filter]
        idle = sum(tensor.numel() // tensor.shape[0] for tensor in per_block) * (self.config.blocks - self.config.top_k)
        return super().active_parameters() - idle
