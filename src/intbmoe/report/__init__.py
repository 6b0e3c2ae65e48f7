"""The parts of all reports (``compare``, ``cost``, ``analyse``, the study).

They are number formats, one table and its renderers, one page, one style for all pictures, and the traces of runs.
"""

from importlib.util import find_spec


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("drawing needs matplotlib: pip install 'intbmoe[plots]'", name="matplotlib")
