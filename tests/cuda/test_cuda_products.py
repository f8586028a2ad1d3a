"""Matrix products for CUDA, on the emulated device, against NumPy in float64."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.language.ir import Operator, Value
from recompute.language.kernels import provider
from recompute.language.types import DTYPES, TensorType
from recompute.ops.linear.products import Gemm, MatMul
from recompute.runtime import CUDAPlace
from recompute.runtime.cuda.device import cublas, emulator
from recompute.runtime.cuda.device.kernel import Buffer, Product
from recompute.runtime.cuda.providers.cublas import matrices
from recompute.runtime.lowering import providers
from recompute.testing import Draw, case_block

#: where the tests run
PLACE: list[Any] = []
EPS = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24, "f64": 2.0**-53}


@pytest.fixture(autouse=True)
def place(cuda: Any) -> None:
    """All of a test runs there."""
    PLACE[:] = [cuda]


def check(op: Any, dtype: str, *shapes: tuple[int, ...]) -> None:
    """Against the same operator in float64 on the same (rounded) numbers."""
    draw = Draw(str(op))
    arrays = [draw(f"{dtype}[{','.join(map(str, s))}]") for s in shapes]
    block, feed = case_block(draw.case(op, *arrays))
    (found,) = rc.Executor(PLACE[0]).run(rc.Program(block, {}), feed, list(block.outputs))
    wide = [a.astype(np.float64) for a in arrays]
    exact, size = (_exact(op, ws) for ws in (wide, [abs(w) for w in wide]))
    k = arrays[0].shape[-2] if op.transA and arrays[0].ndim > 1 else arrays[0].shape[-1]
    bound = (EPS["f32" if dtype in ("f16", "bf16") else dtype] * (k + 4) + EPS[dtype]) * size
    assert found.dtype == DTYPES[dtype]
    assert np.all(abs(found.astype(np.float64) - exact) <= bound + 1e-300)


def _exact(op: Any, arrays: list[np.ndarray]) -> np.ndarray:
    ins = tuple(Value(f"i{i}", TensorType.of(a)) for i, a in enumerate(arrays))
    out = np.empty(op.infer(*(v.type for v in ins))[0].shape)
    room = Operator(op, ins, (Value("o", TensorType.of(out)),)).workspace()
    op.compute(arrays, [out], [np.empty(t.shape, t.numpy) for t in room])
    return out


def test_who_runs_products() -> None:
    assert "cublas" in providers(CUDAPlace())
    a, b = (Value(n, TensorType("f16", (2, 2))) for n in "ab")
    assert provider("cublas").accepts(Operator(MatMul(), (a, b), (a,)))
    i = Value("i", TensorType("i32", (2, 2)))
    assert not provider("cublas").accepts(Operator(MatMul(), (i, i), (i,)))


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("flags", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_forms(dtype: str, flags: tuple[int, int]) -> None:
    a, b = ((5, 3) if flags[0] else (3, 5)), ((7, 5) if flags[1] else (5, 7))
    for left, right in (((), ()), ((2,), (2,)), ((2, 3), (1, 3)), ((2, 1, 4), (3, 1)), ((6,), ()), ((), (4,))):
        check(MatMul(*flags), dtype, (*left, *a), (*right, *b))
    check(Gemm(0.5, 2.0, *flags), dtype, a, b, (7,))


@pytest.mark.parametrize("c", [(), (1,), (8,), (3, 1), (1, 8), (1, 1), (3, 8)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gemm_adds_what_broadcasts(c: tuple[int, ...], dtype: str) -> None:
    check(Gemm(beta=1.5), dtype, (3, 5), (5, 8), c)
    check(Gemm(alpha=0.3), dtype, (3, 5), (5, 8), c)
    check(Gemm(beta=0.0), dtype, (3, 5), (5, 8), c)


def test_vectors_and_nothing() -> None:
    for shapes in (((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,)), ((5, 2, 3), (3,)), ((3,), (5, 3, 2))):
        check(MatMul(), "f32", *shapes)
    for shapes in (((2, 0), (0, 3)), ((0, 2), (2, 3)), ((2, 2), (2, 0)), ((4, 2, 0), (0, 3)), ((0, 2, 2), (2, 2))):
        check(MatMul(), "f32", *shapes)
    check(Gemm(beta=0.5), "f32", (2, 0), (0, 3), (3,))
    check(Gemm(), "f32", (2, 0), (0, 3))


def test_few_calls() -> None:
    def calls(a: tuple[int, ...], b: tuple[int, ...], **flags: bool) -> list[Any]:
        found = matrices(a, b, **flags)
        out = (*np.broadcast_shapes(a[:-2], b[:-2]), found.m, found.n)
        x, y, z = (Buffer(0, TensorType("f32", s)) for s in (a, b, (int(np.prod(out)),)))
        return found(x, y, z)

    assert calls((4, 5, 2, 3), (3, 7))[0].m == 40
    (one,) = calls((4, 5, 2, 3), (4, 5, 3, 7))
    assert one.batch == 20 and one.strides == (6, 21, 14)
    (one,) = calls((20, 3, 2), (3, 7), ta=True)
    assert one.batch == 20 and one.strides == (6, 0, 14)
    assert len(calls((8, 1, 2, 3), (1, 2, 3, 7))) == 2  # the longer axis is the batch
    assert all(isinstance(c, Product) for c in calls((8, 1, 2, 3), (1, 2, 3, 7)))


def test_halves_add_up_in_float() -> None:
    """2048 + 1 + 1 + ... is 2048 in halves."""
    a = np.ones((1, 4096), np.float16)
    block, feed = case_block(Draw("").case(MatMul(), a, np.ones((4096, 1), np.float16)))
    (found,) = rc.Executor(PLACE[0]).run(rc.Program(block, {}), feed, list(block.outputs))
    assert found[0, 0] == 4096


def _column_major(name: str, words: tuple[Any, ...]) -> None:
    """What cuBLAS's manual says of a call in f64: C = alpha op(A) op(B) + beta C, columns behind each other."""
    words = (0, *words)
    assert len(words) == len(cublas._SIGNATURES[name])
    batched = "Strided" in name
    (ta, tb, m, n, k, alpha), rest = words[1:7], list(words[7:])
    step = 4 if batched else 3
    a, b, beta, c = rest[:step], rest[step : 2 * step], rest[2 * step], rest[2 * step + 1 : 3 * step + 1]
    count = rest[3 * step + 1] if batched else 1
    assert rest[-2:] == [70, -1]
    factor, kept = (ctypes.c_double.from_address(p).value for p in (alpha, beta))
    for i in range(count):
        x, y, z = (
            _columns(o, i, rows, columns)
            for o, (rows, columns) in ((a, (k, m) if ta else (m, k)), (b, (n, k) if tb else (k, n)), (c, (m, n)))
        )
        z[...] = factor * (x.T if ta else x) @ (y.T if tb else y) + kept * z


