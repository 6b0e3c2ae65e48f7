"""What a recipe says: the task, the data, the model, the mixture and the training, as frozen dataclasses.

A recipe is a YAML file beside this one. Every field can be overruled on the command line (``--train.epochs 3``), and
the resolved recipe is the run directory's ``config.yaml``.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from intbmoe.checks import require, require_bool, require_finite, require_positive_int


def require_folder_name(name: str, value: str) -> None:
    """Raise unless a setting can be the name of one folder, inside the one that it is meant for."""
    usable = value.strip() not in ("", ".", "..") and not set(value) & set("/\\\0")
    require(usable, name, value, "usable as the name of a folder")


@dataclass(frozen=True)
class MoESettings:
    """Which method stands in place of the FFN."""

    name: str = "intbmoe"
    """A method of ``intbmoe methods``."""
    experts: int = 16
    """The paper's E: ``match_budget`` makes of it what each method gets."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the method, literal, on top of the budget: top_k, blocks, …"""
    label: str | None = None
    """What the runs are called, runs/<recipe>/<label>/<seed>; None for the method's name. Variants need their own."""

    def __post_init__(self) -> None:
        require_positive_int("moe.experts", self.experts)
        # YAML knows lists only; with one kind of sequence a recipe read back equals the one written.
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in self.options.items()}
        object.__setattr__(self, "options", plain)
        if self.label is not None:
            require_folder_name("moe.label", self.label)


@dataclass(frozen=True)
class TrainSettings:
    """How long, how fast, how often. Batches and steps are global: they do not depend on the number of devices."""

    _: KW_ONLY
    epochs: float = 1.0
    """Passes over the training data."""
    steps: int | None = None
    """Optimizer steps, in place of ``epochs``; None to count in epochs."""
    batch: int = 256
    """Examples in one optimizer step, over all devices and accumulation."""
    device_batch: int | None = None
    """Most examples one device takes at a time; None for all of its share. Accumulation follows from it."""
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: float = 0.0
    """Epochs of linear warm-up from ``warmup_lr``."""
    warmup_lr: float = 1e-6
    final_lr: float = 1e-5
    """Where the cosine ends."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.05
    decay_all: bool = True
    """Decay every parameter, as the paper states; False spares norms, biases, routers and codebooks."""
    clip: float | None = 1.0
    """Largest norm of the gradient."""
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    """Compile the Transformer's blocks, once for all that are alike; evaluation stays as it is."""
    capture: bool = False
    """Record forward and backward as a CUDA graph and replay it: several times faster for small models on one GPU."""
    seed: int = 0
    eval_every: float = 1.0
    """Epochs between evaluations on the validation split; the end is always evaluated."""
    checkpoint_every: int = 500
    """Optimizer steps between checkpoints."""
    keep_checkpoints: int = 2
    log_every: int = 20
    """Optimizer steps between lines of metrics."""
    workers: int = 0
    """Processes that prepare data."""
    deterministic: bool = True
    """Ask torch for deterministic algorithms, so that a resumed run repeats bit for bit on a GPU too."""

    def __post_init__(self) -> None:
        for name in ("epochs", "lr", "warmup", "warmup_lr", "final_lr", "weight_decay", "eval_every"):
            require_finite(f"train.{name}", getattr(self, name))
        for name in ("epochs", "lr", "eval_every"):
            require(getattr(self, name) > 0, f"train.{name}", getattr(self, name), "positive")
        for name in ("warmup", "warmup_lr", "final_lr", "weight_decay"):
            require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more")
        for name in ("batch", "checkpoint_every", "keep_checkpoints", "log_every"):
            require_positive_int(f"train.{name}", getattr(self, name))
        if self.steps is not None:
            require_positive_int("train.steps", self.steps)
        if self.device_batch is not None:
            require_positive_int("train.device_batch", self.device_batch)
        if self.clip is not None:
            require_finite("train.clip", self.clip)
            require(self.clip > 0, "train.clip", self.clip, "None or positive")
        if self.steps is None:
            require(self.warmup <= self.epochs, "train.warmup", self.warmup, f"at most train.epochs ({self.epochs})")
        require(self.schedule in ("cosine", "constant"), "train.schedule", self.schedule, "'cosine' or 'constant'")
        known = self.precision in ("float32", "bfloat16")
        require(known, "train.precision", self.precision, "'float32' or 'bfloat16'")
        integral = isinstance(self.workers, int) and self.workers >= 0
        require(integral, "train.workers", self.workers, "an integer of at least 0")
        for name in ("decay_all", "compile", "capture", "deterministic"):
            require_bool(f"train.{name}", getattr(self, name))
        object.__setattr__(self, "betas", tuple(self.betas))


@dataclass(frozen=True)
class Recipe:
    """One experiment. Each task has a subclass that fixes the types of ``data`` and ``model``."""

    name: str
    """The recipe's name, and the first folder of its runs: runs/<name>/<method>/<seed>."""
    task: str
    """A task of ``intbmoe.tasks``."""
    data: Any
    model: Any
    moe: MoESettings = field(default_factory=MoESettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    seeds: tuple[int, ...] = (0, 1, 2)
    """What ``compare`` takes in place of ``train.seed``, from the first on."""
