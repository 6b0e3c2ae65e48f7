"""A request's body: JSON that costs no more to parse than an honest request, encoded for the engines.

Parsing a body of ``[],[],…`` takes thirty times its bytes, and holds the interpreter's lock meanwhile. So the values in
a body are counted before it is parsed: outside strings, each value but the first has a comma or a bracket before it. A
request may have as many values as its schema allows, and some more, so that the schema's own message can say what is
too many.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from intbmoe.serve.http import HttpError
from intbmoe.tasks.serving import Predictor, RequestError
from intbmoe.tasks.serving.requests import shown, to_wire

KINDS = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
SEVERAL, SOME = 4, 1000  # a body may have SEVERAL times as many values as its schema allows, plus SOME
VALUE = re.compile(rb'[,\[{]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # the character before a value, or a string
BEFORE_VALUES = b",[{"


class Prepared(NamedTuple):
    """A request as an engine takes it."""

    tokens: int
    content: bytes
    streamed: bool  # whether its text is sent piece by piece


def prepare(encoder: Predictor, most_values: float, body: bytes) -> Prepared:
    """Check and encode a body; raises ``HttpError``."""
    content = parse_json(body, most_values)
    streamed = encoder.streams and _is_streamed(content)
    try:
        encoded = encoder.encode(content)
    except RequestError as error:
        raise bad_request(error) from error
    return Prepared(encoded.tokens, to_wire(encoded), streamed)


def bad_request(error: RequestError) -> HttpError:
    return HttpError(422, str(error), field=error.field, outcome="bad")


def most_values(schema: Mapping[str, Any]) -> float:
    """Return how many values a body with this schema may have, for ``parse_json``."""
    return SEVERAL * _values(schema) + SOME


def _values(schema: Mapping[str, Any]) -> float:
    """Count objects, lists, strings, numbers and so on, including nested ones and the names of fields."""
    inside = sum(1 + _values(field) for field in schema.get("properties", {}).values())
    if "items" in schema:
        inside += schema.get("maxItems", float("inf")) * _values(schema["items"])
    return 1 + inside


def parse_json(body: bytes, most_values: float = float("inf")) -> dict[str, Any]:
    if len(body) > 2 * most_values and _has_more_values(body, most_values):
        message = f"the body has more than {most_values:g} JSON values: send no more than this model's schema allows"
        raise HttpError(422, message, field="body", outcome="bad")
    try:
        content = DECODER.decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise HttpError(422, f"the body is not JSON: {error}"[:200], field="body", outcome="bad") from error
    if not isinstance(content, dict):
        message = f"the body is a JSON {KINDS[type(content)]}: it must be an object"
        raise HttpError(422, message, field="body", outcome="bad")
    return content


def _has_more_values(body: bytes, most: float) -> bool:
    if sum(map(body.count, BEFORE_VALUES)) <= most:  # also counts those in strings; enough for nearly all bodies
        return False
    # Each value and each field name is found at most twice: by the character before it, and as a string.
    return any(number > 2 * most for number, _ in enumerate(VALUE.finditer(body)))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse repeated names: which one counts depends on the parser, and a proxy may have checked the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the field {shown(twice)} appears twice in one object")
    return found


DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_no_name_twice)


def _is_streamed(content: Mapping[str, Any]) -> bool:
    """Whether to send a text piece by piece; a text with an explanation is sent whole."""
    explained = content.get("explain") is True
    streamed = content.get("stream", not explained) is not False
    if streamed and explained:
        message = "stream=true is not allowed with explain=true: an explained text is sent whole, send stream=false"
        raise HttpError(422, message, field="stream", outcome="bad")
    return streamed
