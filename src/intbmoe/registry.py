"""The ground floor: methods register themselves here and are found by name.

    @register("switch", title="Switch Transformer", paper="Fedus et al., 2022", participation="sparse")
    class Switch(MoELayer): ...

    layer = create("switch", dim=192, hidden=768, experts=17)

One file may register several names, each with presets for its Config. What others need to know about a method is a
trait here, never guessed from its name. Methods are imported when one is first looked up: every module of
``intbmoe.methods``, and what installed packages name as entry points of the group ``intbmoe.methods``.
"""

import functools
import importlib
import pkgutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal

from intbmoe.checks import did_you_mean

ENTRY_POINTS = "intbmoe.methods"
Participation = Literal["dense", "sparse"]


@dataclass(frozen=True)
class Method:
    """One registered name: the layer class, the presets that make it this name, and its traits."""

    name: str
    layer: type
    title: str
    paper: str
    participation: Participation
    """Whether a token's output depends on all experts or on some."""
    dynamic: bool = False
    """The trained router decides how many experts a token gets."""
    composes: bool = False
    """Blocks are built from a pool, independently of the input, so the layer can be precomposed."""
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
    name: str,
    *,
    title: str,
    paper: str,
    participation: Participation,
    dynamic: bool = False,
    composes: bool = False,
    **presets: Any,
) -> Callable[[type], type]:
    """Class decorator: make the layer available as ``create(name, …)``, with ``presets`` for its Config."""

    def add(layer: type) -> type:
        known = _methods.get(name)
        if known is not None and _full_name(known.layer) != _full_name(layer):
            raise ValueError(f"the method name {name!r} is taken by {_full_name(known.layer)}")
        _methods[name] = Method(name, layer, title, paper, participation, dynamic, composes, presets)
        return layer

    return add


@functools.cache
def _discover() -> None:
    methods = importlib.import_module("intbmoe.methods")
    for module in pkgutil.iter_modules(methods.__path__):
        importlib.import_module(f"{methods.__name__}.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:  # someone else's package: ours must work without it
            package = entry.dist.name if entry.dist else "an unknown package"
            warnings.warn(
                f"methods of {package} are missing: its entry point {entry.name} = {entry.value!r} in the group "
                f"{ENTRY_POINTS!r} cannot be loaded ({type(error).__name__}: {error})",
                stacklevel=2,
            )


def list_methods() -> list[str]:
    """The names that ``create`` knows, in alphabetical order."""
    _discover()
    return sorted(_methods)


def find_method(name: str) -> Method:
    """The registered method of that name; a misspelt name is an error with a suggestion."""
    _discover()
    if name not in _methods:
        raise KeyError(f"no method is called {name!r}: {did_you_mean(name, _methods)}")
    return _methods[name]


def create(name: str, dim: int, hidden: Any, **options: Any) -> Any:
    """Build a layer by its method's name. Arguments are literal: ``experts=17`` makes 17 experts."""
    method = find_method(name)
    return method.layer(method.config(dim, hidden, **options))
