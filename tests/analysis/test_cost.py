"""The cost table against the paper's, and the command that prints it."""

import io
import json
from contextlib import redirect_stdout
from functools import cache

import pytest
import torch
from PIL import Image

from intbmoe import report
from intbmoe.analysis import cost_report
from intbmoe.analysis.cost import MIB, PRECOMPOSED, Figures, Setting, Swept, measure, sweep_experts
from intbmoe.analysis.drawing.bases import draw_sweep
from intbmoe.analysis.settings import IMAGENET
from intbmoe.cli import main
from intbmoe.models.vit import ViT, ViTConfig
from intbmoe.registry import create
from intbmoe.report.canvas import save_picture
from intbmoe.report.images import read_image
from intbmoe.report.style import PHONE_INCHES

ATTENTION = 8 * 4 * 197**2 * 192
SWEPT = ("flops", "flops_precomposed", "memory", "memory_precomposed")

# params, activated, flops: derived by hand from the paper's structure, row by row.
EXPECTED = {
    "dense": (3_937_960, 3_937_960, 1_452_530_688),
    "switch": (24_070_312, 3_951_016, 1_457_648_640),
    "deepseek": (24_004_264, 6_305_704, 2_382_191_616),
    "remoe": (24_070_312, 3_951_016, 1_457_648_640),  # with one active expert
    "vmoe": (24_070_312, 5_134_504, 1_920_070_656),
    "expert_choice": (24_070_312, 5_134_504, 1_957_819_392),
    "dynmoe": (24_070_380, 10_306_416, 3_940_854_866),  # with 6.37 active experts
    "mass": (24_070_312, 8_826_988, 3_362_827_346),  # with 5.12 active experts
    "soft": (24_200_876, 23_017_388, 1_600_189_440),  # three products of tokens with slots, one scale per layer
    "smear": (24_070_312, 22_886_824, 1_492_795_392),
    "lory": (24_005_032, 22_821_544, 2_002_586_112),
    "mumoe_cp": (24_070_080, 22_886_592, 9_120_342_208 - ATTENTION),
    "mumoe_tr": (24_065_000, 22_881_512, 9_151_165_952 - ATTENTION),
    "intbmoe": (24_294_668 - 4 * 384, 23_111_180 - 4 * 384, 4_063_173_632),
    PRECOMPOSED: (24_268_492, 8_878_540, 3_457_162_240),
}
# The columns that differ from the paper's printed digits; everything else the paper prints agrees.
DIFFERENT = {
    "remoe": {"activated"},
    "dynmoe": {"flops"},
    "mass": {"flops"},
    "soft": {"flops"},
    "mumoe_cp": {"flops"},
    "mumoe_tr": {"flops"},
    "intbmoe": {"params", "activated"},
}
COLUMNS = {"params", "activated", "flops"}


@cache
def printed_json():
    out = io.StringIO()
    with redirect_stdout(out):
        main(["cost", "imagenet", "--json"])
    return json.loads(out.getvalue())


@pytest.fixture
def row(request):
    return next(row for row in printed_json() if row["method"] == request.param)


each_row = pytest.mark.parametrize("row", EXPECTED, indirect=True)


def test_the_rows_are_those_of_table_1_in_its_order():
    assert [row["method"] for row in printed_json()] == list(EXPECTED)


@each_row
def test_the_json_has_raw_integers_and_the_papers_figures(row):
    assert {"method", "params", "activated", "flops", "flops_executed", "paper", "agrees"} <= set(row)
    assert all(type(row[column]) is int for column in (*COLUMNS, "flops_executed"))
    assert set(row["paper"]) == set(row["agrees"]) == COLUMNS
    for column, figure in row["paper"].items():
        assert (figure is None) == (row["agrees"][column] is None)
    if row["method"] == PRECOMPOSED:
        assert row["paper"] == {"params": None, "activated": None, "flops": 3.457}


@each_row
def test_every_figure_is_exact(row):
    assert (row["params"], row["activated"], row["flops"]) == EXPECTED[row["method"]]


@each_row
def test_what_agrees_with_the_paper_and_what_does_not(row):
    different = DIFFERENT.get(row["method"], set())
    assert {column for column, agrees in row["agrees"].items() if agrees is False} == different
    assert not different or row["notes"], "a difference without an explanation"


@each_row
def test_executed_flops_differ_only_where_a_map_is_computed_in_another_form(row):
    if row["method"] in ("mumoe_cp", "mumoe_tr", "intbmoe", PRECOMPOSED):
        assert row["flops_executed"] < row["flops"]
    else:
        assert row["flops_executed"] == row["flops"]


@each_row
def test_rows_that_need_a_trained_router_say_what_was_assumed(row):
    assumed = {"remoe": 1, "dynmoe": 6.37, "mass": 5.12}.get(row["method"])
    assert row["assumed_active"] == assumed
    if assumed is not None:
        assert f"assumed here: {assumed} on average" in " ".join(row["notes"])


@pytest.mark.parametrize("method", ["dense", "mumoe_cp", "mumoe_tr"])
def test_attention_is_counted_on_request(method):
    """With it the μMoE rows reach the paper's digits, as their notes say."""
    row = measure(IMAGENET, method, attention=True)
    assert row.flops == EXPECTED[method][2] + ATTENTION
    assert row.agrees["flops"] == (method != "dense")


