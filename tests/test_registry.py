import pytest

import intbmoe
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


def test_create_is_literal():
    layer = intbmoe.create("switch", dim=8, hidden=12, experts=17)
    assert layer.experts.count == 17
    assert intbmoe.create("swiglu", 8, 12).config.expert == "swiglu"


def test_a_misspelt_name_gets_a_suggestion():
    with pytest.raises(KeyError, match="no method is called 'intmoe': did you mean 'intbmoe'"):
        intbmoe.create("intmoe", 8, 12)
    with pytest.raises(KeyError, match=r"known: .*dense.*switch"):
        intbmoe.create("zzzzzzz", 8, 12)


def test_a_taken_name_is_refused():
    for other in ("Other", "Dense"):  # a class of the same name is another one if its module is
        with pytest.raises(ValueError, match=r"'dense' is taken by intbmoe\.methods\.dense\.Dense"):
            register("dense", title="x", paper="x", participation="dense")(type(other, (), {}))
    assert _methods["dense"].layer.__name__ == "Dense"
