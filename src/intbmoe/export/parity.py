"""Check that an exported model agrees with the trained one, on held-out inputs that reach every block.

The trained model in float32 is the reference. There are three comparisons, all of relative errors in Euclidean norm:

    layers     every mixture on the inputs that the trained model gave it, block by block, over the tokens that both
               send to that block; and the share of the tokens that both send to the same blocks
    blocks     each of IntBMoE's blocks alone on some of these inputs, whatever weight the router would give it
    outputs    the model as a whole. Only differences between scores matter, so errors are relative to the norm of the
               trained model's scores minus each row's mean

With the ε of the exported type, the tolerances are 4ε for a layer or block, and cε√depth for outputs: c = 16 in
float32, where sums are rounded as they grow, and 8 in bfloat16, whose products are summed in float32. In addition,
outputs may differ by 4ε of their own type and size, and 4ε of all tokens, or one token, may take other blocks, because
a rounded input can flip a near tie.

8-bit weights add their rounding error, a share r of a weight's size: 4r for a layer or block, 8r√depth for outputs. For
int8 r = 1/127: a column's largest weight is about 3.5 times its mean size, and rounding to a grid of step s is off by
s/√12. For fp8 r = 1/32: rounding to three bits of mantissa is off by at most 1/16, and by less than half of that on
average.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.export.artifact import ExportError
from intbmoe.layer import MoELayer, moe_layers
from intbmoe.methods.intbmoe import BlockLayer
from intbmoe.ops.backend import choose_backend
from intbmoe.ops.branches import Branches
from intbmoe.parts.blocks import run_blocks
from intbmoe.parts.quantized import Storage
from intbmoe.precision import wide
from intbmoe.routing import record_routing
from intbmoe.tasks import Batch, Task
from intbmoe.tasks.serving import Graph

BATCH = 16
FEWEST_BATCHES = 4
BLOCK_TOKENS = 32  # tokens per batch that are sent through all blocks
LAYER_FACTOR = 4
OUTPUT_FACTOR = {torch.float32: 16, torch.bfloat16: 8}
ROUNDING_FACTOR = 4
ROUTING_FACTOR = 4
STORED_ERROR = {"int8": 1 / 127, "fp8": 1 / 32}
STORED_OUTPUT_FACTOR = 8


@dataclass(frozen=True)
class Inputs:
    """Held-out batches that together reach every block that any input of their split reaches."""

    batches: list[Batch]
    examples: int  # in these batches
    looked_at: int  # examples of the split tried until every block was reached or none was left
    unreached: dict[str, list[int]]  # layer → blocks or experts that no example of the whole split is sent to


def choose_inputs(task: Task, trained: nn.Module) -> Inputs:
    """Choose batches in a fixed random order: the first few, and then each one that reaches a new block."""
    split = task.held_out()
    if len(split) == 0:
        raise ExportError("the test split is empty: there is nothing to compare the exported model on")
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0)).tolist()
    missing = {name: _open_choices(layer) for name, layer in moe_layers(trained) if layer.choices}
    kept: list[Batch] = []
    examples = looked_at = 0
    for start in range(0, len(order), BATCH):
        indices = order[start : start + BATCH]
        batch = task.prepare(split.batch(indices, epoch=0, seed=0), None)
        looked_at += len(indices)
        reached = _reached(task, trained, batch) if missing else {}
        new = any(blocks & missing[name] for name, blocks in reached.items())
        missing = {name: blocks - reached[name] for name, blocks in missing.items()}
        if new or len(kept) < FEWEST_BATCHES:
            kept.append(batch)
            examples += len(indices)
        if not any(missing.values()) and len(kept) >= FEWEST_BATCHES:
            break
    return Inputs(kept, examples, looked_at, {name: sorted(blocks) for name, blocks in missing.items() if blocks})


def _open_choices(layer: MoELayer) -> set[int]:
    opened = layer.open_choices
    return set(range(layer.choices)) if opened is None else set(opened.nonzero().flatten().tolist())


@torch.no_grad()
def _reached(task: Task, model: nn.Module, batch: Batch) -> dict[str, set[int]]:
    with record_routing(model) as log:
        task.run_model(model, batch, torch.float32)
    return {name: set(r.ids[r.ids >= 0].unique().tolist()) for name, r in log.items() if r.ids is not None}


class LayerError:
    """Sums over the tokens of one layer, by the block they were sent to; one entry if tokens do not choose."""

    def __init__(self, name: str, layer: MoELayer) -> None:
        self.name = name
        self.difference, self.size = torch.zeros(2, layer.choices or 1, dtype=torch.float64)
        self.tokens = self.elsewhere = 0  # all tokens, and those that the exported layer sends to other blocks

    def add(self, trained: Tensor, served: Tensor, ids: Tensor | None, served_ids: Tensor | None) -> None:
        """Add (N, d) outputs of both layers and their (N, k) choices."""
        difference, size = (served - trained).square().sum(1).double(), trained.square().sum(1).double()
        self.tokens += len(trained)
        if ids is None or served_ids is None:
            self.difference += difference.sum()
            self.size += size.sum()
            return
        width = max(ids.shape[1], served_ids.shape[1])
        padded = (nn.functional.pad(found, (0, width - found.shape[1]), value=-1) for found in (ids, served_ids))
        own, other = (found.sort(1).values for found in padded)
        alike = (own == other).all(1)
        self.elsewhere += int((~alike).sum())
        chosen = ids[alike]
        for total, values in ((self.difference, difference), (self.size, size)):
            per_choice = values[alike].unsqueeze(1).expand(chosen.shape)
            total.index_add_(0, chosen[chosen >= 0], per_choice[chosen >= 0])

    def errors(self) -> list[float]:
        return (self.difference.sqrt() / self.size.sqrt().clamp(min=1e-30)).tolist()


class Parity:
    def __init__(self, task: Task, trained: nn.Module, dtype: torch.dtype, storage: Storage | None = None) -> None:
        self.task, self.trained, self.dtype = task, trained, dtype
        self.inputs = choose_inputs(task, trained)
        epsilon = torch.finfo(dtype).eps
        per_layer = OUTPUT_FACTOR[dtype] * epsilon
        self.layer_tolerance = LAYER_FACTOR * epsilon
        self.elsewhere_tolerance = ROUTING_FACTOR * epsilon  # routers are not quantised
        if storage is not None:
            self.layer_tolerance += LAYER_FACTOR * STORED_ERROR[storage]
            per_layer += STORED_OUTPUT_FACTOR * STORED_ERROR[storage]
        self.output_tolerance = per_layer * math.sqrt(task.depth())

    def describe(self) -> dict[str, Any]:
        return {
            "against": "the trained model in float32, on held-out inputs",
            "examples": self.inputs.examples,
            "examples_looked_at": self.inputs.looked_at,
            "unreached_blocks": self.inputs.unreached,
        }

    @torch.no_grad()
    def check_model(self, served: nn.Module) -> dict[str, Any]:
        """Describe the exported model's errors; raise ``ExportError`` if it differs from the trained model."""
        layers = dict(moe_layers(served))
        found, blocks = ({name: LayerError(name, layer) for name, layer in moe_layers(self.trained)} for _ in range(2))
        outputs = _OutputError(self.output_tolerance)
        for batch in self.inputs.batches:
            routing = record_routing(self.trained) if layers else nullcontext({})
            with _seen_by_layers(self.trained) as seen, routing as log:
                expected = self.task.run_model(self.trained, batch, torch.float32)
            for name, (x, mask, y) in seen.items():
                _compare_layer(found[name], layers[name], x.to(self.dtype), mask, y, log[name].ids)
                if isinstance(layers[name], BlockLayer):
                    tokens = (x.flatten(0, -2) if mask is None else x[mask])[:BLOCK_TOKENS]
                    _compare_blocks(blocks[name], self.trained.get_submodule(name), layers[name], tokens, self.dtype)
            outputs.add(expected, self.task.run_model(served, batch, self.dtype))
        errors = [*blocks.values(), *found.values()]
        self._judge_layers(errors)
        outputs.judge("the exported model")
        tokens = sum(error.tokens for error in found.values())
        elsewhere = sum(error.elsewhere for error in found.values())
        largest = max((max(error.errors()) for error in errors), default=0.0)
        return {
            "layers": {"tolerance": self.layer_tolerance, "largest_error": largest},
            "routing": {"tolerance": self.elsewhere_tolerance, "tokens": tokens, "routed_elsewhere": elsewhere},
            "outputs": outputs.describe(),
        }

    def _judge_layers(self, errors: Sequence[LayerError]) -> None:
        for layer in errors:
            if layer.elsewhere > 1 + self.elsewhere_tolerance * layer.tokens:
                raise ExportError(
                    f"parity failed: layer {layer.name!r} sends {layer.elsewhere} of {layer.tokens} tokens to other "
                    f"blocks than the trained layer, a share of {self.elsewhere_tolerance:.3g} is allowed; "
                    f"nothing was written"
                )
            by_block = [error if math.isfinite(error) else math.inf for error in layer.errors()]
            worst = max(by_block)
            if not worst <= self.layer_tolerance:
                # A token visits several blocks, so a wrong block affects others: the worst need not be the wrong one.
                raise ExportError(
                    f"parity failed: layer {layer.name!r} is off by {worst:.3g} of its output's norm on the tokens of "
                    f"block {by_block.index(worst)}, {self.layer_tolerance:.3g} is allowed; nothing was written"
                )

    @torch.no_grad()
    def check_runtime(
        self, name: str, run: Callable[..., Tensor], graph: Graph, catalogue: dict[str, Tensor]
    ) -> dict[str, Any]:
        """Compare a compiled graph, at other batch sizes and lengths than it was traced with."""
        expected = graph.wrap(self.trained, catalogue)
        outputs = _OutputError(self.output_tolerance)
        shapes = set()
        for batch in self.inputs.batches:
            for rows, length in graph.shapes_to_try(batch):
                part = {key: value[:rows] for key, value in batch.items()}
                inputs = graph.inputs(part, self.dtype, length)
                outputs.add(expected(*graph.inputs(part, torch.float32, length)), run(*inputs))
                shapes.add(tuple(inputs[-1].shape[:2]) if length else (len(inputs[0]),))
        outputs.judge(name)
        return {**outputs.describe(), "shapes": sorted(map(list, shapes))}


