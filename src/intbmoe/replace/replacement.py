"""``replace_ffn``: replace a model's FFNs by mixtures."""

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.checks import counted, require
from intbmoe.counting import count_flops
from intbmoe.layer import MoELayer, moe_layers, unwrap
from intbmoe.models.causal import generates
from intbmoe.registry import find_method
from intbmoe.replace.find import FFN, find_ffns
from intbmoe.replace.report import ReplacedFFN, Report
from intbmoe.replace.saving import record_of, remember
from intbmoe.replace.starts import STARTS, Start, Started, start_layer

TOKENS = (2, 16)
"""Sequences and tokens of the random input on which layers are measured if there is no example."""
ROUNDING = 64
"""How many units of rounding, relative to the largest output, count as no change."""


def replace_ffn(
    model: nn.Module,
    method: str = "intbmoe",
    *,
    layers: Iterable[int] | None = None,
    start: Start = "shared",
    match: str | None = None,
    example: Any = None,
    redraw: float = 0.0,
    **options: Any,
) -> Report:
    """Replace FFNs of ``model``, a transformers, timm or other model, by layers of ``method``, in place.

    ``layers`` selects FFNs by number, in the model's order from 0 (negative: from the end). ``match`` is a regular
    expression to be found in an FFN's name; it also admits FFNs whose maps have unknown names. ``options`` go to the
    method; ``hidden`` defaults to the FFN's own.

    ``start`` says what becomes of a trained FFN. "shared" keeps it as the shared expert, so that the output does not
    change (intbmoe, deepseek, deepseek_v1); "copy" makes every expert a copy of it; "fresh" drops it. With "copy",
    ``redraw`` is the fraction of each expert's inner units that is initialised again.

    With ``example``, an input of the model (a tensor, a tuple or a dict), layers are measured on the tokens they get
    from it, and the report says how much the model's output has changed; without it, on random tokens. Nothing is
    changed unless every chosen FFN can be replaced.
    """
    require(start in STARTS, "start", start, f"one of {', '.join(map(repr, STARTS))}")
    require(0 <= redraw < 1, "redraw", redraw, "a fraction in [0, 1)")
    require(not redraw or start == "copy", "redraw", redraw, "0 unless start='copy'")
    require("dim" not in options, "dim", options.get("dim"), "left out: it is the width of the FFN's tokens")
    require(match is None or _is_pattern(match), "match", match, r"a regular expression, such as r'encoder\..*mlp'")
    find_method(method)
    model = unwrap(model)
    chosen, left = _choose(model, layers, match)
    if any(parameter.is_meta for ffn in chosen for parameter in ffn.module.parameters()):
        raise ValueError("the model is on the meta device and has no weights yet: load them first")
    parameters = _count(model)
    with _evaluating(model), torch.no_grad():
        seen, before = (None, None) if example is None else _run(model, chosen, example)
        pairs = [_build(model, method, ffn, start, redraw, options, seen) for ffn in chosen]
    records = {}
    for ffn, ((layer, keeps_ffn, _), _) in zip(chosen, pairs, strict=True):
        ffn.place(model, layer.train(model.training))
        records[ffn.name] = record_of(method, ffn, layer, keeps_ffn)
    remember(model, records)
    change = None
    if before is not None:
        with _evaluating(model), torch.no_grad():
            change = _largest(_first_tensor(_call(model, example)) - before)
    return Report(method, start, tuple(row for _, row in pairs), (parameters, _count(model)), left, change)


def _is_pattern(match: Any) -> bool:
    try:
        re.compile(match)
    except (re.error, TypeError):
        return False
    return True


def _choose(model: nn.Module, layers: Iterable[int] | None, match: str | None) -> tuple[list[FFN], dict[str, str]]:
    found = find_ffns(model)
    wanted = [ffn for ffn in found.ffns if (re.search(match, ffn.name) if match else ffn.known)]
    refused = {name: reason for name, reason in found.refused.items() if not match or re.search(match, name)}
    unnamed = "it has the shape of an FFN, but its maps have unknown names: use match= to replace it anyway"
    left = {ffn.name: unnamed for ffn in found.ffns if not ffn.known and ffn not in wanted}
    if refused:
        listed = "\n".join(f"  {name}: {reason}" for name, reason in refused.items())
        rest = "\nuse match= to choose others by name" if wanted else ""
        raise ValueError(f"{type(model).__name__} has FFNs that cannot be replaced:\n{listed}{rest}")
    if not wanted:
        others = "".join(f"\n  {name}: {reason}" for name, reason in left.items())
        where = f" whose name contains {match!r}" if match else ""
        why = (
            "none of its modules has linear maps with the usual names and shapes (docs/replace.md lists them). In your "
            "own model, put intbmoe.create(…) where the FFN is made"
        )
        why = "it already holds mixtures" if any(moe_layers(model)) else why
        raise ValueError(f"no FFN{where} was recognised in {type(model).__name__}: {why}{others}")
    if layers is None:
        return wanted, left
    indices = list(layers) if isinstance(layers, Iterable) else []
    if not indices or any(index not in range(-len(wanted), len(wanted)) for index in indices):
        count = len(wanted)
        allowed = f"a list of numbers from 0 to {count - 1}, or negative from the end: found {counted(count, 'FFN')}"
        require(False, "layers", indices or layers, allowed)
    kept = sorted({index % len(wanted) for index in indices})
    return [wanted[index] for index in kept], left


