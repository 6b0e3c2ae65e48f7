"""Trains one IntBMoE layer, precomposes it, measures it and draws it, in under a minute.

The problem is a patchwork of eight fields, each striped in its own direction. The model predicts how bright a point is
from its two coordinates. Different rules hold in different places, which is what a mixture is for.
"""

import math
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
import tyro
from matplotlib.colors import BoundaryNorm, ListedColormap
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import intbmoe
from intbmoe.report.canvas import Picture, save_picture
from intbmoe.report.style import BLOCKS, DIVERGING, GRID, PALE, PHONE_INCHES, PHONE_POINTS
from intbmoe.report.style import BLUE as PRECOMPOSED
from intbmoe.report.style import ORANGE as AS_TRAINED

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIELDS = 8
PIXELS = 180  # per side of the patchwork in the picture
console = Console()
torch.set_num_threads(1)  # steady times on a shared machine; matrices this small gain nothing from more threads


@dataclass(frozen=True)
class Example:
    """Train one small IntBMoE layer, precompose it, time it for several E, and save a picture."""

    steps: int = 800
    """Training steps."""
    batch: int = 1024
    """Points per training step."""
    experts: tuple[int, ...] = (1, 4, 16, 64, 128)
    """The values of E to time."""
    repeats: int = 25
    """Timed forwards for each entry of the table."""
    output: Path = Path("layer.png")
    """File for the picture: .png, or .svg, which supports dark mode."""
    seed: int = 3


class Patchwork:
    """Eight fields around eight centres; a point belongs to the nearest one, which gives its stripes a direction."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.centres = torch.rand(FIELDS, 2, generator=generator) * 2 - 1
        for _ in range(30):  # Lloyd's iterations: fields of about equal area
            points = torch.rand(20_000, 2, generator=generator) * 2 - 1
            field = torch.cdist(points, self.centres).argmin(1)
            self.centres = torch.stack([points[field == index].mean(0) for index in range(FIELDS)])
        angles = torch.arange(FIELDS) * 3 % FIELDS * math.pi / FIELDS  # consecutive fields differ clearly
        self.directions = torch.stack([angles.cos(), angles.sin()], dim=1)

    def brightness(self, points: Tensor) -> Tensor:
        """Maps (…, 2) points of [−1, 1]² to (…) brightness in [−1, 1]."""
        field = torch.cdist(points, self.centres).argmin(-1)
        return torch.sin(16 * (points * self.directions[field]).sum(-1))


class Painter(nn.Module):
    """A Transformer's residual block without attention: embed, ``x + ffn(norm(x))``, read out."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.register_buffer("waves", torch.randn(2, dim // 2) * 2)
        self.norm = nn.LayerNorm(dim)
        self.ffn = intbmoe.IntBMoE(dim, hidden=32, experts=16, blocks=8, top_k=2)
        self.head = nn.Linear(dim, 1)

    def forward(self, points: Tensor) -> Tensor:
        """Maps (B, T, 2) points to (B, T) brightness."""
        phases = points @ self.waves
        x = torch.cat([phases.sin(), phases.cos()], dim=-1)
        x = x + self.ffn(self.norm(x))
        return self.head(x).squeeze(-1)


