"""The training loop: from a recipe to a finished run directory, however often it is interrupted on the way.

It knows tasks, never a method by name: auxiliary losses and state come through the contract (``step.py``).
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from intbmoe.files import digest, to_json
from intbmoe.layer import moe_layers, unwrap
from intbmoe.precision import bfloat16_is_slow
from intbmoe.tasks import make_task
from intbmoe.tasks.base import Batch
from intbmoe.tasks.recipe import Recipe
from intbmoe.train.checkpoint import Checkpoint, CheckpointFolder
from intbmoe.train.data import micro_batches, plan_batches, read_ahead
from intbmoe.train.distribution import Ranks
from intbmoe.train.environment import describe_environment
from intbmoe.train.errors import TrainingInterrupted
from intbmoe.train.evaluation import evaluate_split
from intbmoe.train.files import pack_tensors
from intbmoe.train.lock import RunLock
from intbmoe.train.metrics import MetricsLog, Window, mean_load, take_loads
from intbmoe.train.optimizer import learning_rate, make_optimizer, set_learning_rate
from intbmoe.train.progress import TrainingProgress
from intbmoe.train.run import MetricsFile, RunDirectory
from intbmoe.train.seeds import derive_seed, make_generator
from intbmoe.train.signals import StopRequest
from intbmoe.train.state import collect_tensors, describe_optimizer, restore, warned_layers
from intbmoe.train.step import Stepper, StepResult


def train(
    recipe: Recipe,
    root: str | Path = Path("runs"),
    quiet: bool = False,
    wait: Callable[[str], None] | None = None,
) -> RunDirectory:
    """Start or continue root/<recipe>/<method>/<seed>; returns when it is finished, at once if it was.

    Ctrl-C and SIGTERM end in ``TrainingInterrupted`` (exit code 130 or 143) after saving; what else can go wrong is a
    ``TrainingError`` that says what to do. Calling again goes on from the last checkpoint. Another process that trains
    into the same run is an error too, unless ``wait`` is given: it is told of it, and the other's end is waited for.
    """
    settings = recipe.train
    run = RunDirectory.of(recipe, root)
    ranks = Ranks(settings.precision)
    with ExitStack() as stack:
        if ranks.main:
            run.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(RunLock(run.path, wait))
            run.claim(recipe)
        if ranks.from_main(int(run.finished)):
            return run
        stack.enter_context(_determinism(settings.deterministic))
        training = Training(recipe, run, ranks, quiet)
        stack.callback(training.close)
        stop = stack.enter_context(StopRequest(training.progress.say))
        training.go_on(stop)
        training.finish()
    return run


class Training:
    """One run while it is being trained, on one rank."""

    def __init__(self, recipe: Recipe, run: RunDirectory, ranks: Ranks, quiet: bool) -> None:
        self.recipe, self.settings, self.run, self.ranks = recipe, recipe.train, run, ranks
        self.task = make_task(recipe)
        self.examples = self.task.split("train")
        self.plan = plan_batches(len(self.examples), self.settings, ranks.world)
        torch.manual_seed(derive_seed(self.settings.seed, "model"))
        self.model = ranks.place(self.task.make_model().train(), self.settings)
        self.optimizer = make_optimizer(unwrap(self.model), self.settings)
        self.stepper = Stepper(self.task, self.model, self.optimizer, ranks, self.settings)
        self.checkpoints = CheckpointFolder(run.path / "checkpoints", self.settings.keep_checkpoints)
        title = "/".join(run.path.parts[-3:])
        self.progress = TrainingProgress(title, self.plan.steps, quiet or not ranks.main)
        if self.settings.precision == "bfloat16" and bfloat16_is_slow(ranks.device) and ranks.main:
            self.progress.warn(
                "train.precision='bfloat16' is far slower than float32 on this CPU, which has no instructions for it: "
                "--train.precision float32"
            )
        warmup = self.plan.epochs_to_steps(self.settings.warmup) if self.settings.warmup else 0
        if warmup > self.plan.steps and ranks.main:
            self.progress.warn(
                f"train.warmup={self.settings.warmup:g} epochs are {warmup} steps, more than the {self.plan.steps} of "
                f"this run: its learning rate never reaches train.lr={self.settings.lr:g}"
            )
        self.window, self.step, self.saved_step, self.seconds = Window(), 0, -1, 0.0
        self.valid: dict[str, float] | None = None
        self._resume()
        self.log: MetricsLog | None = None
        if ranks.main:
            file = MetricsFile(run.metrics_path, self._metrics_length)
            chooses = any(layer.choices is not None for _, layer in moe_layers(self.model))
            loads = MetricsFile(run.loads_path, self._loads_length) if chooses else None
            self.log = MetricsLog(run.path, file, self.step, loads)
            world, seed = ranks.world, self.settings.seed
            run.add_environment(describe_environment(device=ranks.device, world=world, seed=seed, step=self.step))

    # Checkpoints.

    def _resume(self) -> None:
        """Go back to the newest whole checkpoint, the same on all ranks; to the beginning if there is none."""
        self._metrics_length = self._loads_length = 0
        found = self.checkpoints.load_newest(self.progress.warn) if self.ranks.main else None
        step = self.ranks.from_main(-1 if found is None else found.step)
        if step < 0:
            return
        found = found or self.checkpoints.load(step)
        restore(found, unwrap(self.model), self.optimizer)
        state = found.state
        self.step = self.saved_step = step
        self.window = Window(state["window"])
        self.seconds, self.valid, self._metrics_length = state["seconds"], state["valid"], state["metrics_length"]
        self._loads_length = state.get("loads_length", 0)  # runs begun before there were loads have none

    def save(self) -> None:
        """Write a checkpoint of the last step, unless there is one."""
        if self.saved_step == self.step:
            return
        model = unwrap(self.model)
        tensors = collect_tensors(model, self.optimizer)
        if self.ranks.main:
            state = {
                "epoch": self.step / self.plan.steps_per_epoch,
                "seconds": self._elapsed(),
                "window": self.window.sums,
                "valid": self.valid,
                "warned": warned_layers(model),
                **self.log.sync(),
                "optimizer": describe_optimizer(self.optimizer, model),
            }
            self.checkpoints.save(Checkpoint(self.step, tensors, state))
        self.saved_step = self.step
        self.ranks.wait()

    # The loop.

    def go_on(self, stop: StopRequest) -> None:
        """Train from where the run stands to its last step."""
        settings, plan = self.settings, self.plan
        self.started = time.perf_counter()
        self.progress.start(self.step)
        evaluate_every = plan.epochs_to_steps(settings.eval_every)
        for batches in self._steps():
            rate = learning_rate(self.step, settings, plan)
            set_learning_rate(self.optimizer, rate)
            interrupt, terminate = stop.signum == signal.SIGINT, stop.signum == signal.SIGTERM
            result = self.stepper.take(self.step + 1, batches, interrupt, terminate)
            self.step += 1
            self.window.add(result)
            last = self.step == plan.steps
            if last or self.step % settings.log_every == 0:
                self._log_training(rate)
            if last or self.step % evaluate_every == 0:
                self.valid = self._evaluate("valid")
            self.progress.advance(self.step)
            if last or self.step % settings.checkpoint_every == 0:
                self.save()
            if not last:
                self._stop_if_asked(result)

    def _steps(self) -> Iterator[list[Batch]]:
        """This rank's prepared micro-batches of each step. Random numbers start anew at each, see ``seeds.py``."""
        seed, rank = self.settings.seed, self.ranks.rank
        reads = micro_batches(self.plan, seed, rank, self.step)
        pin = self.ranks.device.type == "cuda"
        batches = []
        for read, batch in read_ahead(self.examples, reads, seed, self.settings.workers, pin):
            generator = make_generator(seed, "prepare", read.step, read.offset)
            batches.append(self.task.prepare(self.ranks.to_device(batch), generator))
            if len(batches) == self.plan.accumulation:
                torch.manual_seed(derive_seed(seed, "step", read.step, rank))
                yield batches
                batches = []

    def _log_training(self, rate: float) -> None:
        loads = take_loads(self.model, self.progress.say)
        values = {**self.window.means(), "lr": rate, **mean_load(loads)}
        self.window = Window()
        speed = self.progress.measure(self.step, self.plan.batch)
        self._write("train", values, speed)
        if self.log is not None:
            self.log.write_loads(self.step, loads)

    def _evaluate(self, split: str) -> dict[str, float]:
        size = self.plan.micro
        values = evaluate_split(
            self.task, self.model, split, self.ranks, size, self.settings.seed, self.settings.workers
        )
        self._write(split, values)
        return values

    def _write(self, split: str, values: dict[str, float], speed: float | None = None) -> None:
        if self.log is not None:
            self.log.write(self.step, self.step / self.plan.steps_per_epoch, split, values, speed)
        self.progress.show(self.step, split, values, self.plan.batch)

    def _stop_if_asked(self, result: StepResult) -> None:
        """The step's sums say on every rank alike whether any was asked to stop."""
        if not (result.interrupts or result.terminations):
            return
        signum = signal.SIGINT if result.interrupts else signal.SIGTERM
        self.save()
        message = f"stopped after step {self.step} of {self.plan.steps}; the same command goes on from there"
        self.progress.stop()
        if self.ranks.main:
            self.progress.warn(f"{self.run.path}: {message}")
        raise TrainingInterrupted(signum, message)

    def finish(self) -> None:
        """Evaluate on the test split, for the first and only time, and write the results."""
        test = self._evaluate("test")
        model = unwrap(self.model)
        tensors = collect_tensors(model, self.optimizer)["model"]
        if self.ranks.main:
            self.log.sync()
            weights = pack_tensors(tensors)
            self.run.write("model.safetensors", weights)
            self.run.write("done.json", to_json(self._results(test, digest(weights))))
        self.ranks.wait()

    def _results(self, test: dict[str, float], weights: str) -> dict[str, Any]:
        seconds = self._elapsed()
        return {
            "recipe": self.recipe.name,
            "method": self.recipe.moe.name,
            "seed": self.settings.seed,
            "metric": self.task.metric,
            "higher_is_better": self.task.higher_is_better,
            "valid": self.valid,
            "test": test,
            "params": sum(parameter.numel() for parameter in unwrap(self.model).parameters()),
            "steps": self.plan.steps,
            "epochs": self.plan.steps / self.plan.steps_per_epoch,
            "examples": self.plan.steps * self.plan.batch,
            "seconds": seconds,
            "sha256": {"model.safetensors": weights},
        }

    def _elapsed(self) -> float:
        """Seconds of training, those of earlier starts included."""
        return self.seconds + time.perf_counter() - self.started

    def close(self) -> None:
        """Let go of the terminal and the files."""
        self.progress.stop()
        if self.log is not None:
            self.log.close()


@contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    """Ask torch for algorithms that repeat bit for bit, and leave it as it was found."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with this
    before = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # finds bugs, costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filling
