"""Which blocks the tokens of a request took."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from intbmoe.export.predictor import Encoded
from intbmoe.layer import moe_layers
from intbmoe.routing import RecordedRouting, record_routing


@contextmanager
def recording(model: nn.Module, batch: Sequence[Encoded]) -> Iterator[Mapping[str, RecordedRouting]]:
    """Records the routing of what runs inside, where a request of the batch asks for it and there is any."""
    wanted = any(encoded.payload["explain"] for encoded in batch)
    if wanted and next(moe_layers(model), None) is not None:
        with record_routing(model) as log:
            yield log
    else:
        yield {}


def blocks_of(log: Mapping[str, RecordedRouting], row: int, tokens: slice) -> list[dict[str, Any]]:
    """For each layer that chooses, the blocks that each of these tokens of one sequence took."""
    found = []
    for name, layer in log.items():
        ids = layer.ids
        if ids is None:
            continue
        chosen = ids.view(*layer.shape, ids.shape[1])[row, tokens].tolist()
        blocks = [[block for block in token if block >= 0] for token in chosen]
        found.append({"layer": name, "choices": layer.choices, "tokens": blocks})
    return found
