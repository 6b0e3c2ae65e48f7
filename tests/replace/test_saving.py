"""A model with replaced FFNs on disk: restored bit for bit, and an error for loaders that do not know about them."""

import copy
import pickle
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import intbmoe
from foreign_models import SIZES, TIMM, TRANSFORMERS, hf, output, timm, timm_model, transformers_model
from intbmoe.layer import moe_layers
from intbmoe.replace.saving import HINT

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


@pytest.mark.parametrize("name", each(TIMM))
def test_a_timm_model_comes_back_in_its_types(name, tmp_path):
    """Some tensors of a half-precision model have other types: those that decide the routing, and the marks."""
    model, inputs = timm_model(name, torch.float32)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    casts = {"half": stirred(copy.deepcopy(model)).half(), "composed": intbmoe.precompose(model, torch.bfloat16)}
    for way, cast in casts.items():
        first = next(cast.parameters())
        intbmoe.save_pretrained(cast, tmp_path / way, **TIMM[name][1])
        loaded = intbmoe.from_pretrained(tmp_path / way)
        assert next(loaded.parameters()).dtype == first.dtype != torch.float32
        assert_same(loaded, cast, inputs.to(first.dtype))
        assert all(parameter.requires_grad for parameter in loaded.parameters()) == (way == "half")


def test_a_composed_layer_comes_back_with_its_norms_in_float32(tmp_path):
    model, inputs = transformers_model("llama", torch.float32)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    composed = intbmoe.precompose(stirred(model), torch.bfloat16)
    composed.save_pretrained(tmp_path)
    assert_same(intbmoe.from_pretrained(tmp_path), composed, inputs)


def test_a_float32_model_loads_in_half_precision_with_what_routes_in_float32(tmp_path):
    model, inputs = transformers_model("llama", torch.float32)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    stirred(model).save_pretrained(tmp_path)
    loaded = intbmoe.from_pretrained(tmp_path, dtype=torch.bfloat16)
    layer = loaded.model.layers[0].mlp
    assert layer.pools[0].weight.dtype == torch.bfloat16
    assert torch.equal(layer.codebook, model.model.layers[0].mlp.codebook)
    assert output(loaded, inputs).isfinite().all()


@pytest.mark.parametrize("name", each(TRANSFORMERS))
def test_a_precomposed_model_comes_back_without_its_pools(name, tmp_path):
    """transformers saves ViT's layers under other names than they have in memory."""
    model, inputs = transformers_model(name)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    composed = intbmoe.precompose(stirred(model))
    composed.save_pretrained(tmp_path)
    loaded = intbmoe.from_pretrained(tmp_path)
    assert all(isinstance(layer, intbmoe.ComposedMoE) for _, layer in moe_layers(loaded))
    assert_same(loaded, composed, inputs)
    assert (output(loaded, inputs) - output(model, inputs)).abs().max() < 1e-12


@pytest.mark.parametrize("precompose", [False, True])
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_folder_of_an_earlier_version_is_read(name, precompose, tmp_path):
    """Only config.json held the records then, and did not say which layers were precomposed."""
    model, inputs = transformers_model(name)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    model = intbmoe.precompose(stirred(model)) if precompose else stirred(model)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = {key: tensor for key, tensor in load_file(path).items() if HINT not in key}
    save_file({**state, HINT: torch.zeros(1)}, path, metadata={"format": "pt"})
    assert_same(intbmoe.from_pretrained(tmp_path), model, inputs)


def test_a_model_saved_in_several_files_comes_back(tmp_path):
    model, inputs = transformers_model("llama")
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    stirred(model).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same(intbmoe.from_pretrained(tmp_path), model, inputs)


def test_copies_of_a_model_keep_the_marks():
    model, inputs = transformers_model("llama")
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(twin, model, inputs)
        twin.load_state_dict(model.state_dict())  # strict: the marks are not parameters


