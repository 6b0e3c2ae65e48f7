"""Convert a sentencepiece model (``tokenizer.model``) to the JSON of Hugging Face's ``tokenizers``.

Unigram and BPE models are converted from what the file says about pieces, white space and bytes. The two programs treat
rare cases differently, so the result is tried on the text that it is for, and refused if an id differs.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from intbmoe.tasks.errors import DataError

SPACE = "▁"
TRIED = 2**20  # characters
NORMAL, USER_DEFINED, BYTE = 1, 4, 6  # types of pieces that text becomes; other types are ends, unknown and unused
UNIGRAM, BPE = 1, 2


def convert(file: Path, texts: Iterable[str]) -> str:
    """Return the tokenizer's JSON; it is tried on ``texts``."""
    try:
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{file} is a sentencepiece model: pip install sentencepiece protobuf, or save it as tokenizer.json "
            f"(transformers: AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER))"
        ) from error
    content = file.read_bytes()
    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
        original = SentencePieceProcessor(model_proto=content)
    except Exception as error:  # protobuf's and sentencepiece's own errors
        raise DataError(f"{file} is not a sentencepiece model: {error}") from error
    tokenizer = _build(model, file)
    # Line by line: over a long text, rounding in sentencepiece's float32 sums of scores would decide ties.
    tried = 0
    for line in (line for text in texts for line in text.split("\n")):
        if tokenizer.encode(line, add_special_tokens=False).ids != original.encode(line):
            raise DataError(
                f"{file} cannot be read exactly: tokenizers and sentencepiece differ in {line[:60]!r}; save it as "
                f"tokenizer.json with transformers, and give that file"
            )
        tried += len(line)
        if tried >= TRIED:
            break
    return tokenizer.to_str()


def _build(model: Any, file: Path) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind, bytes_too, rules = model.trainer_spec.model_type, model.trainer_spec.byte_fallback, model.normalizer_spec
    names = [piece.piece for piece in model.pieces]
    can_be = {piece.piece: piece.score for piece in model.pieces if piece.type in (NORMAL, USER_DEFINED)}
    unknown = model.trainer_spec.unk_id
    if kind == UNIGRAM:
        never = min(can_be.values()) - 100  # below all others, so that the text "</s>" does not become that token
        scores = [(name, can_be.get(name, never)) for name in names]
        inner = models.Unigram(scores, unk_id=unknown, byte_fallback=bytes_too)
    elif kind == BPE:
        ids = {name: index for index, name in enumerate(names)}
        inner = models.BPE(ids, _merges(can_be), unk_token=names[unknown], fuse_unk=True, byte_fallback=bytes_too)
    else:
        raise DataError(f"{file} is a sentencepiece model of words or characters: expected unigram or BPE")
    tokenizer = Tokenizer(inner)
    steps = [normalizers.Precompiled(rules.precompiled_charsmap)] if rules.precompiled_charsmap else []
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps += [normalizers.Prepend(" ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    # If pieces have spaces only at their beginning, text can be cut at spaces, which is faster.
    whole = any(SPACE in name[1:] for name in can_be)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=not whole)
    # Keep the first space: what is decoded here continues another text.
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [piece.piece for piece in model.pieces if piece.type not in (NORMAL, USER_DEFINED, BYTE)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    defined = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in defined])
    return tokenizer


def _merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, the best piece first."""
    order = {name: rank for rank, name in enumerate(sorted(pieces, key=lambda name: -pieces[name]))}
    found = []
    for name in order:
        cuts = ((name[:at], name[at:]) for at in range(1, len(name)))
        pairs = [pair for pair in cuts if pair[0] in order and pair[1] in order]
        found += sorted(pairs, key=lambda pair: (order[pair[0]], order[pair[1]]))
    return found
