"""Test parameters of which an ordinary run uses some, and ``-m slow`` the rest."""

import pytest


def thinned(cases, keep):
    """``cases`` (values or tuples) for ``pytest.mark.parametrize``; slow if ``keep(*case)`` is false."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if keep(*case) else pytest.mark.slow) for case in cases]
