import pytest
import torch

from intbmoe.precision import bfloat16_is_slow


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is without oneDNN")
def test_bfloat16_is_slow_where_one_dnn_says_so_and_nowhere_else(monkeypatch):
    assert bfloat16_is_slow("cpu") == (not torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert not bfloat16_is_slow("cuda")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not bfloat16_is_slow(torch.device("cpu"))
