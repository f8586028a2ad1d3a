"""Recorded numerics (runtime/cuda/traced*.py): any array code, run by launches, gives what NumPy gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cuda_cases
import numpy as np
import pytest

from recompute.language.ir import Operator, Value
from recompute.language.op import Op
from recompute.language.types import TensorType
from recompute.runtime.cuda.traced.family import TRACED, recording
from recompute.testing import Case

pytestmark = cuda_cases.needs_device

Code = Callable[..., None]


@dataclass(frozen=True)
class Coded(Op, abstract=True):
    """An operator whose numerics are a function, and whose output may take an input's buffer."""

    code: Code
    types: tuple[TensorType, ...]
    taken: tuple[int, ...] = ()

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        return self.types

    def compute(self, xp: Any, ins: Any, outs: Any, scratch: Any) -> None:
        self.code(xp, ins, outs)

    def overwrites(self, output: int) -> tuple[int, ...]:
        return self.taken


@functools.cache
def device() -> Any:
    return cuda_cases.device()


def coded(code: Code, ins: Sequence[np.ndarray], outs: Sequence[str], taken: Sequence[int] = ()) -> Case:
    return Case(Coded(code, tuple(map(TensorType.parse, outs)), tuple(taken)), tuple(ins))


def check(code: Code, ins: Sequence[np.ndarray], *outs: str, taken: Sequence[int] = (), units: float = 64) -> None:
    runs = cuda_cases.bound(coded(code, ins, outs, taken), device(), TRACED)
    assert runs, why(code, ins, *outs)
    device().compile(k for b in runs for k in b.kernels)
    cuda_cases.check(runs[0].case, runs, units=units)


def why(code: Code, ins: Sequence[np.ndarray], *outs: str) -> str:
    """Why it cannot be recorded."""
    case = coded(code, ins, outs)
    values = [Value(f"x{i}", TensorType.of(a)) for i, a in enumerate(ins)]
    made = [Value(f"y{i}", t) for i, t in enumerate(case.op.infer())]
    return recording(Operator(case.op, tuple(values), tuple(made))).why


def floats(*shape: int, dtype: str = "f4") -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(dtype)


#: numbers on which functions of two arguments differ
EDGES = np.array([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 7.0, -7.0, np.inf, -np.inf, np.nan, 1e30, 3.0])
WHOLE = np.array([0, 1, -1, 2, -2, 7, -7, 100, -100, 3])


@pytest.mark.parametrize("name", ["remainder", "floor_divide", "fmod", "maximum", "minimum", "copysign", "not_equal",
                                  "divide", "logical_and", "less", "power"])  # fmt: skip
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_functions_of_two_floats(name: str, dtype: str) -> None:
    with np.errstate(over="ignore"):
        a, b = EDGES[:, None].astype(dtype), EDGES[None].astype(dtype)
    out = f"{'bool' if name in ('not_equal', 'logical_and', 'less') else 'f' + str(8 * int(dtype[1]))}[13,13]"
    check(lambda xp, ins, outs: getattr(xp, name)(*ins, out=outs[0]), (a, b), out, units=2)


@pytest.mark.parametrize("name", ["remainder", "floor_divide", "add", "multiply", "left_shift", "right_shift",
                                  "bitwise_xor", "maximum", "logical_or"])  # fmt: skip
@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "i8", "u8"])
def test_functions_of_two_integers(name: str, dtype: str) -> None:
    a, b = WHOLE[:, None].astype(dtype), WHOLE[None].astype(dtype)
    if "shift" in name:
        b = np.abs(b.astype("i8")).astype(dtype)
    out = f"{'bool' if name.startswith('logical') else dtype[0] + str(8 * int(dtype[1]))}[10,10]"
    check(lambda xp, ins, outs: getattr(xp, name)(*ins, out=outs[0]), (a, b), out)


@pytest.mark.parametrize("name", ["sum", "max", "min", "prod", "any"])
@pytest.mark.parametrize(("shape", "axis"), [((3, 40000), 1), ((20000, 3), 0), ((70000,), 0), ((2, 700, 40), (0, 2)),
                                             ((4, 3, 5), 1), ((33, 2), 0)])  # fmt: skip
