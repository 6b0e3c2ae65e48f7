"""Runs on one thread: counting one image gains nothing from a second, and on busy cores it is ten times slower."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
