"""Ranks that divide the pools end with the weights of a single process, and send K composed blocks for any E."""

import pytest
import torch
from shared_steps import BLOCKS, DIM, EXPERTS, HIDDEN, Shared, Small, assert_same, train_cases
from torch.distributed.device_mesh import init_device_mesh

import intbmoe
from intbmoe import parallel
from messages import Messages
from ranks import run_ranks

CASES = {
    "paper": {"rest": "fsdp", "accumulation": 3},
    "masks and recompute": {"recompute": True, "accumulation": 2, "masked": True},
    "checkpointing": {
        "checkpointed": True,
        "accumulation": 2,
        "options": {"bias": False, "hypernetwork": "linear", "coefficients": "softmax"},
    },
}
MORE_CASES = {
    "accumulation beside fsdp": {"accumulation": 3, "rest": "fsdp", "masked": True},
    "recompute beside fsdp": {"recompute": True, "accumulation": 2, "rest": "fsdp"},
    "checkpointing and recompute": {"checkpointed": True, "recompute": True, "rest": "fsdp"},
    "one micro-batch": {"masked": True},
    "one micro-batch beside fsdp": {"rest": "fsdp"},
    "no norms, no filter": {"options": {"gate_norm": "none", "layer_norm": False, "filter": False}},
    "one layer": {"options": {"hidden": ()}},
    "no gate": {"options": {"gate": False}},
    "no shared, fixed scale": {"options": {"shared": False, "learn_scale": False}},
    "layer gate": {"options": {"gate_norm": "layer", "shared_kind": "mlp", "shared_experts": 2}},
}


@pytest.fixture(scope="module")
def two():
    return run_ranks(2, train_cases, CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_end_with_one_processs_weights(two, name):
    assert_same([rank[name] for rank in two], CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "cases"), [(2, MORE_CASES), (4, CASES | MORE_CASES)])
def test_more_cases_and_four_ranks_of_which_one_has_nothing(world, cases):
    found = run_ranks(world, train_cases, cases)
    for name, case in cases.items():
        assert_same([rank[name] for rank in found], case)


def count(rank, world):
    """Messages of one step, and memory, for several ways of training."""
    results = {}
    ways = {
        "plain": ({}, 1, torch.float32),
        "accumulation": ({}, 3, torch.float32),
        "recompute": ({"recompute": True}, 1, torch.float32),
        "bfloat16": ({}, 1, torch.bfloat16),
    }
    for name, (how, accumulation, dtype) in ways.items():
        shared = Shared(rank, world, {}, "ddp", **how, dtype=dtype)
        shared.step(0, accumulation)
        with Messages() as messages:
            shared.step(1, accumulation)
        results[name] = messages.sent
    results["held"] = shared.held()
    return results


@pytest.fixture(scope="module")
def counted():
    return run_ranks(2, count)[0]


def widths():
    return [DIM, *HIDDEN, DIM]


def gathered(world):
    """The entries that a rank sends for each pool: two paths of K blocks, with the last slice padded."""
    return sorted(BLOCKS * -(-i // world) * 2 * o for i, o in zip(widths(), widths()[1:], strict=False))


def large(messages, kind):
    """Sizes of all messages except biases, losses and gradients of small parameters."""
    biases = {2 * BLOCKS * -(-o // 2) for o in widths()[1:]}
    return sorted(n for name, _, n in messages if kind in name and n not in biases | {2 * size for size in biases})


@pytest.mark.parametrize("way", ["plain", "accumulation"])
def test_a_step_gathers_and_scatters_each_pool_once(counted, way):
    assert large(counted[way], "all_gather") == gathered(2)
    assert large(counted[way], "reduce_scatter") == [2 * n for n in gathered(2)]


def test_nothing_else_that_is_sent_grows_with_the_experts(counted):
    rest = [n for name, _, n in counted["plain"] if "gather" not in name and "scatter" not in name]
    model = Small()
    pools = {p for pool in model.mixture.pools for p in pool.parameters()}
    others = sum(p.numel() for p in model.parameters() if p not in pools)
    assert sum(rest) <= others + 50  # DDP's one all-reduce of everything except pools, the norm and the load counts


def test_recompute_gathers_once_more(counted):
    assert large(counted["recompute"], "all_gather") == sorted(2 * gathered(2))
    assert large(counted["recompute"], "reduce_scatter") == [2 * n for n in gathered(2)]


def test_blocks_are_sent_in_the_compute_type(counted):
    sent = [dtype for name, dtype, n in counted["bfloat16"] if "gather" in name and n in gathered(2)]
    assert sent == [torch.bfloat16] * len(gathered(2))


def test_a_rank_holds_its_slice_alone(counted):
    """Weights, gradients and both moments, in bytes of memory; no view keeps a whole pool alive."""
    expected = sorted(
        [2 * EXPERTS * -(-i // 2) * o for i, o in zip(widths(), widths()[1:], strict=False)]
        + [2 * EXPERTS * -(-o // 2) for o in widths()[1:]]
    )
    for sizes in zip(*counted["held"], strict=True):
        assert sorted(sizes) == expected


def refuse(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    messages = []
    for model in (Small(conditioning_dim=3), torch.nn.Linear(2, 2)):
        try:
            parallel.shard_pools(model, mesh)
        except ValueError as error:
            messages.append(str(error))
    shared = Shared(rank, world, {}, "ddp")
    parallel.set_requires_gradient_sync(shared.model, False)
    for attempt in range(3):
        try:
            loss = shared.model(torch.randn(2, 4, DIM, dtype=torch.float64)).sum() + intbmoe.aux_loss(shared.model)
            loss.backward()
            with torch.no_grad():
                for parameter in parallel.pool_parameters(shared.model):
                    parallel.local(parameter).mul_(0.5)
        except RuntimeError as error:
            messages.append(f"{attempt}: {error}")
            parallel.abandon_step(shared.model)
    frozen = Shared(rank, world, {}, "ddp").model
    for parameter in (*parallel.pool_parameters(frozen), *frozen.mixture.hypernetwork.value.parameters()):
        parameter.requires_grad_(False)
    (frozen(torch.randn(2, 4, DIM, dtype=torch.float64)).sum() + intbmoe.aux_loss(frozen)).backward()
    with torch.inference_mode():
        frozen.eval()(torch.randn(2, 4, DIM, dtype=torch.float64))
    messages.append(float(frozen.mixture.hypernetwork.gate.weight.grad.abs().sum()))
    return messages


def test_what_cannot_be_shared_out_says_so():
    conditioned, without, changed, gate = run_ranks(2, refuse)[0]
    assert "mixture has conditioning_dim=3" in conditioned
    assert "Linear holds no IntBMoE" in without
    assert changed.startswith("1: the pool was changed while gradients")
    assert gate > 0  # only the gate's coefficients are trained; the rest of the composition is frozen
