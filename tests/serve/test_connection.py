"""Connections of misbehaving clients: those that send many requests ahead, and those that do not read."""

import contextlib
import json
import re
import socket
import threading
import time

import pytest
import uvicorn
import uvloop
from fake_model import SLOW, write_artifact

from intbmoe.serve import connection
from intbmoe.serve.connection import HEADERS_BYTES, SENT_AHEAD, Crowd, patient_protocol
from intbmoe.serve.door import Door
from intbmoe.serve.local import build_app
from intbmoe.serve.settings import Settings

PATIENCE = 0.5
PAGE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A front's HTTP server in a thread."""
    folder = write_artifact(tmp_path_factory.mktemp("artifact"))
    app = build_app(Settings(artifact=str(folder), loader="fake_model", deadline_ms=8000))
    crowd = Crowd()
    config = uvicorn.Config(app, http=patient_protocol(PATIENCE, crowd), lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    server.crowd = crowd
    server.listener = socket.create_server(("127.0.0.1", 0))
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # what is not read is soon not sent
    thread = threading.Thread(target=lambda: uvloop.run(server.serve(sockets=[server.listener])))
    thread.start()
    yield server
    server.should_exit = True
    thread.join(10)


def connect(server, address="127.0.0.1"):
    client = socket.socket()
    client.bind((address, 0))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(5)
    client.connect(("127.0.0.1", server.listener.getsockname()[1]))
    return client


def request(item):
    body = json.dumps({"history": [item], "top_n": 1}).encode()
    top = "POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    top += f"content-length: {len(body)}\r\n\r\n"
    return top.encode() + body


def open_connections(server, wanted, seconds):
    end = time.monotonic() + seconds
    while len(server.server_state.connections) != wanted and time.monotonic() < end:
        time.sleep(0.02)
    return len(server.server_state.connections)


def test_a_head_sent_ahead_of_an_answer_is_bounded_too(server):
    with connect(server) as client:
        client.sendall(request(SLOW + 99) + b"GET / HTTP/1.1\r\nx: ")
        sent = 0
        with pytest.raises(ConnectionError):  # noqa: PT012 — what is under way may still be taken
            for _ in range(100):
                client.sendall(b"y" * HEADERS_BYTES)
                sent += HEADERS_BYTES
                time.sleep(0.02)
        assert sent < 64 * HEADERS_BYTES
    assert open_connections(server, 0, 3) == 0


def test_clients_that_were_refused_are_read_again_one_after_the_other(server, monkeypatch):
    """Each asks again at once: together they get no more refusals than one would, and other clients are answered."""
    monkeypatch.setattr(connection, "REFUSAL_S", 0.1)
    refused, late = [], request(1).replace(b"host: x", b"host: x\r\nx-deadline-ms: 0.0001")
    started = time.monotonic()

    def ask_again():
        with connect(server) as client, contextlib.suppress(OSError):
            while time.monotonic() < started + 0.6:
                client.sendall(late)
                answer = b""
                while not answer.endswith(b"}}"):
                    answer += client.recv(4096)
                refused.append(answer)

    clients = [threading.Thread(target=ask_again) for _ in range(8)]
    with monkeypatch.context() as busy:
        busy.setattr(Door, "expected_seconds", lambda door: 0.001)
        for client in clients:
            client.start()
        with connect(server) as other:
            other.sendall(request(1))
            assert other.recv(4096).startswith(b"HTTP/1.1 200")
        for client in clients:
            client.join()
    assert all(b" 429 " in answer and b"retry-after: 1" in answer for answer in refused)
    assert 8 <= len(refused) <= 8 + (time.monotonic() - started) / 0.1


def test_two_requests_sent_at_once_are_both_answered(server):
    with connect(server) as client:
        client.sendall(request(1) + request(SLOW + 20) + request(3))
        data = b""
        while data.count(b"HTTP/1.1 200") < 3 or not data.endswith(b"}"):
            data += client.recv(4096)
        assert b'"id":1,' in data
        assert data.endswith(b'{"results":[{"id":3,"score":1.0}]}')


def test_who_does_not_read_is_cut_off(server):
    """Closing normally would wait until the client has read everything."""
    with connect(server) as client:
        client.sendall(PAGE * (SENT_AHEAD // 2))
        assert open_connections(server, 1, 1) == 1
        time.sleep(PATIENCE / 2)
        assert open_connections(server, 0, 6 * PATIENCE) == 0


def test_few_requests_are_kept_for_who_sends_many_ahead(server):
    """Each answer used to let uvicorn read some thousand more."""
    with connect(server) as client:
        end = time.monotonic() + 10
        with pytest.raises(ConnectionError):  # noqa: PT012 — what is under way may still be taken
            while time.monotonic() < end:
                client.sendall(PAGE * 100)
        for one in list(server.server_state.connections):
            assert len(one.pipeline) <= SENT_AHEAD
    assert open_connections(server, 0, 3) == 0


def test_nonsense_sent_ahead_does_not_take_the_place_of_an_answer(server):
    with connect(server) as client:
        client.sendall(request(SLOW + 30) + b"\0\0 nonsense\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert client.recv(4096) == b""
    with connect(server) as client:
        client.sendall(b"\0\0 nonsense\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 400")


def test_who_reads_slowly_but_reads_gets_all(server):
    with connect(server) as client:
        count, data = 20, 0
        client.sendall(PAGE * count)
        started = time.monotonic()
        client.settimeout(2)
        whole = None
        while whole is None or data < whole * count:
            part = client.recv(30_000)
            if whole is None:
                top, _ = part.split(b"\r\n\r\n", 1)
                whole = len(top) + 4 + int(re.search(rb"content-length: (\d+)", top.lower())[1])
            data += len(part)
            time.sleep(0.01)
        assert data == whole * count
        assert time.monotonic() - started > PATIENCE / 2


def test_connections_far_beyond_the_most_are_closed_unheard(server, monkeypatch):
    monkeypatch.setattr(server.config, "limit_concurrency", 3)
    monkeypatch.setattr(connection, "TOLD", 4)
    clients = [connect(server) for _ in range(20)]
    for client in clients:
        with contextlib.suppress(ConnectionError):
            client.sendall(request(SLOW + 40))  # none of them is idle
    assert open_connections(server, 7, 0.2) <= 7
    for client in clients:
        client.close()
    assert open_connections(server, 0, 3) == 0


def test_who_is_idle_makes_room_for_who_comes(server, monkeypatch):
    """One client's idle connections used to keep all others out for as long as they were kept alive."""
    monkeypatch.setattr(server.config, "limit_concurrency", 10)
    idle = [connect(server) for _ in range(30)]
    assert open_connections(server, 9, 2) <= 10
    for number in range(20):
        with connect(server) as client:
            client.sendall(request(number))
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
    for client in idle:
        client.close()
    assert open_connections(server, 0, 3) == 0


def test_one_address_has_a_part_of_the_connections(server, monkeypatch):
    monkeypatch.setattr(server.crowd, "per_address", 2)
    clients = [connect(server) for _ in range(2)]
    with connect(server) as more, connect(server, "127.0.0.2") as other:
        for client, status in ((more, b"HTTP/1.1 503"), (other, b"HTTP/1.1 200"), (clients[0], b"HTTP/1.1 200")):
            client.sendall(request(1))
            assert client.recv(4096).startswith(status)
    for client in clients:
        client.close()
    assert open_connections(server, 0, 3) == 0
    assert not server.crowd.by_address
    assert not server.crowd.idle


def test_who_has_closed_his_own_direction_is_answered(server):
    for sent in (request(SLOW + 20), request(SLOW + 20) + request(2)):
        with connect(server) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            data = b""
            while part := client.recv(4096):
                data += part
            assert data.count(b"HTTP/1.1 200") == sent.count(b"POST")
            assert data.endswith(b"}")
    assert open_connections(server, 0, 3) == 0


def test_who_has_gone_is_noticed_while_the_model_computes(server):
    before = left(server)
    with connect(server) as client:
        client.sendall(request(SLOW + 99))
        time.sleep(0.1)
    assert open_connections(server, 0, 0.6) == 0
    assert left(server) == before + 1


def left(server):
    with connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        data = b""
        while part := client.recv(65_536):
            data += part
    found = re.search(rb'requests_total\{action="recommend",outcome="left"\} (\S+)', data)
    return 0 if found is None else float(found[1])


@pytest.mark.parametrize("size", [-100, 100, 40_000])
def test_a_head_is_as_long_as_documented(server, size):
    """A head in one piece used to be accepted up to 256 kB."""
    head = b"GET /health/live HTTP/1.1\r\nhost: x\r\nx: "
    with connect(server) as client:
        client.sendall(head + b"y" * (HEADERS_BYTES + size - len(head)) + b"\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200" if size < 0 else b"HTTP/1.1 400")


def test_no_address_of_ours_leads_to_where_the_client_says(server):
    for path in (b"/metrics/", b"/health/live/", b"/v1/model/"):
        with connect(server) as client:
            client.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: other.example\r\n\r\n")
            answer = client.recv(4096)
            assert answer.startswith(b"HTTP/1.1 404")
            assert b"other.example" not in answer


def test_a_host_that_is_no_name_is_no_fault_of_the_server(server):
    for host in (b"[", b"]:", b"[::1", b"a b", b"\xff"):
        with connect(server) as client:
            client.sendall(b"GET /nothing HTTP/1.1\r\nhost: " + host + b"\r\n\r\n")
            assert client.recv(4096).startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), host


def test_the_address_of_a_server_is_not_shared_with_another():
    from intbmoe.serve.supervisor import open_listeners

    listeners = open_listeners("127.0.0.1", 0, 2)
    try:
        port = listeners[0].getsockname()[1]
        for count in (1, 2):
            with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
                open_listeners("127.0.0.1", port, count)
    finally:
        for listener in listeners:
            listener.close()
    for listener in open_listeners("127.0.0.1", port, 2):
        listener.close()
