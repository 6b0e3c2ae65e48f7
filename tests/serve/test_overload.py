"""Overload of a real server: with deadlines as many requests are answered as without, the others refused at once."""

import pytest
from fake_model import write_artifact
from open_loop import ask_at
from server import Server

ENCODE_MS, ITEM_MS, DEADLINE_MS = 10, 10, 150
CAPACITY = 100
"""Requests per second that the model computes; two decoders encode twice as many."""
LIMITS = {
    "model": {"item_ms": ITEM_MS},
    "decoders": {"untrusted": True, "encode_ms": 2 * ENCODE_MS},
    "both": {"untrusted": True, "encode_ms": 2 * ENCODE_MS, "item_ms": ITEM_MS},
}


def check(port, times, seconds):
    ask_at(port, CAPACITY / 2, 0.5)  # the server learns how long a request takes
    without = ask_at(port, times * CAPACITY, seconds)
    within = ask_at(port, times * CAPACITY, seconds, DEADLINE_MS)
    assert set(without) | set(within) <= {200, 429, 504}
    # The default deadline is 600 ms: the server goes on that long after the last request was sent.
    wanted = 0.8 * without[200] * (seconds + DEADLINE_MS / 1000) / (seconds + 0.6)
    assert within[200] >= wanted, (within, without)
    assert within[429] > within[504], within


@pytest.mark.slow
@pytest.mark.parametrize("times", [1.5, 3, 6])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_deadline_costs_no_answers_however_many_ask(tmp_path, limit, times):
    with Server(artifact=write_artifact(tmp_path, **LIMITS[limit])) as server:
        check(server.port, times, 4)
