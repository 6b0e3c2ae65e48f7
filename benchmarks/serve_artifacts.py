"""Makes the artifacts that are served: of trained runs, or with random weights if only time is measured.

journeys         the embedded travel task. "dense", "precomposed" and "composing" (``export --no-precompose``) come from
                 runs trained with the recipe; those of the sweep over E have random weights.
inttravel-like   the paper's travel model with a made-up catalogue, made-up histories and random weights.
texts            the paper's decoder with random weights and a made-up vocabulary, for ``serve_texts.py``.

Models with random weights share everything whose shape does not depend on E, including routers, so that they send
tokens to the same blocks as far as possible.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from intbmoe.export.artifact import ABOUT, FORMAT_VERSION, GOLDEN, Artifact, load_artifact
from intbmoe.export.export import DTYPES, cast_model, export_run, write_about, write_content
from intbmoe.export.golden import ask, make_golden
from intbmoe.files import replacing_folder, to_json
from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.models.travel import PLACE
from intbmoe.recipes import load_recipe, recipe_to_dict
from intbmoe.tasks import make_task
from intbmoe.tasks.language.packed import TOKENIZER
from intbmoe.tasks.recipe import Recipe
from intbmoe.tasks.serving import Catalogue, Predictor
from intbmoe.tasks.travel.examples import HOUR, SCORE_CODES

REQUESTS = 256
"""Number of different requests in a load."""
SWEEP = (1, 2, 4, 8, 16, 32, 64, 128)
SIZES = {"cells": 60_000, "regions": 3_000, "categories": 400, "weathers": 20, "modes": 8, "actions": 12}
PROFILE = (4, 10, 400, 12, 6, 30)
"""Codes of the made-up catalogue; the cost of a request depends on none of them."""
START = 1_704_096_000_000
GOLDEN_SHARE = 0.25
"""Tolerance for golden answers with random weights, relative to the largest score: they only show that it answers."""


@dataclass(frozen=True)
class Variant:
    """One of the compared models."""

    kind: str
    """dense, precomposed or composing."""
    experts: int | None = None
    """None for the recipe's own number."""

    @property
    def name(self) -> str:
        return self.kind if self.experts is None else f"{self.kind}-E{self.experts}"

    @property
    def precompose(self) -> bool:
        return self.kind != "composing"

    def recipe(self, base: Recipe) -> Recipe:
        if self.kind == "dense":
            return replace(base, moe=replace(base.moe, name="dense", options={}))
        moe = base.moe if self.experts is None else replace(base.moe, experts=self.experts)
        return replace(base, moe=moe)


def make_variants(kinds: Sequence[str], experts: Sequence[int]) -> list[Variant]:
    """Returns the variants: the recipe's own E first, then the sweep."""
    own = [Variant(kind) for kind in kinds]
    return own + [Variant(kind, many) for many in experts for kind in kinds if kind != "dense"]


