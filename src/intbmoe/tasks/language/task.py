"""Language modelling with the Llama-style decoder: MiniPile, Wikipedia, Python's standard library, any files.

A batch has ``ids`` and ``targets``, (B, length) each: the target of a token is the next token.

In an artifact, ``catalogue.json`` has tokenizer, the file beside it or null for bytes, and end_of_text, the id that
ends a document. Its graphs take ids (B, T) and mask (B, T) and return scores (B, T, vocabulary).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.models.llama import Llama, LlamaConfig
from intbmoe.ops.cross_entropy import cross_entropy
from intbmoe.registry import register_task
from intbmoe.settings import Checked, MustBe, NonNegativeInt, PositiveInt
from intbmoe.tasks.base import Batch, Examples, Task
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language import own_text, packed, stdlib
from intbmoe.tasks.language.files import save_texts
from intbmoe.tasks.language.looking import kind_view, show_texts, token_texts
from intbmoe.tasks.language.packed import TokenExamples, TokenSource
from intbmoe.tasks.language.serving import GeneratePredictor, prompt_requests
from intbmoe.tasks.looking import Shown, View, position_view
from intbmoe.tasks.mixture import ffn_maker
from intbmoe.tasks.own_data import require_known, require_unused, resolved
from intbmoe.tasks.preparation import Preparation
from intbmoe.tasks.recipe import Recipe
from intbmoe.tasks.serving import Catalogue, Graph, Request

COUNTED_TOKENS = 2**24
LONGEST_TEXT = 8192  # tokens of a graph's input: rotary positions have no limit of their own
LARGEST_LOSS = 700.0  # the largest whose perplexity is finite: e^700 is as good as infinite


Between = Annotated[float, MustBe("a number between 0 and 0.5", lambda value: 0 < value < 0.5)]
OF_FILES = ("column", "tokenizer", "tokenizer_size", "end_of_text", "valid_fraction", "test_fraction", "split_seed")
OF_FILES += ("fingerprint",)


@dataclass(frozen=True, kw_only=True)
class LanguageData(Checked):
    """Which text to use, and how it is cut."""

    source: Literal["stdlib", "wikipedia", "minipile", "files"] = "stdlib"
    """files are any text files; stdlib comes with Python; docs/data.md says how to get the others."""
    path: str | None = None
    """files: a .txt, .jsonl or .parquet file, or a folder of them. Otherwise the folder that intbmoe prepare made."""
    length: PositiveInt = 1024
    """Tokens per example."""
    max_bytes: PositiveInt | None = None
    """stdlib only: about how much of the text to use, over all splits; None for all of it."""

    column: str = "text"
    """files: the field of .jsonl files, or column of .parquet files, with the text."""
    tokenizer: str = "bpe"
    """files: bpe trains byte pairs on the text; bytes reads it byte by byte; or a tokenizer.json or tokenizer.model."""
    tokenizer_size: PositiveInt = 8192
    """files: the most tokens of a trained tokenizer."""
    end_of_text: str | None = None
    """files: the token of a given tokenizer that ends a document; None for a common one, such as <|endoftext|>."""
    valid_fraction: Between = 0.05
    """files: share of the text held out for validation, if no file is named after that split."""
    test_fraction: Between = 0.05
    """files: share of the text held out for the test, if no file is named after that split."""
    split_seed: NonNegativeInt = 0
    """files: another number holds out other documents."""
    fingerprint: str | None = None
    """files: fingerprint of the tokens. Set when a run begins; different text is then refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        possible = self.max_bytes is None or self.source == "stdlib"
        require(possible, "max_bytes", self.max_bytes, f"None for {self.source}, which is used as it was prepared")
        require_unused(self, "files", OF_FILES)


@dataclass(frozen=True)
class LanguageRecipe(Recipe):
    """A recipe of the language task."""

    task: Literal["language"]
    data: LanguageData
    model: LlamaConfig


