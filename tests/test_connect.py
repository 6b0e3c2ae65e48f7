"""MoE layers in Hugging Face models under other people's loops: masks in, losses out, steps around the optimizer."""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn

import intbmoe
from echo import Echo
from intbmoe.foreign import import_torchvision

import_torchvision()  # transformers imports it if it is installed, and fails if that fails
transformers = pytest.importorskip("transformers")


def llama(name="switch", dtype=torch.float64, layers=2, **options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = intbmoe.create(name, 16, 24, experts=4, **options)
    return model.to(dtype)


def batch(padding=3, length=9, rows=4):
    """A batch whose first row is padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 40, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_padding_reaches_no_layer_and_the_loss_has_the_auxiliary_one(checkpointing):
    model = llama(jitter=0.0).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plain = copy.deepcopy(model)
    intbmoe.connect(model)
    with intbmoe.record_routing(model) as log:
        loss = model(**batch()).loss
    for entry in log.values():
        ids = entry.ids.view(4, 9)
        assert (ids[0, :3] == -1).all()
        assert (ids[1:] >= 0).all()
    bare = plain(**batch()).loss
    assert loss > bare
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_generation_of_a_padded_prompt_is_that_of_the_prompt_alone():
    model = llama("intbmoe", top_k=2, blocks=4).eval()
    intbmoe.connect(model)
    whole = batch()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    together = model.generate(whole["input_ids"], attention_mask=whole["attention_mask"], **settings)
    alone = model.generate(whole["input_ids"][:1, 3:], **settings)
    assert together[0, 3:].tolist() == alone[0].tolist()


@pytest.mark.parametrize("name", ["switch", "deepseek", "mass", "remoe", "intbmoe"])
def test_a_foreign_loop_ends_where_our_own_does(name):
    quiet = {"switch": {"jitter": 0.0}}.get(name, {})
    theirs, ours = (llama(name, **quiet).train() for _ in range(2))
    theirs_optimizer, our_optimizer = (torch.optim.AdamW(model.parameters(), 1e-2) for model in (theirs, ours))
    intbmoe.connect(theirs, theirs_optimizer)
    intbmoe.connect(ours)
    for _ in range(4):
        theirs_optimizer.zero_grad()
        theirs(**batch()).loss.backward()
        theirs_optimizer.step()
    for _ in range(4):
        our_optimizer.zero_grad()
        loss = ours(**batch()).loss  # includes the auxiliary loss, like theirs
        loss.backward()

        def reevaluate():
            return ours(**batch()).loss

        intbmoe.before_step(ours, our_optimizer, reevaluate)
        our_optimizer.step()
        intbmoe.after_step(ours, our_optimizer)
    for (key, a), b in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("name", ["mass", "deepseek"])
def test_a_step_with_a_closure_is_a_step(name):
    """Lightning runs forward and backward inside ``optimizer.step(closure)``."""
    models = [llama(name).train() for _ in range(3)]
    for model, way in zip(models, ("before", "positional", "keyword"), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        intbmoe.connect(model, optimizer)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(**batch()).loss
            loss.backward()
            return loss

        for _ in range(4):
            if way == "before":
                closure()
                optimizer.step()
            else:
                loss = optimizer.step(closure) if way == "positional" else optimizer.step(closure=closure)
                assert loss.isfinite()
    for other in models[1:]:
        for (key, a), b in zip(models[0].state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b), key


def test_it_compiles_whole():
    model = llama("intbmoe", layers=1, top_k=2, blocks=4).eval()
    intbmoe.connect(model)
    expected = model(**batch()).loss
    compiled = torch.compile(model, fullgraph=True, backend="eager")  # gradients: test_contract.py
    torch.testing.assert_close(compiled(**batch()).loss, expected)


def test_recomputation_under_another_mask_is_refused():
    model = llama(jitter=0.0).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    intbmoe.connect(model)
    first = model(**batch()).loss
    model(**batch(padding=5))
    with pytest.raises(RuntimeError, match="run with another mask"):
        first.backward()


def test_encoder_and_decoder_have_masks_of_their_own():
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=40, **sizes)).eval()
    for stack in (model.encoder, model.decoder):
        stack.block[0].layer[-1].DenseReluDense = intbmoe.create("switch", 16, 24, experts=4)
    model.eval()
    intbmoe.connect(model)
    ids, decoded = torch.randint(1, 40, (2, 9)), torch.randint(1, 40, (2, 5))
    mask, decoded_mask = torch.ones_like(ids), torch.ones_like(decoded)
    mask[0, 6:] = 0
    decoded_mask[1, 4:] = 0
    for given in ({}, {"decoder_attention_mask": decoded_mask}):
        with intbmoe.record_routing(model) as log:
            model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoded, **given)
        encoder, decoder = (entry.ids.view(2, -1) >= 0 for entry in log.values())
        assert torch.equal(encoder, mask.bool())
        assert torch.equal(decoder, decoded_mask.bool() if given else torch.ones_like(decoder))


def test_a_mask_that_does_not_fit_is_told():
    model = llama(jitter=0.0).eval()
    intbmoe.connect(model)
    layer, longer = model.model.layers[0].mlp, torch.randn(4, 11, 16, dtype=torch.float64)

    def run_on_other_tokens(*_):
        layer(longer)

    model.lm_head.register_forward_pre_hook(run_on_other_tokens)
    with pytest.warns(UserWarning, match=r"mask of shape \(4, 9\) does not fit the tokens \(4, 11\)"):
        model(**batch())


def test_removed_hooks_leave_nothing_behind():
    model = llama(jitter=0.0).eval()
    before = model(**batch()).logits
    connection = intbmoe.connect(model)
    assert not torch.equal(model(**batch()).logits[0, :3], before[0, :3])
    connection.remove()
    assert torch.equal(model(**batch()).logits, before)


def test_connecting_again_replaces_the_connection():
    model = llama(jitter=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        intbmoe.connect(model, optimizer)
    model(**batch()).loss.backward()
    optimizer.step()
    assert len(model._forward_hooks) == 1


def test_collecting_or_stepping_twice_is_told_as_what_it_may_be():
    class WithLoss(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x).sum()

    class Moving(Echo):
        @classmethod
        def family_after_step(cls, layers, sums, optimizer):
            pass

    model = WithLoss(Moving(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    intbmoe.connect(model, optimizer)
    loss = model(torch.randn(1, 2, 4))
    with pytest.raises(RuntimeError, match=r"no record of a training forward: .*connect calls it for models that"):
        loss + intbmoe.aux_loss(model)
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"no counts for this step: .*connected model that returns a loss"):
        optimizer.step()


def test_what_cannot_be_connected_says_so():
    with pytest.raises(ValueError, match="Linear holds no MoE layer"):
        intbmoe.connect(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="optimizer is a str"):
        intbmoe.connect(llama(), "adam")
    with pytest.warns(UserWarning, match="Adam holds no parameter of the LlamaForCausalLM"):
        intbmoe.connect(llama(), torch.optim.Adam(llama().parameters()))
    with pytest.raises(ValueError, match="cannot be used in a causal model"):
        intbmoe.connect(llama("expert_choice"))
    with pytest.raises(ValueError, match="mask=3 is not allowed"):  # although the model's forward takes any keyword
        intbmoe.connect(llama(), mask=3)


def test_an_optimizer_is_found_inside_wrappers():
    accelerate = pytest.importorskip("accelerate")
    model = llama("deepseek").train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)
    assert isinstance(wrapped, torch.optim.Optimizer)
    intbmoe.connect(model, wrapped)
    model(**batch()).loss.backward()
    before = [layer.mlp.state_dict() for layer in model.model.layers]
    before = [{key: value.clone() for key, value in state.items() if "bias" in key} for state in before]
    optimizer.step()
    for layer, old in zip(model.model.layers, before, strict=True):
        assert any(not torch.equal(value, layer.mlp.state_dict()[key]) for key, value in old.items())


def test_losses_that_nobody_collects_stop_the_training():
    """As with a trainer that uses only the model's own loss."""
    model = llama(jitter=0.0).train()
    model(**batch()).loss.backward()
    with pytest.raises(RuntimeError, match=r"Switch was trained without .* intbmoe.connect"):
        model(**batch())


def counts(model, **given):
    """How many tokens of a forward are valid, in each layer."""
    with intbmoe.record_routing(model) as log, torch.no_grad():
        model(**given)
    return [record.tokens for record in log.values()]


def test_the_patches_of_an_image_do_not_get_the_mask_of_the_text():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 50, "max_position_embeddings": 40}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    model = transformers.CLIPModel(config).eval()
    intbmoe.replace_ffn(model, experts=4, blocks=4)
    intbmoe.connect(model)
    ids = torch.randint(3, 50, (2, 12))
    mask = (torch.arange(12) < 4).expand(2, 12).long()
    found = counts(model, input_ids=ids, pixel_values=torch.randn(2, 3, 8, 8), attention_mask=mask)
    assert found == [2 * 4, 2 * 5]