class Journeys:
    """The embedded travel task."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder, self._dtype = folder, dtype
        self.recipe = load_recipe("journeys")

    @cached_property
    def _task(self) -> Any:
        return make_task(self.recipe)

    def artifact(self, variant: Variant) -> Artifact:
        """Makes the artifact once; later calls find it in the folder."""
        to = self._folder / f"journeys-{self._dtype}-{variant.name}"
        if (to / ABOUT).is_file():
            return load_artifact(to)
        if variant.experts is None:
            from intbmoe.train import train  # here, because random weights do not need its packages

            run = train(variant.recipe(self.recipe), root=self._folder / "runs", quiet=True)
            return export_run(run, to, dtype=self._dtype, precompose=variant.precompose)
        recipe = variant.recipe(self.recipe)
        return write_random(
            to, recipe, variant, self._dtype, self._task.catalogue(), lambda one: make_golden(one, self._task)
        )

    def requests(self, artifact: Artifact) -> list[dict[str, Any]]:
        """Returns unchanged histories from the validation split."""
        return self._task.golden_requests(artifact.encoder(), REQUESTS)


class IntTravelLike:
    """The paper's travel model and as many places as asked for."""

    def __init__(self, folder: Path, dtype: str, places: int, device: str) -> None:
        self._folder, self._dtype, self._places, self._device = folder, dtype, places, device
        self.recipe = load_recipe("inttravel")

    @cached_property
    def _catalogue(self) -> Catalogue:
        generator = np.random.default_rng(0)
        codes = np.zeros((1 + self._places, len(PLACE)), np.int32)
        codes[1:, 0] = np.arange(1, 1 + self._places)
        most = {"cell": SIZES["cells"], "category": SIZES["categories"], "region": SIZES["regions"]}
        for column, name in enumerate(PLACE[1:], start=1):
            codes[1:, column] = generator.integers(1, most.get(name, SCORE_CODES), self._places)
        ids = np.cumsum(generator.integers(1, 9, self._places))
        about = {"sizes": {"places": self._places, **SIZES, "profile": list(PROFILE)}, "utc_offset": 8.0}
        return Catalogue(about, {"ids": torch.from_numpy(ids), "codes": torch.from_numpy(codes)})

    def artifact(self, variant: Variant) -> Artifact:
        """Makes the artifact once; later calls find it in the folder."""
        to = self._folder / f"inttravel-{self._places}-{self._dtype}-{variant.name}"
        if (to / ABOUT).is_file():
            return load_artifact(to)
        recipe = variant.recipe(self.recipe)
        return write_random(to, recipe, variant, self._dtype, self._catalogue, self._golden, self._device)

    def requests(self, artifact: Artifact) -> list[dict[str, Any]]:
        """Returns histories as long as the model reads, with all fields of the sessions."""
        return self._make_requests(artifact.encoder(), REQUESTS)

    def _make_requests(self, encoder: Predictor, count: int) -> list[dict[str, Any]]:
        generator = np.random.default_rng(1)
        fields, length = encoder.fields, encoder.sessions
        names = ("cell", "region", "weather", "place", "mode", "action", "via")
        requests = []
        for number in range(count):
            times = START + np.cumsum(generator.integers(1, 48 * HOUR, length))
            columns = {name: generator.choice(fields.coded[name].values, length).tolist() for name in names}
            rows = zip(times.tolist(), *(columns[name] for name in names), strict=True)
            history = [dict(zip(("time", *names), row, strict=True)) for row in rows]
            now = {name: history[-1][name] for name in ("time", "cell", "region", "weather")}
            profile = {name: int(generator.choice(fields.coded[name].values)) for name in fields.profile}
            visited = ("allow", "exclude")[number % 2]
            requests.append({"history": history[:-1], "now": now, "profile": profile, "top_n": 10, "visited": visited})
        return requests

    def _golden(self, predictor: Any) -> list[dict[str, Any]]:
        requests = self._make_requests(predictor, 8)
        answers = [ask(predictor, request) for request in requests]
        largest = max(abs(entry["score"]) for answer in answers for entry in answer["results"])
        pairs = zip(requests, answers, strict=True)
        return [{"request": r, "answer": a, "tolerance": GOLDEN_SHARE * largest} for r, a in pairs]


