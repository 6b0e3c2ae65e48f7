"""The 18-layer Llama-style decoder of the paper's language experiments.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023. Letters: ``B`` sequences, ``T`` tokens,
``d`` width, ``w`` width of a head, ``V`` vocabulary.

    tokens   x_t = W_e[id_t]
    layer    x ← x + Attention(RMS(x)),   x ← x + FFN(RMS(x))              RMS(x) = x / sqrt(mean(x²) + ε) ⊙ gain
    attention over the tokens up to the current one; queries and keys rotated by position t (RoPE, Su et al., 2021):
             (u_i, u_{i+w/2}) ← rotation of (u_i, u_{i+w/2}) by the angle t·θ^(−2i/w)
    output   logits = W_e RMS(x)                                           the embedding is tied to the output map

``make_ffn`` makes the FFN of every layer; without it the FFN is a SwiGLU:

    model = Llama(LlamaConfig(), lambda: intbmoe.create("switch", 768, 2048, experts=9, expert="swiglu"))

Parameters have the names of Hugging Face's ``LlamaForCausalLM`` without the leading ``model.``, so that its weights
load into the dense form; the mixture of layer i is ``layers.i.mlp``. Matrices have no bias and start as N(0, 0.02²);
mixtures keep their own initialisation.

Decoding keeps what later tokens need of earlier ones in a ``Cache``: rotated keys and values of every layer, and the
state of mixtures that have one. The model itself keeps nothing between calls except the graphs of ``generate``.

    cache = model.new_cache(batch=1, length=100)
    logits = model(prompt, cache=cache)                # any number of tokens at a time
    logits = model(next_id, cache=cache)               # only the logits of the new tokens

    ids = model.generate(prompts, mask, max_new_tokens=50, temperature=0.8, top_p=0.95)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.checks import require, require_positive_int
from intbmoe.models.causal import apply_ffn, check_mask, new_ffn_state, require_causal, visible_tokens
from intbmoe.models.decoding import Wanted, stream
from intbmoe.models.sampling import Sampling
from intbmoe.models.slots import Slots
from intbmoe.precision import autocast_dtype, cast, wide
from intbmoe.settings import Checked, Positive, PositiveInt

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (T, w/2) each


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Checked):
    """Sizes of the decoder; the defaults are the paper's on MiniPile, with ``hidden`` from its released code."""

    vocabulary: PositiveInt | None = 32_000
    """V, the size of the vocabulary; None for that of the data's tokenizer."""
    dim: PositiveInt = 768
    """d, the width of a token."""
    depth: PositiveInt = 18
    """The number of Transformer blocks."""
    heads: PositiveInt = 12
    """Attention heads per block."""
    hidden: PositiveInt = 2048
    """Inner width of the dense SwiGLU."""
    rope_theta: Positive = 1e4
    """θ: the slowest pair of a head rotates by about 1/θ per token."""
    norm_eps: Positive = 1e-6
    """The ε that RMSNorm adds to the mean square."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        even = self.dim % (2 * self.heads) == 0
        require(even, "heads", self.heads, f"such that dim ({self.dim}) splits into heads of even width")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def _linear(config: LlamaConfig, inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=config.init_std)
    return layer


@dataclass
class LayerCache:
    """What one layer keeps of the tokens it has read, with room for ``length`` tokens."""

    keys: Tensor  # (B, heads, length, w), rotated by their positions
    values: Tensor  # (B, heads, length, w)
    state: Any  # the decoding state of the layer's mixture; None if it has none
    held: int = 0  # tokens read

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values (B, heads, T, w) of new tokens; return those of all tokens so far."""
        start, self.held = self.held, self.held + k.shape[2]
        self.keys[:, :, start : self.held] = k
        self.values[:, :, start : self.held] = v
        return cast(self.keys[:, :, : self.held], k.dtype), cast(self.values[:, :, : self.held], v.dtype)