def test_reductions_short_and_long(name: str, shape: tuple[int, ...], axis: Any) -> None:
    x = floats(*shape) if name != "prod" else (1 + floats(*shape, dtype="f8") * 1e-4)  # NumPy multiplies one by one
    kept = [d for i, d in enumerate(shape) if i not in (axis if isinstance(axis, tuple) else (axis,))]
    out = f"{ {'any': 'bool', 'prod': 'f64'}.get(name, 'f32') }[{','.join(map(str, kept))}]".replace(" ", "")
    check(lambda xp, ins, outs: getattr(xp, name)(ins[0], axis=axis, out=outs[0]), (x,), out)


def test_sums_of_integers_and_halves() -> None:
    whole = np.random.default_rng(1).integers(-100, 100, (3, 30000)).astype("i4")
    check(lambda xp, ins, outs: xp.sum(ins[0], axis=1, dtype=xp.int64, out=outs[0]), (whole,), "i64[3]")
    check(lambda xp, ins, outs: xp.sum(ins[0], axis=0, dtype="f4", out=outs[0]), (floats(9, 4, dtype="f2"),), "f32[4]")


def test_extremes_of_nan_and_their_places() -> None:
    x = floats(4, 50)
    x[1, 7] = x[1, 20] = np.nan
    x[2, 5] = x[2, 9] = 9

    def code(xp: Any, ins: Any, outs: Any) -> None:
        xp.max(ins[0], axis=1, out=outs[0])
        xp.argmax(ins[0], axis=1, out=outs[1])
        xp.argmin(ins[0], axis=0, out=outs[2])

    check(code, (x,), "f32[4]", "i64[4]", "i64[50]")


def test_steps_that_overlap_go_through_a_temporary() -> None:
    def turned(xp: Any, ins: Any, outs: Any) -> None:
        xp.add(ins[0][::-1], ins[1], out=outs[0])

    def moved(xp: Any, ins: Any, outs: Any) -> None:
        outs[0][...] = ins[0]
        outs[0][1:] = outs[0][:-1]
        xp.cumsum(outs[0][::-1], out=outs[0])
        xp.take(outs[0], ins[1], out=outs[0], mode="wrap")

    check(turned, (floats(40), floats(40)), "f32[40]", taken=(0,))
    check(moved, (floats(40), np.arange(40)[::-1] * 3), "f32[40]", taken=(0,))


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i4"])
def test_products_of_any_layout(dtype: str) -> None:
    a, b = (10 * floats(2, 6, 8)).astype(dtype), (10 * floats(8, 10)).astype(dtype)

    def code(xp: Any, ins: Any, outs: Any) -> None:
        a, b = ins
        xp.matmul(a, b, out=outs[0])
        xp.matmul(a[:, ::2], b[:, ::3], out=outs[1])
        xp.matmul(b.T, a.swapaxes(1, 2), out=outs[2].swapaxes(1, 2).swapaxes(1, 2))
        xp.matmul(b.T, a.swapaxes(1, 2), out=outs[0].swapaxes(1, 2))
        xp.matmul(a[0, 0], b, out=outs[3])
        xp.matmul(a, b[:, 0], out=outs[4])

    name = TensorType.of(a).dtype
    check(code, (a, b), f"{name}[2,6,10]", f"{name}[2,3,4]", f"{name}[2,10,6]", f"{name}[10]", f"{name}[2,6]")


def test_by_index() -> None:
    def code(xp: Any, ins: Any, outs: Any) -> None:
        x, at = ins
        outs[0][...] = xp.take(x, at, axis=1, mode="wrap")
        outs[1][...] = xp.take_along_axis(x, xp.argsort(x, axis=1), axis=1)
        outs[2].fill(0)
        xp.add.at(outs[2], at, x[0, :4])
        outs[3][...] = 7
        outs[3][at] = x[1, :4]
        xp.putmask(outs[1], outs[1] < 0, 0)
        outs[1][:, [0, 2, 3]] = -5.0

    at = np.array([3, -1, 3, 0])
    check(code, (floats(3, 6), at), "f32[3,4]", "f32[3,6]", "f32[6]", "f32[6]")


