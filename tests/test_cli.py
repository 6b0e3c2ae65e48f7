import json
import subprocess
import sys

import pytest

import intbmoe
from intbmoe.cli import main
from intbmoe.registry import find_method


def test_methods_lists_every_method(capsys):
    main(["methods"])
    table = capsys.readouterr().out
    for name in intbmoe.list_methods():
        assert name in table
        assert find_method(name).title in table


def test_methods_as_json(capsys):
    main(["methods", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == intbmoe.list_methods()
    for row in rows:
        assert row["participation"] in ("dense", "sparse")
        assert row["causal"] == (row["noncausal_reason"] is None)


@pytest.mark.parametrize("args", [["--help"], ["methods", "--help"]])
def test_help_exits_with_zero(args, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(args)
    assert exit_info.value.code == 0
    assert "methods" in capsys.readouterr().out


def test_no_command_shows_the_help(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([])
    assert exit_info.value.code == 0
    assert "usage: intbmoe" in capsys.readouterr().out


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.startswith("intbmoe ")


def test_a_misspelt_command_is_an_error_with_a_suggestion():
    done = subprocess.run([sys.executable, "-m", "intbmoe.cli", "metods"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "did you mean 'methods'?" in done.stderr


def test_a_misspelt_option_is_an_error(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["methods", "--jsn"])
    assert exit_info.value.code != 0
    assert "--json" in capsys.readouterr().err


def test_importing_the_library_leaves_the_command_line_alone():
    code = "import sys, intbmoe; print(sorted({'tyro', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
