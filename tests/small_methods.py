"""Every registered method, small enough for finite differences; used by several tests."""

import pytest
import torch
import torch.nn.functional as F

import intbmoe

DIM, HIDDEN = 8, 12

# Options that make a method small enough for finite differences; a method not named here runs with its defaults.
TINY = {
    "intbmoe": {"experts": 3, "blocks": 4, "top_k": 2, "code_dim": 3, "router_dim": 5, "hyper_dim": 4},
    "deepseek": {"experts": 4},
    "remoe": {"experts": 4},
    "vmoe": {"experts": 4},
    "expert_choice": {"experts": 4},
    "lory": {"segment": 2},
    "mixture": {"experts": 3},
    "shazeer": {"experts": 4, "router_std": 0.5},
    "gshard": {"experts": 4},
    "mixtral": {"experts": 4},
    "deepseek_v1": {"experts": 6, "top_k": 3, "devices": 2},
    "lapsum": {"experts": 4, "top_k": 1.5, "temperature": 0.5},
    "hypermoe": {"experts": 4, "embedding_dim": 3, "hyper_dim": 4, "adapter_dim": 2},
    "mobe": {"experts": 4, "bases": 2, "rank": 3},
    "mmoe": {"experts": 3},
    "ple": {"experts": 3},
    "dsfnet": {"experts": 3},
    "dynmoe": {"experts": 4, "update_every": 2},
    "mass": {"experts": 4, "window": 2, "warmup": 2, "expansion_steps": 99, "significance": 0.9, "similarity": 1.0},
}
# Options that switch off a method's random noise, for comparisons across processes.
QUIET = {
    "switch": {"jitter": 0.0},
    "vmoe": {"noise": 0.0},
    "shazeer": {"noise": 0.0},
    "gshard": {"second": "all"},
    "smear": {"expert_dropout": 0.0},
    "smear_token": {"expert_dropout": 0.0},
}
METHODS = intbmoe.list_methods()
SAME_PARTS = ("mixture", "shazeer", "gshard", "mixtral", "deepseek_v1", "hypermoe", "mobe", "mmoe", "ple", "dsfnet")
"""Methods made only of parts that others have too: tests that take a second each run on them with ``-m slow``."""

# Float64 checks the mathematics, with the tiled product; float32 and bfloat16 run the grouped product that users run.
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make(name, dtype=torch.float64, **options):
    torch.manual_seed(1)
    return intbmoe.create(name, DIM, HIDDEN, **{**TINY.get(name, {}), **options}).to(dtype)


def tokens(*shape, seed=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, DIM, dtype=torch.float64, generator=generator).to(dtype)


def expert(layer, e, x):
    """The output of a layer's expert ``e`` for (…, d) tokens, written out."""
    w = layer.experts
    if layer.config.expert == "swiglu":
        return (F.silu(x @ w.gate.weight[e]) * (x @ w.up.weight[e])) @ w.down.weight[e]
    return F.gelu(x @ w.up.weight[e] + w.up.bias[e]) @ w.down.weight[e] + w.down.bias[e]


def token_wise(layer):
    """Whether a token's output depends only on that token: the method is causal and has no decoding state."""
    return layer.config.noncausal_reason() is None and layer.new_state(1) is None


def random_mask(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(*shape, generator=generator) > 0.3
    mask[..., 0] = True
    return mask
