import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intbmoe.parts.losses import balance_loss, count_valid, global_sum, masked_sum, squared_variation, sum_over_ranks
from ranks import run_ranks


def test_uniform_is_one_and_collapse_is_the_number_of_experts():
    even = balance_loss(torch.full((8, 4), 0.25), torch.full((4,), 2), None)
    collapsed = balance_loss(torch.tensor([[1.0, 0, 0, 0]] * 8), torch.tensor([8, 0, 0, 0]), None)
    soft = balance_loss(torch.full((8, 4), 0.5), torch.full((4,), 4), None, mass=2)
    assert even == soft == 1
    assert collapsed == 4


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9))
def test_the_scale_does_not_depend_on_how_many_tokens_there_are(copies):
    probabilities = torch.rand(5, 3, dtype=torch.float64).softmax(-1)
    load = torch.tensor([3, 1, 1])
    once = balance_loss(probabilities, load, None)
    padded = torch.cat([probabilities.repeat(copies, 1), torch.full((2, 3), torch.nan)])
    many = balance_loss(padded, copies * load, torch.arange(len(padded)) < 5 * copies)
    torch.testing.assert_close(once, many)


def test_no_token_gives_a_finite_loss():
    assert balance_loss(torch.zeros(0, 3), torch.zeros(3, dtype=torch.int64), None) == 0


def test_only_valid_tokens_are_counted_and_summed():
    x, mask = torch.ones(2, 3, 4), torch.tensor([[True, True, False], [True, False, False]])
    assert count_valid(x, mask) == 3
    assert count_valid(x, None) == 6
    values = torch.where(mask.reshape(-1, 1), 1.0, float("nan"))
    assert masked_sum(values, mask) == 3


def test_squared_variation_by_hand():
    assert squared_variation(torch.tensor([1.0, 3.0])) == pytest.approx(0.25)
    assert squared_variation(torch.tensor([2.0, 2.0])) == 0
    assert squared_variation(torch.zeros(2)) == 0


def _sum_and_gradient(rank, world):
    x = torch.tensor([float(rank + 1)], requires_grad=True)
    total = global_sum(x)
    (total**2).sum().backward()
    with torch.no_grad():
        alone, always = global_sum(x), sum_over_ranks(x)
    return total.item(), x.grad.item(), alone.item(), always.item()


def test_the_global_sum_and_its_gradient_over_two_ranks():
    """Sum 1 + 2 = 3; each rank's loss is 9, and the gradient sums both ranks' 2·3. Without gradients, a rank's own."""
    assert run_ranks(2, _sum_and_gradient) == [(3.0, 12.0, 1.0, 3.0), (3.0, 12.0, 2.0, 3.0)]
