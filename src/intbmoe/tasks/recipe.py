"""What a recipe contains: the task, the data, the model, the mixture and the training, as frozen dataclasses.

Recipes are YAML files; ``--train.epochs 3`` overrides a field, and a run's ``config.yaml`` is its resolved recipe.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, Literal

from intbmoe.checks import require
from intbmoe.settings import Checked, MustBe, NonNegative, NonNegativeInt, Positive, PositiveInt


def _names_a_folder(text: str) -> bool:
    return text.strip() not in ("", ".", "..") and not set(text) & set("/\\\0")


DecayGroup = Literal["biases", "norms", "scales", "positions", "routers"]
"""What ``train.undecayed`` may exempt; modules declare their parameters' groups with ``DECAY_GROUPS``."""
FolderName = Annotated[str, MustBe("usable as the name of a folder", _names_a_folder)]


@dataclass(frozen=True)
class MoESettings(Checked):
    """Which method replaces the FFN."""

    name: str = "intbmoe"
    """The method; "intbmoe methods" lists them."""
    experts: PositiveInt = 16
    """The paper's E, which determines the number and width of each method's experts (match_budget)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the method, taken literally, on top of the budget: top_k, blocks, …"""
    label: FolderName | None = None
    """Folder name of the runs, runs/<recipe>/<label>/<seed>; None for the method's name. Variants need their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # YAML has only lists; with one kind of sequence, a recipe read back equals the one written.
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in self.options.items()}
        object.__setattr__(self, "options", plain)


@dataclass(frozen=True)
class TrainSettings(Checked):
    """How long, how fast, how often; batches and steps are global and do not depend on the number of devices."""

    _: KW_ONLY
    epochs: Positive = 1.0
    """Passes over the training data."""
    steps: PositiveInt | None = None
    """Optimizer steps, instead of epochs; None to count in epochs."""
    batch: PositiveInt = 256
    """Examples in one optimizer step, over all devices and accumulation."""
    device_batch: PositiveInt | None = None
    """The most examples that one device takes at a time; None for its whole share. Accumulation follows from it."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "epoch-cosine", "constant"] = "cosine"
    """Learning rate after the warm-up. epoch-cosine is timm's: one rate per epoch, cosine from the warm-up's start."""
    warmup: NonNegative = 0.0
    """Epochs of linear warm-up from warmup_lr."""
    warmup_lr: NonNegative = 1e-6
    """Learning rate at the start of the warm-up."""
    final_lr: NonNegative = 1e-5
    """Learning rate at the end of the cosine."""
    cooldown: NonNegative = 0.0
    """Epochs at final_lr at the end, by which the cosine is shortened."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates for the two moments."""
    weight_decay: NonNegative = 0.05
    """AdamW's weight decay."""
    undecayed: tuple[DecayGroup, ...] = ()
    """Parameters without weight decay; scales are single numbers and vectors, such as λ. Empty: all decay."""
    clip: Positive | None = 1.0
    """Largest allowed norm of the gradient; None for no clipping."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The type for large matrix products; weights and optimizer state stay in float32."""
    compile: bool = False
    """Compile the Transformer's blocks, once for all equal ones; evaluation is not compiled."""
    capture: bool = False
    """Record forward and backward as a CUDA graph and replay it: several times faster for small models on one GPU."""
    parallel: Literal["ddp", "fsdp", "pools", "experts"] = "ddp"
    """What a rank holds: all (ddp), a shard (fsdp), slices of IntBMoE's pools, or some of a sparse method's experts."""
    patience: Positive = 600.0
    """Seconds that a rank waits for the others before the run ends with an error."""
    seed: int = 0
    """Random seed for initial weights, the order of the data and everything else that is random."""
    eval_every: Positive = 1.0
    """Epochs between evaluations on the validation split; there is always one at the end."""
    checkpoint_every: PositiveInt = 500
    """Optimizer steps between checkpoints."""
    report: Literal["last", "best"] = "last"
    """last: evaluate the test split once, at the end. best: at every evaluation, and report the best one."""
    keep_checkpoints: PositiveInt = 2
    """How many of the latest checkpoints to keep."""
    log_every: PositiveInt = 20
    """Optimizer steps between lines of metrics."""
    workers: NonNegativeInt = 0
    """Processes that prepare data."""
    threads: PositiveInt | None = None
    """CPU threads, which affect rounding; None for torch's choice when the run begins, which it then keeps."""
    deterministic: bool = True
    """Ask torch for deterministic algorithms, so that a resumed run repeats bit for bit on a GPU too."""
    start: str | None = None
    """A finished run, or a folder of intbmoe.huggingface, whose weights training starts with; None for new ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        idle = self.cooldown and self.schedule == "constant"
        require(not idle, "cooldown", self.cooldown, "0 with schedule 'constant', which never falls to final_lr")
        if self.steps is None:
            require(self.warmup <= self.epochs, "warmup", self.warmup, f"at most epochs ({self.epochs})")
            rest = self.epochs - self.warmup
            require(self.cooldown <= rest, "cooldown", self.cooldown, f"at most epochs without the warm-up ({rest:g})")


@dataclass(frozen=True)
class Recipe(Checked):
    """One experiment. Each task has a subclass that fixes the types of ``data`` and ``model``."""

    name: FolderName
    """The recipe's name, and the first folder of its runs: runs/<name>/<method>/<seed>."""
    task: str
    """A task of intbmoe.tasks."""
    data: Any
    model: Any
    moe: MoESettings = field(default_factory=MoESettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds for compare, which takes the first --seeds of them."""