def test_costs_grow_with_the_pool_but_not_when_precomposed():
    small, large, largest = (sweep_experts(IMAGENET, experts) for experts in (1, 3, 128))
    assert (small.flops, largest.flops) == (3_495_068_672, 8_305_024_000)
    assert small.flops_precomposed == largest.flops_precomposed == 3_457_162_240
    assert small.memory_precomposed == large.memory_precomposed == largest.memory_precomposed
    # Two more bases and their columns in the hypernetwork's two heads; the coefficients alive beside them are tiny.
    parameters = 4 * 4 * 2 * (295_872 + 2 * 17)
    assert parameters <= large.memory - small.memory <= parameters + 4096
    # The paper's figures include about 8 MiB that are not tensors.
    assert small.memory / MIB == pytest.approx(54.57, abs=10)
    assert small.memory_precomposed / MIB == pytest.approx(104.33, abs=10)


TINY = ViTConfig(image_size=8, patch_size=4, classes=3, dim=8, depth=2, heads=2, hidden=12, moe_layers=(0,))
SMALL = Setting(
    name="small",
    title="Small images, two layers",
    build=lambda method, experts: ViT(
        TINY, None if method == "dense" else lambda: create(method, TINY.dim, TINY.hidden, experts=experts)
    ),
    inputs=lambda: (torch.randn(1, 3, 8, 8),),
    experts=3,
    methods=("dense", "switch", "intbmoe", PRECOMPOSED),
    paper={"switch": Figures(params=0.1)},
    notes={"switch": ("a [note] of its own", "a note of two"), "intbmoe": ("a note of two",)},
)


@pytest.fixture
def small(monkeypatch):
    """A setting that is quick to measure."""
    monkeypatch.setitem(cost_report.find_setting.__globals__["SETTINGS"], "small", SMALL)


def test_a_setting_without_figures_agrees_with_nothing(small):
    row = measure(SMALL, "dense")
    assert row.agrees == {"params": None, "activated": None, "flops": None}
    assert row.activated == row.params


def test_measuring_leaves_the_random_state_alone(small):
    before = torch.get_rng_state()
    measure(SMALL, "switch")
    sweep_experts(SMALL, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("flags", [[], ["--markdown"]])
def test_the_table_shows_marks_and_numbered_notes(small, capsys, flags):
    main(["cost", "small", *flags])
    out = capsys.readouterr().out
    switch = next(line for line in out.splitlines() if "Switch" in line)
    assert "0.100 ✗" in switch
    assert "1, 2" in switch
    assert "IntBMoE (precomposed)" in out
    assert "1. a [note] of its own" in out
    assert "2. a note of two" in out
    assert "3." not in out
    assert ("| :-- |" in out) == bool(flags)


def test_attention_is_said_to_be_counted(small, capsys):
    main(["cost", "small", "--attention"])
    assert "counted in every row" in capsys.readouterr().out


def test_the_sweep_is_printed_and_drawn(small, capsys, tmp_path):
    picture = tmp_path / "new" / "sweep.png"
    main(["cost", "small", "--sweep", "experts", "--json", "--output", str(picture)])
    rows = json.loads(capsys.readouterr().out)
    assert [row["experts"] for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert len({row["flops_precomposed"] for row in rows}) == 1
    assert rows[-1]["flops"] > rows[0]["flops"] > rows[0]["flops_precomposed"]
    with Image.open(picture) as image:
        assert image.width == PHONE_INCHES * 150, "as wide as a phone can show"


def test_the_sweeps_table_puts_the_papers_figures_beside_ours(capsys):
    rows = [
        Swept(1, 3_495_068_672, 3_457_162_240, 50 * MIB, 100 * MIB),
        Swept(2, 3_532_942_336, 3_457_162_240, 55 * MIB, 100 * MIB),
    ]
    cost_report.sweep_table(IMAGENET, rows, attention=False).print("markdown")
    out = capsys.readouterr().out
    assert "| 1 | 3.495 | 3.495 | 3.457 | 3.457 | 50.00 | 54.57 | 100.00 | 104.33 |" in out
    assert "| 2 | 3.533 | – | 3.457 | – | 55.00 | – | 100.00 | – |" in out


def test_the_sweeps_picture_adapts_to_dark_screens(tmp_path):
    rows = [{"experts": 2**n, **dict.fromkeys(SWEPT, n * 1e9), "paper": {}} for n in range(8)]
    save_picture(draw_sweep(rows, "IntBMoE"), tmp_path / "sweep.svg")
    image = read_image(tmp_path, "sweep")
    assert image.adapts
    assert image.fits_phone


def test_a_sweep_that_cannot_be_drawn_stops_before_it_is_measured(small, monkeypatch):
    monkeypatch.setattr(cost_report, "sweep_experts", None)
    with pytest.raises(SystemExit, match=r"sweep\.jpg: a picture must end in \.png or \.svg"):
        main(["cost", "small", "--sweep", "experts", "--output", "sweep.jpg"])


def test_drawing_without_matplotlib_says_what_to_install(small, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'intbmoe\[plots\]'"):
        main(["cost", "small", "--sweep", "experts", "--output", str(tmp_path / "x.png")])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["imagnet"], "did you mean 'imagenet'"),
        (["imagenet", "--json", "--markdown"], "exclude each other"),
        (["imagenet", "--output", "x.png"], "--sweep experts"),
    ],
)
def test_wrong_arguments_stop_with_a_sentence(args, message):
    with pytest.raises(SystemExit, match=message):
        main(["cost", *args])
