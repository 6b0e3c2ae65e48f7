"""The training loop: from a recipe to a finished run directory, however often it is interrupted on the way.

It knows tasks, but no method by name: auxiliary losses and state come through the contract (``step.py``).
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from intbmoe.files import digest, file_digest, to_json
from intbmoe.layer import local, moe_layers, unwrap
from intbmoe.recipes import load_recipe, override
from intbmoe.tasks import make_task
from intbmoe.tasks.base import Task
from intbmoe.tasks.recipe import Recipe
from intbmoe.train.build import build, doubts, learning_rate
from intbmoe.train.distribution import Ranks
from intbmoe.train.errors import NonFiniteLossError, OutOfMemoryError, TrainingInterrupted, lacks_memory
from intbmoe.train.evaluation import Evaluation, evaluate_split
from intbmoe.train.files import pack_tensors
from intbmoe.train.from_python import store_data
from intbmoe.train.metrics import MetricsLog, Window, mean_load, take_loads
from intbmoe.train.origin import describe_origin, require_same_origin
from intbmoe.train.outcomes import pack_outcomes
from intbmoe.train.progress import TrainingProgress
from intbmoe.train.resume import (
    Checkpoint,
    CheckpointFolder,
    Standing,
    edited_state_is_explained,
    make_checkpoint,
    model_tensors,
    restore,
)
from intbmoe.train.run import RunDirectory, describe_environment, run_lock
from intbmoe.train.signals import StopRequest
from intbmoe.train.step import StepResult, prepared_steps


def train(
    recipe: Recipe | str | Path,
    root: str | Path = Path("runs"),
    quiet: bool = False,
    wait: Callable[[str], None] | None = None,
    *,
    data: Any = None,
    settings: Mapping[str, Any] | None = None,
) -> RunDirectory:
    """Start or resume root/<recipe>/<method>/<seed>; return when it is finished (at once if it already is).

    ``recipe`` is the name of a recipe, a file of yours or a ``Recipe``. ``settings`` override some of its settings, by
    the names used on the command line: {"moe.name": "switch", "train.epochs": 3}. ``data`` is a data set that lives in
    Python (``docs/your-data.md``): it is first written to root/<recipe>/data-…, where every later command finds it.

    A wrong name or setting is a ``ValueError``, wrong data a ``DataError`` (also a ``ValueError``), and a training that
    cannot start or continue a ``TrainingError``; the messages say what to do. Ctrl-C and SIGTERM raise
    ``TrainingInterrupted`` (exit code 130 or 143) after saving. Calling again resumes from the last checkpoint. It is
    an error if another process is training in the same run, unless ``wait`` is given: then ``wait`` gets a message, and
    this call waits.
    """
    recipe = override(recipe if isinstance(recipe, Recipe) else load_recipe(recipe), settings or {})
    if data is not None:
        recipe = store_data(recipe, data, Path(root) / recipe.name)
    task = make_task(recipe)
    recipe = task.resolve()
    run = RunDirectory.of(recipe, root)
    ranks = Ranks(recipe.train.precision, recipe.train.parallel, recipe.train.patience)
    with ExitStack() as stack:
        if ranks.main:
            run.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(run_lock(run.path, wait))
            run.claim(recipe)
        if ranks.from_main(int(run.finished)):
            return run
        stack.enter_context(ranks.losses_are_explained())
        stack.enter_context(_missing_memory_is_explained(recipe, ranks))
        if recipe.train.deterministic:
            stack.enter_context(_determinism())
        on_cpu = ranks.device.type == "cpu"
        notes = stack.enter_context(_threads(recipe.train.threads, run, ranks)) if on_cpu else []
        training = Training(task, run, ranks, quiet, notes)
        stack.callback(training.close)
        stack.enter_context(training.divergence_is_explained())
        stop = stack.enter_context(StopRequest(training.progress.say, ranks.world))
        training.go_on(stop)
        training.finish()
    return run


class Training:
    def __init__(self, task: Task, run: RunDirectory, ranks: Ranks, quiet: bool, notes: Iterable[str] = ()) -> None:
        self.task, self.recipe, self.settings, self.run, self.ranks = task, task.recipe, task.recipe.train, run, ranks
        self.checkpoints = CheckpointFolder(run.path / "checkpoints", self.settings.keep_checkpoints)
        begins = not self.checkpoints.steps()
        self.examples, self.plan, self.model, self.optimizer, self.stepper = build(task, ranks, begins)
        self.progress = TrainingProgress("/".join(run.path.parts[-3:]), self.plan.steps, quiet or not ranks.main)
        if ranks.main:
            for doubt in (*notes, *doubts(self.settings, self.plan, ranks.device)):
                self.progress.warn(doubt)
        self.validates = len(self.task.split("valid")) > 0
        self.origin = describe_origin(task) if ranks.main else {}
        self.at, self.saved_step = self._resume()
        self.log: MetricsLog | None = None
        if ranks.main:
            chooses = any(layer.choices is not None for _, layer in moe_layers(self.model))
            self.log = MetricsLog(run, self.at.step, self.at.lengths, loads=chooses)
            run.add_environment(describe_environment(ranks.device, ranks.world, self.settings.seed, self.at.step))

    def _resume(self) -> tuple[Standing, int]:
        """Restore the newest intact checkpoint, the same on all ranks; without one, start at the beginning (−1)."""
        found = self.checkpoints.load_newest(self.progress.warn) if self.ranks.main else None
        if found is not None:
            with edited_state_is_explained(where := self.checkpoints.folder(found.step)):
                require_same_origin(found.state.get("origin"), self.origin, self.recipe, where, self.progress.warn)
        step = self.ranks.from_main(-1 if found is None else found.step)
        if step < 0:
            return Standing(), step
        with edited_state_is_explained(self.checkpoints.folder(step)):
            found = found or self.checkpoints.load(step, check_shards=False)
            return restore(found, unwrap(self.model), self.optimizer), step

    def save(self) -> None:
        """Write a checkpoint of the last step, unless it already exists."""
        if self.saved_step == self.at.step:
            return
        self.at.seconds = time.perf_counter() - self.started
        if self.log is not None:
            self.at.lengths = self.log.sync()
        checkpoint = make_checkpoint(self.at, self._epoch(), unwrap(self.model), self.optimizer, self.origin)
        self._require_finite(checkpoint)
        self.checkpoints.save_shards(checkpoint, self.ranks)
        if self.ranks.main:
            self.checkpoints.save(checkpoint)
        self.saved_step = self.at.step
        self.ranks.wait()

    def _require_finite(self, checkpoint: Checkpoint) -> None:
        """Raise on all ranks if a weight on any of them is not finite: such a checkpoint would be useless."""
        names = [name for name, _ in unwrap(self.model).named_parameters()]
        parts = (local(checkpoint.tensors["model"][name]) for name in names)
        bad = self.ranks.sum(torch.stack([~part.isfinite().all() for part in parts]).float())
        if bad.any():
            name = names[int(bad.argmax())]
            raise NonFiniteLossError(f"step {self.at.step}: the weights {name} are not finite, so they are not saved")

    def go_on(self, stop: StopRequest) -> None:
        settings, plan, at = self.settings, self.plan, self.at
        self.started = time.perf_counter() - at.seconds
        self.progress.start(at.step)
        evaluate_every = plan.epochs_to_steps(settings.eval_every)
        for batches in prepared_steps(self.task, self.examples, plan, self.ranks, settings, at.step):
            rate = learning_rate(at.step, settings, plan)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            result = self.stepper.take(at.step + 1, batches, stop.signum)
            at.step += 1
            at.window.add(result)
            last = at.step == plan.steps
            if last or at.step % settings.log_every == 0:
                self._log_training(rate)
            if last or at.step % evaluate_every == 0:
                self._evaluate_all()
            self.progress.advance(at.step)
            if last or at.step % settings.checkpoint_every == 0:
                self.save()
            if not last:
                self._stop_if_asked(result)

    def _log_training(self, rate: float) -> None:
        loads = take_loads(self.model, self.progress.say)
        values = {**self.at.window.means(), "lr": rate, **mean_load(loads)}
        self.at.window = Window()
        self._write("train", values, self.progress.measure(self.at.step, self.plan.batch))
        if self.log is not None:
            self.log.write_loads(self.at.step, loads)

    def _evaluate_all(self) -> None:
        """Evaluate on the validation split, if there is one, and on the test split if the best result is reported."""
        if self.validates:
            self.at.valid = self._evaluate("valid").metrics
        if self.settings.report == "best":
            found, metric = self._evaluate("test"), self.task.metric
            sign = 1 if self.task.higher_is_better else -1
            if self.at.best is None or sign * found.metrics[metric] > sign * self.at.best[metric]:
                self.at.best, self.at.best_step = found.metrics, self.at.step
                self._keep_outcomes(found)

    def _evaluate(self, split: str) -> Evaluation:
        size, seed, workers = self.plan.micro, self.settings.seed, self.settings.workers
        found = evaluate_split(self.task, self.model, split, self.ranks, size, seed, workers)
        values = found.metrics
        for name in ("loss", self.task.metric):
            if not math.isfinite(values.get(name, 0.0)):
                raise NonFiniteLossError(f"step {self.at.step}: on the {split} split the {name} is {values[name]}")
        values = {name: value for name, value in values.items() if math.isfinite(value)}  # JSON has no others
        self._write(split, values)
        return replace(found, metrics=values)

    def _keep_outcomes(self, found: Evaluation) -> None:
        if self.ranks.main and found.outcomes is not None:
            self.run.write(self.run.outcomes_path.name, pack_outcomes(found.outcomes))

    @contextmanager
    def divergence_is_explained(self) -> Iterator[None]:
        """Say what to change: the same command would diverge again."""
        try:
            yield
        except NonFiniteLossError as error:
            train = self.settings
            saved = f"resumes from step {self.saved_step} and " if self.saved_step > 0 else ""
            raise NonFiniteLossError(
                f"{error}. Training has diverged, and the same command {saved}would diverge again: lower "
                f"train.lr (it is {train.lr:g}) or train.clip ({train.clip}), or lengthen train.warmup "
                f"({train.warmup:g} epochs), unless the data itself contains such a number; do so in a new run "
                f"(--moe.label NAME), or remove {self.run.path} first"
            ) from error

    def _write(self, split: str, values: dict[str, float], speed: float | None = None) -> None:
        if self.log is not None:
            self.log.write(self.at.step, self._epoch(), split, values, speed)
        self.progress.show(self.at.step, split, values, self.plan.batch)

    def _stop_if_asked(self, result: StepResult) -> None:
        """Stop if any rank was asked to; the step's sums tell every rank the same."""
        if not (result.interrupts or result.terminations):
            return
        signum = signal.SIGINT if result.interrupts else signal.SIGTERM
        self.save()
        message = f"stopped after step {self.at.step} of {self.plan.steps}; the same command resumes from there"
        self.progress.stop()
        if self.ranks.main:
            self.progress.warn(f"{self.run.path}: {message}")
        raise TrainingInterrupted(signum, message)

    def finish(self) -> None:
        """Evaluate on the test split, unless ``_evaluate_all`` has already done so, and write the results."""
        best = self.settings.report == "best"
        test = self.at.best
        if not best:
            found = self._evaluate("test")
            test = found.metrics
            self._keep_outcomes(found)
        tensors = model_tensors(unwrap(self.model), keep=self.ranks.main)
        if self.ranks.main:
            self.log.sync()
            weights, kept = pack_tensors(tensors), self.run.outcomes_path
            self.run.write("model.safetensors", weights)
            checksums = {"model.safetensors": digest(weights)}
            if kept.is_file():
                checksums[kept.name] = file_digest(kept)
            results = {
                "recipe": self.recipe.name,
                "method": self.recipe.moe.name,
                "seed": self.settings.seed,
                "metric": self.task.metric,
                "higher_is_better": self.task.higher_is_better,
                "valid": self.at.valid,
                "test": test,
                "report": self.settings.report,
                "test_step": self.at.best_step if best else self.plan.steps,
                "params": sum(parameter.numel() for parameter in self.model.parameters()),
                "steps": self.plan.steps,
                "epochs": self.plan.steps / self.plan.steps_per_epoch,
                "examples": self.plan.steps * self.plan.batch,
                "seconds": time.perf_counter() - self.started,
                "sha256": checksums,
            }
            self.run.write("done.json", to_json(results))
        self.ranks.wait()

    def _epoch(self) -> float:
        return self.at.step / self.plan.steps_per_epoch

    def close(self) -> None:
        self.progress.stop()
        if self.log is not None:
            self.log.close()


