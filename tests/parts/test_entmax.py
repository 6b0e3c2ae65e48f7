"""entmax-1.5: its defining equation, exact zeros, and the closed gradient."""

import pytest
import torch

from intbmoe.parts.entmax import entmax15


def by_bisection(scores):
    """τ from the definition alone: Σ max(0, z/2 − τ)² falls in τ and is 1 somewhere in [max − 1, max]."""
    half = scores / 2
    high = half.amax(-1, keepdim=True)
    low = high - 1
    for _ in range(80):
        middle = (low + high) / 2
        large = (half - middle).clamp(min=0).square().sum(-1, keepdim=True) > 1
        low, high = torch.where(large, middle, low), torch.where(large, high, middle)
    return (half - low).clamp(min=0).square()


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 1e4])
@pytest.mark.parametrize("experts", [1, 2, 17, 33])
def test_weights_solve_the_defining_equation(scale, experts):
    scores = scale * torch.randn(50, experts, dtype=torch.float64)
    weights = entmax15(scores)
    torch.testing.assert_close(weights, by_bisection(scores), rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1), torch.ones(50, dtype=torch.float64), rtol=0, atol=1e-12)


def test_hand_values():
    # Two scores with a lead of δ < 2: √p₁ − √p₂ = δ/2 and p₁ + p₂ = 1; δ = 1.2 gives 0.6 and (1 ± √(2 − 0.36)) / 2.
    root = (2 - 0.36) ** 0.5
    expected = torch.tensor([((root + 0.6) / 2) ** 2, ((root - 0.6) / 2) ** 2], dtype=torch.float64)
    torch.testing.assert_close(entmax15(torch.tensor([1.2, 0.0], dtype=torch.float64)), expected)
    assert torch.equal(entmax15(torch.full((3, 4), -5.0)), torch.full((3, 4), 0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_lead_of_two_takes_everything_exactly(dtype):
    scores = torch.full((17,), -40.0, dtype=dtype)
    scores[5] = -38.0
    assert torch.equal(entmax15(scores), torch.eye(17, dtype=dtype)[5])
    scores[5] = -38.1
    assert (entmax15(scores) > 0).all()


def test_zeros_are_exact_and_infinities_are_zeros():
    weights = entmax15(3 * torch.randn(1000, 17))
    assert 0.3 < (weights == 0).float().mean() < 0.95
    weights = entmax15(torch.tensor([0.0, -torch.inf, 0.0]))
    assert weights[1] == 0
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.0, 0.5]))
    assert entmax15(torch.tensor([0.0, torch.nan])).isnan().all()


def test_gradients_of_both_orders_agree_with_finite_differences():
    scores = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)  # no score near the border of its support
    assert torch.autograd.gradcheck(entmax15, scores)
    assert torch.autograd.gradgradcheck(entmax15, scores)


def test_the_gradient_of_a_weight_at_zero_is_zero():
    scores = torch.tensor([[4.0, 0.0, -1.0], [1.0, 0.5, -9.0]], requires_grad=True)
    (entmax15(scores) * torch.tensor([1.0, 2.0, 7.0])).sum().backward()
    assert torch.equal(scores.grad[0], torch.zeros(3))
    assert scores.grad[1, 2] == 0
    torch.testing.assert_close(scores.grad[1, 0], -scores.grad[1, 1])
    assert scores.grad[1, 1] > 0


def test_compiles_whole_and_takes_no_rows():
    scores = torch.randn(4, 7, requires_grad=True)
    run = torch.compile(entmax15, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(scores), entmax15(scores))
    assert entmax15(torch.zeros(0, 7)).shape == (0, 7)
