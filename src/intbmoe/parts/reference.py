"""Converts IntBMoE's parameters to and from the names of the authors' released module."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from intbmoe.checks import require, require_state
from intbmoe.parts.shared import OURS

SHARED = {
    "swiglu": {"gate.": "gate_proj.", "up.": "up_proj.", "down.": "down_proj."},
    "mlp": {"up.": "0.", "down.": "2."},
    "linear": {"": ""},
}
"""For each kind of shared expert, our names of its parts → the authors' names."""


def reference_names(layer: Any) -> dict[str, tuple[str, ...]]:
    """Map an IntBMoE's parameter names to the authors' names; a parameter may have two."""
    c = layer.config
    ours_or_none = layer.shared is None or isinstance(layer.shared, OURS)
    require(ours_or_none, "shared", type(layer.shared), "one of the authors' kinds, which have names in their module")
    prefixes = {
        "codebook": ["block_embeddings.weight"],
        "scale": ["composition_alpha"],
        "hypernetwork.trunk.": ["basis_weight_projection.0."],
        "hypernetwork.norm.": ["basis_weight_projection.1."],
        "hypernetwork.value.": ["value_basis_projection."],
        "hypernetwork.gate.": ["gate_basis_projection."],
        "router.hidden.": ["router.0."],
        "router.scores.": ["router.2."],
        "pools.": ["basis_layers."],
        "filter.": ["feature_filter."],
        "norms.": ["layer_norms."],
    }
    if c.hypernetwork == "linear":  # then their value head is the projection itself
        prefixes["hypernetwork.value."].append("basis_weight_projection.")
    for place in range(len(c.hidden) + 1):
        theirs = f"composition_gate_norms.{place}"
        prefixes[f"gate_norms.{place}"] = [f"{theirs}.{'scale' if c.gate_norm == 'rms' else 'weight'}"]
        prefixes[f"gate_shifts.{place}"] = [f"{theirs}.bias"]
    for number in range(c.shared_experts):
        ours = "shared." if c.shared_experts == 1 else f"shared.{number}."
        for part, theirs in SHARED[c.shared_kind].items():
            prefixes[ours + part] = [f"shared_experts.{number}.{theirs}"]
    names = {}
    for name in layer.state_dict():
        ours = next(prefix for prefix in prefixes if name.startswith(prefix))
        names[name] = tuple(theirs + name.removeprefix(ours) for theirs in prefixes[ours])
    return names


def unused_in_reference(layer: Any) -> dict[str, Tensor]:
    """Initial values of what the authors' module has but never uses: its last LayerNorm, and biases it does not add."""
    c, like, unused = layer.config, layer.pools[-1].weight.detach(), {}
    if c.layer_norm:
        last = f"layer_norms.{len(c.hidden)}"
        unused |= {f"{last}.weight": like.new_ones(c.dim), f"{last}.bias": like.new_zeros(c.dim)}
    if not c.bias:
        pools = enumerate(c.widths[1:])
        unused |= {f"basis_layers.{place}.bias": like.new_zeros(c.experts, width) for place, width in pools}
    return unused


def from_reference(layer: Any, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The authors' ``state`` under our names, and the keys in it that their module never uses.

    Raises if ``state`` does not fit ``layer``.
    """
    own, names, unused = layer.state_dict(), reference_names(layer), unused_in_reference(layer)
    expected = {theirs: own[ours] for ours, found in names.items() for theirs in found}
    require_state("reference", state, expected | {key: unused[key] for key in unused if key in state})
    for first, *twins in names.values():
        for twin in twins:
            if not torch.equal(state[first], state[twin]):
                raise ValueError(f"reference parameters {first!r} and {twin!r} differ: they must be equal")
    return {ours: state[found[0]] for ours, found in names.items()}, [key for key in unused if key in state]


def to_reference(layer: Any) -> dict[str, Tensor]:
    """The layer's state under the authors' names; what their module never uses has its initial values."""
    own = layer.state_dict()
    state = {theirs: own[ours].clone() for ours, found in reference_names(layer).items() for theirs in found}
    return state | unused_in_reference(layer)
