"""Bad requests are refused with the name of the field, whatever they contain; good ones never are."""

import base64
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_predictors import KINDS, LENGTH, png, predictor, requests

from intbmoe.tasks.serving.requests import Encoded, RequestError, from_wire, to_wire
from intbmoe.tasks.travel import fields as journeys

kinds = pytest.mark.parametrize("kind", KINDS)
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**5000), max_value=10**5000)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=20),  # including halves of surrogate pairs
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = ["history", "now", "profile", "image", "prompt", "top_n", "visited", "explain", "max_tokens", "seed", "time"]
REQUIRED = {"classify": "image", "items": "history", "places": "now", "generate": "prompt"}
"""The field that may not be left out."""


def refusal(kind, request):
    """The error message, or None; any other exception than a RequestError fails the test."""
    try:
        assert isinstance(predictor(kind).encode(request), Encoded)
    except RequestError as error:
        return error
    return None


@kinds
@quick
@given(request=JSON | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), JSON, max_size=6))
def test_any_json_is_encoded_or_refused(kind, request):
    error = refusal(kind, request)
    if error is not None:
        json.dumps([error.field, str(error)], ensure_ascii=False).encode()  # it can be put into an answer
        assert len(str(error)) < 500


@kinds
@quick
@given(data=st.data())
def test_one_bad_value_in_a_good_request_is_refused_by_name(kind, data):
    """Any one value is replaced: either the new one is allowed there, or the error says exactly where it is."""
    request = json.loads(json.dumps(requests(kind, 4)[data.draw(st.integers(0, 3))]))
    path, where = [], request
    while isinstance(where, dict | list) and where and (not path or data.draw(st.booleans())):
        step = data.draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
        path.append(step)
        holder, where = where, where[step]
    value = data.draw(JSON)
    holder[path[-1]] = value
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    error = refusal(kind, request)
    # A valid time may make the next one too early; a record may have an error inside.
    if error is not None:
        assert error.field.startswith(name) or error.field.endswith("time") or name.startswith(error.field)


@kinds
def test_a_field_that_is_not_there_is_said_to_be_missing(kind):
    assert str(refusal(kind, {})) == f"the field {REQUIRED[kind]} is missing"


@kinds
def test_a_misspelt_field_is_named_with_the_one_that_is_meant(kind):
    required = REQUIRED[kind]
    misspelt = required[:-1] + required[-1] * 2
    assert str(refusal(kind, {misspelt: []})) == f"there is no field {misspelt!r}: did you mean {required!r}?"


