"""The library compiled from ``native.c``, if it has been built.

It is optional: installing the package builds it if there is gcc; without it torch's operations run. It takes plain
tensors on the CPU in float32 or float64 and knows nothing of autograd. ``backend.py`` says when it runs blocks and
experts, ``ops/compose/`` when it composes blocks, which it also does in training.
"""

import ctypes
import os
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.float64)
NAME = "_library.so"
SOURCES = ("native.c", "instructions.h", "kernels.h", "product.h", "compose.h")


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library or None, and a text that says what it is or why it is not used."""
    if os.environ.get("INTBMOE_NATIVE") == "0":
        return None, "switched off by INTBMOE_NATIVE=0"
    path = Path(__file__).with_name(NAME)
    if not path.is_file():
        return None, "not built: install gcc, then repeat pip install in the clone"
    try:
        library = ctypes.CDLL(str(path))  # uses torch's OpenMP, which is loaded already: a second one would slow both
        library.intbmoe_source.restype = ctypes.c_uint32
        built_from = library.intbmoe_source()
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded: {error}"
    # The checksum of the sources beside this file; setup.py compiles the same checksum into the library.
    if built_from != zlib.crc32(b"".join(Path(__file__).with_name(name).read_bytes() for name in SOURCES)):
        return None, f"{path} was built from other sources: repeat pip install in the clone"
    library.intbmoe_select.restype = ctypes.c_char_p
    library.intbmoe_scratch_bytes.restype = ctypes.c_int64
    library.intbmoe_run_blocks.restype = None
    library.intbmoe_compose.restype = library.intbmoe_compose_backward.restype = None
    library.intbmoe_route.restype = None
    library.intbmoe_route.argtypes = [*[ctypes.c_int64] * 5, *[ctypes.c_void_p] * 3]
    return library, f"built, uses {library.intbmoe_select(b'').decode()} instructions"


LIBRARY, STATUS = _load()


def address(x: Tensor, dtype: torch.dtype) -> int:
    """Return the address of the numbers of ``x``; raise unless they are ``dtype`` in contiguous rows on the CPU."""
    plain = type(x) in (Tensor, nn.Parameter)  # a tensor that wraps another has no memory of its own
    if not plain or x.dtype != dtype or not x.is_cpu or (x.stride(-1) != 1 and x.shape[-1] > 1):
        found = f"{type(x).__name__} of {x.dtype} on {x.device}"
        raise TypeError(f"expected {dtype} on the CPU with entries of a row side by side, got a {found}")
    return x.data_ptr()
