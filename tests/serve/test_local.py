"""The server as one ASGI application, and on Ray Serve."""

import json
import os
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from asgi import call
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


def test_a_text_in_one_process(tmp_path):
    app = build_app(Settings(artifact=str(write_artifact(tmp_path, action="generate")), loader="fake_model"))
    status, body = call(app, "/v1/generate", {"prompt": "ab", "max_tokens": 3})
    assert status == 200
    assert body.count(b"event: text") == 3
    assert b'event: done\ndata: {"finished": "length"}' in body


@pytest.mark.slow
def test_ray_serve(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    from ray import serve

    from intbmoe.serve.ray_app import deployment

    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = Settings(artifact=str(write_artifact(tmp_path)), loader="fake_model")
        serve.run(deployment(settings, ray_actor_options={"num_cpus": 0.5}), name="intbmoe")

        def post(content):
            body = json.dumps(content).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/recommend", body, {"content-type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=20) as response:
                    return response.status, json.load(response)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)

        started = time.monotonic()
        assert post({"history": [1, 2], "top_n": 1}) == (200, {"results": [{"id": 3, "score": 1.0}]})
        status, error = post({"history": []})
        assert (status, error["error"]["field"]) == (422, "history")
        assert time.monotonic() - started < 20
    finally:
        serve.shutdown()
        ray.shutdown()
