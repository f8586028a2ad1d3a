"""Our own products of matrices: values, guarded memory, bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from guard_pages import Slot, array_at
from kernel_cases import applied

from recompute.language.kernels import PROVIDERS
from recompute.language.types import TensorType
from recompute.ops.linear.products import Gemm, MatMul
from recompute.runtime.cpu import processors, register_all
from recompute.runtime.cpu.code import matrix_products
from recompute.runtime.cpu.device import native
from recompute.runtime.cpu.device.native import Table
from recompute.runtime.cpu.processors import Processor
from recompute.runtime.cpu.providers import blas, products

register_all()
pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable() or "there")

#: rows, columns, terms: whole panels, rests of all kinds, several blocks of terms, several parts of the shorter side
SIZES = [(64, 48, 32), (1, 1, 1), (1, 70, 9), (37, 1, 300), (29, 53, 7), (130, 130, 257), (500, 31, 520), (23, 700, 65)]


def matrix(rows: int, columns: int, *, turned: bool, seed: int) -> np.ndarray:
    """A part of a larger matrix, which lies transposed where `turned`."""
    x = np.random.default_rng(seed).standard_normal((columns, rows) if turned else (rows, columns), np.float32)
    return x.T if turned else x


def multiplied(a: Any, b: Any, c: Any, more: Any = None) -> np.ndarray:
    """c, after the calls."""
    (m, n), k = c.shape, a.shape[1]
    room = np.full(matrix_products.needed(m, n, k), np.nan, np.float32)
    Table(matrix_products.calls(a, b, c, room, more)).run()
    return c


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("size", SIZES)
def test_values(size: tuple[int, int, int], turned: tuple[bool, bool]) -> None:
    """Of every form, alone, with a row, with a matrix, and added to what is there."""
    m, n, k = size
    a, b = matrix(m, k, turned=turned[0], seed=1), matrix(k, n, turned=turned[1], seed=2)
    wanted = a.astype(np.float64) @ b
    row, whole = matrix(1, n, turned=False, seed=3)[0], matrix(m, n, turned=False, seed=4)
    close = {"rtol": 1e-5, "atol": 1e-6 * k}
    np.testing.assert_allclose(multiplied(a, b, np.full((m, n), np.nan, np.float32)), wanted, **close)
    np.testing.assert_allclose(multiplied(a, b, np.full((m, n), np.nan, np.float32), row), wanted + row, **close)
    np.testing.assert_allclose(multiplied(a, b, np.full((m, n), np.nan, np.float32), whole), wanted + whole, **close)
    c = whole.copy()
    np.testing.assert_allclose(multiplied(a, b, c, c), wanted + whole, **close)


def test_parts_of_larger_matrices() -> None:
    """Only the part is read and written."""
    big = np.full((90, 100), np.nan, np.float32)
    a, b, c = big[:40, :30], np.full((70, 90), np.nan, np.float32)[:30, 5:65], np.zeros((50, 80), np.float32)
    a[...], b[...] = matrix(40, 30, turned=False, seed=1), matrix(30, 60, turned=False, seed=2)
    multiplied(a, b, c[3:43, 7:67])
    np.testing.assert_allclose(c[3:43, 7:67], a @ b, rtol=1e-5, atol=1e-5)
    c[3:43, 7:67] = 0
    assert not c.any()


def test_a_shorter_side_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as with all of it at once."""
    a, b = matrix(150, 300, turned=False, seed=1), matrix(300, 140, turned=True, seed=2)
    wanted = [
        multiplied(a, b, np.empty((150, 140), np.float32)),
        multiplied(b.T, a.T, np.empty((140, 150), np.float32)),
    ]
    monkeypatch.setattr(matrix_products, "_SHARED", 64)
    for given, found in zip(((a, b), (b.T, a.T)), wanted, strict=True):
        assert np.array_equal(multiplied(*given, np.empty(found.shape, np.float32)), found)