def test_frames_of_audio_do_not_get_the_mask_of_samples():
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
        conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    model = transformers.Wav2Vec2Model(config).eval()
    intbmoe.replace_ffn(model, experts=4, blocks=4)
    intbmoe.connect(model)
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 200:] = 0
    with pytest.warns(UserWarning, match="does not fit"):
        assert counts(model, input_values=torch.randn(2, 400), attention_mask=mask) == [36]


def test_a_part_called_by_itself_does_not_get_the_mask_of_an_earlier_forward():
    model = llama(jitter=0.0).eval()
    intbmoe.connect(model)
    model(**batch())
    with intbmoe.record_routing(model) as log, torch.no_grad():
        model.model(batch()["input_ids"])
    assert [record.tokens for record in log.values()] == [36, 36]


class Host(nn.Module):
    """Two layers, of which the second may be skipped."""

    def __init__(self, skip=False, make=lambda loss, y: loss):
        super().__init__()
        self.ffns = nn.ModuleList(intbmoe.create("switch", 8, 16, experts=4) for _ in range(2))
        self.skip, self.make = skip, make

    def forward(self, x):
        for ffn in self.ffns[: 1 if self.skip else 2]:
            x = x + ffn(x)
        return self.make(x.square().mean(), x)


class Output(NamedTuple):
    loss: torch.Tensor
    y: torch.Tensor


def test_a_named_tuple_gets_the_losses():
    model = Host(make=Output)
    bare = copy.deepcopy(model)
    intbmoe.connect(model)
    x = torch.randn(2, 3, 8)
    torch.manual_seed(0)
    found = model(x)
    torch.manual_seed(0)
    assert isinstance(found, Output)
    assert found.loss > bare(x).loss


def test_a_skipped_layer_has_no_loss():
    model = Host()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    intbmoe.connect(model, optimizer)
    for model.skip in (True, False, True):
        model(torch.randn(2, 3, 8)).backward()
        optimizer.step()
    assert [load.tokens for load in intbmoe.load_statistics(model).values()] == [18, 6]


def pair(loss, y):
    return loss, y


def test_a_connected_model_can_be_pickled():
    model = Host(make=pair)
    intbmoe.connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(2, 3, 8))
    copied = pickle.loads(pickle.dumps(model))
    assert copied(torch.randn(2, 3, 8))[0].isfinite()
