"""Streams that only note who waits for whom, so that branches can be tested without a GPU."""

from contextlib import contextmanager
from unittest import mock

import torch

from intbmoe.ops import branches


class FakeEvent:
    def __init__(self, clock):
        self.clock = clock


class FakeStream:
    """A stream whose clock has one entry per stream: how much of that stream's work has ended when its next starts."""

    device = torch.device("cpu")

    def __init__(self, device=None):
        self.clock = {}

    def tick(self):
        self.clock[id(self)] = self.clock.get(id(self), 0) + 1
        return dict(self.clock)

    def record_event(self):
        return FakeEvent(self.tick())

    def wait_event(self, event):
        for key, time in event.clock.items():
            self.clock[key] = max(self.clock.get(key, 0), time)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def has_waited_for(self, other):
        return self.clock.get(id(other), 0) == other.clock.get(id(other), 0)


@contextmanager
def fake_streams():
    """Let every forward branch; yields the list of all streams that were used, the main one first."""
    used = [FakeStream()]
    current = [used[0]]

    def make(device=None):
        used.append(FakeStream())
        return used[-1]

    @contextmanager
    def on(stream):
        current.append(stream)
        try:
            yield
        finally:
            current.pop()
            stream.tick()  # there may be work now that nobody has waited for

    patches = {"Stream": make, "stream": on, "current_stream": lambda device=None: current[-1]}
    branches._of_thread.__dict__.clear()
    with (
        mock.patch.multiple(torch.cuda, **patches),
        mock.patch.object(branches, "_may_branch", lambda x: x is not None),
        mock.patch.object(branches, "_keep"),
    ):
        yield used
    branches._of_thread.__dict__.clear()
