"""What reports are made of, whoever writes them (``compare``, ``cost``, ``analyse``, the study): numbers, one table and
its renderers, one page, one style for all pictures, and where numbers come from."""

from importlib.util import find_spec


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("drawing needs matplotlib: pip install 'intbmoe[plots]'", name="matplotlib")
