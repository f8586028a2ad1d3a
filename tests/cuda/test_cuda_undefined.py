"""The emulated device of tests of kernels is built with UBSan, which says what a processor hides and a GPU answers with
an error that ends the context: addresses that are not aligned, shifts, bounds of arrays, casts that C++ leaves open."""

from __future__ import annotations

from typing import Any

import cuda_cases
import pytest

from recompute.runtime.cuda.device.kernel import Buffer, Kernel

pytestmark = [
    cuda_cases.needs_compiler,
    pytest.mark.skipif(cuda_cases.PLACE != "emulated", reason="of the emulated device"),
]
SHIFTED = Kernel("shifted", "int* x, int by", "    x[0] = x[1] << by;")
ASKEW = Kernel("askew", "float4* x, int by", "    x[0] = *(float4*)((char*)x + by);")


@pytest.fixture(scope="module")
def checked() -> Any:
    if "sanitize" not in cuda_cases.level():
        pytest.skip("this compiler has no UBSan")
    device = cuda_cases.device()
    device.compile([SHIFTED, ASKEW])
    return device


@pytest.mark.parametrize(
    ("kernel", "by", "said"),
    [(SHIFTED, 40, "shift exponent 40"), (ASKEW, 4, "misaligned address"), (SHIFTED, 4, ""), (ASKEW, 16, "")],
)
def test_what_is_undefined_is_seen(kernel: Kernel, by: int, said: str, checked: Any, capfd: Any) -> None:
    address, _memory = checked.allocate(64)
    x = Buffer(address, cuda_cases.TensorType("f32", (16,)))
    checked.prepare(kernel(1, x, by, block=1))()
    seen = capfd.readouterr().err
    assert (said in seen and "runtime error" in seen) if said else not seen
