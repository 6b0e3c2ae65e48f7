"""Overload in virtual time: with deadlines as many requests are answered as without, and the others refused at once."""

import contextlib
from collections import Counter

import pytest
from virtual_server import VirtualServer

from intbmoe.serve.door import Door, refuse_late
from intbmoe.serve.http import HttpError

CAPACITY, SECONDS = 100, 1
"""Requests per second that the model computes, and that two decoders encode."""
LIMITS = {
    "model": {"item_ms": 10},
    "decoders": {"untrusted": True, "encode_ms": 20},
    "both": {"untrusted": True, "encode_ms": 20, "item_ms": 10},
}


@pytest.fixture
def serve(monkeypatch):
    with contextlib.ExitStack() as stack:

        def start(**limits):
            server = VirtualServer(monkeypatch, **limits)
            stack.callback(server.close)
            server.open_loop(CAPACITY / 2, 0.5)  # it learns how long a request takes
            return server

        yield start


def goodput(found, deadline_ms):
    """Answers per second; the last requests may be answered until their deadline."""
    assert set(found) <= {200, 429, 504}
    return found[200] / (SECONDS + deadline_ms / 1000)


@pytest.mark.parametrize("deadline_ms", [100, 300])  # an idle server takes 10 to 30 ms
@pytest.mark.parametrize("times", [1.5, 3, 6])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_deadline_costs_few_answers_however_many_ask(serve, limit, times, deadline_ms):
    within = serve(**LIMITS[limit]).open_loop(times * CAPACITY, SECONDS, deadline_ms)
    assert goodput(within, deadline_ms) > 0.8 * CAPACITY, within
    assert within[504] < 0.1 * within[200], within


@pytest.mark.parametrize("limit", LIMITS)
def test_clients_that_ask_again_at_once_take_no_answers_from_each_other(serve, limit):
    within = serve(**LIMITS[limit]).closed_loop(150, SECONDS, 60, pause_s=0.1)
    assert goodput(within, 60) > 0.8 * CAPACITY, within
    assert within[504] < 0.1 * within[200], within


def test_the_engine_is_never_idle_while_someone_with_time_is_refused(serve):
    """Even if the estimate is twenty times too high, for example after the whole machine has paused."""
    server = serve(**LIMITS["model"])
    for _ in range(100):
        leave = server.door.enter()
        server.loop.timers.now += 0.2
        leave(teaches=True)
        server.line.engine.batcher.cost.learn(1, 0.2)
    found = server.open_loop(6 * CAPACITY, SECONDS, 150)
    assert found[200] > 0.8 * CAPACITY * SECONDS, found  # one at a time until the estimate is corrected
    before = server.line.computing_s
    found = server.open_loop(6 * CAPACITY, SECONDS, 150)
    assert server.line.computing_s - before > 0.95 * SECONDS, found


def test_what_cannot_be_met_is_refused_before_it_is_encoded(serve):
    server = serve(**LIMITS["decoders"])
    assert server.closed_loop(1, 0.0001, 40) == Counter({200: 1})
    for _ in range(5):
        server.door.enter()
    assert server.closed_loop(1, 0.0001, 40) == Counter({429: 1})
    assert server.closed_loop(1, 0.0001, 300) == Counter({200: 1})


def test_who_has_time_is_not_refused():
    refuse_late(0.0, 0.001)
    refuse_late(0.05, 0.1)
    for wait, left in ((0.1, 0.1), (0.001, 0.0), (0.1, -1.0)):
        with pytest.raises(HttpError, match="too many requests"):
            refuse_late(wait, left)


def test_the_door_knows_those_inside_and_how_long_they_took():
    now = [0.0]
    door = Door(lambda: now[0])
    assert door.expected_seconds() == 0
    first, second = door.enter(), door.enter()
    now[0] = 0.1
    first(teaches=True)
    now[0] = 0.2
    second(teaches=True)
    second(teaches=True)
    assert door.expected_seconds() == 0  # no request is inside
    aside = door.enter()
    assert door.expected_seconds() == pytest.approx(2 * 0.1)
    now[0] = 5.0
    aside(teaches=False)
    inside = door.enter()
    assert door.expected_seconds() == pytest.approx(2 * 0.1)
    refuse_late(door.expected_seconds(), 0.3)
    with pytest.raises(HttpError, match="too many requests"):
        refuse_late(door.expected_seconds(), 0.2)
    now[0] = 15.0
    inside(teaches=True)
    door.enter()
    assert door.expected_seconds() == pytest.approx(2 * 10, rel=0.01)  # old measurements are forgotten