@contextmanager
def _missing_memory_is_explained(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        share = max(1, recipe.train.batch // ranks.world)
        now = min(recipe.train.device_batch or share, share)
        smaller = f"--train.device-batch {now // 2}" if now > 1 else "a smaller model or --train.precision bfloat16"
        raise OutOfMemoryError(
            f"{ranks.device} is out of memory with {now} examples at a time: try {smaller}, or repeat the command when "
            f"other programs on it have ended. ({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def _determinism() -> Iterator[None]:
    """Ask torch for algorithms that repeat bit for bit, and restore its settings afterwards."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
    before = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it helps to find bugs, but costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filling


@contextmanager
def _threads(wanted: int | None, run: RunDirectory, ranks: Ranks) -> Iterator[list[str]]:
    """Use as many CPU threads as the run began with, or ``wanted``; yield the messages about it."""
    before = torch.get_num_threads()
    begun = ranks.from_main((run.threads() or 0) if ranks.main else 0)
    count = wanted or begun or before
    said = []
    if begun and count != begun:
        said = [f"threads: {count}, before {begun}: from here on sums round differently than without the interruption"]
    elif begun and count != before:
        said = [f"threads: {count} as before, not {before}, so that rounding stays the same (train.threads overrides)"]
    torch.set_num_threads(count)
    try:
        yield said
    finally:
        torch.set_num_threads(before)
