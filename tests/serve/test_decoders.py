"""Processes that decode untrusted input: no input costs more than it may, and other requests go on."""

import asyncio
import os
import time

import pytest
from fake_model import BURN, CRASH, EAT, LARGE, open_artifact, write_artifact
from server import HERE, SOURCE

from intbmoe.serve.decoders import Decoders, spawned_host
from intbmoe.serve.http import HttpError


@pytest.fixture(scope="module")
def encode(tmp_path_factory):
    """Encodes several requests at once; returns the result and the seconds of each."""
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(SOURCE), path])
    artifact = write_artifact(tmp_path_factory.mktemp("artifact"), untrusted=True, encode_ms=1)
    runner = asyncio.Runner()
    ended = []
    decoders = Decoders(
        spawned_host("fake_model", lambda: ended.append(1)), 1, str(artifact), open_artifact(artifact), 2
    )
    os.environ["PYTHONPATH"] = path
    runner.run(decoders.open())

    async def one(items, seconds, leaves):
        started = time.monotonic()
        body = b'{"history": [%s]}' % b",".join(b"%d" % item for item in items)
        try:
            async with asyncio.timeout(leaves or seconds):
                found = await decoders.encode(body, started + seconds)
        except (HttpError, TimeoutError) as error:
            found = error
        return found, time.monotonic() - started

    async def several(requests, *times):
        return await asyncio.gather(*(one(items, *times) for items in requests))

    def encode(*requests, seconds=20.0, leaves=None):
        """``seconds`` is how long a client says it will wait, ``leaves`` is when it disconnects."""
        return runner.run(several(requests, seconds, leaves))

    encode.decoders, encode.runner = decoders, runner
    yield encode

    async def close():
        decoders.close()
        await asyncio.sleep(0.1)

    runner.run(close())
    runner.close()
    assert not ended


def test_requests_are_encoded_as_in_the_front(encode):
    [(found, _), (large, _), (bad, _)] = encode([1, 2, 3], [LARGE], [-1])
    assert (found.tokens, large.tokens, found.streamed) == (3, 1, False)
    assert (bad.status, bad.content["field"]) == (422, "history[0]")
    assert "must be an integer" in bad.content["message"]


@pytest.mark.parametrize("bomb", [BURN, CRASH])
def test_who_spends_more_than_it_may_is_ended_and_others_go_on(encode, bomb):
    """Each bomb ends a decoder; other requests wait for the next decoder, not for the bombs."""
    found = encode(*([[bomb]] * 6), *([[number] for number in range(1, 20)]))
    for refused, _ in found[:6]:
        assert refused.status == 422
        assert "costs more to decode" in refused.content["message"]
    assert [answer.tokens for answer, _ in found[6:]] == [1] * 19


def test_a_heavy_bomb_keeps_no_light_request_waiting(encode):
    found = encode([BURN, LARGE], *([[1]] * 10))
    assert found[0][0].status == 422
    assert max(seconds for _, seconds in found[1:]) < found[0][1]


def test_memory_is_limited(encode):
    [(refused, _), (light, _)] = encode([EAT], [1])
    assert (refused.status, light.tokens) == (422, 1)
    assert "more memory than allowed" in refused.content["message"]


def test_heavy_work_that_nobody_waits_for_is_ended(encode):
    [(_, whole)] = encode([BURN, LARGE])
    [(given_up, _)] = encode([BURN, LARGE], leaves=0.1)
    assert isinstance(given_up, TimeoutError)
    [(_, seconds)] = encode([LARGE])
    assert seconds < whole


def test_what_cannot_be_encoded_in_time_is_refused_at_once(encode):
    encode(*([[1]] * 40))
    found = encode(*([[1]] * 400), seconds=0.05)
    statuses = [error.status for error, _ in found if isinstance(error, HttpError)]
    assert statuses.count(429) > 200
    assert all(error.headers["retry-after"] == "1" for error, _ in found if isinstance(error, HttpError))
