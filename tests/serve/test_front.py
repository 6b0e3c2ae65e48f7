import asyncio
import time
from types import SimpleNamespace

import pytest

from intbmoe.serve.front import _encode, parse_json
from intbmoe.serve.http import HttpError
from intbmoe.serve.links import Call
from intbmoe.tasks.serving.requests import Encoded, Limits, RequestError


class Encoder:
    """Takes ``seconds``, or refuses."""

    def __init__(self, seconds, image_pixels):
        self.seconds, self.limits = seconds, Limits(body_bytes=100, image_pixels=image_pixels)

    def encode(self, request):
        if "bad" in request:
            raise RequestError("bad", 1, "left out")
        time.sleep(self.seconds)
        return Encoded(1, {})


def encode(encoder, deadline_s=5.0, size=10, request=()):
    """How a call ended, whether it was encoded, and the longest that the event loop was not heard of meanwhile."""

    async def run():
        call = Call(dict(request), time.monotonic() + deadline_s)
        work = asyncio.create_task(_encode(call, SimpleNamespace(opened=SimpleNamespace(encoder=encoder)), size))
        gap, last = 0.0, time.monotonic()
        while not work.done():
            await asyncio.sleep(0.005)
            gap, last = max(gap, time.monotonic() - last), time.monotonic()
        work.result()
        return call.done.result().name if call.done.done() else None, bool(call.content), gap

    return asyncio.run(run())


def test_an_image_does_not_hold_others_up_however_small_its_file():
    outcome, encoded, gap = encode(Encoder(1.0, image_pixels=10**6))
    assert (outcome, encoded) == (None, True)
    assert gap < 0.8


def test_encoding_ends_with_the_deadline():
    started = time.monotonic()

    async def run():
        encoder = Encoder(1.5, image_pixels=10**6)
        call = Call({}, time.monotonic() + 0.05)
        await _encode(call, SimpleNamespace(opened=SimpleNamespace(encoder=encoder)), 10)
        return call.done.result().name, time.monotonic() - started

    outcome, seconds = asyncio.run(run())
    assert outcome == "expired"
    assert seconds < 1.2


@pytest.mark.parametrize("size", [10, 10**6])
def test_what_is_refused_is_refused_beside_the_loop_too(size):
    with pytest.raises(RequestError, match="bad=1 is not allowed"):
        encode(Encoder(0, image_pixels=None), size=size, request={"bad": 1})


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"null", "null"),
        (b"[]", "array"),
        (b'""', "string"),
        (b"1", "number"),
        (b"true", "boolean"),
    ],
)
def test_json_that_is_no_object_is_called_what_json_calls_it(body, kind):
    with pytest.raises(HttpError, match=f"the body is a JSON {kind}: it must be an object"):
        parse_json(body)
