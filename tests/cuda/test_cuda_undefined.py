"""All operators' samples with the emulator built by UBSan: addresses that are not aligned, shifts, bounds of arrays and
casts that C++ leaves open.  A processor hides most of them; a GPU answers with an error that ends the context."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator
from typing import Any

import cuda_cases
import numpy as np
import pytest

from recompute.runtime.cuda.device import emulator
from recompute.runtime.cuda.device.kernel import Buffer, Kernel
from recompute.testing import all_ops, cases

pytestmark = [cuda_cases.needs_compiler, pytest.mark.slow]
CHECKS = "-fsanitize=alignment,shift,bounds,float-cast-overflow"
OPS = {cls.__name__: cls for cls in all_ops() if cls.__name__ != "Free"}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[emulator.EmulatedDevice]:
    """The emulated device; its kernels are compiled with the checks, and kept apart from the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "_FLAGS", (*emulator._FLAGS, CHECKS))
        patch.setattr(emulator, "_FUNCTIONS", {})
        patch.setattr(emulator, "_folder", functools.cache(emulator._folder.__wrapped__))
        flags = [emulator.compiler(), *emulator._FLAGS, "-o", str(tmp_path_factory.mktemp("ubsan") / "empty.so"), "-"]
        if subprocess.run(flags, input="int x;", text=True, capture_output=True, check=False).returncode:
            pytest.skip("this compiler has no UBSan")
        device = emulator.EmulatedDevice(level="-O0")
        device.compile([SHIFTED, ASKEW])
        yield device


SHIFTED = Kernel("shifted", "int* x, int by", "    x[0] = x[1] << by;")
ASKEW = Kernel("askew", "float4* x, int by", "    x[0] = *(float4*)((char*)x + by);")


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


@pytest.fixture(scope="module")
def bound(request: pytest.FixtureRequest, checked: Any) -> dict[str, list[cuda_cases.Bound]]:
    """The samples of the operators that are tested here, with their kernels, compiled together."""
    items = [i.callspec.params for i in request.session.items if getattr(i, "module", None) is request.module]
    names = {params["name"] for params in items if "name" in params}
    found = {n: [b for c in cases(OPS[n]) for b in cuda_cases.bound(c, checked)] for n in sorted(names)}
    checked.compile(k for bs in found.values() for b in bs for k in b.kernels)
    return found


@pytest.mark.parametrize("name", OPS)
def test_samples(name: str, bound: Any, capfd: Any) -> None:
    if not bound[name]:
        pytest.skip("the host runs it")
    capfd.readouterr()
    for b in bound[name]:
        with np.errstate(all="ignore"):
            b.run(0xFF)
    assert "runtime error" not in capfd.readouterr().err
