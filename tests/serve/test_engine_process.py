"""An engine's process from outside: what it reads before it computes, and how it ends."""

import asyncio
import socket
import threading
import time

import numpy as np
import pytest
import torch
from fake_model import write_artifact

from intbmoe.serve import engine_process
from intbmoe.serve.engine import Engine
from intbmoe.serve.engine_process import EngineProcess
from intbmoe.serve.links import Call, Link
from intbmoe.serve.messages import to_line
from intbmoe.serve.settings import Settings
from intbmoe.tasks.serving.requests import Encoded, to_wire

IMAGE = 224


class Classifier:
    """A slow fake classifier; ``sizes`` has the sizes of its batches."""

    action, streams = "classify", False

    def __init__(self):
        self.sizes = []

    def answer(self, batch):
        self.sizes.append(len(batch))
        time.sleep(0.03)
        return [{"pixels": int(one.payload["pixels"].sum())} for one in batch]


def test_requests_that_do_not_fit_a_socket_together_are_computed_together(tmp_path):
    """A socket holds some 200 kB and an image has 150, so batches used to have one or two requests."""
    path, classifier, count = str(tmp_path / "engine"), Classifier(), 32
    engine = Engine(classifier, Settings(artifact="", budget_ms=2000, batch_tokens=10**7))

    async def run():
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: Link(path, lambda *_: None), path)
        calls = []
        for number in range(count):
            call = Call(b"", time.monotonic() + 30)
            pixels = np.full((IMAGE, IMAGE, 3), number, np.uint8)
            call.content, call.tokens = to_wire(Encoded(197, {"pixels": pixels})), 197
            link.send(call)
            calls.append(call)
        return [outcome.content[0]["pixels"] for outcome in await asyncio.gather(*(call.done for call in calls))]

    ours, theirs = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as listener, ours:
        listener.bind(path)
        listener.listen()
        process = threading.Thread(target=EngineProcess(engine, listener, theirs).run)
        process.start()
        assert asyncio.run(run()) == [number * IMAGE * IMAGE * 3 for number in range(count)]
        assert sum(classifier.sizes) == count
        assert len(classifier.sizes) <= count // 4
        ours.close()  # it ends without its supervisor
        process.join(5)
        assert not process.is_alive()


def test_told_to_drain_it_answers_until_its_last_front_has_gone(tmp_path):
    path = str(tmp_path / "engine")
    engine = Engine(Classifier(), Settings(artifact="", budget_ms=2000))
    ours, theirs = socket.socketpair()

    async def run():
        loop = asyncio.get_running_loop()
        transport, link = await loop.create_unix_connection(lambda: Link(path, lambda *_: None), path)
        for number in range(4):
            call = Call(b"", time.monotonic() + 30)
            call.content, call.tokens = to_wire(Encoded(1, {"pixels": np.full(3, number)})), 1
            link.send(call)
            assert (await call.done).content[0] == {"pixels": 3 * number}
            if number == 1:
                ours.sendall(to_line({"do": "drain"}))
        transport.close()

    with socket.socket(socket.AF_UNIX) as listener, ours:
        listener.bind(path)
        listener.listen()
        process = threading.Thread(target=EngineProcess(engine, listener, theirs).run, daemon=True)
        process.start()
        asyncio.run(run())
        process.join(20)
        assert not process.is_alive()


class EndedError(Exception):
    """Raised in place of ending this process."""


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_ends_at_once_also_when_it_fails(tmp_path, monkeypatch, caplog, fails):
    """For example with a GPU error: its requests go to another engine only after its process has ended."""

    def run(self):
        if fails:
            raise RuntimeError("the device is lost")

    def leave(status):
        raise EndedError(status)

    monkeypatch.setattr(EngineProcess, "run", run)
    monkeypatch.setattr(engine_process.os, "_exit", leave)
    monkeypatch.setattr(engine_process.gc, "freeze", lambda: None)
    monkeypatch.setattr(torch, "set_grad_enabled", lambda _: None)
    settings = Settings(artifact=str(write_artifact(tmp_path)), loader="fake_model", threads=1)
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(EndedError, match=str(int(fails))):
        engine_process.main([settings.to_json(), settings.artifact, str(tmp_path / "s"), str(theirs.detach())])
    assert ("the device is lost" in caplog.text) == fails
