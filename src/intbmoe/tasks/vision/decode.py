"""From files and bytes to images, with errors that say which one is wrong."""

import base64
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from intbmoe.tasks.errors import DataError

CROP_SHARE = 0.875  # evaluation uses the middle 224 of 256 pixels, as DeiT and most others do
UNREADABLE = (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError)
UNKNOWN_RANGE = {"I": "32-bit or signed", "F": "floating-point"}


def decode(content: bytes | Path, where: str, mode: str = "RGB") -> Image.Image:
    with _opened(content, where, "expected a whole JPEG or PNG file") as image:
        return in_mode(image, mode, where)


def in_mode(image: Image.Image, mode: str, where: str) -> Image.Image:
    """Return a copy in ``mode``, RGB or L; of 16-bit grey the higher byte is kept, as Pillow does for 16-bit colours.

    Pillow's own conversion would cut such pixels off at 255, and so make nearly all of them white.
    """
    _require_range(image, where)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert(mode)


def middle_square(image: Image.Image, size: int, share: float = CROP_SHARE) -> np.ndarray:
    """Return (size, size, channels) uint8: resized so that the shorter side is size/share, then cut from the middle."""
    shorter = int(size / share)
    scale = shorter / min(image.size)
    shape = tuple(max(shorter, round(side * scale)) for side in image.size)
    resized = image.resize(shape, Image.Resampling.BICUBIC)
    left, top = (resized.width - size) // 2, (resized.height - size) // 2
    return np.asarray(resized.crop((left, top, left + size, top + size)))


whole_square = partial(middle_square, share=1)  # nothing else is cut off


def stretched(image: Image.Image, size: int) -> np.ndarray:
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC))


def padded(image: Image.Image, size: int) -> np.ndarray:
    """Return the whole image with black bars at the sides, or above and below."""
    return np.asarray(ImageOps.pad(image, (size, size), Image.Resampling.BICUBIC))


SQUARES = {"crop": whole_square, "stretch": stretched, "pad": padded}  # the values of data.resize


def check_header(file: Path) -> None:
    """Raise unless the file begins like an image that we read; decoding all of a large set would take too long."""
    with _opened(file, str(file), "get it again, or remove it") as image:
        _require_range(image, str(file))


@contextmanager
def _opened(content: bytes | Path, where: str, fix: str) -> Iterator[Image.Image]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged EXIF data, which ImageNet has some of: only pixels matter
            with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
                yield image
    except DataError:  # also a ValueError, but it says already what is wrong
        raise
    except UNREADABLE as error:
        raise DataError(f"{where} cannot be read as an image: {error}; {fix}") from error


def _require_range(image: Image.Image, where: str) -> None:
    """Raise if it is unknown which pixels are black and white; Pillow would cut them off at 0 and 255."""
    if image.mode in UNKNOWN_RANGE:
        raise DataError(
            f"{where} has {UNKNOWN_RANGE[image.mode]} pixels (Pillow's mode {image.mode!r}), whose range is unknown: "
            f"scale them to 8 or 16 bits and save it again"
        )


def png_base64(image: Image.Image) -> str:
    content = io.BytesIO()
    image.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()
