"""``IntBMoEForCausalLM`` is ``models/llama.py``: logits, continuations, files; and what transformers does to it."""

import json
import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    Qwen3ForCausalLM,
    StaticCache,
    ViTForImageClassification,
)

import intbmoe
from intbmoe.layer import moe_layers
from intbmoe.methods.intbmoe import ComposedMoE
from small_huggingface import CAUSAL, SIZES, decoder, hf, language_model, left_padded, prompts, text_config
from thinned import thinned

ALL = [*CAUSAL, None]


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(model, other):
    own, others = tensors(model), tensors(other)
    assert own.keys() == others.keys()
    for name, tensor in own.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name


@torch.no_grad()
@pytest.mark.parametrize("method", ALL)
def test_the_logits_are_those_of_our_decoder_bit_for_bit(method):
    backbone = decoder(method, torch.float64)
    model = hf.from_backbone(backbone)
    ids = prompts()
    assert torch.equal(model(ids).logits, backbone(ids))
    assert backbone(ids).std() > 0.1


@torch.no_grad()
def test_the_logits_are_those_of_our_decoder_with_padding():
    backbone = decoder(dtype=torch.float64)
    ids, mask = left_padded(prompts(), [9, 1, 6])
    places = torch.arange(9).expand(3, -1)
    found = hf.from_backbone(backbone)(ids, attention_mask=mask.long(), position_ids=places).logits
    assert torch.equal(found[mask], backbone(ids, mask)[mask])


@torch.no_grad()
def test_a_left_padded_prompt_is_as_good_as_alone():
    model = language_model(dtype=torch.float64)
    ids, mask = left_padded(prompts(), [9, 1, 6])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = model(ids, attention_mask=mask.long(), position_ids=positions).logits
    for row, length in enumerate([9, 1, 6]):
        alone = model(ids[row : row + 1, 9 - length :]).logits
        torch.testing.assert_close(together[row : row + 1, 9 - length :], alone, rtol=0, atol=1e-12)


EVERY_CACHE = ("intbmoe", "switch", "dynmoe", "lory", "soft_causal")


# The other methods treat each token alone, as switch does, and use no cache.
@pytest.mark.parametrize(
    ("method", "cache"),
    thinned(
        product(CAUSAL, ["dynamic", "static", None]),
        lambda method, cache: cache == "dynamic" or method in EVERY_CACHE,
    ),
)
def test_generation_is_that_of_our_decoder(method, cache):
    model = language_model(method, torch.float64)
    stateful = not model.generation_config.use_cache
    lengths = [9, 9, 9] if stateful else [9, 1, 6]
    ids, mask = left_padded(prompts(), lengths)
    options = {"use_cache": False} if cache is None or stateful else {"cache_implementation": cache}
    found = model.generate(ids, attention_mask=mask.long(), max_new_tokens=12, do_sample=False, **options)[:, 9:]
    expected = hf.to_backbone(model).generate(ids, mask, max_new_tokens=12)
    assert torch.equal(found, expected)


def test_padding_reaches_no_router_while_a_static_cache_is_filled():
    model = language_model()
    ids, mask = left_padded(prompts(), [9, 1, 6])
    with intbmoe.record_routing(model) as log:
        model.generate(
            ids, attention_mask=mask.long(), max_new_tokens=2, do_sample=False, cache_implementation="static"
        )
    assert all(layer.tokens == 9 + 1 + 6 + 3 for layer in log.values())


def test_a_method_with_a_memory_says_that_a_cache_is_not_enough():
    model = language_model("lory")
    with pytest.raises(ValueError, match=r"'lory' needs more of earlier tokens.*use_cache=False"):
        model(prompts(), use_cache=True)
    ids, mask = left_padded(prompts(), [9, 1, 6])
    with pytest.raises(ValueError, match=r"'lory' counts positions.*use prompts of equal length"):
        model.generate(ids, attention_mask=mask.long(), max_new_tokens=2)


# Files.


@pytest.mark.parametrize("method", ALL)
def test_saved_and_loaded_is_the_same_bit_for_bit(method, tmp_path):
    model = language_model(method)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is hf.IntBMoEForCausalLM
    assert_same(loaded, model)
    assert torch.equal(loaded(prompts()).logits, model(prompts()).logits)
    features = AutoModel.from_pretrained(tmp_path)
    assert type(features) is hf.IntBMoETextModel
    assert_same(features, model.model)


