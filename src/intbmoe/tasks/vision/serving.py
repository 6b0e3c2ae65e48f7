"""``classify``: from an image to the classes it most likely shows."""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from intbmoe.models.vit import ViTConfig
from intbmoe.precision import wide
from intbmoe.tasks.serving.fields import EXPLAIN, REQUIRED, Record, Text, top_n_field
from intbmoe.tasks.serving.predictor import Exported, Predictor, blocks_of, recording
from intbmoe.tasks.serving.ranking import top_n
from intbmoe.tasks.serving.requests import Answer, Encoded, Limits, Request, RequestError, spread_evenly
from intbmoe.tasks.vision.decode import SQUARES, middle_square, png_base64, whole_square
from intbmoe.tasks.vision.examples import ImageExamples
from intbmoe.tasks.vision.source import Normalisation
from intbmoe.tasks.vision.untrusted import IMAGE_BYTES, IMAGE_PIXELS, decoding_seconds, read_untrusted

TOP_N = 5
THUMBNAIL = 320


class ClassifyPredictor(Predictor):
    """From image files to classes, with their probabilities as scores."""

    action = "classify"
    summary = "What an image shows."
    form = Path(__file__).with_name("image.js")
    untrusted = True

    def __init__(
        self,
        config: ViTConfig,
        normalisation: Normalisation,
        classes: Sequence[str],
        square: Callable[[Image.Image, int], np.ndarray] = whole_square,
    ) -> None:
        """``square`` makes images square, as in evaluation."""
        self.config, self.normalisation, self.classes, self.square = config, normalisation, classes, square
        most = len(classes)
        letters = -(-IMAGE_BYTES // 3) * 4
        self.limits = Limits(body_bytes=letters + 4096, top_n=most, image_bytes=IMAGE_BYTES, image_pixels=IMAGE_PIXELS)
        fields = {
            "image": (Text(letters, "A PNG or JPEG file in base64.", {"contentEncoding": "base64"}), REQUIRED),
            "top_n": top_n_field(most, TOP_N),
            "explain": EXPLAIN,
        }
        example = {"image": png_base64(self._disc()), "top_n": min(TOP_N, most)}
        self._record = Record(fields, "An image to classify.", [example])
        self.request_schema = self._record.schema()

    @classmethod
    def encoder(cls, artifact: Exported) -> "ClassifyPredictor":
        about, recipe = artifact.catalogue, artifact.recipe
        normalisation = Normalisation(tuple(about["mean"]), tuple(about["std"]))
        square = middle_square if recipe.data.source == "imagenet" else SQUARES[recipe.data.resize]
        return cls(recipe.model, normalisation, about["classes"], square)

    def encode(self, request: Request) -> Encoded:
        """Encode a request; the payload has ``pixels``, (size, size, channels) bytes."""
        found = self._record.read("", request)
        mode, size = "L" if self.config.channels == 1 else "RGB", self.config.image_size
        pixels = self.square(read_untrusted(_file(found), mode), size).reshape(size, size, -1)
        payload = {"pixels": np.ascontiguousarray(pixels), "top_n": found["top_n"], "explain": found["explain"]}
        return Encoded(1 + self.config.patches, payload)

    def encoding_seconds(self, request: Request) -> float:
        return decoding_seconds(_file(self._record.read("", request)))

    def _disc(self) -> Image.Image:
        size = self.config.image_size
        row, column = np.mgrid[:size, :size] - (size - 1) / 2
        return Image.fromarray(np.where(np.hypot(row, column) < size / 3, 255, 0).astype(np.uint8))

    @torch.inference_mode()
    def answer(self, batch: Sequence[Encoded]) -> list[Answer]:
        if not batch:
            return []
        pixels = torch.from_numpy(np.stack([encoded.payload["pixels"] for encoded in batch])).to(self.device)
        mean, std = (torch.tensor(part, device=self.device).view(-1, 1, 1) for part in self.normalisation)
        images = (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std
        with recording(self.model, batch) as log:
            likely = wide(self.model(images.to(self.dtype))).softmax(1)
        values, columns = top_n(likely, max(encoded.payload["top_n"] for encoded in batch))
        numbers = range(1, self.config.image_size // self.config.patch_size + 1)
        answers: list[Answer] = []
        for encoded, scores, classes in zip(batch, values.tolist(), columns.tolist(), strict=True):
            best = list(zip(classes, scores, strict=True))[: encoded.payload["top_n"]]
            answer = {"results": [{"id": one, "name": self.classes[one], "score": score} for one, score in best]}
            if encoded.payload["explain"]:
                answer["tokens"] = [f"row {row}, column {column}" for row in numbers for column in numbers]
                answer["blocks"] = blocks_of(log, len(answers), slice(None))
            answers.append(answer)
        return answers


def image_requests(split: ImageExamples, count: int) -> list[Request]:
    requests = []
    for index in spread_evenly(len(split), count):
        image = split.images.image(index)
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        requests.append({"image": png_base64(image)})
    return requests


def _file(found: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode(found["image"], validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("image", found["image"], "a PNG or JPEG file in base64") from None
