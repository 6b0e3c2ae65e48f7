"""Untrusted image files: refused before decoding if they would cost more than their pixels do.

A file of kilobytes can keep a decoder busy for minutes: hundreds of empty scans in a JPEG, or text or colour profiles
in a PNG that unpack to megabytes. So a file is taken apart first, and a decoder gets only the parts that make pixels.
"""

import io
import re
import warnings

from PIL import Image

from intbmoe.tasks.serving.requests import RequestError
from intbmoe.tasks.vision.decode import in_mode

FORMATS = ("PNG", "JPEG")
IMAGE_BYTES = 8 * 2**20
IMAGE_PIXELS = 32 * 10**6
LONGEST_SIDE = 16  # times the shorter side: the whole image is scaled before its middle is cut out
MOST_SCANS = 64  # in a progressive JPEG: cameras and image programs write about ten, and each passes over the image
MOST_PARTS = 65_536  # chunks of a PNG, or segments of a JPEG
PNG = b"\x89PNG\r\n\x1a\n"
PNG_KEPT = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))
SCAN, END, FIRST_APP, LAST_APP, COMMENT = 0xDA, 0xD9, 0xE0, 0xEF, 0xFE
ALONE = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a length
JPEG_KEPT = {0xE0: b"JFIF\0", 0xEE: b"Adobe"}  # segments that say how colours are stored
NEXT_MARKER = re.compile(rb"\xff+[^\x00\xd0-\xd7\xff]")
# Two to four times what an honest file takes on a slow core (20 to 60 ns per pixel on x86, twice that on ARM).
FIXED_S, BYTE_S, PIXEL_S = 0.05, 20e-9, 200e-9


def open_untrusted(content: bytes) -> Image.Image:
    """Return the image, not yet decoded and stripped to its pixels, or raise ``RequestError``."""
    if len(content) > IMAGE_BYTES:
        raise RequestError("image", f"<{len(content)} bytes>", f"at most {IMAGE_BYTES} bytes, before base64")
    bare = _bare_png(content) if content.startswith(PNG) else _bare_jpeg(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our pixel limit is lower than the one Pillow warns about
            image = Image.open(io.BytesIO(bare), formats=FORMATS)
    except Exception as error:  # on damaged or hostile files decoders may raise anything
        raise unreadable(content, error) from error
    width, height = image.size
    found = f"<{width} × {height} pixels>"
    if width * height > IMAGE_PIXELS:
        raise RequestError("image", found, f"at most {IMAGE_PIXELS} pixels")
    if max(width, height) > LONGEST_SIDE * min(width, height):
        raise RequestError("image", found, f"at most {LONGEST_SIDE} times as long as wide")
    return image


def read_untrusted(content: bytes, mode: str) -> Image.Image:
    image = open_untrusted(content)
    try:
        return in_mode(image, mode, "image")
    except Exception as error:
        raise unreadable(content, error) from error


def decoding_seconds(content: bytes) -> float:
    """Return the CPU time that is enough for every honest file of this size."""
    width, height = open_untrusted(content).size
    return FIXED_S + BYTE_S * len(content) + PIXEL_S * width * height


def unreadable(content: bytes, error: Exception) -> RequestError:
    what = f"<{len(content)} bytes: {type(error).__name__}>"
    return RequestError("image", what, "a whole PNG or JPEG file in base64")


def _bare_png(content: bytes) -> bytes:
    kept, start, count = [PNG], len(PNG), 0
    while start + 12 <= len(content):
        end = start + 12 + int.from_bytes(content[start : start + 4])
        if content[start + 4 : start + 8] in PNG_KEPT:
            kept.append(content[start:end])
        start = end
        count = _one_more(count)
    return b"".join(kept)


def _bare_jpeg(content: bytes) -> bytes:
    """Strip a JPEG to its pixels; what does not look like a JPEG is left for the decoder to refuse."""
    kept, start, count, scans = [content[:2]], 2, 0, 0
    while (found := NEXT_MARKER.search(content, start)) is not None:
        kept.append(content[start : found.start()])  # the data of a scan
        marker, start = content[found.end() - 1], found.end()
        count = _one_more(count)
        if marker == END:
            break  # what follows is another image, or a video
        if marker in ALONE:
            continue
        end = start + int.from_bytes(content[start : start + 2])
        known = JPEG_KEPT.get(marker)
        dropped = marker == COMMENT or FIRST_APP <= marker <= LAST_APP
        if not dropped or (known is not None and content.startswith(known, start + 2)):
            kept.append(bytes((0xFF, marker)) + content[start:end])
        scans += marker == SCAN
        if scans > MOST_SCANS:
            raise RequestError("image", f"<a JPEG of more than {MOST_SCANS} scans>", f"of at most {MOST_SCANS} scans")
        start = end
    kept.append(b"\xff\xd9" if found is not None else content[start:])
    return b"".join(kept)


def _one_more(count: int) -> int:
    if count >= MOST_PARTS:
        raise RequestError("image", f"<more than {MOST_PARTS} parts>", f"a file of at most {MOST_PARTS} parts")
    return count + 1