@kinds
def test_bad_fields_are_named(kind):
    encode, good = predictor(kind).encode, requests(kind, 1)[0]
    required = REQUIRED[kind]
    cases = [
        ({name: value for name, value in good.items() if name != required}, required),
        ({**good, required: 3}, required),
        ({**good, "nonsense": 1}, "nonsense"),
        ({**good, "explain": 1}, "explain"),
    ]
    if kind == "generate":
        cases += [
            ({**good, "max_tokens": 0}, "max_tokens"),
            ({**good, "max_tokens": LENGTH + 1}, "max_tokens"),
            ({**good, "temperature": -0.1}, "temperature"),
            ({**good, "temperature": float("nan")}, "temperature"),
            ({**good, "temperature": float("inf")}, "temperature"),
            ({**good, "seed": -1}, "seed"),
            ({**good, "seed": 1.5}, "seed"),
            ({**good, "prompt": "a" * (LENGTH + 1)}, "prompt"),
            ({**good, "prompt": "é" * (LENGTH // 2 + 1)}, "prompt"),  # two tokens each
            ({**good, "prompt": "\ud800"}, "prompt"),
        ]
    else:
        cases += [({**good, "top_n": top_n}, "top_n") for top_n in (0, -1, 10**6, True, "3", 2.5, None)]
    if kind == "items":
        cases += [({**good, "history": [3, 4, bad]}, "history[2]") for bad in (0, 61, "5", None, 1.5, True, 10**300)]
        cases += [({**good, "history": bad}, "history") for bad in ([], [1] * 1001, {}, "123")]
        cases += [({**good, "visited": "never"}, "visited")]
    if kind == "places":
        session, now = {"time": 5, "place": 3}, {"time": 10}
        cases += [
            ({"history": [session, {**session, name: bad}], "now": now}, f"history[1].{name}")
            for name, bad in (
                ("time", 11.5), ("time", None), ("time", -1), ("time", 4), ("place", 4), ("place", 270), ("place", "3"),
                ("via", 1), ("cell", 12), ("cell", 10), ("region", 5), ("weather", 0), ("mode", True), ("lat", 3),
            )
        ]  # fmt: skip
        cases += [
            ({"history": [session, 7], "now": now}, "history[1]"),
            ({"history": [{"place": 3}], "now": now}, "history[0].time"),
            ({"history": [session], "now": {"time": 4}}, "now.time"),
            ({"history": [session], "now": {}}, "now.time"),
            ({"now": {"time": 1, "cell": 17}}, "now.cell"),
            ({"now": {"time": 1, "place": 3}}, "now.place"),
            ({"now": now, "profile": {"profile_2": 4}}, "profile.profile_2"),
            ({"now": now, "profile": {"age": 4}}, "profile.age"),
            ({"now": now, "history": [session] * 1001}, "history"),
        ]
    for request, field in cases:
        with pytest.raises(RequestError) as caught:
            encode(request)
        assert caught.value.field == field, request
        assert field in str(caught.value)
    for request in ([], None, 3, "text"):
        with pytest.raises(RequestError):
            encode(request)


def test_images_that_are_none_are_refused():
    encode = predictor("classify").encode
    whole = base64.b64decode(png(np.random.default_rng(0)))
    bomb = png(np.random.default_rng(0), 2000, 1)  # long and thin: scaled to 8 pixels high it would be 16,000 wide
    as_text = [base64.b64encode(part).decode() for part in (b"", b"GIF89a", whole[:40], whole[:70], b"\x00" * 100)]
    for image in [*as_text, "not base64!", "é", "abc", bomb]:
        with pytest.raises(RequestError) as caught:
            encode({"image": image})
        assert caught.value.field == "image"


@quick
@given(at=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_damaged_image_is_read_or_refused(at, byte):
    content = bytearray(base64.b64decode(png(np.random.default_rng(0), 12, 12)))
    content[at % len(content)] = byte
    error = refusal("classify", {"image": base64.b64encode(content).decode()})
    assert error is None or error.field == "image"


@kinds
@quick
@given(data=st.data())
def test_what_the_schema_allows_is_encoded_and_nothing_else(kind, data):
    """Except for what no schema can say: a catalogue's ids, the order of times, whole images, tokens of a text."""
    jsonschema = pytest.importorskip("jsonschema")
    asked = predictor(kind)
    request = json.loads(json.dumps(requests(kind, 6)[data.draw(st.integers(0, 5))]))
    for name in data.draw(st.lists(st.sampled_from(sorted(request)), max_size=2)):
        request[name] = data.draw(st.integers(-2, 70) | st.booleans() | st.none() | st.floats(0, 3) | st.just([1, 2]))
    allowed = jsonschema.Draft202012Validator(asked.request_schema).is_valid(request)
    error = refusal(kind, request)
    if allowed and error is not None:
        assert error.field.rpartition(".")[2] in ("time", "cell", "place", "via", "image", "prompt")
    assert allowed or error is not None


@kinds
def test_schemas_are_schemas_and_their_examples_follow_them(kind):
    jsonschema = pytest.importorskip("jsonschema")
    schema = predictor(kind).request_schema
    jsonschema.Draft202012Validator.check_schema(schema)
    for example in schema["examples"]:
        jsonschema.validate(example, schema)
        predictor(kind).encode(example)
    limits, fields = predictor(kind).limits, schema["properties"]
    assert limits.body_bytes > 4 * len(json.dumps(requests(kind, 1)[0]))
    if kind in ("items", "places"):
        assert fields["history"]["maxItems"] == limits.history
    if kind == "generate":
        assert fields["max_tokens"]["maximum"] == limits.max_tokens
    else:
        assert fields["top_n"]["maximum"] == limits.top_n


@quick
@given(st.lists(st.integers(-5, 40) | st.none() | st.booleans() | st.floats(0, 9) | st.just(10**30), min_size=1))
def test_a_large_catalogue_is_searched_as_a_small_one_is_looked_up(values):
    def read(limit):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journeys, "LARGEST_TABLE", limit)
            field = journeys.Coded(np.array([-3, 0, 1, 7, 8, 31]))
        try:
            return field.read(values, lambda number: f"[{number}]")
        except RequestError as error:
            return str(error)

    assert read(0) == read(10)


def test_left_out_and_null_are_the_same_to_a_journey():
    encode = predictor("places").encode
    session = {"time": 5, "place": 3}
    empty = dict.fromkeys(("cell", "region", "weather", "via", "mode", "action"))
    short, full = (to_wire(encode({"history": [one], "now": {"time": 9}})) for one in (session, {**session, **empty}))
    assert short == full
    whole = to_wire(encode({"history": [{"time": 5.0, "place": 3.0}], "now": {"time": 9}}))
    assert whole == short  # JSON has one kind of number


def test_the_wire_carries_arrays_and_nothing_that_runs():
    arrays = {
        name: np.arange(6, dtype=name).reshape(2, 3) for name in ("uint8", "int32", "int64", "float32", "float64")
    }
    sent = Encoded(7, {**arrays, "empty": np.zeros((0, 4), np.int32), "n": 3, "t": 0.5, "text": "é", "flag": True})
    got = from_wire(to_wire(sent))
    assert got.tokens == 7
    assert got.payload.keys() == sent.payload.keys()
    for name, value in sent.payload.items():
        if isinstance(value, np.ndarray):
            assert got.payload[name].dtype == value.dtype
            assert np.array_equal(got.payload[name], value)
        else:
            assert got.payload[name] == value
    with pytest.raises(TypeError, match="cannot be sent"):
        to_wire(Encoded(1, {"object": np.array([object()])}))
    with pytest.raises(TypeError, match="cannot be sent"):
        to_wire(Encoded(1, {"function": print}))
