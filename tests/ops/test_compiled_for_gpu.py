"""What code compiled for a GPU does differently, tried without one: ``compiled_for_gpu`` is made to say yes."""

import copy

import pytest
import torch

import intbmoe
from intbmoe.ops import combine, running_sum
from intbmoe.ops.eager import compiled_for_gpu


@pytest.mark.parametrize("name", ["soft_causal", "vmoe"])
def test_operations_kept_from_the_compiler_change_nothing(name, monkeypatch):
    for module in (running_sum, combine):
        monkeypatch.setattr(module, "compiled_for_gpu", lambda x: torch.compiler.is_compiling())
    operation = torch.ops.intbmoe.running_sum if name == "soft_causal" else torch.ops.intbmoe.sum_rows
    layer = intbmoe.create(name, 8, 12, experts=3).double().eval()
    compiled = copy.deepcopy(layer)
    compiled.compile(fullgraph=True, backend="aot_eager")
    x, probe = torch.randn(2, 2, 9, 8, dtype=torch.float64).unbind()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    (layer(inputs[0]) * probe).sum().backward()
    with torch.profiler.profile() as profile:
        (compiled(inputs[1]) * probe).sum().backward()
    calls = [event.name for event in profile.events()]
    assert operation.default.name() in calls
    pairs = zip((inputs[0], *layer.parameters()), (inputs[1], *compiled.parameters()), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(b.grad, a.grad)


def test_code_for_the_cpu_and_ordinary_calls_are_not_compiled_for_a_gpu():
    asked = torch.compile(lambda x: x + compiled_for_gpu(x), fullgraph=True, backend="eager")
    assert not compiled_for_gpu(torch.zeros(1))
    assert asked(torch.zeros(1)) == 0
