"""Lists the runs of the study in order of importance.

A plan is a list of entries, plain data that can be written on one machine and run on another: resolving it builds and
counts models, which takes a minute that a rented GPU should not spend waiting. An entry's digest covers every setting
that can change its result, so a finished run is recognised and never confused with one that has other settings.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from benchmarks.study.studies import MORE_SEEDS, ONE_LAYER, STUDIES, Study

from intbmoe.checks import require
from intbmoe.recipes import load_recipe, recipe_from_dict, recipe_to_dict
from intbmoe.recipes.compute import dense_of_compute
from intbmoe.recipes.sets import PLACED, Variant, find_variants
from intbmoe.settings import to_plain
from intbmoe.tasks.recipe import MoESettings, Recipe
from intbmoe.train.run import FREE_TO_CHANGE

SOURCE = Path(__file__).parents[2] / "src" / "intbmoe"
RESULTS = Path(__file__).parents[1] / "results" / "study"
STAGES = ("first", "methods", "compute", "ablations", "seeds", "pairs", "rest")
"""first       dense, IntBMoE and the baselines expected to be best, first seed
methods     all other methods, first seed
compute     models with IntBMoE's compute, dense ones with that of its one-layer form, dense in its place, first seed
ablations   ablations of IntBMoE, first seed
seeds       two more seeds of dense (in both places), IntBMoE, wide networks and the two best baselines by validation
pairs       three more seeds of the variants whose difference is within reach of a decision
rest        two more seeds of everything else"""
TUNING = "tune"
"""A separate stage, run only on demand: short runs over learning rates, whose test metrics are thrown away."""
TUNED = ("dense", "intbmoe")
NOT_IN_DIGEST = (*FREE_TO_CHANGE, "data.path", "train.capture", "train.compile")
"""Settings that affect only speed. A captured step runs the kernels of an ordinary one; a compiled one rounds and draws
random numbers differently, as another GPU would."""
BASELINES_REPEATED = 2
TIMING = "timing--{}.json"
CLASS_TOKEN = "dense-class_token"
"""Dense with a separate FFN for the class token, as a mixture has it, but with the backbone's initialisation."""


@dataclass(frozen=True)
class Entry:
    study: str
    stage: str
    title: str
    label: str
    seed: int
    steps: int
    digest: str
    shared_digest: str  # of the settings that all methods of the study share; equal for all rows of a table
    recipe: dict[str, Any]
    command: str
    on_cpu: bool

    @property
    def id(self) -> str:
        return f"{self.recipe['name']}/{self.label}/{self.seed}"

    @property
    def file(self) -> str:
        return f"{self.id.replace('/', '--')}--{self.digest[:8]}.json"


def make_plan(
    studies: Sequence[str],
    overrides: Sequence[str] = (),
    stages: Sequence[str] = STAGES,
    summaries: Iterable[Mapping[str, Any]] = (),
) -> list[Entry]:
    """Returns the runs of ``studies``, stage by stage; ``summaries`` of finished runs say which baselines are best."""
    summaries = list(summaries)
    entries = [entry for name in studies for entry in _entries(name, overrides, stages, summaries)]
    return sorted(entries, key=lambda entry: ((TUNING, *STAGES).index(entry.stage), entry.seed))


def _entries(name: str, overrides: Sequence[str], stages: Sequence[str], summaries: list) -> list[Entry]:
    study = STUDIES[name]
    given = parse_overrides(name, overrides)
    recipe = with_settings(load_recipe(study.recipe), {**study.settings, **given})
    if TUNING in stages:
        return _tuning(name, study, recipe, given)
    if study.labels or study.sets:
        return [entry for entry in _labelled(name, study, recipe, given) if entry.stage in stages]
    first_seed, *more = recipe.seeds
    entries, seen = [], {}
    for stage in ("first", "methods", "compute", "ablations"):
        if not set(stages) & {stage, "seeds", "pairs", "rest"}:
            continue
        for variant in _variants(recipe, stage, study.first):
            if variant.label not in seen:
                seen[variant.label] = variant
                entries.append(_entry(name, stage, recipe, variant, first_seed, {**study.settings, **given}))
    repeated = _repeated(entries, summaries)
    for seed in more:
        for label, variant in seen.items():
            stage = "seeds" if label in repeated else "rest"
            entries.append(_entry(name, stage, recipe, variant, seed, {**study.settings, **given}))
    for seed in range(max(recipe.seeds) + 1, max(recipe.seeds) + 1 + MORE_SEEDS):
        for label in study.pairs:
            entries.append(_entry(name, "pairs", recipe, seen[label], seed, {**study.settings, **given}))
    return [entry for entry in entries if entry.stage in stages]