def test_known_arrays_and_temporaries() -> None:
    table = np.random.default_rng(2).normal(size=(70, 30)).astype("f4")

    def code(xp: Any, ins: Any, outs: Any) -> None:
        x = ins[0]
        outs[0][...] = (x * 2 + table[:, :20]).astype("f8") + np.arange(1400).reshape(70, 20)
        outs[1][...] = xp.stack([x[:, 0], xp.zeros(70, "f4"), xp.arange(70)], axis=1)
        xp.matmul(np.eye(70, dtype="f4")[:20] * 3, x, out=outs[2])
        outs[3][...] = xp.where(x > 0, x, -1).reshape(-1)[::-1]
        outs[4][...] = x.T.reshape(-1).sum() + xp.clip(x, 0, None).max()

    check(code, (floats(70, 20),), "f64[70,20]", "f32[70,3]", "f32[20,20]", "f32[1400]", "f32[]", units=256)


def test_temporaries_are_used_again() -> None:
    def code(xp: Any, ins: Any, outs: Any) -> None:
        x = ins[0]
        for _ in range(20):
            x = x * 1.5
        outs[0][...] = x

    case = coded(code, (floats(9),), ["f32[9]"])
    found = recording(cuda_cases.bound(case, device(), TRACED)[0].op)
    assert len(found.temps) == 2


def test_what_cannot_be_recorded_says_why() -> None:
    def endless(xp: Any, ins: Any, outs: Any) -> None:
        while True:
            xp.add(ins[0], 1, out=outs[0])

    x = floats(4)
    assert "values" in why(lambda xp, ins, outs: outs[0].fill(float(ins[0].max())), (x,), "f32[4]")
    assert "steps" in why(endless, (x,), "f32[4]")
    assert "svd" in why(lambda xp, ins, outs: xp.linalg.svd(ins[0]), (floats(2, 2),), "f32[2,2]")
    known = np.random.default_rng(0).normal(size=1 << 16)
    assert "constants" in why(lambda xp, ins, outs: outs[0].__setitem__(..., known), (x,), "f64[65536]")


def test_more_than_two_billion_elements_are_launched() -> None:
    """Nothing runs: the grid is right, and numbers of elements are 64 bits wide."""
    t = TensorType("u8", (3, 1 << 30))
    op = Operator(Coded(lambda xp, ins, outs: xp.add(ins[0], 1, out=outs[0]), (t,)), (Value("x", t),), (Value("y", t),))
    from recompute.runtime.cuda.device.kernel import Buffer

    (call,) = TRACED.bind(op, [Buffer(1 << 20, t)], [Buffer(1 << 40, t)], [])
    assert call.grid[0] * call.block[0] >= t.size and call.args[0][0] == t.size


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_over_views_that_overlap(seed: int) -> None:
    """Ten programs each: ufuncs, copies, sums, scans and takes over slices of an output that may be its input."""

    def code(rows: Sequence[Sequence[int]], xp: Any, ins: Any, outs: Any) -> None:
        a, b = outs[0], ins[1]
        a[...] = ins[0]
        for fn, *numbers in rows:
            target, x, y = (_part(v, n) for v, n in zip((a, a, (a, b)[numbers[3] % 2]), numbers[:3], strict=True))
            if fn == 0:
                xp.add(x, y, out=target)
            elif fn == 1:
                target[...] = x
            elif fn == 2:
                xp.copyto(target, x, where=y > 0)
            elif fn == 3:
                xp.cumsum(x, axis=1, out=target)
            elif fn == 4:
                xp.max(x, axis=0, out=target[1])
            else:
                xp.take(x, [2, 0, 1], axis=0, out=target, mode="clip")
            xp.multiply(a, 0.5, out=a)

    draw = np.random.default_rng(seed)
    for _ in range(10):
        rows = [[int(n) for n in (draw.integers(6), *draw.integers(0, 1 << 16, 4))] for _ in range(6)]
        check(functools.partial(code, tuple(map(tuple, rows))), (floats(6, 6), floats(6, 6)), "f32[6,6]", taken=(0,))


def _part(v: Any, n: int) -> Any:
    """One of many views [3, 3] of a matrix [6, 6]."""
    v = v.T if n & 1 else v
    v = v[:, ::-1] if n & 2 else v
    i, j = n // 4 % 4, n // 16 % 4
    return v[::2, j : j + 3] if n & 64 else v[i : i + 3, j : j + 3]
