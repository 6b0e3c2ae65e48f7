"""Artifacts of every task through the server's own code, and the page with their models."""

import json

import pytest
from asgi import ask_all, call
from server import Server
from test_page import browser, fits, open_page  # noqa: F401 — fixtures

from export.small_runs import TASKS, small_run
from intbmoe import precision
from intbmoe.export.artifact import load_artifact
from intbmoe.export.export import export_run
from intbmoe.export.golden import compare_answers
from intbmoe.serve.loading import open_artifact
from intbmoe.serve.local import build_app
from intbmoe.serve.settings import Settings

PATHS = {
    "vision": "/v1/classify",
    "language": "/v1/generate",
    "sequences": "/v1/recommend",
    "travel": "/v1/recommend",
}


@pytest.fixture(scope="module", params=TASKS)
def artifact(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    export_run(small_run(request.param, folder), folder / "artifact")
    return load_artifact(folder / "artifact")


def test_golden_requests_alone_and_together(artifact):
    app = build_app(Settings(artifact=str(artifact.path), deadline_ms=30_000))
    path = PATHS[artifact.task]
    requests = [{**entry["request"], "explain": True} for entry in artifact.golden]
    if artifact.task == "language":
        requests = [{**request, "stream": False} for request in requests]
    together = ask_all(app, path, requests * 3)
    alone = [ask_all(app, path, [request])[0] for request in requests]
    for place, (status, answer) in enumerate(together + alone):
        assert status == 200
        assert compare_answers(artifact.golden[place % len(requests)], answer) is None
        assert answer["tokens"]
        assert {len(layer["tokens"]) for layer in answer["blocks"]} == {len(answer["tokens"])}
    metrics = call(app, "/metrics")[1].decode()
    assert "intbmoe_block_tokens_total{" in metrics


@pytest.mark.parametrize("slow", [True, False])
def test_bfloat16_where_it_is_slow_is_told_with_the_remedy(tmp_path, monkeypatch, caplog, slow):
    monkeypatch.setattr(precision, "bfloat16_is_slow", lambda device: slow)
    run = small_run("vision", tmp_path)
    for dtype in ("float32", "bfloat16"):
        export_run(run, tmp_path / dtype, dtype=dtype)
        caplog.clear()
        open_artifact(str(tmp_path / dtype), "cpu")
        assert ("export with --dtype float32" in caplog.text) == (slow and dtype == "bfloat16")


def test_a_stream_is_the_whole_text(artifact):
    if artifact.task != "language":
        pytest.skip("only language is streamed")
    app = build_app(Settings(artifact=str(artifact.path), deadline_ms=30_000))
    request = {"prompt": "def f(", "max_tokens": 12, "temperature": 1.0, "seed": 5}
    [(status, whole)] = ask_all(app, "/v1/generate", [{**request, "stream": False}])
    [(_, explained)] = ask_all(app, "/v1/generate", [{**request, "stream": False, "explain": True}])
    assert status == 200
    assert whole == {name: explained[name] for name in ("text", "score", "new_tokens", "finished")}
    status, body = call(app, "/v1/generate", request)
    events = [event.split("\n") for event in body.decode().split("\n\n") if event]
    pieces = [json.loads(data.removeprefix("data: ")) for name, data in events if name == "event: text"]
    assert "".join(pieces) == whole["text"]


def test_a_text_is_explained_whole(artifact):
    if artifact.task != "language":
        pytest.skip("only language is streamed")
    app = build_app(Settings(artifact=str(artifact.path), deadline_ms=30_000))
    request = {"prompt": "def f(", "max_tokens": 3, "explain": True}
    [(status, refused), (whole_status, whole), (unsaid_status, unsaid)] = ask_all(
        app, "/v1/generate", [{**request, **more} for more in ({"stream": True}, {"stream": False}, {})]
    )
    assert (status, refused["error"]["field"]) == (422, "stream")
    assert "send stream=false" in refused["error"]["message"]
    assert whole_status == unsaid_status == 200
    assert whole == unsaid
    assert {"text", "tokens", "blocks"} <= set(whole)


@pytest.mark.slow
def test_the_page_with_a_model(artifact, open_page):  # noqa: F811
    with Server(artifact=artifact.path, loader="intbmoe.serve.loading", deadline_ms=20_000, wait=120) as server:
        for width in (1000, 375):
            page = open_page(server.url, width)
            if artifact.task == "vision":
                page.click("text=Clear")
                box = page.locator("#draw").bounding_box()
                page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.2)
                page.mouse.down()
                page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.8, steps=5)
                page.mouse.up()
            page.click("#go")
            page.wait_for_selector("#legend li")
            if artifact.task == "vision":
                assert page.locator("#tokens .patch").count() > 3
                page.set_input_files("#file", {"name": "x.png", "mimeType": "image/png", "buffer": png()})
                page.click("#go")
                page.wait_for_selector("ol.results li")
            elif artifact.task == "language":
                assert page.locator("#tokens .token").count() > 7
            else:
                assert page.locator("ol.results li").count() > 3
            assert fits(page)


def png():
    import io

    from PIL import Image

    content = io.BytesIO()
    Image.new("L", (40, 30), 128).save(content, "PNG")
    return content.getvalue()
