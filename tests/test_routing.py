"""record_routing and load_statistics: how users see where tokens go."""

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import intbmoe
from echo import Echo


def step(model, x, mask=None):
    model(x, mask) if mask is not None else model(x)
    intbmoe.aux_loss(model)
    intbmoe.after_step(model)


def intb(**options):
    return intbmoe.IntBMoE(8, 12, experts=2, **{"blocks": 4, "top_k": 2, **options})


def test_routing_is_recorded_by_module_name_only_inside():
    model = nn.Sequential(intb(), nn.LayerNorm(8), intb(blocks=5, top_k=3)).eval()
    x = torch.randn(2, 3, 8)
    with intbmoe.record_routing(model) as log:
        model(x)
    model(x)
    assert list(log) == ["0", "2"]
    assert log["0"].ids.shape == log["0"].weights.shape == (6, 2)
    assert log["2"].ids.shape == (6, 3)
    assert log["0"].shape == (2, 3)
    assert log["2"].choices == 5
    assert not log["0"].weights.requires_grad


def test_several_forwards_are_joined():
    layer = intb()
    with intbmoe.record_routing(layer) as log:
        layer(torch.randn(2, 3, 8))
        layer(torch.randn(4, 8))
    assert log[""].shapes == ((2, 3), (4,))
    assert log[""].ids.shape == (10, 2)
    with pytest.raises(ValueError, match="2 forwards"):
        _ = log[""].shape


def test_forwards_of_other_threads_are_not_recorded():
    layer, inside = intb().eval(), threading.Barrier(2)

    def other():
        with intbmoe.record_routing(layer) as log:
            inside.wait(10)
            layer(torch.randn(5, 8))
            inside.wait(10)
        seen.append(log[""].shapes)

    seen = []
    thread = threading.Thread(target=other)
    with intbmoe.record_routing(layer) as log:
        thread.start()
        inside.wait(10)
        layer(torch.randn(3, 8))
        inside.wait(10)
        thread.join()
    assert (log[""].shapes, seen) == (((3,),), [((5,),)])
    assert not layer.statistics.wants(training=False)


def test_a_compiled_layer_is_recorded_too():
    layer, x = intb().eval(), torch.randn(3, 8)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(x)
        with intbmoe.record_routing(layer) as eager:
            layer(x)
        with intbmoe.record_routing(layer) as log:
            compiled(x)
    assert torch.equal(log[""].ids, eager[""].ids)


def test_recording_ends_after_an_error():
    layer = intb()
    with pytest.raises(ValueError, match="shape"), intbmoe.record_routing(layer):
        layer(torch.randn(2, 3, 9))
    assert not layer.statistics.wants(training=False)


def test_a_method_that_does_not_choose_has_no_ids():
    layer = intbmoe.create("dense", 8, 12)
    with intbmoe.record_routing(layer) as log:
        layer(torch.randn(2, 3, 8))
    assert log[""].ids is None
    assert log[""].weights is None
    with pytest.raises(ValueError, match="does not choose"):
        log[""].load_statistics()


def test_nothing_to_record_is_an_error():
    with pytest.raises(ValueError, match="Linear holds no MoE layer"), intbmoe.record_routing(nn.Linear(2, 2)):
        pass


def test_statistics_from_the_log_and_from_the_counters_agree_and_leave_padding_out():
    layer = intb()
    x, mask = torch.randn(4, 16, 8), torch.rand(4, 16) > 0.5
    with intbmoe.record_routing(layer) as log:
        step(layer, x, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted = intbmoe.load_statistics(layer)[""]
    recorded = log[""].load_statistics()
    assert counted == recorded
    assert counted.tokens == mask.sum()
    assert sum(counted.counts) == 2 * mask.sum()


def test_statistics_cover_all_steps_since_the_last_call():
    layer = Echo(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            step(layer, torch.randn(1, 5, 4))
        assert intbmoe.load_statistics(layer, reset=False)[""].tokens == 15
        assert intbmoe.load_statistics(layer)[""].tokens == 15
    assert intbmoe.load_statistics(layer) == {}


def test_a_dead_block_is_warned_about_once():
    layer = Echo(4, 4)  # sends everything to the first of two
    step(layer, torch.randn(1, 5, 4))
    with pytest.warns(UserWarning, match=r"layer '': no token of 5 went to expert or block 1 \(numbered 0 to 1\)"):
        intbmoe.load_statistics(layer)
    step(layer, torch.randn(1, 5, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        intbmoe.load_statistics(layer)


def test_contexts_nest():
    layer, x = intb(), torch.randn(2, 3, 8)
    with intbmoe.record_routing(layer) as outer:
        layer(x)
        with intbmoe.record_routing(layer) as inner:
            layer(x)
        layer(x)
    assert len(inner[""].shapes) == 1
    assert len(outer[""].shapes) == 3


def test_recomputation_under_checkpointing_is_not_recorded_again():
    layer = intb()
    with intbmoe.record_routing(layer) as log:
        y = checkpoint(lambda x: layer(x).exp(), torch.randn(2, 3, 8, requires_grad=True), use_reentrant=False)
        y.sum().backward()
    assert log[""].shapes == ((2, 3),)


def test_tokens_without_an_expert_are_still_tokens():
    layer = intbmoe.create("remoe", 8, 12, experts=3).eval()
    with torch.no_grad():
        layer.router.weight.zero_()  # no positive score, so no expert is chosen
    with intbmoe.record_routing(layer) as log:
        layer(torch.randn(2, 3, 8))
    assert log[""].load_statistics().tokens == 6


def test_an_unfinished_step_is_named_rather_than_left_out():
    layer = Echo(4, 4)
    layer(torch.randn(1, 5, 4))
    intbmoe.aux_loss(layer)
    with pytest.raises(RuntimeError, match=r"unfinished step.*after_step"):
        intbmoe.load_statistics(layer)