def test_bits_depend_on_the_terms_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the rows and columns beside an element, or on the number of threads."""
    a, b = matrix(120, 600, turned=False, seed=1), matrix(600, 90, turned=False, seed=2)
    found = multiplied(a, b, np.empty((120, 90), np.float32))
    few = multiplied(np.asfortranarray(a[7:30]), b[:, 11:13], np.empty((23, 2), np.float32))
    assert np.array_equal(few, found[7:30, 11:13])
    monkeypatch.setattr(native, "threads", lambda: 1)
    assert np.array_equal(multiplied(a, b, np.empty((120, 90), np.float32)), found)


def test_workspace_grows_with_the_product() -> None:
    """What suits the largest suits the others, and a product alone needs no more."""
    sizes = sorted({(m, n, k) for m in (1, 50, 700, 3000) for n in (1, 60, 5000) for k in (1, 256, 999)})
    for m, n, k in sizes:
        assert matrix_products.needed(m, n, k) <= matrix_products.room(m, n, k)
        for other in sizes:
            if all(x <= y for x, y in zip((m, n, k), other, strict=True)):
                assert matrix_products.room(m, n, k) <= matrix_products.room(*other)


@pytest.mark.parametrize("at_end", [True, False])
def test_guarded(at_end: bool) -> None:
    """Nothing outside of the operands and the workspace is read or written."""
    slots = [Slot() for _ in range(4)]
    for m, n, k in SIZES:
        for ta, tb in ((0, 0), (1, 0), (0, 1), (1, 1)):
            shapes = (k, m) if ta else (m, k), (n, k) if tb else (k, n), (m, n), (matrix_products.needed(m, n, k),)
            a, b, c, room = (
                array_at(slot.place(4 * math.prod(shape), at_end), TensorType("f32", shape))
                for slot, shape in zip(slots, shapes, strict=True)
            )
            a[...], b[...] = matrix(*a.shape, turned=False, seed=1), matrix(*b.shape, turned=False, seed=2)
            a, b = a.T if ta else a, b.T if tb else b
            Table(matrix_products.calls(a, b, c, room)).run()
            np.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-4)


def test_operators() -> None:
    """Which MatMuls and Gemms the provider takes, and their values."""
    provider = PROVIDERS["products"]
    x, y = matrix(20, 30, turned=False, seed=1), matrix(30, 40, turned=False, seed=2)
    row, column = matrix(1, 40, turned=False, seed=3), matrix(20, 1, turned=False, seed=4)
    taken = [
        (MatMul(), (x, y), x @ y),
        (MatMul(), (np.stack([x, x]), y), np.stack([x, x]) @ y),
        (MatMul(), (x[0], y), x[0] @ y),
        (Gemm(), (x, y, row), x @ y + row),
        (Gemm(), (x, y, row[0]), x @ y + row),
        (Gemm(transA=1, transB=1), (x.T.copy(), y.T.copy(), x @ y), 2 * (x @ y)),
        (Gemm(beta=0.0), (x, y, row), x @ y),
    ]
    for op, arrays, wanted in taken:
        bound = applied(op, *arrays)
        assert provider.accepts(bound)
        out = np.full(wanted.shape, np.nan, np.float32)
        scratch = [np.full(t.shape, np.nan, t.numpy) for t in provider.scratch(bound)]
        Table(provider.bind(bound, list(arrays), [out], scratch)).run()
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
    refused = [
        (Gemm(alpha=2.0), (x, y)),
        (Gemm(beta=0.5), (x, y, row)),
        (Gemm(), (x, y, column)),
        (MatMul(), (np.stack([x, x]), np.stack([y, y]))),
        (MatMul(), (x.astype(np.float64), y.astype(np.float64))),
        (MatMul(), (x[:0], y)),
    ]
    assert not any(provider.accepts(applied(op, *arrays)) for op, arrays in refused)


@pytest.mark.parametrize("size", [(100, 90, 300), (8, 8, 8)])
@pytest.mark.parametrize("measured", [True, False])
def test_without_a_blas(size: tuple[int, int, int], measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours multiply everything, small and unmeasured products too, and ask for the workspace."""
    m, n, k = size
    here = Processor("here", "", {"product nn": 0.9} if measured else {}, {})
    monkeypatch.setattr(processors, "processor", lambda: here)
    monkeypatch.setattr(blas, "unavailable", lambda: "NumPy's BLAS is not OpenBLAS")
    a, b, c = matrix(m, k, turned=False, seed=1), matrix(k, n, turned=False, seed=2), np.empty((m, n), np.float32)
    room = np.full(products.room("f32", size).shape, np.nan, np.float32)
    Table(products.calls(a, b, c, room)).run()
    np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-4)


def test_code_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls none of its functions: a step is one thread then."""
    shape = matrix_products.shape_of(100, 100)
    made = [matrix_products._Multiplying(shape, 0, True, False).text()]
    monkeypatch.setattr(native, "_libgomp", lambda: None)
    made.append(matrix_products._Multiplying(shape, 0, True, False).text())
    assert ["omp_get_thread_num" in text for text in made] == [True, False]
