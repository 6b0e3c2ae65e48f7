"""The registry: methods and tasks register themselves here and are looked up by name.

    @register("switch", title="Switch Transformer", paper="Fedus et al., 2022", participation="sparse")
    class Switch(MoELayer): ...

    layer = create("switch", dim=192, hidden=768, experts=17)

One file may register several names, each with presets for its Config. What other code needs to know about a method is a
trait here, and is never guessed from its name. Methods are imported when one is first looked up: every module of
``intbmoe.methods``, and the entry points that installed packages declare in the group ``intbmoe.methods``. A task is a
folder in ``intbmoe.tasks`` that registers itself in the same way (below).
"""

import functools
import hashlib
import importlib
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, get_args

from intbmoe.checks import UnknownNameError, did_you_mean, require

Participation = Literal["dense", "sparse"]
PLUGINS = "INTBMOE_PLUGINS"  # the environment variable: paths of Python files, separated as in PATH
PLUGIN_HINT = f"intbmoe --plugin FILE …, or {PLUGINS}"


@dataclass(frozen=True)
class Method:
    """One registered name: the layer class, the presets that define this name, and its traits."""

    name: str
    layer: type
    title: str
    paper: str
    participation: Participation
    """Whether a token's output depends on all experts or only on some."""
    dynamic: bool = False
    """The trained router decides how many experts a token gets."""
    composes: bool = False
    """Blocks are built from a pool, independently of the input, so the layer can be precomposed."""
    presets: dict[str, Any] = field(default_factory=dict)
    code: str | None = None
    """The authors' repository on GitHub; None if there is none."""

    def config(self, dim: int, hidden: Any, **options: Any) -> Any:
        return self.layer.make_config(dim, hidden, **{**self.presets, **options})

    def noncausal_reason(self) -> str | None:
        """Why the method, with its presets, cannot be used in a causal model; None if it can."""
        return self.config(dim=8, hidden=8).noncausal_reason()


_methods: dict[str, Method] = {}


def _require_free(kind: str, name: str, known: type, new: type) -> None:
    """Raise if ``known``, which has the name, is another class. Full names are compared: a module may be reloaded."""
    taken, wanted = (f"{found.__module__}.{found.__qualname__}" for found in (known, new))
    if taken != wanted:
        raise ValueError(f"the {kind} name {name!r} is taken by {taken}")


def register(
    name: str,
    *,
    title: str,
    paper: str,
    participation: Participation,
    dynamic: bool = False,
    composes: bool = False,
    code: str | None = None,
    **presets: Any,
) -> Callable[[type], type]:
    """Class decorator: make the layer available as ``create(name, …)``, with ``presets`` for its Config."""
    usable = re.fullmatch(r"[\w-]+", name) is not None
    require(usable, "name", name, "made of letters, digits, _ and -: options and folders are named after it")
    require(participation in get_args(Participation), "participation", participation, "'dense' or 'sparse'")

    def add(layer: type) -> type:
        _require_free("method", name, _methods[name].layer if name in _methods else layer, layer)
        _methods[name] = Method(name, layer, title, paper, participation, dynamic, composes, presets, code)
        return layer

    return add


def _discover(room: str) -> None:
    """Import everything that registers itself: ``room`` of this package, other packages, the user's plugin files."""
    _import_room(room)
    for file in plugin_files():
        load_plugin(file)


