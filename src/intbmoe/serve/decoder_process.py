"""Processes that decode untrusted input, each with a budget of CPU time and memory; ``decoders.py`` sends requests.

A host process opens artifacts and forks a decoder for each socket that it receives: a fork takes milliseconds, a new
interpreter seconds. A front forks its host before it does anything else; others start one with
``python -m intbmoe.serve.decoder_process LOADER CONTROL``.

front → host      {"fork": id, "number": version's number, "artifact": …, "version": …, "heavy": …}, with a socket
                  {"kill": id}
decoder → front   READY    then for each body:   ENCODED, tokens, content, streamed
                                                 BAD, status, message, field
                                                 HEAVY, if the request is too large for this decoder

The kernel counts CPU time and ends the process when it is used up, whatever the decoder is doing.
"""

import contextlib
import gc
import importlib
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgpack

from intbmoe.serve.bodies import bad_request, most_values, parse_json, prepare
from intbmoe.serve.http import HttpError
from intbmoe.serve.messages import unpacker
from intbmoe.tasks.serving import Predictor, RequestError

READY, ENCODED, BAD, HEAVY = range(4)
PARSE_S, PARSE_BYTE_S = 0.05, 30e-9  # CPU time to parse a body and its image's header: fixed, and per byte of the body
LIGHT_S = 0.35  # requests that may take longer go to the heavy decoder
LIGHT_BYTES, HEAVY_BYTES = 256 * 2**20, 1024 * 2**20  # memory of a decoder, beyond what it starts with
NICENESS = 10  # of the heavy decoder: other requests do not wait for it
READ = 1024 * 1024
log = logging.getLogger(__name__)


class Host:
    def __init__(self, loader: Any, control: socket.socket) -> None:
        self._loader, self._control = loader, control
        self._encoders: dict[int, tuple[str, Predictor]] = {}
        self._pids: dict[int, int] = {}

    def run(self) -> None:
        """Follow the front's orders until it is gone."""
        while True:
            select.select([self._control], [], [], 1.0)
            for number, pid in list(self._pids.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del self._pids[number]
            with contextlib.suppress(BlockingIOError):
                content, handed, _, _ = socket.recv_fds(self._control, 65_536, 1, socket.MSG_DONTWAIT)
                if not content:
                    break
                self._obey(json.loads(content), handed)
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)

    def _obey(self, message: dict[str, Any], handed: list[int]) -> None:
        if "kill" in message:
            if message["kill"] in self._pids:  # not reaped yet, so the pid still belongs to this process
                os.kill(self._pids[message["kill"]], signal.SIGKILL)
            return
        with socket.socket(fileno=handed[0]) as connection:
            try:
                version, encoder = self._open(message["number"], message["artifact"])
            except Exception:
                log.exception("cannot open %s for decoding", message["artifact"])
                return
            if version != message["version"]:
                log.error("%s holds version %s, but %s is served", message["artifact"], version, message["version"])
                return
            pid = os.fork()
            if pid:
                self._pids[message["fork"]] = pid
                return
            status = 1
            try:
                self._control.close()
                _limit(message["heavy"])
                _decode(connection, encoder, message["heavy"])
                status = 0
            except Exception:
                log.exception("a decoder failed")
            finally:
                os._exit(status)

    def _open(self, number: int, artifact: str) -> tuple[str, Predictor]:
        if number not in self._encoders:
            opened = self._loader.open_artifact(artifact)
            for old in sorted(self._encoders)[:-1]:  # only the newest version and the one being prepared are needed
                del self._encoders[old]
            self._encoders[number] = opened.version, opened.encoder
            gc.collect()
            gc.freeze()  # keeps the pages shared with the decoders
        return self._encoders[number]


def _limit(heavy: bool) -> None:
    if heavy:
        os.nice(NICENESS)
    if sys.platform == "linux":
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, kill this process, not the front
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = mapped + (HEAVY_BYTES if heavy else LIGHT_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process


def _decode(connection: socket.socket, encoder: Predictor, heavy: bool) -> None:
    connection.setblocking(True)
    connection.sendall(msgpack.packb((READY,)))
    bodies, most = unpacker(), most_values(encoder.request_schema)
    while data := connection.recv(READ):
        bodies.feed(data)
        for body in bodies:
            signal.setitimer(signal.ITIMER_PROF, _parsing_seconds(body))
            reply = _answer(encoder, most, body, heavy)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.sendall(msgpack.packb(reply))


def _answer(encoder: Predictor, most: float, body: bytes, heavy: bool) -> tuple[Any, ...]:
    try:
        try:
            seconds = encoder.encoding_seconds(parse_json(body, most))
        except RequestError as error:
            raise bad_request(error) from error
        if seconds > LIGHT_S and not heavy:
            return (HEAVY,)
        signal.setitimer(signal.ITIMER_PROF, _parsing_seconds(body) + seconds)  # it is parsed again
        return (ENCODED, *prepare(encoder, most, body))
    except HttpError as error:
        return BAD, error.status, error.content["message"], error.content.get("field")
    except MemoryError:
        return BAD, 422, "decoding this request takes more memory than allowed", "body"


def _parsing_seconds(body: bytes) -> float:
    return PARSE_S + PARSE_BYTE_S * len(body)


def fork_host(loader: str) -> socket.socket:
    """Fork a host from a process with one thread and no connections yet; return the socket connected to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    status = 1
    try:
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        Host(importlib.import_module(loader), theirs).run()
        status = 0
    except Exception:
        log.exception("the host of the decoders failed")
    finally:
        os._exit(status)


if __name__ == "__main__":
    Host(importlib.import_module(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))).run()
    os._exit(0)  # shutting down an interpreter with torch takes seconds
