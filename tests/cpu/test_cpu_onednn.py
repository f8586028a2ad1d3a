"""Convolutions by oneDNN against float64; what happens where it is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from convolution_cases import CASES, KINDS, case, check, in_form, reference, run
from kernel_cases import applied

from recompute.errors import JobError
from recompute.ops.convolution.conv import Conv, ConvGradInput, ConvGradWeight
from recompute.runtime.cpu.device import dnnl, native
from recompute.runtime.cpu.primitives import convolutions, plans, products
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


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small work is cut, too; plans are made again, here and afterwards."""
    monkeypatch.setattr(convolutions, "_WORTH", 1)
    convolutions.plan.cache_clear()
    yield
    convolutions.plan.cache_clear()


@pytest.fixture
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, small_parts: None) -> int:
    """A step has so many."""
    monkeypatch.setattr(native, "threads", lambda: request.param)
    return int(request.param)


#: batch, channels in and out, pixels along each axis, kernel, stride, group, axes → parts that a weight's gradient is
#: summed of
PARTS = {
    (8, 128, 128, 9, 3, 1, 1, 2): 1,  # the library's layout of these weights has more rows than the weights
    (6, 64, 96, 8, 3, 2, 1, 2): 1,
    (4, 48, 64, 7, 1, 1, 1, 2): 2,
    (16, 32, 32, 8, 3, 1, 32, 2): 16,
    (7, 16, 32, 8, 3, 1, 1, 2): 1,
    (7, 16, 32, 24, 3, 1, 1, 2): 7,
    (8, 16, 64, 14, 1, 1, 2, 2): 8,  # parts of these weights along their second axis were packed wrongly
    (4, 24, 192, 7, 1, 1, 3, 2): 4,
    (12, 32, 64, 60, 3, 1, 1, 1): 4,
    (6, 32, 32, 9, 3, 1, 1, 3): 3,
}


@there
def test_a_gradient_of_a_weight_that_takes_far_more_bytes_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    op, arrays = in_form(*case("3x3", "weight"))
    of = applied(op, *arrays)
    monkeypatch.setattr("recompute.runtime.cpu.processors.ours_are_faster", lambda *_, **__: False)
    assert PROVIDER.yields_to(of) == ""
    monkeypatch.setattr(onednn, "_LARGE", -1)  # whatever the library asks for here
    assert PROVIDER.yields_to(of) == "convolution"


