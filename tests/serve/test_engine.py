import pytest
import torch
from fake_model import BUG, FakePredictor, open_artifact, write_artifact

from intbmoe.serve.engine import BrokenModelError, Engine, warm_up
from intbmoe.serve.messages import ANSWER, EXPIRED, FAILED, PIECE, REFUSED, pack, unpacker
from intbmoe.serve.settings import Settings
from intbmoe.tasks.serving.requests import Encoded, to_wire


class Clock:
    now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """The engine's clock, which only the fake model's pauses advance, so that a busy machine changes nothing."""
    clock = Clock()
    monkeypatch.setattr("fake_model.sleep", clock.sleep)
    return clock


def make(clock, action="recommend", **settings):
    about = {"action": action, "delay_ms": 0, "item_ms": 0, "offset": 0}
    return Engine(FakePredictor(about), Settings(artifact="", **settings), clock=clock)


def ask(engine, key, request, deadline=1000.0, stream=False):
    return engine.submit(key, deadline, to_wire(engine.predictor.encode(request)), stream)


def test_a_batch_answers_each_request(clock):
    engine = make(clock)
    for key in range(3):
        assert ask(engine, key, {"history": [key, 1], "top_n": 1}) is None
    assert engine.busy
    replies = engine.step()
    assert [(reply.key, reply.kind) for reply in replies] == [(key, ANSWER) for key in range(3)]
    assert [reply.content[0]["results"][0]["id"] for reply in replies] == [1, 2, 3]
    assert not engine.busy


def test_alone_or_in_a_batch_the_answer_is_the_same(clock):
    requests = [{"history": [n] * (n + 1), "explain": True} for n in range(5)]
    together = make(clock)
    for key, request in enumerate(requests):
        ask(together, key, request)
    alone = make(clock)
    for key, (request, reply) in enumerate(zip(requests, together.step(), strict=True)):
        ask(alone, key, request)
        assert alone.step() == [reply]


def test_one_bad_request_does_not_take_its_batch_with_it(clock):
    engine = make(clock)
    for key, item in enumerate([1, BUG, 2]):
        ask(engine, key, {"history": [item]})
    assert [reply.kind for reply in engine.step()] == [ANSWER, FAILED, ANSWER]


def test_a_failed_gpu_ends_the_engine(clock, monkeypatch):
    """Otherwise it would fail every later request and still report that it is ready."""
    engine = make(clock)

    def fail(batch):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(engine.predictor, "answer", fail)
    ask(engine, 0, {"history": [1]})
    with pytest.raises(torch.AcceleratorError):
        engine.step()


def test_a_text_that_is_explained_is_written_step_by_step_too(clock, monkeypatch):
    """Written in one go, it used to block the engine and, with a slow model, got it ended because it was silent."""
    engine = make(clock, "generate")

    def explain(encoded, new):
        if encoded.payload["prompt"] == "bug":
            raise RuntimeError("a bug in the model")
        return {"tokens": list(new)}

    def whole(batch):
        raise AssertionError("a text must not be written in one go")

    monkeypatch.setattr(engine.predictor, "answer", whole)
    monkeypatch.setattr(engine.predictor, "explain", explain, raising=False)
    for key, prompt in enumerate(("ab", "bug")):
        encoded = engine.predictor.encode({"prompt": prompt, "max_tokens": 3})
        encoded = Encoded(encoded.tokens, {**encoded.payload, "explain": True})
        assert engine.submit(key, 1000.0, to_wire(encoded), False) is None
    assert [engine.step() for _ in range(2)] == [[], []]
    explained, failed = engine.step()
    expected = {"text": "aba", "new_tokens": 3, "score": -1.5, "finished": "length", "tokens": ["a", "b", "a"]}
    assert (explained.key, explained.kind, explained.content) == (0, ANSWER, (expected,))
    assert (failed.key, failed.kind) == (1, FAILED)
    assert not engine.busy


def test_expired_full_and_cancelled(clock):
    engine = make(clock, queue=2)
    ask(engine, "late", {"history": [1]}, deadline=101.0)
    ask(engine, "left", {"history": [1]})
    assert ask(engine, "third", {"history": [1]}).kind == REFUSED
    engine.cancel("left")
    clock.now = 102.0
    assert [(reply.key, reply.kind) for reply in engine.step()] == [("late", EXPIRED)]
    assert not engine.busy


def texts_of(engine, steps=100):
    found = {}
    for _ in range(steps):
        if not engine.busy:
            break
        for reply in engine.step():
            assert reply.kind == PIECE
            text, finished = reply.content
            before, done = found.get(reply.key, ("", None))
            assert done is None
            found[reply.key] = (before + text, finished)
    return found


