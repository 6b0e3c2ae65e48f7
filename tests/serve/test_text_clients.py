"""The benchmark of streamed texts: what its clients count, and what it serves."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from intbmoe.export import load_artifact
from intbmoe.export.artifact import ABOUT, ArtifactError
from intbmoe.serve.engine import Engine, warm_up
from intbmoe.serve.settings import Settings

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from serve_artifacts import Texts, Variant  # noqa: E402
from serve_load import post  # noqa: E402
from serve_readers import read_texts  # noqa: E402

REQUEST = post("/v1/generate", b'{"prompt": "w1"}')
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PAUSE_S = 0.02


def lines(*events):
    return "".join(json.dumps(event) + "\n" for event in events).encode()


def chunk(content):
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


async def read_from(answer, clients, texts):
    """Read texts from a server that pauses before each part of ``answer``; return them and the most at a time."""
    writing, most = 0, 0

    async def serve(reader, writer):
        nonlocal writing, most
        try:
            while await reader.readexactly(len(REQUEST)):
                writing += 1
                most = max(most, writing)
                for part in answer:
                    await asyncio.sleep(PAUSE_S)
                    writer.write(part)
                writing -= 1
        except asyncio.IncompleteReadError:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        written, seconds = await read_texts(server.sockets[0].getsockname()[1], clients, [REQUEST] * texts)
    return written, seconds, most


def test_clients_share_requests_and_count_tokens_wherever_parts_are_cut():
    body = lines({"text": "w1"}, {"text": " w2 w3"}, {"text": " w4"}, {"done": {"finished": "length"}})
    answer = [HEAD + chunk(body[:12]), chunk(body[12:30]), chunk(body[30:]) + chunk(b"")]
    written, seconds, most = asyncio.run(read_from(answer, clients=2, texts=5))
    assert [text.tokens for text in written] == [4] * 5
    assert most == 2
    assert seconds >= 0.9 * 3 * 3 * PAUSE_S  # one of two clients reads three of five texts, one after another
    for text in written:
        assert text.first >= 0.9 * PAUSE_S
        assert text.first + 3 * text.each >= 0.9 * 3 * PAUSE_S  # the last of four tokens


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nfull", "the server answers 429.*full"),
        (HEAD + chunk(lines({"text": "w1"}, {"error": "the model failed"})) + chunk(b""), "200.*the model failed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "the server answers 200"),
    ],
)
def test_a_text_that_does_not_come_whole_is_an_error(answer, said):
    with pytest.raises(RuntimeError, match=said):
        asyncio.run(read_from([answer], clients=1, texts=1))


def test_an_artifact_with_random_weights_is_what_an_export_writes(tmp_path):
    texts = Texts(tmp_path, "float32", length=32, device="cpu", tiny=True)
    artifact = texts.artifact(Variant("precomposed"))
    assert artifact.about["precomposed"]
    predictor = artifact.predictor()
    warm_up(Engine(predictor, Settings(artifact=str(artifact.path))), artifact.golden)
    [prompt] = texts.prompts([20])
    assert len(predictor.encode({"prompt": prompt}).payload["ids"]) == 20
    assert texts.artifact(Variant("precomposed")).version == artifact.version
    about = artifact.path / ABOUT
    about.write_text(about.read_text().replace('"metrics": {}', '"metrics": {"valid": 1}'))
    with pytest.raises(ArtifactError, match="checksum"):
        load_artifact(artifact.path)


@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu(tmp_path):
    options = ["--tiny", "--clients", "1", "3", "--rounds", "2", "--new-tokens", "4", "--json", str(tmp_path / "json")]
    command = [sys.executable, "benchmarks/serve_texts.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "json").read_text())["texts"]
    assert [(one["clients"], one["texts"]) for one in found] == [(1, 2), (3, 6)]
    assert all(one["tokens_per_s"] > 0 and one["first_ms"]["p50"] > 0 for one in found)
    assert "first token ms" in done.stdout
