"""Shared fixtures: every test starts from the same seed and leaves no thread setting behind."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
