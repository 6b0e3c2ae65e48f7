import inspect
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path

import pytest

from intbmoe.cli import COMMANDS, TAKE_A_RECIPE
from intbmoe.commands.overrides import parse_recipe, setting_texts
from intbmoe.commands.training import TrainOptions
from intbmoe.compare.plan import CompareOptions
from intbmoe.recipes import list_recipes, load_recipe
from intbmoe.registry import find_method, list_methods
from intbmoe.serve.settings import Settings as ServeSettings
from intbmoe.tasks.recipe import MoESettings, TrainSettings


@dataclass(frozen=True)
class Own:
    """A command's own options."""

    root: Path = Path("runs")
    """Where runs are kept."""
    quiet: bool = False
    """No progress."""


def parse(*args):
    return parse_recipe("train", Own(), args, "Train.")


def shown_text(capsys):
    """What was printed, without the surrounding box and without line breaks."""
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("name", ["digits", "imagenet", "tiny-imagenet"])
def test_without_options_the_recipe_is_as_it_stands(name):
    assert parse(name) == (load_recipe(name), Own())


def test_every_kind_of_setting_can_be_overruled():
    digits = load_recipe("digits")
    recipe, own = parse(
        *("digits", "--root", "elsewhere", "--name", "mine", "--train.epochs", "3"),
        *(
            "--train.undecayed",
            "biases",
            "--train.betas",
            "0.8",
            "0.9",
            "--train.clip",
            "None",
            "--train.device-batch",
            "16",
            "--model.dim",
            "24",
        ),
        *("--model.moe-layers", "1", "--data.augmentation.label-smoothing", "0.2", "--moe.experts", "5"),
    )
    assert own == Own(Path("elsewhere"))
    train = replace(digits.train, epochs=3.0, undecayed=("biases",), betas=(0.8, 0.9), clip=None, device_batch=16)
    augmentation = replace(digits.data.augmentation, label_smoothing=0.2)
    assert recipe == replace(
        digits,
        name="mine",
        train=train,
        model=replace(digits.model, dim=24, moe_layers=(1,)),
        data=replace(digits.data, augmentation=augmentation),
        moe=replace(digits.moe, experts=5),
    )


@pytest.mark.parametrize(
    ("args", "quiet", "gate"),
    [
        (["--quiet", "--moe.options.gate"], True, True),
        (["--moe.options.gate", "--quiet"], True, True),
        (["--quiet", "True", "--moe.options.gate", "False"], True, False),
        (["--quiet=False", "--moe.options.gate=True"], False, True),
    ],
)
def test_a_flag_may_stand_alone_or_with_its_value(args, quiet, gate):
    recipe, own = parse("digits", *args)
    assert (own.quiet, recipe.moe.options["gate"]) == (quiet, gate)


def test_options_of_the_method_are_added_to_those_of_the_recipe():
    recipe, _ = parse("imagenet", "--moe.options.gate", "False", "--moe.options.hidden", "64", "32")
    assert recipe.moe.options == {**load_recipe("imagenet").moe.options, "gate": False, "hidden": [64, 32]}


@pytest.mark.parametrize("form", [["--moe.name", "switch"], ["--moe.name=switch"]])
def test_another_method_has_its_own_options_and_none_of_the_recipes(form):
    recipe, _ = parse("imagenet", *form, "--moe.options.capacity-factor", "1.25", "--moe.label", "capacity")
    assert recipe.moe == MoESettings("switch", 16, {"capacity_factor": 1.25}, "capacity")


def test_only_options_that_are_given_are_set():
    recipe, _ = parse("digits", "--moe.name", "switch", "--moe.options.experts", "16")
    assert recipe.moe.options == {"experts": 16}, "also a value that happens to be the default"


