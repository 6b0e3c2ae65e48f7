"""The paper's rule for a fair comparison: the options each method gets in place of one backbone FFN.

    layer = create("switch", 192, **match_budget("switch", 192, 768, experts=16))

Everywhere else arguments are literal; only this module reads ``experts`` as the paper's E and knows how each method
uses it. For a backbone FFN with W weights (2·d·h for GELU, 3·d·h for SwiGLU; biases are not counted):

    experts       E routed and one shared in a method with a shared path (IntBMoE, DeepSeek-V3), E + 1 in all others
    widths        each expert has W weights, and so have IntBMoE's and μMoE's two-layer blocks; DeepSeek-V3's and
                  Lory's experts are SwiGLU on every backbone, and so is IntBMoE's shared expert unless ``shared_kind``
                  says otherwise
    pools         DynMoE and MASS start with E/2 of their E + 1 experts (the paper's 8, 4, 16 at E = 16, 8, 32); MASS
                  follows its authors' script for the ``domain``
    slots         Soft MoE has tokens/experts slots per expert, rounded as in its authors' code, if ``tokens`` is given;
                  otherwise one, like its causal form
    segments      Lory's have 16 tokens, or half the input if ``tokens`` says that one segment of 16 would cover it
    ranks         μMoE's rank is chosen to bring the module's parameter count as close as possible to Switch's

For the methods that the paper names but does not measure:

    deepseek_v1   the E + 1 experts are split into 4(E + 1) small ones; one is shared, 7 of the others are chosen
    ple           (E + 1)/2 experts on each of two levels, sized so that together they have the weights of E + 1
    hypermoe      E experts, and a hypernetwork that brings the parameter count as close as possible to Switch's
    mobe          (E + 1)/4 bases of half the token's width, and as many experts as Switch's parameter count allows

Three points where the paper disagrees with itself or with the code, and what this module does:

- The appendix says that μMoE's ranks are solved for IntBMoE's total. The totals it prints (24.070 M and 24.065 M, while
  IntBMoE has 24.295 M) are the ones nearest to Switch's 24,070,312: R = 2594 for CP and R_3 = 654 for TR. We follow the
  table.
- The paper says that matching gives IntBMoE a width of 2844 on MiniPile, which has the weights of a SwiGLU of width
  1896 (2·768·2844 = 3·768·1896), and does not state the backbone's width. The released code's backbone has width 2048,
  whose match is 3072: the paper's blocks have 7.4 % fewer weights. The recipe uses the released 2048 for the backbone
  and all baselines, and the paper's 2844 (``intbmoe_hidden=2844``); with ``hidden=1896`` everything follows from 2844.
- On ImageNet Soft MoE's authors would round 196/17 to 12 slots; the paper's printed parameters fit 11 (``slots=11``).
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args

import torch

from intbmoe.checks import require, require_positive_int
from intbmoe.parts.shared import SharedKind
from intbmoe.registry import create, find_method

Expert = Literal["gelu", "swiglu"]
Domain = Literal["vision", "language"]

SEGMENTS = 4
"""m, the number of small experts that DeepSeekMoE's paper splits each expert into."""

TABLE_1 = (
    "dense", "switch", "deepseek", "remoe", "vmoe", "expert_choice", "dynmoe", "mass", "soft", "smear", "lory",
    "mumoe_cp", "mumoe_tr", "intbmoe",
)  # fmt: skip
"""The methods in the paper's image table, in its order."""

TABLE_2 = (
    "dense", "switch", "deepseek", "remoe", "dynmoe", "mass", "soft_causal", "smear_token", "lory",
    "mumoe_cp", "mumoe_tr", "intbmoe",
)  # fmt: skip
"""The methods in the paper's language and travel table. None looks ahead; two are in their causal form."""

NAMED = (
    "mixture", "shazeer", "gshard", "mixtral", "deepseek_v1", "lapsum", "hypermoe", "mobe", "mmoe", "ple", "dsfnet",
)  # fmt: skip
"""Methods that the paper names but does not measure; none of them looks ahead."""


