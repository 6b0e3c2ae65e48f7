"""Text to token ids and back, piece by piece: bytes, or the byte pairs of a ``tokenizer.json``."""

import codecs
from collections.abc import Sequence
from typing import Any

import numpy as np

from intbmoe.tasks.language.packed import token_type
from intbmoe.tasks.language.tokenizer import import_tokenizers, read_tokenizer
from intbmoe.tasks.serving.predictor import Exported


class ByteVocabulary:
    """Ids 0…255 are the bytes of UTF-8."""

    content: str | None = None  # of a tokenizer
    vocabulary, dtype = 257, token_type(257)
    characters_per_token = 1  # at most so many characters can become one token

    def __init__(self, end_of_text: int) -> None:
        self.end_of_text = end_of_text

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]

    def new_decoder(self) -> "ByteDecoder":
        return ByteDecoder()


class ByteDecoder:
    """Ids of one text to characters, each of which may take several; bytes that are not UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """The text that this id completes; often one character, or none yet."""
        return self._decoder.decode(bytes([token]) if token < 256 else b"")

    def end(self) -> str:
        """What is left when no more come."""
        return self._decoder.decode(b"", final=True)


class BytePairs:
    """A tokenizer of Hugging Face's ``tokenizers``."""

    characters_per_token = 32  # longer tokens are rare; it bounds the work on a text that is refused for its length

    def __init__(self, content: str, end_of_text: int) -> None:
        """``content`` is its JSON."""
        self.end_of_text = end_of_text
        self._tokenizer = read_tokenizer(content, import_tokenizers("this model's text", "serve"))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def new_decoder(self) -> "PairDecoder":
        return PairDecoder(self._tokenizer)


class PairDecoder:
    """Holds back ids until they are whole characters."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream, self._held = tokenizer, DecodeStream(skip_special_tokens=True), []

    def add(self, token: int) -> str:
        self._held.append(token)
        text = self._stream.step(self._tokenizer, token)
        if text is None:
            return ""
        self._held = []
        return text

    def end(self) -> str:
        """Ids that never became a character, as U+FFFD."""
        return self._tokenizer.decode(self._held, skip_special_tokens=True) if self._held else ""


Vocabulary = ByteVocabulary | BytePairs
Decoder = ByteDecoder | PairDecoder


def read_vocabulary(artifact: Exported) -> Vocabulary:
    about = artifact.catalogue
    if about["tokenizer"] is None:
        return ByteVocabulary(about["end_of_text"])
    return BytePairs(artifact.file(about["tokenizer"]).read_text(encoding="utf-8"), about["end_of_text"])
