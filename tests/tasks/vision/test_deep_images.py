"""Images with more than 8 bits per pixel: scaled where their range is known, refused where it is not."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from intbmoe.tasks import DataError
from intbmoe.tasks.vision.datasets import save_images
from intbmoe.tasks.vision.decode import check_header, decode
from intbmoe.tasks.vision.untrusted import PNG, read_untrusted

DEEP = np.random.default_rng(0).integers(0, 2**16, (7, 9), dtype=np.uint16)
DEEP[0, :6] = 0, 255, 256, 2**15, 65534, 65535
SHALLOW = (DEEP // 256).astype(np.uint8)
MODES = {"I;16": "<u2", "I;16B": ">u2"}


def content(image, kind):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def png_of(channels, colour_type):
    """A 16-bit PNG, which Pillow writes only in grey; an alpha channel comes last."""

    def chunk(kind, inside):
        return struct.pack(">I", len(inside)) + kind + inside + struct.pack(">I", zlib.crc32(kind + inside))

    height, width = DEEP.shape
    pixels = np.repeat(DEEP[..., None], channels, 2).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    return PNG + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


PNGS = [png_of(channels, kind) for channels, kind in ((1, 0), (3, 2), (2, 4), (4, 6))]
TIFFS = [content(Image.fromarray(DEEP.astype(order)), "TIFF") for order in MODES.values()]


@pytest.mark.parametrize("wanted", ["L", "RGB"])
@pytest.mark.parametrize("file", [*PNGS, *TIFFS], ids=["grey", "colour", "grey+alpha", "colour+alpha", "II", "MM"])
def test_16_bits_are_scaled_by_their_full_range_wherever_they_come_from(file, wanted):
    expected = np.asarray(Image.fromarray(SHALLOW).convert(wanted))
    np.testing.assert_array_equal(decode(file, "it", wanted), expected)
    if file.startswith(PNG):
        np.testing.assert_array_equal(read_untrusted(file, wanted), expected)


@pytest.mark.parametrize("mode", MODES)
def test_16_bit_images_from_python_are_stored_scaled(tmp_path, mode):
    image = Image.fromarray(DEEP.astype(MODES[mode]))
    assert image.mode == mode
    save_images([(image, 0), (image, 1)], tmp_path)
    for file in tmp_path.rglob("*.png"):
        np.testing.assert_array_equal(decode(file, "it", "L"), SHALLOW)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_an_unknown_range_is_refused_before_training(tmp_path, mode):
    image, file = Image.fromarray(DEEP).convert(mode), tmp_path / "deep.tiff"
    image.save(file)
    message = rf"has .* pixels \(Pillow's mode '{mode}'\), whose range is unknown: scale them to 8 or 16 bits"
    for read in (check_header, lambda path: decode(path, str(path))):
        with pytest.raises(DataError, match=rf"deep\.tiff {message}"):
            read(file)
    with pytest.raises(DataError, match=rf"data\['train'\]\[0\] {message}"):
        save_images([(image, 0), (image, 1)], tmp_path / "stored")


TRANSPARENT = Image.new("RGBA", (2, 1), (200, 100, 0, 0))
TRANSPARENT.putpixel((1, 0), (200, 100, 0, 255))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_ignored(mode):
    opaque = TRANSPARENT.convert("RGB").convert("L" if mode == "LA" else "RGB")
    image = TRANSPARENT.convert("RGB").convert(mode, palette=Image.Palette.ADAPTIVE)
    if mode == "P":
        image.info["transparency"] = 0
    else:
        image.putalpha(TRANSPARENT.getchannel("A"))
    found = decode(content(image, "PNG"), "it")
    np.testing.assert_array_equal(found, opaque.convert("RGB"))
