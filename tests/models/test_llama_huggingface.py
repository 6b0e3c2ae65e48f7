"""The dense form is Hugging Face's ``LlamaForCausalLM``: the same logits, the same greedy continuations."""

import contextlib

import pytest
import torch
from torch import nn

from intbmoe.foreign import import_torchvision
from intbmoe.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(vocabulary=29, dim=24, depth=3, heads=3, hidden=40)
PAD = 0


class ExactRotation(nn.Module):
    """Their rotary embedding in the type of ``x``; the original uses float32 angles whatever the model's type."""

    def forward(self, x, position_ids):
        pairs = torch.arange(0, CONFIG.head_dim, 2, dtype=x.dtype) / CONFIG.head_dim
        angles = (position_ids.unsqueeze(-1) * CONFIG.rope_theta**-pairs).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


class ExactNorm(nn.Module):
    """Their RMSNorm in the type of ``x``; the original computes in float32 whatever the model's type."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def exact(theirs):
    """Their model with its two float32 parts in float64, so that rounding hides no other difference."""
    theirs.model.rotary_emb = ExactRotation()
    for name, module in list(theirs.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            parent, _, child = name.rpartition(".")
            setattr(theirs.get_submodule(parent), child, ExactNorm(module))
    return theirs


@pytest.fixture
def models():
    """Ours and theirs, with the same random weights, in float64."""
    with contextlib.suppress(ModuleNotFoundError):
        import_torchvision()  # transformers imports it if it is installed, and fails if that fails
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=CONFIG.vocabulary,
        hidden_size=CONFIG.dim,
        num_hidden_layers=CONFIG.depth,
        num_attention_heads=CONFIG.heads,
        intermediate_size=CONFIG.hidden,
        rms_norm_eps=CONFIG.norm_eps,
        rope_theta=CONFIG.rope_theta,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(3)
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # larger than at initialisation, so that every part of the model matters
            parameter.copy_(torch.randn_like(parameter) * (1 if parameter.dim() == 1 else 0.3))
    ours = Llama(CONFIG).double().eval()
    ours.load_state_dict(theirs.model.state_dict())
    return ours, theirs


def prompts(batch=4, tokens=12):
    return torch.randint(1, CONFIG.vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(4))


def left_padding(ids, lengths):
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths).unsqueeze(1)
    return ids.where(mask, PAD), mask


@torch.no_grad()
def test_the_logits_are_theirs(models):
    ours, theirs = models
    rounded = theirs(prompts()).logits
    logits = ours(prompts())
    torch.testing.assert_close(logits, rounded, rtol=0, atol=1e-4 * logits.abs().max().item())
    torch.testing.assert_close(logits, exact(theirs)(prompts()).logits, rtol=0, atol=1e-10)


@torch.no_grad()
def test_the_logits_are_theirs_with_padding(models):
    ours, theirs = models[0], exact(models[1])
    ids, mask = left_padding(prompts(), [12, 1, 7, 11])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = theirs(ids, attention_mask=mask.long(), position_ids=positions).logits
    torch.testing.assert_close(ours(ids, mask)[mask], expected[mask], rtol=0, atol=1e-10)


@pytest.mark.parametrize("lengths", [[12, 12, 12, 12], [12, 1, 7, 11]])
def test_greedy_generation_is_theirs(models, lengths):
    """Their own model, float32 parts and all: the continuations of both are the same ids."""
    ours, theirs = models
    ids, mask = left_padding(prompts(), lengths)
    expected = theirs.generate(ids, attention_mask=mask.long(), max_new_tokens=30, do_sample=False)[:, 12:]
    assert torch.equal(ours.generate(ids, mask, max_new_tokens=30), expected)
    assert len(expected.unique()) > 5  # the model is not stuck on one token


def test_generation_stops_where_theirs_does(models):
    ours, theirs = models
    ids = prompts()
    stop = int(ours.generate(ids, max_new_tokens=9)[2, 8])
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": stop, "pad_token_id": stop}
    expected = theirs.generate(ids, attention_mask=mask, **options)[:, 12:]
    assert torch.equal(ours.generate(ids, max_new_tokens=30, stop=stop), expected)
