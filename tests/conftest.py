"""Shared fixtures: every test starts from the same seed."""

import pytest
import torch

# The tensors here are tiny: a second thread costs more than it gains, much more on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
