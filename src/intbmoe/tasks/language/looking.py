"""How the tokens of a text are told apart, and how single texts are shown."""

import string
from pathlib import Path

import torch

from intbmoe.tasks.base import Batch
from intbmoe.tasks.language.packed import TOKENIZER, TokenExamples
from intbmoe.tasks.language.tokenizer import import_tokenizers, vocabulary_size
from intbmoe.tasks.looking import Content, Shown, Token, View, spread

MOST_TOKENS = 256  # shown of a text, from the beginning
TOKEN_KINDS = ("letters", "digits", "punctuation", "code symbols", "white space", "other")
PUNCTUATION = frozenset(".,;:!?'\"…–—‘’“”«»¡¿")
CODE_SYMBOLS = frozenset(string.punctuation) - PUNCTUATION  # brackets, operators and others that are rare in prose


def kind_view(texts: list[str]) -> View:
    kinds = torch.tensor([TOKEN_KINDS.index(kind_of(text)) for text in texts])
    return View("kind of token", TOKEN_KINDS, lambda batch: kinds.to(batch["ids"].device)[batch["ids"]])


def show_texts(split: TokenExamples, texts: list[str]) -> Shown:
    def describe(batch: Batch, row: int, index: int) -> Content:
        ids = batch["ids"][row, :MOST_TOKENS].tolist()
        return Content(f"text {index}", [Token("token", texts[token]) for token in ids])

    return Shown("text", spread(len(split)), describe)


def token_texts(folder: Path | None) -> list[str]:
    """Return the text of each id of the tokenizer in ``folder``; None: ids are bytes, some without a text."""
    if folder is None:
        return [chr(byte) for byte in range(128)] + [""] * 129  # the last id ends a file
    tokenizer = import_tokenizers("telling tokens apart").Tokenizer.from_file(str(folder / TOKENIZER))
    return [tokenizer.decode([index]) for index in range(vocabulary_size(tokenizer))]


def kind_of(text: str) -> str:
    """Return one of ``TOKEN_KINDS``: what all characters of a token are, apart from white space around them."""
    inner = text.strip()
    if text and not inner:
        return "white space"
    tests = {
        "letters": str.isalpha,
        "digits": str.isdigit,
        "punctuation": PUNCTUATION.__contains__,
        "code symbols": CODE_SYMBOLS.__contains__,
    }
    return next((kind for kind, test in tests.items() if inner and all(map(test, inner))), "other")
