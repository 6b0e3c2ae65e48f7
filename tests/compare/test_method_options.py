"""``compare --options.METHOD.OPTION``: options for a single baseline."""

import pytest

from intbmoe.cli import main
from intbmoe.commands.overrides import take_method_options
from intbmoe.compare.compare import what_next
from intbmoe.compare.plan import CompareOptions, make_plan
from intbmoe.recipes import load_recipe
from intbmoe.recipes.sets import find_variants


def test_options_are_taken_out_typed_and_by_method():
    words = "digits --seeds 2 --options.vmoe.top-k 3 --options.switch.jitter=0 --options.deepseek.top_k 1 --train.lr 1"
    own, rest = take_method_options(words.split())
    assert own == {"vmoe": {"top_k": 3}, "switch": {"jitter": 0.0}, "deepseek": {"top_k": 1}}
    assert rest == ["digits", "--seeds", "2", "--train.lr", "1"]


def test_they_reach_the_methods_row_and_its_title_and_no_other():
    recipe = load_recipe("digits")
    plain, changed = (
        {variant.label: variant for variant in find_variants(recipe, "all", own)}
        for own in (None, {"vmoe": {"top_k": 3}})
    )
    assert changed["vmoe"].moe.options == {"top_k": 3}
    assert changed["vmoe"].title == "V-MoE, top_k = 3"
    assert {label for label in plain if plain[label] != changed[label]} == {"vmoe"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--options.vmo.top-k 3", "no method is called 'vmo': did you mean 'vmoe'"),
        ("--options.vmoe.topk 3", "--options.vmoe.topk: vmoe has no such option: did you mean 'top_k'"),
        ("--options.vmoe.top-k 99", "--options.vmoe: top_k=99 is not allowed"),
        ("--options.vmoe 3", "--options.vmoe.OPTION VALUE"),
        ("--options.intbmoe.top-k 1", "this is the recipe's method: use --moe.options.top_k"),
        ("--options.mass.top-p 0.9", "--options.mass: mass is not among --methods dense,vmoe: add it there"),
    ],
)
def test_mistakes_are_named_with_the_remedy(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["compare", "digits", "--methods", "dense,vmoe", *words.split()])
    assert message in str(ended.value)
    assert not (tmp_path / "runs").exists()


def test_the_commands_that_lead_on_repeat_them_where_they_belong(tmp_path):
    recipe, own = load_recipe("digits"), {"vmoe": {"top_k": 3}}
    options = CompareOptions(methods="dense,vmoe", root=tmp_path)
    lines = what_next(make_plan(recipe, options, own), options, ["digits"], own).splitlines()
    assert [" --options.vmoe.top-k 3 " in line for line in lines if " compare " in line] == [True, True, False]
    assert not any("--options." in line for line in lines if " train " in line)
