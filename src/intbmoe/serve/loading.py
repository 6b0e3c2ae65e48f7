"""Opening an artifact for a front (no weights) and for an engine."""

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


def open_encoder(path: str) -> Opened:
    """For a front: checks requests and needs no weights."""
    return _open(path, None)


def open_predictor(path: str, device: str) -> Opened:
    """For an engine."""
    opened = _open(path, device)
    if opened.about["dtype"] == "bfloat16" and precision.bfloat16_is_slow(device):
        log.warning("%s is in bfloat16, for which this CPU has no instructions: export it with --dtype float32", path)
    return opened


def _open(path: str, device: str | None) -> Opened:
    artifact = load_artifact(path)
    about = {key: artifact.about[key] for key in ("task", "method", "dtype", "precomposed")}
    about["metrics"] = artifact.about.get("metrics", {})
    encoder = artifact.encoder() if device is None else artifact.predictor(device)
    return Opened(artifact.version, about, encoder, artifact.golden if device is not None else [])
