"""FakeQuantize and the ranges of activations: PyTorch's values and gradients, and slopes over whole steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.language.ir import Operator, Value
from recompute.ops.quantisation.fake_quantize import FakeQuantize, FakeQuantizeGrad
from recompute.ops.quantisation.ranges import LEAST, MovingRange, RangeScale, RangeZero

REFERENCE = dict(np.load(Path(__file__).parents[1] / "data" / "fake_quantize.npz"))


def run(op: Any, *inputs: np.ndarray) -> np.ndarray:
    """One application by the executor, which makes a loop of it."""
    values = tuple(Value(f"x{i}", rc.TensorType.of(a)) for i, a in enumerate(inputs))
    block = rc.Block("one", inputs=values)
    y = Value("y", op.infer(*(v.type for v in values))[0])
    program = rc.Program(block.with_operators([Operator(op, values, (y,))], outputs=("y",)))
    return rc.Executor().run(program, {v.name: a for v, a in zip(values, inputs, strict=True)}, ["y"])[0]


@pytest.mark.parametrize("name", ["u8", "i8", "i4", "rows"])
def test_values_and_gradients_are_those_of_pytorch(name: str) -> None:
    x, dy, y, dx = (REFERENCE[f"{name}.{what}"] for what in ("x", "dy", "y", "dx"))
    if name == "rows":
        scale, zero, low, high = REFERENCE["rows.scale"][:, None], np.zeros((), np.float32), -127, 127
    else:
        scale, zero, low, high = REFERENCE[f"{name}.options"]
        scale, zero, low, high = np.float32(scale)[()], np.float32(zero), int(low), int(high)
    given = [np.asarray(a, np.float32) for a in (x, scale, zero)]
    np.testing.assert_allclose(run(FakeQuantize(low=low, high=high), *given), y, rtol=1e-6, atol=1e-6)
    found = run(FakeQuantizeGrad(low=low, high=high), *given, dy)
    np.testing.assert_array_equal(found, dx)
    assert 0 < np.count_nonzero(found) < found.size


def test_the_gradient_is_the_slope_over_whole_steps() -> None:
    """1 inside of the range and 0 beyond it: central differences of 4 steps, away from the range's ends."""
    op, s, z = FakeQuantize(low=-20, high=30), np.array(0.25), np.array(3.0)
    steps = np.concatenate([np.arange(-18, 22), np.arange(35, 40), np.arange(-40, -35)]) + 0.3
    x = steps * s
    slope = (run(op, x + 4 * s, s, z) - run(op, x - 4 * s, s, z)) / (8 * s)
    found = run(FakeQuantizeGrad(low=-20, high=30), x, s, z, np.ones_like(x))
    inner = (steps > -19) & (steps < 23)
    np.testing.assert_allclose(slope[inner], 1)
    np.testing.assert_allclose(slope[~inner], 0)
    np.testing.assert_array_equal(found, inner.astype(float))


def test_rounding_twice_changes_nothing() -> None:
    x, s, z = np.linspace(-3, 3, 1001).astype("f4"), np.float32(0.0137), np.float32(101)
    op = FakeQuantize(low=0, high=255)
    once = run(op, x, np.asarray(s), np.asarray(z))
    assert run(op, once, np.asarray(s), np.asarray(z)).tobytes() == once.tobytes()


def test_ranges_follow_batches_as_the_observer_of_pytorch() -> None:
    low = high = np.zeros((), np.float32)
    for batch, (least, most, scale, zero) in zip(REFERENCE["batches"], REFERENCE["ranges"], strict=True):
        low = run(MovingRange(upper=0, momentum=0.75), low, batch.min())
        high = run(MovingRange(upper=1, momentum=0.75), high, batch.max())
        np.testing.assert_allclose([low, high], [least, most], rtol=1e-5)
        found = run(RangeScale(steps=255), low, high)
        np.testing.assert_allclose(found, scale, rtol=1e-5)
        assert run(RangeZero(low=0, high=255), low, found) == zero


def test_scales_of_weights_are_those_of_pytorch() -> None:
    w = REFERENCE["weight"]
    found = run(RangeScale(steps=127, symmetric=1), w.min(1), w.max(1))
    np.testing.assert_allclose(found, REFERENCE["weight.scale"], rtol=1e-6)


def test_batches_that_are_not_finite_and_zeros() -> None:
    high = np.float32(2)[()]
    for broken in (np.inf, -np.inf, np.nan):
        expected = 2.0 if broken != -np.inf else 2.0 * 0.99  # its upper end is 0
        found = run(MovingRange(upper=1), np.asarray(high), np.asarray(broken, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    zero = np.zeros((), np.float32)
    scale = run(RangeScale(), zero, zero)
    assert scale == np.float32(LEAST) and run(RangeZero(), zero, scale) == 0
    assert run(FakeQuantize(low=0, high=255), np.zeros(3, np.float32), scale, zero).tolist() == [0, 0, 0]


def test_what_does_not_fit() -> None:
    x, s = rc.TensorType.parse("f32[2,3]"), rc.TensorType.parse("f32[4]")
    for op, types in (
        (FakeQuantize(), (x, s, s)),
        (FakeQuantize(low=3, high=3), (x, s.with_shape(()), s.with_shape(()))),
        (FakeQuantize(), (s.with_shape(()), x, x)),
        (FakeQuantize(), tuple(x.with_dtype("f16") for _ in range(3))),
    ):
        with pytest.raises(rc.RecomputeError, match="FakeQuantize"):
            op.infer(*types)
