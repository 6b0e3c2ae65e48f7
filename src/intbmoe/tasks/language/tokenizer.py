"""Byte-level BPE with Hugging Face's ``tokenizers``: read from a file, trained, and applied to documents."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from intbmoe.foreign import import_extra
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language.packed import token_type

END_OF_TEXT = "<|endoftext|>"
BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 2**20  # encoded at a time: enough for all cores, but little memory (100 bytes per token)


def import_tokenizers(purpose: str = "preparing text", extra: str = "text") -> ModuleType:
    return import_extra("tokenizers", purpose, extra)


def read_tokenizer(content: str, tokenizers: ModuleType) -> Any:
    """Return the tokenizer in this JSON, for whole texts: "<|endoftext|>" in a text is letters, not its end."""
    tokenizer = tokenizers.Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocabulary_size(tokenizer: Any) -> int:
    """Return one more than the largest id: a tokenizer may leave some ids out."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def train_bpe(texts: Iterable[str], vocabulary: int) -> str:
    """Return the JSON of a byte-level BPE, with the end of text as id 0; the same on any number of cores."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte has a token, even if it does not occur
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


class Encoder:
    def __init__(self, content: str, where: str, ends: Sequence[str] = (END_OF_TEXT,)) -> None:
        """``content`` is a tokenizer's JSON, ``where`` its file; the first of ``ends`` that it knows ends a text."""
        self.content = content
        tokenizers = import_tokenizers()
        try:
            self._tokenizer = read_tokenizer(content, tokenizers)
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"{where} is not a tokenizer of Hugging Face's tokenizers: {error}") from error
        found = [end for end in map(self._tokenizer.token_to_id, ends) if end is not None]
        if not found:
            wanted, option = " or ".join(map(repr, ends)), "" if len(ends) == 1 else "; name yours: data.end_of_text"
            raise DataError(f"{where} has no token {wanted}: expected one, which ends every document{option}")
        self.end_of_text: int = found[0]
        self.vocabulary: int = vocabulary_size(self._tokenizer)
        self.dtype = token_type(self.vocabulary)

    def encode(self, documents: Iterable[str]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number of documents, their ids with an end of text after each), batch by batch."""
        end = np.array([self.end_of_text], self.dtype)
        for batch in batches(documents, len):
            yield len(batch), np.concatenate([part for ids in self.encode_texts(batch) for part in (ids, end)])

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, without an end of text."""
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(text.ids, dtype=self.dtype) for text in encoded]


def batches(entries: Iterable[Any], length: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Yield the entries that are encoded together; ``length`` gives the number of characters of one."""
    batch, characters = [], 0
    for entry in entries:
        batch.append(entry)
        characters += length(entry)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
