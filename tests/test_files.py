"""Files and folders are old or new, never half written."""

import os

import pytest

from intbmoe import files
from intbmoe.files import private_folder, remove_folder, replace_file, replacing_file, replacing_folder, to_json


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    replace_file(path, to_json({"é": 1.5}))
    assert path.read_text(encoding="utf-8") == '{\n  "é": 1.5\n}\n'
    with pytest.raises(TypeError), replacing_file(path) as file:
        file.writelines([b"half", "not bytes"])
    assert path.read_bytes() == to_json({"é": 1.5})
    assert names(tmp_path) == ["a.json"]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "new" / "folder"
    for text in ("one", "two"):
        with replacing_folder(folder) as beside:
            (beside / text).write_text(text)
        assert names(folder) == [text]
    with pytest.raises(FileNotFoundError), replacing_folder(folder) as beside:
        (beside / "three").rename(beside / "four" / "three")
    assert names(folder) == ["two"]
    assert names(folder.parent) == ["folder"]
    umask = os.umask(0)
    os.umask(umask)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_folder_that_may_not_be_replaced_or_cannot_be_stays(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()

    def refuse(found):
        raise PermissionError(f"{found} is precious")

    with pytest.raises(PermissionError, match="folder is precious"), replacing_folder(folder, refuse):
        pass
    rename = os.rename

    def fail_into_place(old, new):
        if new == folder and ".removed" not in str(old):
            raise OSError("no")
        rename(old, new)

    monkeypatch.setattr(files, "_swap", lambda one, other: False)  # as on systems that cannot exchange folders
    monkeypatch.setattr(os, "rename", fail_into_place)
    (folder / "old").touch()
    with pytest.raises(OSError, match="no"), replacing_folder(folder) as beside:
        (beside / "new").touch()
    assert names(folder) == ["old"]
    assert names(tmp_path) == ["folder"]


def test_a_removed_folder_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    remove_folder(tmp_path / "folder")
    assert names(tmp_path) == []


def test_what_killed_processes_left_is_swept_and_nothing_else(tmp_path):
    folder = tmp_path / "to"
    left, link = tmp_path / ".to.0123abcd.part", tmp_path / ".to.linked__.part"
    (left / "inside").mkdir(parents=True)
    mine = [tmp_path / name for name in (".to.settings", ".to.part", ".other.0123abcd.part", ".to.0123abcd.parts")]
    for path in mine:
        path.mkdir()
    link.symlink_to(mine[0])
    with private_folder(tmp_path, ".to.", ".part") as used:  # belongs to another process that is still running
        assert not left.exists()
        with replacing_folder(folder) as beside:
            (beside / "new").touch()
        assert used.is_dir()
    assert names(folder) == ["new"]
    assert names(tmp_path) == sorted([folder.name, link.name, *(path.name for path in mine)])


def test_a_folder_is_never_away_while_it_is_replaced(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    swap, seen = files._swap, []

    def watched(one, other):
        seen.append((folder.exists(), swap(one, other), folder.exists()))
        return True

    monkeypatch.setattr(files, "_swap", watched)
    monkeypatch.setattr(os, "rename", None)
    with replacing_folder(folder) as beside:
        (beside / "new").touch()
    assert seen == [(True, True, True)]
    assert names(tmp_path) == ["folder"]


def test_a_kill_between_two_renames_is_made_good(tmp_path, monkeypatch):
    """If folders cannot be exchanged, the old one is put back before anything else."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").touch()
    folder.rename(tmp_path / ".folder.removed")
    monkeypatch.setattr(files, "_swap", lambda one, other: False)
    with replacing_folder(folder) as beside:
        assert names(folder) == ["old"]
        (beside / "new").touch()
    assert names(folder) == ["new"]
    assert names(tmp_path) == ["folder"]
