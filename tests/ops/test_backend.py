"""Which backend is chosen, and the message for one that cannot run."""

import pytest
import torch

from intbmoe.ops import backend, native
from intbmoe.ops.backend import INTERPRETING, choose_backend
from small_intbmoe import make, tokens

pytestmark = pytest.mark.skipif(INTERPRETING, reason="on a CPU without Triton's interpreter")
built = pytest.mark.skipif(native.LIBRARY is None, reason="needs the compiled library")


def test_by_type_on_the_cpu_with_gradients():
    x = torch.zeros(1)
    assert choose_backend(x, has_native=True) == "grouped"
    assert choose_backend(x, torch.bfloat16, has_native=True) == "grouped"
    assert choose_backend(x, torch.float64, has_native=True) == "tiled"


@built
def test_without_gradients_the_compiled_library_where_the_caller_has_it():
    with torch.no_grad():
        for dtype in native.DTYPES:
            assert choose_backend(torch.zeros(1), dtype, has_native=True) == "native"
        assert choose_backend(torch.zeros(1)) == "grouped"
        assert choose_backend(torch.zeros(1), torch.float64) == "tiled"
        assert choose_backend(torch.zeros(1), torch.float16, has_native=True) == "grouped"


def test_other_devices_get_plain_torch():
    assert choose_backend(torch.zeros(1, device="meta"), has_native=True) == "tiled"


def test_exported_programs_and_torch_func_get_plain_torch():
    found = []

    class Asking(torch.nn.Module):
        def forward(self, x):
            found.append(choose_backend(x, has_native=True))
            return x + 1

    torch.export.export(Asking(), (torch.zeros(2),), strict=False)
    torch.func.grad(lambda x: Asking()(x).sum())(torch.zeros(2))
    assert found == ["tiled", "tiled"]


def test_a_wanted_backend_is_taken():
    for wanted in ("grouped", "tiled", "naive"):
        assert choose_backend(torch.zeros(1), wanted=wanted) == wanted


def test_triton_wanted_on_the_cpu_says_why_not():
    layer = make().float().eval()
    layer.backend = "fused"
    with pytest.raises(
        RuntimeError, match=r"'fused' needs Triton and an NVIDIA GPU.*float32 on cpu.*layer\.backend None"
    ):
        layer(tokens(1, 3).float())


@pytest.mark.parametrize(
    ("installed", "found"), [(True, "switched off by INTBMOE_TRITON=0"), (False, "not installed")], ids=str
)
def test_triton_that_is_switched_off_is_not_called_missing(monkeypatch, installed, found):
    monkeypatch.setattr(backend, "TRITON", False)
    monkeypatch.setattr(backend, "HAS_TRITON", installed)
    with pytest.raises(RuntimeError, match=f"here Triton is {found}"):
        choose_backend(torch.zeros(1), wanted="fused")


def test_kernels_do_not_run_on_amds_gpus(monkeypatch):
    monkeypatch.setattr(backend, "TRITON", True)
    assert backend.triton_runs(torch.device("cuda"), torch.float32)
    monkeypatch.setattr(torch.version, "hip", "7.0")  # where their type is "cuda" too
    assert not backend.triton_runs(torch.device("cuda"), torch.float32)