def _labelled(name: str, study: Study, recipe: Recipe, given: Mapping[str, Any]) -> list[Entry]:
    """Returns runs of the study's labels, all first seeds before the others, or of its sets, only the first seed.

    Runs that the parent study has are not repeated: IntBMoE's default of a sweep, or the common rate.
    """
    recipe = with_settings(recipe, {"name": name})
    if study.sets:
        variants = [variant for variant in find_variants(recipe, study.sets) if variant.moe.label]
    else:
        variants = _labelled_variants(recipe, study.first, study.labels)
    best = own_rates(name, read_summaries(RESULTS)) if study.own_rates else {}
    entries = []
    for seed in recipe.seeds[:1] if study.sets else recipe.seeds:
        stage = "first" if seed == recipe.seeds[0] else "seeds"
        for variant in variants:
            own = _equal_time(study, variant.label)
            rates = [recipe.train.lr]
            if study.own_rates:
                known = [best[variant.label]] if variant.label in best else []
                tried = STUDIES[study.recipe].rates if stage == "first" else known
                rates = [rate for rate in tried if rate != recipe.train.lr]
            for rate in rates:
                settings = own | ({"train.lr": rate} if study.own_rates else {})
                whole = {**study.settings, **given, "name": name, **settings}
                entries.append(_entry(name, stage, with_settings(recipe, settings), variant, seed, whole))
    return entries


def _equal_time(study: Study, label: str) -> dict[str, Any]:
    """Returns how long ``label`` trains in the time of ``study.as_long_as``."""
    if not study.as_long_as:
        return {}
    rows = json.loads((RESULTS / TIMING.format(study.recipe)).read_text(encoding="utf-8"))["rows"]
    ratio = rows[study.as_long_as]["step_ms"] / rows[label]["step_ms"]
    key, digits = ("train.steps", None) if "train.steps" in study.settings else ("train.epochs", 1)
    return {key: round(study.settings[key] * ratio, digits)}


def _variants(recipe: Recipe, stage: str, first: Sequence[str]) -> list[Variant]:
    choice = {"first": ",".join(first), "methods": "all", "compute": "compute,place", "ablations": "ablations"}[stage]
    found = find_variants(recipe, choice) if choice else []
    return found + (_narrow(recipe) + _class_token(recipe) if stage == "compute" else [])


def _labelled_variants(recipe: Recipe, first: Sequence[str], labels: Sequence[str]) -> list[Variant]:
    if not labels:
        return []
    found = {variant.label: variant for stage in STAGES[:4] for variant in _variants(recipe, stage, first)}
    return [found[label] for label in labels]


def _class_token(recipe: Recipe) -> list[Variant]:
    if recipe.task != "vision":
        return []  # other tasks have no class token, so only the initialisation differs
    options = {"hidden": recipe.model.hidden, "std": recipe.model.ffn_std}
    moe = MoESettings("dense", recipe.moe.experts, options, label=CLASS_TOKEN)
    return [Variant("Dense, the class token's FFN apart", moe)]


def _narrow(recipe: Recipe) -> list[Variant]:
    one_layer = next(variant for variant in find_variants(recipe, "ablations") if variant.label == ONE_LAYER)
    found = dense_of_compute(recipe, one_layer.moe)
    return [Variant(title, replace(moe, label=f"{moe.name}-narrow")) for title, moe in found]


