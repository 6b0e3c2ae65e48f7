"""The artifact: what serving needs of a run, in one folder, without pickle.

artifact.json             its description: format_version, task, method, recipe, dtype, precomposed, metrics of the run,
                          the parity check with its tolerance, formats, the SHA-256 of every other file, and the
                          checksum of all this;
                          with 8-bit weights also compute, the type of the rest, and what was and was not quantised
model.safetensors         the weights; IntBMoE's are composed, without pools, so the size does not depend on E
catalogue.json            the meaning of the numbers that go in and come out, defined in each task's ``task.py``
catalogue.safetensors     the same, for large data: places and their codes
tokenizer.json            for text that was not read as bytes
golden.json               requests, and the answers that this model gave when it was exported
model.onnx, model.pt2     on request: for ONNX Runtime, and an AOTInductor package

``export.py`` writes an artifact, ``load_artifact`` opens it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from intbmoe.checks import did_you_mean
from intbmoe.files import digest, file_digest, to_json
from intbmoe.methods.intbmoe import ComposedMoE, IntBMoE
from intbmoe.parts.quantized import Storage
from intbmoe.quantization import quantize
from intbmoe.recipes import recipe_from_dict
from intbmoe.tasks import find_task, list_tasks, make_task
from intbmoe.tasks.serving import Predictor

FORMAT_VERSION = 1
ABOUT = "artifact.json"
MODEL = "model.safetensors"
CATALOGUE = "catalogue.json"
CATALOGUE_TENSORS = "catalogue.safetensors"
GOLDEN = "golden.json"
ONNX = "model.onnx"
AOTI = "model.pt2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORAGES = get_args(Storage)
EXPORT_AGAIN = "export the run again: intbmoe export RUN --to DIR"


class ExportError(RuntimeError):
    """A run cannot be exported, or the export does not agree with the run's model; nothing is written."""


class ArtifactError(RuntimeError):
    """A folder is not an artifact that this program can serve; the message says why and what to do."""


@dataclass(frozen=True)
class Artifact:
    """An artifact whose files have been checked against their digests."""

    path: Path
    about: Mapping[str, Any]  # the content of ``artifact.json``
    version: str  # a short digest of all contents: another model or another catalogue is another version

    @property
    def task(self) -> str:
        return self.about["task"]

    @property
    def method(self) -> str:
        """The registered name of the mixture, or "dense" if there is none."""
        return self.about["method"]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's arithmetic and of floating-point inputs."""
        return DTYPES[self.about.get("compute", self.about["dtype"])]

    @property
    def storage(self) -> Storage | None:
        """How the large weights are stored if in 8 bits; otherwise None."""
        return self.about["dtype"] if self.about["dtype"] in STORAGES else None

    @cached_property
    def recipe(self) -> Any:
        self._require_task()
        try:
            return recipe_from_dict(self.about["recipe"])
        except (ValueError, TypeError) as error:
            where = self.path / ABOUT
            raise ArtifactError(f"{where}: the recipe is not understood: {error}; {EXPORT_AGAIN}") from error

    @property
    def catalogue(self) -> dict[str, Any]:
        """The meaning of this model's numbers; each task's ``task.py`` defines its contents."""
        return self.read_json(CATALOGUE)

    @property
    def catalogue_tensors(self) -> dict[str, Tensor]:
        return self.read_tensors(CATALOGUE_TENSORS) if CATALOGUE_TENSORS in self.about["files"] else {}

    @property
    def golden(self) -> list[dict[str, Any]]:
        """Requests with the answers they got at export: ``{"request": …, "answer": …}``."""
        return self.read_json(GOLDEN) if GOLDEN in self.about["files"] else []

    def model(self, device: str | torch.device = "cpu") -> nn.Module:
        """Load the model in evaluation mode, built on the meta device so that no pool is ever allocated."""
        _require_device(str(device))
        model = make_skeleton(self.recipe, precomposed=self.about["precomposed"], storage=self.storage).eval()
        tensors = self.read_tensors(MODEL, device)
        try:
            model.load_state_dict(tensors, assign=True)
        except RuntimeError as error:
            raise ArtifactError(f"{self.path / MODEL} belongs to another model: {error}; {EXPORT_AGAIN}") from error
        return model.requires_grad_(False)

    def encoder(self) -> Predictor:
        """A predictor without weights that checks and encodes requests, for a process without a model."""
        return self.predictor_type().encoder(self)

    def predictor(self, device: str | torch.device = "cpu") -> Predictor:
        return self.predictor_type().load(self, device)

    def predictor_type(self) -> type[Predictor]:
        self._require_task()
        return find_task(self.task).find_predictor()

    def _require_task(self) -> None:
        if self.task not in list_tasks():
            module = self.about.get("task_module", "a package that is not installed")
            raise ArtifactError(
                f"{self.path} is for the task {self.task!r}, which comes from {module}: install it, or name its file "
                f"with intbmoe --plugin FILE or INTBMOE_PLUGINS (an artifact holds no code)"
            )

    def file(self, name: str) -> Path:
        if name not in self.about["files"]:
            raise ArtifactError(f"{self.path} has no {name}: {did_you_mean(name, self.about['files'])}")
        return self.path / name

    def read_json(self, name: str) -> Any:
        return _parse_json(self.file(name))

    def read_tensors(self, name: str, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(self.file(name), device=str(device))
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"{self.path / name} cannot be read: {error}; {EXPORT_AGAIN}") from error
        # On the CPU these tensors map the file, which could change under a running server, and they are not aligned.
        return {key: tensor.clone() if tensor.device.type == "cpu" else tensor for key, tensor in tensors.items()}


