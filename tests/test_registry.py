import importlib
import sys

import pytest

import intbmoe
from intbmoe import registry
from intbmoe.registry import _methods, find_method, register


def test_methods_are_listed_by_name_and_have_traits():
    names = intbmoe.list_methods()
    assert names == sorted(names)
    assert {"dense", "intbmoe", "switch"} <= set(names)
    for name in names:
        method = find_method(name)
        assert method.participation in ("dense", "sparse")
        assert method.paper
        assert method.title
    assert find_method("intbmoe").noncausal_reason() is None
    assert {name for name in names if find_method(name).dynamic} == {"dynmoe", "lapsum", "mass", "remoe"}
    assert {name for name in names if find_method(name).composes} == {"intbmoe"}


def test_create_is_literal():
    layer = intbmoe.create("switch", dim=8, hidden=12, experts=17)
    assert layer.experts.count == 17
    assert intbmoe.create("swiglu", 8, 12).config.expert == "swiglu"


def test_a_misspelt_name_gets_a_suggestion():
    with pytest.raises(KeyError, match="no method is called 'intmoe': did you mean 'intbmoe'"):
        intbmoe.create("intmoe", 8, 12)
    with pytest.raises(KeyError, match=r"known: .*dense.*switch"):
        intbmoe.create("zzzzzzz", 8, 12)
    with pytest.raises(ValueError, match=r"^no task is called 'visoin'") as error:  # as other wrong arguments are
        registry.find_task("visoin")
    assert isinstance(error.value, KeyError)


def test_a_taken_name_is_refused():
    for other in ("Other", "Dense"):  # a class with the same name from another module is another class
        with pytest.raises(ValueError, match=r"'dense' is taken by intbmoe\.methods\.dense\.Dense"):
            register("dense", title="x", paper="x", participation="dense")(type(other, (), {}))
    assert _methods["dense"].layer.__name__ == "Dense"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that installs a package whose module contains ``source`` and is one of our entry points."""

    def install(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[intbmoe.methods]\n{name} = {name}\n")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    registry._import_room.cache_clear()
    known = dict(_methods)
    yield install
    _methods.clear()
    _methods.update(known)
    registry._import_room.cache_clear()


def test_another_package_adds_a_method(package):
    package(
        "guest_method",
        "from intbmoe.methods.dense import Dense\n"
        "from intbmoe.registry import register\n"
        "register('guest', title='Guest', paper='A guest', participation='dense', dynamic=True)(Dense)\n",
    )
    assert find_method("guest").dynamic
    assert "guest" in intbmoe.list_methods()
    assert intbmoe.create("guest", 8, 12).config.hidden == 12
    assert sys.modules.pop("guest_method")


def test_a_package_that_cannot_be_imported_is_named_and_the_rest_works(package):
    package("broken_method", "raise RuntimeError('no luck')\n")
    with pytest.warns(UserWarning, match=r"methods of broken_method are missing: .*RuntimeError: no luck"):
        assert "intbmoe" in intbmoe.list_methods()


@pytest.mark.parametrize(("name", "participation"), [("top mean", "sparse"), ("a/b", "dense"), ("top", "foo")])
def test_a_method_with_an_unusable_name_or_kind_is_refused(name, participation):
    with pytest.raises(ValueError, match="is not allowed"):
        register(name, title="T", paper="P", participation=participation)
