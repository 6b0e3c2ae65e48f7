"""A launch that finds a compiled kernel gets the one for exactly its arguments."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_addresses_and_sizes_that_triton_tells_apart(dtype):
    from intbmoe.ops.launch import _compiled
    from intbmoe.ops.swiglu import fused_rows

    width, memory = 32, torch.randn(40 * 64 + 8, device="cuda").to(dtype)
    _compiled.clear()
    for _ in range(2):  # the second time all are known
        for tokens in (1, 16, 17, 33):
            for offset in (0, 1, 8):
                rows = memory[offset : offset + tokens * 2 * width].view(tokens, 2 * width)
                gate, up = rows.float().chunk(2, 1)
                torch.testing.assert_close(fused_rows.swiglu(rows), (F.silu(gate) * up).to(dtype))

    assert len(_compiled) == 6  # one token, a multiple of 16, another; aligned or not
