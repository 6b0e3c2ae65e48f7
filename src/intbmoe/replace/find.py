"""Find a model's FFNs by the names and shapes of their linear maps. An FFN that is not understood is refused.

whole     one module: two maps (fc1, fc2), three (gate, up, down), or two, the first of which is gate and up
split     two modules of a block (BERT's ``intermediate`` and ``output``): the first is bypassed, and the mixture
          replaces the second one's map
inline    two maps and an activation among the other parts of a block (BART, OPT, Whisper): likewise
"""

import inspect
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

from intbmoe.layer import MoELayer

Form = Literal["plain", "gated", "fused"]

KNOWN_NAMES = (
    ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"), ("fc1_g", "fc1_x", "fc2"),
    ("gate_up_proj", "down_proj"), ("Wi", "Wo"), ("w12", "w3"),
    ("fc1", "fc2"), ("c_fc", "c_proj"), ("wi", "wo"), ("up_proj", "down_proj"), ("dense_h_to_4h", "dense_4h_to_h"),
    ("lin1", "lin2"), ("fc_in", "fc_out"), ("linear1", "linear2"), ("intermediate_dense", "output_dense"),
)  # fmt: skip
"""Names that libraries give to the maps of an FFN; the map back to the model's width comes last."""

INLINE = (("fc1", "activation_fn", "fc2"),)
"""Maps and activation of blocks whose FFN is not a module."""

SPLIT = ("intermediate", "output")
"""Modules of a block that form its FFN together; each has a map called ``dense``."""

TIED = ("ffn", "ffn_output")
"""ALBERT's maps: one block that runs at every depth."""


@dataclass(frozen=True)
class FFN:
    """An FFN that was found, and where its mixture goes."""

    name: str
    """The module that the mixture replaces: the FFN, or its last map."""
    module: nn.Module
    """Tokens (…, T, d) → (…, T, d)."""
    form: Form
    maps: tuple[nn.Module, ...]
    """Its linear maps: a gate first if names identify it, the map back to d last."""
    dim: int
    hidden: int
    entry: str
    """The module that is called with the FFN's tokens."""
    marker: str
    """A parameter that the replacement removes: the last map's weight."""
    bypassed: tuple[str, ...] = ()
    """Modules that become identities."""
    known: bool = True
    """Whether its maps have the usual names of an FFN's maps."""

    def place(self, model: nn.Module, layer: nn.Module) -> None:
        for name in self.bypassed:
            model.set_submodule(name, nn.Identity())
        host = model.get_submodule(self.name.rpartition(".")[0])
        if self.bypassed and hasattr(host, "activation_dropout"):
            host.activation_dropout = 0.0  # ``module`` has it now; here it would act on the mixture's input
        model.set_submodule(self.name, layer)


class Found(NamedTuple):
    ffns: list[FFN]
    refused: dict[str, str]
    """Name of an FFN that cannot be replaced as it is → why."""


def find_ffns(model: nn.Module) -> Found:
    """All FFNs of ``model``, in the order of its modules."""
    ffns, refused, inside = [], {}, ()
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, MoELayer):
            inside = (*inside, f"{name}.")
            continue
        for ffn in _ffns_of(name, module):
            reason = ffn if isinstance(ffn, str) else _reason_against(model, ffn, uses, places)
            if reason is None:
                ffns.append(ffn)
                inside = (*inside, f"{name}.") if ffn.name == name else inside
            elif isinstance(ffn, str) or ffn.known:
                refused[name if isinstance(ffn, str) else ffn.name] = reason
    return Found(ffns, refused)


def sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear map, including quantised and wrapped ones; None for anything else."""
    if isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features")):
        return module.in_features, module.out_features
    if _is_conv1d(module):
        return tuple(module.weight.shape)
    return None


def matrix(module: nn.Module) -> Tensor:
    """(inputs, outputs), as stacked experts hold it."""
    return module.weight if _is_conv1d(module) else module.weight.T


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is GPT-2's linear map, whose matrix is stored transposed."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def _ffns_of(name: str, module: nn.Module) -> Iterator[FFN | str]:
    """Yield the FFN that ``module`` is or, if it is a block, contains in parts; or the reason to refuse that FFN."""
    maps = {child: part for child, part in module.named_children() if sizes(part) is not None}
    others = [part for child, part in module.named_children() if child not in maps]
    is_block = any(sizes(part) is not None for other in others for part in other.modules())
    if not is_block:
        ffn = _whole(name, module, maps)
        if ffn is not None:
            yield ffn
        return
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        yield "PyTorch's layer reads its maps' weights directly: write the block yourself, around intbmoe.create(…)"
    if all(child in maps for child in TIED):
        yield "one FFN runs at every depth, but a mixture keeps only the losses and loads of its last run"
    for first, activation, second in INLINE:
        if first in maps and second in maps:
            yield _inline(name, module, first, activation, second)
    if all(sizes(getattr(getattr(module, part, None), "dense", None) or nn.Identity()) is not None for part in SPLIT):
        yield _split(name, module)


def _whole(name: str, module: nn.Module, maps: dict[str, nn.Module]) -> FFN | None:
    known = next((names for names in KNOWN_NAMES if set(names) == set(maps)), None)
    for names in [known] if known else _orders(list(maps)):
        parts = tuple(maps[child] for child in names)
        form = _form([sizes(part) for part in parts])
        hidden, dim = sizes(parts[-1])
        if form is not None and (known or hidden != dim):  # not three maps of equal size, as in attention
            marker = _join(name, names[-1], "weight")
            return FFN(name, module, form, parts, dim, hidden, name, marker, known=known is not None)
    return None


def _join(*names: str) -> str:
    """Join the parts of a module's name; the model's own name is empty."""
    return ".".join(name for name in names if name)


def _orders(names: list[str]) -> list[tuple[str, ...]]:
    """The orders of the maps, with each of them last once."""
    return [(*(other for other in names if other != last), last) for last in reversed(names)]


def _form(shapes: list[tuple[int, int]]) -> Form | None:
    hidden, dim = shapes[-1]
    first = shapes[:-1]
    if first == [(dim, hidden)]:
        return "plain"
    if first == [(dim, 2 * hidden)]:
        return "fused"
    return "gated" if first == [(dim, hidden)] * 2 else None


def _inline(name: str, block: nn.Module, first: str, activation: str, second: str) -> FFN | str:
    function = getattr(block, activation, None)
    if not isinstance(function, nn.Module):
        return f"{first} and {second} are among other parts of a block that has no module {activation!r}"
    maps = getattr(block, first), getattr(block, second)
    if _form([sizes(part) for part in maps]) != "plain":
        return f"{first} and {second} have sizes {sizes(maps[0])} and {sizes(maps[1])}, which is not an FFN"
    dropout = nn.Dropout(getattr(block, "activation_dropout", 0.0))
    whole = nn.Sequential(OrderedDict({first: maps[0], activation: function, "dropout": dropout, second: maps[1]}))
    hidden, dim = sizes(maps[1])
    entry, last = _join(name, first), _join(name, second)
    return FFN(last, whole, "plain", maps, dim, hidden, entry, f"{last}.weight", (entry, _join(name, activation)))


def _split(name: str, block: nn.Module) -> FFN | str:
    first, last = (getattr(block, part) for part in SPLIT)
    maps = first.dense, last.dense
    if _form([sizes(part) for part in maps]) != "plain":
        return f"its two maps have sizes {sizes(maps[0])} and {sizes(maps[1])}, which is not an FFN"
    whole = nn.Sequential(OrderedDict({SPLIT[0]: first, "dense": last.dense}))
    hidden, dim = sizes(last.dense)
    entry, place = _join(name, SPLIT[0]), _join(name, SPLIT[1], "dense")
    return FFN(place, whole, "plain", maps, dim, hidden, entry, f"{place}.weight", (entry,))


def _reason_against(model: nn.Module, ffn: FFN, uses: Counter, places: Counter) -> str | None:
    """Why the FFN cannot be replaced by a mixture; None if it can."""
    if not ffn.name:
        return "the model itself is an FFN: use a layer (intbmoe.create) instead of it"
    for part in ffn.maps:
        weight = getattr(part, "weight", None)
        plain = type(part) is nn.Linear or _is_conv1d(part) or _is_hosts_linear(part)
        if not plain or type(weight) is not nn.Parameter or not weight.is_floating_point():
            kind = type(part).__name__ if not plain else type(weight).__name__
            return f"a map is a {kind}: replace before quantising, sharding or adding adapters"
    if places[id(ffn.module)] > 1 or any(uses[id(parameter)] > 1 for parameter in ffn.module.parameters()):
        return "it is tied to another FFN, but a mixture keeps only the losses and loads of its last run"
    parents = ffn.name.split(".")[:-1]
    mixtures = (".".join(parents[:depth]) for depth in range(len(parents) + 1))
    if "experts" in parents or any(hasattr(model.get_submodule(name), "experts") for name in mixtures):
        return "it is already part of a mixture"
    if "token" in ffn.name.rpartition(".")[2]:
        return "it maps tokens, not channels (MLP-Mixer)"
    needed = [
        parameter
        for parameter in inspect.signature(ffn.module.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY)
    ]
    if len(needed) > 1:
        return f"its forward takes {', '.join(parameter.name for parameter in needed)}, but a mixture takes only tokens"
    return None


def _is_hosts_linear(part: nn.Module) -> bool:
    """Whether this is a subclass of ``nn.Linear`` from a model's own file, such as Falcon's."""
    in_host = isinstance(part, nn.Linear) and ".models." in type(part).__module__
    return in_host and {name for name, _ in part.named_parameters()} <= {"weight", "bias"}
