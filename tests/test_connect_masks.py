"""Which of a model's arguments its layers get as their mask, and that precomposed copies get the same."""

import copy

import pytest
import torch
from torch import nn

import intbmoe
from intbmoe import ComposedMoE
from small_intbmoe import make, tokens

MASK = torch.ones(2, 5, dtype=torch.long)
MASK[0, 3:] = 0


class Host(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(8).double(), make()

    def forward(self, x, attention_mask=None):
        return self.ffn(self.norm(x))


class Pair(nn.Module):
    """An encoder and a decoder over texts of equal length, with a mask each."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Host(), Host()

    def forward(self, x, attention_mask=None, decoder_attention_mask=None):
        return self.decoder(self.encoder(x))


MODELS = {Host: {"attention_mask": MASK}, Pair: {"attention_mask": MASK, "decoder_attention_mask": MASK.flip(1)}}


def in_place(model):
    for name, module in list(model.named_modules()):
        if isinstance(module, intbmoe.IntBMoE):
            model.set_submodule(name, module.precompose())
    return model


COPIES = {
    "precompose": intbmoe.precompose,
    "precompose a copy": lambda model: intbmoe.precompose(copy.deepcopy(model)),
    "copy the precomposed": lambda model: copy.deepcopy(intbmoe.precompose(model)),
    "compile and precompose": lambda model: intbmoe.precompose(torch.compile(model, backend="eager")),
    "in place": in_place,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_precomposed_copy_masks_what_its_model_masks(kind, way):
    model, x = kind().eval(), tokens(2, 5)
    bare = model(x)
    intbmoe.connect(model)
    expected = model(x, **MODELS[kind])
    assert not torch.equal(expected, bare)
    served = COPIES[way](model)
    assert any(isinstance(module, ComposedMoE) for module in served.modules())
    assert torch.equal(served(x, **MODELS[kind]), expected)


def test_the_connections_of_a_model_and_its_copy_are_their_own():
    model, x = Host().eval(), tokens(2, 5)
    connection = intbmoe.connect(model)
    served = intbmoe.precompose(model)
    expected = model(x, MASK)
    connection.remove()
    assert torch.equal(served(x, MASK), expected)
    intbmoe.connect(served).remove()  # replaces the copied connection
    assert torch.equal(served(x, MASK), model(x, MASK))
    assert not served.ffn._forward_pre_hooks


def test_connecting_a_wrapper_and_its_model_connects_once():
    model = Host()
    wrapper = torch.compile(model, backend="eager")
    for connected in (model, wrapper):
        intbmoe.connect(connected)
    assert len(model._forward_hooks) + len(wrapper._forward_hooks) == 1


CAUSAL = torch.full((5, 5), -torch.inf).triu(1)
NO_TOKEN_MASKS = {
    "a causal mask called mask": {"mask": CAUSAL},
    "padding marked by True": {"padding_mask": ~MASK.bool()},
    "a mask of which tokens see each other": {"attention_mask": MASK[:, None, None, :].expand(-1, 1, 5, 5)},
    "the same, added to scores": {"attention_mask": CAUSAL.expand(2, 1, 5, 5)},
}


class AnyHost(Host):
    def forward(self, x, **given):
        return self.ffn(x)


@pytest.mark.parametrize("given", NO_TOKEN_MASKS.values(), ids=NO_TOKEN_MASKS.keys())
def test_what_may_mean_something_else_is_not_taken(given, recwarn):
    model, x = AnyHost().eval(), tokens(5 if "mask" in given else 2, 5)
    bare = model(x)
    intbmoe.connect(model)
    assert torch.equal(model(x, **given), bare)
    assert not recwarn.list


def test_a_float_mask_of_tokens_is_told():
    model, x = Host().eval(), tokens(2, 5)
    bare = model(x)
    intbmoe.connect(model)
    with pytest.warns(UserWarning, match=r"attention_mask is torch.float32 .*\(2, 5\), .*make it bool or integers"):
        assert torch.equal(model(x, MASK.float()), bare)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8])
def test_a_mask_of_another_name_is_taken_if_named(dtype):
    model, x = AnyHost().eval(), tokens(2, 5)
    intbmoe.connect(model, mask="padding_mask")
    expected = model.ffn(x, MASK.bool())
    assert torch.equal(model(x, padding_mask=MASK.to(dtype)), expected)
    assert torch.equal(model(x, attention_mask=MASK), model.ffn(x))
    with pytest.raises(TypeError, match=r"padding_mask is torch.float32 of shape \(5, 5\): expected bool or integers"):
        model(x, padding_mask=CAUSAL)


def test_a_mask_that_no_argument_holds_is_told():
    with pytest.raises(ValueError, match=r"mask='attention_msk' .* Host.forward: did you mean 'attention_mask'\?"):
        intbmoe.connect(Host(), mask="attention_msk")


def test_a_failed_forward_leaves_no_mask_behind():
    """After running out of memory, say, a layer that is called by itself must not get the mask of that forward."""
    model, x = Host().eval(), tokens(2, 5)
    expected = model.ffn(x)
    intbmoe.connect(model)
    fail = model.ffn.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x, attention_mask=MASK)
    fail.remove()
    assert torch.equal(model.ffn(x), expected)