@pytest.mark.parametrize("name", [*each(TRANSFORMERS), *each(TIMM)])
def test_distributed_checkpoints_take_the_model(name, tmp_path):
    """torch.distributed.checkpoint, with which trainers save sharded models, looks for every name of a state."""
    model, inputs = (transformers_model if name in TRANSFORMERS else timm_model)(name)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    twin = stirred(copy.deepcopy(model))
    checkpoint.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    read = get_model_state_dict(twin)
    checkpoint.load(read, checkpoint_id=tmp_path)
    set_model_state_dict(twin, read)
    assert_same(twin, model, inputs)


def test_weights_that_do_not_fit_are_an_error(tmp_path):
    model, _ = transformers_model("llama")
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    state.pop("model.layers.1.mlp.codebook")
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"does not fit .*layers\.1\.mlp\.codebook"):
        intbmoe.from_pretrained(tmp_path)


@pytest.mark.parametrize("precompose", [False, True])
@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("vit", {"add_pooling_layer": False})])
def test_a_part_of_the_replaced_model_comes_back(name, options, precompose, tmp_path):
    model, inputs = transformers_model(name)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    model = intbmoe.precompose(stirred(model)) if precompose else stirred(model)
    model.base_model.save_pretrained(tmp_path)
    assert_same(intbmoe.from_pretrained(tmp_path, **options), model.base_model, inputs)
    for kind in (type(model.base_model), type(model)):
        with pytest.raises(RuntimeError, match="mismatch"):
            kind.from_pretrained(tmp_path)


def test_a_model_around_the_replaced_part_comes_back(tmp_path):
    model, inputs = transformers_model("llama")
    intbmoe.replace_ffn(model.model, "intbmoe", **SMALL)
    stirred(model).save_pretrained(tmp_path)
    assert_same(intbmoe.from_pretrained(tmp_path), model, inputs)
    with pytest.raises(RuntimeError, match="mismatch"):
        type(model).from_pretrained(tmp_path)


def test_a_wrapped_block_is_recorded_without_its_wrapper(tmp_path):
    model, inputs = transformers_model("llama")
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    wrapped = copy.deepcopy(stirred(model))
    wrapped.model.layers[0] = checkpoint_wrapper(wrapped.model.layers[0])
    wrapped.save_pretrained(tmp_path)
    assert_same(intbmoe.from_pretrained(tmp_path), model, inputs)
    wrapped.load_state_dict(model.state_dict())


def test_a_backbone_under_another_head_comes_back(tmp_path):
    model, inputs = transformers_model("llama")
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    config = hf.LlamaConfig(**SIZES, pad_token_id=0)  # of its own: it does not say what was replaced
    other = hf.LlamaForSequenceClassification._from_config(config, dtype=torch.float64).eval()
    other.model = stirred(model).model
    other.save_pretrained(tmp_path)
    assert_same(intbmoe.from_pretrained(tmp_path), other, inputs)
    for kind in (type(other), type(model), type(model.model)):
        with pytest.raises(RuntimeError, match="mismatch"):
            kind.from_pretrained(tmp_path)


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_a_quantised_model_is_not_saved_but_says_what_to_do(library, tmp_path):
    model, inputs = {"transformers": transformers_model, "timm": timm_model}[library]("vit", torch.float32)
    intbmoe.replace_ffn(model, "intbmoe", **SMALL)
    composed = intbmoe.precompose(model)
    arguments = TIMM["vit"][1] if library == "timm" else {}
    intbmoe.save_pretrained(composed, tmp_path / "first", **arguments)
    intbmoe.quantize(composed)
    ways = [partial(intbmoe.save_pretrained, composed)]
    ways += [composed.save_pretrained, composed.base_model.save_pretrained] if library == "transformers" else []
    for save in ways:
        with pytest.raises(RuntimeError, match="save the model before quantising it, and quantise it again after"):
            save(tmp_path / "second")
    assert not (tmp_path / "second").exists()
    loaded = intbmoe.from_pretrained(tmp_path / "first")
    intbmoe.quantize(loaded)
    assert_same(loaded, composed, inputs)


def test_what_cannot_be_saved_or_loaded_says_why(tmp_path):
    model, _ = transformers_model("llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no replaced FFNs"):
        intbmoe.save_pretrained(model, tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not mention replaced FFNs"):
        intbmoe.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected the folder of a saved transformers or timm model"):
        intbmoe.from_pretrained(tmp_path / "nowhere")