@pytest.mark.parametrize("method", list_methods())
def test_the_options_of_every_method_can_be_parsed(method):
    recipe, _ = parse("digits", "--moe.name", method)
    assert recipe.moe.name == method


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--train.epoch", "3"], "--train.epochs"),
        (["--train.epochs", "many"], "many"),
        (["--train.epochs", "0"], "train: epochs=0.0 is not allowed"),
    ],
)
def test_a_wrong_option_ends_with_a_suggestion_or_a_reason(args, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse("digits", *args)
    assert exit_info.value.code != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--moe.options.topk", "3"], r"moe\.options\.topk: intbmoe has no such option: did you mean 'top_k'\?"),
        (
            ["--moe.name", "switch", "--moe.options.top-k=3"],
            "top_k: switch has no such option: known: balance,",
        ),
    ],
)
def test_an_option_that_the_method_does_not_have_is_named_beside_those_it_has(args, message):
    with pytest.raises(ValueError, match=message):
        parse("digits", *args)


def test_a_commands_own_option_is_explained_in_its_own_words(capsys):
    with pytest.raises(SystemExit):
        parse_recipe("compare", CompareOptions(), ["digits", "--help"], "Compare.")
    assert f"{setting_texts(CompareOptions)['seeds']} (default: 1)" in shown_text(capsys)


def test_names_are_suggested_before_anything_is_parsed():
    with pytest.raises(KeyError, match="did you mean 'digits'"):
        parse("digit")
    with pytest.raises(KeyError, match="did you mean 'switch'"):
        parse("digits", "--moe.name", "swich")
    with pytest.raises(KeyError, match="starts with a recipe: beauty, checkins, checkins-told"):
        parse()
    with pytest.raises(ValueError, match="top_k=9 is not allowed"):
        parse("imagenet", "--moe.options.top-k", "9")


def test_the_help_shows_every_setting_with_its_text(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse("imagenet", "--moe.name", "switch", "--help")
    assert exit_info.value.code == 0
    shown = shown_text(capsys)
    for option in ("--root", "--moe.options.jitter", "--train.lr", "--model.heads", "--data.augmentation.mixup"):
        assert option in shown
    assert "Peak learning rate. (default: 0.0005)" in shown
    assert "coefficient of the load-balancing loss" in shown
    assert "E, the number of experts. (default: 17)" in shown  # what the budget makes of --moe.experts 16
    assert "(unset by default)" not in shown


def test_texts_of_inherited_settings_are_found():
    assert setting_texts(TrainSettings)["lr"] == "Peak learning rate."
    assert setting_texts(type(load_recipe("digits")))["task"].startswith("A task of")


def test_epochs_asked_for_stand_in_place_of_the_recipes_steps():
    assert parse("stdlib")[0].train.steps is not None
    asked = parse("stdlib", "--train.epochs", "0.5")[0].train
    assert (asked.steps, asked.epochs) == (None, 0.5)
    both = parse("stdlib", "--train.epochs=0.5", "--train.steps", "3")[0].train
    assert both.steps == 3


def described_settings():
    """Every dataclass whose fields are options."""
    found = [CompareOptions, TrainOptions, ServeSettings]
    found += [find_method(method).layer.Config for method in list_methods()]
    parts = [load_recipe(name) for name in list_recipes()]
    while parts:
        part = parts.pop()
        found.append(type(part))
        parts += [value for f in fields(part) if is_dataclass(value := getattr(part, f.name))]
    return sorted(set(found), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("settings", described_settings(), ids=lambda kind: kind.__name__)
def test_every_setting_says_what_it_is(settings):
    texts = setting_texts(settings)
    for f in fields(settings):
        if f.name not in ("data", "model", "moe", "train", "augmentation"):  # described by their classes
            assert texts.get(f.name), f"{settings.__name__}.{f.name} has no help text"
            assert not set("`\n") & set(texts[f.name]), "a terminal would show these characters as they are"


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in (*TAKE_A_RECIPE, "serve")])
def test_every_option_of_a_command_says_what_it_is(command):
    text = inspect.getdoc(COMMANDS[command])
    for option in inspect.signature(COMMANDS[command]).parameters:
        assert f"    {option}: " in text
