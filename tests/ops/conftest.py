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


@pytest.fixture
def many_threads():
    """A function that checks that the result of a call is the same, to the last bit, on one thread and on more."""

    def check(call):
        torch.set_num_threads(1)
        expected = call()
        for threads in (2, 3, 16):
            torch.set_num_threads(threads)
            assert torch.equal(call(), expected)

    yield check
    torch.set_num_threads(1)
