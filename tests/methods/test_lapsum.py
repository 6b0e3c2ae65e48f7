"""LapSum's soft top-k: its definition, its derivatives, and the layer."""

import pytest
import torch

from intbmoe.methods.lapsum import lapsum_topk
from small_methods import make, tokens


def scores_of(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def bisected(scores, k, temperature):
    """From the definition: b by halving an interval."""
    low, high = scores.min() - 60 * temperature, scores.max() + 60 * temperature
    law = torch.distributions.Laplace(torch.zeros((), dtype=torch.float64), temperature)
    for _ in range(200):
        b = (low + high) / 2
        low, high = (b, high) if law.cdf(scores - b).sum() > k else (low, b)
    return law.cdf(scores - b)


@pytest.mark.parametrize("k", [0.3, 1.0, 2.5, 5.0, 6.9])
@pytest.mark.parametrize("temperature", [0.01, 0.3, 5.0])
def test_it_solves_its_equation(k, temperature):
    scores = scores_of(4, 7)
    p = lapsum_topk(scores, k, temperature)
    torch.testing.assert_close(p.sum(-1), torch.full((4,), k, dtype=torch.float64), rtol=0, atol=1e-13)
    for row, found in zip(scores, p, strict=True):
        torch.testing.assert_close(found, bisected(row, k, temperature), rtol=0, atol=1e-12)


def test_derivatives_are_those_of_finite_differences_and_the_closed_forms():
    scores, k = scores_of(3, 5).requires_grad_(), torch.tensor([1.3, 2.0, 3.6], dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lapsum_topk, (scores, k, temperature), atol=1e-8)
    upstream = scores_of(3, 5, seed=1)
    grads = torch.autograd.grad((lapsum_topk(scores, k, temperature) * upstream).sum(), (scores, k, temperature))
    with torch.no_grad():
        p = lapsum_topk(scores, k, temperature)
        distance = torch.where(p > 0.5, -(2 - 2 * p).log(), -(2 * p).log())  # |r − b|/α
        q, density = (-distance).softmax(-1), (-distance).exp() / (2 * temperature)
        mean = (q * upstream).sum(-1, keepdim=True)
        centred = scores - (q * scores).sum(-1, keepdim=True)
        expected = (
            density * (upstream - mean), mean.squeeze(-1), -(density / temperature * centred * upstream).sum(),
        )  # fmt: skip
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-12)


def test_ties_have_a_gradient_and_a_small_temperature_is_hard():
    scores = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    p = lapsum_topk(scores, 2, 0.5)
    assert torch.equal(p.detach(), torch.full((4,), 0.5, dtype=torch.float64))
    p[0].backward()
    torch.testing.assert_close(scores.grad, torch.tensor([0.75, -0.25, -0.25, -0.25], dtype=torch.float64))
    hard = lapsum_topk(torch.tensor([0.3, 2.0, -1.0, 1.0], dtype=torch.float64), 2, 1e-3)
    torch.testing.assert_close(hard, torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"k=4.*between 0 and the number of scores"):
        lapsum_topk(scores, 4, 1.0)


def test_the_layer_is_the_truncated_sum():
    layer, x = make("lapsum", threshold=0.3).eval(), tokens(1, 6)
    p = lapsum_topk(layer.router(x[0]), 1.5, 0.5)
    assert 0 < (p > 0.3).sum() < p.numel()
    outputs = layer.experts.batch(x.expand(4, -1, -1))
    expected = torch.einsum("te,etd->td", torch.where(p > 0.3, p, 0), outputs)
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"threshold=0\.5.*less than top_k/experts"):
        make("lapsum", threshold=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_with_a_gap_at_k(dtype):
    """Between the k-th and the next score, e^{-gap/temperature} may underflow."""
    scores = torch.tensor([[12.0, 11, 0, -1], [200, 100, -100, -200]], dtype=dtype, requires_grad=True)
    weights = lapsum_topk(scores, 2, 0.1)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1, 0, 0]] * 2, dtype=dtype))
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()


def test_second_derivatives():
    scores = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda scores: lapsum_topk(scores, 2.3, 0.3), (scores,), atol=1e-4)
