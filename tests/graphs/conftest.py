"""A count of replayed training forwards."""

import pytest

from intbmoe.graphs import replay, training


@pytest.fixture
def runs(monkeypatch):
    """One entry for each forward of a graph, also on the CPU."""
    replay._found.clear()
    monkeypatch.setattr(replay, "enabled", True)
    counted, run = [], training.TrainingGraph.forward
    monkeypatch.setattr(training.TrainingGraph, "forward", lambda *given: counted.append(1) or run(*given))
    on_gpu, kernels = replay._on_default_stream, training.triton_runs
    monkeypatch.setattr(replay, "_on_default_stream", lambda x: on_gpu(x) if x.is_cuda else True)
    monkeypatch.setattr(training, "triton_runs", lambda on, dtype: kernels(on, dtype) or on.type == "cpu")
    yield counted
    replay._found.clear()  # on the CPU a graph keeps its layer alive
