"""Formulas over rows of operators made here: what is refused, and the numbers of NumPy's numerics and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kernel_cases import applied

from recompute.language.kernels import provider
from recompute.language.rows import formula_over_rows
from recompute.language.types import TensorType
from recompute.ops.rowwise import Rowwise
from recompute.runtime.cpu import families
from recompute.runtime.cpu.device import native

needs_native = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())


@dataclass(frozen=True)
class Made(Rowwise, abstract=True):
    """One of the formulas below, by name."""

    formula: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = "f32"
    inplace = (0,)

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        return tuple(TensorType(self.dtype, s) for s in self.shapes)

    def expand(self, b: Any, *inputs: Any) -> tuple[Any, ...]:
        return FORMULAS[self.formula](b, *inputs)


def _shifted(b: Any, x: Any) -> Any:
    return b.Sub(x, b.ReduceMax(x, axes=(-1,)))


#: operators by name
FORMULAS: dict[str, Any] = {
    "beside itself": lambda b, x: (
        b.ReduceSum(b.Mul(b.Reshape(x, shape=(64, 1)), b.Reshape(x, shape=(1, 64))), axes=(1,), keepdims=0),
    ),
    "largest of columns": lambda b, x: (_shifted(b, x), b.ReduceMax(_shifted(b, x), axes=(0,))),
    "sum of rows' means": lambda b, x: (
        _shifted(b, x),
        b.ReduceSum(b.Tanh(b.ReduceMean(x, axes=(-1,))), axes=(0,), keepdims=0),
    ),
    "twice": lambda b, x: (b.Tanh(x),) * 2,
    "and itself": lambda b, x: (b.Tanh(x), x),
    "part": lambda b, x, y: (b.Tanh(x), b.Add(x, y)),
    "tanh of means": lambda b, x: (b.Tanh(b.ReduceMean(x, axes=(-1,))),),
    "columns": lambda b, x: (_shifted(b, x), b.ReduceSum(_shifted(b, x), axes=(0,), keepdims=0)),
}


def _array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(dtype)


def _numpy(op: Made, *inputs: np.ndarray, shared: bool = False) -> list[np.ndarray]:
    """NumPy's numerics; with `shared`, the first output in the first input's place."""
    there = applied(op, *inputs)
    ins = [a.copy() for a in inputs]
    outs: list[Any] = [np.full(v.shape, np.nan, v.type.numpy) for v in there.writes()]
    if shared:
        outs[0] = ins[0]
    op.compute(ins, outs, [np.full(t.shape, np.nan, t.numpy) for t in there.workspace()])
    return outs


def _native(op: Made, *inputs: np.ndarray) -> list[np.ndarray]:
    """The kernel's."""
    there, rows = applied(op, *inputs), provider("rows")
    assert rows.accepts(there)
    outs = [np.full(v.shape, np.nan, v.type.numpy) for v in there.writes()]
    scratch = [np.full(t.shape, np.nan, t.numpy) for t in rows.scratch(there)]
    native.Table(rows.bind(there, list(inputs), outs, scratch)).run()
    return outs


@pytest.mark.parametrize(
    ("formula", "shape", "outputs"),
    [("beside itself", (64,), ((64,),)), ("largest of columns", (8, 4), ((8, 4), (1, 4)))],
)
def test_what_is_no_formula_over_rows(formula: str, shape: tuple[int, ...], outputs: tuple[Any, ...]) -> None:
    """An operand beside itself along two dimensions; what sums over rows have no kernel for."""
    op = Made(formula, outputs)
    x = TensorType("f32", shape)
    assert formula_over_rows(op, (x,), op.infer(x)) is None


@pytest.mark.parametrize("shared", [False, True])
def test_outputs_of_one_value_and_of_an_input(shared: bool) -> None:
    """Each output is written, and what is an input itself is read before anything takes its place."""
    x = _array(7, 33)
    for formula, second in (("twice", np.tanh(x)), ("and itself", x)):
        first, other = _numpy(Made(formula, ((7, 33), (7, 33))), x, shared=shared)
        np.testing.assert_array_equal(first, np.tanh(x))
        np.testing.assert_array_equal(other, second)


@pytest.mark.parametrize("shared", [False, True])
def test_an_output_that_tiles_share(shared: bool) -> None:
    """It takes its input's place when the last tile has read that."""
    x, y = _array(1, 2049), _array(300, 2049)
    first, other = _numpy(Made("part", (x.shape, y.shape)), x, y, shared=shared)
    np.testing.assert_array_equal(first, np.tanh(x))
    np.testing.assert_array_equal(other, x + y)


@needs_native
def test_sums_over_rows_of_what_a_row_has_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels add elements: where the sum is of one number a row, it is not theirs."""
    monkeypatch.setattr(families, "ENOUGH", 0)
    x = _array(70, 33)
    assert not provider("rows").accepts(applied(Made("sum of rows' means", ((70, 33), ())), x))
    shifted, sums = _native(Made("columns", ((70, 33), (33,))), x)
    wanted = x - x.max(1, keepdims=True)
    np.testing.assert_array_equal(shifted, wanted)
    np.testing.assert_allclose(sums, wanted.sum(0), rtol=1e-5)


@needs_native
def test_float16_from_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float64 mean, its tanh in float32, stored as float16: in instructions alone."""
    if not native.converts_float16():
        pytest.skip("the processor has no float16")
    monkeypatch.setattr(families, "ENOUGH", 0)
    x = _array(9, 31, dtype=np.float16)
    (found,) = _native(Made("tanh of means", ((9, 1),), "f16"), x)
    np.testing.assert_allclose(found, np.tanh(x.astype(np.float64).mean(1, keepdims=True)), rtol=1e-3)
