"""What ``intbmoe plan`` counts for a recipe is what its ranks hold and send."""

from dataclasses import replace

import pytest
from test_distribution import be_rank
from tiny_task import DIM, TOKENS, tiny_recipe

from intbmoe.analysis.scaling import break_even_experts, count_recipe, estimate, sent_bytes, state_bytes
from intbmoe.parallel import local
from intbmoe.train import train
from messages import Messages
from ranks import run_ranks

WAYS = [("intbmoe", "ddp"), ("intbmoe", "fsdp"), ("intbmoe", "pools")]
MORE_WAYS = [*WAYS, ("switch", "ddp"), ("switch", "fsdp"), ("mixtral", "experts"), ("soft", "experts")]
EVEN = {"mixtral": {"experts": 5, "top_k": 5}}
"""Every token goes to all five experts, which get equally many, as planned; the ranks do not."""


def recipe_of(method, parallel):
    """Three experts, a number that two ranks do not divide, and two micro-batches per step."""
    recipe = tiny_recipe(method, parallel=parallel, device_batch=2, steps=2, eval_every=9.0, model={"dropout": 0.0})
    options = recipe.moe.options | EVEN.get(method, {})
    return replace(recipe, moe=replace(recipe.moe, experts=3, options=options))


def measure(rank, world, root, ways):
    """Bytes that the second step sends, and bytes of weights, gradients and moments after it."""
    from intbmoe.train.step import Stepper

    be_rank(rank, world)
    take, found = Stepper.take, {}

    def counted(self, step, *arguments):
        with Messages() as messages:
            result = take(self, step, *arguments)
        found[way] = messages.bytes(world), held(self)
        return result

    Stepper.take = counted
    for way in ways:
        train(recipe_of(*way), root / way[1], quiet=True)
    return found


def held(stepper):
    state = stepper.optimizer.state
    tensors = [t for p in stepper.parameters for t in (p, p.grad, state[p]["exp_avg"], state[p]["exp_avg_sq"])]
    return sum(local(tensor).numel() * tensor.dtype.itemsize for tensor in tensors)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks(2, measure, tmp_path_factory.mktemp("planned"), WAYS)


@pytest.fixture(scope="module")
def planned():
    return count_recipe(recipe_of("intbmoe", "pools"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_more_ranks_and_methods_hold_and_send_what_was_planned(tmp_path, planned, world):
    others = {method: count_recipe(recipe_of(method, "ddp")) for method in ("switch", "mixtral", "soft")}
    assert_planned(run_ranks(world, measure, tmp_path, MORE_WAYS), world, others | {"intbmoe": planned})


@pytest.mark.slow
def test_ranks_hold_and_send_what_was_planned(two, planned):
    assert_planned(two, 2, {"intbmoe": planned})


def assert_planned(found, world, planned):
    for way in found[0]:
        counted = planned[way[0]]
        sent, states = found[0][way]
        expected = sent_bytes(counted, way[1], world)
        if way == ("mixtral", "experts"):  # the first of its two layers gets data, which needs no gradient
            rows = -(-5 // world) * (world - 1) * (counted.batch // world) * TOKENS  # sent to rank 0's experts
            expected -= rows * DIM * 4
        assert sent == pytest.approx(expected, abs=1), way
        assert states == state_bytes(counted, way[1], world), way


def test_one_process_holds_it_all_and_sends_nothing(planned):
    assert {sent_bytes(planned, scheme, 1) for scheme in ("ddp", "fsdp", "pools", "experts")} == {0}
    assert len({state_bytes(planned, scheme, 1) for scheme in ("ddp", "fsdp", "pools")}) == 1


def test_pools_sends_less_from_the_break_even_on(planned):
    turn = break_even_experts(planned, 2)
    assert turn > 2
    less, more = (planned.with_experts(2 * (turn // 2) + extra) for extra in (-2, 2))
    assert sent_bytes(less, "fsdp", 2) < sent_bytes(less, "pools", 2)
    assert sent_bytes(more, "fsdp", 2) > sent_bytes(more, "pools", 2)
    assert sent_bytes(less, "pools", 2) == sent_bytes(more, "pools", 2)


def test_messages_that_wait_are_added_to_the_computing(planned):
    for scheme, together in (("fsdp", max), ("pools", lambda *parts: sum(parts))):
        found = estimate(planned, scheme, 4, bandwidth=1, tflops=1e-3)
        assert found.step == together(found.computing, found.sending)
