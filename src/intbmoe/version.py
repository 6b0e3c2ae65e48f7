"""Which version of the package this is."""

from importlib.metadata import PackageNotFoundError, version


def program_version() -> str:
    """As installed; ``source`` where the package's folder is used as it is, without having been installed."""
    try:
        return version("intbmoe")
    except PackageNotFoundError:
        return "source"
