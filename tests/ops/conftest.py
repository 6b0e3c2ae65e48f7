"""Fixtures for the compiled library: every instruction set that this CPU has, and two threads."""

import pytest
import torch

from intbmoe.ops import native


@pytest.fixture(params=["avx512", "avx2", "neon", "plain"])
def instructions(request):
    if native.LIBRARY.intbmoe_select(request.param.encode()) is None:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    native.LIBRARY.intbmoe_select(b"")


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