@register_task("language")
class LanguageTask(Task):
    recipe_type: ClassVar[type[Recipe]] = LanguageRecipe
    causal = True
    dense_in_place = "swiglu"
    inputs = ("ids",)
    reported: ClassVar = {"perplexity": "PPL"}
    preparations: ClassVar[Mapping[str, Preparation]] = {
        "minipile": Preparation(
            "a folder of MiniPile's parquet files, as Hugging Face has them", "intbmoe.tasks.language.minipile:prepare"
        ),
        "wikipedia": Preparation(
            "a folder with wiki_*.txt.xz and a tokenizer, see docs/data.md", "intbmoe.tasks.language.wikipedia:prepare"
        ),
    }
    predictor = GeneratePredictor
    own_source = "files"

    def resolve(self) -> Recipe:
        if self.recipe.data.source == "files":
            source = self._source
            for name in source.splits:
                self.split(name)  # raises if there is too little text
            self.recipe = resolved(self.recipe, source.fingerprint, vocabulary=source.vocabulary)
        return self.recipe

    @classmethod
    def save_data(cls, data: Any, folder: Path, settings: LanguageData) -> None:
        save_texts(data, folder, settings.column)

    def make_model(self) -> nn.Module:
        config = self.recipe.model
        require_known(config.vocabulary, "model.vocabulary")
        return Llama(config, ffn_maker(self.recipe.moe, config.dim, config.hidden, expert="swiglu", domain="language"))

    def read_split(self, name: str) -> Examples:
        """Return ``train``, ``valid`` or ``test``: different documents each, and always the same."""
        source, length = self._source, self.recipe.data.length
        examples = TokenExamples(source.splits[name], length)
        if len(examples) == 0:
            raise DataError(
                f"{source.where}: the {name} split has {len(examples.tokens)} tokens, an example takes {length + 1}: "
                f"lower data.length ({length})"
            )
        return examples

    @cached_property
    def _source(self) -> TokenSource:
        data, vocabulary = self.recipe.data, self.recipe.model.vocabulary
        if data.source == "files":
            return own_text.read(data, vocabulary)
        from_python = data.source == "stdlib"
        source = stdlib.read(data.path, data.max_bytes) if from_python else packed.read(data.path, data.source)
        if source.vocabulary != vocabulary:
            raise DataError(
                f"{source.where} has a vocabulary of {source.vocabulary}: set model.vocabulary="
                f"{source.vocabulary} (it is {vocabulary})"
            )
        return source

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        targets = batch["targets"]
        losses = cross_entropy(model(batch["ids"]), targets)
        return losses.sum(), targets.new_full((), targets.numel(), dtype=torch.int64)

    def evaluate_examples(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        targets = batch["targets"]
        losses = cross_entropy(model(batch["ids"]), targets)
        return {"count": targets.new_full((len(targets),), targets.shape[1]), "loss": losses.double().sum(1)}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean cross-entropy per token in nats, and its exponential."""
        return _metrics(super().metrics(sums)["loss"])

    def floors(self) -> Mapping[str, Mapping[str, float]]:
        """Return "unigram": every token by its share of the training split alone (each count increased by one)."""
        train, test = self.split("train"), self.split("test")
        vocabulary = self.recipe.model.vocabulary
        known = _count_tokens(train.tokens, vocabulary) + 1
        asked = _count_tokens(test.tokens[1 : len(test) * test.length + 1], vocabulary)
        loss = -(asked * np.log(known / known.sum())).sum() / asked.sum()
        return {"unigram": _metrics(float(loss))}

    def example_inputs(self) -> tuple[Tensor]:
        return (torch.zeros(1, self.recipe.data.length, dtype=torch.int64),)

    def catalogue(self) -> Catalogue:
        source = self._source
        if source.folder is None:
            return Catalogue({"tokenizer": None, "end_of_text": source.end_of_text})
        content = (source.folder / packed.TOKENIZER).read_bytes()
        about = {"tokenizer": packed.TOKENIZER, "end_of_text": source.end_of_text}
        return Catalogue(about, files={packed.TOKENIZER: content})

    def golden_requests(self, predictor: GeneratePredictor, count: int) -> list[Request]:
        return prompt_requests(predictor, self.split("valid"), count)

    def graph(self) -> Graph:
        def complete(batch: Batch) -> Batch:
            return {**batch, "mask": torch.ones_like(batch["ids"], dtype=torch.bool)}

        return Graph(("ids", "mask"), "tokens", LONGEST_TEXT, complete=complete)

    def views(self) -> list[View]:
        everywhere = position_view(self.recipe.data.length, lambda b: torch.ones_like(b["ids"], dtype=torch.bool))
        return [kind_view(token_texts(self._source.folder)), everywhere]

    def shown(self, split: TokenExamples) -> Shown:
        return show_texts(split, token_texts(self._source.folder))


def _metrics(loss: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": math.exp(min(loss, LARGEST_LOSS))}


def _count_tokens(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return (V,) how often each id occurs; the tokens are read one stretch at a time."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for start in range(0, len(tokens), COUNTED_TOKENS):
        counts += np.bincount(tokens[start : start + COUNTED_TOKENS], minlength=vocabulary)
    return counts
