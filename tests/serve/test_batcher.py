import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from intbmoe.serve.batcher import Batcher, CostModel, Ticket


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make(clock=None, budget_s=0.06, batch_tokens=100, queue=10):
    return Batcher(budget_s=budget_s, batch_tokens=batch_tokens, queue=queue, clock=clock or Clock())


def test_an_idle_server_answers_at_once():
    batcher = make()
    assert batcher.submit(Ticket("a", 5, 1.0)) is None
    assert [ticket.key for ticket in batcher.take().batch] == ["a"]
    assert len(batcher) == 0
    assert batcher.take().batch == []


def test_the_padded_rectangle_stays_within_the_budget_and_the_order_is_kept():
    batcher = make(batch_tokens=100)
    for key, tokens in enumerate([10, 40, 5, 5]):
        assert batcher.submit(Ticket(key, tokens, 1.0)) is None
    first = batcher.take()
    assert [ticket.key for ticket in first.batch] == [0, 1]  # three requests of 40 tokens would be 120
    assert first.padded_tokens == 80
    assert [ticket.key for ticket in batcher.take().batch] == [2, 3]


def test_a_request_larger_than_the_budget_is_computed_alone():
    batcher = make(batch_tokens=10)
    batcher.submit(Ticket("large", 500, 1.0))
    batcher.submit(Ticket("small", 1, 1.0))
    assert [ticket.key for ticket in batcher.take().batch] == ["large"]
    assert [ticket.key for ticket in batcher.take().batch] == ["small"]


def test_batches_shrink_to_half_the_latency_budget():
    batcher = make(budget_s=0.06, batch_tokens=10_000, queue=1000)
    for tokens in (10, 100, 20, 50):
        batcher.cost.learn(tokens, 0.010 + 0.0001 * tokens)
    for key in range(500):
        batcher.submit(Ticket(key, 1, 100.0))
    assert len(batcher.take().batch) == pytest.approx(200, abs=1)  # 30 ms = 10 ms + 200 tokens


def test_where_the_fixed_cost_takes_half_the_budget_batches_are_still_made():
    batcher = make(budget_s=0.06, batch_tokens=10_000, queue=1000)
    for tokens in (10, 100, 20, 50):
        batcher.cost.learn(tokens, 0.040 + 0.0001 * tokens)
    for key in range(500):
        assert batcher.submit(Ticket(key, 1, 100.0)) is None
    assert len(batcher.take().batch) == pytest.approx(400, abs=1)  # their share takes as long as the fixed cost


def test_no_more_batches_are_expected_than_requests():
    batcher = make(budget_s=0.06, batch_tokens=10, queue=1000)
    for tokens in (100, 200, 300):
        batcher.cost.learn(tokens, 0.010 + 0.00001 * tokens)
    for key in range(3):
        batcher.submit(Ticket(key, 200, 100.0))
    assert batcher.expected_wait() == pytest.approx(3 * 0.012)


def test_the_bound_refuses_and_says_when_to_come_again():
    batcher = make(queue=2)
    batcher.cost.learn(1, 0.5)
    for key in range(2):
        assert batcher.submit(Ticket(key, 1, 100.0)) is None
    refusal = batcher.submit(Ticket("more", 1, 100.0))
    assert refusal.retry_after == pytest.approx(1.0)
    assert "2 requests are waiting" in refusal.reason
    assert len(batcher) == 2


def test_what_cannot_be_answered_in_time_is_refused_at_once():
    clock = Clock()
    batcher = make(clock)
    batcher.cost.learn(10, 0.1)
    assert batcher.submit(Ticket("first", 10, clock.now + 0.05)) is None  # an empty queue lets an estimate be corrected
    refusal = batcher.submit(Ticket("second", 10, clock.now + 0.15))
    assert "longer than" in refusal.reason
    assert batcher.submit(Ticket("patient", 10, clock.now + 1)) is None
    clock.now = 5.0
    assert "passed" in batcher.submit(Ticket("late", 10, 4.0)).reason


