"""A server of real processes that writes text: streams, keys, and the end."""

import json
import os
import signal
import threading
import time
from http.client import HTTPConnection

import pytest
from fake_model import write_artifact
from server import Server
from test_page import browser, open_page  # noqa: F401 — fixtures

KEY = "a key of the test"
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writer")
    (folder / "keys").write_text(f"another\n{KEY}\n")
    artifact = write_artifact(folder / "artifact", action="generate", delay_ms=5)
    with Server(artifact=artifact, api_key_file=str(folder / "keys"), drain_s=10, fresh=True) as server:
        yield server


def stream(server, request, accept="text/event-stream"):
    """The events of a text as they arrive: (name, content, seconds)."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    started = time.monotonic()
    connection.request("POST", "/v1/generate", json.dumps(request), {**HEADERS, "accept": accept})
    response = connection.getresponse()
    assert response.status == 200
    assert response.headers["content-type"].startswith(accept)
    name = None
    for line in response:
        text = line.decode().rstrip("\n")
        if accept.endswith("ndjson"):
            [(name, content)] = json.loads(text).items()
            yield name, content, time.monotonic() - started
        elif text.startswith("event: "):
            name = text.removeprefix("event: ")
        elif text.startswith("data: "):
            yield name, json.loads(text.removeprefix("data: ")), time.monotonic() - started
    connection.close()


def joined(events):
    return "".join(content for name, content, _ in events if name == "text")


@pytest.mark.parametrize("accept", ["text/event-stream", "application/x-ndjson"])
def test_a_text_comes_piece_by_piece(writer, accept):
    events = list(stream(writer, {"prompt": "aüb\n", "max_tokens": 40}, accept))
    assert joined(events) == "aüb\n" * 10
    assert events[-1][:2] == ("done", {"finished": "length"})
    assert events[0][2] < events[-1][2] - 0.1


def test_a_text_whole_is_the_same(writer):
    request = {"prompt": "xyz", "max_tokens": 11}
    whole = writer.post("/v1/generate", {**request, "stream": False}, HEADERS)
    assert whole.json == {"text": "xyzxyzxyzxy", "new_tokens": 11, "score": -1.5, "finished": "length"}
    assert joined(stream(writer, request)) == whole.json["text"]


def test_a_reader_that_leaves_is_nothing_to_write_about(writer):
    connection = HTTPConnection("127.0.0.1", writer.port, timeout=20)
    connection.request("POST", "/v1/generate", json.dumps({"prompt": "a", "max_tokens": 200}), HEADERS)
    response = connection.getresponse()
    assert response.readline() == b"event: text\n"
    response.close()
    connection.close()
    figures = (b'intbmoe_streams_total{outcome="left"} 1.0', b"intbmoe_requests_in_flight 0.0")
    writer.until(lambda: all(one in writer.request("GET", "/metrics", None, HEADERS).body for one in figures), 10)
    assert not [line for line in writer.log if "Traceback" in line]


def test_a_bad_request_for_a_stream_is_refused_in_the_usual_way(writer):
    answer = writer.post("/v1/generate", {"prompt": "x", "max_tokens": 0}, HEADERS)
    assert answer.status == 422
    assert answer.json["error"]["field"] == "max_tokens"


def test_a_deadline_ends_a_text_and_says_so(writer):
    answer = writer.post("/v1/generate", {"prompt": "x", "max_tokens": 200}, {**HEADERS, "x-deadline-ms": "600"})
    assert answer.status == 200
    assert b"event: error" in answer.body
    assert b'"status": 504' in answer.body


def test_keys(writer):
    request = {"prompt": "x", "max_tokens": 1, "stream": False}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}, {"authorization": "ü"}):
        answer = writer.post("/v1/generate", request, headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert writer.post("/v1/generate", request, HEADERS).status == 200
    assert writer.get("/v1/model").status == 401
    assert writer.get("/metrics").status == 401
    assert writer.post("/v1/reload", {}).status == 401
    for path in ("/", "/openapi.json", "/health/live", "/health/ready"):
        assert writer.get(path).status == 200
    assert writer.get("/openapi.json").json["security"] == [{"key": []}]


def test_the_page_writes_the_text_as_it_comes(writer, browser):  # noqa: F811
    page = browser.new_context().new_page()
    page.set_default_timeout(15_000)
    page.goto(writer.url)
    page.fill("#key", KEY)
    page.click("#key-form button")
    page.wait_for_selector("#form:not([hidden])")
    page.fill("textarea", "abc")
    page.fill("[name=max_tokens]", "100")
    page.click("#go")
    writer.until(lambda: page.locator("#text").count() and len(page.inner_text("#text")) > 10, 10)
    assert len(page.inner_text("#text")) < 103
    page.wait_for_selector("#go:not([disabled])")
    assert page.inner_text("#text") == "abc" + ("abc" * 100)[:100]
    page.context.close()


def test_a_killed_engine_finishes_the_text_after_its_return_or_says_so(writer):
    events = stream(writer, {"prompt": "abcdefg", "max_tokens": 200})
    got = [next(events) for _ in range(5)]
    [engine] = writer.engine_pids()
    os.kill(engine, signal.SIGKILL)
    got += list(events)
    assert got[-1][0] == "error"  # there was no other engine
    assert got[-1][1]["status"] == 503
    assert ("abcdefg" * 200).startswith(joined(got))
    answer = writer.post("/v1/generate", {"prompt": "x"}, HEADERS)
    assert answer.status in (200, 503)
    writer.until(lambda: writer.get("/health/ready").status == 200, 60)
    assert joined(stream(writer, {"prompt": "ab", "max_tokens": 4})) == "abab"


def test_sigterm_lets_texts_under_way_finish(writer):
    """This ends the shared server, so it is the last test."""
    events = stream(writer, {"prompt": "abc", "max_tokens": 200})
    got = [next(events) for _ in range(3)]
    children = writer.engine_pids()
    writer.process.send_signal(signal.SIGTERM)
    collected = []
    reader = threading.Thread(target=lambda: collected.extend(events))
    reader.start()
    with pytest.raises(ConnectionError):
        writer.until(lambda: writer.get("/health/live").status != 200, 10)
    reader.join(60)
    assert joined(got + collected) == ("abc" * 200)[:200]
    assert collected[-1][0] == "done"
    assert writer.process.wait(20) == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
