"""From text to token ids and back, piece by piece: bytes, or the byte pairs of a ``tokenizer.json``."""

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
    characters_per_token = 1  # the most characters that can become one token

    def __init__(self, end_of_text: int) -> None:
        self.end_of_text = end_of_text

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]

    def new_decoder(self) -> "ByteDecoder":
        return ByteDecoder()


class ByteDecoder:
    """Decodes the ids of one text to characters, which may take several ids each; invalid UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """Return the text that this id completes; often one character, or none yet."""
        return self._decoder.decode(bytes([token]) if token < 256 else b"")

    def end(self) -> str:
        """Return what is left when no more ids come."""
        return self._decoder.decode(b"", final=True)


class BytePairs:
    """A tokenizer of Hugging Face's ``tokenizers``."""

    characters_per_token = 32  # longer tokens are rare; this bounds the work on a text that is too long

    def __init__(self, content: str, end_of_text: int) -> None:
        """``content`` is the tokenizer's JSON."""
        self.end_of_text = end_of_text
        self._tokenizer = read_tokenizer(content, import_tokenizers("this model's text", "serve"))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def new_decoder(self) -> "PairDecoder":
        return PairDecoder(self._tokenizer)


class PairDecoder:
    """Holds back ids until they form whole characters."""

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
        """Return ids that never became a character, as U+FFFD."""
        return self._tokenizer.decode(self._held, skip_special_tokens=True) if self._held else ""


Vocabulary = ByteVocabulary | BytePairs
Decoder = ByteDecoder | PairDecoder


def read_vocabulary(artifact: Exported) -> Vocabulary:
    about = artifact.catalogue
    if about["tokenizer"] is None:
        return ByteVocabulary(about["end_of_text"])
    return BytePairs(artifact.file(about["tokenizer"]).read_text(encoding="utf-8"), about["end_of_text"])
