"""A front's process, controlled by a test in place of the supervisor."""

import json
import os
import queue
import select
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_model import write_artifact
from server import HERE, SOURCE

from forked import ForkedPopen
from intbmoe.serve import front_process
from intbmoe.serve.messages import to_line
from intbmoe.serve.settings import Settings


class FrontAlone:
    """The process of a front that replaces another; ``events`` has its messages."""

    def __init__(self, artifact, hears=True):
        self.artifact = str(artifact)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.control, theirs = socket.socketpair()
        settings = Settings(artifact=self.artifact, loader="fake_model").to_json()
        arguments = [settings, str(self.listener.fileno()), "when-ready", str(theirs.fileno())]
        self.process = ForkedPopen(
            [sys.executable, "-m", "intbmoe.serve.front_process", *arguments],
            pass_fds=[self.listener.fileno(), theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(SOURCE)])},
        )
        theirs.close()
        self.events = queue.Queue()
        if hears:
            threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self):
        for line in self.control.makefile():
            message = json.loads(line)
            if message["event"] != "alive" or self.events.empty():
                self.events.put(message)

    def tell(self, **message):
        self.control.send(to_line(message))

    def says(self, event):
        while (message := self.events.get(timeout=120))["event"] != event:
            assert message["event"] == "alive", message

    def close(self):
        self.process.kill()
        self.process.wait()
        self.control.close()
        self.listener.close()


@pytest.fixture
def front(tmp_path):
    front = FrontAlone(write_artifact(tmp_path))
    yield front
    front.close()


def test_who_is_not_ready_yet_ends_when_told(front):
    """It used to wait until it was ready, and the server's shutdown waited for it."""
    front.says("alive")
    front.tell(do="drain")
    started = time.monotonic()
    assert front.process.wait(20) == 0
    assert time.monotonic() - started < 10


def test_it_ends_with_a_supervisor_that_left_messages_unread(tmp_path):
    """The system reports that as an error, not as end of file: the front used to stay and keep the port."""
    front = FrontAlone(write_artifact(tmp_path), hears=False)
    try:
        assert select.select([front.control], [], [], 120)[0]
        front.control.close()
        assert front.process.wait(20) == 1
    finally:
        front.close()


def test_where_there_is_no_engine_just_now_clients_are_told(front):
    """It used to end itself again and again, while clients waited on the port."""
    front.tell(do="serve", number=1, artifact=front.artifact, version="one", engines=[])
    front.says("serving")
    url = f"http://127.0.0.1:{front.listener.getsockname()[1]}/v1/recommend"
    asked = urllib.request.Request(url, b'{"history": [1]}', {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="503") as refusal:
        urllib.request.urlopen(asked, timeout=10)
    assert "no engine is running" in json.loads(refusal.value.read())["error"]["message"]
    assert refusal.value.headers["retry-after"] == "1"
    # A new version without engines is refused, because the old one can keep serving.
    front.tell(do="prepare", number=2, artifact=front.artifact, version="one", engines=[])
    front.says("cannot")
    front.tell(do="drain")
    assert front.process.wait(20) == 0


def test_a_reload_under_way_does_not_hold_up_the_end(front):
    front.tell(do="serve", number=1, artifact=front.artifact, version="one", engines=[])
    front.says("serving")
    url = f"http://127.0.0.1:{front.listener.getsockname()[1]}/v1/reload"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(urllib.request.urlopen, urllib.request.Request(url, b""), timeout=20)
        front.says("reload")
        front.tell(do="drain")
        with pytest.raises(urllib.error.HTTPError, match="409"):
            asked.result(8)
    assert front.process.wait(20) == 0


def test_as_many_files_can_be_open_as_connections_are_allowed(monkeypatch, caplog):
    for limits, wanted, expected in (
        ((64, 200), 100, (100, 200)),
        ((64, 200), 300, (200, 200)),
        ((400, 400), 300, None),
    ):
        found = []
        monkeypatch.setattr(front_process.resource, "getrlimit", lambda _, limits=limits: limits)
        monkeypatch.setattr(front_process.resource, "setrlimit", lambda _, limits, found=found: found.append(limits))
        front_process.allow_files(wanted)
        assert found == ([] if expected is None else [expected])
    [said] = caplog.messages
    assert said == "only 200 files can be open, 300 are needed: raise ulimit -n, or lower --connections"
