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

``BlockLayer.compute`` takes the tokens from router to output, ``parts/blocks.py`` through the blocks. The forward to
read is ``ops/blocks/naive.py``, a loop over blocks: ``layer.backend = "naive"`` runs it, and every other backend is
tested against it.

The released module also holds a LayerNorm after the last internal layer that nothing uses;
``load_reference_state_dict`` and ``to_reference_state_dict`` translate.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.checks import require, require_state
from intbmoe.layer import LayerConfig, MoELayer, Quantities, Result, Routing
from intbmoe.ops import native
from intbmoe.ops.backend import BACKENDS, Backend, choose_backend
from intbmoe.ops.blocks import Blocks
from intbmoe.ops.choose import choose
from intbmoe.ops.compose import Coefficients, compose
from intbmoe.ops.composed_mm import Pooled
from intbmoe.parts.blocks import run_blocks
from intbmoe.parts.experts import StackedLinear, SwiGLU
from intbmoe.parts.router import MLPRouter, mask_choices
from intbmoe.precision import autocast_off, cast, linear, wide
from intbmoe.registry import register
from intbmoe.settings import AtMost, MustBe, PositiveInt


@dataclass(frozen=True)
class IntBMoEConfig(LayerConfig):
    """Every switch of the layer; the defaults are the paper's on ImageNet."""

    hidden: Annotated[PositiveInt | tuple[PositiveInt, ...], MustBe("a positive integer or a tuple of them")]
    """Inner widths of a block: L = len(hidden) + 1 internal layers, an int means one inner width."""
    _: KW_ONLY
    experts: PositiveInt = 16
    """E, expert bases in each internal layer's pool."""
    blocks: PositiveInt = 8
    """K, codebook entries and thus composed blocks."""
    top_k: Annotated[PositiveInt, AtMost("blocks")] = 2
    """k, blocks a token is sent to."""
    code_dim: PositiveInt = 32
    """Width of a codebook entry."""
    router_dim: PositiveInt = 64
    """Inner width of the router's MLP."""
    hyper_dim: PositiveInt = 16
    """Inner width of the hypernetwork that makes coefficients of codebook entries."""
    shared_hidden: PositiveInt | None = None
    """Inner width of the shared SwiGLU; None matches its weights to one expert's."""
    residual_scale: float = 1.0
    """λ at the start."""
    learn_scale: bool = True
    """Whether λ is trained."""
    gate: bool = True
    """Whether a composed block has a gating path beside its value path; without it λ is not there either."""
    filter: bool = True
    """Whether a token is filtered for the block that it enters."""
    shared: bool = True
    """Whether there is a shared SwiGLU that every token passes."""
    coefficients: Literal["linear", "softmax"] = "linear"
    """Unconstrained with 1/√E, or a softmax over the bases for each path."""

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
        return self.shared_hidden or max(1, round(self.expert_weights / (3 * self.dim)))

    def ablations(self) -> dict[str, "IntBMoEConfig"]:
        """The paper's six ablations of this configuration, by name."""
        one_layer_experts = max(1, round(self.experts * self.expert_weights / self.dim**2))
        return {
            # The pool grows to the same expert weights; the shared expert stays what it was.
            "one_layer": replace(self, hidden=(), experts=one_layer_experts, shared_hidden=self.shared_width),
            "fixed_scale": replace(self, learn_scale=False, residual_scale=1.0),
            "no_gate": replace(self, gate=False),
            "no_shared": replace(self, shared=False),
            "no_filter": replace(self, filter=False),
            "softmax": replace(self, coefficients="softmax"),
        }


