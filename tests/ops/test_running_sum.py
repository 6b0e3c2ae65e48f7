"""The running sum as an operation opaque to the compiler, called by name: only code compiled for a GPU uses it."""

import pytest
import torch

from intbmoe.ops.running_sum import running_sum


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_is_torchs_with_both_derivatives(dim):
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    own = torch.ops.intbmoe.running_sum
    for sums in (own, running_sum):
        assert torch.equal(sums(x, dim), x.cumsum(dim))
    assert torch.autograd.gradcheck(lambda x: own(x, dim), x)
    assert torch.autograd.gradgradcheck(lambda x: own(x, dim), x)


def test_follows_the_rules_of_operations():
    for x in (torch.randn(2, 0, 3), torch.randn(4, 3).t(), torch.randn(2, 1, 3).expand(2, 4, 3)):
        torch.library.opcheck(torch.ops.intbmoe.running_sum.default, (x.clone().requires_grad_(), 1))
        torch.library.opcheck(torch.ops.intbmoe.running_sum.default, (x, 1))
