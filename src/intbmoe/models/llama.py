"""The 18-layer Llama-style decoder of the paper's language experiments.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023. Letters: ``B`` sequences, ``T`` tokens,
``d`` width, ``w`` width of a head, ``V`` vocabulary.

    tokens   x_t = W_e[id_t]
    layer    x ← x + Attention(RMS(x)),   x ← x + FFN(RMS(x))              RMS(x) = x / sqrt(mean(x²) + ε) ⊙ gain
    attention over the tokens up to one's own, with queries and keys turned by their position t (RoPE, Su et al., 2021):
             (u_i, u_{i+w/2}) ← rotation of (u_i, u_{i+w/2}) by the angle t·θ^(−2i/w)
    output   logits = W_e RMS(x)                                           the embedding is tied to the output map

The FFN of every layer is what ``make_ffn`` makes, and a SwiGLU when it is left out:

    model = Llama(LlamaConfig(), lambda: intbmoe.create("switch", 768, 2048, experts=9, expert="swiglu"))

Parameters carry the names of Hugging Face's ``LlamaForCausalLM`` without the leading ``model.``, so that its weights
load into the dense form; the mixture of layer i is ``layers.i.mlp``. Matrices have no bias and start as N(0, 0.02²); a
mixture starts as it does anywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.checks import require, require_finite, require_positive_int
from intbmoe.models.causal import apply_ffn, check_mask, require_causal, visible_tokens
from intbmoe.precision import wide

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, (T, w/2) each."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of the decoder; the defaults are the paper's on MiniPile."""

    vocabulary: int = 32_000
    """V."""
    dim: int = 768
    depth: int = 18
    heads: int = 12
    hidden: int = 2048
    """Inner width of the dense SwiGLU."""
    rope_theta: float = 1e4
    """θ: the slowest pair of a head turns by about 1/θ a token."""
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocabulary", "dim", "depth", "heads", "hidden"):
            require_positive_int(name, getattr(self, name))
        even = self.dim % (2 * self.heads) == 0
        require(even, "heads", self.heads, f"such that dim ({self.dim}) splits into heads of even width")
        for name in ("rope_theta", "norm_eps", "init_std"):
            require_finite(name, getattr(self, name))
            require(getattr(self, name) > 0, name, getattr(self, name), "positive")

    @property
    def head_dim(self) -> int:
        """w, the width of a head."""
        return self.dim // self.heads


def _linear(config: LlamaConfig, inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=config.init_std)
    return layer


def rotation(config: LlamaConfig, x: Tensor) -> Rotation:
    """The turn of every position of ``x`` (B, T, d), in the wide type."""
    like = {"dtype": torch.promote_types(x.dtype, torch.float32), "device": x.device}
    pairs = torch.arange(0, config.head_dim, 2, **like) / config.head_dim
    angles = torch.outer(torch.arange(x.shape[1], **like), config.rope_theta**-pairs)
    return angles.cos(), angles.sin()


def rotate(u: Tensor, turn: Rotation) -> Tensor:
    """(B, heads, T, w) → the same, each pair (u_i, u_{i+w/2}) turned by its position's angle."""
    cos, sin = turn
    first, second = wide(u).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(u.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = _linear(config, config.dim, config.dim)
        self.k_proj = _linear(config, config.dim, config.dim)
        self.v_proj = _linear(config, config.dim, config.dim)
        self.o_proj = _linear(config, config.dim, config.dim)

    def forward(self, x: Tensor, turn: Rotation, visible: Tensor | None) -> Tensor:
        """(B, T, d) → (B, T, d); ``visible`` (B, 1, T, T) where there is padding, else all up to one's own."""
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in maps)
        q, k = rotate(q, turn), rotate(k, turn)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The dense FFN, ``down(SiLU(gate x) ⊙ up x)``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config, config.dim, config.hidden)
        self.up_proj = _linear(config, config.dim, config.hidden)
        self.down_proj = _linear(config, config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and FFN, each on the normalised stream and added to it."""

    def __init__(self, config: LlamaConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, turn: Rotation, mask: Tensor | None, visible: Tensor | None) -> Tensor:
        """(B, T, d) → (B, T, d)."""
        x = x + self.self_attn(self.input_layernorm(x), turn, visible)
        return x + apply_ffn(self.mlp, self.post_attention_layernorm(x), mask)


class Llama(nn.Module):
    """Token ids to the next token's logits. ``make_ffn`` makes each layer's FFN; without it the model is dense.

    A layer that looks at later tokens is refused, with the reason.
    """

    def __init__(self, config: LlamaConfig, make_ffn: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.dim)
        nn.init.normal_(self.embed_tokens.weight, std=config.init_std)
        make = make_ffn or (lambda: Mlp(config))
        self.layers = nn.ModuleList(DecoderLayer(config, require_causal(make())) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T) ids, (B, T) bool validity (True: valid; None: all) → (B, T, V) logits, without meaning at padding.

        Padding may stand anywhere and hold any id: no valid token sees it, and no mixture counts it.
        """
        if ids.dim() != 2:
            raise ValueError(f"ids have shape {tuple(ids.shape)}: expected (batch, tokens)")
        check_mask(mask, ids.shape)
        x = self.embed_tokens(ids)
        turn = rotation(self.config, x)
        visible = None if mask is None else visible_tokens(mask)
        for layer in self.layers:
            x = layer(x, turn, mask, visible)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def load_huggingface_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the weights of a ``LlamaForCausalLM`` with tied embeddings into the dense form.

        Strict: an unknown key, a missing key, a wrong shape or an output map of its own raises before anything is
        changed, and so does a model that holds mixtures.
        """
        if not all(isinstance(layer.mlp, Mlp) for layer in self.layers):
            raise ValueError("these weights fit the dense form only: build Llama(config) without make_ffn")
        own = self.state_dict()
        names = {f"model.{name}": name for name in own}
        missing = sorted(set(names) - set(state))
        unknown = sorted(set(state) - set(names) - {"lm_head.weight"})
        if missing or unknown:
            raise KeyError(f"Hugging Face state does not fit: missing keys {missing}, unknown keys {unknown}")
        for theirs, name in names.items():
            if state[theirs].shape != own[name].shape:
                shapes = f"{tuple(state[theirs].shape)}, expected {tuple(own[name].shape)}"
                raise ValueError(f"Hugging Face parameter {theirs!r} has shape {shapes}")
        embedding = state["model.embed_tokens.weight"]
        if not torch.equal(state.get("lm_head.weight", embedding), embedding):
            raise ValueError("lm_head.weight differs from model.embed_tokens.weight: this model ties the two")
        self.load_state_dict({name: state[theirs] for theirs, name in names.items()})
