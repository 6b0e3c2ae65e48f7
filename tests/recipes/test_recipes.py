from dataclasses import replace
from typing import get_args

import pytest
import yaml

from intbmoe.layer import moe_layers
from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.recipes import describe_recipe, list_recipes, load_recipe, recipe_from_dict, recipe_to_dict
from intbmoe.tasks import make_task
from intbmoe.tasks.recipe import DecayGroup, MoESettings
from intbmoe.train.run import differing_keys


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_loads_under_its_name_and_survives_the_way_to_yaml_and_back(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    plain = recipe_to_dict(recipe)
    assert recipe_from_dict(yaml.safe_load(yaml.safe_dump(plain))) == recipe
    assert recipe_to_dict(recipe_from_dict(plain)) == plain
    assert describe_recipe(name)


def test_the_recipes_are_those_of_the_paper_and_their_small_twins():
    assert {"digits", "imagenet", "tiny-imagenet"} <= set(list_recipes())


def test_imagenet_is_the_appendix():
    """Every value that the paper's appendix states for ImageNet-1K, written down here a second time."""
    recipe = load_recipe("imagenet")
    train, model, data, augmentation = recipe.train, recipe.model, recipe.data, recipe.data.augmentation
    per_device, devices = 256, 8
    stated = {
        "epochs": (train.epochs, 200),
        "global batch": (train.batch, per_device * devices),
        "peak learning rate": (train.lr, 5e-4),
        "warm-up, epochs": (train.warmup, 5),
        "warm-up from": (train.warmup_lr, 1e-6),
        "schedule": (train.schedule, "cosine"),
        "decay to": (train.final_lr, 1e-5),
        "Adam's betas": (train.betas, (0.9, 0.999)),
        "weight decay": (train.weight_decay, 0.05),
        "seeds": (recipe.seeds, (214797, 531770, 635451)),
        "first seed": (train.seed, 214797),
        "H": (model.depth, 8),
        "d": (model.dim, 192),
        "heads": (model.heads, 3),
        "head width": (model.dim // model.heads, 64),
        "resolution": (model.image_size, 224),
        "patch": (model.patch_size, 16),
        "classes": (model.classes, 1000),
        "4d": (model.hidden, 4 * 192),
        "MoE layers": (model.moe_layers, (0, 2, 4, 6)),
        "DropPath": (model.drop_path, 0.1),
        "source": (data.source, "imagenet"),
        "augmentation": (augmentation.kind, "deit"),
        "crop scale": (augmentation.crop_scale, (0.08, 1.0)),
        "crop ratio": (augmentation.crop_ratio, (0.75, 1.33)),
        "flip": (augmentation.flip, 0.5),
        "erasing": (augmentation.erasing, 0.25),
        "mixup": (augmentation.mixup, 0.8),
        "CutMix": (augmentation.cutmix, 1.0),
        "mixed with probability": (augmentation.mix_probability, 1.0),
        "CutMix rather than mixup": (augmentation.mix_switch, 0.5),
        "label smoothing": (augmentation.label_smoothing, 0.1),
    }
    assert {name: found for name, (found, _) in stated.items()} == {name: value for name, (_, value) in stated.items()}
    assert {"rand", "m9", "n2", "mstd0.5"} <= set(augmentation.rand_augment.split("-"))


def test_where_the_appendix_is_silent_the_released_code_speaks():
    images, text, travel = (load_recipe(name) for name in ("imagenet", "minipile", "inttravel"))
    assert images.train.undecayed == ("biases", "norms", "scales", "positions", "routers")
    assert text.train.undecayed == ("biases", "norms")
    assert travel.train.undecayed == ()
    assert (images.train.clip, text.train.clip) == (1.0, 1.0)
    assert (images.train.precision, text.train.precision) == ("bfloat16", "bfloat16")
    assert text.train.warmup_lr == 0
    assert images.data.valid_fraction == 0
    assert images.train.report == "last"


def test_imagenet_released_differs_from_imagenet_in_what_the_two_disagree_on():
    ours, released = load_recipe("imagenet"), load_recipe("imagenet-released")
    differing = differing_keys(recipe_to_dict(ours), recipe_to_dict(released))
    assert {key: new for key, (_, new) in differing.items()} == {
        "name": "imagenet-released",
        "train.epochs": 210.0,
        "train.cooldown": 10.0,
        "train.lr": 5e-4 * ours.train.batch / 512,
        "train.schedule": "epoch-cosine",
        "train.report": "best",
    }


def test_minipile_released_differs_in_name_alone():
    ours, released = load_recipe("minipile"), load_recipe("minipile-released")
    assert replace(released, name=ours.name) == ours


def test_a_recipe_of_ones_own_on_top_of_another(tmp_path):
    base, own = tmp_path / "base.yaml", tmp_path / "own.yaml"
    base.write_text("base: digits\nname: base\ntrain: {lr: 0.5}\nmoe: {options: {top_k: 1}}\n")
    own.write_text("base: base.yaml\nname: own\ntrain: {epochs: 2}\nseeds: [7]\n")  # beside it
    digits, recipe = load_recipe("digits"), load_recipe(own)
    assert (recipe.name, recipe.seeds) == ("own", (7,))
    assert recipe.train == replace(digits.train, lr=0.5, epochs=2.0)
    assert recipe.moe.options == {"blocks": 8, "top_k": 1}
    assert (recipe.data, recipe.model) == (digits.data, digits.model)


def test_a_base_that_is_not_there_or_is_the_recipe_itself(tmp_path):
    own, other = tmp_path / "own.yaml", tmp_path / "other.yaml"
    own.write_text("base: digts\nname: own\n")
    with pytest.raises(ValueError, match=r"own\.yaml: base: no recipe is called 'digts': did you mean 'digits'"):
        load_recipe(own)
    own.write_text(f"base: {other}\nname: own\n")
    other.write_text(f"base: {own}\nname: other\n")
    with pytest.raises(ValueError, match="is itself based on this recipe"):
        load_recipe(own)


@pytest.mark.parametrize(("old", "new"), [(True, ()), (False, get_args(DecayGroup))])
def test_runs_of_earlier_versions_are_read(old, new):
    recipe = load_recipe("digits")
    data = recipe_to_dict(recipe)
    del data["train"]["undecayed"]
    data["train"]["decay_all"] = old
    assert recipe_from_dict(data) == replace(recipe, train=replace(recipe.train, undecayed=new))


def test_imagenet_builds_the_papers_model():
    model = make_task(load_recipe("imagenet")).make_model()
    layers = dict(moe_layers(model))
    assert list(layers) == [f"blocks.{index}.moe" for index in (0, 2, 4, 6)]
    layer = layers["blocks.0.moe"]
    assert isinstance(layer, IntBMoE)
    c = layer.config
    assert (c.experts, c.blocks, c.top_k, c.hidden, c.shared_hidden) == (16, 8, 2, (768,), 512)
    assert (c.code_dim, c.router_dim, c.hyper_dim, c.residual_scale) == (32, 64, 16, 1.0)
    # The paper's 24.295 M include a LayerNorm in each layer that its code holds and never uses.
    assert sum(parameter.numel() for parameter in model.parameters()) + 4 * 384 == pytest.approx(24.295e6, abs=500)


def test_tiny_imagenet_is_imagenet_on_smaller_pictures():
    small, large = load_recipe("tiny-imagenet"), load_recipe("imagenet")
    assert replace(small.model, image_size=224, patch_size=16, classes=1000) == large.model
    assert small.moe == large.moe
    assert small.model.patches == 64


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    model = "{image_size: 8, patch_size: 4, channels: 1, classes: 10}"
    path.write_text(f"name: mine\ntask: vision\ndata: {{source: digits}}\nmodel: {model}\ntrain: {{lr: 1e-4}}\n")
    recipe = load_recipe(path)
    assert (recipe.name, recipe.train.lr, recipe.moe) == ("mine", 1e-4, MoESettings())
    assert load_recipe(str(path)) == recipe


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train: {epoch: 3}", "train.epoch: no such setting: did you mean 'epochs'"),
        ("train: {epochs: 0}", "train.epochs=0 is not allowed: train.epochs must be a positive finite number"),
        ("moe: {name: swich}", "moe.name: no method is called 'swich': did you mean 'switch'"),
        ("moe: {options: {topk: 3}}", "moe.options.topk: intbmoe has no such option: did you mean 'top_k'"),
        ("moe: {label: a/b}", "moe.label='a/b' is not allowed"),
        ("task: visoin", "task='visoin' is not allowed: did you mean 'vision'"),
        ("model: {dims: 3}", "model.dims: no such setting: did you mean 'dim'"),
        ("data: {source: digit}", "data.source='digit' is not allowed: data.source must be one of 'digits'"),
        ("data: [", "is not YAML"),
        ("train: {steps: 3, batch: 4, steps: 5}", "is not YAML: 'steps' is given twice"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, line, message):
    path = tmp_path / "mine.yaml"
    lines = {"name": "mine", "task": "vision", "data": "{source: digits}", "model": "{}"}
    key, _, value = line.partition(": ")
    path.write_text("\n".join(f"{name}: {text}" for name, text in {**lines, key: value}.items()))
    with pytest.raises(ValueError, match=r"mine\.yaml") as error:
        load_recipe(path)
    assert message in str(error.value)


def test_unknown_names_are_errors_with_a_suggestion(tmp_path):
    with pytest.raises(KeyError, match="no recipe is called 'digts': did you mean 'digits'"):
        load_recipe("digts")
    with pytest.raises(FileNotFoundError, match="no recipe file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="a recipe is a mapping"):
        recipe_from_dict([1])
