"""A recipe's settings as command-line options: every setting typed, with the recipe's value as its default.

``intbmoe train digits --moe.name switch --moe.options.top-k 1 --train.epochs 3``: the options of the method come from
its Config, so the parser knows their names and types too. Only those given are set; the budget decides all others.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

import torch
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from intbmoe.commands.terminal import HELP, fitted, parse
from intbmoe.layer import moe_layers
from intbmoe.recipes import check_options, list_recipes, load_recipe, option_types, require_options
from intbmoe.registry import find_method
from intbmoe.settings import field_types
from intbmoe.tasks import make_task
from intbmoe.tasks.recipe import MoESettings, Recipe

Options = TypeVar("Options")
PARSERS = ConstructorRegistry()
AS_VALUES = {"config": (tyro.conf.FlagConversionOff,), "registry": PARSERS}  # --quiet False instead of --no-quiet


@PARSERS.primitive_rule
def _parse_bool(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[bool] | None:
    """Parse a flag: ``--quiet`` alone means True; ``--quiet True`` and ``--quiet False`` are allowed too."""
    if kind.type is not bool:
        return None
    return PrimitiveConstructorSpec(
        nargs=(0, 1),
        metavar="[{True,False}]",
        instance_from_str=lambda given: given != ["False"],
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
        choices=("True", "False"),
    )


def parse_recipe(command: str, options: Options, args: Sequence[str], description: str) -> tuple[Recipe, Options]:
    """Parse ``RECIPE [--setting value …]``: return the recipe with these settings and the command's own ``options``."""
    name, *rest = args or [""]
    known = f"{', '.join(list_recipes())}, or a .yaml file of yours"
    if name in HELP:
        description += f"\n\n{fitted(f'RECIPE is {known}. intbmoe {command} RECIPE --help shows all its settings.')}"
        parse(type(options), HELP, f"intbmoe {command} RECIPE", description, **AS_VALUES)
    if not name or name.startswith("-"):
        raise KeyError(f"{command} starts with a recipe: {known}")
    recipe = load_recipe(name)
    given = _given_options(rest)
    # Found before parsing, because the other options depend on the method: the parser knows only this method's.
    method = find_method(given["--moe.name"]).name if "--moe.name" in given else recipe.moe.name
    prefix = "--moe.options."
    require_options(method, [o.removeprefix(prefix).replace("-", "_") for o in given if o.startswith(prefix)])
    shown = _default_options(recipe, method) if set(HELP) & set(rest) else {}
    defaults = _arguments(recipe, options, method, shown)
    parsed = parse(type(defaults), rest, f"intbmoe {command} {name}", description, default=defaults, **AS_VALUES)
    changed = {part: getattr(parsed, part) for part in ("name", "data", "model", "train")}
    moe = MoESettings(method, parsed.moe.experts, check_options(method, parsed.moe.options), parsed.moe.label)
    if "--train.epochs" in given and "--train.steps" not in given:
        changed["train"] = replace(changed["train"], steps=None)  # given in epochs although the recipe counts steps
    return replace(recipe, moe=moe, **changed), parsed.command


