"""Golden requests: validation inputs with the answers an artifact gave when it was exported.

A server asks them again before it trusts an artifact on its own machine. There the arithmetic may round otherwise, so
scores are compared to a tolerance, and entries of a ranking may change places where their scores differ by less. How
much rounding can do to this model's answers, tokens that take another block because of it included, is measured at
export: the same weights answer once more in a wider type.
"""

import base64
import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from intbmoe.export.predictor import Answer, Predictor
from intbmoe.tasks.base import Task
from intbmoe.tasks.travel.examples import JourneyExamples

COUNT = 8
SAFETY = 8
"""Another machine may round so many times as unluckily as was measured."""
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
PROMPT_TOKENS, NEW_TOKENS = 32, 16
THUMBNAIL = 320


@dataclass(frozen=True)
class Difference:
    """How the answer to a golden request differs from the one at export."""

    number: int
    """Which request, from 0."""
    what: str

    def __str__(self) -> str:
        return f"golden request {self.number}: {self.what}"


def make_golden(predictor: Predictor, task: Task, count: int = COUNT) -> list[dict[str, Any]]:
    """Requests from the validation split with this predictor's answers, each asked alone."""
    requests = MAKERS[task.recipe.task](predictor, task.split("valid"), count)
    wider = _in_a_wider_type(predictor)
    if predictor.action == "generate":
        requests = _sure_parts(predictor, wider, requests)
    answers = [ask(predictor, request) for request in requests]
    doubts = [_doubt(answer, ask(wider, request)) for request, answer in zip(requests, answers, strict=True)]
    largest = max(abs(score) for answer in answers for score in _scores(answer).values())
    tolerance = SAFETY * (max(doubts) + torch.finfo(predictor.dtype).eps * largest)
    return [{"request": r, "answer": a, "tolerance": tolerance} for r, a in zip(requests, answers, strict=True)]


def _scores(answer: Answer) -> dict[Any, float]:
    """What is scored → its score: the entries of a ranking, or a text."""
    if "results" in answer:
        return {entry["id"]: entry["score"] for entry in answer["results"]}
    return {answer["text"]: answer["score"]}


def _doubt(own: Answer, wide: Answer) -> float:
    """By how much the scores of the same things differ."""
    own, wide = _scores(own), _scores(wide)
    return max((abs(own[one] - wide[one]) for one in own.keys() & wide.keys()), default=0.0)


def check_golden(predictor: Predictor, golden: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Ask again: which answers differ from those at export, and by how much; empty where none does."""
    found = []
    for number, entry in enumerate(golden):
        what = compare_answers(entry, ask(predictor, entry["request"]))
        if what is not None:
            found.append(Difference(number, what))
    return found


def ask(predictor: Predictor, request: Mapping[str, Any]) -> Answer:
    """The answer to one request alone."""
    return predictor.answer([predictor.encode(request)])[0]


def compare_answers(entry: Mapping[str, Any], answer: Answer) -> str | None:
    """What is wrong with an answer to a golden request; None where nothing is."""
    expected = entry["answer"]
    if "results" in expected:
        return compare_rankings(expected["results"], answer["results"], entry["tolerance"])
    if answer["text"] != expected["text"]:
        return f"the text is {answer['text']!r}, at export it was {expected['text']!r}"
    by = abs(answer["score"] - expected["score"])
    if not by <= entry["tolerance"]:
        return (
            f"the text's score is {answer['score']:.6g}, at export it was {expected['score']:.6g}: "
            f"they differ by {by:.3g}, and {entry['tolerance']:.3g} is allowed"
        )
    return None


def compare_rankings(expected: Sequence[Mapping], found: Sequence[Mapping], tolerance: float) -> str | None:
    """None where scores agree, rank by rank and entry by entry, and only near-equals have changed places."""
    if len(expected) != len(found):
        return f"it has {len(found)} results, at export {len(expected)}"
    was, now = ({entry["id"]: entry["score"] for entry in ranking} for ranking in (expected, found))
    for rank, (before, after) in enumerate(zip(expected, found, strict=True)):
        by = abs(before["score"] - after["score"])
        # An entry that was not among these may be there now if it is as good as the last of them.
        own = abs(was.get(after["id"], expected[-1]["score"]) - after["score"])
        gone = abs(now.get(before["id"], found[-1]["score"]) - before["score"])
        if not max(by, own, gone) <= tolerance:
            return (
                f"result {rank} is {after['id']} with {after['score']:.6g}, at export {before['id']} with "
                f"{before['score']:.6g}: they differ by {max(by, own, gone):.3g}, and {tolerance:.3g} is allowed"
            )
    return None


def _in_a_wider_type(predictor: Any) -> Any:
    """The same weights in a type of twice the digits; float64 has none."""
    dtype = WIDER.get(predictor.dtype, predictor.dtype)
    return predictor.with_model(copy.deepcopy(predictor.model).to(dtype))


def _sure_parts(predictor: Any, wider: Any, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The requests with as many new tokens as rounding cannot change; at least the surest token of all."""
    margins = [(request, _margins(predictor, wider, request)) for request in requests]
    sure = [(request, int((margin > 1).long().cumprod(0).sum())) for request, margin in margins]
    kept = [{**request, "max_tokens": count} for request, count in sure if count]
    if not kept:
        surest = max((pair for pair in margins if len(pair[1])), key=lambda pair: float(pair[1][0]))
        kept = [{**surest[0], "max_tokens": 1}]
    return kept


@torch.inference_mode()
def _margins(predictor: Any, wider: Any, request: dict[str, Any]) -> torch.Tensor:
    """(new tokens,): by how many times what rounding can do each new token is ahead of the next likeliest."""
    encoded = predictor.encode(request)
    continuation = predictor.stream([encoded])
    for _ in continuation:
        pass
    prompt, new = encoded.payload["ids"].tolist(), continuation.ids[0]
    ids = torch.tensor([[*prompt, *new[:-1]]], device=predictor.device)
    own, wide = (one.model(ids)[0, len(prompt) - 1 :][: len(new)].double() for one in (predictor, wider))
    best = own.topk(2, dim=1).values
    # The doubt of a logit is the largest of the vocabulary, and both of two logits have it.
    return (best[:, 0] - best[:, 1]) / (2 * SAFETY * (own - wide).abs().amax(1).clamp(min=1e-12))


def _spread(total: int, count: int) -> list[int]:
    """Numbers below ``total``, evenly spread."""
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(int)).tolist()


