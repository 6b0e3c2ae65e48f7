"""Peak inference memory and FLOPs against the number of expert bases."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from intbmoe.report.canvas import BLUE, GRID, ORANGE, Data, Picture, make_panels, tidy
from intbmoe.report.numbers import flops_unit

MIB = 2**20
FORMS = {
    "": ("composed in every forward", BLUE, "-", "o"),
    "_precomposed": ("precomposed", ORANGE, "--", "s"),
}


def draw_cost(data: Data) -> list[Picture]:
    rows = data["sweep"]
    unit, letter = flops_unit(row["flops"] for row in rows)
    wanted = {"memory": (MIB, "peak inference memory (MiB)"), "flops": (unit, f"FLOPs of one example ({letter})")}
    if all(row["allocated"] is not None for row in rows):
        wanted["allocated"] = (MIB, f"peak allocated on {data['device']} (MiB)")
    figure = draw_panels(rows, wanted, data["experts"])
    first, last = rows[0], rows[-1]
    see = (
        f"Composed beforehand, the model costs the same whatever E: {last['memory_precomposed'] / MIB:.3g} MiB and "
        f"{last['flops_precomposed'] / unit:.3g} {letter}FLOPs. Composed in every forward, from E={first['experts']} "
        f"to E={last['experts']} memory grows from {first['memory'] / MIB:.3g} to {last['memory'] / MIB:.3g} MiB and "
        f"FLOPs from {first['flops'] / unit:.3g} to {last['flops'] / unit:.3g} {letter}. Grey line: this run's E. "
        "With few bases the composed blocks take more memory than the bases do."
    )
    how = (
        "The run's model built anew for every E, one example, one forward without gradients. Memory: bytes of all "
        "tensors alive at once, parameters included. FLOPs: 2 × multiply-adds of matrix products, attention's score "
        "and value products left out."
    )
    if data["too_large"]:
        how += f" Left out, too large to hold here: E={', '.join(map(str, data['too_large']))}."
    return [Picture("cost", "Cost of inference against the number of expert bases", see, how, figure)]


def draw_panels(rows: Sequence[Data], wanted: Mapping[str, tuple[float, str]], own: int | None = None) -> Figure:
    """A panel for each of the ``wanted`` columns, with its unit and title; rings where a row has the paper's figure."""
    experts = [row["experts"] for row in rows]
    figure, panels = make_panels(len(wanted), 4.2, 3.0)
    for axes, (name, (divisor, title)) in zip(panels, wanted.items(), strict=True):
        if own is not None:
            axes.axvline(own, color="#bbbbbb", linewidth=4, zorder=0)
        for suffix, (label, colour, line, marker) in FORMS.items():
            values = [row[name + suffix] / divisor for row in rows]
            axes.plot(experts, values, color=colour, linestyle=line, marker=marker, markersize=4, label=label)
            printed = [(row["experts"], row["paper"][name + suffix]) for row in rows if name + suffix in _paper(row)]
            if printed:
                ring = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "linestyle": "", "zorder": 3}
                axes.plot(*zip(*printed, strict=True), color=colour, label=f"the paper's, {label}", **ring)
        axes.set_xscale("log", base=2)
        axes.set_xticks(experts, [str(count) for count in experts])
        axes.minorticks_off()
        axes.set_xlabel("expert bases E", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        axes.set_title(title, loc="left", fontsize=9)
        tidy(axes)
    panels[0].legend(fontsize=8, frameon=False)
    return figure


def _paper(row: Data) -> Data:
    return row.get("paper", {})
