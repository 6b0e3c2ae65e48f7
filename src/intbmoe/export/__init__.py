"""From a trained run to an artifact: a folder that a server loads without the run or its data."""

from typing import Any

from intbmoe.export.artifact import Artifact, ArtifactError, ExportError, load_artifact

__all__ = ["Artifact", "ArtifactError", "ExportError", "export_run", "load_artifact"]


def __getattr__(name: str) -> Any:
    """Import ``export_run`` on first use: serving opens artifacts, and needs nothing of training."""
    if name != "export_run":
        raise AttributeError(f"module 'intbmoe.export' has no attribute {name!r}")
    from intbmoe.export.export import export_run

    return export_run
