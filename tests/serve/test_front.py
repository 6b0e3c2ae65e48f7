"""What a front does with a body before an engine sees it."""

import asyncio
import json
import time
import tracemalloc
from types import SimpleNamespace

import pytest

from intbmoe.serve.bodies import most_values, parse_json
from intbmoe.serve.http import HttpError
from intbmoe.serve.links import LARGE_BODY, Call, ServedVersion
from intbmoe.tasks.serving.fields import Integer, Many, Record, Text
from intbmoe.tasks.serving.requests import Encoded, RequestError


class Encoder:
    """An encoder that takes ``seconds``, or refuses."""

    action, streams, request_schema = "wait", False, {}

    def __init__(self, seconds):
        self.seconds = seconds

    def encode(self, request):
        if "bad" in request:
            raise RequestError("bad", 1, "left out")
        time.sleep(self.seconds)
        return Encoded(1, {})


def encode(encoder, deadline_s=5.0, size=LARGE_BODY, request=()):
    """How a call ended, whether it was encoded, and the longest time that the event loop was blocked."""

    async def run():
        call = Call(json.dumps(dict(request)).encode().ljust(size), time.monotonic() + deadline_s)
        work = asyncio.create_task(call.encode(ServedVersion(1, SimpleNamespace(encoder=encoder))))
        gap, last = 0.0, time.monotonic()
        while not work.done():
            await asyncio.sleep(0.005)
            gap, last = max(gap, time.monotonic() - last), time.monotonic()
        work.result()
        return call.done.result().name if call.done.done() else None, bool(call.content), gap

    return asyncio.run(run())


def test_a_large_body_does_not_hold_others_up():
    outcome, encoded, gap = encode(Encoder(1.0))
    assert (outcome, encoded) == (None, True)
    assert gap < 0.8


def test_encoding_ends_with_the_deadline():
    assert encode(Encoder(1.5), deadline_s=0.05)[:2] == ("expired", False)


@pytest.mark.parametrize("size", [10, 10**6])
def test_what_is_refused_is_refused_beside_the_loop_too(size):
    with pytest.raises(HttpError, match="bad=1 is not allowed") as refusal:
        encode(Encoder(0), size=size, request={"bad": 1})
    assert (refusal.value.status, refusal.value.content["field"]) == (422, "bad")


SCHEMA = Record({"history": (Many(Record({"a": (Integer(0, 9), 0)}), 100), []), "name": (Text(10**6), "")}).schema()
MOST = most_values(SCHEMA)
BOMBS = {
    "lists": b'{"history":[' + b",".join([b"[]"] * 10**6) + b"]}",
    "numbers": b'{"history":[' + b",".join([b"1"] * 10**6) + b"]}",
    "strings": b'{"history":[' + b",".join([b'""'] * 10**6) + b"]}",
    "fields": b"{" + b",".join(b'"%d":1' % number for number in range(200_000)) + b"}",
    "objects": b'{"history":' + b'{"a":' * 500_000,
    "depth": b"[" * 10**6,
    "strings without commas": b'{"a":' + b'""' * 10**6 + b"," * 10_000,
    "escapes": b'{"a":"' + b'\\"' * 10_000 + b'"' + b",[]" * 10**5,
    "one field again": b'{"name":1' + b',"name":1' * 10**5 + b"}",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_json_that_costs_more_than_a_request_may_is_refused_before_it_is_parsed(bomb):
    tracemalloc.start()
    with pytest.raises(HttpError) as refusal:
        parse_json(bomb, MOST)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refusal.value.status == 422
    assert most < 2.5 * len(bomb)  # as text, to find what is wrong; parsed, it would take up to thirty times as much


def test_what_the_schema_allows_is_parsed_however_many_brackets_are_in_its_strings():
    body = json.dumps({"history": [{"a": 1}] * 100, "name": '[,{"\\' * 100_000}).encode()
    assert len(parse_json(body, MOST)["history"]) == 100
    too_many = json.dumps({"history": [{"a": 1}] * 130}).encode()  # left to the schema, whose message is better
    assert len(parse_json(too_many, MOST)["history"]) == 130


def test_deep_json_is_refused_without_an_error_of_the_server():
    with pytest.raises(HttpError, match="the body is not JSON"):
        parse_json(b'{"history":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@pytest.mark.parametrize("body", [b'{"a":1,"a":1}', b'{"b":[{"a":1,"c":2,"a":[]}]}'])
def test_a_field_that_comes_twice_is_refused(body):
    with pytest.raises(HttpError, match="the field 'a' appears twice"):
        parse_json(body)


@pytest.mark.parametrize("number", [b"9" * 5000, b"NaN", b"Infinity", b"1" + b"0" * 10**6])
def test_numbers_that_are_none_are_refused(number):
    with pytest.raises(HttpError, match="the body is not JSON"):
        parse_json(b'{"a":' + number + b"}")


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
