"""Convolutions by oneDNN against float64; what happens where it is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from convolution_cases import CASES, KINDS, case, check, in_form
from kernel_cases import applied

from recompute.errors import JobError
from recompute.ops.convolution.conv import Conv
from recompute.runtime.cpu.device import dnnl, native
from recompute.runtime.cpu.primitives import convolutions, products
from recompute.runtime.cpu.providers import onednn

there = pytest.mark.skipif(bool(onednn.unavailable()), reason=onednn.unavailable() or "there")
PROVIDER = onednn.OneDnnProvider()


@there
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(CASES))
def test_convolutions(name: str, kind: str, last: bool) -> None:
    op, arrays = case(name, kind)
    op, arrays = in_form(op, arrays) if last else (op, arrays)
    if not PROVIDER.accepts(applied(op, *arrays)):
        pytest.skip("the library has its reference implementation only")
    check(PROVIDER, name, kind, last=last)


@there
def test_one_plan_serves_all_applications_of_a_type() -> None:
    op, arrays = in_form(*case("3x3", "output"))
    a, b = (convolutions.plan(onednn.convolved(applied(op, *arrays))) for _ in range(2))  # type: ignore[arg-type]
    assert a is b


@there
def test_a_failing_primitive_is_a_job_error() -> None:
    op, arrays = in_form(*case("3x3", "output"))
    bound = applied(op, *arrays)
    out = np.empty(bound.outputs[0].shape, np.float32)  # type: ignore[union-attr]
    spare = [np.empty(t.shape, t.numpy) for t in PROVIDER.scratch(bound)]
    call = PROVIDER.bind(bound, arrays, [out], spare)[-1]
    broken = native.Call(call.address, (*call.operands[:3], 0, *call.operands[4:]), parallel=False)
    table = native.Table([broken])
    table.run()
    with pytest.raises(JobError, match="function failed with status 2"):
        table.check()


@there
def test_other_element_types_are_refused() -> None:
    x, w = np.ones((1, 16, 5, 5)), np.ones((16, 16, 3, 3))
    assert not PROVIDER.accepts(applied(Conv(), x, w))


@pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "native code runs here")
@pytest.mark.parametrize("path", ["/nowhere/libdnnl.so.3", "libm.so.6", __file__])
def test_a_library_that_does_not_load_is_refused_with_a_reason(path: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(dnnl, "_candidates", lambda: [path])
    for cached in (dnnl.load, convolutions.plan, products.plan):
        cached.cache_clear()
    try:
        op, arrays = in_form(*case("3x3", "output"))
        assert not PROVIDER.accepts(applied(op, *arrays))
        assert "oneDNN" in PROVIDER.reason()
    finally:
        for cached in (dnnl.load, convolutions.plan, products.plan):
            cached.cache_clear()
