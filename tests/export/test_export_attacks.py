"""An export that is killed at any moment leaves the old artifact or the new one, and the next leaves nothing else."""

import os
import shutil
import signal

import pytest
from small_runs import small_run

from intbmoe import cli
from intbmoe.export import export as exporting
from intbmoe.export import load_artifact
from intbmoe.export.export import export_run
from kill_points import FORK, chosen, operations


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def kill_everywhere(folder, number):
    """Kill an export at its file operations; return how many it has."""
    run, place = small_run("vision", folder, depth=1), folder / "place"
    old = export_run(run, folder / "old").version
    shutil.copytree(folder / "old", place / "to")

    def export():
        export_run(run, place / "to", dtype="bfloat16")

    count, code = operations(place, export)
    assert code == 0
    new = load_artifact(place / "to").version
    found = []
    for kill_at in chosen(count, number or count):
        shutil.rmtree(place / "to")
        shutil.copytree(folder / "old", place / "to")
        assert operations(place, export, kill_at)[1] == -signal.SIGKILL
        found.append(load_artifact(place / "to").version)
        assert len(names(place)) <= 2, "what an earlier kill left is swept"
    assert set(found) == {old, new}
    assert found == sorted(found, key=[old, new].index), "the old one up to a moment, and then the new one"
    export()
    assert names(place) == ["to"]
    return count


def test_killed_at_chosen_file_operations(tmp_path):
    kill_everywhere(tmp_path, 3)


@pytest.mark.slow
def test_killed_at_every_file_operation(tmp_path):
    assert kill_everywhere(tmp_path, None) > 20


def test_a_signal_leaves_nothing_behind(tmp_path):
    run, place = small_run("vision", tmp_path), tmp_path / "place"

    def export():
        exporting.make_golden = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
        cli.main(["export", str(run.path), "--to", str(place / "to")])

    child = FORK.Process(target=export)
    child.start()
    child.join(60)
    assert child.exitcode == 128 + signal.SIGTERM
    assert names(place) == []
