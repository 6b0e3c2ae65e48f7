"""Shared fixtures: every test starts from the same seed, and leaves torch as it was."""

import sys

import pytest
import torch

# The tensors here are tiny: a second thread costs more than it gains, much more on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _torch():
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:  # else what one test compiles counts against the next one's limit
        torch._dynamo.reset()
    gradients = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert gradients, "this test has switched gradients off for all that come after it"
