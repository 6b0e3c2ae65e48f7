"""What HTTP clients see of a server of real processes with a fake model."""

import json
import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_model import BUG, SLOW, write_artifact

PATH = "/v1/recommend"


def total(metrics, name, *parts):
    return sum(value for key, value in metrics.items() if key.startswith(name) and all(part in key for part in parts))


def test_an_answer(recommender):
    answer = recommender.post(PATH, {"history": [1, 2], "top_n": 2})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-model-version"] == "one"
    assert answer.json == {"results": [{"id": 3, "score": 1.0}, {"id": 4, "score": 0.5}]}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"history": []}, "history"),
        ({"history": [1], "top_n": 11}, "top_n"),
        ({"history": [1, "x"]}, "history[1]"),
        ({"history": [1], "topn": 1}, "topn"),
        ({}, "history"),
        ([1], "body"),
        (b"{", "body"),
        (b'{"history": [NaN]}', "body"),
        (b"\xff\xfe", "body"),
        (b"", "body"),
        (b"[" * 3000, "body"),
        (b'{"history": [' + b"9" * 4000 + b"]}", "history[0]"),
    ],
)
def test_bad_input_names_the_field(recommender, content, field):
    answer = recommender.post(PATH, content)
    assert answer.status == 422
    assert answer.json["error"]["field"] in (field, "body")
    assert answer.json["error"]["message"]


def test_what_is_not_there(recommender):
    assert recommender.post("/v1/generate", {"prompt": "x"}).status == 404
    assert "POST /v1/recommend" in recommender.post("/v1/classify", {}).json["error"]["message"]
    assert recommender.get("/nothing").status == 404
    assert recommender.get(PATH).status == 405
    assert recommender.request("POST", PATH, b"{}", {"content-type": "text/plain"}).status == 415


def test_a_large_body_is_refused_with_and_without_a_length(recommender):
    assert recommender.post(PATH, {"history": [1] * 5000}).status == 413
    assert recommender.post(PATH, b" " * 5_000_000).status == 413
    chunks = (b'{"history": [1' + b",1" * 500 for _ in range(20))
    answer = recommender.request("POST", PATH, chunks, {"content-type": "application/json"})
    assert answer.status == 413
    assert recommender.post(PATH, {"history": [1]}).status == 200


def test_a_failing_request_fails_alone(recommender):
    answer = recommender.post(PATH, {"history": [BUG]})
    assert answer.status == 500
    assert "bug in the model" not in answer.body.decode()
    assert recommender.post(PATH, {"history": [1]}).status == 200


def test_deadlines(recommender):
    started = time.monotonic()
    answer = recommender.post(PATH, {"history": [SLOW + 99]}, {"x-deadline-ms": "100"})
    assert answer.status == 504
    assert 0.05 < time.monotonic() - started < 0.99  # less than the model takes: the answer did not wait for it
    for wrong in ("x", "-1", "0", "nan", "inf"):
        answer = recommender.post(PATH, {"history": [1]}, {"x-deadline-ms": wrong})
        assert answer.status == 422
        assert answer.json["error"]["field"] == "x-deadline-ms"


def test_overload_is_refused_at_once_and_every_request_ends(recommender):
    before = recommender.metrics()
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda n: recommender.post(PATH, {"history": [SLOW + 10, n]}), range(40)))
    found = {status: sum(answer.status == status for answer in answers) for status in (200, 429, 504)}
    assert sum(found.values()) == 40
    assert found[200] >= 2
    assert found[429] >= 10
    for answer in answers:
        if answer.status == 429:
            assert int(answer.headers["retry-after"]) >= 1
    after = recommender.metrics()
    refused = [total(one, "intbmoe_requests_total", 'outcome="refused"') for one in (before, after)]
    assert refused[1] - refused[0] == found[429]


