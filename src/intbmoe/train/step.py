"""One optimizer step: forward and backward passes, and the calls that the contract requires in between.

The losses of a step are sums over its units (images, tokens), divided by the number of units of the whole step, over
all ranks and micro-batches. That number is known only after the last forward, so the gradients of the sums are
accumulated first and divided once. A micro-batch's auxiliary loss is weighted by its units. With equal micro-batches
this is their plain average, so how a batch is split changes only rounding and losses defined per micro-batch.
"""

import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from intbmoe.layer import moe_layers, unwrap
from intbmoe.parallel.gradients import global_norm, local, scale_to
from intbmoe.steps import after_step, aux_loss, before_step
from intbmoe.tasks.base import Batch, Examples, Task
from intbmoe.tasks.recipe import TrainSettings
from intbmoe.train.capture import CapturedBackward
from intbmoe.train.data import BatchPlan, derive_seed, make_generator, micro_batches, read_ahead
from intbmoe.train.distribution import Ranks
from intbmoe.train.errors import NonFiniteLossError, TrainingError


def prepared_steps(
    task: Task, examples: Examples, plan: BatchPlan, ranks: Ranks, settings: TrainSettings, first_step: int = 0
) -> Iterator[list[Batch]]:
    """Yield this rank's prepared micro-batches of each step; each step reseeds the generator, see ``data.py``."""
    seed, rank = settings.seed, ranks.rank
    reads = micro_batches(plan, seed, rank, first_step)
    batches = []
    for read, batch in read_ahead(examples, reads, seed, settings.workers, pin=ranks.device.type == "cuda"):
        generator = make_generator(seed, "prepare", read.step, read.offset)
        batches.append(task.prepare(ranks.to_device(batch), generator))
        if len(batches) == plan.accumulation:
            torch.manual_seed(derive_seed(seed, "step", read.step, rank))
            yield batches
            batches = []


@dataclass(frozen=True)
class StepResult:
    """Means over the step's global batch, and the signals that any rank received."""

    loss: float
    aux: float
    grad_norm: float
    units: float
    interrupts: float
    terminations: float


class Stepper:
    def __init__(
        self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, settings: TrainSettings
    ) -> None:
        self.task, self.model, self.optimizer, self.ranks, self.clip = task, model, optimizer, ranks, settings.clip
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.mixed = any(True for _ in moe_layers(model))  # a model without MoE layers can be trained too
        self.captured: CapturedBackward | None = None
        if settings.capture:
            if ranks.world > 1 or ranks.device.type != "cuda":
                found = f"{ranks.world} ranks" if ranks.world > 1 else f"the device {str(ranks.device)!r}"
                raise TrainingError(
                    f"train.capture records the step of one CUDA device, but there is {found}: turn it off"
                )
            self.captured = CapturedBackward(self._micro_batch, model)

    def take(self, step: int, batches: list[Batch], signum: int) -> StepResult:
        """Take step ``step`` (from 1) on this rank's micro-batches; ``signum`` is the signal it received, or 0."""
        self.optimizer.zero_grad(set_to_none=True)
        totals = self._backward(batches)
        signals = totals.new_tensor([float(signum == signal.SIGINT), float(signum == signal.SIGTERM)])
        loss, aux, units, interrupts, terminations = self.ranks.sum(torch.cat([totals, signals])).tolist()
        units = max(units, 1.0)
        loss, aux = loss / units, aux / units
        self._require_finite(step, "loss", loss, f"the auxiliary loss is {aux:g}")
        self._require_finite(step, "auxiliary loss", aux, f"the loss is {loss:g}")
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_div_([local(gradient) for gradient in gradients], units)
        if self.mixed:
            before_step(self.model, self.optimizer, lambda: self._reevaluate(batches) / units)
        norm = global_norm(gradients)
        grad_norm = float(norm)
        self._require_finite(step, "gradient's norm", grad_norm, f"the loss is {loss:g}")
        if self.clip is not None:
            scale_to(gradients, self.clip, norm)
        self.optimizer.step()
        if self.mixed:
            after_step(self.model, self.optimizer)
        return StepResult(loss, aux, grad_norm, units, interrupts, terminations)

    def _backward(self, batches: list[Batch]) -> Tensor:
        """Compute the gradients of the step's sums; return this rank's sums of loss, auxiliary loss and units."""
        totals = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        for number, batch in enumerate(batches, 1):
            if self.captured is None:
                with self.ranks.accumulating(self.model, last=number == len(batches)):
                    totals += self._micro_batch(batch)
            else:
                if number == 2:
                    self.captured.own_gradients()
                totals += self.captured(batch)
        return totals

    def _micro_batch(self, batch: Batch) -> Tensor:
        """Compute the gradients of one micro-batch's sums; return its sums of loss, auxiliary loss and units."""
        with self.ranks.autocast():
            loss, units = self.task.loss(self.model, batch)
        aux = aux_loss(self.model) if self.mixed else loss.new_zeros(())
        # Ranks average their gradients; multiplying by their number gives the sum.
        ((loss + units * aux) * self.ranks.world).backward()
        parts = (loss, units * aux, torch.as_tensor(units))
        return torch.stack([part.detach().to(self.ranks.device, torch.float64) for part in parts])

    @torch.no_grad()
    def _reevaluate(self, batches: list[Batch]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for batch in batches:
            with self.ranks.autocast():
                total += self.task.loss(unwrap(self.model), batch)[0].double()
        return total

    @staticmethod
    def _require_finite(step: int, name: str, value: float, beside: str) -> None:
        if not math.isfinite(value):
            raise NonFiniteLossError(f"step {step}: the {name} is {value} ({beside})")
