"""The version of this package."""

from importlib.metadata import PackageNotFoundError, version


def program_version() -> str:
    """The installed version, or ``source`` if the package is used from its folder without being installed."""
    try:
        return version("intbmoe")
    except PackageNotFoundError:
        return "source"