def load_artifact(path: str | Path) -> Artifact:
    """Open the artifact in a folder; raise ``ArtifactError`` unless its version is known and every file is intact."""
    path = Path(path)
    if not (path / ABOUT).is_file():
        is_run = (path / "config.yaml").is_file()
        make = f"it is a run: intbmoe export {path} --to DIR" if is_run else f"intbmoe export RUN --to {path}"
        raise ArtifactError(f"{path} is not an artifact, it has no {ABOUT}; {make} makes one")
    about = _parse_json(path / ABOUT)
    version = about.get("format_version") if isinstance(about, dict) else None
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path / ABOUT} has format_version {version!r}, but this program reads {FORMAT_VERSION}: "
            f"use the version of intbmoe that wrote it, or {EXPORT_AGAIN}"
        )
    missing = [key for key in ("task", "method", "recipe", "dtype", "precomposed", "files") if key not in about]
    if missing or not _known_types(about) or not isinstance(about["files"], dict):
        raise ArtifactError(f"{path / ABOUT} was not written by an export (missing: {missing}): {EXPORT_AGAIN}")
    for name, expected in about["files"].items():
        if Path(name).name != name:
            raise ArtifactError(f"{path / ABOUT} names a file outside its folder, {name!r}: do not trust it")
        if not (path / name).is_file():
            raise ArtifactError(f"{path / name} is missing: copy the whole folder again, or {EXPORT_AGAIN}")
        if file_digest(path / name) != expected:
            raise ArtifactError(
                f"{path / name} is truncated or altered: its SHA-256 is not the one in {ABOUT}; "
                f"copy the whole folder again, or {EXPORT_AGAIN}"
            )
    # Old artifacts have no checksum. It reveals mistakes and bad disks, not forgeries, which would have the right one.
    if about.get("checksum", (own := checksum(about))) != own:
        raise ArtifactError(f"{path / ABOUT} is altered: its checksum does not match; {EXPORT_AGAIN}")
    return Artifact(path, about, file_digest(path / ABOUT)[:12])


def checksum(about: Mapping[str, Any]) -> str:
    """The checksum of ``artifact.json``, and so of all files, whose digests it contains."""
    return digest(to_json({key: value for key, value in about.items() if key != "checksum"}))


def _known_types(about: Mapping[str, Any]) -> bool:
    if about["dtype"] in STORAGES:
        return about.get("compute") in DTYPES
    return about["dtype"] in DTYPES and "compute" not in about


def files_of(path: Path) -> set[str] | None:
    """The names of an artifact's files, whichever version of this program wrote it; None if it is not an artifact."""
    try:
        about = json.loads((path / ABOUT).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(about, dict) or not isinstance(about.get("files"), dict):
        return None
    if not isinstance(about.get("format_version"), int) or not {"task", "method", "recipe"} <= about.keys():
        return None
    return {ABOUT, *about["files"]}


def make_skeleton(recipe: Any, *, precomposed: bool, storage: Storage | None = None) -> nn.Module:
    """The recipe's model on the meta device, where tensors have shapes but no memory."""
    with torch.device("meta"):
        model = make_task(recipe).make_model()
        if precomposed:
            for name, layer in list(model.named_modules()):
                if isinstance(layer, IntBMoE):
                    model.set_submodule(name, ComposedMoE(layer.config))
        if storage is not None:
            quantize(model.requires_grad_(False), storage)
    return model


def _require_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArtifactError(f"device={name!r} is not a device: use cpu, cuda or, with several GPUs, cuda:1") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ArtifactError(f"device={name!r} does not exist, torch finds {found} GPUs: --device cpu needs none")


def _parse_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} is not complete JSON: {error}; {EXPORT_AGAIN}") from error