def train(model: Painter, patchwork: Patchwork, example: Example) -> list[float]:
    """Runs the plain training loop of docs/layer.md; returns the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=example.steps + 1)
    losses = []
    with StepReport(example.steps) as report:
        for _ in range(example.steps):
            points = torch.rand(1, example.batch, 2) * 2 - 1
            loss = F.mse_loss(model(points), patchwork.brightness(points)) + intbmoe.aux_loss(model)
            optimizer.zero_grad()
            loss.backward()
            intbmoe.before_step(model, optimizer)
            optimizer.step()
            intbmoe.after_step(model, optimizer)
            schedule.step()
            losses.append(loss.item())
            report.step(losses)
    return losses


class StepReport:
    """A progress bar with loss and speed on a terminal; elsewhere, a plain line after every tenth of the steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        columns = ("loss {task.fields[loss]:.4f}", "{task.fields[speed]:.0f} steps/s")
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            *(TextColumn(column) for column in columns),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "StepReport":
        self.start = time.perf_counter()
        self.bar.start()
        self.task = self.bar.add_task("training", total=self.steps, loss=math.nan, speed=0.0)
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def step(self, losses: list[float]) -> None:
        """Shows the recent mean loss; call it after every step with all losses so far."""
        done = len(losses)
        loss = statistics.fmean(losses[-20:])
        speed = done / (time.perf_counter() - self.start)
        self.bar.update(self.task, completed=done, loss=loss, speed=speed)
        if not console.is_terminal and (done == self.steps or done % max(1, self.steps // 10) == 0):
            print(f"step {done}/{self.steps}  loss {loss:.4f}  {speed:.0f} steps/s", flush=True)


@dataclass(frozen=True)
class Cost:
    """What one layer costs: the time of its fastest forward, and the size of the weights it keeps between forwards."""

    milliseconds: float
    megabytes: float


DIM, HIDDEN, TOKENS = 192, 768, 128


@torch.inference_mode()
def measure(experts: tuple[int, ...], repeats: int) -> dict[int, tuple[Cost, Cost]]:
    """Measures, for each number of experts, the cost of the layer as trained and precomposed.

    All forms run in turns, so that caches are in the same state for each. The fastest forward of each counts, because
    it depends least on other work on the machine.
    """
    layers = [intbmoe.IntBMoE(DIM, HIDDEN, experts=count).eval() for count in experts]
    forms = [form for layer in layers for form in (layer, layer.precompose())]
    x = torch.randn(1, TOKENS, DIM)
    times: list[list[float]] = [[] for _ in forms]
    for _ in range(repeats):
        for form, taken in zip(forms, times, strict=True):
            start = time.perf_counter()
            form(x)
            taken.append(time.perf_counter() - start)
    costs = [Cost(min(taken) * 1e3, weight_bytes(form) / 1e6) for form, taken in zip(forms, times, strict=True)]
    return {count: (costs[2 * index], costs[2 * index + 1]) for index, count in enumerate(experts)}


def weight_bytes(layer: nn.Module) -> int:
    """Returns the size of the layer's parameters in bytes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters())


def cost_table(costs: dict[int, tuple[Cost, Cost]]) -> Table:
    """Makes a table of time and weights by E, as trained and precomposed."""
    table = Table(title=f"One forward of {TOKENS} tokens, {DIM} → {HIDDEN} → {DIM}, float32, on the CPU")
    headings = ("experts E", "ms as trained", "ms precomposed", "MB as trained", "MB precomposed")
    for heading in headings:
        table.add_column(heading, justify="right")
    for experts, (trained, composed) in costs.items():
        times = (f"{cost.milliseconds:.2f}" for cost in (trained, composed))
        weights = (f"{cost.megabytes:.1f}" for cost in (trained, composed))
        table.add_row(str(experts), *times, *weights)
    table.caption = "ms: the fastest forward. MB: stored weights; as trained, each forward also builds the blocks."
    return table


@torch.no_grad()
def draw(model: Painter, patchwork: Patchwork, losses: list[float], costs: dict[int, tuple[Cost, Cost]]) -> plt.Figure:
    """Draws six panels: the problem and the answer, routing and coefficients, learning and cost."""
    plt.rcParams.update({"font.size": PHONE_POINTS - 1, "axes.titlesize": PHONE_POINTS})
    figure, panels = plt.subplots(3, 2, figsize=(PHONE_INCHES, 8.4), layout="constrained")
    (target, learned), (routing, coefficients), (loss, cost) = panels

    side = torch.linspace(-1, 1, PIXELS)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1).reshape(1, -1, 2)
    with intbmoe.record_routing(model) as log:
        answer = model(grid)
    pictures = ((target, patchwork.brightness(grid), "The problem"), (learned, answer, "Learned"))
    for panel, values, title in pictures:
        panel.imshow(values.view(PIXELS, PIXELS), cmap="cividis", vmin=-1, vmax=1, origin="lower", interpolation="none")
        panel.set_title(title, loc="left")

    blocks = model.ffn.config.blocks
    first_choice = log["ffn"].ids[:, 0].view(PIXELS, PIXELS)
    norm = BoundaryNorm([index - 0.5 for index in range(blocks + 1)], blocks)
    image = routing.imshow(first_choice, cmap=ListedColormap(BLOCKS), norm=norm, origin="lower", interpolation="none")
    bar = figure.colorbar(image, ax=routing, ticks=range(blocks), label="block")
    bar.solids.set_rasterized(True)  # like the image, so that its colours stay the same in dark mode
    routing.set_title("Each point's first block", loc="left")
    for panel in (target, learned, routing):
        panel.set(xticks=[], yticks=[])

    window = max(1, len(losses) // 50)
    smooth = [statistics.fmean(losses[max(0, i + 1 - window) : i + 1]) for i in range(len(losses))]
    loss.semilogy(losses, color=PALE, linewidth=0.8, label="each step")
    loss.semilogy(smooth, color=PRECOMPOSED, linewidth=2, label=f"mean of {window}")
    loss.set_title("Mean squared error", loc="left")
    loss.set(xlabel="step")
    loss.legend(frameon=False)

    counts = list(costs)
    lines = (("as trained", AS_TRAINED, "o"), ("precomposed", PRECOMPOSED, "s"))
    for index, (label, colour, marker) in enumerate(lines):
        times = [costs[count][index].milliseconds for count in counts]
        cost.plot(counts, times, color=colour, marker=marker, linewidth=2, label=label)
    cost.set_xscale("log", base=2)
    cost.set_xticks(counts, [str(count) for count in counts])
    cost.set_ylim(bottom=0)
    cost.set_title(f"ms for {TOKENS} tokens", loc="left")
    cost.set(xlabel="experts E")
    cost.legend(frameon=False)

    of_value = model.ffn.coefficients()[0]
    reach = float(of_value.abs().max())
    image = coefficients.imshow(of_value, cmap=DIVERGING, vmin=-reach, vmax=reach, aspect="auto")
    figure.colorbar(image, ax=coefficients)
    coefficients.set_title("Coefficients", loc="left")
    coefficients.set(xlabel="expert", ylabel="block")
    coefficients.set(xticks=range(0, of_value.shape[1], 3), yticks=range(blocks))

    for panel in (loss, cost):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color=GRID, linewidth=0.6)
    return figure


def main(example: Example) -> None:
    """Trains, precomposes, measures and draws."""
    torch.manual_seed(example.seed)
    patchwork, model = Patchwork(), Painter()
    console.print("[bold]1. Train[/] one IntBMoE layer to paint a patchwork of eight striped fields.")
    losses = train(model, patchwork, example)
    with warnings.catch_warnings(action="ignore"):  # about dead blocks, which are printed below
        load = intbmoe.load_statistics(model)["ffn"]
    used = len(load.counts) - len(load.dead)
    console.print(
        f"   {used} of {len(load.counts)} blocks in use; the busiest has {load.worst_case:.1f} × the mean load."
    )

    console.print("\n[bold]2. Precompose[/] it: merge the experts into blocks once and drop them.")
    model.eval()
    composed = intbmoe.precompose(model)
    points = torch.rand(1, 10_000, 2) * 2 - 1
    with torch.inference_mode():
        difference = (model(points) - composed(points)).abs().max().item()
    exact = "" if difference else " (they are identical)"
    console.print(f"   Outputs at 10,000 new points differ by at most {difference:.1e}{exact}")

    console.print("\n[bold]3. Measure[/] layers with growing numbers of experts.")
    costs = measure(example.experts, example.repeats)
    console.print(cost_table(costs))

    title, see = (
        "One IntBMoE layer at work",
        "The layer learns the patchwork; precomposed, its time does not grow with E.",
    )
    picture = Picture("layer", title, see, "By examples/layer.py.", draw(model, patchwork, losses, costs))
    save_picture(picture, example.output)
    console.print(f"\n[bold]4. Look[/] at {example.output}")


if __name__ == "__main__":
    main(tyro.cli(Example))
