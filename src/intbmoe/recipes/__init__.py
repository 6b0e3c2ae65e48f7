"""Experiments as data: the paper's settings and small versions of them, one YAML file each.

    recipe = load_recipe("digits")            # or the path of your own file
    recipe_to_dict(recipe)                    # plain data; recipe_from_dict is its inverse

``sets.py`` has the named sets of variants for ``intbmoe compare``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import yaml

from intbmoe.checks import UnknownNameError, did_you_mean
from intbmoe.registry import find_method, find_task, list_tasks, unknown_task
from intbmoe.settings import field_types, from_plain, to_plain
from intbmoe.tasks.recipe import DecayGroup, Recipe

FOLDER = Path(__file__).parent
SUFFIXES = (".yaml", ".yml")


def list_recipes() -> list[str]:
    """The names of the recipes that come with the package, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_recipe(name: str | Path) -> Recipe:
    """Load the recipe of that name, or your own from a YAML file: a path that ends in .yaml."""
    path = _find(str(name))
    data = _read(path)
    try:
        return recipe_from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: PyYAML would drop the first without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in keys[:place]:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _find(name: str, beside: Path = Path()) -> Path:
    path = Path(name)
    if path.suffix not in SUFFIXES:
        if name not in list_recipes():
            known = did_you_mean(name, list_recipes())
            own = "for your own file, give a path that ends in .yaml"
            raise UnknownNameError(f"no recipe is called {name!r}: {known} ({own})")
        return FOLDER / f"{name}.yaml"
    found = [each for each in (beside / path, path) if each.is_file()]
    if not found:
        raise FileNotFoundError(f"there is no recipe file {path}")
    return found[0]


def _read(path: Path, above: tuple[Path, ...] = ()) -> Any:
    """Read a file; with ``base: NAME`` in it, settings it does not give itself come from that recipe."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(data, Mapping) or "base" not in data:
        return data
    try:
        base = _find(str(data["base"]), path.parent)
    except (KeyError, FileNotFoundError) as error:
        raise ValueError(f"{path}: base: {error.args[0]}") from error
    if base in (path, *above):
        raise ValueError(f"{path}: base: {data['base']} is itself based on this recipe: name another")
    own = {key: value for key, value in data.items() if key != "base"}
    return _merged(_read(base, (path, *above)), own)


def _merged(base: Any, own: Any) -> Any:
    if not (isinstance(base, Mapping) and isinstance(own, Mapping)):
        return own
    return {**base, **{key: _merged(base.get(key), value) for key, value in own.items()}}


def describe_recipe(name: str) -> str:
    """The description of a recipe: the first line of its file."""
    first = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip()


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data with every setting written out, as in a run's ``config.yaml``."""
    return to_plain(recipe)


def recipe_from_dict(data: Mapping[str, Any]) -> Recipe:
    """Make a recipe from ``data``. Unknown settings, unknown options and wrong types are errors that say where."""
    if not isinstance(data, Mapping):
        raise ValueError(f"a recipe is a mapping of settings, not {type(data).__name__}")
    task = data.get("task")
    if task not in list_tasks():
        raise ValueError(f"task={task!r} is not allowed: {unknown_task(str(task))}")
    recipe = from_plain(find_task(task).recipe_type, _upgraded(data), "")
    try:
        options = check_options(recipe.moe.name, recipe.moe.options)
    except KeyError as error:
        raise ValueError(f"moe.name: {error.args[0]}") from error
    return replace(recipe, moe=replace(recipe.moe, options=options))


def override(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Change settings of a recipe, by dotted names or nested: {"train.epochs": 3} means {"train": {"epochs": 3}}.

    A different method starts without the recipe's options. Names may be written as on the command line, with hyphens.
    """
    plain, settings = recipe_to_dict(recipe), _dotted(settings, recipe)
    if settings.get("moe.name", recipe.moe.name) != recipe.moe.name:
        plain["moe"] |= {"options": {}, "label": None}
    if "train.epochs" in settings and "train.steps" not in settings:
        plain["train"]["steps"] = None  # the user asks for epochs, while the recipe counts steps
    for name, value in settings.items():
        *above, last = name.split(".")
        place = plain
        for part in above:
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict) or (last not in place and above != ["moe", "options"]):
            raise ValueError(f"{name}: no such setting: {_near_settings(name, list(_dotted(plain, recipe)))}")
        place[last] = value
    return recipe_from_dict(plain) if settings else recipe


def _dotted(settings: Mapping[str, Any], recipe: Recipe, above: str = "") -> dict[str, Any]:
    """Settings by dotted names. A mapping for what is no group of settings (``moe.options``) is itself a value."""
    found = {}
    for key, value in settings.items():
        name = above + str(key).lstrip("-").replace("-", "_")
        place = reduce(lambda group, part: getattr(group, part, None), name.split("."), recipe)
        is_group = isinstance(value, Mapping) and is_dataclass(place)
        found |= _dotted(value, recipe, f"{name}.") if is_group else {name: value}
    return found


def _near_settings(name: str, known: list[str]) -> str:
    """The settings whose last part is most like that of an unknown ``name``; without any, those of its group."""
    *above, last = name.split(".")
    near = get_close_matches(last, {setting.rpartition(".")[2] for setting in known}, n=1)
    likely = [setting for setting in known if setting.rpartition(".")[2] in near]
    if likely:
        return f"did you mean {' or '.join(map(repr, likely))}?"
    group = [setting for setting in known if above and setting.startswith(f"{above[0]}.")]
    return f"known: {', '.join(group or dict.fromkeys(setting.partition('.')[0] for setting in known))}"


def _upgraded(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings under their current names: earlier versions had ``decay_all``; False meant no decay for any group."""
    train = data.get("train")
    if not isinstance(train, Mapping) or "decay_all" not in train:
        return data
    rest = {name: value for name, value in train.items() if name != "decay_all"}
    return {**data, "train": {"undecayed": [] if train["decay_all"] else get_args(DecayGroup), **rest}}


def option_types(method: str) -> dict[str, Any]:
    """The options that ``moe.options`` may set for a method, with types: its Config's fields except ``dim``."""
    return {name: kind for name, kind in field_types(find_method(method).layer.Config).items() if name != "dim"}


def require_options(method: str, names: Iterable[str], where: str = "moe.options") -> None:
    known = option_types(method)
    for name in names:
        if name not in known:
            raise ValueError(f"{where}.{name}: {method} has no such option: {did_you_mean(name, known)}")


def check_options(method: str, options: Mapping[str, Any], where: str = "moe.options") -> dict[str, Any]:
    """Check names, types and values of ``options`` against the method's Config; return them as plain data."""
    require_options(method, options, where)
    known = option_types(method)
    typed = {name: from_plain(known[name], value, f"{where}.{name}") for name, value in options.items()}
    try:
        find_method(method).config(**{"dim": 8, "hidden": 8, **typed})  # sizes that work with any option
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return {name: to_plain(value) for name, value in typed.items()}