def match_budget(
    name: str,
    dim: int,
    hidden: int,
    *,
    experts: int,
    expert: Expert = "gelu",
    tokens: int | None = None,
    domain: Domain = "vision",
    intbmoe_hidden: int | None = None,
    tasks: int | None = None,
    shared_kind: SharedKind = "swiglu",
) -> dict[str, Any]:
    """Return options for ``create(name, dim, **options)`` that match the paper's budget.

    ``hidden`` and ``expert`` describe the backbone's FFN; ``experts`` is the paper's E. ``tokens``, if the number of
    tokens is fixed, sets Soft MoE's slots and limits Lory's segment; ``domain`` says which of its authors' scripts MASS
    follows ("language" for any sequence model); ``intbmoe_hidden`` overrides the matched width of IntBMoE's blocks.
    ``tasks`` is the number of tasks of a multi-task head: methods with a ``conditioning_dim`` tell tasks apart by that
    vector. ``shared_kind`` is the kind of IntBMoE's shared expert, and its width is matched accordingly; a linear map
    has no width to match. A method that is not in the paper is treated as having no shared path and experts like the
    backbone's FFN.
    """
    for argument, value in (("dim", dim), ("hidden", hidden), ("experts", experts)):
        require_positive_int(argument, value)
    require(expert in ("gelu", "swiglu"), "expert", expert, "'gelu' or 'swiglu'")
    require(domain in ("vision", "language"), "domain", domain, "'vision' or 'language'")
    kinds = get_args(SharedKind)
    require(shared_kind in kinds, "shared_kind", shared_kind, f"one of {', '.join(map(repr, kinds))}")
    for argument, value in (("tokens", tokens), ("intbmoe_hidden", intbmoe_hidden), ("tasks", tasks)):
        if value is not None:
            require_positive_int(argument, value)
    config = find_method(name).layer.Config
    if tasks is not None and "conditioning_dim" in {f.name for f in fields(config)}:
        rest = {"expert": expert, "tokens": tokens, "domain": domain, "intbmoe_hidden": intbmoe_hidden}
        options = match_budget(name, dim, hidden, experts=experts, shared_kind=shared_kind, **rest)
        return {**options, **(_levels(hidden, experts, tasks) if name == "ple" else {}), "conditioning_dim": tasks}
    gelu_width = hidden if expert == "gelu" else round(hidden * 3 / 2)
    swiglu_width = hidden if expert == "swiglu" else max(1, round(hidden * 2 / 3))
    like_backbone = {"hidden": hidden, "experts": experts + 1, "expert": expert}
    match name:
        case "dense":
            return {"hidden": gelu_width}
        case "swiglu":
            return {"hidden": swiglu_width}
        case "deepseek":
            few = {"top_k": 1} if experts == 1 else {}  # its own k is 2
            return {"hidden": swiglu_width, "experts": experts, "expert": "swiglu", **few}
        case "deepseek_v1":
            small = {"hidden": max(1, round(swiglu_width / SEGMENTS)), "experts": SEGMENTS * (experts + 1) - 1}
            return {**small, "expert": "swiglu", "top_k": 2 * SEGMENTS - 1}
        case "lapsum":
            return {**like_backbone, "top_k": min(2.0, (experts + 1) / 2)}
        case "ple":
            return {**like_backbone, **_levels(hidden, experts, tasks=1)}
        case "hypermoe":
            options = {**like_backbone, "experts": experts, "adapter_dim": max(1, dim // 24)}
            options |= {"embedding_dim": max(1, dim // 6)}
            return {**options, "hyper_dim": _solve_size(name, dim, options, "hyper_dim", like_backbone)}
        case "mobe":
            options = {**like_backbone, "bases": max(1, (experts + 1) // 4), "top_k": 1}
            size = _solve_size(name, dim, options, "experts", like_backbone)
            return {**options, "experts": size, "top_k": min(2, size)}
        case "lory":
            return {"hidden": swiglu_width, "experts": experts + 1, "expert": "swiglu", "tokens": tokens}
        case "dynmoe" | "mass":
            script = {"domain": domain} if name == "mass" else {}
            return {**like_backbone, "initial_experts": max(1, experts // 2), **script}
        case "soft":
            return {**like_backbone, "slots": 1 if tokens is None else max(1, round(tokens / (experts + 1)))}
        case "mumoe_cp" | "mumoe_tr":
            options = {"hidden": gelu_width, "experts": experts + 1}
            return {**options, "rank": _solve_size(name, dim, options, "rank", like_backbone)}
        case "intbmoe":
            options = {"hidden": intbmoe_hidden or gelu_width, "experts": experts}
            if shared_kind == "swiglu":
                return {**options, "shared_hidden": swiglu_width}
            width = {"shared_hidden": gelu_width} if shared_kind == "mlp" else {}
            return {**options, "shared_kind": shared_kind, **width}
        case _:
            return like_backbone


def within_budget(name: str, dim: int, hidden: int, options: Mapping[str, Any], **backbone: Any) -> dict[str, Any]:
    """``match_budget`` with ``options`` taking precedence; widths are matched to the kinds of experts they ask for."""
    shared_kind = options.get("shared_kind", "swiglu")
    matched = match_budget(name, dim, hidden, shared_kind=shared_kind, **backbone)
    kind = options.get("expert", matched.get("expert"))
    if kind != matched.get("expert"):  # the width at which the other kind has as many weights
        matched["hidden"] = max(1, round(matched["hidden"] * (2 / 3 if kind == "swiglu" else 3 / 2)))
    return {**matched, **options}


def _levels(hidden: int, experts: int, tasks: int) -> dict[str, int]:
    """PLE's experts on each of two levels (at least one per task and one shared), and their width."""
    each = max(tasks + 1, (experts + 1) // 2)
    return {"experts": each, "hidden": max(1, round(hidden * (experts + 1) / (2 * each)))}


def _solve_size(name: str, dim: int, options: dict[str, Any], size: str, like_backbone: dict[str, Any]) -> int:
    """Find the value of option ``size`` that brings the parameter count, linear in it, closest to Switch's."""
    target = _parameters("switch", dim, like_backbone)
    one, two = (_parameters(name, dim, {**options, size: value}) for value in (1, 2))
    return max(1, 1 + round((target - one) / (two - one)))


def _parameters(name: str, dim: int, options: dict[str, Any]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create(name, dim, **options).parameters())
