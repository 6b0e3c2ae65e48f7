"""The search for kernels that read back their stores finds them; its real use needs a GPU (``test_gpu.py``)."""

import pytest

from inductor_code import read_backs

KERNEL = """
async_compile.triton('first', '''
@triton.jit
def first(in_ptr0, out_ptr0, xnumel):
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tl.store(out_ptr0 + (x0), tmp0, xmask)
''', device_str='cuda')
async_compile.triton('second', '''
@triton.jit
def second(in_out_ptr0, out_ptr0, xnumel):
    tmp0 = tl.load(in_out_ptr0 + (x0), xmask)
    tl.store(out_ptr0 + (x0), tmp0, xmask)
    BETWEEN
    tmp1 = tl.load(LAST + (x0), xmask)
    tl.store(in_out_ptr0 + (x0), tmp1, xmask)
''', device_str='cuda')
"""


@pytest.mark.parametrize(
    ("between", "last", "count"),
    [("", "out_ptr0", 1), ("", "(out_ptr0", 1), ("tl.debug_barrier()", "out_ptr0", 0), ("", "in_out_ptr0", 0)],
)
def test_loads_of_what_was_stored_are_found(between, last, count):
    found = read_backs(KERNEL.replace("BETWEEN", between).replace("LAST", last))
    assert len(found) == count
    assert all("def second" in kernel for kernel in found)