def _repeated(entries: Sequence[Entry], summaries: Sequence[Mapping[str, Any]]) -> set[str]:
    """Returns the labels that get three seeds first, chosen by validation so that the test split decides nothing."""
    always = {"dense", "intbmoe", "dense-wide", "swiglu-wide", PLACED}
    methods = {entry.digest: entry.label for entry in entries if entry.stage in ("first", "methods")}
    found = [summary for summary in summaries if methods.get(summary["digest"], "dense") not in always]
    found.sort(key=goodness, reverse=True)
    return always | {summary["label"] for summary in found[:BASELINES_REPEATED]}


def _tuning(name: str, study: Study, recipe: Recipe, given: Mapping[str, Any]) -> list[Entry]:
    entries = []
    for rate in study.rates:
        settings = {**study.settings, **study.tuning, **given, "train.lr": rate, "name": f"{name}-lr{rate:g}"}
        tuned = with_settings(recipe, settings)
        variants = find_variants(tuned, ",".join(TUNED)) + _labelled_variants(tuned, study.first, study.tuned)
        entries += [_entry(name, TUNING, tuned, variant, recipe.seeds[0], settings) for variant in variants]
    return entries


def _entry(study: str, stage: str, recipe: Recipe, variant: Variant, seed: int, settings: Mapping[str, Any]) -> Entry:
    seeded = replace(recipe, moe=variant.moe, train=replace(recipe.train, seed=seed))
    return Entry(
        study=study,
        stage=stage,
        title=variant.title,
        label=variant.label,
        seed=seed,
        command=_command(STUDIES[study], variant, seed, settings),
        on_cpu=STUDIES[study].on_cpu,
        **_facts(study, seeded),
    )


def digests(recipe: Recipe) -> dict[str, str]:
    """Returns the digests of all settings, and of those that the methods and seeds of a study share."""
    shared = replace(recipe, moe=MoESettings(experts=recipe.moe.experts), train=replace(recipe.train, seed=0))
    return {"digest": digest(recipe), "shared_digest": digest(shared)}


def _facts(study: str, recipe: Recipe) -> dict[str, Any]:
    train = recipe.train
    return {
        "steps": train.steps or max(1, round(train.epochs * STUDIES[study].epoch_steps)),
        **digests(recipe),
        "recipe": recipe_to_dict(recipe),
    }


def change(entry: Entry, overrides: Sequence[str]) -> Entry:
    """Returns the entry with other training settings, as ``make_plan`` would have made it."""
    settings = parse_overrides(entry.study, overrides)
    if not settings:
        return entry
    for key in settings:
        require(key.startswith("train."), "set", key, "a setting of train; other settings need a new plan")
    added = "".join(f" --{key.replace('_', '-')} {value}" for key, value in settings.items())
    facts = _facts(entry.study, with_settings(recipe_from_dict(entry.recipe), settings))
    return replace(entry, command=entry.command + added, **facts)