@functools.cache
def _import_room(room: str) -> None:
    package = importlib.import_module(f"intbmoe.{room}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for entry in entry_points(group=package.__name__):
        try:
            entry.load()
        except Exception as error:  # a third-party package: this one must work without it
            owner = entry.dist.name if entry.dist else "an unknown package"
            warnings.warn(
                f"{room} of {owner} are missing: its entry point {entry.name} = {entry.value!r} in the group "
                f"{entry.group!r} cannot be loaded ({type(error).__name__}: {error})",
                stacklevel=2,
            )


def list_methods() -> list[str]:
    _discover("methods")
    return sorted(_methods)


def find_method(name: str) -> Method:
    """The method registered under ``name``; for a misspelt name the error suggests the right one."""
    if name not in list_methods():
        found = did_you_mean(name, _methods)
        hint = f" (a method of your own: {PLUGIN_HINT})" if found.startswith("known") else ""
        raise UnknownNameError(f"no method is called {name!r}: {found}{hint}")
    return _methods[name]


def method_of(layer: Any) -> Method | None:
    """The method ``layer`` is registered as: of the names whose class and presets match, the one with most presets."""
    methods = [method for method in map(find_method, list_methods()) if method.layer is type(layer)]
    fits = [m for m in methods if all(getattr(layer.config, key) == value for key, value in m.presets.items())]
    return max(fits, key=lambda method: len(method.presets), default=None)


def method_family(name: str) -> str:
    """The heading under which figures show a method."""
    method = find_method(name)
    if name == "intbmoe":
        return "IntBMoE"
    if getattr(method.config(dim=8, hidden=8), "experts", 1) == 1:
        return "no experts"
    return "all experts take part" if method.participation == "dense" else "few experts take part"


def create(name: str, dim: int, hidden: Any, **options: Any) -> Any:
    """Build a layer from its method's name. Arguments are literal: ``experts=17`` makes 17 experts."""
    method = find_method(name)
    return method.layer(method.config(dim, hidden, **options))


# ---- tasks ----------------------------------------------------------------------------------------------------------
#
#     @register_task("vision")
#     class VisionTask(Task): ...
#
# The folders of ``intbmoe.tasks`` are imported the first time a task is looked up. So are third-party tasks: those that
# an installed package declares as an entry point of the group "intbmoe.tasks", and those in files that the user names,
# with ``intbmoe --plugin FILE …`` or in the environment, where child processes find them too. No other code is ever
# run: a run or an artifact says which task it needs, never where to load it from.


_tasks: dict[str, type] = {}
_loaded: set[str] = set()  # plugin files


def register_task(name: str) -> Callable[[type], type]:
    def add(task: type) -> type:
        _require_free("task", name, _tasks.get(name, task), task)
        task.name = name
        _tasks[name] = task
        return task

    return add


def list_tasks() -> list[str]:
    _discover("tasks")
    return sorted(_tasks)


def find_task(name: str) -> type:
    if name not in list_tasks():
        raise UnknownNameError(f"no task is called {name!r}: {unknown_task(name)}")
    return _tasks[name]


def unknown_task(name: str) -> str:
    return f"{did_you_mean(name, list_tasks())} (a task of your own: {PLUGIN_HINT})"


def plugin_files() -> list[Path]:
    return [Path(file) for file in os.environ.get(PLUGINS, "").split(os.pathsep) if file]


def plugin_options() -> list[str]:
    """The options to add to a command that we suggest to the user, so that it loads the same plugins."""
    return [word for file in plugin_files() for word in ("--plugin", os.path.relpath(file))]


def describe_plugins() -> dict[str, str]:
    """Plugin file name → SHA-256, for the record of a run."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in plugin_files()}


def add_plugin(file: str | Path) -> None:
    """Import a Python file that registers tasks or methods, in this process and in the processes it starts."""
    path = Path(file).expanduser().absolute()
    load_plugin(path)
    os.environ[PLUGINS] = os.pathsep.join(dict.fromkeys(map(str, [*plugin_files(), path])))


def load_plugin(path: Path) -> None:
    """Import a file once, under its own name; its folder is added to the path so that spawned processes find it."""
    if str(path) in _loaded:
        return
    if path.suffix != ".py" or not path.is_file() or not path.stem.isidentifier():
        raise ValueError(f"plugin {path} is not a Python file: give the path of one, such as my_task.py")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.import_module(path.stem)
    if not module.__file__ or not path.samefile(module.__file__):
        raise ValueError(f"plugin {path}: the module name {path.stem!r} is taken by {module.__file__}: rename the file")
    _loaded.add(str(path))
