"""``intbmoe plan``: the ways to train a recipe on many devices, and which to take."""

import json

import pytest

from intbmoe.cli import main


def test_the_plan_of_a_recipe(capsys, tmp_path):
    picture = tmp_path / "scaling.svg"
    main(["plan", "digits", "--devices", "4", "--moe.experts", "64", "--json", "--picture", str(picture)])
    rows = {row["scheme"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["ddp", "fsdp", "pools", "experts"]
    assert rows["pools"]["sent_bytes"] < rows["fsdp"]["sent_bytes"]  # 64 bases, 8 blocks
    assert rows["pools"]["memory_bytes"] < rows["ddp"]["memory_bytes"]
    assert [row["scheme"] for row in rows.values() if row["taken"]] == ["pools"]
    assert picture.read_text().startswith("<?xml")


def test_too_little_memory_and_methods_without_pools(capsys):
    main(["plan", "digits", "--moe.name", "switch", "--memory", "0.0001"])
    text = capsys.readouterr().out
    assert "Nothing fits" in text
    assert "pools" not in text


def test_impossible_rates_say_so():
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "digits", "--devices", "0"])
    assert "devices must be an integer of at least 1" in str(stopped.value)
