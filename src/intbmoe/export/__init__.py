"""From a trained run to an artifact: a folder that a server loads without the run or its data."""

from intbmoe.export.artifact import Artifact, ArtifactError, ExportError, load_artifact

__all__ = ["Artifact", "ArtifactError", "ExportError", "load_artifact"]
