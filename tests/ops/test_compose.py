import pytest
import torch

from intbmoe.ops.compose import naive, product


@pytest.mark.parametrize("paths", [1, 2])
@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 4)], ids=["weights", "biases"])
def test_one_product_is_the_equation(paths, shape):
    pool = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    alphas = [torch.randn(6, 5, dtype=torch.float64, requires_grad=True) for _ in range(paths)]
    torch.testing.assert_close(product(alphas, pool), naive.compose(alphas, pool))
    assert torch.autograd.gradcheck(lambda pool, *alphas: product(list(alphas), pool), (pool, *alphas))


def test_paths_stand_side_by_side():
    pool = torch.randn(2, 3, 4, dtype=torch.float64)
    value, gate = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    composed = product([value, gate], pool)
    assert torch.equal(composed[..., :4], pool)
    assert (composed[..., 4:] == 0).all()