def take_method_options(args: Sequence[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Split off ``compare``'s ``--options.METHOD.OPTION VALUE …``: checked options by method, and other arguments."""
    words: dict[str, list[str]] = {}
    rest: list[str] = []
    target = rest
    for argument in args:
        if argument.startswith("--"):
            target = rest
        if argument.startswith("--options."):
            name, dot, option = argument.removeprefix("--options.").partition(".")
            method = find_method(name).name
            if not dot:
                raise ValueError(f"{argument}: an option of {method} must follow: --options.{method}.OPTION VALUE")
            require_options(method, [option.partition("=")[0].replace("-", "_")], f"--options.{method}")
            target, argument = words.setdefault(method, []), f"--{option}"
        target.append(argument)
    return {method: _method_options(method, given) for method, given in words.items()}, rest


def _method_options(method: str, words: Sequence[str]) -> dict[str, Any]:
    kind, where = _options_type(method, {}), f"--options.{method}"
    found = tyro.cli(kind, args=words, prog=where, **AS_VALUES)
    return check_options(method, found, where)


def _given_options(args: Sequence[str]) -> dict[str, str]:
    """Return option → value for ``--option value`` and ``--option=value``; the last one counts."""
    found = {}
    for argument, following in pairwise([*args, ""]):
        if argument.startswith("--"):
            option, _, value = argument.partition("=")
            found[option] = value or following
    return found


def _options_type(method: str, defaults: Mapping[str, Any]) -> Any:
    """Return a dict type with the method's options as typed, optional keys; the help shows ``defaults``."""
    texts = setting_texts(find_method(method).layer.Config)
    typed = {}
    for name, kind in option_types(method).items():
        hint = f"(default: {defaults[name]})" if name in defaults else None
        typed[name] = Annotated[kind, tyro.conf.arg(help=texts.get(name, ""), help_behavior_hint=hint)]
    text = f"Options of {method}, taken literally, on top of the budget."
    return Annotated[TypedDict(f"{method} options", typed, total=False), tyro.conf.arg(help=text)]


def _default_options(recipe: Recipe, method: str) -> dict[str, Any]:
    """Return a method's options if none is given: the recipe's, then the budget's, then its Config's."""
    moe = recipe.moe if method == recipe.moe.name else MoESettings(method, recipe.moe.experts)
    config = find_method(method).layer.Config
    declared = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    try:
        with torch.device("meta"):  # shapes without memory
            layer = next((layer for _, layer in moe_layers(make_task(replace(recipe, moe=moe)).make_model())), None)
    except ValueError:  # a recipe for your own data, whose sizes are unknown before the data is read
        return declared
    return declared if layer is None else {f.name: getattr(layer.config, f.name) for f in fields(config)}


def _arguments(recipe: Recipe, options: Any, method: str, defaults: Mapping[str, Any]) -> Any:
    """Return one object with the command's own options and the recipe's settings; the parser reads its class.

    Its values are the defaults. If the method is not the recipe's, it starts without the recipe's options and label.
    The task and the seeds are not options: another task has other settings, and ``compare`` takes a list of seeds.
    """
    moe = make_dataclass(
        "MoE",
        [("options", _options_type(method, defaults), field(default_factory=dict))],
        bases=(MoESettings,),
        frozen=True,
        namespace={"__doc__": MoESettings.__doc__, "__post_init__": lambda self: None},
    )
    if method == recipe.moe.name:
        chosen = moe(method, recipe.moe.experts, _with_tuples(recipe.moe.options), recipe.moe.label)
    else:
        chosen = moe(method, recipe.moe.experts)
    kinds = field_types(type(recipe))
    values = {
        "command": (Annotated[type(options), tyro.conf.arg(name="")], options),
        "name": (Annotated[str, tyro.conf.arg(help=setting_texts(Recipe)["name"])], recipe.name),
        "moe": (moe, chosen),  # the settings changed most often come first
        **{part: (kinds[part], getattr(recipe, part)) for part in ("data", "model", "train")},
    }
    described = make_dataclass("Arguments", [(name, kind) for name, (kind, _) in values.items()], frozen=True)
    return described(*(value for _, value in values.values()))


def _with_tuples(options: dict[str, Any]) -> dict[str, Any]:
    """Turn lists into tuples, which the Configs use: the parser compares defaults with their annotation."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def setting_texts(settings: type) -> dict[str, str]:
    """Return the docstring line below each field of a dataclass, including inherited fields.

    The parser reads these lines from dataclasses, but not from the dict type of a method's options.
    """
    texts: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        if is_dataclass(kind) and Path(inspect.getsourcefile(kind) or "").is_file():
            body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
            for line, below in pairwise(body):
                if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr):
                    texts[line.target.id] = inspect.cleandoc(ast.literal_eval(below.value))
    return texts