def test_state_whose_shape_follows_from_the_run_is_loaded(tmp_path):
    model = hf.IntBMoEForCausalLM(text_config("mass", window=None, expansion_steps=None))
    layer = model.model.layers[0].mlp
    before = layer.norms.shape
    intbmoe.plan_steps(model, 10_000)
    assert layer.norms.shape != before
    layer.norms.uniform_()
    model.save_pretrained(tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


REMOTE = """
import sys
from intbmoe.foreign import import_torchvision
import_torchvision(required=False)
from transformers import AutoModel, AutoModelForCausalLM
assert "intbmoe.huggingface" not in sys.modules
for auto in (AutoModel, AutoModelForCausalLM):
    model = auto.from_pretrained(sys.argv[1], trust_remote_code=True)
    print(type(model).__module__, type(model).__name__)
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.slow  # transformers is imported afresh
def test_trust_remote_code_needs_no_import(tmp_path):
    language_model().save_pretrained(tmp_path / "a")
    command = [sys.executable, "-c", REMOTE, tmp_path / "a", tmp_path / "b"]
    cache = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **cache})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "intbmoe.huggingface.causal_lm IntBMoETextModel",
        "intbmoe.huggingface.causal_lm IntBMoEForCausalLM",
    ]
    names = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert names == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


def test_a_folder_brings_what_trust_remote_code_imports(tmp_path):
    model = language_model()
    model.save_pretrained(tmp_path)
    source = (tmp_path / "modeling_intbmoe.py").read_text()
    brought = {}
    exec(source, brought)
    for auto, found in json.loads((tmp_path / "config.json").read_text())["auto_map"].items():
        module, _, name = found.partition(".")
        assert module == "modeling_intbmoe"
        assert brought[name] is getattr(hf, name)
        assert model.config.auto_classes[auto] == name
    assert len(source.splitlines()) == 1


def test_a_precomposed_model_is_a_model_without_pools(tmp_path):
    model = language_model()
    served = model.precompose()
    served.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(isinstance(layer, ComposedMoE) for _, layer in moe_layers(loaded))
    assert not any("pools" in name or "hypernetwork" in name or "codebook" in name for name in loaded.state_dict())
    assert_same(loaded, served)
    torch.testing.assert_close(loaded(prompts()).logits, model(prompts()).logits, rtol=0, atol=1e-4)
    assert not model.config.precomposed
    larger = language_model(experts=9).precompose()
    assert {name: t.shape for name, t in larger.state_dict().items()} == {
        name: t.shape for name, t in loaded.state_dict().items()
    }


def test_a_precomposed_model_in_bfloat16_is_loaded_as_it_was(tmp_path):
    served = language_model().precompose(torch.bfloat16)
    served.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(loaded, served)
    layer = loaded.model.layers[0].mlp
    assert layer.block_weights[0].dtype == torch.bfloat16
    assert layer.router.hidden.weight.dtype == torch.float32
    assert torch.equal(loaded(prompts()).logits, served(prompts()).logits)


# Traps: what other libraries do to every transformers model.


def test_trap_1_their_initialisation_leaves_ours():
    """IntBMoE initialises its own weights; transformers would write N(0, 0.02²) into each nn.Linear."""
    model = hf.IntBMoEForCausalLM(text_config(experts=16, hyper_dim=64))
    own = intbmoe.create("intbmoe", 24, 20, **model.config.method_options)
    for name, expected in own.named_parameters():
        found = torch.stack([layer.mlp.get_parameter(name).detach() for layer in model.model.layers])
        if expected.numel() > 60 and expected.std() > 0:
            assert 0.7 < found.std() / expected.std() < 1.4, name
    attention = model.model.layers[0].self_attn.q_proj.weight
    assert 0.018 < attention.std() < 0.022


def test_trap_1_weights_that_a_file_lacks_start_as_ours(tmp_path):
    model = language_model()
    model.save_pretrained(tmp_path)
    kept = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.shared" not in name}
    loaded = hf.IntBMoEForCausalLM.from_pretrained(None, config=model.config, state_dict=kept)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]) == ("layers.1.mlp.shared" not in name), name
    start = loaded.model.layers[1].mlp.shared.gate.weight
    assert start.abs().max() <= 24**-0.5
    assert start.std() > 0.1


@pytest.mark.parametrize("method", CAUSAL)
def test_trap_2_bfloat16_keeps_what_decides_routing_in_float32(method, tmp_path):
    language_model(method).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
    ):
        assert model.lm_head.weight.dtype == torch.bfloat16
        for _, layer in moe_layers(model):
            kept = {id(tensor) for tensor in layer.kept_wide()}
            assert all(tensor.dtype == torch.float32 for tensor in layer.kept_wide())
            rest = [tensor for tensor in layer.parameters() if id(tensor) not in kept]
            assert all(tensor.dtype == torch.bfloat16 for tensor in rest)
        assert model(prompts()).logits.dtype == torch.bfloat16


def test_trap_3_padding_reaches_no_router():
    model = language_model()
    ids, mask = left_padded(prompts(), [9, 1, 6])
    with intbmoe.record_routing(model) as log:
        model(ids, attention_mask=mask.long())
    for layer in log.values():
        assert torch.equal((layer.ids >= 0).all(1), mask.flatten())
        assert layer.tokens == 16


def test_trap_4_a_file_says_whose_it_is(tmp_path):
    """A Llama whose FFNs were replaced would be read as a Llama, with random FFNs and without an error."""
    language_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "intbmoe"
    assert config["architectures"] == ["IntBMoEForCausalLM"]
    assert not {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"} & set(config)
    for foreign in (LlamaForCausalLM, Qwen3ForCausalLM, Gemma2ForCausalLM, ViTForImageClassification):
        with pytest.raises(StrictDataclassFieldValidationError, match=r"hidden_act[^$]*import intbmoe\.huggingface"):
            foreign.from_pretrained(tmp_path)


@torch.no_grad()
def test_trap_4_without_a_mixture_it_is_a_llama(tmp_path):
    model = language_model(None, torch.float64)
    model.save_pretrained(tmp_path)
    llama = LlamaForCausalLM.from_pretrained(tmp_path)
    logits = model(prompts()).logits
    # Llama rounds to float32 in places where ours does not
    torch.testing.assert_close(llama(prompts()).logits, logits, rtol=0, atol=1e-4 * logits.abs().max().item())
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_trap_5_losses_are_in_the_loss_whatever_is_returned():
    model = language_model("switch", jitter=0.0).train()
    plain = model.eval()(prompts(), labels=prompts()).loss
    model.train()
    for output_router_logits in (False, True):
        output = model(prompts(), labels=prompts(), output_router_logits=output_router_logits)
        assert output.aux_loss > 0
        torch.testing.assert_close(output.loss, plain + output.aux_loss)
        assert (output.router_logits is None) != output_router_logits


def test_trap_6_pools_are_read_in_their_own_forward():
    """That is where PEFT adds its adapters and removes them again."""
    model = language_model()
    seen = []
    for name, module in model.named_modules():
        if name.endswith(("pools.0", "pools.1")):
            module.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(prompts())
    assert len(set(seen)) == 2 * SIZES.depth


def test_trap_7_nothing_that_vllm_would_replace():
    """It replaces every nn.Linear, and every child called experts that has only 3-D parameters."""
    for _, layer in moe_layers(language_model().precompose()):
        assert not any(name.split(".")[-1] == "experts" for name, _ in layer.named_modules())
        maps = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        assert maps == {"shared.gate", "shared.up", "shared.down"}  # which are called, so that any map will do


def test_trap_8_every_buffer_is_saved():
    """from_pretrained builds on the meta device: anything missing from the file comes back as garbage."""
    for method in CAUSAL:
        model = language_model(method)
        assert {name for name, _ in model.named_buffers()} <= set(model.state_dict())


# What transformers offers.


def test_router_logits_are_what_routers_say():
    for method in ("intbmoe", "switch", "deepseek", "remoe"):
        model = language_model(method)
        output = model(prompts(), output_router_logits=True)
        assert [scores.shape for scores in output.router_logits] == [(27, 4 if method != "switch" else 8)] * SIZES.depth
        with intbmoe.record_routing(model) as log:
            model(prompts())
        for scores, layer in zip(output.router_logits, log.values(), strict=True):
            assert torch.equal(scores.argmax(1), layer.ids[:, 0]) or method == "remoe"


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        model = language_model("switch", torch.float64, jitter=0.0).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(prompts(), labels=prompts()).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_a_static_cache_takes_prompts_piece_by_piece():
    model = language_model(dtype=torch.float64)
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids = prompts()
    parts = [model(part, past_key_values=cache).logits for part in ids.split([4, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=0, atol=1e-12)


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match="num_key_value_heads=1 is not allowed"):
        hf.IntBMoETextConfig(num_key_value_heads=1)
    with pytest.raises(KeyError, match=r"no method is called 'intbmo'.*intbmoe"):
        hf.IntBMoETextConfig(method="intbmo")
    with pytest.raises(TypeError, match="no option 'expert'"):
        hf.IntBMoETextConfig(method_options={"expert": 3})
    with pytest.raises(ValueError, match="precomposed=True is not allowed"):
        hf.IntBMoETextConfig(method="switch", precomposed=True)
    with pytest.raises(ValueError, match="cannot be used in a causal model"):
        hf.IntBMoEForCausalLM(text_config("expert_choice"))
    with pytest.raises(ValueError, match=r"^num_attention_heads=12 .*hidden_size \(100\) splits into heads"):
        hf.IntBMoETextConfig(hidden_size=100, num_attention_heads=12)
