"""Recorded inference: batches rounded up to a few shapes, in buffers that hold what earlier batches left there."""

import gc
import logging
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from large_places import encoded_requests, large_predictor
from small_predictors import TRAVEL, predictor, requests

from intbmoe.export.golden import compare_rankings
from intbmoe.graphs import recording
from intbmoe.graphs.recording import CaptureError, Recorder, halves, ladder
from intbmoe.routing import record_routing
from intbmoe.tasks.travel import captured as captured_places
from intbmoe.tasks.travel import serving as recommend_places
from intbmoe.tasks.travel.captured import CapturedSearch

METHODS = ("dense", "intbmoe", "switch", "lory", "soft_causal")
NOT_A_CODE = 2**30


@given(st.integers(1, 3000), st.data())
def test_ladders_hold_everything_with_little_padding(most, data):
    steps = ladder(most)
    assert list(steps) == sorted(set(steps))
    assert steps[-1] == most
    assert len(steps) <= 2 * most.bit_length()
    value = data.draw(st.integers(1, most))
    step = next(step for step in steps if step >= value)
    assert step < 2 * value
    assert halves(most)[-1] == most
    assert halves(most)[0] >= most / 4


def ids_of(answers):
    return [[entry["id"] for entry in answer["results"]] for answer in answers]


def scores_of(answers):
    return np.concatenate([[entry["score"] for entry in answer["results"]] for answer in answers])


def poison(graphs):
    """Fill the buffers with worse values than earlier batches could leave."""
    graphs.input.array[:] = NOT_A_CODE
    graphs._output.array[:] = -1
    with torch.inference_mode():
        graphs.queries.fill_(torch.nan)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_batch_in_the_buffers_is_answered_as_in_the_ordinary_way(method, data):
    """Also a batch larger than any recorded shape."""
    asked = predictor("places", method)
    with torch.inference_mode():
        graphs = CapturedSearch(asked, 5)
    pool = [asked.encode({**request, "explain": False}) for request in requests("places", 12)]
    for _ in range(2):
        batch = [pool[number] for number in data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=13))]
        poison(graphs)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asked, "captured", graphs)
            found = asked.answer(batch)
        expected = asked.answer(batch)
        assert ids_of(found) == ids_of(expected)
        assert scores_of(found) == pytest.approx(scores_of(expected), abs=1e-10)


def test_what_is_to_be_explained_takes_the_ordinary_way(monkeypatch):
    asked = predictor("places")
    batch = [asked.encode({**request, "explain": number == 1}) for number, request in enumerate(requests("places", 3))]
    expected = asked.answer(batch)
    monkeypatch.setattr(asked, "captured", object())
    assert asked.answer(batch) == expected
    assert [len(answer) for answer in expected] == [1, 3, 1]


def test_results_beyond_the_usual_number(monkeypatch):
    asked = predictor("places")
    monkeypatch.setattr(captured_places, "USUAL_RESULTS", 3)
    with torch.inference_mode():
        graphs = CapturedSearch(asked, 4)
    assert graphs.results == (3, 90)
    for top_n in (1, 3, 4, 90):
        batch = [asked.encode({**one, "explain": False, "top_n": top_n}) for one in requests("places", 3, seed=7)]
        expected = asked.answer(batch)
        monkeypatch.setattr(asked, "captured", graphs)
        assert ids_of(asked.answer(batch)) == ids_of(expected)
        monkeypatch.setattr(asked, "captured", None)


def test_ties_are_settled_as_in_the_ordinary_way(monkeypatch):
    """Every place is there nine times: the tenth result is a tie, and lower numbers come first."""
    asked = predictor("places")
    vectors = asked.places.vectors[:10].repeat(9, 1)
    monkeypatch.setattr(asked, "places", type(asked.places)(vectors))
    with torch.inference_mode():
        graphs = CapturedSearch(asked, 4)
    batch = [asked.encode({**one, "explain": False, "top_n": 10}) for one in requests("places", 4, seed=8)]
    expected = asked.answer(batch)
    monkeypatch.setattr(asked, "captured", graphs)
    assert ids_of(asked.answer(batch)) == ids_of(expected)


def test_routing_is_recorded_without_the_padding(monkeypatch):
    asked = predictor("places")
    with torch.inference_mode():
        graphs = CapturedSearch(asked, 4)
    batch = [asked.encode({**one, "explain": False}) for one in requests("places", 3, seed=9)]
    counts = []
    for way in (None, graphs):
        monkeypatch.setattr(asked, "captured", way)
        with record_routing(asked.model) as log:
            asked.answer(batch)
        counts.append({name: torch.bincount(one.ids[one.ids >= 0]).tolist() for name, one in log.items()})
    assert counts[0] == counts[1]
    assert len(counts[0]) == TRAVEL.depth + 1


def test_where_time_is_over_small_batches_are_rounded_up(monkeypatch):
    asked = predictor("places")
    monkeypatch.setattr(captured_places, "RECORDING_S", -1.0)
    with torch.inference_mode():
        graphs = CapturedSearch(asked, 6)
    batch = [asked.encode({**one, "explain": False}) for one in requests("places", 1)]
    assert graphs.shape_for(batch)[0] == 6
    expected = asked.answer(batch)
    monkeypatch.setattr(asked, "captured", graphs)
    assert ids_of(asked.answer(batch)) == ids_of(expected)