def _build(
    model: nn.Module,
    method: str,
    ffn: FFN,
    start: Start,
    redraw: float,
    options: Mapping[str, Any],
    seen: Mapping[str, Tensor] | None,
) -> tuple[Started, ReplacedFFN]:
    weight = ffn.maps[-1].weight
    tokens = seen[ffn.name] if seen else torch.randn(*TOKENS, ffn.dim, device=weight.device).to(weight.dtype)
    try:
        # A module built from parts of a block is not in the model, so it needs eval().
        before = ffn.module.eval()(tokens)
        if start == "shared":
            ffn.module(tokens.flatten(0, -2))
    except (RuntimeError, IndexError, ValueError) as error:
        raise ValueError(
            f"{ffn.name} ({type(ffn.module).__name__}) does not run on single tokens, so it is not an FFN that a layer "
            f"can replace: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(before, Tensor) or before.shape != tokens.shape:
        found = tuple(before.shape) if isinstance(before, Tensor) else f"a {type(before).__name__}"
        raise ValueError(
            f"{ffn.name} returns {found} for tokens {tuple(tokens.shape)}: not an FFN that a layer can replace"
        )
    started = start_layer(method, ffn, start, tokens, redraw, options)
    layer = started.layer.eval()
    _require_fit(model, method, ffn, layer)
    change, size = _largest(layer(tokens) - before), _largest(before)
    if start == "shared" and change > ROUNDING * torch.finfo(weight.dtype).eps * size:
        raise ValueError(
            f"{ffn.name} ({type(ffn.module).__name__}) computes something else as a shared expert (off by {change:.3g} "
            f"of {size:.3g}): its outputs depend on more than one token each"
        )
    dense, flops, per_forward = _flops(ffn.module, layer, ffn.dim, weight)
    description = f"{type(ffn.module).__name__} {ffn.dim}→{ffn.hidden}"
    parameters = _count(ffn.module), _count(layer)
    row = ReplacedFFN(ffn.name, description, parameters, (dense, flops), per_forward, change, size, started.scale)
    return started, row


def _require_fit(model: nn.Module, method: str, ffn: FFN, layer: MoELayer) -> None:
    """Refuse layers that look ahead in a model that generates, and warn about layers with a decoding state."""
    if not generates(model, ffn.name):
        return
    reason = layer.config.noncausal_reason()
    if reason is not None:
        raise ValueError(f"{method} cannot be used in {ffn.name} of a model that generates: {reason}")
    if layer.new_state(1) is not None:
        warnings.warn(
            f"{method} keeps a state of earlier tokens, which the model's cache lacks: generate with use_cache=False",
            stacklevel=4,
        )


def _flops(module: nn.Module, layer: MoELayer, dim: int, weight: Tensor) -> tuple[int, int, int]:
    """FLOPs per token of the FFN and of the layer, and the layer's FLOPs per forward, from runs of two lengths."""
    if weight.dtype == torch.float64:  # float64 runs tiles, whose padding would be counted
        module, layer = copy.deepcopy(module).float(), copy.deepcopy(layer).float()
    dtype = torch.float32 if weight.dtype == torch.float64 else weight.dtype
    length = TOKENS[1]
    inputs = [torch.randn(1, n, dim, device=weight.device).to(dtype) for n in (length, 2 * length)]
    dense = count_flops(module, inputs[0]).total() // length
    once, twice = (count_flops(layer, x).total() for x in inputs)
    per_token = (twice - once) // length
    return dense, per_token, once - per_token * length


def _run(model: nn.Module, ffns: list[FFN], example: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Run ``example``; return the tokens that each FFN gets, and the model's first output."""
    seen: dict[str, list[Tensor]] = {ffn.name: [] for ffn in ffns}

    def look(name: str, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if not arguments:
            raise ValueError(
                f"{name} gets its tokens by name ({', '.join(named)}=…), but a mixture takes them as its first "
                f"argument: leave the name out where {name} is called"
            )
        seen[name].append(arguments[0].detach())

    hooks = [
        model.get_submodule(ffn.entry).register_forward_pre_hook(partial(look, ffn.name), with_kwargs=True)
        for ffn in ffns
    ]
    try:
        output = _first_tensor(_call(model, example))
    finally:
        for hook in hooks:
            hook.remove()
    for name, calls in seen.items():
        if len(calls) != 1:
            raise ValueError(f"{name} ran {len(calls)} times in one forward of the example: a mixture must run once")
    return {name: calls[0] for name, calls in seen.items()}, output


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


def _first_tensor(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