class Hypernetwork(nn.Module):
    """From a block's code to its coefficients: one for each base and path."""

    def __init__(self, config: IntBMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.trunk = nn.Linear(config.code_dim, config.hyper_dim)
        self.norm = nn.LayerNorm(config.hyper_dim)
        self.value = nn.Linear(config.hyper_dim, config.experts)
        self.gate = nn.Linear(config.hyper_dim, config.experts) if config.gate else None

    def forward(self, codebook: Tensor) -> Coefficients:
        """(K, code_dim) codes → the coefficients of each path in the wide type."""
        trunk = linear(wide(codebook), self.trunk.weight, self.trunk.bias)
        norm = wide(self.norm.weight), wide(self.norm.bias)
        q = F.relu(F.layer_norm(trunk, self.norm.normalized_shape, *norm, self.norm.eps))
        value = linear(q, self.value.weight, self.value.bias)
        gate = None if self.gate is None else linear(q, self.gate.weight, self.gate.bias)
        if self.config.coefficients == "softmax":
            return Coefficients(value.softmax(-1), None if gate is None else gate.softmax(-1), 1.0)
        return Coefficients(value, gate, 1 / math.sqrt(self.config.experts))


class BlockLayer(MoELayer):
    """What IntBMoE and its precomposed form share: router, norms, λ, shared expert, and the way of a token."""

    Config = IntBMoEConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        config = self.config
        self.router = MLPRouter(config.dim, config.router_dim, config.blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in config.hidden)
        self.shared = SwiGLU(config.dim, config.shared_width) if config.shared else None
        self.gate_norms = nn.ParameterList(nn.Parameter(torch.ones(w)) for w in config.widths[1:] if config.gate)
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
        """What runs the layer: one of ``ops.backend.BACKENDS``, "naive" being the specification; None: by the input."""
        return self._backend

    @backend.setter
    def backend(self, backend: Backend | None) -> None:
        require(backend in (None, *BACKENDS), "backend", backend, f"None or one of {', '.join(BACKENDS)}")
        self._backend = backend

    @property
    def choices(self) -> int:
        return self.config.blocks

    def blocks(self, dtype: torch.dtype, backend: Backend = "tiled") -> Blocks:
        """The K blocks, large tensors in ``dtype``, laid out for ``backend``."""
        raise TypeError(f"{type(self).__name__} does not define blocks()")

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        rows = x.reshape(-1, self.config.dim)
        backend = choose_backend(rows, dtype, self._backend, has_native=True)
        scores, tokens = self.router(rows, dtype, backend)
        ids, weights = choose(scores, self.config.top_k, backend)
        if mask is not None:
            ids = mask_choices(ids, mask)
            weights = torch.where(ids < 0, 0, weights)
        shared = None if self.shared is None else self.shared(tokens, backend)
        blocks = self.blocks(dtype, backend)
        y, load = run_blocks(tokens, ids, weights, shared, blocks, backend, complete=mask is None, dtype=x.dtype)
        return Result(y.view(x.shape), Routing(ids, weights), sums={"load": load})

    def quantities(self) -> Quantities:
        return Quantities(self.config.experts, self.config.top_k, self.config.blocks)

    def _row_parameters(self) -> dict[str, Any]:
        """The part of ``Blocks`` that all blocks share, in the wide type."""
        return {
            "gains": tuple(wide(gain) for gain in self.gate_norms),
            "scale": None if self.scale is None else wide(self.scale),
            "norms": tuple((wide(norm.weight), wide(norm.bias)) for norm in self.norms),
        }

    def extra_repr(self) -> str:
        c = self.config
        widths = "→".join(str(width) for width in c.widths)
        backend = self.backend or ("auto" if native.LIBRARY else "auto without the compiled library")
        return f"{widths}, experts={c.experts}, blocks={c.blocks}, top_k={c.top_k}, backend={backend}"


@register("intbmoe", title="IntBMoE", paper="Cheng et al., 2026", participation="dense", composes=True)
class IntBMoE(BlockLayer):
    """The trainable layer: K blocks are composed from the pools at every forward."""

    KEPT_WIDE = ("router", "codebook", "hypernetwork")
    DECAY_GROUPS: ClassVar = {"router": "routers", "gate_norms": "norms", "scale": "scales"}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        self.codebook = nn.Parameter(torch.randn(c.blocks, c.code_dim))
        self.hypernetwork = Hypernetwork(c)
        self.pools = nn.ModuleList(StackedLinear(c.experts, a, b, bias=True) for a, b in pairwise(c.widths))
        self.filter = nn.Linear(c.dim + c.code_dim, c.dim) if c.filter else None
        self.recompute = False
        """Whether the backends fused and grouped compose again in backward, instead of keeping what they composed."""

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.pools[0].weight.dtype

    def coefficients(self) -> list[Tensor]:
        """The composition coefficients (K, E) of each path, as they multiply the bases."""
        with autocast_off(self.codebook):
            return self.hypernetwork(self.codebook).paths

    def blocks(self, dtype: torch.dtype, backend: Backend = "tiled") -> Blocks:
        """Compose the K blocks in the wide type; the matrices are then cast once."""
        coefficients = self.hypernetwork(self.codebook)
        token_filter = block_filter = None
        if self.filter is not None:
            token_filter, code_filter = self.filter.weight.split([self.config.dim, self.config.code_dim], dim=1)
            block_filter = linear(wide(self.codebook), code_filter, self.filter.bias).to(dtype)
        return Blocks(
            weights=tuple(self._compose(coefficients, pool.weight, dtype, backend) for pool in self.pools),
            biases=tuple(self._compose_bias(coefficients, pool.bias, backend) for pool in self.pools),
            token_filter=token_filter,
            block_filter=block_filter,
            **self._row_parameters(),
        )

    def _compose(self, alpha: Coefficients, pool: Tensor, dtype: torch.dtype, backend: Backend) -> Tensor | Pooled:
        if self.recompute and torch.is_grad_enabled() and backend in ("fused", "grouped"):
            return Pooled(alpha, pool)
        return compose(alpha, pool, dtype, backend)

    def _compose_bias(self, alpha: Coefficients, pool: Tensor, backend: Backend) -> Tensor:
        """(E, o) → (K, P·o), in the wide type."""
        return compose(alpha, pool.unsqueeze(1), wide(pool).dtype, backend).squeeze(1).contiguous()

    def precompose(self, dtype: torch.dtype | None = None) -> "ComposedMoE":
        """A frozen layer with the same outputs, without pools and hypernetwork: its cost does not depend on E.

        ``dtype`` is the type of the composed weights and of its inputs (default: this layer's). The router keeps
        its own, so that a half-precision copy sends tokens where this layer would.
        """
        return ComposedMoE.of(self, dtype or self.weight_dtype)

    def load_reference_state_dict(self, state: Mapping[str, Tensor]) -> list[str]:
        """Take parameters under the authors' names, strictly; returns the keys of their unused last LayerNorm.

        Unknown keys, missing keys and wrong shapes raise before anything is changed.
        """
        names = self._reference_names()
        unused = [key for key in self._unused_reference_keys() if key in state]
        own = self.state_dict()
        expected = {reference: own[name] for name, reference in names.items()}
        require_state("reference", state, expected | dict.fromkeys(unused, self.pools[-1].bias[0]))
        self.load_state_dict({name: state[reference] for name, reference in names.items()})
        return unused

    def to_reference_state_dict(self) -> dict[str, Tensor]:
        """The parameters under the authors' names, their unused last LayerNorm as ones and zeros."""
        own = self.state_dict()
        state = {reference: own[name].clone() for name, reference in self._reference_names().items()}
        weight, bias = self._unused_reference_keys()
        like = self.pools[-1].bias.detach()[0]
        return state | {weight: torch.ones_like(like), bias: torch.zeros_like(like)}

    def _unused_reference_keys(self) -> tuple[str, str]:
        last = len(self.pools) - 1
        return f"layer_norms.{last}.weight", f"layer_norms.{last}.bias"

    def _reference_names(self) -> dict[str, str]:
        """Our parameter names → the authors'."""
        prefixes = {
            "codebook": "block_embeddings.weight",
            "scale": "composition_alpha",
            "hypernetwork.trunk.": "basis_weight_projection.0.",
            "hypernetwork.norm.": "basis_weight_projection.1.",
            "hypernetwork.value.": "value_basis_projection.",
            "hypernetwork.gate.": "gate_basis_projection.",
            "router.hidden.": "router.0.",
            "router.scores.": "router.2.",
            "pools.": "basis_layers.",
            "filter.": "feature_filter.",
            "norms.": "layer_norms.",
            "shared.gate.": "shared_experts.0.gate_proj.",
            "shared.up.": "shared_experts.0.up_proj.",
            "shared.down.": "shared_experts.0.down_proj.",
        }
        names = {}
        for name in self.state_dict():
            if name.startswith("gate_norms."):
                names[name] = f"composition_{name}.scale"
            else:
                ours = next(prefix for prefix in prefixes if name.startswith(prefix))
                names[name] = prefixes[ours] + name.removeprefix(ours)
        return names


class ComposedMoE(BlockLayer):
    """IntBMoE for inference: composed blocks only. Nothing to train, nothing to go stale, no trace of E.

    ``IntBMoE.precompose`` makes one; ``ComposedMoE(config)`` makes an empty one for ``load_state_dict``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c, paths = self.config, 2 if self.config.gate else 1
        pairs = list(pairwise(c.widths))
        self.block_weights = nn.ParameterList(torch.zeros(c.blocks, a, paths * b) for a, b in pairs)
        self.block_biases = nn.ParameterList(torch.zeros(c.blocks, paths * b) for _, b in pairs)
        self.token_filter = nn.Parameter(torch.zeros(c.dim, c.dim)) if c.filter else None
        self.block_filter = nn.Parameter(torch.zeros(c.blocks, c.dim)) if c.filter else None
        self.requires_grad_(False)

    @classmethod
    def of(cls, layer: IntBMoE, dtype: torch.dtype) -> "ComposedMoE":
        """Compose ``layer``'s blocks, once."""
        with torch.device("meta"):  # every tensor is replaced below; drawing none leaves the random state alone
            composed = cls(layer.config).train(layer.training)
        with torch.no_grad(), autocast_off(layer.codebook):
            blocks = layer.blocks(dtype)
        composed.backend = layer.backend
        for name in ("router", "norms", "gate_norms", "scale"):
            setattr(composed, name, copy.deepcopy(getattr(layer, name)))
        composed.shared = copy.deepcopy(layer.shared).to(dtype) if layer.shared is not None else None
        composed.block_weights, composed.block_biases = (
            nn.ParameterList(blocks.weights),
            nn.ParameterList(blocks.biases),
        )
        if blocks.token_filter is not None:
            composed.token_filter = nn.Parameter(blocks.token_filter.detach().to(dtype, copy=True))
            composed.block_filter = nn.Parameter(blocks.block_filter.detach())
        return composed.requires_grad_(False)

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.block_weights[0].dtype

    def blocks(self, dtype: torch.dtype, backend: Backend = "tiled") -> Blocks:
        return Blocks(
            weights=tuple(cast(weight, dtype) for weight in self.block_weights),
            biases=tuple(wide(bias) for bias in self.block_biases),
            token_filter=self.token_filter,
            block_filter=None if self.block_filter is None else cast(self.block_filter, dtype),
            **self._row_parameters(),
        )

    def active_parameters(self) -> int:
        """All but the blocks that one token does not visit."""
        per_block = [*self.block_weights, *self.block_biases]
        per_block += [] if self.block_filter is None else [self.block_filter]
        idle = sum(tensor.numel() // tensor.shape[0] for tensor in per_block) * (self.config.blocks - self.config.top_k)
        return super().active_parameters() - idle
