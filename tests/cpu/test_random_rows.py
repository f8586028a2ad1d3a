"""Random formulas over rows: NumPy's numerics and the kernels beside float64, between pages that nobody may touch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from guard_pages import Slot, array_at
from kernel_cases import applied

from recompute.language.kernels import provider
from recompute.language.op import op_class
from recompute.language.rows import formula_over_rows
from recompute.language.types import TensorType
from recompute.ops import rowwise
from recompute.ops.rowwise import Rowwise
from recompute.runtime.cpu import families
from recompute.runtime.cpu.device import native

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())

SIZES = (1, 2, 3, 4, 7, 8, 31, 33, 65, 101, 2049)
ONE = {"Tanh": np.tanh, "Neg": np.negative, "Abs": np.abs, "Relu": lambda x: np.maximum(x, 0)}
TWO = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum}
REDUCED = {"ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceMax": np.max}
#: relative to the largest element, or to 1
CLOSE = {"f16": 2e-3, "bf16": 1.6e-2, "f32": 1e-4, "f64": 1e-9}

#: an operator, the numbers of the values that it reads, its attributes
Line = tuple[str, tuple[int, ...], tuple[tuple[str, Any], ...]]


@dataclass(frozen=True)
class Random(Rowwise, abstract=True):
    """Some values of a list of operators, which compute in `wide`."""

    lines: tuple[Line, ...] = ()
    results: tuple[tuple[int, str], ...] = ()
    wide: str = "f32"
    inplace = (0, 1, 2, 3)

    def infer(self, *inputs: Any) -> tuple[TensorType, ...]:
        values = [TensorType(self.wide, t.shape) for t in inputs]
        for name, args, attributes in self.lines:
            values.append(op_class(name)(**dict(attributes)).infer(*(values[a] for a in args))[0])
        return tuple(TensorType(dtype, values[i].shape) for i, dtype in self.results)

    def expand(self, b: Any, *inputs: Any) -> tuple[Any, ...]:
        values = [x if x.dtype == self.wide else b.Cast(x, to=self.wide) for x in inputs]
        for name, args, attributes in self.lines:
            values.append(getattr(b, name)(*(values[a] for a in args), **dict(attributes)))
        return tuple(values[i] for i, _ in self.results)

    def exact(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs in float64."""
        values = [a.astype(np.float64) for a in inputs]
        for name, args, attributes in self.lines:
            given, how = [values[a] for a in args], dict(attributes)
            if name == "Reshape":
                values.append(given[0].reshape(how["shape"]))
            elif name in REDUCED:
                values.append(REDUCED[name](given[0], axis=how["axes"], keepdims=bool(how["keepdims"])))
            else:
                values.append((ONE | TWO)[name](*given))
        return [values[i] for i, _ in self.results]


