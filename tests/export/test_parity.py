"""The comparison with the trained model: correct exports pass in every task and type, wrong ones do not."""

import copy
from itertools import product

import pytest
import torch
from small_runs import TASKS, small_run

import intbmoe
from intbmoe.export import ExportError
from intbmoe.export.export import cast_model
from intbmoe.export.parity import BATCH, Parity, choose_inputs
from intbmoe.routing import record_routing
from intbmoe.tasks import make_task
from thinned import thinned


@pytest.fixture(scope="module", params=TASKS)
def trained(request, tmp_path_factory):
    run = small_run(request.param, tmp_path_factory.mktemp("run"))
    return make_task(run.recipe), intbmoe.load(run).requires_grad_(False)


def test_inputs_reach_every_block_that_any_validation_input_reaches(trained):
    task, model = trained
    inputs = choose_inputs(task, model)
    with record_routing(model) as chosen, torch.no_grad():
        for batch in inputs.batches:
            task.evaluate(model, batch)
    split = task.split("valid")
    with record_routing(model) as all_of_them, torch.no_grad():
        for start in range(0, len(split), BATCH):
            indices = range(start, min(start + BATCH, len(split)))
            task.evaluate(model, task.prepare(split.batch(indices, 0, 0), None))
    for name, record in all_of_them.items():
        reached = set(record.ids[record.ids >= 0].tolist())
        assert set(chosen[name].ids[chosen[name].ids >= 0].tolist()) == reached
        assert set(inputs.unreached.get(name, [])) == set(range(4)) - reached
    assert inputs.examples <= inputs.looked_at <= len(split)


# Without precomposition an export is the trained model, cast: test_export.py exports every method that way.
@pytest.mark.parametrize(
    ("dtype", "precompose"),
    thinned(product([torch.float32, torch.bfloat16], [True, False]), lambda dtype, precompose: precompose),
)
def test_what_is_exported_passes(trained, dtype, precompose):
    task, model = trained
    parity = Parity(task, model, dtype)
    found = parity.check_model(cast_model(model, dtype, precompose=precompose))
    assert found["layers"]["largest_error"] <= found["layers"]["tolerance"]
    assert found["outputs"]["used_of_allowed"] <= 1
    # The tolerances are so tight that bfloat16 does not pass as float32.
    if dtype == torch.bfloat16 and precompose:
        strict = Parity(task, model, torch.float32)
        with pytest.raises(ExportError, match="parity failed"):
            strict.check_model(cast_model(model, dtype, precompose=precompose).float())


def _blocks(served):
    return [layer for layer in served.modules() if isinstance(layer, intbmoe.ComposedMoE)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_block_of_one_layer_is_found(trained, dtype):
    task, model = trained
    parity = Parity(task, model, dtype)
    served = cast_model(model, dtype, precompose=True)
    names = [name for name, layer in served.named_modules() if isinstance(layer, intbmoe.ComposedMoE)]
    for block, name in enumerate(names):  # whether an input reaches that block or not
        wrong = copy.deepcopy(served)
        _blocks(wrong)[block].block_weights[1][block].mul_(1.1)
        with pytest.raises(ExportError, match=rf"layer '{name}'.*block {block},.*nothing was written"):
            parity.check_model(wrong)


def test_a_wrong_router_and_a_wrong_output_are_found(trained):
    task, model = trained
    parity = Parity(task, model, torch.float32)
    served = cast_model(model, torch.float32, precompose=True)
    wrong = copy.deepcopy(served)
    _blocks(wrong)[0].router.scores.weight.copy_(_blocks(wrong)[0].router.scores.weight.flip(0))
    with pytest.raises(ExportError, match="tokens to other blocks"):
        parity.check_model(wrong)
    last = [parameter for name, parameter in served.named_parameters() if ".norm" in name or name.startswith("norm")]
    last[-1].add_(0.01)
    with pytest.raises(ExportError, match="parity failed"):
        parity.check_model(served)


def test_numbers_that_are_none_do_not_pass(trained):
    task, model = trained
    parity = Parity(task, model, torch.float32)
    served = cast_model(model, torch.float32, precompose=True)
    _blocks(served)[0].shared.down.weight[0, 0] = float("nan")
    with pytest.raises(ExportError, match="parity failed"):
        parity.check_model(served)
