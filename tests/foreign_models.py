"""Small random models of other libraries, in float64 and evaluation mode, each with inputs."""

import pytest
import torch

from intbmoe.foreign import import_torchvision

import_torchvision(required=False)  # transformers and timm import it where it is installed, and fail where that fails
hf = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, **LAYERS}
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 2}
OPT = {"vocab_size": 40, "hidden_size": 16, "ffn_dim": 24, "word_embed_proj_dim": 16, **LAYERS}
DISTILBERT = {"vocab_size": 40, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}
BART = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "max_position_embeddings": 32,
    "activation_dropout": 0.25,
}  # fmt: skip
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
GATED_T5 = {**T5, "feed_forward_proj": "gated-gelu"}
IMAGE = {"hidden_size": 16, "intermediate_size": 24, "image_size": 16, "patch_size": 8, **LAYERS}

CAUSAL, ENCODER, PAIR, PIXELS = "causal", "encoder", "encoder-decoder", "images"
TRANSFORMERS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, SIZES, CAUSAL),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {**SIZES, "num_key_value_heads": 1, "head_dim": 8}, CAUSAL),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2, CAUSAL),  # Conv1D
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, {**SIZES, "pad_token_id": 0, "num_key_value_heads": 1}, CAUSAL),
    "phi": (hf.PhiForCausalLM, hf.PhiConfig, SIZES, CAUSAL),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, SIZES, CAUSAL),
    "falcon": (hf.FalconForCausalLM, hf.FalconConfig, {**SIZES, "ffn_hidden_size": 24}, CAUSAL),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, {**SIZES, "head_dim": 8, "num_key_value_heads": 1}, CAUSAL),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig, OPT, CAUSAL),  # no module for the FFN
    "bert": (hf.BertForMaskedLM, hf.BertConfig, SIZES, ENCODER),  # FFN in two modules
    "roberta": (hf.RobertaForMaskedLM, hf.RobertaConfig, SIZES, ENCODER),
    "distilbert": (hf.DistilBertForMaskedLM, hf.DistilBertConfig, DISTILBERT, ENCODER),
    "modernbert": (hf.ModernBertForMaskedLM, hf.ModernBertConfig, {**SIZES, "pad_token_id": 0}, ENCODER),
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config, T5, PAIR),
    "t5-gated": (hf.T5ForConditionalGeneration, hf.T5Config, GATED_T5, PAIR),
    "bart": (hf.BartForConditionalGeneration, hf.BartConfig, BART, PAIR),
    "vit": (hf.ViTForImageClassification, hf.ViTConfig, IMAGE, PIXELS),
    "clip-vision": (hf.CLIPVisionModel, hf.CLIPVisionConfig, IMAGE, PIXELS),
}

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
SWIN = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 8, "num_heads": (1, 2), "num_classes": 5}
TIMM = {
    "vit": ("vit_tiny_patch16_224", VIT),
    "deit3": ("deit3_small_patch16_224", VIT),
    "eva02": ("eva02_tiny_patch14_224", VIT),
    "beit": ("beit_base_patch16_224", VIT),
    "swin": ("swin_tiny_patch4_window7_224", {**SWIN, "depths": (1, 1)}),
    "convnext": ("convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (4, 8, 12, 16), "num_classes": 5}),
}


def transformers_model(name, dtype=torch.float64):
    kind, config, sizes, task = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = kind._from_config(config(**sizes), dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    if task == PIXELS:
        return model, {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator).to(dtype)}
    ids = torch.randint(3, 40, (2, 7), generator=generator)
    return model, {"input_ids": ids, **({"decoder_input_ids": ids[:, :4]} if task == PAIR else {})}


def timm_model(name, dtype=torch.float64):
    architecture, arguments = TIMM[name]
    torch.manual_seed(0)
    model = timm.create_model(architecture, **arguments).to(dtype).eval()
    return model, torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def output(model, inputs):
    with torch.no_grad():
        return model(inputs) if isinstance(inputs, torch.Tensor) else model(**inputs)[0]
