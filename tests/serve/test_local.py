"""The server as one ASGI application."""

import asyncio
import json
import logging
import time
from importlib.metadata import PackageNotFoundError

import pytest
from asgi import ask, ask_all, call
from fake_model import SLOW, write_artifact

from intbmoe.serve.local import build_app
from intbmoe.serve.settings import Settings


def test_one_process_answers_as_the_others_do(tmp_path):
    app = build_app(Settings(artifact=str(write_artifact(tmp_path)), loader="fake_model"))
    status, body = call(app, "/v1/recommend", {"history": [1, 2], "top_n": 1})
    assert (status, json.loads(body)) == (200, {"results": [{"id": 3, "score": 1.0}]})
    assert call(app, "/v1/recommend", {"history": []})[0] == 422
    assert call(app, "/v1/recommend", {"history": [SLOW + 20]}, [(b"x-deadline-ms", b"50")])[0] == 504
    assert call(app, "/v1/recommend", {"history": [1]}, [(b"x-deadline-ms", b"0.000001")])[0] in (429, 504)
    assert call(app, "/v1/reload", {})[0] == 409
    assert call(app, "/health/ready")[0] == 200
    assert b'intbmoe_requests_total{action="recommend",outcome="answered"} 1.0' in call(app, "/metrics")[1]


def test_a_source_tree_that_is_not_installed_is_described_too(tmp_path, monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    app = build_app(Settings(artifact=str(write_artifact(tmp_path)), loader="fake_model"))
    monkeypatch.setattr("intbmoe.version.version", version)
    status, body = call(app, "/openapi.json")
    assert (status, json.loads(body)["info"]["version"]) == (200, "source")


def test_the_wait_while_others_are_computed_is_counted(tmp_path):
    """The request waits in the inbox, as it would in a socket, where the engine does not see it."""
    app = build_app(Settings(artifact=str(write_artifact(tmp_path)), loader="fake_model"))

    async def run():
        first = asyncio.create_task(ask(app, "/v1/recommend", {"history": [SLOW + 30]}))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(ask(app, "/v1/recommend", {"history": [1]}))
        return [status for status, _ in await asyncio.gather(first, second)]

    assert asyncio.run(run()) == [200, 200]
    [waited] = [line for line in call(app, "/metrics")[1].decode().splitlines() if "queue_seconds_sum" in line]
    assert 0.15 < float(waited.split()[1]) < 0.4


def test_a_text_in_one_process(tmp_path):
    app = build_app(Settings(artifact=str(write_artifact(tmp_path, action="generate")), loader="fake_model"))
    status, body = call(app, "/v1/generate", {"prompt": "ab", "max_tokens": 3})
    assert status == 200
    assert body.count(b"event: text") == 3
    assert b'event: done\ndata: {"finished": "length"}' in body


def test_an_engine_that_hangs_or_has_ended_is_not_healthy(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    app = build_app(Settings(artifact=str(write_artifact(tmp_path)), loader="fake_model", hang_s=0.2))
    app.state.check_health()
    assert app.state.version == "one"

    async def look_while_it_computes():
        asked = asyncio.create_task(ask(app, "/v1/recommend", {"history": [SLOW + 50]}))
        await asyncio.sleep(0.4)
        with pytest.raises(RuntimeError, match=r"one batch for more than 0\.2 s: it hangs"):
            app.state.check_health()
        return await asked

    assert asyncio.run(look_while_it_computes())[0] == 200
    app.state.check_health()
    monkeypatch.setattr("intbmoe.serve.engine.Engine.step", lambda engine: 1 / 0)
    assert call(app, "/v1/recommend", {"history": [1]})[0] == 503
    with pytest.raises(RuntimeError, match="the engine has ended"):
        app.state.check_health()


class GpuFailedError(RuntimeError):
    """An error that an engine does not survive."""


@pytest.mark.parametrize("action", ["recommend", "generate"])
def test_when_the_engine_dies_those_that_wait_are_told(tmp_path, monkeypatch, caplog, action):
    caplog.set_level(logging.CRITICAL)
    deaths = []
    monkeypatch.setattr("intbmoe.serve.local.LAST_ANSWERS_S", 0)
    artifact = str(write_artifact(tmp_path, action=action))
    settings = Settings(artifact=artifact, loader="fake_model", deadline_ms=30_000)
    app = build_app(settings, on_death=lambda: deaths.append(time.monotonic()))
    path, content = f"/v1/{action}", {"history": [1]} if action == "recommend" else {"prompt": "a", "stream": True}

    def die(self):
        time.sleep(0.1)  # until the other requests wait too
        raise GpuFailedError

    monkeypatch.setattr("intbmoe.serve.engine.Engine.step", die)
    started = time.monotonic()
    answers = ask_all(app, path, [content] * 5)
    assert time.monotonic() - started < 10  # the deadline is longer
    assert {status for status, _ in answers} == {503}
    assert len(deaths) == 1
    assert call(app, "/health/ready")[0] == 503
    [(status, error)] = ask_all(app, path, [content])
    assert (status, error["error"]["message"]) == (503, "no engine is running at the moment")
