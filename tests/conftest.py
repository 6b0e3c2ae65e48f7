"""Shared fixtures: every test starts from the same seed, and leaves torch as it was."""

import gc
import os
import sys

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck

from forked import forked  # noqa: F401 - a fixture

# The tensors here are tiny: a second thread costs more than it gains, much more on a busy machine.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same for the processes that tests start

# Imports and collected tests make a large heap: looking for garbage in it meanwhile takes a fifth of their time, and
# later at Python's usual rate 6 %. What is there before the first test is never looked at again (below).
gc.disable()
gc.set_threshold(20_000, 20, 20)

# The time of an example depends on what else the machine does.
hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis.settings.load_profile("any machine")

LONG = ("test_interpreted_kernels", "test_contract", "test_analyse", "test_inttravel", "test_in_browser")
LONG += ("test_adding_a_task", "test_distribution", "test_cost_causal", "test_types", "test_comparison_page")
LONG += ("test_cli", "test_decoding", "test_overrides", "test_docs", "test_quantized", "test_your_data_docs")
LONG += ("test_cost", "test_texts", "test_compare", "test_intbmoe", "test_huggingface_causal_lm", "test_export")

NAMED = {"mixture", "shazeer", "gshard", "mixtral", "deepseek_v1", "lapsum"}
NAMED |= {"hypermoe", "mobe", "mmoe", "ple", "dsfnet"}
"""Methods of the same parts as the others: in tests/methods always, in tests of everything else with ``-m slow``."""


@pytest.hookimpl(tryfirst=True)  # before the markers are evaluated
def pytest_collection_modifyitems(items):
    """Run the longest files first, so that with several processes none is still busy with one of them at the end."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    for item in items:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if item.path.parent.name != "methods" and any(isinstance(value, str) and value in NAMED for value in given):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def sketched():
    """For tests that are not about pictures: pictures are made as usual, but rendered empty."""
    from matplotlib.figure import Figure

    save = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda _, *to, **settings: save(Figure((1, 1)), *to, **settings))
        yield


@pytest.fixture(autouse=True)
def _torch():
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:  # otherwise compilations of one test count against the next one's limit
        torch._dynamo.reset()
    gradients = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert gradients, "this test has switched gradients off for all that come after it"
