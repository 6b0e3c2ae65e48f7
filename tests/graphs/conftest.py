"""A count of replayed training forwards; files about inference have their own."""

import pytest

from intbmoe.graphs import training
from replayed import counting


@pytest.fixture
def runs(monkeypatch):
    kernels = training.triton_runs
    monkeypatch.setattr(training, "triton_runs", lambda on, dtype: kernels(on, dtype) or on.type == "cpu")
    yield from counting(monkeypatch, training.TrainingGraph, "forward")
