"""Kernels that start before the previous one has ended wait for it, and give the same bits."""

import ast
from pathlib import Path

import pytest
import torch

import intbmoe

pytest.importorskip("triton")

OPS = Path(intbmoe.__file__).parent / "ops"


def functions_in_triton():
    """Return the syntax trees of all functions that Triton compiles, by file and name."""
    found = {}
    for path in OPS.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                found[path.relative_to(OPS).as_posix(), node.name] = node
    return found


def names_in(node):
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def test_every_kernel_waits_for_the_previous_one_before_it_does_anything():
    functions = functions_in_triton()
    helpers = {name for node in functions.values() for name in names_in(node)}
    kernels = {key: node for key, node in functions.items() if key[1] not in helpers}
    assert len(kernels) > 30
    for key, node in kernels.items():
        first = node.body[1 if ast.get_docstring(node) else 0]
        assert ast.unparse(first) == "begin()", key


@pytest.mark.gpu
def test_a_captured_step_gives_the_bits_of_kernels_that_do_not_overlap(monkeypatch):
    from intbmoe.ops import launch

    torch.manual_seed(0)
    shapes = [(24, 6, 5), ((40, 72), 3, 3), (96, 16, 70), ((), 8, 20)]
    layers = [intbmoe.IntBMoE(48, hidden, experts=e, blocks=k, top_k=2) for hidden, e, k in shapes]
    model = torch.nn.Sequential(*layers, intbmoe.create("remoe", 48, 64, experts=5)).cuda().eval()
    x = torch.randn(3, 200, 48, device="cuda", requires_grad=True)
    leaves = [x, *model.parameters()]

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            y = model(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    def captured():
        launch._compiled.clear()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        return graph, found

    with monkeypatch.context() as patched:
        patched.setattr(launch, "_options", lambda device: {})
        graph, found = captured()
        graph.replay()
        expected = [value.clone() for value in found]
    graph, found = captured()
    for _ in range(50):
        for value in found:
            value.fill_(float("nan"))
        graph.replay()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    launch._compiled.clear()