class _OutputError:
    """The largest difference of any batch from the trained model's scores, relative to what is allowed."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.error = self.used = 0.0

    def add(self, expected: Tensor, found: Tensor) -> None:
        if found.shape != expected.shape:
            raise ExportError(f"the exported model returns {tuple(found.shape)}, expected {tuple(expected.shape)}")
        if expected.numel() == 0:
            return
        rounding = ROUNDING_FACTOR * torch.finfo(found.dtype).eps
        expected, found = wide(expected).double(), found.double()
        difference = float((found - expected).norm())
        spread = float((expected - expected.mean(-1, keepdim=True)).norm())
        allowed = self.tolerance * spread + rounding * float(expected.norm())
        self.error = max(self.error, difference / max(spread, 1e-30))
        self.used = max(self.used, difference / max(allowed, 1e-30) if math.isfinite(difference) else math.inf)

    def judge(self, what: str) -> None:
        if not self.used <= 1:
            raise ExportError(
                f"parity failed: the scores of {what} differ from the trained model's by {self.error:.3g} of "
                f"their spread, {self.used:.3g} times what is allowed (tolerance {self.tolerance:.3g}); "
                f"nothing was written"
            )

    def describe(self) -> dict[str, float]:
        return {"tolerance": self.tolerance, "error": self.error, "used_of_allowed": self.used}


def _compare_layer(
    error: LayerError, served: nn.Module, x: Tensor, mask: Tensor | None, y: Tensor, ids: Tensor | None
) -> None:
    with record_routing(served) as log:
        found = served(x, mask)
    served_ids = next(iter(log.values())).ids
    if mask is not None:
        valid = mask.reshape(-1)
        ids, served_ids = (None if chosen is None else chosen[valid] for chosen in (ids, served_ids))
        y, found = y[mask], found[mask]
    error.add(y.flatten(0, -2), wide(found).flatten(0, -2), ids, served_ids)


def _compare_blocks(
    error: LayerError, trained: BlockLayer, served: BlockLayer, tokens: Tensor, dtype: torch.dtype
) -> None:
    """Send all tokens through all blocks with weight 1, so that a rarely chosen block is compared like any other."""
    count = trained.config.blocks
    x = tokens.repeat_interleave(count, 0)
    ids = torch.arange(count).repeat(len(tokens)).unsqueeze(1)
    pair = []
    for layer, rows in ((trained, x), (served, x.to(dtype))):
        backend = choose_backend(rows, wanted=layer.backend, has_native=layer.config.has_kernels)
        ones = torch.ones(len(ids), 1)
        blocks = layer.blocks(rows.dtype, backend)
        known = {"complete": True, "dtype": rows.dtype, "branches": Branches(rows)}
        pair.append(run_blocks(rows, ids, ones, None, blocks, backend, **known)[0])
    error.add(wide(pair[0]), wide(pair[1]), ids, ids)


@contextmanager
def _seen_by_layers(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor | None, Tensor]]]:
    """Collect each mixture's inputs and output in the forward inside the context: name → (x, mask, y)."""
    seen: dict[str, tuple[Tensor, Tensor | None, Tensor]] = {}

    def keep(name: str, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen[name] = (inputs[0], inputs[1] if len(inputs) > 1 else None, output)

    handles = [layer.register_forward_hook(partial(keep, name)) for name, layer in moe_layers(model)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
