"""Ranks that divide the experts end with the weights of a single process, and send token rows to their experts."""

import re
from pathlib import Path

import pytest
import torch
from shared_steps import DIM, Shared, Small, assert_same, batch, train_cases
from torch.distributed.device_mesh import init_device_mesh

import intbmoe
from intbmoe import parallel
from intbmoe.registry import find_method
from messages import Messages
from ranks import run_ranks
from small_methods import QUIET, TINY

EXPERTS = 5
"""Which neither two nor four ranks divide: with four, the last one has none."""


def options_of(method, **options):
    return {"method": method, **TINY.get(method, {}), **QUIET.get(method, {}), "experts": EXPERTS, **options}


CASES = {
    "capacity": {"options": options_of("switch", capacity_factor=1.0), "masked": True},
    "a rank without tokens": {"options": options_of("mixtral"), "masked": "half"},
    "accumulation": {"options": options_of("deepseek"), "accumulation": 3},
    "beside fsdp": {"options": options_of("vmoe", expert="swiglu"), "rest": "fsdp", "masked": True},
    "checkpointing": {"options": options_of("expert_choice"), "checkpointed": True},
    "slots that open and close": {"options": options_of("dynmoe")},
}
DIVISIBLE = {"deepseek_v1": {"devices": 1}}  # a method whose option must divide the experts
SENDING = [name for name in intbmoe.list_methods() if "experts" not in find_method(name).layer.REFUSES]
EVERY = {method: {"options": options_of(method, **DIVISIBLE.get(method, {}))} for method in SENDING}


@pytest.fixture(scope="module")
def two():
    return run_ranks(2, train_cases, CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_end_with_one_processs_weights(two, name):
    assert_same([rank[name] for rank in two], CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_method_and_a_rank_that_has_no_expert(world):
    cases = EVERY if world == 2 else CASES | EVERY
    found = run_ranks(world, train_cases, cases)
    for name, case in cases.items():
        assert_same([rank[name] for rank in found], case)


def count(rank, world):
    """What one step sends to experts, its routing, the memory held, and what is refused."""
    shared = Shared(rank, world, options_of("mixtral"))
    shared.step(0)
    x, _ = (part.chunk(world)[rank] for part in batch(1, False))
    with torch.no_grad(), intbmoe.record_routing(shared.model) as log:
        shared.model.eval()(x)
    shared.model.train()
    with Messages() as messages:
        shared.step(1)
    sent = [entries for name, dtype, entries in messages.sent if "all_to_all" in name and dtype == torch.float64]
    return sent, log["mixture"].ids, shared.held(), unequal(rank, world), refusals(shared.model, world)


def unequal(rank, world):
    """Outputs in float32, if rank 0 has no examples and the others have some: on ranks, and in a single process."""
    x = torch.ones(rank, 4, DIM)
    spread = Shared(rank, world, options_of("mixtral"), dtype=torch.float32)
    return spread.model(x).detach(), Small(**options_of("mixtral"))(x).detach()


def refusals(spread, world):
    messages = []
    for model in (spread, Small(), Small(method="mass"), torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="shar") as refused:
            parallel.shard_experts(model, init_device_mesh("cpu", (world,)))
        messages.append(str(refused.value))
    return messages


@pytest.fixture(scope="module")
def counted():
    return run_ranks(2, count)


def test_a_step_sends_the_rows_of_experts_elsewhere_four_times(counted):
    """There and back, in forward and in backward; rows for a rank's own experts stay on that rank."""
    first = 3  # experts of rank 0
    away = [int((counted[0][1] >= first).sum()), int((counted[1][1] < first).sum())]  # rows from each rank to the other
    for rank, (sent, *_) in enumerate(counted):
        there, back = away[rank] * DIM, away[1 - rank] * DIM
        assert sent == [there, back, there, back]  # backward starts at the outputs, which went the other way


def test_a_rank_holds_its_experts_alone(counted):
    """Weights, gradients and both moments, in bytes of memory; no view keeps all experts alive."""
    for (_, _, held, *_), experts in zip(counted, (3, 2), strict=True):
        assert held == [[8 * experts * 5 * DIM] * 4] * 3  # gate, up and down


def test_a_rank_without_examples_serves_the_others(counted):
    for _, _, _, (found, expected), _ in counted:
        torch.testing.assert_close(found, expected)


def test_what_cannot_be_shared_out_says_so(counted):
    again, composed, copied, none = counted[0][-1]
    assert "mixture: its experts are already sharded: call shard_experts once" in again
    assert "no experts to shard (IntBMoE: a token's output needs all of its experts" in composed
    assert "MASS: it copies experts" in copied
    assert "Linear has no experts to shard (it holds no MoE layer)" in none


def test_the_guide_names_the_methods_that_can():
    guide = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
    table = guide.partition("| `experts` sends | methods |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == SENDING
