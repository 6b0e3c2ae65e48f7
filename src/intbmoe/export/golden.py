"""Golden requests: held-out inputs with the answers an artifact gave when it was exported.

A server repeats them before it trusts an artifact. Its machine may round differently, so scores are compared within a
tolerance, and entries of a ranking may change places if their scores differ by less. The effect of rounding on this
model's answers is measured at export: the same weights answer again in a wider type.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from intbmoe.tasks import Task
from intbmoe.tasks.serving import Answer, Predictor

COUNT = 8
SAFETY = 8  # another machine's rounding may have up to so many times the measured effect
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}  # twice the digits


def make_golden(predictor: Predictor, task: Task, count: int = COUNT) -> list[dict[str, Any]]:
    """Make requests from held-out examples with this predictor's answers, each computed alone."""
    requests = task.golden_requests(predictor, count)
    wider_model = copy.deepcopy(predictor.model).to(WIDER.get(predictor.dtype, predictor.dtype))
    wider = predictor.with_model(wider_model)
    if predictor.streams:
        requests = _sure_parts(predictor, wider, requests)
    answers = [ask(predictor, request) for request in requests]
    doubts = [_doubt(answer, ask(wider, request)) for request, answer in zip(requests, answers, strict=True)]
    largest = max((abs(score) for answer in answers for score in _scores(answer).values()), default=0.0)
    tolerance = SAFETY * (max(doubts) + torch.finfo(predictor.dtype).eps * largest)
    return [{"request": r, "answer": a, "tolerance": tolerance} for r, a in zip(requests, answers, strict=True)]


def _scores(answer: Answer) -> dict[Any, float]:
    """What is scored → its score: the entries of a ranking, or a text; otherwise every number by its name."""
    if "results" in answer:
        return {entry["id"]: entry["score"] for entry in answer["results"]}
    if "text" in answer:
        return {answer["text"]: answer["score"]}
    return {name: value for name, value in answer.items() if isinstance(value, float)}


def _doubt(own: Answer, wide: Answer) -> float:
    own, wide = _scores(own), _scores(wide)
    return max((abs(own[one] - wide[one]) for one in own.keys() & wide.keys()), default=0.0)


def ask(predictor: Predictor, request: Mapping[str, Any]) -> Answer:
    return predictor.answer([predictor.encode(request)])[0]


def compare_answers(entry: Mapping[str, Any], answer: Answer) -> str | None:
    """What is wrong with an answer to a golden request; None if nothing is."""
    expected = entry["answer"]
    if "results" in expected:
        return compare_rankings(expected["results"], answer["results"], entry["tolerance"])
    if "text" in expected:
        expected, answer = ({name: one[name] for name in ("text", "score")} for one in (expected, answer))
    return _compare_fields(expected, answer, entry["tolerance"])


def _compare_fields(expected: Answer, found: Answer, tolerance: float) -> str | None:
    """None if both have the same fields, with numbers within the tolerance and everything else exactly equal."""
    if expected.keys() != found.keys():
        return f"it has {', '.join(found)}; at export it had {', '.join(expected)}"
    for name, was in expected.items():
        now = found[name]
        same = abs(now - was) <= tolerance if isinstance(was, float) and isinstance(now, float) else now == was
        if not same:
            return f"{name} is {now!r}, at export it was {was!r}; numbers may differ by {tolerance:.3g}"
    return None


def compare_rankings(expected: Sequence[Mapping], found: Sequence[Mapping], tolerance: float) -> str | None:
    """None if scores agree, rank by rank and entry by entry, and only entries with near-equal scores changed places."""
    if len(expected) != len(found):
        return f"it has {len(found)} results; at export it had {len(expected)}"
    was, now = ({entry["id"]: entry["score"] for entry in ranking} for ranking in (expected, found))
    for rank, (before, after) in enumerate(zip(expected, found, strict=True)):
        by = abs(before["score"] - after["score"])
        # An entry may be new in the ranking if its score is as good as that of the last entry.
        own = abs(was.get(after["id"], expected[-1]["score"]) - after["score"])
        gone = abs(now.get(before["id"], found[-1]["score"]) - before["score"])
        if not max(by, own, gone) <= tolerance:
            return (
                f"result {rank} is {after['id']} with {after['score']:.6g}, at export it was {before['id']} with "
                f"{before['score']:.6g}: they differ by {max(by, own, gone):.3g}, and {tolerance:.3g} is allowed"
            )
    return None


def _sure_parts(predictor: Predictor, wider: Predictor, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cut the requests to the new tokens that rounding cannot change; keep at least the most certain token of all."""
    margins = [(request, _margins(predictor, wider, request)) for request in requests]
    sure = [(request, int((margin > 1).long().cumprod(0).sum())) for request, margin in margins]
    kept = [{**request, "max_tokens": count} for request, count in sure if count]
    if not kept:
        surest = max((pair for pair in margins if len(pair[1])), key=lambda pair: float(pair[1][0]))
        kept = [{**surest[0], "max_tokens": 1}]
    return kept


@torch.inference_mode()
def _margins(predictor: Predictor, wider: Predictor, request: dict[str, Any]) -> torch.Tensor:
    """(new tokens,): each new token's lead over the next most likely one, in multiples of the effect of rounding."""
    encoded = predictor.encode(request)
    continuation = predictor.stream([encoded])
    for _ in continuation:
        pass
    prompt, new = encoded.payload["ids"].tolist(), continuation.ids[0]
    ids = torch.tensor([[*prompt, *new[:-1]]], device=predictor.device)
    own, wide = (one.model(ids)[0, len(prompt) - 1 :][: len(new)].double() for one in (predictor, wider))
    best = own.topk(2, dim=1).values
    # The uncertainty of a logit is the largest in the vocabulary, and it applies to both logits.
    return (best[:, 0] - best[:, 1]) / (2 * SAFETY * (own - wide).abs().amax(1).clamp(min=1e-12))