@dataclass
class Cache:
    """What a model keeps of the tokens of a batch; ``Llama.new_cache`` makes an empty one."""

    layers: list[LayerCache]
    valid: Tensor  # (B, length) bool, False for padding
    padded: bool = False  # whether any tokens came with a mask

    @property
    def held(self) -> int:
        """Tokens read, including padding."""
        return self.layers[0].held

    def positions(self, x: Tensor) -> Tensor:
        """(T,), the positions of new tokens ``x`` (B, T, d)."""
        return torch.arange(self.held, self.held + x.shape[1], device=x.device)

    def admit(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """Store the validity of new tokens (B, T) before the layers read them; return the attention mask.

        It is (B or 1, 1, T, tokens so far), or None if attention needs no mask: at the start, and for a single token.
        """
        batch, length = self.valid.shape
        if ids.shape[0] != batch:
            raise ValueError(f"the cache is for {batch} sequences, but ids hold {ids.shape[0]}: new_cache(batch, …)")
        tokens, end = ids.shape[1], self.held + ids.shape[1]
        if end > length:
            raise ValueError(
                f"the cache holds {self.held} tokens and has room for {length}: {tokens} more do not fit; make the "
                f"cache with new_cache(batch, length={end}) or more"
            )
        self.valid[:, self.held : end] = True if mask is None else mask
        self.padded = self.padded or mask is not None
        if self.padded:
            return visible_tokens(self.valid[:, :end], tokens)
        if self.held == 0 or tokens == 1:
            return None
        return visible_tokens(self.valid.new_ones(1, end), tokens)


def turns(positions: Tensor, config: LlamaConfig) -> Rotation:
    """(…) positions → cosines and sines (…, w/2) of their angles, in the positions' type."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=positions.dtype, device=positions.device) / config.head_dim
    angles = positions.unsqueeze(-1) * config.rope_theta**-pairs
    return angles.cos(), angles.sin()


def rotate(u: Tensor, turn: Rotation) -> Tensor:
    """(B, heads, T, w) → the same shape, with each pair (u_i, u_{i+w/2}) rotated by its position's angle."""
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

    def forward(self, x: Tensor, turn: Rotation, visible: Tensor | None, cache: LayerCache | None) -> Tensor:
        """(B, T, d) → (B, T, d); ``visible`` (B, 1, T, tokens so far), None for all tokens up to the current one."""
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in maps)
        if cache is None:
            q, k = rotate(q, turn), rotate(k, turn)
        else:  # for few tokens the number of operations matters, not their size
            q, k = rotate(torch.cat([q, k], 1), turn).chunk(2, 1)
        # A single token after others sees them all.
        causal = visible is None and (cache is None or cache.held == 0)
        if cache is not None:
            k, v = cache.extend(k, v)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The dense FFN, ``down(SiLU(gate x) ⊙ up x)``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config, config.dim, config.hidden)
        self.up_proj = _linear(config, config.dim, config.hidden)
        self.down_proj = _linear(config, config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and FFN, each applied to the normalised residual stream and added to it."""

    def __init__(self, config: LlamaConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = mlp

    def forward(
        self, x: Tensor, turn: Rotation, mask: Tensor | None, visible: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, visible, cache)
        state = None if cache is None else cache.state
        return x + apply_ffn(self.mlp, self.post_attention_layernorm(x), mask, state)


class Llama(nn.Module):
    """From token ids to the next token's logits. ``make_ffn`` makes each layer's FFN; without it the model is dense.

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
        self.kept_slots: Slots | None = None  # from the last captured ``generate``: the next one may reuse its graphs

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept_slots": None}  # graphs can be neither copied nor saved

    def forward(self, ids: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """(B, T) ids, (B, T) bool validity (True: valid; None: all) → (B, T, V) logits, meaningless at padding.

        Padding may be anywhere and hold any id: no valid token sees it, and no mixture counts it. With a cache, the
        tokens continue those it holds and are added to it; there is no gradient then.
        """
        if cache is None:
            return self._logits(self._features(ids, mask, None))
        with torch.no_grad():
            return self._logits(self._features(ids, mask, cache))

    def next_logits(self, ids: Tensor, mask: Tensor | None, cache: Any, last: Tensor | None = None) -> Tensor:
        """Like ``forward``, but (B, V) for one token of each sequence: all logits of a long prompt take much memory.

        ``last`` (B,) says which token; None for the last. ``cache`` is a ``Cache``, or the view of ``slots.Slots``.
        """
        with torch.no_grad():
            features = self._features(ids, mask, cache)
            if last is None:
                return self._logits(features[:, -1])
            return self._logits(features.gather(1, last.view(-1, 1, 1).expand(-1, 1, features.shape[2])).squeeze(1))

    def require_decoding(self) -> None:
        if self.training:
            raise RuntimeError("the model is in training mode and cannot decode: call model.eval() first")

    def _logits(self, features: Tensor) -> Tensor:
        return F.linear(features, self.embed_tokens.weight)

    def _features(self, ids: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        if ids.dim() != 2:
            raise ValueError(f"ids have shape {tuple(ids.shape)}: expected (batch, tokens)")
        check_mask(mask, ids.shape)
        if cache is None:
            memories = [None] * len(self.layers)
            visible = None if mask is None else visible_tokens(mask)
        else:
            self.require_decoding()
            memories = cache.layers
            visible = cache.admit(ids, mask)
        x = self.embed_tokens(ids)
        positions = torch.arange(x.shape[1], device=x.device) if cache is None else cache.positions(x)
        turn = turns(positions.to(torch.promote_types(x.dtype, torch.float32)), self.config)
        for layer, memory in zip(self.layers, memories, strict=True):
            x = layer(x, turn, mask, visible, memory)
        return self.norm(x)

    def new_cache(self, batch: int, length: int) -> Cache:
        """A cache for ``length`` tokens of ``batch`` sequences, on the model's device, in its type or autocast's."""
        require_positive_int("batch", batch)
        require_positive_int("length", length)
        weight = self.embed_tokens.weight.detach()
        dtype = autocast_dtype(weight) or weight.dtype
        shape = (batch, self.config.heads, length, self.config.head_dim)
        layers = []
        for layer in self.layers:
            keys, values = weight.new_empty(shape, dtype=dtype), weight.new_empty(shape, dtype=dtype)
            layers.append(LayerCache(keys, values, new_ffn_state(layer.mlp, batch)))
        return Cache(layers, weight.new_zeros(batch, length, dtype=torch.bool))

    def stream(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        stop: int | None = None,
        generator: torch.Generator | None = None,
        capture: bool | None = None,
        **sampling: Any,
    ) -> Iterator[Tensor]:
        """Continue prompts (B, T): yields (B,), the next id of each, at every step.

        Prompts of unequal length are padded on the left and need a ``mask``; each is continued as if it were alone.
        Decoding is greedy unless ``temperature`` is given (with ``top_k``, ``top_p``; see ``Sampling``), which draws
        random numbers from ``generator``. A sequence ends with the id ``stop`` and is then filled with it; the iterator
        ends when all sequences have ended, or after ``max_new_tokens``.

        On a GPU a step is replayed from a CUDA graph if the model allows it (``slots.why_not_captured``). The graphs
        and their cache stay with the model for the next call. ``capture=False`` makes none; ``capture=True`` raises if
        the model does not allow it, and on a CPU runs the same steps without graphs.
        """
        return stream(self, ids, mask, Wanted(max_new_tokens, stop, Sampling(**sampling), generator), capture)

    def generate(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Collect what ``stream`` yields, with the same arguments, in (B, n): the new ids, without the prompts."""
        return torch.stack(list(self.stream(ids, mask, **options)), 1)
