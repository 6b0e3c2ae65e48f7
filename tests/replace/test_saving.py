"""A model with replaced FFNs on disk: restored bit for bit, and an error for loaders that do not know about them."""

import copy
import json
import pickle

import pytest
import torch

import intbmoe
from foreign_models import TIMM, TRANSFORMERS, output, timm, timm_model, transformers_model

SMALL = {"experts": 3, "blocks": 4, "hidden": 10}

# One of each kind of FFN is in every run of the tests.
DISTINCT = {"llama", "gpt2", "phi3", "opt", "bert", "t5", "bart", "vit", "swin"}


def each(names):
    return [name if name in DISTINCT else pytest.param(name, marks=pytest.mark.slow) for name in names]


def stirred(model):
    """The model with every number changed from its initial value."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def assert_same(loaded, model, inputs):
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)
    assert torch.equal(output(loaded, inputs), output(model, inputs))


@pytest.mark.parametrize("name", each(TRANSFORMERS))
def test_a_transformers_model_comes_back_and_its_old_class_refuses_it(name, tmp_path):
    model, inputs = transformers_model(name)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    stirred(model).save_pretrained(tmp_path)
    loaded = intbmoe.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert_same(loaded, model, inputs)
    with pytest.raises(RuntimeError, match="mismatch"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("name", each(TIMM))
def test_a_timm_model_comes_back_and_timm_refuses_it(name, tmp_path):
    arguments = TIMM[name][1]
    model, inputs = timm_model(name)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    intbmoe.save_pretrained(stirred(model), tmp_path, **arguments)
    assert_same(intbmoe.from_pretrained(tmp_path), model, inputs)
    with pytest.raises(RuntimeError, match=r"load_this_model_with\.intbmoe\.from_pretrained"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


@pytest.mark.parametrize("name", ["switch", "deepseek", "dynmoe"])
def test_other_methods_come_back_with_their_state(name, tmp_path):
    model, inputs = transformers_model("llama", torch.float32)
    intbmoe.replace_ffn(model, name, start="copy", experts=4, layers=[1])
    for buffer in model.model.layers[1].mlp.buffers():
        buffer += buffer.new_ones(()).logical_not().to(buffer.dtype) if buffer.dtype == torch.bool else 1
    intbmoe.save_pretrained(model, tmp_path)
    assert_same(intbmoe.from_pretrained(tmp_path), model, inputs)


def test_half_precision_comes_back_with_what_routes_in_float32(tmp_path):
    model, inputs = transformers_model("llama", torch.bfloat16)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    stirred(model).save_pretrained(tmp_path)
    loaded = intbmoe.from_pretrained(tmp_path)
    assert_same(loaded, model, inputs)
    assert loaded.model.layers[0].mlp.codebook.dtype == torch.float32


def test_a_float32_model_loads_in_half_precision_with_what_routes_in_float32(tmp_path):
    model, inputs = transformers_model("llama", torch.float32)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    stirred(model).save_pretrained(tmp_path)
    loaded = intbmoe.from_pretrained(tmp_path, dtype=torch.bfloat16)
    layer = loaded.model.layers[0].mlp
    assert layer.pools[0].weight.dtype == torch.bfloat16
    assert torch.equal(layer.codebook, model.model.layers[0].mlp.codebook)
    assert output(loaded, inputs).isfinite().all()


def test_a_precomposed_model_comes_back_without_its_pools(tmp_path):
    model, inputs = transformers_model("llama")
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    composed = intbmoe.precompose(stirred(model))
    composed.save_pretrained(tmp_path)
    loaded = intbmoe.from_pretrained(tmp_path)
    assert isinstance(loaded.model.layers[0].mlp, intbmoe.ComposedMoE)
    assert_same(loaded, composed, inputs)
    assert (output(loaded, inputs) - output(model, inputs)).abs().max() < 1e-12


def test_copies_of_a_model_keep_the_marks():
    model, inputs = transformers_model("llama")
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(twin, model, inputs)
        twin.load_state_dict(model.state_dict())  # strict: the marks are not parameters


def test_weights_that_do_not_fit_are_an_error(tmp_path):
    model, _ = transformers_model("llama")
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["intbmoe"].pop("model.layers.1.mlp")
    path.write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"does not fit|mismatch"):
        intbmoe.from_pretrained(tmp_path)


def test_a_model_replaced_in_part_is_no_silent_loss(tmp_path):
    model, _ = transformers_model("llama")
    intbmoe.replace_ffn(model.model, "intbmoe", **SMALL)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no FFN 'layers\.0\.mlp'"):
        intbmoe.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        type(model).from_pretrained(tmp_path)


def test_what_cannot_be_saved_or_loaded_says_why(tmp_path):
    model, _ = transformers_model("llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no replaced FFNs"):
        intbmoe.save_pretrained(model, tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not mention replaced FFNs"):
        intbmoe.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected the folder of a saved transformers or timm model"):
        intbmoe.from_pretrained(tmp_path / "nowhere")
