"""What every registered method must do. A new method is tested because it is registered."""

import copy
from itertools import product

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import intbmoe
from intbmoe.registry import find_method
from ranks import run_ranks
from small_methods import (
    DIM,
    DTYPES,
    HIDDEN,
    METHODS,
    QUIET,
    SAME_PARTS,
    TINY,
    dtypes,
    make,
    random_mask,
    token_wise,
    tokens,
)
from thinned import thinned


def grads(layer):
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


def state_of(layer):
    return {name: value.clone() for name, value in layer.state_dict().items()}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 2, 3), (4,)], ids=str)
def test_shape_and_type_are_kept(name, shape):
    layer = make(name)
    x = tokens(*shape)
    assert layer(x).shape == x.shape
    assert layer(x).dtype == x.dtype
    assert layer.float()(x.float()).dtype == torch.float32


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_agree_with_finite_differences(name, masked):
    layer = make(name).eval()
    x = tokens(2, 3).requires_grad_()
    mask = random_mask(2, 3) if masked else None
    parameters = [p.requires_grad_() for p in layer.parameters()]
    names = [n for n, _ in layer.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, mask))

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("name", METHODS)
@dtypes
def test_every_parameter_gets_a_finite_gradient_though_experts_starve(name, dtype):
    layer = make(name, dtype)
    x = tokens(1, 1, dtype=dtype)
    (layer(x).square().sum() + intbmoe.aux_loss(layer)).backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


# Float64 is tested in every case, the other types only with gradients.
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("shape", "training", "dtype"),
    thinned(
        product([(2, 0), (0, 3), (1, 1)], [False, True], DTYPES),
        lambda shape, training, dtype: dtype == torch.float64 or (training and shape != (0, 3)),
    ),
    ids=str,
)
def test_no_token_and_one_token_are_ordinary_input(name, shape, training, dtype):
    layer = make(name, dtype).train(training)
    x = tokens(*shape, dtype=dtype).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    loss = y.sum() + (intbmoe.aux_loss(layer) if training else 0)
    assert loss.isfinite()
    loss.backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name  # under DDP a missing gradient would hang
        assert parameter.grad.isfinite().all(), parameter_name
    if training:
        intbmoe.after_step(layer)


