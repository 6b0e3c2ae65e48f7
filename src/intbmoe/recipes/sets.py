"""Named sets of variants for ``intbmoe compare``.

They are the paper's methods, its ablations, its sensitivity grid, models with IntBMoE's compute (``compute.py``), and a
dense FFN in the place of a mixture.

Each set makes variants of a recipe that differ only in what replaces the FFN. A variant is a title for the table and
``MoESettings`` whose label names its runs; a variant that changes nothing is the plain IntBMoE run, which is thus
trained once for all sets.

The paper varies K, k, E and L one at a time from (8, 2, 16, 2), with k = 1 for K = 1. Its text names K = 1, 8, 32,
k = 1, 2, E = 16, 64 and L = 2; the other values here are powers of two, and L = 1, 3, 4. It does not define a deeper
block; here an expert keeps its number of weights. The inner widths become equal and narrower (d → 2d → 2d → d at L = 3,
compared with d → 4d → d at L = 2), and a single layer, which has no inner width, gets more experts, as in the ablation.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from intbmoe.budget import NAMED, TABLE_1, TABLE_2
from intbmoe.checks import UnknownNameError, did_you_mean
from intbmoe.layer import moe_layers
from intbmoe.methods.intbmoe import IntBMoEConfig
from intbmoe.recipes.compute import equal_compute
from intbmoe.registry import find_method, list_methods
from intbmoe.tasks import find_task, make_task
from intbmoe.tasks.recipe import MoESettings, Recipe

ABLATIONS = {
    "one_layer": "1-layer",
    "fixed_scale": "fixed λ",
    "no_gate": "w/o gate",
    "no_shared": "w/o shared",
    "no_filter": "w/o filter",
    "softmax": "softmax coefficients",
}
PLACED = "dense-placed"  # the label of the backbone's FFN in a mixture's place
BLOCKS = (1, 2, 4, 8, 16, 32)
TOP_K = (1, 2, 4, 8)
EXPERTS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = (1, 2, 3, 4)
Change = tuple[str, str, IntBMoEConfig]  # label, title, and the Config in place of the recipe's


@dataclass(frozen=True)
class Variant:
    title: str
    moe: MoESettings

    @property
    def label(self) -> str:
        return self.moe.label or self.moe.name


@dataclass(frozen=True)
class VariantSet:
    summary: str
    make: Callable[[Recipe], list[Variant]]


Options = Mapping[str, Mapping[str, Any]]  # by method


def find_variants(recipe: Recipe, choice: str, options: Options | None = None) -> list[Variant]:
    """The variants that ``choice`` names, methods and sets separated by commas; each label occurs once.

    ``options`` of a method apply to its plain row, on top of the budget, and appear in the title of that row.
    """
    names = [name.strip() for name in choice.split(",") if name.strip()]
    if not names:
        raise UnknownNameError("no method was named: use all, or names from intbmoe methods separated by commas")
    found: dict[str, Variant] = {}
    for name in names:
        if name in SETS:
            variants = SETS[name].make(recipe)
        elif name in list_methods():
            variants = [_method(recipe, name)]
        else:
            known = did_you_mean(name, [*SETS, *list_methods()])
            raise UnknownNameError(f"no method and no set is called {name!r}: {known}")
        for variant in variants:
            found.setdefault(variant.label, variant)
    for name, given in (options or {}).items():
        if name == recipe.moe.name:
            raise ValueError(f"--options.{name}: this is the recipe's method: use --moe.options.{next(iter(given))}")
        if name not in found:
            raise ValueError(f"--options.{name}: {name} is not among --methods {choice}: add it there")
        plain = found[name]
        told = ", ".join(f"{option} = {value}" for option, value in given.items())
        found[name] = Variant(f"{plain.title}, {told}", replace(plain.moe, options={**plain.moe.options, **given}))
    return list(found.values())


def _method(recipe: Recipe, name: str) -> Variant:
    """The method under the recipe's budget; the recipe's options apply only to the recipe's own method."""
    own = recipe.moe.options if name == recipe.moe.name else {}
    return Variant(find_method(name).title, MoESettings(name, recipe.moe.experts, dict(own)))


def _methods(recipe: Recipe) -> list[Variant]:
    return [_method(recipe, name) for name in (TABLE_2 if find_task(recipe.task).causal else TABLE_1)]


def _everything(recipe: Recipe) -> list[Variant]:
    return _methods(recipe) + [_method(recipe, name) for name in NAMED]


