"""The contents of ``config.json``: the sizes of a backbone, and the method that replaces its FFN.

Fields that transformers, its Trainer and inference engines read have the usual names (``hidden_size``). None is called
``num_experts`` or the like, because vLLM would then replace our mixture by its own.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig

from intbmoe.checks import require
from intbmoe.methods.intbmoe import ComposedMoE, IntBMoEConfig
from intbmoe.models import llama, vit
from intbmoe.registry import create, find_method

SIZES = {
    "dim": "hidden_size",
    "hidden": "intermediate_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
}
"""This package's names of sizes that every backbone has → transformers' names."""
REMOTE = "modeling_intbmoe"
"""The file that ``trust_remote_code=True`` imports."""
REFUSAL = "none: the FFN is a mixture. import intbmoe.huggingface, then load with an Auto class"
"""Saved as ``hidden_act``, in a list. Another class, such as Llama's, would load our attention, leave its FFNs random
and only warn; but transformers checks the type of this field, and its error shows this text."""


@contextmanager
def _naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Let an error name the fields of this configuration where it names those of the backbone or the layer."""
    try:
        yield
    except ValueError as error:
        name = rf"\b({'|'.join(fields)})(?==| must be | \()"  # not a word of the text, such as "heads of even width"
        error.args = (re.sub(name, lambda found: fields[found[0]], str(error)),)
        raise


@strict
class MixtureConfig(PreTrainedConfig):
    """The base of all tasks' configurations; not for use by itself."""

    auto_classes: ClassVar[dict[str, str]] = {}
    """Auto class → our class."""
    sizes: ClassVar[dict[str, str]] = SIZES
    """Fields of the backbone's configuration → the equivalent fields of this one, used in both directions."""
    dense_act: ClassVar[str | None] = None
    """The activation of the model without a mixture, if a class of transformers can load that model."""

    method: str | None = "intbmoe"
    """The registered name of the mixture; None for the backbone's own dense FFN."""
    method_options: dict[str, Any] | None = None
    """The mixture's options, literally; ``hidden`` is intermediate_size unless it is given here."""
    precomposed: bool = False
    """Whether IntBMoE's blocks are precomposed; the weights then contain no pools."""
    state_shapes: dict[str, list[int]] | None = None
    """Shapes of a mixture's state that do not follow from its options; ``save_pretrained`` fills them in."""
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.method is None:
            idle = not self.method_options and not self.precomposed
            require(idle, "method", None, "the name of a mixture if method_options or precomposed is given")
            return
        options = self.method_options or {}
        with _naming({ours: SIZES[ours] for ours in ("dim", "hidden") if ours not in options}):
            layer = self.layer_config()
        known = not self.precomposed or isinstance(layer, IntBMoEConfig)
        require(known, "precomposed", self.precomposed, f"False for {self.method!r}, which has nothing to compose")

    def layer_config(self) -> Any:
        return find_method(self.method).config(**self._arguments())

    def make_ffn(self) -> nn.Module:
        """Make one mixture as this configuration describes it."""
        return ComposedMoE(self.layer_config()) if self.precomposed else create(self.method, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        options = {"hidden": self.intermediate_size, **(self.method_options or {})}
        # JSON has no tuples
        return {"dim": self.hidden_size, **{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}}

    def _sizes(self) -> dict[str, Any]:
        return {ours: getattr(self, theirs) for ours, theirs in self.sizes.items()}

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save like transformers, and add the file for ``trust_remote_code=True``, which imports this package."""
        self.auto_map = {auto: f"{REMOTE}.{ours}" for auto, ours in self.auto_classes.items()}
        refused = self.method is not None or self.dense_act is None
        self.hidden_act = [REFUSAL] if refused else self.dense_act
        self.hidden_activation = self.hidden_act  # Gemma's name for it
        names = ", ".join(sorted(self.auto_classes.values()))
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{REMOTE}.py").write_text(f"from intbmoe.huggingface import {names}  # noqa: F401\n")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: ``save_pretrained`` writes the entries of all classes, and no copy of the source."""


@strict
class IntBMoETextConfig(MixtureConfig):
    """A Llama-style decoder with a mixture in every layer; the defaults are the paper's on MiniPile."""

    model_type = "intbmoe"
    dense_act = "silu"  # it is a Llama
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    auto_classes: ClassVar = {
        "AutoConfig": "IntBMoETextConfig",
        "AutoModel": "IntBMoETextModel",
        "AutoModelForCausalLM": "IntBMoEForCausalLM",
    }
    sizes: ClassVar = {**SIZES, "vocabulary": "vocab_size", "norm_eps": "rms_norm_eps", "init_std": "initializer_range"}
    base_model_pp_plan: ClassVar = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32_000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 18
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    output_router_logits: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        heads, pairs, width = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        require(pairs == heads, "num_key_value_heads", pairs, f"num_attention_heads ({heads})")
        require(width == self.hidden_size // heads, "head_dim", width, "hidden_size / num_attention_heads")
        with _naming(self.sizes):
            self.backbone()

    def backbone(self) -> llama.LlamaConfig:
        """The backbone's configuration with the same sizes; raises if they do not fit together."""
        return llama.LlamaConfig(**self._sizes(), rope_theta=float(self.rope_parameters["rope_theta"]))


@strict
class IntBMoEImageConfig(MixtureConfig):
    """A Vision Transformer with a mixture in some blocks; the defaults are the paper's on ImageNet."""

    model_type = "intbmoe_vit"
    auto_classes: ClassVar = {
        "AutoConfig": "IntBMoEImageConfig",
        "AutoModelForImageClassification": "IntBMoEForImageClassification",
    }
    sizes: ClassVar = {
        **SIZES,
        "image_size": "image_size",
        "patch_size": "patch_size",
        "channels": "num_channels",
        "drop_path": "drop_path_rate",
        "ffn_std": "ffn_std",
        "class_token_ffn": "class_token_ffn",
    }

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    hidden_size: int = 192
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 3
    mixture_layers: list[int] | tuple[int, ...] = (0, 2, 4, 6)
    """Blocks that hold a mixture."""
    drop_path_rate: float = 0.1
    ffn_std: float | None = 0.02
    """Standard deviation of the dense FFNs' truncated normal initialisation; None to initialise like nn.Linear."""
    class_token_ffn: bool = True
    """Whether the class token has its own dense FFN in a block with a mixture."""

    def __post_init__(self, **kwargs: Any) -> None:
        if self.id2label is None:
            kwargs.setdefault("num_labels", 1000)
        super().__post_init__(**kwargs)
        with _naming({**self.sizes, "classes": "num_labels", "moe_layers": "mixture_layers"}):
            self.backbone()

    def backbone(self) -> vit.ViTConfig:
        """The backbone's configuration with the same sizes; raises if they do not fit together."""
        layers = tuple(self.mixture_layers)  # a list in JSON
        return vit.ViTConfig(**self._sizes(), classes=self.num_labels, moe_layers=layers)