def _columns(operand: list[int], i: int, rows: int, columns: int) -> np.ndarray:
    address, kind, lead, *stride = operand
    assert kind == 1
    assert lead >= rows
    flat = (ctypes.c_double * (lead * columns)).from_address(address + 8 * i * (stride[0] if stride else 0))
    return np.lib.stride_tricks.as_strided(np.frombuffer(flat), (rows, columns), (8, 8 * lead))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("flags", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_arguments_of_cublas(flags: tuple[int, int], batch: int) -> None:
    """Row-major products as cuBLAS is asked for them, with rows further apart than they are long."""
    m, n, k = 3, 4, 5
    rng = np.random.default_rng(0)
    shapes = [
        (batch, k, m + 1) if flags[0] else (batch, m, k + 1),
        (batch, n, k + 2) if flags[1] else (batch, k, n + 2),
    ]
    a, b, c = (rng.standard_normal(s) for s in (*shapes, (batch, m, n + 3)))
    buffers = [Buffer(x.ctypes.data, TensorType.of(x)) for x in (a, b, c)]
    strides = tuple(x[0].size for x in (a, b, c)) if batch > 1 else (0, 0, 0)
    p = Product(*buffers, m, n, k, a.shape[2], b.shape[2], c.shape[2], *map(bool, flags), 0.5, 2.0, batch, strides)
    before = c.copy()
    emulator._product(p)
    expected = c.copy()
    c[...] = before
    name, words, held = cublas.arguments(p)
    _column_major(name, words)
    assert held
    assert np.allclose(c, expected, rtol=1e-13)
    assert not np.array_equal(before, expected)


def test_tf32_is_a_provider_of_its_own() -> None:
    a, b = (Value(n, TensorType("f32", (2, 2))) for n in "ab")
    h = Value("h", TensorType("f16", (2, 2)))
    by = provider("cublas_tf32")
    assert "cublas_tf32" not in providers(CUDAPlace())
    assert not by.accepts(Operator(MatMul(), (h, h), (h,)))
    op = Operator(MatMul(), (a, b), (a,))
    assert by.accepts(op)
    x = Buffer(0, a.type)
    assert [c.tf32 for c in by.bind(op, (x, x), (x,), ())] == [True]
    assert [c.tf32 for c in provider("cublas").bind(op, (x, x), (x,), ())] == [False]
