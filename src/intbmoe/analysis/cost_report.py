"""``intbmoe cost``: the cost table and the sweep over experts, as text, Markdown, JSON or a picture."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from intbmoe.analysis.cost import MIB, SWEEP, UNITS, Row, Setting, Swept, measure, sweep_experts
from intbmoe.analysis.settings import find_setting
from intbmoe.budget import NAMED
from intbmoe.report import require_matplotlib
from intbmoe.report.numbers import NOTHING
from intbmoe.report.tables import Table

Form = Literal["text", "markdown", "json"]


def print_cost(setting_name: str, *, form: Form = "text", attention: bool = False, everything: bool = False) -> None:
    setting = find_setting(setting_name)
    rows = []
    with Console(stderr=True).status("") as status:
        for method in (*setting.methods, *(NAMED if everything else ())):
            status.update(f"measuring {method}")
            rows.append(measure(setting, method, attention=attention))
    cost_table(setting, rows, attention=attention).print(form)


def cost_table(setting: Setting, rows: Sequence[Row], *, attention: bool) -> Table:
    notes = list(dict.fromkeys(note for row in rows for note in row.notes))  # each note once, in the order of the rows
    body = [_cells(row, [str(1 + notes.index(note)) for note in row.notes]) for row in rows]
    below = [
        "paper: the paper's figure, ✓ if ours rounds to the same digits, ✗ if not. run: the FLOPs our fast path "
        "executes, if they differ from the papers' formulation. ~: with an assumed number of active experts.",
        "FLOPs are 2 × multiply-adds of linear maps, convolutions and matrix products in one forward at batch size 1; "
        + (
            "attention's score and value products are counted in every row; the paper leaves them out in most."
            if attention
            else "attention's score and value products are left out (--attention counts them)."
        ),
        "Participation: experts that contribute to a token's output. Execution: experts or blocks computed for it. "
        "Materialization: expert-sized weight sets built for an input.",
        *setting.remarks,
    ]
    below += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    spare = ("run (G)", "Participation", "Execution", "Materialization")
    header = ("Method", "Params (M)", "paper", "Activated (M)", "paper", "FLOPs (G)", "paper", *spare, "notes")
    records = [row.as_dict() for row in rows]
    return Table.of_texts(setting.title, header, body, spare, notes=below, records=records)


def _cells(row: Row, notes: list[str]) -> tuple[str, ...]:
    cells = [row.title]
    for column, agrees in row.agrees.items():
        assumed = "~" if row.assumed_active is not None and column != "params" else ""
        cells.append(f"{assumed}{getattr(row, column) / UNITS[column]:.3f}")
        printed = getattr(row.paper, column)
        cells.append(NOTHING if printed is None else f"{printed:.3f} {'✓' if agrees else '✗'}")
    same = row.flops_executed == row.flops
    cells.append("" if same else f"{row.flops_executed / UNITS['flops']:.3f}")
    about = "~" if row.assumed_active is not None else ""
    cells += [f"{about}{row.shares.participation:g}", f"{about}{row.shares.execution:g}"]
    return (*cells, row.shares.materialization_text(), ", ".join(notes))


def print_sweep(setting_name: str, picture: Path, *, form: Form = "text", attention: bool = False) -> None:
    setting = find_setting(setting_name)
    require_matplotlib()  # this and the format are checked first, because measuring takes a while
    from intbmoe.analysis.drawing.bases import draw_sweep
    from intbmoe.report.canvas import require_format, save_picture

    require_format(picture)
    rows = []
    with Console(stderr=True).status("") as status:
        for experts in SWEEP:
            status.update(f"measuring IntBMoE with E = {experts}")
            rows.append(sweep_experts(setting, experts, attention=attention))
    sweep_table(setting, rows, attention=attention).print(form)
    title = f"IntBMoE, {setting.title.split(',')[0]}, batch size 1"
    save_picture(draw_sweep(_sweep_records(setting, rows), title), picture)
    sys.stderr.write(f"drawn: {picture}\n")


def sweep_table(setting: Setting, rows: Sequence[Swept], *, attention: bool) -> Table:
    units = {"flops": 1e9, "flops_precomposed": 1e9, "memory": MIB, "memory_precomposed": MIB}
    body = []
    for row in rows:
        cells = [str(row.experts)]
        for column, unit in units.items():
            digits = 3 if unit == 1e9 else 2
            printed = setting.paper_sweep.get(row.experts, {}).get(column)
            cells.append(f"{getattr(row, column) / unit:.{digits}f}")
            cells.append(NOTHING if printed is None else f"{printed:.{digits}f}")
        body.append(tuple(cells))
    header = ["E"]
    for name in ("FLOPs (G)", "precomposed (G)", "memory (MiB)", "precomposed (MiB)"):
        header += [name, "paper"]
    notes = [
        f"FLOPs are as in the cost table, in the paper's formulation{', with attention' if attention else ''}.",
        "Memory is the peak of one forward in float32: parameters, input and all live tensors, followed from operation "
        "to operation. Our composition briefly holds a second copy of a composed matrix, while it puts value and gate "
        "path side by side.",
    ]
    if setting.paper_sweep:
        notes.append(
            "The paper measured memory on an accelerator: its figures fit MiB, and fit best if the matrix library has "
            "about 8 MiB of workspace, which is not a tensor."
        )
    notes += setting.remarks
    title = f"IntBMoE against the number of expert bases E: {setting.title}"
    return Table.of_texts(title, header, body, notes=notes, records=_sweep_records(setting, rows))


def _sweep_records(setting: Setting, rows: Sequence[Swept]) -> list[dict[str, Any]]:
    return [{**asdict(row), "paper": setting.paper_sweep.get(row.experts, {})} for row in rows]
