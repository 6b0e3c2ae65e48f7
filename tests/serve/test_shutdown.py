"""Shutdown under load: every request that was sent is answered."""

import http.client
import os
import signal
import socket
import threading
import time
from collections import Counter

import pytest
from fake_model import write_artifact
from server import Server

BODY, HEADERS = b'{"history": [1, 2]}', {"content-type": "application/json"}


class Clients:
    """Threads that send requests until no connection is possible; half reuse a connection, half open new ones."""

    def __init__(self, port, count):
        self.port, self.found = port, Counter()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number % 2 == 0,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, keeps):
        connection = None
        while not self._stop.is_set():
            try:
                if connection is None:
                    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
                    connection.connect()
            except OSError:
                return  # nothing was sent
            try:
                connection.request("POST", "/v1/recommend", BODY, HEADERS)
                response = connection.getresponse()
                response.read()
                self.found[response.status] += 1
                if not keeps or response.will_close:
                    connection.close()
                    connection = None
            except (OSError, http.client.HTTPException) as error:
                self.found[type(error).__name__] += 1
                return

    def end(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self.found


def end_under_load(folder, number, clients=24, **settings):
    with Server(artifact=write_artifact(folder, delay_ms=5), **settings) as server:
        asking = Clients(server.port, clients)
        time.sleep(0.7)
        server.process.send_signal(number)
        status = server.process.wait(30)
        return asking.end(), status


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(4))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_that_was_sent_is_lost_in_eight_tries(tmp_path, number, attempt):
    found, status = end_under_load(tmp_path, number, clients=64, fronts=2)
    assert status == 0
    assert set(found) == {200}


def test_what_is_not_accepted_yet_and_what_is_half_sent_is_answered(tmp_path):
    """A front that was paused finds new connections with requests waiting."""
    head = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 19\r\n\r\n"
    with Server(artifact=write_artifact(tmp_path)) as server:
        address = ("127.0.0.1", server.port)
        idle, half, ahead = (socket.create_connection(address, timeout=20) for _ in range(3))
        half.sendall(head[:40])
        time.sleep(0.2)
        [front] = server.front_pids()
        os.kill(front, signal.SIGSTOP)
        waiting = [socket.create_connection(address, timeout=20) for _ in range(50)]
        for client in waiting:
            client.sendall(head + BODY)
        idle.sendall(head + BODY)
        ahead.sendall((head + BODY) * 5)
        asking = Clients(server.port, 8)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        os.kill(front, signal.SIGCONT)
        half.sendall(head[40:] + BODY)
        assert [whole(client).count(b"HTTP/1.1 200") for client in (*waiting, idle, half)] == [1] * 52
        assert whole(ahead).count(b"HTTP/1.1 200") == 5
        assert server.process.wait(20) == 0
        assert set(asking.end()) <= {200}


def whole(client):
    data = b""
    while part := client.recv(65_536):
        data += part
    client.close()
    return data