@pytest.mark.parametrize("name", METHODS)
def test_equal_tokens_all_go_one_way(name):
    layer = make(name).eval()
    x = tokens(1, 1).expand(1, 6, DIM)
    with intbmoe.record_routing(layer) as log:
        y = layer(x)
    assert y.isfinite().all()
    if log[""].ids is not None and find_method(name).noncausal_reason() is None:
        assert (log[""].ids == log[""].ids[0]).all()
        torch.testing.assert_close(y, y[:, :1].expand_as(y), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_routes_says_among_how_many(name):
    """Tables, analyses and exports rely on it: define ``choices``, ``quantities`` and ``active_parameters``."""
    layer = make(name).eval()
    with intbmoe.record_routing(layer) as log:
        layer(tokens(2, 5))
    ids, method = log[""].ids, find_method(name)
    if ids is None:
        return
    assert layer.choices is not None
    assert int(ids.max()) < layer.choices
    if method.participation == "sparse":
        total = sum(parameter.numel() for parameter in layer.parameters())
        assert layer.active_parameters() < total or layer.quantities().execution == layer.choices
        if not method.dynamic and method.noncausal_reason() is None:
            assert layer.quantities().execution == ids.shape[1]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("training", [False, True])
@dtypes
def test_masked_tokens_neither_give_nor_take(name, training, dtype):
    """NaN in the padding changes nothing: not the outputs, losses, statistics, gradients or state."""
    x, mask = tokens(3, 5, dtype=dtype), random_mask(3, 5)
    mask[1] = False  # a sequence of padding only
    results = []
    for filler in (0.0, float("nan")):
        layer = make(name, dtype, **QUIET.get(name, {})).train(training)
        padded = torch.where(mask.unsqueeze(-1), x, filler).requires_grad_()
        torch.manual_seed(4)
        with intbmoe.record_routing(layer) as log:
            y = layer(padded, mask)
        assert (y[~mask] == 0).all()
        if log[""].ids is not None:
            assert (log[""].ids[~mask.flatten()] == -1).all()
        aux = intbmoe.aux_loss(layer) if training else torch.zeros(())
        (y.square().sum() + aux).backward()
        assert (padded.grad[~mask] == 0).all()
        pending = dict(layer.statistics.pending)
        if training:
            intbmoe.after_step(layer)
        results.append((y.detach(), aux.detach(), pending, grads(layer), state_of(layer)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    if training:
        assert results[0][2]["tokens"] == mask.sum()


@pytest.mark.parametrize("name", METHODS)
def test_a_padded_sequence_is_the_sequence_alone(name):
    """Padding at the end for every method, and anywhere for methods that treat each token alone."""
    layer, x = make(name).eval(), tokens(1, 9)
    mask = random_mask(9) if token_wise(layer) else torch.arange(9) < 6
    padded = torch.where(mask.unsqueeze(-1), x, 7.0)
    torch.testing.assert_close(layer(padded, mask.unsqueeze(0))[:, mask], layer(x[:, mask]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_permuting_tokens_permutes_outputs_where_a_token_stands_for_itself(name):
    layer, x = make(name).eval(), tokens(1, 8)
    if not token_wise(layer):
        pytest.skip("a token of this method depends on others")
    order = torch.randperm(8)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_ties_go_to_the_lower_index(name):
    """With every score equal, a token's m choices are the first m."""
    layer = make(name).eval()
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            if parameter_name.startswith(("router", "embeddings")):
                parameter.zero_()
    with intbmoe.record_routing(layer) as log:
        layer(tokens(2, 5))
    if log[""].ids is None or find_method(name).noncausal_reason() is not None:
        pytest.skip("tokens of this method choose nothing")
    for row in log[""].ids.tolist():
        chosen = sorted(choice for choice in row if choice >= 0)
        assert chosen == list(range(len(chosen)))


@pytest.mark.parametrize("name", METHODS)
def test_the_scale_of_the_losses_does_not_depend_on_the_number_of_tokens(name):
    """The same batch repeated three times has the same loss: world size and accumulation do not change its weight."""
    losses = []
    for copies in (1, 3):
        layer = make(name, **QUIET.get(name, {}))
        layer(tokens(2, 5).repeat(copies, 1, 1))
        losses.append(intbmoe.aux_loss(layer))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_a_sequence_does_not_depend_on_its_batch_in_evaluation(name):
    layer = make(name).eval()
    x = tokens(4, 5)
    with intbmoe.record_routing(layer) as together:
        batch = layer(x)
    with intbmoe.record_routing(layer) as alone:
        single = torch.cat([layer(row.unsqueeze(0)) for row in x])
    torch.testing.assert_close(batch, single, rtol=0, atol=1e-12)
    if together[""].ids is not None:
        assert torch.equal(together[""].ids, alone[""].ids)
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("training", [False, True])
def test_declared_causality_is_true(name, training):
    """Changing a suffix leaves the prefix's outputs unchanged if and only if the method says it is causal."""
    layer = make(name).train(training)
    x = tokens(2, 40)
    changed = torch.cat([x[:, :7], tokens(2, 33, seed=9)], dim=1)
    before, after = [], []
    for inputs, outputs in ((x, before), (changed, after)):
        torch.manual_seed(5)
        with intbmoe.record_routing(layer) as log:
            outputs.append(layer(inputs)[:, :7])
        outputs.append(None if log[""].ids is None else log[""].ids.view(2, 40, -1)[:, :7])
    same = (before[0] - after[0]).abs().max() < 1e-12
    assert same == (layer.config.noncausal_reason() is None)
    if same and before[1] is not None:
        assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("name", METHODS)
def test_bf16_autocast_stays_near_float32(name):
    """bfloat16 keeps 8 bits: each of the few roundings of a token adds at most 2⁻⁸ of its size."""
    layer = make(name).float().eval()
    x = tokens(4, 16).float()
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(x)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() <= 8 * 2**-8 * exact.norm()


# A cold inductor compile takes minutes on a small machine; aot_eager traces the same graphs, forward and backward, and
# eager only the forward: both show every graph break. On a GPU test_fused_layer.py compiles IntBMoE with inductor.
TRACED_BACKWARDS = ("intbmoe", "dynmoe", "expert_choice", "lapsum", "lory", "mumoe_tr", "soft_causal")
"""One method for each operation, and for each custom gradient, that a backward uses."""


def compiled_always(name, backend):
    return name not in SAME_PARTS and backend == ("aot_eager" if name in TRACED_BACKWARDS else "eager")


@pytest.mark.parametrize(
    ("name", "backend"), thinned(product(METHODS, ("eager", "aot_eager", "inductor")), compiled_always)
)
def test_compiles_whole(name, backend, request):
    if (name, backend) == ("hypermoe", "inductor"):
        why = "torch 2.13 joins loops in float64 on the CPU that lose a gradient: right with max_fusion_size = 1"
        request.applymarker(pytest.mark.xfail(strict=True, reason=why))
    torch._dynamo.reset()  # all methods share one forward, and so one limit on recompilations
    eager, compiled = make(name, **QUIET.get(name, {})), make(name, **QUIET.get(name, {}))
    run = torch.compile(compiled, fullgraph=True, backend=backend)
    x, mask = tokens(2, 5), random_mask(2, 5)
    for layer, call in ((eager, eager), (compiled, run)):
        (call(x, mask).square().sum() + intbmoe.aux_loss(layer)).backward()
    if backend != "eager":
        # Without a mask, the cheaper forward alone shows that there is a single graph and that it is right.
        whole = torch.compile(compiled, fullgraph=True, backend="eager" if backend == "aot_eager" else backend)
        torch.testing.assert_close(whole(x), eager(x), rtol=1e-10, atol=1e-12)
        for layer in (eager, compiled):
            intbmoe.aux_loss(layer)
    torch.testing.assert_close(grads(compiled), grads(eager), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(compiled.statistics.pending, eager.statistics.pending)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("way", ["a host wrote over it", "without memory at first"])
def test_a_reset_layer_starts_as_a_new_one(name, way):
    new = make(name, torch.float32)
    if way == "a host wrote over it":
        layer = make(name, torch.float32)
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.detach().fill_(1)
    else:
        with torch.device("meta"):
            layer = make(name, torch.float32)
        layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    assert new.state_dict().keys() == layer.state_dict().keys()
    for key, value in new.state_dict().items():
        assert torch.equal(layer.state_dict()[key], value), key


@pytest.mark.parametrize("name", METHODS)
def test_state_dict_round_trip_is_exact(name):
    layer = make(name)
    other = intbmoe.create(name, DIM, HIDDEN, **TINY.get(name, {})).double()
    other.load_state_dict(layer.state_dict())
    x = tokens(2, 5)
    assert torch.equal(layer.eval()(x), other.eval()(x))


@pytest.mark.parametrize("name", METHODS)
def test_a_layer_can_be_copied_after_a_forward(name):
    layer = make(name)
    layer(tokens(2, 5))
    twin = copy.deepcopy(layer).eval()
    assert torch.equal(twin(tokens(2, 5)), layer.eval()(tokens(2, 5)))


@pytest.mark.parametrize("name", METHODS)
def test_activation_checkpointing_changes_nothing(name):
    x = tokens(2, 5)
    results = []
    for recompute in (False, True):
        layer = make(name)
        torch.manual_seed(6)
        # As in a block, an operation that saves a tensor follows, so that the whole layer is recomputed.
        y = checkpoint(lambda x, layer=layer: layer(x).exp(), x, use_reentrant=False) if recompute else layer(x).exp()
        (y.square().sum() + intbmoe.aux_loss(layer)).backward()
        assert layer.statistics.record is None  # the forward that backward runs again leaves nothing behind
        pending = dict(layer.statistics.pending)
        intbmoe.after_step(layer)
        results.append((grads(layer), pending, state_of(layer)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def _train(rank, world, name):
    """Train three steps on this rank's part of a batch; return what must not depend on the number of ranks."""
    layer = make(name, **QUIET.get(name, {}))
    model = DistributedDataParallel(layer) if world > 1 else layer
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, mask = tokens(4, 6).chunk(world)[rank], random_mask(4, 6).chunk(world)[rank]
    for _ in range(3):
        optimizer.zero_grad()
        # A sum over the global batch: DDP averages over ranks, so each rank's part counts ``world`` times.
        (model(x, mask).square().sum() * world + intbmoe.aux_loss(model)).backward()
        intbmoe.before_step(model, optimizer)
        optimizer.step()
        intbmoe.after_step(model, optimizer)
    return {"grads": grads(layer), "state": state_of(layer), "window": dict(layer.statistics.window)}


def _train_all(rank, world, names):
    return {name: _train(rank, world, name) for name in names}


@pytest.fixture(scope="module")
def two_ranks():
    """All methods in one pair of processes: starting processes costs more than training."""
    return run_ranks(2, _train_all, METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_are_one_process(name, two_ranks):
    """Three steps under DDP, without find_unused_parameters: same gradients, weights, state and counts."""
    single = _train(0, 1, name)
    for results in two_ranks:
        torch.testing.assert_close(results[name], single, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_the_three_quantities_and_active_parameters_are_plausible(name):
    layer = make(name)
    total = sum(p.numel() for p in layer.parameters())
    assert 0 < layer.active_parameters() <= total
    quantities = layer.quantities()
    assert quantities.participation >= 1
    assert quantities.execution >= 1
    one, batch, longer = quantities.sets(1, 10), quantities.sets(3, 10), quantities.sets(3, 40)
    assert 0 <= one <= batch <= longer
    assert (one == longer) == isinstance(quantities.materialization, int)


@pytest.mark.parametrize("name", METHODS)
def test_bad_arguments_name_the_argument_and_its_value(name):
    with pytest.raises(ValueError, match="dim=0"):
        intbmoe.create(name, 0, HIDDEN)
    with pytest.raises(ValueError, match="hidden=-3"):
        intbmoe.create(name, DIM, -3)
    with pytest.raises(TypeError, match=r"no option 'hiden'.*did you mean 'hidden'"):
        intbmoe.create(name, DIM, HIDDEN, hiden=3)
    layer = make(name)
    with pytest.raises(ValueError, match=r"\(2, 3, 9\).*dim=8"):
        layer(torch.zeros(2, 3, 9, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"mask has shape \(2, 4\).*\(2, 3\)"):
        layer(tokens(2, 3), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask is torch.float32"):
        layer(tokens(2, 3), torch.ones(2, 3))
    with pytest.raises(TypeError, match=r"x is torch.float32.*torch.float64"):
        layer(torch.zeros(2, 3, DIM))
