"""Recorded numerics (runtime/cuda/traced): array code, run by launches, gives what NumPy gives."""

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


@pytest.mark.parametrize(("shape", "axis"), [((3, 40000), 1), ((20000, 3), 0), ((70000,), 0), ((2, 700, 40), (0, 2)),
                                             ((4, 3, 5), 1), ((33, 2), 0)])  # fmt: skip
def test_sums_short_and_long(shape: tuple[int, ...], axis: Any) -> None:
    kept = [d for i, d in enumerate(shape) if i not in (axis if isinstance(axis, tuple) else (axis,))]
    out = f"f32[{','.join(map(str, kept))}]"
    check(lambda xp, ins, outs: xp.sum(ins[0], axis=axis, out=outs[0]), (floats(*shape),), out)


def test_sums_of_integers_and_halves() -> None:
    whole = np.random.default_rng(1).integers(-100, 100, (3, 30000)).astype("i4")
    check(lambda xp, ins, outs: xp.sum(ins[0], axis=1, dtype=xp.int64, out=outs[0]), (whole,), "i64[3]")
    check(lambda xp, ins, outs: xp.sum(ins[0], axis=0, dtype="f4", out=outs[0]), (floats(9, 4, dtype="f2"),), "f32[4]")
    small = (whole % 100).astype("i1")
    check(lambda xp, ins, outs: xp.sum(ins[0], axis=1, dtype=xp.int8, out=outs[0]), (small,), "i8[3]")


def test_places_of_the_largest() -> None:
    x = floats(4, 50)
    x[1, 7] = x[1, 20] = np.nan
    x[2, 5] = x[2, 9] = 9
    check(lambda xp, ins, outs: xp.argmax(ins[0], axis=1, out=outs[0]), (x,), "i64[4]")


def test_steps_that_overlap_go_through_a_temporary() -> None:
    def turned(xp: Any, ins: Any, outs: Any) -> None:
        xp.add(ins[0][::-1], ins[1], out=outs[0])

    def moved(xp: Any, ins: Any, outs: Any) -> None:
        outs[0][...] = ins[0]
        outs[0][1:] = outs[0][:-1]
        xp.cumsum(outs[0], out=outs[0])

    check(turned, (floats(40), floats(40)), "f32[40]", taken=(0,))
    check(moved, (floats(40), floats(40)), "f32[40]", taken=(0,))


def test_by_index() -> None:
    def code(xp: Any, ins: Any, outs: Any) -> None:
        x, at = ins
        outs[0][...] = xp.take(x, at, axis=1, mode="wrap")
        outs[1][...] = xp.take_along_axis(x, xp.argsort(x, axis=1), axis=1)
        xp.putmask(outs[1], outs[1] < 0, 0)

    at = np.array([3, -1, 3, 0])
    check(code, (floats(3, 6), at), "f32[3,4]", "f32[3,6]")


def test_temporaries_views_and_numbers() -> None:
    def code(xp: Any, ins: Any, outs: Any) -> None:
        x = ins[0]
        outs[0][...] = (x * 2 + np.full((1, 20), 3, "f4")).astype("f8") + xp.arange(20)
        outs[1][...] = xp.stack([x[:, 0], xp.zeros(70, "f4"), xp.arange(70)], axis=1)
        outs[2][...] = xp.where(x > 0, x, -1).reshape(-1)[::-1]
        outs[3][...] = x.T.reshape(-1).sum() + xp.clip(x, 0, 1).sum()

    check(code, (floats(70, 20),), "f64[70,20]", "f32[70,3]", "f32[1400]", "f32[]", units=256)


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

    def over(name: str, **kw: Any) -> str:
        """Why a function does not write over its operand."""
        case = coded(lambda xp, ins, outs: getattr(xp, name)(outs[0][::-1], out=outs[0], **kw), (x,), ["f32[4]"])
        return recording(cuda_cases.operator(case)).why

    x = floats(4)
    assert "values" in why(lambda xp, ins, outs: outs[0].fill(float(ins[0].sum())), (x,), "f32[4]")
    assert "steps" in why(endless, (x,), "f32[4]")
    assert "svd" in why(lambda xp, ins, outs: xp.linalg.svd(ins[0]), (floats(2, 2),), "f32[2,2]")
    known = np.random.default_rng(0).normal(size=4)
    assert "constants" in why(lambda xp, ins, outs: outs[0].__setitem__(..., known), (x,), "f64[4]")
    assert "arrays" in why(lambda xp, ins, outs: outs[0].__setitem__([0, 2], 1), (x,), "f32[4]")
    assert "matmul" in why(lambda xp, ins, outs: xp.matmul(ins[0], ins[0], out=outs[0]), (floats(2, 2),), "f32[2,2]")
    assert "max" in why(lambda xp, ins, outs: xp.max(ins[0], axis=0, out=outs[0]), (floats(2, 2),), "f32[2]")
    assert "axes" in why(lambda xp, ins, outs: xp.cumsum(ins[0], out=outs[0]), (floats(2, 2),), "f32[4]")
    assert "place" in over("cumsum")


def test_more_than_two_billion_elements_are_launched() -> None:
    """Nothing runs: the grid is right, and numbers of elements are 64 bits wide."""
    t = TensorType("u8", (3, 1 << 30))
    op = Operator(Coded(lambda xp, ins, outs: xp.add(ins[0], 1, out=outs[0]), (t,)), (Value("x", t),), (Value("y", t),))
    from recompute.runtime.cuda.device.kernel import Buffer

    (call,) = TRACED.bind(op, [Buffer(1 << 20, t)], [Buffer(1 << 40, t)], [])
    assert call.grid[0] * call.block[0] >= t.size and call.args[0][0] == t.size


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_over_views_that_overlap(seed: int) -> None:
    """Ten programs each: ufuncs and copies over slices of an output that may be its input."""

    def code(rows: Sequence[Sequence[int]], xp: Any, ins: Any, outs: Any) -> None:
        a, b = outs[0], ins[1]
        a[...] = ins[0]
        for fn, *numbers in rows:
            target, x, y = (_part(v, n) for v, n in zip((a, a, (a, b)[numbers[3] % 2]), numbers[:3], strict=True))
            if fn == 0:
                xp.add(x, y, out=target)
            elif fn == 1:
                target[...] = x
            else:
                xp.copyto(target, x, where=y > 0)
            xp.multiply(a, 0.5, out=a)

    draw = np.random.default_rng(seed)
    for _ in range(10):
        rows = [[int(n) for n in (draw.integers(3), *draw.integers(0, 1 << 16, 4))] for _ in range(6)]
        check(functools.partial(code, tuple(map(tuple, rows))), (floats(6, 6), floats(6, 6)), "f32[6,6]", taken=(0,))


def _part(v: Any, n: int) -> Any:
    """One of many views [3, 3] of a matrix [6, 6]."""
    v = v.T if n & 1 else v
    v = v[:, ::-1] if n & 2 else v
    i, j = n // 4 % 4, n // 16 % 4
    return v[::2, j : j + 3] if n & 64 else v[i : i + 3, j : j + 3]