@there
@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("sizes", PARTS)
@pytest.mark.parametrize("kind", ["output", "input", "weight"])
def test_parts_of_the_batch(kind: str, sizes: tuple[int, ...], threads: int) -> None:
    """Parts of one thread each, and their sums: as NumPy's within the rounding, between guards, in garbage."""
    n, c, m, size, kernel, stride, group, axes = sizes
    draw = np.random.default_rng(0)
    given = {"strides": (stride,) * axes, "pads": (kernel // 2,) * 2 * axes, "group": group}
    conv = Conv(**given)
    shapes = (n, c, *(size,) * axes), (m, c // group, *(kernel,) * axes)
    x, w = (draw.standard_normal(s, np.float32) for s in shapes)
    y = applied(conv, x, w).outputs[0]
    assert y is not None
    dy = draw.standard_normal(y.shape, np.float32)
    op, arrays = {
        "output": (conv, [x, w]),
        "input": (ConvGradInput(**given, shape=(size,) * axes), [w, dy]),
        "weight": (ConvGradWeight(**given, kernel=(kernel,) * axes), [x, dy]),
    }[kind]
    exact, absolute = reference(op, arrays), reference(op, [abs(a) for a in arrays])
    form, turned = in_form(op, arrays)
    bound = applied(form, *turned)
    if not PROVIDER.accepts(bound):
        pytest.skip("the library has its reference implementation only")
    calls = PROVIDER.bind(bound, turned, [np.empty(bound.outputs[0].shape, np.float32)],  # type: ignore[union-attr]
                          [np.empty(t.shape, t.numpy) for t in PROVIDER.scratch(bound)])  # fmt: skip
    if kind == "weight":  # whatever the threads, if each has a part; no more bytes in parts than half of the operands'
        cut = PARTS[sizes] if PARTS[sizes] >= threads else 1
        assert calls[0].work == cut and calls[0].own_threads == (cut == 1)
        plan = convolutions.plan(onednn.convolved(bound))  # type: ignore[arg-type]
        assert isinstance(plan, plans.Plan)
        parts = dict(plan.buffers).get("parts", 0)
        assert (cut > 1) == (parts > 0) and cut * parts <= (cut - 1) * (x.nbytes + dy.nbytes) // 2
        assert len([call for call in calls[1:] if not call.own_threads]) >= cut - 1
    else:
        whole = threads == 1 or plans.parts(n) == 1
        assert max(call.work for call in calls if call.own_threads == whole) == (1 if whole else plans.parts(n))
    found = run(PROVIDER, bound, turned)
    found = found if kind == "weight" else np.moveaxis(found, -1, 1)
    assert np.all(abs(found - exact) <= (n * size**axes + kernel**axes * c) * np.finfo(np.float32).eps * absolute)


@there
def test_weights_stay_whole_without_a_fast_addition(monkeypatch: pytest.MonkeyPatch, small_parts: None) -> None:
    """They are not refused because of the sums, which they do not need."""
    slow: set[int] = set()
    add, implementation = dnnl.Library.add, dnnl.Library.implementation

    def slow_add(library: Any, *layouts: int) -> int:
        made = add(library, *layouts)
        slow.add(made)
        return made

    def named(library: Any, descriptor: int) -> str:
        return "ref:any" if descriptor in slow else implementation(library, descriptor)

    arrays = [np.ones(s, np.float32) for s in ((8, 32, 18, 18), (8, 64, 18, 18))]
    form, turned = in_form(ConvGradWeight(strides=(1, 1), pads=(1,) * 4, group=1, kernel=(3, 3)), arrays)
    c = onednn.convolved(applied(form, *turned))
    assert c is not None
    found = []
    for there in (True, False):
        convolutions.plan.cache_clear()
        if not there:
            monkeypatch.setattr(dnnl.Library, "add", slow_add)
            monkeypatch.setattr(dnnl.Library, "implementation", named)
        plan = convolutions.plan(c)
        assert isinstance(plan, plans.Plan) and plan.good
        found.append("parts" in dict(plan.buffers))
    assert found == [True, False] and slow


@there
@pytest.mark.parametrize("sizes", [(8, 32, 64, 18, 3, 1, 1), (12, 3, 16, 16, 7, 2, 1), (8, 16, 64, 14, 1, 1, 2)])
def test_summed_weights_are_the_same_bits(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, small_parts: None
) -> None:
    """The gradients of parts of the batch are summed in one order, with however many threads."""
    n, c, m, size, kernel, stride, group = sizes
    draw = np.random.default_rng(1)
    given = {"strides": (stride,) * 2, "pads": (kernel // 2,) * 4, "group": group, "kernel": (kernel, kernel)}
    pixels = -(-size // stride)
    arrays = [draw.standard_normal(s, np.float32) for s in ((n, c, size, size), (n, m, pixels, pixels))]
    form, turned = in_form(ConvGradWeight(**given), arrays)
    bound, found = applied(form, *turned), []
    for count in (1, 2, 3):
        monkeypatch.setattr(native, "threads", lambda count=count: count)
        convolutions.plan.cache_clear()
        found.append(run(PROVIDER, bound, turned).tobytes())
        plan = convolutions.plan(onednn.convolved(bound))  # type: ignore[arg-type]
        assert isinstance(plan, plans.Plan) and not plan.waits
    assert len(set(found)) == 1


@pytest.mark.parametrize(("threads", "wanted"), [
    (1, {8: 1}),
    (2, {1: 1, 2: 2, 3: 1, 4: 4, 6: 6, 7: 1, 8: 8, 12: 12, 16: 8, 17: 17, 24: 8, 32: 8, 64: 8}),
    (16, {8: 1, 16: 16, 32: 32, 64: 64, 128: 64}),
], indirect=["threads"])  # fmt: skip
def test_into_how_many_parts(threads: int, wanted: dict[int, int]) -> None:
    """As many for each thread, four where there are as many images; one more does not matter among eight."""
    assert {n: plans.parts(n) for n in wanted} == wanted


STEADY = """
import signal
import numpy as np
from recompute.runtime.cpu.device.native import Table
from recompute.runtime.cpu.providers import blas, products

seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
a, b, c = np.ones((288, 1024), np.float32), np.ones((1024, 96), np.float32), np.empty((288, 96), np.float32)
table = Table(blas.strided(a.T.copy().T, b, c, by=products.sgemm()))
around = [bytes(5000) for _ in range(50)]
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
while len(seen) < 1000:
    table.run()
    around = [bytes(5000 + len(seen)) for _ in range(50)]
signal.setitimer(signal.ITIMER_REAL, 0)
assert (c == 1024).all()
"""


@there
def test_signals_overwrite_nothing_while_it_multiplies() -> None:
    """A handler would write below the library's workspace, which its products take for their stack."""
    done = subprocess.run([sys.executable, "-c", STEADY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
