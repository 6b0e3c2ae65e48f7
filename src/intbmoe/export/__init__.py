"""From a trained run to an artifact: a folder that needs neither the run nor its data, and that a server loads."""

from intbmoe.export.artifact import Artifact, ArtifactError, ExportError, load_artifact

__all__ = ["Artifact", "ArtifactError", "ExportError", "load_artifact"]
