"""A trained mixture made smaller: exact if nothing is cut, otherwise the best for the inputs."""

import pytest
import torch
from torch import nn

import intbmoe
from intbmoe.conversion import fit_intbmoe, share_base, split_dense

DIM, HIDDEN = 8, 12


class Net(nn.Module):
    def __init__(self, method, **options):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = intbmoe.create(method, DIM, HIDDEN, **options)

    def forward(self, x):
        return self.mlp(x)


def loss(model, x):
    return model(x).square().mean()


def batches(count=3, tokens=64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, tokens, DIM, dtype=torch.float64, generator=generator) for _ in range(count)]


@pytest.fixture(scope="module", params=["mixtral", "switch", "expert_choice"])
def model(request):
    return Net(request.param, experts=4).double().eval()


def test_differences_of_low_rank_change_nothing():
    """Three experts are the first one plus a rank-one matrix: all differences have rank three, and four are kept."""
    alike = Net("mixtral", experts=4, expert="gelu").double().eval()
    with torch.no_grad():
        for part in (alike.mlp.experts.up, alike.mlp.experts.down):
            column, row = part.weight[1:, :, 0], part.weight[1:, 0]
            part.weight[1:] = part.weight[0] + 0.1 * torch.einsum("ei,eo->eio", column, row)
    changed, (row,) = share_base(alike, batches(), loss, ratio=1)
    assert row.error < 1e-9
    x = batches()[0]
    torch.testing.assert_close(changed(x), alike(x), rtol=0, atol=1e-9)


