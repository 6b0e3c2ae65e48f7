"""Untrusted image files: the same pixels as decoding the whole file, with no more work than that."""

import io
import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from intbmoe.tasks.serving.requests import RequestError
from intbmoe.tasks.vision.untrusted import (
    IMAGE_BYTES,
    MOST_PARTS,
    MOST_SCANS,
    PNG,
    decoding_seconds,
    open_untrusted,
    read_untrusted,
)

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8))
EXIF = Image.Exif()
EXIF[0x0112], EXIF[0x010E] = 6, "x" * 30_000  # a quarter turn, which our decoders ignore; a long description


def file(image, kind, **options):
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def png_chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_chunks(*chunks):
    """A small PNG with extra chunks after its header."""
    content = file(PICTURE, "PNG")
    end = len(PNG) + 25
    return content[:end] + b"".join(chunks) + content[end:]


def jpeg_of_scans(count, side=256):
    """A grey progressive JPEG with ``count`` more scans, each only of end-of-block runs."""
    content = file(Image.new("L", (side, side)), "JPEG", progressive=True)
    table = bytes((0xFF, 0xC4, 0, 20, 0x10, 1, *[0] * 15, 0xE0))  # one code, for a run of 2¹⁴ blocks and more
    blocks = (side // 8) ** 2
    scan = bytes((0xFF, 0xDA, 0, 8, 1, 1, 0, 1, 63, 0)) + b"\x00\x00" * (1 + blocks // 2**14)
    return content[:-2] + table + scan * count + content[-2:]


PNGS = [("PNG", {}), ("PNG", {"exif": EXIF, "icc_profile": b"y" * 10_000}), ("PNG", {"dpi": (10, 10)})]
JPEGS = [
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("JPEG", {"subsampling": 0, "optimize": True, "quality": 95}),
    ("JPEG", {"restart_marker_blocks": 2}),
    ("JPEG", {"exif": EXIF, "comment": b"hello", "icc_profile": b"y" * 100_000}),
]
CASES = [(mode, *one) for mode in ("RGB", "L", "CMYK") for one in JPEGS]
CASES += [(mode, *one) for mode in ("RGB", "L", "1", "P", "RGBA", "LA") for one in PNGS]


@pytest.mark.parametrize(("mode", "kind", "options"), CASES)
def test_the_pixels_are_those_of_the_whole_file(mode, kind, options):
    content = file(PICTURE.convert(mode), kind, **options)
    for wanted in ("L", "RGB"):
        expected = np.asarray(Image.open(io.BytesIO(content)).convert(wanted))
        np.testing.assert_array_equal(np.asarray(read_untrusted(content, wanted)), expected)


def test_a_film_is_its_first_picture():
    content = file(PICTURE, "PNG", save_all=True, append_images=[PICTURE.rotate(90)] * 20)
    np.testing.assert_array_equal(np.asarray(read_untrusted(content, "RGB")), np.asarray(PICTURE))
    content = file(PICTURE, "MPO", save_all=True, append_images=[PICTURE] * 5)
    assert getattr(open_untrusted(content), "n_frames", 1) == 1


REFUSED = {
    "scans": (jpeg_of_scans(MOST_SCANS), "of at most 64 scans"),
    "thousands of scans": (jpeg_of_scans(100_000), "of at most 64 scans"),
    "chunks": (with_chunks(*[png_chunk(b"tEXt", b"")] * MOST_PARTS), "at most 65536 parts"),
    "segments": (file(PICTURE, "JPEG")[:2] + b"\xff\xfe\0\2" * (MOST_PARTS + 1), "at most 65536 parts"),
    "bytes": (PNG + b"x" * IMAGE_BYTES, "at most 8388608 bytes"),
    "pixels": (file(Image.new("1", (6000, 6000)), "PNG"), "at most 32000000 pixels"),
    "a strip": (file(Image.new("1", (60_000, 10)), "PNG"), "at most 16 times as long as wide"),
    "a head without an image": (file(PICTURE, "PNG")[:40], "a whole PNG or JPEG"),
    "half a file": (file(PICTURE, "JPEG")[:2000], "a whole PNG or JPEG"),
    "nothing": (b"", "a whole PNG or JPEG"),
    **{kind: (file(PICTURE, kind), "a whole PNG or JPEG") for kind in ("GIF", "WEBP", "TIFF", "BMP", "PPM", "ICO")},
}


@pytest.mark.parametrize(("content", "allowed"), REFUSED.values(), ids=REFUSED.keys())
def test_what_costs_more_than_its_pixels_or_is_of_another_kind_is_refused(content, allowed):
    started = time.process_time()
    with pytest.raises(RequestError, match=allowed) as refusal:
        read_untrusted(content, "RGB")
    assert refusal.value.field == "image"
    assert time.process_time() - started < 1.0


BOMB = zlib.compress(b"\0" * 60_000_000)
UNPACKED = {
    "text": png_chunk(b"zTXt", b"a\0\0" + BOMB),
    "international text": png_chunk(b"iTXt", b"a\0\1\0\0\0" + BOMB),
    "a colour profile": png_chunk(b"iCCP", b"a\0\0" + BOMB),
}


@pytest.mark.parametrize("chunk", UNPACKED.values(), ids=UNPACKED.keys())
def test_what_is_no_pixel_is_not_unpacked(chunk):
    content = with_chunks(*[chunk] * 20)
    tracemalloc.start()
    image = read_untrusted(content, "RGB")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(np.asarray(image), np.asarray(PICTURE))
    assert most < 2 * len(content) + 1_000_000


def test_the_time_that_a_file_gets_follows_from_its_pixels():
    small, large = (file(Image.new("L", (side, side)), "PNG") for side in (100, 5000))
    assert decoding_seconds(small) < 0.1
    assert 4 < decoding_seconds(large) < 8
    for mode, kind, options in CASES:
        content = file(PICTURE.convert(mode).resize((200, 200)), kind, **options)
        started = time.process_time()
        read_untrusted(content, "RGB")
        assert time.process_time() - started < decoding_seconds(content)
