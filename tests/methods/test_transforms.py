"""Derivatives by torch.func and dual numbers agree with finite differences and autograd for every method."""

import pytest
import torch
from torch.autograd import forward_ad

from small_methods import DIM, METHODS, make


def batch(dtype):
    generator = torch.Generator().manual_seed(2)
    x, t = (torch.randn(2, 5, DIM, dtype=torch.float64, generator=generator).to(dtype) for _ in range(2))
    return x, t, torch.tensor([[True] * 5, [True, False, True, True, False]])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_tangents_agree_with_finite_differences(name, dtype, frozen):
    """A custom op without a forward formula would silently drop tangents; float32 and float64 run different ops."""
    layer, (x, t, mask) = make(name, dtype).eval().requires_grad_(not frozen), batch(dtype)
    exact, step = make(name, torch.float64).eval(), 1e-6
    with torch.no_grad():
        ends = [exact(x.double() + sign * step * t.double(), mask) for sign in (1, -1)]
    expected = (ends[0] - ends[1]) / (2 * step)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-6
    y, tangent = torch.func.jvp(lambda x: layer(x, mask), (x,), (t,))
    assert (tangent - expected).norm() <= tolerance * expected.norm()
    assert (y - exact(x.double(), mask)).norm() <= tolerance * y.norm()
    for gradients in (True, False):
        with forward_ad.dual_level(), torch.set_grad_enabled(gradients):
            dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, t), mask))
        assert (dual.tangent - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("name", METHODS)
def test_gradients_of_single_sequences_by_vmap(name):
    layer, (x, t, mask) = make(name, torch.float32).eval(), batch(torch.float32)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters, x, t, mask):
        return (torch.func.functional_call(layer, parameters, (x[None], mask[None])) * t).sum()

    gradients = torch.func.grad(loss)
    found = torch.func.vmap(gradients, in_dims=(None, 0, 0, 0))(parameters, x, t, mask)
    for place in range(2):
        expected = gradients(parameters, x[place], t[place], mask[place])
        for name, value in expected.items():
            torch.testing.assert_close(found[name][place], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "varied", ["codebook", "pools.0.bias", "filter.bias", "router.scores.bias", "shared.up.weight"]
)
def test_layers_that_differ_in_one_parameter_by_vmap(varied):
    layer, (x, _, mask) = make("intbmoe", torch.float32).eval(), batch(torch.float32)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    many = parameters[varied] + torch.randn(4, *parameters[varied].shape)

    def run(value):
        return torch.func.functional_call(layer, {**parameters, varied: value}, (x, mask))

    torch.testing.assert_close(torch.func.vmap(run)(many), torch.stack([run(value) for value in many]))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("training", [False, True])
def test_gradients_of_torch_func_are_autograds(name, training):
    layer, (x, t, mask) = make(name, torch.float32).train(training), batch(torch.float32)

    def loss(parameters, x):
        torch.manual_seed(3)  # some methods draw random numbers in training
        return (torch.func.functional_call(layer, parameters, (x, mask)) * t).sum()

    parameters = dict(layer.named_parameters())
    frozen = {name: parameter.detach() for name, parameter in parameters.items()}
    found, x_grad = torch.func.grad(loss, argnums=(0, 1))(frozen, x)
    x = x.clone().requires_grad_()
    loss(parameters, x).backward()
    torch.testing.assert_close(x_grad, x.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_backend_without_tangents_refuses_to_drop_them():
    layer, (x, t, _) = make("intbmoe", torch.float32).eval(), batch(torch.float32)
    layer.backend = "grouped"
    with pytest.raises(
        RuntimeError, match=r"backend 'grouped' has no forward-mode derivative: leave layer\.backend None"
    ):
        torch.func.jvp(layer, (x,), (t,))
