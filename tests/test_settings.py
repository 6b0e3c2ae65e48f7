import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from intbmoe.recipes import check_options, option_types
from intbmoe.registry import list_methods
from intbmoe.settings import from_plain, to_plain


@dataclass(frozen=True)
class Inner:
    width: int = 3
    rate: float = 0.5

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"width={self.width} is not allowed")


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    pair: tuple[float, float] = (0.1, 0.2)
    layers: tuple[int, ...] = ()
    kind: Literal["a", "b"] = "a"
    path: Path | None = None
    size: int | tuple[int, ...] = 1
    options: dict[str, Any] = field(default_factory=dict)
    flag: bool = False


FULL = Outer("x", Inner(7, 1e-6), (1.0, 2.0), (0, 2), "b", Path("a/b"), (3, 4), {"k": 1, "l": [1], "n": None}, True)


@pytest.mark.parametrize("settings", [Outer("x"), FULL])
def test_plain_data_and_back_are_inverses_also_through_yaml(settings):
    plain = to_plain(settings)
    assert from_plain(Outer, plain, "") == settings
    assert from_plain(Outer, yaml.safe_load(yaml.safe_dump(plain)), "") == settings
    assert to_plain(from_plain(Outer, plain, "")) == plain


def test_what_is_left_out_has_its_default():
    assert from_plain(Outer, {"name": "x", "inner": {"width": 9}}, "") == Outer("x", Inner(9))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "x", "iner": {}}, "iner: no such setting: did you mean 'inner'"),
        ({"name": "x", "inner": {"widht": 1}}, "inner.widht: no such setting: did you mean 'width'"),
        ({}, "name is missing"),
        ({"name": 3}, "name=3 is not allowed: name must be a string"),
        ({"name": "x", "inner": 3}, "inner=3 is not allowed: inner must be a mapping"),
        ({"name": "x", "inner": {"width": 2.5}}, "inner.width=2.5 is not allowed: inner.width must be an integer"),
        ({"name": "x", "inner": {"width": True}}, "inner.width=True is not allowed"),
        ({"name": "x", "inner": {"width": 0}}, "inner: width=0 is not allowed"),
        (
            {"name": "x", "inner": {"rate": "fast"}},
            "inner.rate='fast' is not allowed: inner.rate must be a finite number",
        ),
        ({"name": "x", "pair": [1.0]}, "pair=[1.0] is not allowed: pair must be a list of 2"),
        ({"name": "x", "layers": [1, "2"]}, "layers[1]='2' is not allowed"),
        ({"name": "x", "kind": "c"}, "kind='c' is not allowed: kind must be one of 'a', 'b'"),
        ({"name": "x", "size": "3"}, "size='3' is not allowed: size must be an integer or a list"),
        ({"name": "x", "flag": 1}, "flag=1 is not allowed: flag must be true or false"),
    ],
)
def test_errors_say_where_and_what(data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_plain(Outer, data, "")


def test_numbers_as_people_write_them():
    """YAML 1.1 takes 1e-3 for a string."""
    data = yaml.safe_load("{name: x, inner: {rate: 1e-3}, pair: [1, 2]}")
    assert isinstance(data["inner"]["rate"], str)
    read = from_plain(Outer, data, "")
    assert read.inner.rate == 1e-3
    assert [type(value) for value in read.pair] == [float, float]


def test_what_yaml_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="object"):
        to_plain({"x": object()})


@pytest.mark.parametrize("method", list_methods())
def test_every_method_tells_its_options(method):
    known = option_types(method)
    assert "dim" not in known
    assert known["hidden"] is not Any


def test_options_are_checked_against_the_method():
    assert check_options("intbmoe", {"hidden": (), "top_k": 1}) == {"hidden": [], "top_k": 1}
    with pytest.raises(ValueError, match=r"moe.options.topk: intbmoe has no such option: did you mean 'top_k'"):
        check_options("intbmoe", {"topk": 1})
    with pytest.raises(ValueError, match=r"moe.options.top_k='2' is not allowed"):
        check_options("intbmoe", {"top_k": "2"})
    with pytest.raises(ValueError, match=r"moe.options: top_k=9 is not allowed: top_k must be at most blocks \(8\)"):
        check_options("intbmoe", {"top_k": 9})
