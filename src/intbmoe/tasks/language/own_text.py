"""Tokens of the user's own text files, made once and cached (``own_data.cached_folder``) as a packed folder.

The tokenizer is trained on the training documents ("bpe"), read from a file of Hugging Face's ``tokenizers`` or of
sentencepiece, or not needed ("bytes"). The folder's name follows from the files (names, sizes, times) and the settings;
the fingerprint, which a run remembers, follows from the tokens themselves.
"""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.files import digest, to_json
from intbmoe.foreign import import_extra
from intbmoe.tasks.base import SPLITS
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language import packed, stdlib
from intbmoe.tasks.language.files import Texts, find_texts
from intbmoe.tasks.language.packed import TOKENIZER, TokenSource, tokens_name
from intbmoe.tasks.language.sentence_pieces import convert
from intbmoe.tasks.language.tokenizer import BATCH_CHARACTERS, END_OF_TEXT, Encoder, batches, train_bpe
from intbmoe.tasks.language.vocabulary import ByteVocabulary
from intbmoe.tasks.own_data import cached_folder, fingerprint, require_same_data, require_size
from intbmoe.tasks.preparation import META

NAME = "files"
LEAST = 257  # tokens of a byte-level BPE: all bytes and the end of text
TRAINED_ON = 2**29  # the most characters that a tokenizer is trained on
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]", "<|im_end|>")


def read(data: Any, vocabulary: int | None) -> TokenSource:
    """Return the source of the recipe's ``data``, making the tokens if they do not exist yet."""
    texts = find_texts(data)
    folder = cached_folder("text", _key(data, texts), lambda beside: _make(texts, data, beside), _is_whole)
    source = packed.read(str(folder), NAME)
    require_same_data(data.fingerprint, source.fingerprint, str(texts.root))
    require_size(vocabulary, source.vocabulary, "model.vocabulary", str(texts.root))
    tokenizer = folder if (folder / TOKENIZER).is_file() else None
    return replace(source, where=str(texts.root), folder=tokenizer)


def _is_whole(folder: Path) -> bool:
    try:
        packed.read_meta(folder, NAME)
    except DataError:
        return False
    return True


def _key(data: Any, texts: Texts) -> str:
    """Return a key of everything that the tokens depend on."""
    files = {
        split: [[str(f.relative_to(texts.root)), (at := f.stat()).st_size, at.st_mtime_ns] for f in found]
        for split, found in texts.files.items()
    }
    given = None if data.tokenizer in ("bpe", "bytes") else digest(_given(data.tokenizer).read_bytes())
    chosen = [data.column, data.tokenizer, given, data.tokenizer_size, data.end_of_text, texts.shares, texts.seed]
    return fingerprint(to_json([packed.VERSION, str(texts.root.resolve()), files, chosen]))


def _given(path: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(
            f"data.tokenizer={path!r} is not a file: expected 'bpe', 'bytes', a tokenizer.json or a tokenizer.model"
        )
    return file


def _read_given(file: Path, texts: Texts) -> str:
    if file.suffix == ".model":
        return convert(file, _sample(texts))
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not a tokenizer of Hugging Face's tokenizers: it is not text") from error


def _make_encoder(texts: Texts, data: Any) -> ByteVocabulary | Encoder:
    if data.tokenizer == "bytes":
        return ByteVocabulary(stdlib.END_OF_TEXT)
    import_extra("tokenizers", f"data.tokenizer={data.tokenizer} (bytes needs nothing)", "text")
    if data.tokenizer != "bpe":
        ends = ENDS if data.end_of_text is None else (data.end_of_text,)
        return Encoder(_read_given(_given(data.tokenizer), texts), data.tokenizer, ends)
    if data.tokenizer_size < LEAST:
        raise DataError(f"data.tokenizer_size={data.tokenizer_size}: a byte-level BPE has {LEAST} tokens or more")
    content = train_bpe(_sample(texts), data.tokenizer_size)
    return Encoder(content, "the tokenizer")


def _sample(texts: Texts) -> Iterator[str]:
    total = 0
    for split, text in texts.assigned():
        if split == "train":
            for piece in pieces(text):
                yield piece
                total += len(piece)
                if total >= TRAINED_ON:
                    return


def pieces(text: str) -> Iterator[str]:
    """Yield a long text in parts that are small enough to encode, cut after line breaks if there are any."""
    start = 0
    while len(text) - start > BATCH_CHARACTERS:
        end = text.rfind("\n", start, start + BATCH_CHARACTERS) + 1 or start + BATCH_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def _make(texts: Texts, data: Any, folder: Path) -> None:
    encoder = _make_encoder(texts, data)
    counts = {split: {"documents": 0, "tokens": 0, "skipped": 0} for split in SPLITS}
    sums = {split: hashlib.sha256() for split in SPLITS}
    end = np.array([encoder.end_of_text], encoder.dtype)
    with ExitStack() as stack:
        files = {split: stack.enter_context(open(folder / tokens_name(split), "wb")) for split in SPLITS}
        for batch in batches(_assigned_pieces(texts), lambda entry: len(entry[1])):
            found = encoder.encode_texts([piece for _, piece, _ in batch])
            for (split, _, last), ids in zip(batch, found, strict=True):
                content = (np.concatenate([ids, end]) if last else ids).tobytes()
                files[split].write(content)
                sums[split].update(content)
                counts[split]["documents"] += last
                counts[split]["tokens"] += len(ids) + last
    if not counts["train"]["tokens"]:
        raise DataError(f"{texts.root} holds no text: all documents are empty")
    for split, count in counts.items():
        count |= {"bytes": count["tokens"] * encoder.dtype.itemsize, "sha256": sums[split].hexdigest()}
    if encoder.content is not None:
        (folder / TOKENIZER).write_text(encoder.content, encoding="utf-8")
    about = {"vocabulary": encoder.vocabulary, "end_of_text": encoder.end_of_text, "dtype": encoder.dtype.name}
    same = fingerprint(to_json(about), encoder.content or "", *(count["sha256"] for count in counts.values()))
    meta = {"version": packed.VERSION, "name": NAME, **about, "splits": counts, "fingerprint": same}
    (folder / META).write_bytes(to_json(meta))


def _assigned_pieces(texts: Texts) -> Iterator[tuple[str, str, bool]]:
    """Yield (split, piece of a document, whether it is the document's last)."""
    for split, text in texts.assigned():
        *most, last = pieces(text)
        yield from ((split, piece, False) for piece in most)
        yield split, last, True
