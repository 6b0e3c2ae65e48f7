"""Open an artifact for a front (without weights) or for an engine."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from intbmoe import precision
from intbmoe.export import load_artifact
from intbmoe.tasks.serving import Predictor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    version: str
    about: Mapping[str, Any]  # for ``/v1/model``
    encoder: Predictor
    golden: list[dict[str, Any]]


def open_artifact(path: str, device: str | None = None) -> Opened:
    """Open an artifact: for an engine with the model on ``device``, for a front, which checks requests, without it."""
    artifact = load_artifact(path)
    about = {key: artifact.about[key] for key in ("task", "method", "dtype", "precomposed")}
    about["metrics"] = artifact.about.get("metrics", {})
    if device is None:
        return Opened(artifact.version, about, artifact.encoder(), [])
    if about["dtype"] == "bfloat16" and precision.bfloat16_is_slow(device):
        log.warning("%s is in bfloat16, but this CPU has no bfloat16 instructions: export with --dtype float32", path)
    return Opened(artifact.version, about, artifact.predictor(device), artifact.golden)