def test_the_shape_with_the_least_padding_is_taken():
    asked = predictor("places")
    with torch.inference_mode():
        graphs = CapturedSearch(asked, 8)
    assert (graphs.requests, graphs.sessions) == ((1, 2, 4, 8), (2, 3, 6))
    pool = encoded_requests(asked, 8, seed=0, sessions=2)
    longer = encoded_requests(asked, 1, seed=1, sessions=4)
    assert graphs.shape_for(pool[:1]) == (1, 2)
    assert graphs.shape_for(pool[:3]) == (4, 2)
    assert graphs.shape_for([*pool[:7], *longer]) == (8, 6)


def test_a_model_that_cannot_be_recorded_says_so(monkeypatch, caplog):
    asked = predictor("places")

    def refuse(*_):
        raise CaptureError("it waits for the device")

    monkeypatch.setattr(recommend_places, "CapturedSearch", refuse)
    asked.record_graphs(4)  # on the CPU there is nothing to record
    monkeypatch.setattr(asked, "device", torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        asked.record_graphs(4)
    assert "it waits for the device" in caplog.text
    assert asked.captured is None


def test_constants_are_made_once():
    constants = recording._Constants()
    with constants:
        first, again, other = torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.float64)
    assert first is again
    assert other.dtype == torch.float64
    assert torch.tensor([1, 2]) is not first


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", params=["intbmoe-bfloat16", "intbmoe-float32", "dense-bfloat16"])
def on_gpu(request):
    method, dtype = request.param.split("-")
    asked = large_predictor(method, getattr(torch, dtype), "cuda")
    asked.record_graphs(16)
    assert asked.captured is not None
    return asked


@pytest.mark.gpu
@needs_gpu
def test_replays_are_the_kernels_run_one_by_one(on_gpu):
    """Every shape, after other batches: bit for bit the results of the function that was recorded."""
    graphs = on_gpu.captured
    for number, (most, sessions) in enumerate(sorted(graphs.models)):
        for size in sorted({1, min(7, most), most}):
            batch = encoded_requests(on_gpu, size, seed=number, sessions=sessions)
            shape = (most, sessions)
            with torch.inference_mode():
                found = run(graphs, batch, shape, graphs.models[shape], graphs.searches[most, 10])
                graphs.queries.fill_(torch.nan)
                model, search = partial(graphs._run_model, *shape), partial(graphs._search_places, most, 10)
                expected = run(graphs, batch, shape, model, search)
            for one, other in zip(found, expected, strict=True):
                assert np.array_equal(one[:size], other[:size])
                assert np.isfinite(one[:size]).all()


def run(graphs, batch, shape, model, search):
    graphs.input.to_device(graphs.fill(batch, shape))
    model()
    search()
    return graphs.read(shape[0], 10)


@pytest.mark.gpu
@needs_gpu
def test_recorded_and_ordinary_answers_agree(on_gpu):
    """Up to rounding; in either mode, a token near a tie of two blocks may take the other one in another batch."""
    graphs, wrong, total = on_gpu.captured, 0, 0
    eps = torch.finfo(on_gpu.dtype).eps
    for number, size in enumerate((1, 7, 16, 1, 50, 3)):
        batch = encoded_requests(on_gpu, size, seed=100 + number)
        on_gpu.captured = graphs
        found = on_gpu.answer(batch)
        on_gpu.captured = None
        expected = on_gpu.answer(batch)
        on_gpu.captured = graphs
        for one, other in zip(found, expected, strict=True):
            largest = max(abs(entry["score"]) for entry in other["results"])
            bound = (16 if on_gpu.dtype == torch.bfloat16 else 2000) * eps * largest
            wrong += compare_rankings(one["results"], other["results"], bound) is not None
            total += 1
    assert wrong <= (0.1 if on_gpu.dtype == torch.bfloat16 else 0.02) * total


@pytest.mark.gpu
@needs_gpu
def test_a_recorded_batch_waits_once_and_samples_its_routing(on_gpu):
    graphs = on_gpu.captured
    batch = encoded_requests(on_gpu, 7, seed=5)
    shape = graphs.shape_for(batch)
    with torch.inference_mode():
        used = graphs.fill(batch, shape)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graphs.input.to_device(used)
            graphs.models[shape]()
            graphs.searches[shape[0], 10]()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    counted = {}
    for way in (None, graphs):
        on_gpu.captured = way
        with record_routing(on_gpu.model) as log:
            on_gpu.answer(batch)
        counted[way] = {name: None if one.ids is None else int((one.ids >= 0).sum()) for name, one in log.items()}
    assert counted[None] == counted[graphs]


@pytest.mark.gpu
@needs_gpu
def test_what_waits_for_the_device_cannot_be_recorded():
    x = torch.ones(3, device="cuda")
    recorder = Recorder(x.device)
    with pytest.raises(CaptureError):
        recorder.record(lambda: x.mul_(x.sum().item()))
    torch.cuda.synchronize()  # the ordinary way still works
    assert x.add_(1).isfinite().all()
    assert torch.rand_like(x).isfinite().all()


@pytest.mark.gpu
@needs_gpu
def test_a_graph_that_becomes_garbage_while_another_is_recorded():
    """Python may collect cycles at any time; freeing a graph during a recording would break the recording."""
    x = torch.ones(3, device="cuda")
    old = [Recorder(x.device).record(lambda: x.add_(1))]
    calls = []

    def double():
        calls.append(1)
        if len(calls) == 2 and old:  # the first call is not recorded
            cycle = [old.pop()]
            cycle.append(cycle)
        [[number] for number in range(1000)]
        x.mul_(2)

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        replay = Recorder(x.device).record(double)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    x.fill_(1)
    replay()
    assert x.tolist() == [2.0] * 3
