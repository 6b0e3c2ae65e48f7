"""aux_loss, before_step and after_step: once per micro-batch, once per step, refused if they would be wrong."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import intbmoe
from echo import Echo


class Family(Echo):
    """Echo that records what the hooks pass to it."""

    calls: list

    @classmethod
    def family_before_step(cls, layers, optimizer, reevaluate):
        cls.calls.append(("before", layers, optimizer, reevaluate))

    @classmethod
    def family_after_step(cls, layers, sums, optimizer):
        cls.calls.append(("after", layers, [dict(entry) for entry in sums], optimizer))


def model_of(*layers):
    return nn.Sequential(*layers)


def test_losses_of_all_layers_are_summed_with_gradient():
    model = model_of(Echo(4, 4, factor=2.0), Echo(4, 4, factor=3.0))
    model(torch.randn(1, 2, 4))
    loss = intbmoe.aux_loss(model)
    assert loss == 4 + 9
    loss.backward()
    assert model[1].gain.grad == 6


def test_a_second_call_or_none_before_is_refused_by_name():
    model = model_of(nn.Identity(), Echo(4, 4))
    with pytest.raises(RuntimeError, match="layer '1' has no record of a training forward"):
        intbmoe.aux_loss(model)
    model(torch.randn(1, 2, 4))
    intbmoe.aux_loss(model)
    with pytest.raises(RuntimeError, match="has no record of a training forward"):
        intbmoe.aux_loss(model)
    with pytest.raises(RuntimeError, match=r"^Echo has no record of a training forward"):
        intbmoe.aux_loss(Echo(4, 4))


def test_layers_in_evaluation_are_passed_over():
    model = model_of(Echo(4, 4), Echo(4, 4, factor=3.0))
    model[0].eval()
    model(torch.randn(1, 2, 4))
    assert intbmoe.aux_loss(model) == 9
    intbmoe.after_step(model)
    assert not model[0].statistics.window


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="Linear holds no MoE layer"):
        intbmoe.aux_loss(nn.Linear(2, 2))


def test_reentrant_checkpointing_is_refused_where_it_would_lose_a_gradient():
    layer = Echo(4, 4)
    checkpoint(layer, torch.randn(1, 2, 4, requires_grad=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        intbmoe.aux_loss(layer)


def test_without_gradients_wanted_none_are_required():
    layer = Echo(4, 4)
    with torch.no_grad():
        layer(torch.randn(1, 2, 4))
        assert intbmoe.aux_loss(layer) == 1


def test_frozen_routers_are_ordinary_fine_tuning():
    layer = intbmoe.create("switch", 4, 8, experts=2)
    layer.router.requires_grad_(False)
    y = layer(torch.randn(1, 5, 4))
    loss = intbmoe.aux_loss(layer)
    assert not loss.requires_grad
    (y.sum() + loss).backward()
    assert layer.experts.up.weight.grad is not None


def test_checkpointing_keeps_no_graph_alive_and_a_second_call_is_still_refused():
    layer = Echo(4, 4)
    y = checkpoint(lambda x: layer(x).exp(), torch.randn(1, 2, 4, requires_grad=True), use_reentrant=False)
    (y.sum() + intbmoe.aux_loss(layer)).backward()
    assert layer.statistics.record is None
    with pytest.raises(RuntimeError, match="has no record of a training forward"):
        intbmoe.aux_loss(layer)


def test_gradients_without_the_losses_that_belong_to_them_stop_the_training():
    layer, x = Echo(4, 4), torch.randn(1, 2, 4, requires_grad=True)
    layer(x)
    layer(x)  # as one tries a layer
    (layer(layer(x)).sum() + intbmoe.aux_loss(layer)).backward()  # used twice: the losses of one forward are lost
    with pytest.raises(RuntimeError, match="Echo was trained without its auxiliary losses"):
        layer(x)
    (layer(x).sum() + intbmoe.aux_loss(layer)).backward()
    layer(x)


def test_families_see_all_their_layers_and_the_steps_sums_once():
    Family.calls = []
    model = model_of(Family(4, 4), Echo(4, 4), Family(4, 4))
    optimizer = object()
    for tokens in (2, 3):  # two micro-batches
        model(torch.randn(1, tokens, 4))
        intbmoe.aux_loss(model)
    intbmoe.before_step(model, optimizer, reevaluate=len)
    intbmoe.after_step(model, optimizer)
    (_, layers, *handed), (_, after_layers, sums, after_optimizer) = Family.calls
    assert layers == after_layers == [model[0], model[2]]
    assert handed == [optimizer, len]
    assert after_optimizer is optimizer
    assert [entry["load"].tolist() for entry in sums] == [[5, 0]] * 2
    assert [int(entry["tokens"]) for entry in sums] == [5, 5]


def test_a_step_without_counts_is_refused():
    moving, losing = model_of(Family(4, 4)), model_of(Echo(4, 4))
    losing(torch.randn(1, 2, 4))
    for model in (moving, losing):
        with pytest.raises(RuntimeError, match=r"layer '0' has no counts for this step: .*aux_loss"):
            intbmoe.after_step(model)


def test_a_method_without_losses_and_state_needs_no_counts():
    model = model_of(intbmoe.create("intbmoe", 4, 8, experts=2, blocks=2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    intbmoe.connect(model, optimizer)  # and the model returns no loss
    for _ in range(2):
        model(torch.randn(1, 2, 4)).sum().backward()
        optimizer.step()


def test_counts_and_records_are_no_part_of_the_state():
    layer = Echo(4, 4)
    layer(torch.randn(1, 2, 4))
    intbmoe.aux_loss(layer)
    intbmoe.after_step(layer)
    assert list(layer.state_dict()) == ["gain"]
    assert list(layer.buffers()) == []