def _vary(changes: Callable[[IntBMoEConfig], list[Change]], recipe: Recipe) -> list[Variant]:
    """IntBMoE with its Config changed; a variant without a difference is the plain run."""
    full = _method(recipe, "intbmoe")
    model = make_task(replace(recipe, moe=full.moe)).make_model()
    config = next(layer.config for _, layer in moe_layers(model))  # after the budget
    variants = []
    for label, title, changed in changes(config):
        values = {f.name: getattr(changed, f.name) for f in fields(IntBMoEConfig)}
        difference = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value != getattr(config, name)
        }
        moe = full.moe
        if difference:
            moe = replace(moe, options={**moe.options, **difference}, label=f"intbmoe-{label}")
        named = title and (difference or "=" in title)
        variants.append(Variant(f"{full.title}, {title}" if named else full.title, moe))
    return variants


def _ablations(config: IntBMoEConfig) -> list[Change]:
    ablations = config.ablations()
    return [("", "", config), *((name, title, ablations[name]) for name, title in ABLATIONS.items())]


def _blocks(config: IntBMoEConfig) -> list[Change]:
    return [(f"blocks{k}", f"K = {k}", replace(config, blocks=k, top_k=min(config.top_k, k))) for k in BLOCKS]


def _top_k(config: IntBMoEConfig) -> list[Change]:
    return [(f"top_k{k}", f"k = {k}", replace(config, top_k=k)) for k in TOP_K if k <= config.blocks]


def _layers(config: IntBMoEConfig) -> list[Change]:
    found = []
    for count in LAYERS:
        if count == len(config.hidden) + 1:
            changed = config
        elif count == 1:
            changed = config.ablations()["one_layer"]
        else:
            changed = replace(config, hidden=_equal_widths(config, count - 1))
        found.append((f"layers{count}", f"L = {count}", changed))
    return found


def _experts(recipe: Recipe) -> list[Variant]:
    """Vary ``moe.experts``; an option of that name would override it, so it is removed."""
    full = _method(recipe, "intbmoe")
    options = {name: value for name, value in full.moe.options.items() if name != "experts"}
    return [
        Variant(f"IntBMoE, E = {e}", replace(full.moe, experts=e, options=options, label=f"intbmoe-experts{e}"))
        if e != full.moe.experts
        else Variant(f"IntBMoE, E = {e}", full.moe)
        for e in EXPERTS
    ]


def _compute(recipe: Recipe) -> list[Variant]:
    full = _method(recipe, "intbmoe")
    return [full, *(Variant(title, moe) for title, moe in equal_compute(recipe, full.moe))]


def _place(recipe: Recipe) -> list[Variant]:
    """Dense baselines; a mixture may differ from dense in more than experts, see ``Task.dense_in_place``."""
    dense, own = _method(recipe, "dense"), find_task(recipe.task).dense_in_place
    if own is None:
        return [dense]
    moe = MoESettings(own, recipe.moe.experts, {"hidden": recipe.model.hidden}, label=PLACED)
    return [dense, Variant("Dense in the mixture's place", moe)]


def _equal_widths(config: IntBMoEConfig, count: int) -> tuple[int, ...]:
    """``count`` equal inner widths w with the weights of ``config``'s expert: 2·d·w + (count − 1)·w² = W."""
    d, weights = config.dim, config.expert_weights
    between = count - 1
    width = (math.sqrt(d**2 + between * weights) - d) / between if between else weights / (2 * d)
    return (max(1, round(width)),) * count


SETS: dict[str, VariantSet] = {
    "all": VariantSet("the methods of the paper's table for the task", _methods),
    "everything": VariantSet("these, and the methods that the paper names but does not measure", _everything),
    "ablations": VariantSet("IntBMoE and its six ablations", partial(_vary, _ablations)),
    "compute": VariantSet("IntBMoE, and dense and sparse models with equal FLOPs per training step", _compute),
    "place": VariantSet("dense, and a dense FFN with everything a mixture gets in its place except experts", _place),
    "K": VariantSet(f"IntBMoE with K = {', '.join(map(str, BLOCKS))} blocks", partial(_vary, _blocks)),
    "k": VariantSet(f"IntBMoE with k = {', '.join(map(str, TOP_K))} blocks per token", partial(_vary, _top_k)),
    "E": VariantSet(f"IntBMoE with E = {', '.join(map(str, EXPERTS))} experts", _experts),
    "L": VariantSet(f"IntBMoE with L = {', '.join(map(str, LAYERS))} layers per block", partial(_vary, _layers)),
}
