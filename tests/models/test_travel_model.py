"""The travel model: which input reaches which prediction, padding, places, and the paper's size."""

import pytest
import torch

import intbmoe
from fake_journeys import CELLS, PLACES, fake_journeys
from intbmoe.models.recommender import Recommender, RecommenderConfig
from intbmoe.models.travel import FIELDS, TravelConfig, TravelModel
from intbmoe.tasks.travel.examples import JourneyExamples, JourneyReader, place_codes

SMALL = TravelConfig(dim=16, depth=2, heads=2, hidden=24, sessions=12, place_rows=31, cell_rows=8, code_rows=64)
ANSWERS = ("place", "feedback", "via")
METHODS = [None, "intbmoe", "soft_causal", "lory", "switch", "smear_token"]


def small(method=None, config=SMALL):
    torch.manual_seed(1)
    make = None if method is None else lambda: intbmoe.create(method, config.dim, 8)
    return TravelModel(config, make).double().eval()


def windows(count=4, split="train", sessions=12):
    return JourneyExamples(JourneyReader(fake_journeys(), sessions), split).batch(range(count), 0, 0)


def other_answers(batch, generator):
    """The batch with all places, vias, modes and actions replaced by others."""
    places = place_codes(fake_journeys().places)
    changed = dict(batch)
    for name in ("place", "via"):
        shape = batch[name].shape[:2]
        changed[name] = torch.from_numpy(places)[torch.randint(PLACES + 1, shape, generator=generator)]
    changed["feedback"] = torch.randint(0, 4, batch["feedback"].shape, generator=generator, dtype=torch.int32)
    return changed


@pytest.mark.parametrize("method", METHODS)
def test_answers_from_a_session_on_change_no_prediction_up_to_it(method):
    """The leak test: session s knows its scenario and everything before it, but not its answer or any later one."""
    model, batch = small(method), windows()
    changed = other_answers(batch, torch.Generator().manual_seed(3))
    before = model.predict(batch)
    for s in (0, 1, 5, 11):
        mixed = dict(batch)
        for name in ANSWERS:
            mixed[name] = torch.cat([batch[name][:, :s], changed[name][:, s:]], 1)
        after = model.predict(mixed)
        assert torch.equal(before[:, : s + 1], after[:, : s + 1])
        if s + 1 < 12:
            later = batch["mask"][:, s + 1 :]
            assert (before[:, s + 1 :] != after[:, s + 1 :]).any(-1)[later].any()


@pytest.mark.parametrize("name", ["profile", "scenario", *ANSWERS])
def test_what_is_known_is_seen(name):
    """The other half of the leak test: inputs of session 3 reach later predictions, and its scenario its own too."""
    model, batch = small(), windows()
    full = batch["mask"].all(1)
    assert full.any()
    changed = {**batch, name: batch[name].clone()}
    at = changed[name] if name == "profile" else changed[name][:, 3]
    at += 1
    difference = (model.predict(batch) != model.predict(changed)).any(-1)[full]
    first = {"profile": 0, "scenario": 3}.get(name, 4)
    assert not difference[:, :first].any()
    assert difference[:, first:].all()


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(method):
    """Neither the values in the padding nor its length after the last session matter."""
    model, batch = small(method), windows(6)
    mask = batch["mask"]
    assert not mask.all()
    rubbish = dict(batch)
    for name in ("scenario", *ANSWERS):
        noise = torch.randint(0, 6, batch[name].shape, dtype=torch.int32)
        rubbish[name] = torch.where(mask.unsqueeze(-1), batch[name], noise)
    expected = model.predict(batch)
    torch.testing.assert_close(model.predict(rubbish)[mask], expected[mask], rtol=0, atol=1e-12)
    for row in range(6):
        length = int(mask[row].sum())
        alone = {
            name: value[row : row + 1] if name == "profile" else value[row : row + 1, :length]
            for name, value in batch.items()
        }
        torch.testing.assert_close(model.predict(alone)[0], expected[row, :length], rtol=0, atol=1e-11)


def test_predictions_are_the_backbones_at_scenario_tokens():
    model, batch = small(), windows()
    tokens, mask = model.tokens(batch)
    assert tokens.shape == (4, 6 + 3 * 12, 16)
    assert torch.equal(mask[:, 6:].view(4, 12, 3), batch["mask"].unsqueeze(-1).expand(-1, -1, 3))
    y = model.backbone(tokens, mask)
    assert torch.equal(model.predict(batch)[:, 5], y[:, 6 + 3 * 5])
    assert torch.equal(model({name: value for name, value in batch.items() if name != "candidates"}), y[:, 6::3])


def test_scores_are_products_with_the_encoded_candidates():
    model, batch = small(), windows()
    scores, predictions = model(batch), model.predict(batch)
    assert scores.shape == (int(batch["targets"].sum()), 65)
    for row, (b, s) in enumerate(batch["targets"].nonzero().tolist()):
        by_hand = [predictions[b, s] @ model.encode_places(c) / 4 for c in batch["candidates"][b, s]]
        torch.testing.assert_close(scores[row], torch.stack(by_hand), rtol=0, atol=1e-12)


def test_a_batch_without_targets_scores_nothing_and_breaks_nothing():
    model, batch = small("intbmoe").train(), windows()
    scores = model({**batch, "targets": torch.zeros_like(batch["targets"])})
    assert scores.shape == (0, 65)
    scores.sum().backward()


def test_intention_and_candidate_share_their_encoder_and_no_place_is_zero():
    model = small()
    places = torch.tensor([[0, 0, 0, 0, 0], [3, 2, 1, 1, 4]], dtype=torch.int32)
    vectors = model.encode_places(places)
    assert (vectors[0] == 0).all()
    batch = windows()
    batch["place"][0, 2] = places[1]
    tokens, _ = model.tokens(batch)
    torch.testing.assert_close(tokens[0, 6 + 3 * 2 + 1], vectors[1] + model.kinds[7], rtol=0, atol=1e-12)


def test_codes_of_different_fields_have_different_rows():
    model = small()
    ids = torch.stack([model.codes.places((torch.arange(1, 5) - 1) * len(FIELDS) + n + 1) for n in range(len(FIELDS))])
    assert len(ids[..., 0].unique()) == 4 * len(FIELDS)


def test_scores_have_no_ties_of_precision_in_bfloat16():
    model, batch = small().float(), windows(6)
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(batch)
    assert scores.dtype == torch.float32


def test_cells_are_the_same_for_users_and_places():
    model = small()
    assert model.cells.rows >= CELLS
    batch = windows()
    before, place = model.predict(batch), model.encode_places(batch["place"])
    with torch.no_grad():
        model.cells.tables.add_(1)
    assert (model.encode_places(batch["place"]) != place).any()
    assert (model.predict(batch) != before).any()


def test_a_method_that_looks_ahead_is_refused():
    with pytest.raises(ValueError, match="cannot be used in a causal model"):
        small("soft")


def test_more_sessions_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match="13 sessions: this model takes at most 12"):
        small().predict(windows(sessions=13))
    with pytest.raises(ValueError, match="heads=3"):
        TravelConfig(heads=3, dim=16)


def test_the_papers_backbone():
    with torch.device("meta"):
        model = TravelModel(TravelConfig())
    assert model.backbone.config == RecommenderConfig()
    assert isinstance(model.backbone, Recommender)
    tables = sum(module.tables.numel() for module in (model.places, model.cells, model.codes))
    assert tables == 2 * (262_144 + 65_536 + 65_536) * 96 + 3 * 96
