"""Defines what is trained on which data and for how long; ``plan.py`` turns this into runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from intbmoe.recipes.sets import PLACED

ONE_LAYER = "intbmoe-one_layer"
"""The ablation that costs much less; it is also compared with dense networks of its own compute."""


MORE_SEEDS = 3
"""Chosen on 2026-11-19, before any of them was trained; they count whatever they show."""


@dataclass(frozen=True)
class Study:
    recipe: str
    settings: Mapping[str, Any]  # dotted settings that override the recipe's
    first: tuple[str, ...]
    epoch_steps: int  # optimizer steps per epoch, for estimates of time
    rates: tuple[float, ...] = ()  # learning rates for the stage ``tune``
    tuning: Mapping[str, Any] = field(default_factory=dict)  # further settings of that stage
    on_cpu: bool = False  # whether it is small enough for a core
    needs_data: bool = True
    tuned: tuple[str, ...] = ()  # variants for that stage, besides dense and IntBMoE
    labels: tuple[str, ...] = ()  # only these variants, with all seeds, instead of the stages' own
    sets: str = ""  # only the variants of these sets, with the first seed
    as_long_as: str = ""  # a label: each variant trains for as much time as this one, by the measured time of a step
    pairs: tuple[str, ...] = ()  # variants within reach of a decision, which get ``MORE_SEEDS`` further seeds
    own_rates: bool = False  # whether each label has all rates of the recipe's study, then more seeds at its best rate


GPU = {"train.checkpoint_every": 1_000_000, "train.keep_checkpoints": 1}
"""A run takes minutes, so it is saved only when it ends or is asked to stop."""

IMAGES = {
    **GPU,
    "data.augmentation.mix_probability": 0.0,  # better on validation than 0.5 and 1 in so few epochs
    "train.epochs": 20.0,
    "train.precision": "bfloat16",
    "train.eval_every": 5.0,
    "train.workers": 2,
}
ON_CORES = {**GPU, "train.workers": 0}
NEXT_PLACE = ("dense", "swiglu-wide", "switch", "deepseek", "remoe", "intbmoe")
"""Dense is already in the mixture's place; a dense network as wide as IntBMoE's compute allows is added."""
IMAGES_STEPS = 95_000 // 512
WIKIPEDIA_STEPS = 40_000_000 // (32 * 512)  # the first 40 M of the 93.5 M tokens
WHOLE_WIKIPEDIA_STEPS = 93_497_798 // (32 * 512)
WARM_UPS = (0.05, 0.117, 0.205)
"""Epochs of warm-up on text: 122, 286 and 500 of the 1,000 steps. Studies on text have the first unless their name ends
in ``-warmup``; the second is as many steps as in ``wikipedia-whole``, and the third is best on validation for all
methods that were tried with all three."""
TEXT = {
    **GPU,
    "train.batch": 32,
    "train.steps": 1000,
    "train.lr": 2e-3,  # from stage tune
    "train.warmup": WARM_UPS[0],
    "train.workers": 1,
}
RATED = ("dense", "intbmoe", PLACED, "swiglu-wide", ONE_LAYER, "switch", "deepseek", "remoe")
TUNED_TEXT = (*RATED[2:], "dynmoe", "mass", "lory", "remoe-more", "soft_causal", "smear_token")
WARMED = (
    "dense", PLACED, "dense-wide", "swiglu-wide", "intbmoe", ONE_LAYER, "deepseek", "remoe", "switch", "remoe-more",
    "dynmoe", "mass", "lory", "mumoe_cp", "mumoe_tr", "soft_causal", "smear_token", "deepseek-more", "vmoe-more",
    "intbmoe-no_gate", "intbmoe-no_shared", "intbmoe-no_filter", "intbmoe-fixed_scale", "intbmoe-softmax",
)  # fmt: skip
"""The methods of the text study, in the order in which they are trained again with the longest warm-up."""

STUDIES = {
    "tiny-imagenet": Study(
        "tiny-imagenet",
        IMAGES,
        ("dense", "intbmoe", "vmoe", "soft", "deepseek"),
        epoch_steps=IMAGES_STEPS,
        rates=(5e-4, 1e-3, 2e-3),
        tuning={"train.epochs": 5.0, "train.warmup": 0.5},
        pairs=("intbmoe", PLACED, "deepseek"),
    ),
    "wikipedia": Study(
        "wikipedia",
        TEXT,
        ("dense", "intbmoe", "deepseek", "switch", "remoe"),
        epoch_steps=WIKIPEDIA_STEPS,
        rates=(1e-3, 2e-3, 4e-3),
        tuning={"train.steps": 200, "train.warmup": 0.01},
        tuned=TUNED_TEXT,
        pairs=("intbmoe", ONE_LAYER, "dense-wide", "remoe"),
    ),
    "foursquare": Study(
        "foursquare",
        {**GPU, "train.workers": 0},
        ("dense", "intbmoe", "deepseek", "switch", "remoe"),
        epoch_steps=94,
        rates=(1e-3, 3e-3, 1e-2),
        on_cpu=True,
    ),
    "foursquare-us": Study(
        "foursquare-us",
        {**GPU, "train.workers": 0},
        ("dense", "intbmoe", "deepseek", "switch", "remoe"),
        epoch_steps=157,
        rates=(1e-3, 3e-3, 1e-2),
    ),
    # Follow-ups: parts of the first studies again with one change; they have only ``labels``.
    "tiny-imagenet-start": Study(  # dense in its place, except for the class token's own FFN
        "tiny-imagenet", {**IMAGES, "model.class_token_ffn": False}, (), IMAGES_STEPS, labels=(PLACED,)
    ),
    "tiny-imagenet-time": Study(
        "tiny-imagenet", IMAGES, (), IMAGES_STEPS, labels=(PLACED, "swiglu-wide"), as_long_as="intbmoe"
    ),
    "wikipedia-time": Study(
        "wikipedia", TEXT, (), WIKIPEDIA_STEPS, labels=(PLACED, "swiglu-wide"), as_long_as="intbmoe"
    ),
    "wikipedia-warmup": Study("wikipedia", {**TEXT, "train.warmup": WARM_UPS[-1]}, (), WIKIPEDIA_STEPS, labels=WARMED),
    "tiny-imagenet-warmup": Study(  # 925 steps instead of 370
        "tiny-imagenet", {**IMAGES, "train.warmup": 5.0}, (), IMAGES_STEPS, labels=(PLACED, "intbmoe")
    ),
    "foursquare-warmup": Study(  # 282 steps instead of 94, at the recipe's rate of 0.003
        "foursquare",
        {**ON_CORES, "train.warmup": 3.0},
        (),
        94,
        on_cpu=True,
        labels=("dense", "intbmoe", "switch", "deepseek"),
    ),
    "wikipedia-long": Study(
        "wikipedia",
        {**TEXT, "train.steps": 4000},
        (),
        WIKIPEDIA_STEPS,
        labels=(PLACED, "swiglu-wide", "intbmoe", ONE_LAYER, "remoe", "remoe-more", "deepseek"),
    ),
    "wikipedia-long-warmup": Study(  # the same with 500 steps of warm-up
        "wikipedia",
        {**TEXT, "train.steps": 4000, "train.warmup": WARM_UPS[-1]},
        (),
        WIKIPEDIA_STEPS,
        labels=(PLACED, "intbmoe", "swiglu-wide", "deepseek", ONE_LAYER, "vmoe-more", "remoe-more", "remoe"),
    ),
    "wikipedia-whole": Study(  # all 93.5 M tokens, each once
        "wikipedia",
        {**TEXT, "train.steps": 5700},
        (),
        WHOLE_WIKIPEDIA_STEPS,
        labels=(PLACED, "swiglu-wide", "intbmoe", ONE_LAYER, "deepseek", "remoe-more"),
    ),
    "tiny-imagenet-rates": Study("tiny-imagenet", IMAGES, (), IMAGES_STEPS, labels=(*RATED, "vmoe"), own_rates=True),
    "wikipedia-rates": Study("wikipedia", TEXT, (), WIKIPEDIA_STEPS, labels=(*RATED[:2], *TUNED_TEXT), own_rates=True),
    "tiny-imagenet-sweep": Study("tiny-imagenet", IMAGES, (), IMAGES_STEPS, sets="K,k,E,L"),
    "wikipedia-sweep": Study("wikipedia", TEXT, (), WIKIPEDIA_STEPS, sets="K,k,E,L"),
    "tiny-imagenet-mixed": Study(  # as the paper trains
        "tiny-imagenet",
        {**IMAGES, "data.augmentation.mix_probability": 1.0, "train.epochs": 100.0, "train.eval_every": 20.0},
        (),
        IMAGES_STEPS,
        labels=(PLACED, "swiglu-wide", "deepseek", "intbmoe"),
    ),
    # The next place with its context, the next business, and a control whose best possible score is known.
    "checkins": Study(
        "checkins", ON_CORES, NEXT_PLACE[2:], 2794 // 20, (1e-3, 3e-3, 1e-2), on_cpu=True, labels=NEXT_PLACE
    ),
    "checkins-us": Study(
        "checkins-us", ON_CORES, NEXT_PLACE[2:], 6579 // 20, (1e-3, 3e-3, 1e-2), on_cpu=True, labels=NEXT_PLACE
    ),
    "checkins-told": Study(
        "checkins-told",
        ON_CORES,
        ("mixture", "mmoe", "ple"),
        2794 // 20,
        (1e-3, 3e-3, 1e-2),
        on_cpu=True,
        labels=("dense", "mixture", "mmoe", "ple", "intbmoe"),
    ),
    "yelp": Study("yelp", ON_CORES, NEXT_PLACE[2:], 30_790 // 128, (5e-4, 1e-3, 3e-3), labels=NEXT_PLACE),
    "planted": Study(
        "planted",
        ON_CORES,
        NEXT_PLACE[2:],
        96_000 // 512,
        (2e-3, 5e-3, 1e-2),
        on_cpu=True,
        needs_data=False,
        labels=NEXT_PLACE,
    ),
    # Dry runs, which need no data and no GPU and are in no table.
    "digits": Study("digits", {}, ("dense", "intbmoe", "vmoe"), 20, (1e-3, 2e-3), on_cpu=True, needs_data=False),
    "stdlib": Study("stdlib", {}, ("dense", "intbmoe", "deepseek"), 600, (5e-3, 1e-2), on_cpu=True, needs_data=False),
}
REAL = ("tiny-imagenet", "wikipedia", "wikipedia-warmup", "foursquare", "foursquare-us")