def choose_rates(summaries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns each study's learning rate of stage ``tune`` with the best validation mean over ``TUNED``."""
    found: dict[tuple[str, float], list[float]] = {}
    for summary in summaries:
        if summary["stage"] == TUNING and summary["label"] in TUNED:
            found.setdefault((summary["study"], summary["recipe"]["train"]["lr"]), []).append(goodness(summary))
    whole = {key: sum(values) / len(values) for key, values in found.items() if len(values) == len(TUNED)}
    studies = {study for study, _ in whole}
    return {study: max((value, rate) for (name, rate), value in whole.items() if name == study)[1] for study in studies}


def own_rates(name: str, summaries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns, for each label of a study of rates, the best rate on the validation split, once all have been tried.

    It uses the first seed, trained as long as in the parent study: on text, half the rate was better after 200 steps
    but not after 1,000.
    """
    rates = STUDIES[STUDIES[name].recipe].rates
    found = rates_of(name, summaries)
    whole = {label: runs for label, runs in found.items() if {*rates} <= {*runs}}
    return {label: max(runs, key=lambda rate: goodness(runs[rate])) for label, runs in whole.items()}


def rates_of(name: str, summaries: Iterable[Mapping[str, Any]]) -> dict[str, dict[float, Mapping[str, Any]]]:
    """Returns the first seeds of a study of rates by label and rate; its parent has those at the common rate."""
    study = STUDIES[name]
    recipe = with_settings(load_recipe(study.recipe), study.settings)
    seed = recipe.seeds[0]
    at = [{"train.lr": rate, "name": of} for rate in STUDIES[study.recipe].rates for of in (name, study.recipe)]
    shared = {digests(with_settings(recipe, settings))["shared_digest"] for settings in at}
    found: dict[str, dict[float, Mapping[str, Any]]] = {}
    for summary in summaries:
        if summary["shared_digest"] in shared and summary["seed"] == seed and summary["label"] in study.labels:
            found.setdefault(summary["label"], {})[summary["recipe"]["train"]["lr"]] = summary
    return found


def goodness(summary: Mapping[str, Any]) -> float:
    """Returns the main metric on the validation split, negated if lower is better."""
    return summary["valid"][summary["metric"]] * (1 if summary["higher_is_better"] else -1)


def digest(recipe: Recipe) -> str:
    """Returns the SHA-256 of all settings that can change a result and differ from their default.

    So if the program gets a new setting, with a default that changes nothing, finished runs are still recognised.
    """
    essential = _essential(recipe, "")
    return hashlib.sha256(json.dumps(essential, sort_keys=True).encode()).hexdigest()


def _essential(value: Any, where: str) -> Any:
    if not is_dataclass(value):
        return to_plain(value)
    found = {}
    for f in fields(value):
        key, own = f"{where}.{f.name}" if where else f.name, getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if key not in NOT_IN_DIGEST and (default is MISSING or own != default):
            found[f.name] = _essential(own, key)
    return found


def _command(study: Study, variant: Variant, seed: int, settings: Mapping[str, Any]) -> str:
    words = ["intbmoe train", study.recipe, *["--data.path DATA"] * study.needs_data, f"--moe.name {variant.moe.name}"]
    if variant.moe.label:
        words.append(f"--moe.label {variant.moe.label}")
        for option, value in variant.moe.options.items():
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"--moe.options.{option.replace('_', '-')} {text}".rstrip())
    shown = {key: value for key, value in settings.items() if key not in FREE_TO_CHANGE}
    words += [f"--{key.replace('_', '-')} {value}" for key, value in shown.items()]
    return " ".join([*words, f"--train.seed {seed}"])


def parse_overrides(study: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Reads settings: ``train.epochs=5`` for every study, ``digits:train.epochs=5`` for one of them."""
    found = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is not a setting: write key=value, such as train.epochs=5")
        where, colon, rest = key.partition(":")
        if not colon or where == study:
            found[rest if colon else key] = yaml.safe_load(value)
    return found


def free_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Reads ``key=value`` of settings that a plan leaves open, because they change no result."""
    found = parse_overrides("", texts)
    for key in found:
        require(key in NOT_IN_DIGEST, "run-with", key, f"one of {', '.join(NOT_IN_DIGEST)}; the plan sets the others")
    return found


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    data = recipe_to_dict(recipe)
    for key, value in settings.items():
        *rooms, last = key.split(".")
        inner = data
        for room in rooms:
            inner = inner[room]
        inner[last] = value
        if key == "train.epochs" and "train.steps" not in settings:
            data["train"]["steps"] = None
    return recipe_from_dict(data)


def read_summaries(folder: Path) -> list[dict[str, Any]]:
    """Reads all summaries in a folder and recomputes their digests, because the program may have changed since."""
    found = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*--*--*--*.json"))}
    return [
        {**summary, "file": str(path), **digests(recipe_from_dict(summary["recipe"]))}
        for path, summary in found.items()
    ]


def write_plan(entries: Sequence[Entry], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([vars(entry) for entry in entries], indent=1, ensure_ascii=False), encoding="utf-8")


def read_plan(path: Path) -> list[Entry]:
    """Reads what ``write_plan`` wrote and recomputes the digests."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return [Entry(**{**entry, **digests(recipe_from_dict(entry["recipe"]))}) for entry in found]
