"""The lowest room: methods announce themselves here, and are found by name.

    @register("switch", title="Switch Transformer", paper="Fedus et al., 2022", participation="sparse")
    class Switch(MoELayer): ...

    layer = create("switch", dim=192, hidden=768, experts=17)

A method's file may register several names, each with presets for its Config. The registry imports
``intbmoe.methods.*`` the first time anything is looked up, so that a new file there is all a new method needs.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from intbmoe.checks import did_you_mean

Participation = Literal["dense", "sparse"]


@dataclass(frozen=True)
class Method:
    """One registered name: the layer class, the presets that make it this name, and its traits."""

    name: str
    layer: type
    title: str
    paper: str
    participation: Participation
    presets: dict[str, Any] = field(default_factory=dict)

    def config(self, dim: int, hidden: Any, **options: Any) -> Any:
        """This method's Config, presets applied."""
        return self.layer.make_config(dim, hidden, **{**self.presets, **options})

    def noncausal_reason(self) -> str | None:
        """Why the method, with its presets, may not stand in a causal model; None when it may."""
        return self.config(dim=8, hidden=8).noncausal_reason()


_methods: dict[str, Method] = {}


def _full_name(layer: type) -> str:
    """The same for a module that is loaded again."""
    return f"{layer.__module__}.{layer.__qualname__}"


def register(
    name: str, *, title: str, paper: str, participation: Participation, **presets: Any
) -> Callable[[type], type]:
    """Class decorator: make the layer available as ``create(name, …)``, with ``presets`` for its Config."""

    def add(layer: type) -> type:
        known = _methods.get(name)
        if known is not None and _full_name(known.layer) != _full_name(layer):
            raise ValueError(f"the method name {name!r} is taken by {_full_name(known.layer)}")
        _methods[name] = Method(name, layer, title, paper, participation, presets)
        return layer

    return add


def list_methods() -> list[str]:
    """The names that ``create`` knows, in alphabetical order."""
    methods = importlib.import_module("intbmoe.methods")
    for module in pkgutil.iter_modules(methods.__path__):
        importlib.import_module(f"{methods.__name__}.{module.name}")
    return sorted(_methods)


def find_method(name: str) -> Method:
    """The registered method of that name; a misspelt name is an error with a suggestion."""
    if name not in list_methods():
        raise KeyError(f"no method is called {name!r}: {did_you_mean(name, _methods)}")
    return _methods[name]


def create(name: str, dim: int, hidden: Any, **options: Any) -> Any:
    """Build a layer by its method's name. Arguments are literal: ``experts=17`` makes 17 experts."""
    method = find_method(name)
    return method.layer(method.config(dim, hidden, **options))
