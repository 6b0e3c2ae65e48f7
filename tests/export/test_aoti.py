"""AOTInductor packages; compiling one takes a C++ compiler and a minute."""

import shutil

import pytest
from small_runs import small_run

from intbmoe.export.artifact import AOTI
from intbmoe.export.export import export_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"),
]


@pytest.mark.parametrize(("task", "dtype"), [("vision", "float32"), ("language", "bfloat16"), ("travel", "float32")])
def test_a_package_runs_at_other_batch_sizes_and_lengths(task, dtype, tmp_path):
    artifact = export_run(small_run(task, tmp_path), tmp_path / "to", dtype=dtype, formats=["aoti"])
    assert artifact.file(AOTI).stat().st_size > 0
    found = artifact.about["parity"]["aoti"]
    assert found["used_of_allowed"] <= 1
    assert len(found["shapes"]) >= 3
