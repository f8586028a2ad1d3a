"""Every operator's samples by its CUDA kernels, on the emulated device, beside NumPy's own numerics."""

from __future__ import annotations

import functools
from typing import Any

import cuda_cases
import pytest

from recompute.runtime.cuda import emulator
from recompute.testing import all_ops, cases

pytestmark = pytest.mark.skipif(not emulator.compiler(), reason="the emulated device needs a C++ compiler")

OPS = {cls.__name__: cls for cls in all_ops() if cls.__name__ != "Free"}

#: operators of which some samples run on the host: how many do, and why; nothing else may
ON_HOST: dict[str, int] = {}


@functools.cache
def device() -> Any:
    return emulator.EmulatedDevice()


@functools.cache
def bound(name: str) -> list[tuple[Any, list[cuda_cases.Bound]]]:
    return [(case, cuda_cases.bound(case, device())) for case in cases(OPS[name])]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """The kernels of all operators that are tested here, compiled together."""
    chosen = {
        i.callspec.params["name"]
        for i in request.session.items
        if hasattr(i, "callspec") and i.module is request.module and "name" in i.callspec.params
    }
    device().compile(k for n in sorted(chosen) for _, runs in bound(n) for b in runs for k in b.kernels)


@pytest.mark.parametrize("name", OPS)
def test_operator(name: str, compiled: None) -> None:
    runs = bound(name)
    if not any(r for _, r in runs):
        pytest.skip("the host runs it")
    for case, bindings in runs:
        cuda_cases.check(case, bindings)


@pytest.mark.xfail(reason="families are being written", strict=False)
def test_on_host() -> None:
    """What the host runs, exactly."""
    found = {n: sum(not cuda_cases.operator(c).kernel for c in cases(cls)) for n, cls in OPS.items()}
    assert {n: c for n, c in found.items() if c} == ON_HOST
