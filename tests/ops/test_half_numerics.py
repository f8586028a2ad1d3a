"""Operators that mixed precision runs in halves: numerics and gradients in bfloat16 and float16 against float32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import recompute.ops  # noqa: F401  registers all
from recompute.errors import TypeRuleError
from recompute.language.builder import Builder
from recompute.language.ir import Block, Value
from recompute.language.op import REGISTRY
from recompute.language.types import DTYPES
from recompute.ops.indexing.select import TopK
from recompute.ops.shape.reshape import Cast
from recompute.passes.gradient.autodiff import differentiate
from recompute.testing import Case, case_block, cases, evaluate

#: unit roundoff
_UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11}
#: float16's smallest number
_SMALLEST = 2.0**-24
_CLASSES = sorted(n for n, c in REGISTRY.items() if c.autocast != "full" and c is not Cast and not c.abstract)


def in_type(case: Case, kind: str) -> Case | None:
    """The case with its floats in another type where mixed precision would have them; None where it has no floats."""
    which = case.op.autocast_inputs
    inputs = [
        a if a is None or a.dtype.kind != "f" else a.astype("f4" if which and i not in which else DTYPES[kind])
        for i, a in enumerate(case.inputs)
    ]
    if not any(a is not None and a.dtype == DTYPES[kind] for a in inputs):
        return None
    return Case(case.op, tuple(inputs), case.want)


def rounded(case: Case) -> Case:
    """The same numbers in float32."""
    return Case(
        case.op, tuple(a if a is None or a.dtype.itemsize != 2 else a.astype("f4") for a in case.inputs), case.want
    )


def blocks(name: str, kind: str) -> Iterator[tuple[Case, Block, dict, Block, dict]]:
    for case in cases(REGISTRY[name]):
        if any(a is not None and a.dtype == np.float16 for a in case.inputs):
            continue  # samples in halves are checked by the registry-wide suite
        low = in_type(case, kind)
        if low is None:
            continue
        try:
            block, feed = case_block(low)
            wide, wide_feed = case_block(rounded(low))
        except TypeRuleError:
            continue  # the pass leaves it in float32
        yield low, block, feed, wide, wide_feed


#: float16 is slow
KINDS = ("bf16", pytest.param("f16", marks=pytest.mark.slow))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", _CLASSES)
def test_as_in_float32(name: str, kind: str) -> None:
    """Within a few roundings of the largest element: sums are in float32, and only results are rounded."""
    for case, block, feed, wide, wide_feed in blocks(name, kind):
        for x, y in zip(evaluate(block, feed), evaluate(wide, wide_feed), strict=True):
            assert x.shape == y.shape
            check_close(x, y, 4 * _UNIT[kind], case.op)


def check_close(x: np.ndarray, y: np.ndarray, tolerance: float, what: object) -> None:
    x, y = x.astype("f8"), y.astype("f8")
    finite = np.isfinite(y)
    assert np.array_equal(x[~finite], y[~finite], equal_nan=True), what
    most = float(np.abs(y[finite]).max(initial=0.0))
    error = float(np.abs(x[finite] - y[finite]).max(initial=0.0))
    assert error <= tolerance * most + _SMALLEST, f"{what}: {error:.3g} of {most:.3g}"


def gradients(block: Block, feed: dict, weights: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients of Σ w·y by the floating-point inputs; products and the sum in float32."""
    values = block.values()
    b = Builder.on(block)
    outs = [values[n] for n in block.outputs if values[n].type.is_float]
    ws = [Value(f"w{i}", v.type.with_dtype("f32")) for i, v in enumerate(outs)]
    wide = [v if v.dtype == "f32" else b.Cast(v, to="f32") for v in outs]
    loss = b.add_all([b.ReduceSum(b.Mul(v, w), keepdims=0) for v, w in zip(wide, ws, strict=True)])
    whole = block.with_operators(
        [*block.operators, *b.operators], inputs=(*block.inputs, *ws), constants=(*block.constants, *b.constants)
    )
    by = [v.name for v in block.inputs if v.type.is_float]
    after, pairs = differentiate(whole, loss.name, by)
    feed = feed | {w.name: a for w, a in zip(ws, weights, strict=True)}
    after = after.with_operators(after.operators, outputs=tuple(g.name for _, g in pairs))
    return dict(zip([v.name for v, _ in pairs], evaluate(after, feed), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [n for n in _CLASSES if not n.endswith("Grad")])
def test_gradients_as_in_float32(name: str, kind: str) -> None:
    """As close as a few roundings of what flows: gradients have the types of the inputs."""
    for case, block, feed, wide, wide_feed in blocks(name, kind):
        if not case.gradient or case.op.updates:
            continue
        types = [wide.values()[n].type for n in wide.outputs]
        draw = np.random.default_rng(0)
        ws = [draw.uniform(0.5, 1.5, t.shape).astype(DTYPES[kind]).astype("f4") for t in types if t.is_float]
        if not ws:
            continue
        found, wanted = gradients(block, feed, ws), gradients(wide, wide_feed, ws)
        assert found.keys() == wanted.keys()
        for n, y in wanted.items():
            assert found[n].dtype == feed[n].dtype
            check_close(found[n], y, 16 * _UNIT[kind], f"{case.op} by {n}")


@pytest.mark.parametrize("kind", KINDS)
def test_order_with_nan(kind: str) -> None:
    """NaN is the largest number among halves, too, which NumPy's own sort of bfloat16 does not know."""
    x = np.array([1, np.nan, 3, np.inf, -np.inf, 0.5, np.nan, 2]).astype(DTYPES[kind])
    for largest, order in ((1, [1, 6, 3, 2, 7, 0, 5, 4]), (0, [4, 5, 0, 7, 2, 3, 1, 6])):
        values, indices = evaluate(*case_block(Case(TopK(8, 0, largest), (x,))))
        assert indices.tolist() == order and values.tobytes() == x[order].tobytes()
