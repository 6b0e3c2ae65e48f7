"""The item model: a distribution over all items, blind to the future and to padding, for every causal method."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import intbmoe
from intbmoe.budget import TABLE_2
from intbmoe.models import sequence
from intbmoe.models.sequence import PADDING, SequenceConfig, SequenceModel
from intbmoe.tasks.mixture import ffn_maker
from intbmoe.tasks.recipe import MoESettings

SMALL = SequenceConfig(items=11, length=8, dim=12, depth=2, heads=2, hidden=24)
HISTORIES = ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8])


def make(method="dense", config=SMALL, seed=0):
    """The model in float64, with every parameter moved away from its initial value."""
    torch.manual_seed(seed)
    model = SequenceModel(config, ffn_maker(MoESettings(method, 4), config.dim, config.hidden)).double()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


def padded(*histories, length=8):
    rows = torch.full((len(histories), length), PADDING)
    for row, history in zip(rows, histories, strict=True):
        row[: len(history)] = torch.tensor(history)
    return rows


def next_items(items):
    """The item after each, as in training."""
    return F.pad(items, (0, 1), value=PADDING)[:, 1:]


@pytest.fixture(params=[False, True], ids=["plain", "copy"])
def config(request):
    return replace(SMALL, copy=request.param)


@pytest.fixture(params=[False, True], ids=["wanted places", "every place"])
def places(request, monkeypatch):
    """As on a CPU, and as on a GPU."""
    monkeypatch.setattr(sequence, "computes_every_place", lambda y: request.param)


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("method", TABLE_2)
@torch.no_grad()
def test_training_and_evaluation_see_the_same_distribution(method, config):
    model, items = make(method, config), padded(*HISTORIES)
    whole = model(items)
    assert whole.shape == (3, 11)
    assert torch.allclose(whole.exp().sum(1), torch.ones(3, dtype=torch.float64), atol=1e-12, rtol=0)
    targets = next_items(items)
    answers = model(items, targets)
    assert answers.shape == targets.shape
    assert (answers[targets == PADDING] == 0).all()
    found = iter(answers[targets != PADDING].tolist())
    for history in HISTORIES:
        for end in range(1, len(history)):
            alone = model(padded(history[:end]))
            assert next(found) == pytest.approx(alone[0, history[end]].item(), abs=1e-12)
    assert next(found, None) is None


@pytest.mark.parametrize("method", TABLE_2)
@torch.no_grad()
def test_later_items_change_no_earlier_prediction(method, config):
    model = make(method, config)
    items = padded([3, 1, 4, 1, 5, 9, 2, 6])
    changed = items.clone()
    changed[0, 4:] = torch.tensor([0, 10, 7, 8])
    targets = next_items(items)
    targets[0, 3] = 5  # so that the first four positions still predict the same items
    questions = torch.where(torch.arange(8) < 4, targets, PADDING)
    assert torch.allclose(model(items, questions), model(changed, questions), atol=1e-12, rtol=0)
    assert not torch.allclose(model(items), model(changed), atol=1e-6)


@torch.no_grad()
def test_the_answers_at_other_places_change_no_prediction(config):
    model, items = make(config=config), padded(*HISTORIES)
    targets = next_items(items)
    whole = model(items, targets)
    asked = targets != PADDING
    kept = (torch.arange(8) % 2 == 0).expand(3, 8)
    other = torch.where(asked & ~kept, (targets + 1) % 11, targets)
    assert torch.equal(model(items, other)[kept & asked], whole[kept & asked])
    assert not torch.equal(model(items, other), whole)


@pytest.mark.parametrize("method", ["dense", "switch", "lory", "soft_causal", "intbmoe"])
@torch.no_grad()
def test_neither_padding_nor_the_rows_beside_it_change_a_prediction(method, config):
    model = make(method, config)
    together = model(padded(*HISTORIES))
    for row, history in enumerate(HISTORIES):
        alone = model(padded(history, length=len(history)))
        assert torch.allclose(alone[0], together[row], atol=1e-12, rtol=0)


@torch.no_grad()
def test_the_copy_term_starts_as_the_visit_counter():
    config = replace(SMALL, copy=True)
    torch.manual_seed(0)
    model = SequenceModel(config).double().eval()
    model.pointer.gate.bias.fill_(40.0)  # copy always
    found = model(padded([3, 1, 3, 7], [2, 2, 2])).exp()
    expected = torch.zeros(2, 11, dtype=torch.float64)
    expected[0, 3], expected[0, 1], expected[0, 7], expected[1, 2] = 0.5, 0.25, 0.25, 1.0
    assert torch.allclose(found, expected, atol=1e-12)


@torch.no_grad()
def test_the_copy_term_by_hand():
    config = replace(SMALL, copy=True)
    model, plain = make(config=config), make(config=replace(config, copy=False))
    plain.load_state_dict(model.state_dict(), strict=False)
    history = [3, 1, 3]
    y = model.backbone(model.items(torch.tensor([history])) * 12**0.5, None)[0]
    w, pointer = model.items.weight, model.pointer
    before = torch.stack([torch.zeros(12, dtype=torch.float64), y[0], y[1]])
    q = y[2] @ pointer.query
    a = torch.stack(
        [(q[:12] @ w[i] + q[12:] @ before[s]) / 12**0.5 + pointer.distance[2 - s] for s, i in enumerate(history)]
    ).softmax(0)
    g = torch.sigmoid(pointer.gate(y[2])).item()
    expected = (1 - g) * plain(padded(history))[0].exp()
    expected[3] += g * (a[0] + a[2])
    expected[1] += g * a[1]
    assert torch.allclose(model(padded(history))[0].exp(), expected, atol=1e-12)


@pytest.mark.usefixtures("places")
def test_gradients_are_finite_and_right_also_where_nothing_can_be_copied():
    model = make(config=replace(SMALL, items=5, length=3, depth=1, copy=True))
    items, targets = torch.tensor([[0, 1, 0]]), torch.tensor([[4, 0, 2]])
    parameters = [model.pointer.query, model.pointer.distance, model.pointer.gate.weight, model.item_bias]

    def loss(*_):
        return model(items, targets).sum()

    assert torch.autograd.gradcheck(loss, parameters)


def test_scores_at_places_without_a_target_change_no_gradient(config, monkeypatch):
    found = []
    for every_place in (False, True):
        monkeypatch.setattr(sequence, "computes_every_place", lambda y, every_place=every_place: every_place)
        model, items = make("intbmoe", config), padded(*HISTORIES)
        (model(items, next_items(items)) ** 2).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-12, rtol=1e-12) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("method", ["dense", "intbmoe"])
def test_every_parameter_learns(method):
    model = make(method, replace(SMALL, copy=True)).train()
    items = padded(*HISTORIES)
    (-model(items, next_items(items)).sum()).backward()
    silent = {name for name, value in model.named_parameters() if value.grad is None or not value.grad.abs().sum() > 0}
    # A router learns only from the chosen experts, and the biases of keys cancel in a softmax up to rounding.
    assert not {name for name in silent if not name.startswith("backbone.")}
    for layer in ("items.weight", "item_bias", "pointer.query", "pointer.distance", "pointer.gate.weight"):
        assert torch.isfinite(model.get_parameter(layer).grad).all()


def test_dropout_acts_in_training_alone():
    model = make(config=replace(SMALL, dropout=0.5))
    items = padded(*HISTORIES)
    with torch.no_grad():
        assert torch.equal(model(items), model(items))
        model.train()
        assert not torch.equal(model(items), model(items))


def test_scores_keep_float32_under_autocast():
    torch.manual_seed(0)
    model = SequenceModel(replace(SMALL, copy=True))
    items = padded(*HISTORIES)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert model(items).dtype == torch.float32
        assert model(items, next_items(items)).dtype == torch.float32


def test_mixtures_stand_in_every_ffn_and_the_head_and_can_be_precomposed(config):
    model = make("intbmoe", config)
    layers = [name for name, _ in intbmoe.layer.moe_layers(model)]
    assert layers == ["backbone.blocks.0.ffn", "backbone.blocks.1.ffn", "backbone.head"]
    with torch.no_grad():
        items = padded(*HISTORIES)
        assert torch.allclose(intbmoe.precompose(model)(items), model(items), atol=1e-9)


def test_a_layer_that_looks_ahead_is_refused():
    with pytest.raises(ValueError, match=r"cannot be used in a causal model"):
        make("expert_choice")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"items": 0}, "items=0"),
        ({"length": 0}, "length=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": float("nan")}, "dropout=nan"),
        ({"copy": 1}, "copy=1"),
        ({"heads": 5}, "heads=5"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **options)
