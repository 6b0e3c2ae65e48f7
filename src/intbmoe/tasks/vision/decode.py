"""From files and bytes to images, with errors that say which one is wrong."""

import base64
import io
import warnings
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from intbmoe.tasks.errors import DataError

CROP_SHARE = 0.875  # evaluation uses the middle 224 of 256 pixels, as DeiT and most others do
UNREADABLE = (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError)


def decode(content: bytes | Path, where: str, mode: str = "RGB") -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged EXIF data, which ImageNet has some of: only pixels matter
            with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
                return image.convert(mode)
    except UNREADABLE as error:
        raise DataError(f"{where} cannot be read as an image: {error}; expected a whole JPEG or PNG file") from error


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
    """Raise unless the file begins like an image; decoding all of a large set would take too long."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Image.open(file).close()
    except UNREADABLE as error:
        raise DataError(f"{file} cannot be read as an image: {error}; get it again, or remove it") from error


def png_base64(image: Image.Image) -> str:
    content = io.BytesIO()
    image.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()
