"""IntBMoE's parameters under the names of the authors' released module."""

from typing import Any

from torch import Tensor

from intbmoe.checks import require
from intbmoe.parts.shared import OURS

SHARED = {
    "swiglu": {"gate.": "gate_proj.", "up.": "up_proj.", "down.": "down_proj."},
    "mlp": {"up.": "0.", "down.": "2."},
    "linear": {"": ""},
}
"""Parts of a shared expert: our names → the authors'."""


def reference_names(layer: Any) -> dict[str, tuple[str, ...]]:
    """An IntBMoE's parameter names → the authors', of which a parameter may have two."""
    c = layer.config
    ours_or_none = layer.shared is None or isinstance(layer.shared, OURS)
    require(ours_or_none, "shared", type(layer.shared), "of a kind that the authors have, for their names")
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
    if c.hypernetwork == "linear":  # their value head then is the projection itself
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
    """What the authors' module holds and never uses, at its start: its last LayerNorm, biases that are not added."""
    c, like, unused = layer.config, layer.pools[-1].weight.detach(), {}
    if c.layer_norm:
        last = f"layer_norms.{len(c.hidden)}"
        unused |= {f"{last}.weight": like.new_ones(c.dim), f"{last}.bias": like.new_zeros(c.dim)}
    if not c.bias:
        pools = enumerate(c.widths[1:])
        unused |= {f"basis_layers.{place}.bias": like.new_zeros(c.experts, width) for place, width in pools}
    return unused
