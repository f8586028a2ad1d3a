"""Matrix products by NumPy's BLAS over tiles, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import applied

from recompute.errors import JobError
from recompute.ops.linear.products import Gemm, MatMul
from recompute.runtime.cpu.device import native
from recompute.runtime.cpu.providers import blas, onednn

pytestmark = pytest.mark.skipif(bool(blas.unavailable()), reason=blas.unavailable() or "there")
PROVIDER = blas.BlasProvider()
there = pytest.mark.skipif(bool(onednn.unavailable()), reason=onednn.unavailable() or "there")
BOTH = [PROVIDER, pytest.param(onednn.OneDnnProvider(), marks=there)]


def run(op: Any, *arrays: np.ndarray, provider: Any = PROVIDER) -> np.ndarray:
    bound = applied(op, *arrays)
    assert provider.accepts(bound)
    out = np.full(bound.outputs[0].shape, np.nan, arrays[0].dtype)  # type: ignore[union-attr]
    table = native.Table(provider.bind(bound, arrays, [out], []))
    table.run()
    table.check()
    return out


def check(op: Any, *arrays: np.ndarray, provider: Any = PROVIDER) -> None:
    """A sum of k products in any order errs by at most (k + 3) ε times the sum of their absolute values."""
    found = run(op, *arrays, provider=provider)
    bound = applied(op, *arrays)
    exact, size = (np.empty(found.shape) for _ in range(2))
    wide = [a.astype(np.float64) for a in arrays]
    for values, out in ((wide, exact), ([abs(a) for a in wide], size)):
        scratch = [np.empty(t.shape) for t in bound.workspace()]
        op.compute(values, [out], scratch)
    k = arrays[0].shape[-1] if not op.transA or arrays[0].ndim == 1 else arrays[0].shape[-2]
    assert np.all(abs(found - exact) <= (k + 3) * np.finfo(found.dtype).eps * abs(size))
    assert np.array_equal(found, run(op, *arrays, provider=provider))


SHAPES = [
    ((0, 0), (130, 70), (70, 300)),
    ((1, 0), (70, 130), (70, 300)),
    ((0, 1), (130, 70), (300, 70)),
    ((1, 1), (70, 130), (300, 70)),
    ((0, 0), (3, 2), (2, 5)),
    ((0, 1), (7, 5, 40, 64), (7, 5, 30, 64)),
    ((1, 0), (3, 1, 64, 40), (5, 64, 30)),
    ((0, 0), (3, 200, 64), (64, 100)),
    ((1, 0), (3, 64, 200), (64, 100)),
    ((0, 0), (64, 100), (3, 100, 200)),
    ((0, 0), (9,), (4, 9, 3)),
    ((0, 0), (4, 3, 9), (9,)),
    ((1, 1), (9,), (9,)),
    ((0, 0), (1, 2000), (2000, 501)),
    ((0, 0), (501, 2000), (2000, 1)),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("flags", "a", "b"), SHAPES)
def test_products(flags: tuple[int, int], a: tuple[int, ...], b: tuple[int, ...], dtype: Any) -> None:
    rng = np.random.default_rng(1)
    check(MatMul(*flags), rng.standard_normal(a).astype(dtype), rng.standard_normal(b).astype(dtype))


@there
@pytest.mark.parametrize(("flags", "a", "b"), SHAPES)
def test_products_by_onednn(flags: tuple[int, int], a: tuple[int, ...], b: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal(a, np.float32), rng.standard_normal(b, np.float32)
    check(MatMul(*flags), *arrays, provider=onednn.OneDnnProvider())


@pytest.mark.parametrize("provider", BOTH)
@pytest.mark.parametrize("c", [(130, 300), (300,), (130, 1), (1, 300), (1,), ()])
def test_gemm_adds_what_broadcasts(c: tuple[int, ...], provider: Any) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((130, 70), np.float32), rng.standard_normal((300, 70), np.float32)
    check(Gemm(1.5, 0.5, 0, 1), a, b, np.array(rng.standard_normal(c), np.float32), provider=provider)
    check(Gemm(alpha=-0.25, transB=1), a, b, provider=provider)


def test_beta_of_zero_takes_no_bias() -> None:
    a, nan = np.ones((2, 2), np.float32), np.full((2, 2), np.nan, np.float32)
    assert np.array_equal(run(Gemm(beta=0.0), a, a, nan), a @ a)


@pytest.mark.parametrize("m", [1, 15, 16, 17, 100, 515])
@pytest.mark.parametrize("n", [1, 40, 1000])
@pytest.mark.parametrize("parts", [1, 2, 6, 8])
def test_a_grid_covers_the_product_once(m: int, n: int, parts: int) -> None:
    rows, columns = blas.grid(m, n, parts)
    seen = np.zeros((m, n), int)
    for r0, r1 in rows:
        for c0, c1 in columns:
            seen[r0:r1, c0:c1] += 1
    assert seen.min() == seen.max() == 1
    assert len(rows) * len(columns) <= parts


def test_the_librarys_own_threads_come_back() -> None:
    import ctypes

    lib = blas.library()
    assert isinstance(lib, blas.Library)
    if lib.threads is None:
        pytest.skip("the library has no threads of its own")
    get, set_ = ctypes.CFUNCTYPE(ctypes.c_int)(lib.threads[0]), ctypes.CFUNCTYPE(None, ctypes.c_int)(lib.threads[1])
    before = get()
    try:
        set_(2)
        x = np.ones((200, 200), np.float32)
        run(MatMul(), x, x)
        assert get() == 2
        one, other = (native.Table(PROVIDER.bind(applied(MatMul(), x, x), [x, x], [x.copy()], [])) for _ in range(2))
        (shared,) = {*one._quiet, *other._quiet}
        with shared:  # as while another thread's step runs
            one.run()
            assert get() == 1
        assert get() == 2
    finally:
        set_(before)


def test_what_is_left_to_numpy() -> None:
    half, empty = np.ones((2, 2), np.float16), np.ones((2, 0), np.float32)
    assert not PROVIDER.accepts(applied(MatMul(), half, half))
    assert not PROVIDER.accepts(applied(MatMul(), empty, empty.T))


@there
def test_a_failing_product_is_a_job_error() -> None:
    a = np.ones((4, 4), np.float32)
    found = onednn.OneDnnProvider().bind(applied(MatMul(), a, a), [a, a], [a.copy()], [])[0]
    words = list(found.operands)
    words[7] = 1  # rows of A closer together than they are long
    table = native.Table([native.Call(found.address, tuple(words), found.work, found.parallel)])
    table.run()
    with pytest.raises(JobError, match="function failed with status 2"):
        table.check()