def test_alone_or_in_a_batch_and_batches_form(recommender):
    requests = [{"history": [n, n // 2], "top_n": 1 + n % 5} for n in range(60)]
    alone = [recommender.post(PATH, request).json for request in requests]
    before = recommender.metrics()

    def patient(request):
        for _ in range(100):
            answer = recommender.post(PATH, request)
            if answer.status != 429:
                return answer.json
            time.sleep(0.02)
        raise AssertionError("refused a hundred times")

    with ThreadPoolExecutor(8) as pool:
        keeping_busy = [pool.submit(recommender.post, PATH, {"history": [SLOW + 20]}) for _ in range(2)]
        assert list(pool.map(patient, requests)) == alone
        assert all(one.result().status == 200 for one in keeping_busy)
    after = recommender.metrics()
    batches, answered = (
        total(after, name) - total(before, name)
        for name in ("intbmoe_batch_requests_count", "intbmoe_batch_requests_sum")
    )
    assert answered == 62
    assert batches < answered


def test_clients_that_leave_are_dropped(recommender):
    def waiting():
        return total(recommender.metrics(), "intbmoe_requests_in_flight")

    before = recommender.metrics()
    clients = []
    body = json.dumps({"history": [SLOW + 60]}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    for _ in range(8):
        client = socket.create_connection(("127.0.0.1", recommender.port))
        client.sendall(head.encode() + body)
        clients.append(client)
    recommender.until(lambda: waiting() >= 4, 5)
    for client in clients:
        client.close()
    recommender.until(lambda: waiting() == 0, 5)
    after = recommender.metrics()
    left = [total(one, "intbmoe_requests_total", 'outcome="left"') for one in (before, after)]
    assert left[1] - left[0] >= 3
    computed = [total(one, "intbmoe_batch_requests_sum") for one in (before, after)]
    assert computed[1] - computed[0] < 8  # some were dropped before they were computed


def test_random_bytes_do_no_harm(recommender):
    rng = random.Random(0)
    heads = [
        b"",
        b"POST /v1/recommend HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n",
        b"\x16\x03\x01",
        b"PRI * HTTP/2.0\r\n",
    ]
    for number in range(60):
        with socket.create_connection(("127.0.0.1", recommender.port), timeout=5) as client:
            client.sendall(heads[number % len(heads)] + rng.randbytes(rng.randrange(1, 2000)))
            client.shutdown(socket.SHUT_WR)
            try:
                answer = client.recv(100)
            except ConnectionError:
                answer = b""
            assert answer == b"" or answer.split()[1][:1] == b"4"
    for number in range(40):
        body = rng.randbytes(rng.randrange(0, 300))
        path = rng.choice([PATH, "/v1/%00", "/" + "x" * 3000, "/..%2f..%2fetc/passwd", "/v1/model?" + "a=1&" * 100])
        answer = recommender.request(rng.choice(["POST", "PUT", "DELETE", "OPTIONS"]), path, body)
        assert 400 <= answer.status < 500, (number, path)
    # Batches left by clients of the previous test may still be running: an engine does not stop midway.
    recommender.until(lambda: recommender.post(PATH, {"history": [1]}).status == 200, 20)


def test_slow_clients_are_cut_off_and_hold_nobody_up(recommender):
    slow = [socket.create_connection(("127.0.0.1", recommender.port), timeout=10) for _ in range(20)]
    for number, client in enumerate(slow):
        client.sendall(b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\n")
        if number % 2:  # the head arrives, the body does not
            client.sendall(b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    started = time.monotonic()
    assert recommender.post(PATH, {"history": [1]}).status == 200
    assert time.monotonic() - started < 1
    for number, client in enumerate(slow):
        answer = client.recv(1000)
        assert b" 408 " in answer if number % 2 else answer == b""
        client.close()
    assert time.monotonic() - started < 10


def test_a_head_without_end_is_refused(recommender):
    with socket.create_connection(("127.0.0.1", recommender.port), timeout=5) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):  # noqa: PT012 — it may take several before the other side has closed
            for _ in range(1000):
                client.sendall(b"x: " + b"y" * 8000 + b"\r\n")
                time.sleep(0.001)


def test_health_model_and_metrics(recommender):
    assert recommender.get("/health/live").json == {"live": True}
    assert recommender.get("/health/ready").json["ready"] is True
    model = recommender.get("/v1/model").json
    assert model["version"] == "one"
    assert model["action"] == "recommend"
    assert model["limits"]["top_n"] == 10
    metrics = recommender.metrics()
    assert metrics['intbmoe_model_engines{version="one"}'] == 2
    assert total(metrics, "intbmoe_requests_total", 'outcome="answered"') > 0
    for name in ("queue_seconds", "compute_seconds", "batch_requests", "request_seconds"):
        assert total(metrics, f"intbmoe_{name}_count") > 0
    page = recommender.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'sha256-" in page.headers["content-security-policy"]


def test_a_page_of_another_site_may_not_reload(recommender):
    assert recommender.post("/v1/reload", {}, {"sec-fetch-site": "cross-site"}).status == 403


def test_the_wait_in_a_socket_is_counted(recommender):
    before, started = recommender.metrics(), time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(recommender.post, PATH, {"history": [SLOW + 60]}) for _ in range(2)]  # both engines
        time.sleep(0.2)
        assert recommender.post(PATH, {"history": [1]}).status == 200
        assert [one.result().status for one in busy] == [200, 200]
    after = recommender.metrics()
    waited = [total(one, "intbmoe_queue_seconds_sum") for one in (before, after)]
    assert 0.12 < waited[1] - waited[0] < 3 * (time.monotonic() - started)  # none waits longer than all took


def load_during(server, work, threads=4):
    """The answers to constant requests while ``work()`` runs."""
    going, answers = [True], []

    def ask(number):
        rng = random.Random(number)
        while going[0]:
            item = rng.randrange(600)
            started = time.monotonic()
            answer = server.post(PATH, {"history": [item], "top_n": 1})
            answers.append((answer, item, time.monotonic() - started))
            time.sleep(0.005)

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(ask, number) for number in range(threads)]
        try:
            work()
        finally:
            going[0] = False
        for future in futures:
            future.result()
    return answers


def test_a_killed_engine_comes_back_and_no_request_hangs(recommender):
    before = recommender.engine_pids()
    assert len(before) == 2

    def kill():
        time.sleep(0.3)
        os.kill(before[0], signal.SIGKILL)
        recommender.until(lambda: len(set(recommender.engine_pids()) - set(before)) == 1, 20)
        recommender.until(lambda: recommender.metrics().get('intbmoe_model_engines{version="one"}') == 2, 60)

    answers = load_during(recommender, kill)
    assert len(answers) > 20
    for answer, item, seconds in answers:
        assert answer.status in (200, 503)
        assert seconds < 2.5
        if answer.status == 200:
            assert answer.json["results"][0]["id"] == item
    assert sum(answer.status == 503 for answer, *_ in answers) == 0  # the other engine took them over


def test_reload_under_load_fails_no_request(recommender):
    folder = recommender.folder
    write_artifact(folder / "two", version="two", offset=1000)
    results = []

    def switch():
        time.sleep(0.2)
        (folder / "next").symlink_to("two")
        (folder / "next").rename(folder / "artifact")
        results.append(recommender.post("/v1/reload", {}, timeout=90))
        time.sleep(0.2)

    answers = load_during(recommender, switch)
    assert results[0].status == 200
    assert results[0].json == {"version": "two", "previous": "one"}
    versions = set()
    for answer, item, _ in answers:
        assert answer.status == 200
        versions.add(answer.headers["x-model-version"])
        offset = {"one": 0, "two": 1000}[answer.headers["x-model-version"]]
        assert answer.json["results"][0]["id"] == item + offset
    assert versions == {"one", "two"}
    recommender.until(lambda: len(recommender.engine_pids()) == 2, 10)
    metrics = recommender.metrics()
    assert metrics['intbmoe_model_engines{version="two"}'] == 2
    assert 'intbmoe_model_engines{version="one"}' not in metrics


@pytest.mark.parametrize(
    ("about", "why"),
    [
        pytest.param({"broken": "its weights are torn"}, "its weights are torn", marks=pytest.mark.slow),
        ({"wrong_golden": True}, "keeps serving: golden request 0"),
    ],
)
def test_a_broken_artifact_leaves_the_old_one_serving(recommender, about, why):
    serving = recommender.get("/v1/model").json["version"]
    folder, target = recommender.folder, os.readlink(recommender.folder / "artifact")
    write_artifact(folder / "bad", version="bad", **about)
    for name in ("bad", target):
        (folder / "next").symlink_to(name)
        (folder / "next").rename(folder / "artifact")
        if name == "bad":
            answer = recommender.post("/v1/reload", {}, timeout=90)
    assert answer.status == 409
    assert why in answer.json["error"]["message"]
    assert f"version {serving} keeps serving" in answer.json["error"]["message"]
    assert recommender.post(PATH, {"history": [1]}).headers["x-model-version"] == serving
    assert len(recommender.engine_pids()) == 2


def test_requests_sent_ahead_are_few_lines_in_the_log(recommender):
    """Each such connection used to write 48."""
    slow = b'{"history": [%d]}' % (SLOW + 10)
    head = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    first, page = head % len(slow) + slow, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    before = len(recommender.log)
    for sent in (
        first + page * 60,
        first * 20,
        first + page * 200,
        first + page * 30 + b"\0 nonsense\r\n\r\n",
        page * 60,
    ):
        for waits in (False, True):
            with socket.create_connection(("127.0.0.1", recommender.port), timeout=5) as client:
                client.sendall(sent)
                if waits:
                    client.recv(4096)
    recommender.until(lambda: recommender.metrics()["intbmoe_requests_in_flight"] == 0, 10)
    time.sleep(0.2)
    assert len(recommender.log) - before <= 10, "".join(recommender.log[before:][:100])
