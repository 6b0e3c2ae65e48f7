import copy
import pickle
import re
from dataclasses import FrozenInstanceError, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
import yaml

from intbmoe.recipes import check_options, option_types
from intbmoe.registry import list_methods
from intbmoe.settings import AtMost, Checked, MustBe, Positive, PositiveInt, Share, from_plain, to_plain


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
        ({"name": "x", "kind": "c"}, "kind='c' is not allowed: kind must be 'a' or 'b'"),
        ({"name": "x", "size": "3"}, "size='3' is not allowed: size must be an integer or a list"),
        ({"name": "x", "flag": 1}, "flag=1 is not allowed: flag must be True or False"),
    ],
)
def test_errors_say_where_and_what(data, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_plain(Outer, data, "")


def test_numbers_as_people_write_them():
    """YAML 1.1 reads 1e-3 as a string."""
    data = yaml.safe_load("{name: x, inner: {rate: 1e-3}, pair: [1, 2]}")
    assert isinstance(data["inner"]["rate"], str)
    read = from_plain(Outer, data, "")
    assert read.inner.rate == 1e-3
    assert from_plain(str, Path("a/b"), "path") == "a/b"
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


@dataclass(frozen=True)
class Base(Checked):
    experts: PositiveInt = 8
    rate: Positive | None = None


@dataclass(frozen=True)
class Router(Base):
    top_k: Annotated[PositiveInt | None, AtMost("experts")] = 2
    dropout: Share = 0
    kind: Literal["soft", "hard"] = "soft"
    only: Annotated[Literal[1], MustBe("1 in a router")] = 1
    even: Annotated[PositiveInt, MustBe("an even integer", lambda value: value % 2 == 0)] = 2
    ranks: tuple[PositiveInt, PositiveInt] = (4, 4)
    sizes: PositiveInt | tuple[PositiveInt, ...] = 1
    noisy: bool = False
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"experts": 0}, "experts=0 is not allowed: experts must be an integer of at least 1"),
        ({"experts": True}, "experts=True is not allowed: experts must be an integer of at least 1"),
        ({"rate": float("inf")}, "rate=inf is not allowed: rate must be a positive finite number or None"),
        ({"rate": "fast"}, "rate='fast' is not allowed"),
        ({"top_k": 9}, "top_k=9 is not allowed: top_k must be at most experts (8)"),
        ({"dropout": 1}, "dropout=1 is not allowed: dropout must be a number in [0, 1)"),
        ({"dropout": float("nan")}, "dropout=nan is not allowed"),
        ({"kind": "sof"}, "kind='sof' is not allowed: kind must be 'soft' or 'hard'"),
        ({"only": 2}, "only=2 is not allowed: only must be 1 in a router"),
        ({"even": 3}, "even=3 is not allowed: even must be an even integer"),
        ({"even": 0}, "even=0 is not allowed: even must be an even integer"),
        ({"ranks": (4,)}, "ranks=(4,) is not allowed: ranks must be a list of 2"),
        ({"ranks": (4, 0)}, "ranks[1]=0 is not allowed: ranks[1] must be an integer of at least 1"),
        ({"sizes": (1, 0)}, "sizes=(1, 0) is not allowed: sizes must be an integer of at least 1 or a list"),
        ({"noisy": 1}, "noisy=1 is not allowed: noisy must be True or False"),
        ({"inner": 1}, "inner=1 is not allowed: inner must be a mapping with the settings of Inner"),
    ],
)
def test_annotations_are_checked_when_settings_are_made_and_changed(given, message):
    for make in (lambda: Router(**given), lambda: replace(Router(), **given)):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()
    (name,) = given
    with pytest.raises(ValueError, match=rf"moe(\.|: ){name}.*is not allowed"):
        from_plain(Router, given, "moe")


def test_checked_settings_are_converted_and_stay_frozen():
    with torch.device("meta"):
        router = Router(rate=3, top_k=None, ranks=[1, 2], sizes=[3])
    assert (router.rate, router.ranks, router.sizes) == (3.0, (1, 2), (3,))
    assert isinstance(router.rate, float)
    assert router == copy.deepcopy(router) == pickle.loads(pickle.dumps(router)) == replace(router)
    assert from_plain(Router, yaml.safe_load(yaml.safe_dump(to_plain(router))), "") == router
    with pytest.raises(FrozenInstanceError):
        router.rate = 1.0