def test_texts_that_start_later_do_not_wait_for_earlier_ones(clock):
    engine = make(clock, "generate")
    ask(engine, "long", {"prompt": "abc", "max_tokens": 50}, stream=True)
    first = engine.step()
    assert [reply.content for reply in first] == [("a", None)]
    ask(engine, "short", {"prompt": "xy", "max_tokens": 2}, stream=True)
    assert {reply.key for reply in engine.step()} == {"long", "short"}
    found = texts_of(engine)
    assert found["short"] == ("y", "length")
    assert found["long"][0] == ("abc" * 50)[2:50]


def test_a_text_whose_reader_left_is_not_written_on(clock):
    engine = make(clock, "generate")
    ask(engine, ("front", 1), {"prompt": "a", "max_tokens": 100}, stream=True)
    ask(engine, ("front", 2), {"prompt": "b", "max_tokens": 3}, stream=True)
    engine.step()
    engine.cancel(("front", 1))
    assert texts_of(engine) == {("front", 2): ("bb", "length")}
    ask(engine, ("front", 3), {"prompt": "a", "max_tokens": 100}, stream=True)
    engine.step()
    ask(engine, ("front", 4), {"prompt": "a", "max_tokens": 100}, stream=True)
    engine.cancel_all(lambda key: key[0] == "front")
    engine.step()
    assert not engine.busy


def test_no_more_texts_at_once_than_allowed(clock):
    engine = make(clock, "generate", streams=1)
    ask(engine, 1, {"prompt": "a", "max_tokens": 3}, stream=True)
    engine.step()
    ask(engine, 2, {"prompt": "b", "max_tokens": 2}, stream=True)
    assert [reply.key for reply in engine.step()] == [1]
    found = texts_of(engine)
    assert found == {1: ("a", "length"), 2: ("bb", "length")}


def test_golden_requests_are_checked_and_teach_the_cost(clock, tmp_path):
    opened = open_artifact(write_artifact(tmp_path, delay_ms=2))
    engine = Engine(opened.encoder, Settings(artifact=""), clock=clock)
    warm_up(engine, opened.golden)
    assert engine.batcher.cost.seconds(3) == pytest.approx(0.002)
    opened = open_artifact(write_artifact(tmp_path, wrong_golden=True))
    with pytest.raises(BrokenModelError, match="it has 2 results; at export it had 0"):
        warm_up(Engine(opened.encoder, Settings(artifact="")), opened.golden)
    with pytest.raises(BrokenModelError, match="no golden requests"):
        warm_up(engine, [])


def test_graphs_are_recorded_for_what_the_batcher_can_take(clock, tmp_path, monkeypatch):
    """They are recorded after the golden requests were answered without them, and before the cost is learned."""
    opened = open_artifact(write_artifact(tmp_path))
    predictor, seen = opened.encoder, []
    answer = predictor.answer
    monkeypatch.setattr(predictor, "record_graphs", lambda requests: seen.append(requests), raising=False)
    monkeypatch.setattr(predictor, "answer", lambda batch: seen.append("answer") or answer(batch))
    warm_up(Engine(predictor, Settings(artifact="", queue=50, batch_tokens=300), clock=clock), opened.golden)
    assert seen.count(50) == 1
    place = seen.index(50)
    assert place == len(opened.golden)
    assert len(seen) > place + 1


def test_texts_that_wait_together_are_written_together(clock, tmp_path):
    """No text waits for the end of another: a batch is bounded by the time of a step, not of a whole answer."""
    opened = open_artifact(write_artifact(tmp_path, action="generate", delay_ms=10))
    engine = Engine(opened.encoder, Settings(artifact="", budget_ms=60), clock=clock)
    warm_up(engine, opened.golden)
    assert engine.batcher.step_cost.seconds(5) == pytest.approx(0.01)
    engine.batcher.cost.learn(5, 10.0)
    for key in range(3):
        ask(engine, key, {"prompt": "ab", "max_tokens": 4}, stream=True)
    assert {reply.key for reply in engine.step()} == {0, 1, 2}


def test_a_text_that_is_wanted_whole_is_the_pieces_joined(clock):
    engine = make(clock, "generate")
    request = {"prompt": "abc", "max_tokens": 7}
    ask(engine, 1, request)
    replies = []
    while engine.busy:
        replies += engine.step()
    assert [(reply.kind, reply.content) for reply in replies] == [
        (ANSWER, (engine.predictor.answer([engine.predictor.encode(request)])[0],))
    ]


def test_messages_survive_any_cut():
    messages = [[1, 2, "x", b"y", None], [3, {"a": [1.5, "ü"]}]]
    data = b"".join(pack(*message) for message in messages)
    for cut in range(len(data)):
        reader = unpacker()
        found = []
        for part in (data[:cut], data[cut:]):
            reader.feed(part)
            found += list(reader)
        assert found == messages