class Maker:
    """Makes one operator and its inputs."""

    def __init__(self, seed: int) -> None:
        self.r = r = random.Random(seed)
        self.dims = tuple(r.choice(SIZES) for _ in range(r.randint(1, 4)))
        while np.prod(self.dims) > 150000:
            self.dims = self.dims[1:]
        rank = len(self.dims)
        self.row = tuple(range(r.randrange(rank), rank))
        self.wide = r.choice(("f32", "f32", "f64"))
        dtypes = (self.wide, self.wide, "f32", "f16", *(("bf16",) if self.wide == "f32" else ()))
        self.types = [TensorType(r.choice(dtypes), self.operand(i)) for i in range(r.randint(1, 4))]
        self.shapes = [t.shape for t in self.types]
        self.lines: list[Line] = []

    def operand(self, i: int) -> tuple[int, ...]:
        """The shape of an operand: the first is whole."""
        kept = self.r.choice([lambda d: True, lambda d: d in self.row, lambda d: d not in self.row,
                              lambda d: self.r.random() < 0.5])  # fmt: skip
        shape = tuple(n if not i or kept(d) else 1 for d, n in enumerate(self.dims))
        return shape[1:] if i and shape[0] == 1 and len(shape) > 1 and self.r.random() < 0.3 else shape

    def emit(self, name: str, *args: int, **attributes: Any) -> int:
        types = [TensorType("f32", self.shapes[a]) for a in args]
        self.shapes.append(op_class(name)(**attributes).infer(*types)[0].shape)
        self.lines.append((name, args, tuple(sorted(attributes.items()))))
        return len(self.shapes) - 1

    def line(self) -> None:
        """One more operator, on the last value or any."""
        r, count = self.r, len(self.shapes)
        a, what = r.choice((count - 1, r.randrange(count))), r.random()
        shape = self.shapes[a]
        if what < 0.25 or not shape:
            self.emit(r.choice(list(ONE)), a)
        elif what < 0.6:
            b = r.choice([b for b, s in enumerate(self.shapes) if fits(s, shape)])
            self.emit(r.choice(list(TWO)), *r.sample((a, b), 2))
        elif what < 0.85:
            some = tuple(sorted(r.sample(range(len(shape)), r.randint(1, len(shape)))))
            axes = self.row if len(shape) == len(self.dims) and r.random() < 0.85 else some
            self.emit(r.choice(list(REDUCED)), a, axes=axes, keepdims=r.choice((1, 1, 0)))
        else:
            i = r.randrange(len(shape))
            parts = r.choice([q for q in range(1, shape[i] + 1) if shape[i] % q == 0])
            split = (*shape[:i], parts, shape[i] // parts, *shape[i + 1 :])
            merged = (*shape[:i], int(np.prod(shape[i : i + 2])), *shape[i + 2 :])
            self.emit("Reshape", a, shape=r.choice((split, merged)))

    def columns(self) -> list[int]:
        """What a norm's gradient makes: a value with a reduction of its rows in it, and sums of it over rows."""
        rank, r = len(self.dims), self.r
        value = self.emit(r.choice(list(TWO)), 0, self.emit("ReduceMean", 0, axes=self.row, keepdims=1))
        value = self.emit("Abs", value)  # of either sign, the sum may be all rounding
        axes = r.choice(((0,), tuple(sorted({0, rank - 1}))))
        return [value, *(self.emit("ReduceSum", a, axes=axes, keepdims=k) for k, a in enumerate((value, 0)))]

    def made(self) -> Random:
        r, begin = self.r, len(self.shapes)
        found = self.columns() if r.random() < 0.3 else []
        if not found:
            for _ in range(r.randint(2, 10)):
                self.line()
            last = len(self.shapes) - 1
            found = [last, *r.choices(range(begin - 1, last + 1), k=r.choice((0, 0, 1, 2)))]
        dtypes = (self.wide, self.wide, self.types[0].dtype)
        return Random(tuple(self.lines), tuple((i, r.choice(dtypes)) for i in found), self.wide)


def fits(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether they broadcast to one of them."""
    try:
        return np.broadcast_shapes(a, b) in (a, b)
    except ValueError:
        return False


SLOTS: list[Slot] = []


def put(types: Sequence[TensorType], first: int, at_end: bool) -> list[Any]:
    """Arrays full of NaN, each at one end of a slot."""
    while len(SLOTS) < first + len(types):
        SLOTS.append(Slot())
    found = [
        array_at(s.place(t.nbytes, at_end, t.numpy.itemsize), t) for s, t in zip(SLOTS[first:], types, strict=False)
    ]
    for a in found:
        a.fill(np.nan)
    return found


def run(
    op: Random, inputs: Sequence[np.ndarray], rows: Any, *, at_end: bool = True, shared: int | None = None
) -> list[Any]:
    """The outputs, by the kernel (`rows`) or NumPy's numerics; with `shared` the first in that input's place."""
    there = applied(op, *inputs)
    ins = put([TensorType.of(a) for a in inputs], 0, at_end)
    for place, a in zip(ins, inputs, strict=True):
        place[...] = a
    outs = put([v.type for v in there.writes()], 4, at_end)
    scratch = put(rows.scratch(there) if rows else there.workspace(), 8, at_end)
    if shared is not None:
        outs[0] = ins[shared]
    if rows:
        native.Table(rows.bind(there, ins, outs, scratch)).run()
    else:
        op.compute(ins, outs, scratch)
    for i, (place, a) in enumerate(zip(ins, inputs, strict=True)):
        assert i == shared or place.tobytes() == a.tobytes(), f"input {i} is changed"
    return [a.copy() for a in outs]


def check(op: Random, inputs: Sequence[np.ndarray], rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near float64; the same bits for any number of threads, at any place, and in place."""
    monkeypatch.setattr(native, "threads", lambda: 1)
    first = run(op, inputs, rows)
    for got, want, (_, dtype) in zip(first, op.exact(inputs), op.results, strict=True):
        near = max(CLOSE[dtype], CLOSE[op.wide]) * max(1.0, abs(want).max())
        with np.errstate(over="ignore"):
            limit = np.isfinite(want.astype(got.dtype))
        np.testing.assert_allclose(got[limit].astype(np.float64), want[limit], rtol=0, atol=near, err_msg=f"{op}")
    monkeypatch.setattr(native, "threads", lambda: 2)
    bits = [a.tobytes() for a in first]
    places = [i for i, a in enumerate(inputs) if TensorType.of(a) == TensorType.of(first[0])]
    for shared in (None, *places):
        again = run(op, inputs, rows, at_end=False, shared=shared)
        assert [a.tobytes() for a in again] == bits, f"{op}, in place of {shared}"


@pytest.mark.slow
def test_random_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 1,500 that have a formula over rows; the numerics take several tiles."""
    monkeypatch.setattr(families, "ENOUGH", 0)
    monkeypatch.setattr(rowwise, "TILE", 64)
    rows, done = provider("rows"), Counter[str]()
    for seed in range(1500):
        maker = Maker(seed)
        op, rng = maker.made(), np.random.default_rng(seed)
        inputs = [rng.standard_normal(t.shape).astype(t.numpy) for t in maker.types]
        found = formula_over_rows(op, tuple(maker.types), op.infer(*maker.types))
        if found is None:
            continue
        check(op, inputs, None, monkeypatch)
        if rows.accepts(applied(op, *inputs)):
            check(op, inputs, rows, monkeypatch)
            done["columns" if found.columns else "rows"] += 1
    assert done["rows"] > 100 and done["columns"] > 30, done
