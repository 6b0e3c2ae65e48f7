"""``IntBMoEForCausalLM``: the decoder of ``models/llama.py`` with transformers' conventions.

Projections, dense FFN, rotation, norms and their names are those of ``models/llama.py``, so that weights can be
exchanged unchanged and logits are equal bit for bit. The parts that transformers, its caches and engines need access to
are written for their interfaces: the attention itself, the cache, the mask and the output of a forward.

Padding, known from a 2-D ``attention_mask``, is not counted by any mixture. A 4-D mask says which tokens see each
other, not which are padding: pass ``padding_mask`` (B, T) with it, or all tokens count.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from intbmoe.checks import require
from intbmoe.huggingface.configuration import IntBMoETextConfig
from intbmoe.huggingface.mixture import IGNORED, MixtureModel
from intbmoe.models import llama
from intbmoe.models.causal import apply_ffn, remembers, require_causal
from intbmoe.parts.linear import Linear
from intbmoe.parts.router import MLPRouter
from intbmoe.precision import wide


class Rotary(nn.Module):
    """From positions to rotations of queries and keys; a scaled ``rope_type`` uses transformers' code, in float32."""

    def __init__(self, config: IntBMoETextConfig) -> None:
        super().__init__()
        rope = config.rope_parameters
        part = rope.get("partial_rotary_factor", 1.0)
        require(part == 1, "partial_rotary_factor", part, "1: the whole head is rotated")
        self.sizes = config.backbone()
        self.scaled = None if rope["rope_type"] == "default" else LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor, position_ids: Tensor) -> llama.Rotation:
        """(B or 1, T) → (B or 1, 1, T, w/2) each, the same for all heads, in the wide type."""
        if self.scaled is None:
            positions = position_ids.to(torch.promote_types(x.dtype, torch.float32))
            cos, sin = llama.turns(positions, self.sizes)
        else:
            cos, sin = (wide(part.chunk(2, -1)[0]) for part in self.scaled(x, position_ids))
        return cos.unsqueeze(1), sin.unsqueeze(1)


class IntBMoEAttention(llama.Attention):
    """The decoder's attention, with the implementation that transformers is set to use."""

    def __init__(self, config: IntBMoETextConfig, layer_idx: int) -> None:
        super().__init__(config.backbone())
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.num_key_value_groups = config.head_dim, 1
        self.scaling = 1 / math.sqrt(config.head_dim)
        self.is_causal = True

    def forward(
        self, x: Tensor, turn: llama.Rotation, visible: Any, past_key_values: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, d) → (B, T, d) and the attention weights, if the implementation returns them."""
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in maps)
        q, k = llama.rotate(q, turn), llama.rotate(k, turn)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        seen, weights = attend(self, q, k, v, visible, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(seen.reshape(x.shape)), weights  # vLLM returns the tokens of all sequences in one row


class IntBMoEDecoderLayer(GradientCheckpointingLayer):
    """Attention and FFN, each applied to the normalised residual stream and added to it."""

    def __init__(self, config: IntBMoETextConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = IntBMoEAttention(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = llama.Mlp(config.backbone()) if config.method is None else require_causal(config.make_ffn())

    def forward(
        self, hidden_states: Tensor, turn: llama.Rotation, visible: Any, padding_mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        x = hidden_states
        x = x + self.self_attn(self.input_layernorm(x), turn, visible, **kwargs)[0]
        return x + apply_ffn(self.mlp, self.post_attention_layernorm(x), padding_mask)


class IntBMoETextPreTrainedModel(MixtureModel):
    config: IntBMoETextConfig
    config_class = IntBMoETextConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar = ["IntBMoEDecoderLayer"]
    _skip_keys_device_placement: ClassVar = ["past_key_values"]
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar = {
        "router_logits": OutputRecorder((MLPRouter, Linear), index=0, layer_name="mlp.router"),
        "hidden_states": IntBMoEDecoderLayer,
        "attentions": IntBMoEAttention,
    }


class IntBMoETextModel(IntBMoETextPreTrainedModel):
    """From token ids to features."""

    def __init__(self, config: IntBMoETextConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(IntBMoEDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.gradient_checkpointing = False
        if config._attn_implementation == "vllm" and remembers(self):
            raise ValueError(
                f"{config.method!r} needs the earlier tokens of each sequence, but vLLM puts all sequences in one row: "
                f"generate with transformers or intbmoe serve"
            )
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """(B, T) → (B, T, d); ``padding_mask`` (B, T) bool, True for a valid token."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if (use_cache or past_key_values is not None) and remembers(self):
            raise ValueError(
                f"{self.config.method!r} needs more of earlier tokens than a cache of keys and values holds: "
                f"set use_cache=False"
            )
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            start = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + start).unsqueeze(0)
        if padding_mask is None and isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            padding_mask = attention_mask[:, -x.shape[1] :].bool()
        visible = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        turn = self.rotary(x, position_ids)
        for layer in self.layers:
            x = layer(
                x, turn, visible, padding_mask, past_key_values=past_key_values, position_ids=position_ids, **kwargs
            )
        return MoeModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)


class IntBMoEForCausalLM(IntBMoETextPreTrainedModel, GenerationMixin):
    """From token ids to the next token's logits, with any registered causal method in place of the FFN.

    In training, a forward with ``labels`` returns the loss including the method's auxiliary losses, whatever
    ``output_router_logits`` is.
    """

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _pp_plan: ClassVar = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan: ClassVar = {"lm_head": "keep_full_weight"}

    def __init__(self, config: IntBMoETextConfig) -> None:
        super().__init__(config)
        self.model = IntBMoETextModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        if remembers(self):
            self.generation_config.use_cache = config.use_cache = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """(B, T) ids → (B, T, V) logits; ``labels`` are the ids themselves, −100 for a token that does not count."""
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            padding_mask=padding_mask,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = auxiliary = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
            shifted = kwargs.get("shift_labels")
            counted = (labels[..., 1:] if shifted is None else shifted).ne(IGNORED).sum()
            loss, auxiliary = self.collect_losses(loss, counted, kwargs.get("num_items_in_batch"))
        routers = outputs.router_logits
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=auxiliary,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            # (B·T, choices) each, as elsewhere in transformers; None for methods without a router
            router_logits=tuple(scores.flatten(0, -2) for scores in routers) if routers else None,
        )

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        if attention_mask is not None and remembers(self) and not attention_mask.all():
            raise ValueError(
                f"{self.config.method!r} counts positions from the first token, including padding: use prompts of "
                f"equal length, without padding"
            )
        inputs = super().prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None and attention_mask.dim() == 2:  # a static cache turns it into a 4-D mask
            read = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            inputs["padding_mask"] = attention_mask[:, -read.shape[1] :].bool()
        return inputs