class Texts:
    """The MiniPile recipe's decoder. Each token is a separate word, so that each is sent as a separate piece."""

    def __init__(self, folder: Path, dtype: str, length: int, device: str, tiny: bool = False) -> None:
        """``length`` is the maximum number of prompt tokens, and also of new tokens."""
        self._folder, self._dtype, self._device, self._tiny = folder, dtype, device, tiny
        recipe = load_recipe("minipile")
        if tiny:
            moe = replace(recipe.moe, options={**recipe.moe.options, "hidden": [40]})
            model = replace(recipe.model, vocabulary=300, dim=24, depth=2, heads=2, hidden=48)
            recipe = replace(recipe, moe=moe, model=model)
        self.recipe = replace(recipe, data=replace(recipe.data, length=length))

    def artifact(self, variant: Variant) -> Artifact:
        """Makes the artifact once; later calls find it in the folder."""
        to = self._folder / f"texts-{self.recipe.data.length}-{self._dtype}-{variant.name}{'-tiny' * self._tiny}"
        if (to / ABOUT).is_file():
            return load_artifact(to)
        recipe = variant.recipe(self.recipe)
        return write_random(to, recipe, variant, self._dtype, self._catalogue, self._golden, self._device)

    def prompts(self, sizes: Sequence[int]) -> list[str]:
        """Returns random words, as many as each size says."""
        generator = np.random.default_rng(0)
        return [" ".join(f"w{number}" for number in generator.integers(self._words, size=size)) for size in sizes]

    @property
    def _words(self) -> int:
        return self.recipe.model.vocabulary

    @property
    def _catalogue(self) -> Catalogue:
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(self._words)}, "w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        # No id ends a text, so each gets as many tokens as requested.
        return Catalogue({"tokenizer": TOKENIZER, "end_of_text": -1}, files={TOKENIZER: tokenizer.to_str().encode()})

    @torch.inference_mode()
    def _golden(self, predictor: Any) -> list[dict[str, Any]]:
        """Generates one token after the prompt with the clearest winner, so that rounding does not change the text."""
        prompts = self.prompts([16] * 32)
        ids = torch.tensor([predictor.encode({"prompt": prompt}).payload["ids"].tolist() for prompt in prompts])
        best = predictor.model(ids.to(predictor.device))[:, -1].float().topk(2).values
        surest = int((best[:, 0] - best[:, 1]).argmax())
        request = {"prompt": prompts[surest], "max_tokens": 1, "temperature": 0.0}
        answer = ask(predictor, request)
        return [{"request": request, "answer": answer, "tolerance": GOLDEN_SHARE * abs(answer["score"])}]


def random_model(recipe: Recipe) -> nn.Module:
    """Builds an untrained model; everything that does not depend on E is the same as with one expert."""
    torch.manual_seed(0)
    model = make_task(recipe).make_model()
    if not any(isinstance(layer, IntBMoE) for layer in model.modules()):
        return model
    torch.manual_seed(0)
    common = make_task(replace(recipe, moe=replace(recipe.moe, experts=1))).make_model().state_dict()
    own = model.state_dict()
    shared: dict[str, Tensor] = {key: value for key, value in common.items() if own[key].shape == value.shape}
    model.load_state_dict({**own, **shared})
    return model


def write_random(
    to: Path,
    recipe: Recipe,
    variant: Variant,
    dtype: str,
    catalogue: Catalogue,
    golden: Callable[[Any], list[dict[str, Any]]],
    device: str = "cpu",
) -> Artifact:
    """Writes an artifact of a model with random weights; there is no trained model to compare it with."""
    with torch.device(device):  # a large model is built faster there
        random = random_model(recipe).requires_grad_(False)
    model = cast_model(random, DTYPES[dtype], precompose=variant.precompose)
    about = {
        "format_version": FORMAT_VERSION,
        "written_by": "benchmarks/serve_artifacts.py: random weights, for measuring time",
        "task": recipe.task,
        "method": recipe.moe.name,
        "recipe": recipe_to_dict(recipe),
        "dtype": dtype,
        "precomposed": variant.precompose and variant.kind != "dense",
        "metrics": {},
        "formats": [],
    }
    with replacing_folder(to) as folder:
        write_content(folder, model, catalogue)
        write_about(folder, about)
        (folder / GOLDEN).write_bytes(to_json(golden(load_artifact(folder).predictor(device))))
        write_about(folder, about)
    return load_artifact(to)


def write_requests(file: Path, requests: Sequence[dict[str, Any]]) -> None:
    """Writes the requests for the clients."""
    bodies = [json.dumps(request, separators=(",", ":")) for request in requests]
    file.write_text(json.dumps({"path": "/v1/recommend", "bodies": bodies}))
