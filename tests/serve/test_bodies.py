"""Bodies of requests: their total memory, and clients that are still sending when they get their answer."""

import asyncio
import json
import socket
import threading
import time

import pytest
import uvicorn
from asgi import ask, call
from fake_model import BUG, SLOW, write_artifact
from hypothesis import given
from hypothesis import strategies as st

from intbmoe.serve.connection import HEADERS_BYTES, Crowd, patient_protocol
from intbmoe.serve.http import BodyMemory, HttpError, Share
from intbmoe.serve.local import build_app
from intbmoe.serve.settings import Settings

PATH = "/v1/recommend"
ROOM = 6000
"""Bytes; the fake model takes requests of up to 4096."""


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60) | st.none()), max_size=60))
def test_never_more_than_allowed_and_all_comes_back(steps):
    memory = BodyMemory(100)
    shares, sizes = [Share(memory) for _ in range(5)], [0] * 5
    for which, size in steps:
        if size is None:
            shares[which].give_back()
            sizes[which] = 0
            continue
        wanted = max(sizes[which], size)
        fits = sum(sizes) - sizes[which] + wanted <= 100
        if fits:
            shares[which].hold(size)
            sizes[which] = wanted
        else:
            with pytest.raises(HttpError) as refusal:
                shares[which].hold(size)
            assert (refusal.value.status, refusal.value.headers) == (429, {"retry-after": "1"})
        assert memory.held == sum(sizes) <= 100
    for share in shares:
        share.give_back()
        share.give_back()
    assert memory.held == 0


def make_app(folder, patience_s=20.0, **about):
    settings = {"body_memory_mb": ROOM / 2**20, "patience_s": patience_s, "deadline_ms": 20_000}
    return build_app(Settings(artifact=str(write_artifact(folder, **about)), loader="fake_model", **settings))


async def until_held(app, size):
    """Wait until the app holds ``size`` bytes of bodies."""
    async with asyncio.timeout(20):
        while await held(app) != size:
            await asyncio.sleep(0.01)


async def held(app):
    text = (await ask(app, "/metrics"))[1].decode()
    [line] = [line for line in text.splitlines() if line.startswith("intbmoe_body_bytes ")]
    return float(line.split()[1])


class Client:
    """A request whose parts are sent when the test asks; ``announced`` is its Content-Length."""

    def __init__(self, app, announced=None, path=PATH):
        headers = [(b"content-type", b"application/json")]
        headers += [] if announced is None else [(b"content-length", b"%d" % announced)]
        self.scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        self.scope |= {"headers": headers, "scheme": "http", "server": ("test", 80)}
        self.messages, self.answered, self.received = asyncio.Queue(), [], 0
        self.task = asyncio.create_task(app(self.scope, self._receive, self._send))

    async def _receive(self):
        self.received += 1
        return await self.messages.get()

    async def _send(self, message):
        self.answered.append(message)

    def send(self, body, more=True):
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self):
        self.messages.put_nowait({"type": "http.disconnect"})

    async def status(self):
        await asyncio.wait_for(self.task, 30)
        return self.answered[0]["status"]


def test_what_is_announced_is_refused_before_it_is_read(tmp_path):
    async def run():
        app = make_app(tmp_path)
        first = Client(app, 4000)
        await until_held(app, 4000)
        second = Client(app, 2001)
        assert await second.status() == 429
        assert second.received == 0
        assert (b"retry-after", b"1") in second.answered[0]["headers"]
        body = json.dumps({"history": [1]}).encode().ljust(2000)
        assert (await ask(app, PATH, {"history": [1]}))[0] == 200  # what fits is answered
        third = Client(app, 2000)
        third.send(body, more=False)
        assert await third.status() == 200
        assert await held(app) == 4000
        first.send(json.dumps({"history": [1]}).encode().ljust(4000), more=False)
        assert await first.status() == 200
        assert await held(app) == 0

    asyncio.run(run())


def test_what_is_not_announced_is_refused_while_it_is_read(tmp_path):
    async def run():
        app = make_app(tmp_path)
        first, second = Client(app), Client(app)
        first.send(b" " * 4000)
        second.send(b" " * 1500)
        await until_held(app, 5500)
        second.send(b" " * 1500)
        assert await second.status() == 429
        assert await held(app) == 4000
        first.leave()
        await first.status()
        assert await held(app) == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("leaves while sending", 499),
        ("leaves while waiting", 499),
        ("is too slow", 408),
        ("is bad", 422),
        ("is no JSON", 422),
        ("is too large", 413),
        ("expires", 504),
        ("fails", 500),
        ("is answered", 200),
        ("is cancelled", None),
    ],
)
def test_however_a_request_ends_its_bytes_come_back(tmp_path, end, expected):
    items = {"leaves while waiting": SLOW + 50, "is cancelled": SLOW + 50, "expires": SLOW + 60, "fails": BUG}

    async def run():
        app = make_app(tmp_path, patience_s=0.3 if end == "is too slow" else 20.0)
        body = json.dumps({"history": [items.get(end, 1)] if end != "is bad" else []}).encode()
        client = Client(app)
        if end == "expires":
            client.scope["headers"].append((b"x-deadline-ms", b"100"))
        client.send(b"{" if end == "is no JSON" else b" " * 10)
        if end == "is too large":
            client.send(b" " * 4096)
        elif end not in ("is too slow", "leaves while sending"):
            client.send(body, more=False)
        if end.startswith("leaves"):
            await until_held(app, len(body) + 10 if end == "leaves while waiting" else 10)
            client.leave()
        if end == "is cancelled":
            await until_held(app, len(body) + 10)
            client.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await client.task
        else:
            assert await client.status() == expected
        assert await held(app) == 0
        text = (await ask(app, "/metrics"))[1].decode()
        assert "intbmoe_requests_in_flight 0.0" in text

    asyncio.run(run())