def test_expired_requests_are_not_computed():
    clock = Clock()
    batcher = make(clock)
    batcher.submit(Ticket("short", 1, 1.0))
    batcher.submit(Ticket("long", 1, 9.0))
    clock.now = 1.0
    taken = batcher.take()
    assert [ticket.key for ticket in taken.expired] == ["short"]
    assert [ticket.key for ticket in taken.batch] == ["long"]


def test_cancelled_requests_leave_the_queue_and_its_tokens():
    batcher = make()
    batcher.cost.learn(10, 0.1)
    batcher.submit(Ticket("a", 10, 100.0))
    assert batcher.expected_wait() > 0
    assert batcher.cancel("a")
    assert not batcher.cancel("a")
    assert batcher.expected_wait() == 0
    assert batcher.take().batch == []


def test_a_key_waits_once():
    batcher = make()
    batcher.submit(Ticket("a", 1, 1.0))
    with pytest.raises(ValueError, match="'a' is already waiting"):
        batcher.submit(Ticket("a", 1, 1.0))


@given(
    fixed=st.floats(0, 1),
    slope=st.floats(1e-6, 1e-2),
    sizes=st.lists(st.integers(1, 10_000), min_size=2, max_size=30, unique=True),
)
def test_the_cost_model_finds_a_line(fixed, slope, sizes):
    cost = CostModel()
    for tokens in sizes:
        cost.learn(tokens, fixed + slope * tokens)
    for tokens in sizes:
        assert cost.seconds(tokens) == pytest.approx(fixed + slope * tokens, rel=1e-3, abs=1e-6)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-6, 10)), max_size=30))
def test_the_cost_model_is_never_negative_and_never_fails(batches):
    cost = CostModel()
    for tokens, seconds in batches:
        cost.learn(tokens, seconds)
    fixed, slope = cost.line()
    assert fixed >= -1e-9
    assert slope >= 0
    assert cost.tokens_within(0.03) >= 0
    assert math.isfinite(cost.seconds(100))


class EveryRequestEndsOnce(RuleBasedStateMachine):
    """Requests submitted, cancelled and taken in any order."""

    keys = Bundle("keys")

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.batcher = make(self.clock, batch_tokens=50, queue=5)
        self.waiting = []
        self.ended = {}
        self.submitted = 0

    def end(self, key, how):
        assert key not in self.ended
        self.ended[key] = how

    @rule(target=keys, tokens=st.integers(1, 80), seconds=st.floats(0.01, 2))
    def submit(self, tokens, seconds):
        self.submitted += 1
        key = self.submitted
        if self.batcher.submit(Ticket(key, tokens, self.clock.now + seconds)) is None:
            self.waiting.append(key)
        else:
            self.end(key, "refused")
        return key

    @rule(key=consumes(keys))
    def cancel(self, key):
        if self.batcher.cancel(key):
            self.waiting.remove(key)
            self.end(key, "cancelled")
        else:
            assert key in self.ended

    @rule(seconds=st.floats(0, 1))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule(tokens=st.integers(1, 100), seconds=st.floats(1e-5, 0.5))
    def learn(self, tokens, seconds):
        self.batcher.cost.learn(tokens, seconds)

    @precondition(lambda self: self.waiting)
    @rule()
    def take(self):
        head = self.waiting[0]
        taken = self.batcher.take()
        keys = [ticket.key for ticket in taken.batch]
        assert taken.padded_tokens <= 50 or len(keys) == 1
        for ticket in taken.expired:
            assert ticket.deadline <= self.clock.now
            self.end(ticket.key, "expired")
        for key in keys:
            self.end(key, "taken")
        assert head in self.ended  # no request is skipped
        left = [key for key in self.waiting if key not in self.ended]
        assert keys == sorted(keys)  # in the order of arrival
        assert not keys or not left or left[0] > keys[-1]
        self.waiting = left

    @invariant()
    def nothing_is_lost(self):
        assert len(self.batcher) == len(self.waiting) <= 5
        assert set(self.waiting) | set(self.ended) == set(range(1, self.submitted + 1))

    def teardown(self):
        while len(self.batcher):
            self.take()
        assert set(self.ended) == set(range(1, self.submitted + 1))


TestEveryRequestEndsOnce = EveryRequestEndsOnce.TestCase
TestEveryRequestEndsOnce.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
