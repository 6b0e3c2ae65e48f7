"""Parameters of which an ordinary run has a part, and ``-m slow`` the rest."""

import pytest


def thinned(cases, keep):
    """``cases`` for ``pytest.mark.parametrize``, a value or a tuple each: slow where ``keep(*case)`` is false."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if keep(*case) else pytest.mark.slow) for case in cases]