def _images(predictor: Any, split: Any, count: int) -> list[dict[str, Any]]:
    requests = []
    for index in _spread(len(split), count):
        image = split.images.image(index)
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        content = io.BytesIO()
        image.save(content, "PNG")
        requests.append({"image": base64.b64encode(content.getvalue()).decode()})
    return requests


def _items(predictor: Any, split: Any, count: int) -> list[dict[str, Any]]:
    requests = []
    for number, index in enumerate(_spread(len(split), count)):
        history = split.items[split.starts[index] : split.events[index]] + predictor.first_id
        requests.append({"history": history.tolist(), "visited": ("allow", "exclude")[number % 2]})
    return requests


def _journeys(predictor: Any, split: JourneyExamples, count: int) -> list[dict[str, Any]]:
    """The sessions up to a window's last, which is ``now``."""
    requests = []
    for number, shard in enumerate(split.reader.data.shards):
        windows = split.windows[number]
        for index in _spread(len(windows), -(-count // len(split.windows))) if len(windows) else []:
            user, stop, length = (int(column[index]) for column in (windows.user, windows.stop, windows.length))
            sessions = [_session(predictor, shard, row) for row in range(stop - length, stop)]
            now = {name: value for name, value in sessions[-1].items() if name in ("time", "cell", "region", "weather")}
            profile = zip(predictor.fields.profile, shard.profile[user].tolist(), strict=True)
            known = {name: predictor.fields.value(name, code) for name, code in profile if code}
            visited = ("allow", "exclude")[len(requests) % 2]
            requests.append({"history": sessions[:-1], "now": now, "profile": known, "visited": visited})
    return requests[:count]


def _session(predictor: Any, shard: Any, row: int) -> dict[str, int]:
    codes = {name: int(getattr(shard, name)[row]) for name in ("cell", "region", "weather", "mode", "action")}
    codes |= {name: int(getattr(shard, name)[row]) + 1 for name in ("place", "via")}
    known = {name: predictor.fields.value(name, code) for name, code in codes.items() if code}
    return {"time": int(shard.time[row]), **known}


def _prompts(predictor: Any, split: Any, count: int) -> list[dict[str, Any]]:
    requests = []
    for index in _spread(len(split), count):
        start = index * split.length
        decoder = predictor.vocabulary.new_decoder()
        # Cut where a document ends, and where a character does: what is incomplete is left in the decoder.
        ids = split.tokens[start : start + min(PROMPT_TOKENS, split.length // 2)].tolist()
        ids = ids[: ids.index(predictor.vocabulary.end_of_text)] if predictor.vocabulary.end_of_text in ids else ids
        text = "".join(map(decoder.add, ids)).lstrip("\ufffd")
        requests.append({"prompt": text, "max_tokens": min(NEW_TOKENS, predictor.length), "temperature": 0.0})
    return requests


MAKERS: dict[str, Callable[[Any, Any, int], list[dict[str, Any]]]] = {
    "vision": _images,
    "sequences": _items,
    "travel": _journeys,
    "language": _prompts,
}