def test_a_text_holds_its_request_until_its_end(tmp_path):
    async def run():
        app = make_app(tmp_path, action="generate", delay_ms=10)
        for leaves in (True, False):
            client = Client(app, path="/v1/generate")
            client.send(json.dumps({"prompt": "a", "max_tokens": 20}).encode(), more=False)
            while len(client.answered) < 3:
                await asyncio.sleep(0.01)
            assert await held(app) > 0
            assert b"intbmoe_requests_in_flight 1.0" in (await ask(app, "/metrics"))[1]
            if leaves:
                client.leave()
            await client.status()
            assert await held(app) == 0
            assert b"intbmoe_requests_in_flight 0.0" in (await ask(app, "/metrics"))[1]

    asyncio.run(run())


def test_no_request_is_larger_than_all_may_be_together(tmp_path):
    settings = {"artifact": str(write_artifact(tmp_path)), "loader": "fake_model"}
    app = build_app(Settings(**settings, body_memory_mb=1000 / 2**20))
    assert call(app, PATH, {"history": [1] * 100, "top_n": 1})[0] == 200
    status, body = call(app, PATH, {"history": [1] * 500})
    assert status == 413  # not 429, because it would always be refused
    assert "1000 bytes" in json.loads(body)["error"]["message"]
    with pytest.raises(ValueError, match=r"body_memory_mb=1.0 is not allowed.*body_bytes=2000000"):
        Settings(**settings, body_memory_mb=1.0, body_bytes=2_000_000).check()
    with pytest.raises(ValueError, match="body_memory_mb=0"):
        Settings(**settings, body_memory_mb=0).check()


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """The port of a front's HTTP server in a thread, with a patience of one second."""
    app = make_app(tmp_path_factory.mktemp("artifact"))
    server = uvicorn.Server(
        uvicorn.Config(app, http=patient_protocol(1.0, Crowd()), lifespan="off", log_level="critical")
    )
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def head(path, length):
    lines = (f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}", "", "")
    return "\r\n".join(lines).encode()


def read_answer(client):
    """Status and body of one answer with a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(1000)
    top, body = data.split(b"\r\n\r\n", 1)
    [length] = [int(line.split(b":")[1]) for line in top.split(b"\r\n") if line.lower().startswith(b"content-length")]
    while len(body) < length:
        body += client.recv(1000)
    return int(top.split()[1]), body


@pytest.mark.parametrize(("path", "status"), [(PATH, 413), ("/nothing", 404), ("/v1/generate", 404)])
def test_an_answer_does_not_wait_for_the_body_and_the_connection_goes_on(port, path, status):
    size, body = 3_000_000, json.dumps({"history": [1, 2], "top_n": 1}).encode()
    with connect(port) as client:
        client.sendall(head(path, size))
        assert read_answer(client)[0] == status  # nothing of the body has been sent
        client.sendall(b" " * size)
        client.sendall(head(PATH, len(body)) + body)
        assert read_answer(client) == (200, b'{"results":[{"id":3,"score":1.0}]}')


def test_a_body_without_end_is_not_read_for_ever(port):
    with connect(port) as client:
        client.sendall(head(PATH, 10**9))
        assert read_answer(client)[0] == 413
        started = time.monotonic()
        with pytest.raises(ConnectionError):  # noqa: PT012 — it may take several before the other side has closed
            while time.monotonic() < started + 5:
                client.sendall(b" " * 100)
                time.sleep(0.01)
        assert 0.5 < time.monotonic() - started < 3


def test_after_a_body_that_was_passed_over_a_head_has_its_limits_again(port):
    endless = b"GET / HTTP/1.1\r\nx: " + b"y" * 2 * HEADERS_BYTES
    for rest, answer in ((b"GET / HTTP/1.1\r\n", b""), (endless, b"HTTP/1.1 400")):
        with connect(port) as client:
            client.sendall(head(PATH, 100_000))
            assert read_answer(client)[0] == 413
            started = time.monotonic()
            client.sendall(b" " * 100_000 + rest)
            try:
                assert client.recv(12) == answer
            except ConnectionError:
                assert answer
            assert time.monotonic() - started < 3
