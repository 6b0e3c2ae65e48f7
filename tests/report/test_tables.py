"""One table, rendered in every form."""

import json
import re
from io import StringIO

from rich.console import Console

from intbmoe.report.numbers import format_difference, format_metric
from intbmoe.report.tables import Cell, Column, Table

RECORDS = [{"layer": "a", "wind": 3.5, "seeds": [0, 1]}, {"layer": "b", "wind": None, "seeds": [0]}]


def test_records_keep_their_digits_in_files_and_lists_are_one_cell():
    table = Table.of_records("Weather", RECORDS)
    assert [(column.title, column.numeric) for column in table.columns[:2]] == [("layer", False), ("wind", True)]
    assert table.csv() == "layer,wind,seeds\na,3.5,0 1\nb,,0\n"
    assert table.csv(["wind", "layer"], line_end="\r\n") == "wind,layer\r\n3.5,a\r\n,b\r\n"
    assert json.loads(table.json()) == RECORDS
    assert Table.of_records("Nothing", []).csv() == ""


def test_markdown_has_title_notes_and_the_marked_row_in_bold():
    table = Table.of_texts("A title", ["Method", "x"], [["one", "1"], ["two", "2"]], notes=["a note"], marked={1})
    assert table.markdown() == "| Method | x |\n| :-- | --: |\n| one | 1 |\n| **two** | **2** |"
    below = Table.of_texts("", ["Floor"], [["chance"]])
    assert table.markdown_document(below) == (
        f"**A title**\n\n{table.markdown()}\n\n| Floor |\n| :-- |\n| chance |\n\na note\n"
    )


def test_columns_are_selected_by_name_in_the_order_asked_for():
    columns = [Column("Method", numeric=False, name="title"), Column("FLOPs (M)", name="flops"), Column("loss")]
    table = Table("t", columns, [[Cell("a"), Cell("1.0", 1.0), Cell("2.0", 2.0)]]).select("loss", "title")
    assert [column.title for column in table.columns] == ["loss", "Method"]
    assert [[cell.text for cell in row] for row in table.rows] == [["2.0", "a"]]


def test_numbers_are_written_alike_everywhere():
    assert format_metric("accuracy5", 0.5, 0.0125) == "50.00 ± 1.25 %"
    assert format_metric("perplexity", 12.345) == "12.35"
    assert format_difference("accuracy", -0.075, "points", sign="+") == "−7.50 points"
    assert format_difference("loss", 0.075, "points") == "0.0750"


def test_a_narrow_terminal_does_without_spare_columns_and_says_so():
    table = Table.of_texts("A title", ["Method", "x (M)", "more"], [["one", "1", "2"]], spare=["more"])
    shown = {}
    for width in (80, 120):
        console = Console(file=StringIO(), width=width)
        console.print(table.terminal(width))
        shown[width] = console.file.getvalue()
    assert shown[80].split()[-6:] == ["shown", "in", "a", "wider", "terminal:", "more"]
    assert "wider" not in shown[120]
    assert re.search(r"one +1 *\n", shown[80])
    assert re.search(r"one +1 +2 *\n", shown[120])