def test_it_is_smaller_the_smaller_the_rank_and_the_error_grows(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = [share_base(model, batches(), loss, ratio=ratio)[1][0] for ratio in (1.0, 0.5, 0.25)]
    assert rows[0].parameters > rows[1].parameters_after > rows[2].parameters_after
    assert 0 < rows[0].error < rows[1].error < rows[2].error < 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_difference_is_the_best_of_its_rank_for_the_inputs():
    """No other factors of the same rank do better on the inputs that the expert saw; a plain SVD does worse."""
    model = Net("mixtral", experts=2, top_k=2, expert="gelu").double().eval()
    data = [batch * torch.tensor([9.0, 5, 1, 1, 1, 0.1, 0.1, 0.1]).double() for batch in batches()]
    changed, _ = share_base(model, data, loss, ratio=0.5)
    stored = changed.mlp.experts.up.parametrizations.weight
    base, left, right = stored.original0, stored.original1, stored.original2
    x = torch.cat(data[:-1]).flatten(0, 1)
    for e in range(2):
        delta = model.mlp.experts.up.weight[e] - base
        found = (x @ (delta - left[e] @ right[e])).norm()
        u, s, v = torch.linalg.svd(x @ delta, full_matrices=False)
        rank = left.shape[-1]
        best = s[rank:].norm()  # Eckart and Young
        torch.testing.assert_close(found, best, rtol=1e-4, atol=0)
        u, s, v = torch.linalg.svd(delta, full_matrices=False)
        assert (x @ (delta - u[:, :rank] * s[:rank] @ v[:rank])).norm() > 1.01 * best


def test_an_intbmoe_is_fitted_to_a_mixture():
    model = Net("mixtral", experts=4).double().eval()
    sizes = {"experts": 4, "blocks": 4, "code_dim": 4, "router_dim": 8, "hyper_dim": 8}
    errors = [fit_intbmoe(model, batches(), loss, steps=steps, **sizes)[1][0].error for steps in (1, 50)]
    assert errors[1] < 0.8 * errors[0]
    changed, _ = fit_intbmoe(model, batches(), loss, steps=1, **sizes)
    assert isinstance(changed.mlp, intbmoe.IntBMoE)
    assert not isinstance(model.mlp, intbmoe.IntBMoE)


def test_what_cannot_be_converted_is_told():
    with pytest.raises(ValueError, match=r"ratio=2.*in \(0, 1\]"):
        share_base(Net("mixtral", experts=4), batches(), loss, ratio=2)
    with pytest.raises(ValueError, match="no mixture whose router chooses"):
        share_base(Net("dense"), batches(), loss, ratio=0.5)
    with pytest.raises(ValueError, match="at least two: the last one measures"):
        share_base(Net("mixtral", experts=4), batches(1), loss, ratio=0.5)


@pytest.mark.parametrize("method", ["dense", "swiglu"])
def test_a_dense_layer_is_shared_out_exactly_and_cut_by_importance(method):
    model = Net(method).double().eval()
    sizes = {"experts": 3, "shared": 0.2, "steps": 0}
    changed, (row,) = split_dense(model, batches(), loss, top_k=3, **sizes)
    with torch.no_grad():
        changed.mlp.router.weight.zero_()  # all experts have weight one: the FFN with its units reordered
    x = batches()[0]
    torch.testing.assert_close(changed(x), model(x), rtol=0, atol=1e-12)
    assert row.parameters_after - row.parameters <= 3 * (DIM + DIM)  # the router, and each expert's last biases
    fewer, _ = split_dense(model, batches(), loss, top_k=1, **sizes)
    assert fewer.mlp.active_parameters() < changed.mlp.active_parameters()
    before, after = (split_dense(model, batches(), loss, top_k=1, **{**sizes, "steps": n})[1][0].error for n in (0, 40))
    assert after < before


def test_a_dense_layer_in_half_precision_is_shared_out_alike():
    sizes = {"experts": 3, "shared": 0.2, "steps": 0}
    model = Net("dense").double().eval()
    exact, _ = split_dense(model, batches(), loss, top_k=1, **sizes)
    half, _ = split_dense(Net("dense").bfloat16().eval(), [x.bfloat16() for x in batches()], loss, top_k=1, **sizes)
    assert half.mlp.router.weight.dtype == torch.bfloat16
    weights = exact.mlp.router.weight.detach(), half.mlp.router.weight.detach().double()
    assert torch.nn.functional.cosine_similarity(*(weight.flatten() for weight in weights), dim=0) > 0.9


def test_the_most_important_units_are_the_shared_ones():
    model = Net("dense").double().eval()
    with torch.no_grad():
        model.mlp.experts.down.weight[0, [2, 7, 9]] *= 20
    changed, _ = split_dense(model, batches(), loss, experts=3, top_k=1, shared=0.25, steps=0)
    kept = {tuple(row) for row in changed.mlp.shared.down.weight[0].tolist()}
    assert kept == {tuple(row) for row in model.mlp.experts.down.weight[0, [2, 7, 9]].tolist()}
    with pytest.raises(ValueError, match=r"experts=20.*small enough for 12"):
        split_dense(model, batches(), loss, experts=20, top_k=1)


class ByName(nn.Module):
    """Gives its layer everything by name; its dropout is off also in training."""

    def __init__(self, name, **options):
        super().__init__()
        self.ffn, self.drop = intbmoe.create(name, 8, 16, **options), nn.Dropout().eval()

    def forward(self, x, mask):
        return self.ffn(x=x, mask=mask)


@pytest.mark.parametrize(
    ("convert", "name", "options"),
    [
        (fit_intbmoe, "switch", {"steps": 5, "experts": 2, "blocks": 2}),
        (share_base, "switch", {"ratio": 0.5}),
        (split_dense, "dense", {"experts": 3, "top_k": 1, "steps": 5}),
    ],
)
def test_a_mask_given_by_name_leaves_padding_out(convert, name, options):
    def batch():
        mask = torch.rand(4, 10) > 0.3
        return torch.where(mask.unsqueeze(-1), torch.randn(4, 10, 8), torch.nan), mask

    model = ByName(name, **({} if name == "dense" else {"experts": 4}))
    batches = [batch() for _ in range(3)]
    _, report = convert(model, batches, lambda m, b: m(*b).square().mean(), **options)
    assert report[0].error < 10
    assert model.training
    assert not model.drop.training
