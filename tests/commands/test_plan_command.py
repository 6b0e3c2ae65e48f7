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
    assert [row["scheme"] for row in rows.values() if not row["available"]] == ["experts"]  # of another model
    assert picture.read_text().startswith("<?xml")


def test_too_little_memory_and_methods_without_pools(capsys):
    main(["plan", "digits", "--moe.name", "switch", "--memory", "0.0001", "--devices", "8"])
    text = capsys.readouterr().out
    assert "8 devices do not divide 9 experts: 5 of them hold 2 each" in text
    assert "Nothing fits" in text
    assert "pools" not in text


@pytest.mark.parametrize(("method", "ways"), [("mass", ["ddp"]), ("dynmoe", ["ddp", "experts"])])
def test_what_training_refuses_is_not_listed(capsys, method, ways):
    main(["plan", "digits", "--moe.name", method, "--json"])
    assert [row["scheme"] for row in json.loads(capsys.readouterr().out)] == ways


def test_impossible_rates_say_so():
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "digits", "--devices", "0"])
    assert "devices must be an integer of at least 1" in str(stopped.value)
