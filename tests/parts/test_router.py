import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intbmoe.parts.router import MLPRouter, count_choices, mask_choices, top_k


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.data())
def test_ties_go_to_the_lower_index(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    expected = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    assert top_k(torch.tensor([scores], dtype=torch.float32), k)[0].tolist() == expected


def test_scores_are_computed_in_float32_for_half_precision_input():
    router = MLPRouter(8, 4, 3).bfloat16()
    x = torch.randn(5, 8).bfloat16()
    wide = MLPRouter(8, 4, 3)
    wide.load_state_dict({name: value.float() for name, value in router.state_dict().items()})
    assert router(x).dtype == torch.float32
    assert torch.equal(router(x), wide(x.float()))


@pytest.mark.parametrize("k", [1, 2])
def test_masked_tokens_choose_nothing_and_count_for_nothing(k):
    ids = torch.tensor([[0, 1], [2, 2], [1, 0]])[:, :k]
    masked = mask_choices(ids, torch.tensor([True, False, True]))
    assert (masked[1] == -1).all()
    assert count_choices(masked, 3).tolist() == ([1, 1, 0] if k == 1 else [2, 2, 0])
