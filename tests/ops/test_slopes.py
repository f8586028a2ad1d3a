"""Codes of slopes: bits, packing, refusals; the best step functions beside published figures and a search of all."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.language.op import Op, op_class
from recompute.language.types import DTYPES, TensorType
from recompute.ops.approximation.levels import (
    EVEN,
    PIECEWISE,
    SMOOTH,
    best_steps,
    derivative_of,
    grid_borders,
    slope_of,
)
from recompute.ops.approximation.slopes import SlopeCodes, SlopeGrad
from recompute.testing import evaluate

#: Errors for 1, 2, 3, 4 bits: integrals of the squared error from -10 to 10, every place counting the same, which is
#: the interval and weight of custom_gelu_dynamic_programming.py in github.com/skolai/fewbit, the authors' repository.
#: The figures are those of the table of errors of arXiv 2202.00441 as they were remembered: its text was not at hand.
PUBLISHED = {
    "Gelu": (0.1410, 0.0406, 0.0119, 0.0031),
    "Swish": (0.2150, 0.0479, 0.0170, 0.0045),
    "Sigmoid": (0.0181, 0.0038, 0.0009, 0.0002),
    "Tanh": (0.1584, 0.0319, 0.0073, 0.0017),
    "Selu": (0.2554, 0.1010, 0.0184, 0.0039),
    "Softplus": (0.2902, 0.0541, 0.0121, 0.0029),
}
#: bounds and levels of GELU with 3 bits in fewbit/approx_test.py of the same repository
FEWBIT_BOUNDS = (-2.39798704, -0.711248159, -0.326290283, -1.55338428e-4, 0.326182064, 0.71085586, 2.39811567)
FEWBIT_LEVELS = (-0.00260009, -0.08883533, 0.1251944, 0.37204148, 0.6277958, 0.87466175, 1.08880716, 1.00259936)


def made(name: str, **fields: Any) -> Op:
    return op_class(name)(**fields)


def integral(f: Any, low: float, high: float) -> float:
    """By the midpoint rule, independent of the one in use."""
    h = (high - low) / 400_000
    return float(np.sum(f(low + (np.arange(400_000) + 0.5) * h)) * h)


@pytest.mark.parametrize("name", PUBLISHED)
def test_errors_are_the_published_ones(name: str) -> None:
    op = made(name)
    slope = derivative_of(op, "f64")
    for steps, error in zip(best_steps(op), PUBLISHED[name], strict=True):
        # theirs are errors of a grid of borders, no smaller than the least ones, and rounded to 4 digits
        assert -0.5e-4 <= error - steps.error <= 0.6e-4
        assert name != "Gelu" or round(steps.error, 4) == error
        bounds, levels = np.array(steps.bounds), np.array(steps.levels)

        def square(x: Any, bounds: Any = bounds, levels: Any = levels, even: bool = steps.even) -> Any:
            at = np.searchsorted(bounds, np.abs(x) if even else x)
            return (slope(x) - levels[at]) ** 2

        assert integral(square, -10, 10) == pytest.approx(steps.error, rel=1e-3, abs=1e-7)


def test_levels_of_three_bits_are_those_of_fewbit() -> None:
    """Theirs come from gradient descent to 1e-4 on [-100, 100]."""
    steps = best_steps(made("Gelu"))[2]
    np.testing.assert_allclose(steps.bounds, FEWBIT_BOUNDS, atol=3e-4)
    np.testing.assert_allclose(steps.levels, FEWBIT_LEVELS, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "fields"),
    [(n, {}) for n in SMOOTH]
    + [("Gelu", {"approximate": "tanh"}), ("Swish", {"alpha": 1.702}), ("Elu", {"alpha": -0.5})],
)
def test_more_bits_less_error(name: str, fields: dict[str, Any]) -> None:
    op = made(name, **fields)
    found = [slope_of(op, bits) for bits in (1, 2, 3, 4)]
    errors = [s.error for s in found if s is not None]
    assert len(errors) == 4 and all(0 < b < 0.75 * a for a, b in itertools.pairwise(errors))
    for bits, steps in enumerate(found, 1):
        assert steps is not None and len(steps.levels) == 2**bits == len(steps.bounds) + 1
        assert SlopeCodes(steps.bounds, int(steps.even)).bits == SlopeGrad(steps.levels).bits == bits
        assert steps.even == (name in EVEN) and not steps.exact


def test_the_best_of_all_borders_of_a_coarse_grid() -> None:
    edges = np.linspace(-3, 3, 13)
    f = np.sin(edges) + edges**2 / 7
    squares = np.concatenate([[0], np.cumsum(np.random.default_rng(3).uniform(1, 2, 12))])

    def error(borders: Any) -> float:
        b = list(borders)
        return float(sum(squares[j] - squares[i] - (f[j] - f[i]) ** 2 / (edges[j] - edges[i]) for i, j in
                         itertools.pairwise(b)))  # fmt: skip

    for steps, found in zip((2, 3, 4, 5), grid_borders(f, squares, edges, [2, 3, 4, 5]), strict=True):
        every = [(0, *inner, 12) for inner in itertools.combinations(range(1, 12), steps - 1)]
        assert error(found) == pytest.approx(min(map(error, every)), abs=1e-12) and len(found) == steps + 1


PIECES = [
    ("Relu", {}, ()),
    ("LeakyRelu", {"alpha": 0.1}, ()),
    ("LeakyRelu", {"alpha": -2.0}, ()),
    ("Relu6", {}, ()),
    ("ThresholdedRelu", {"alpha": 0.7}, ()),
    ("HardSigmoid", {}, ()),
    ("HardSigmoid", {"alpha": 1 / 6}, ()),
    ("Clip", {}, (-1.0, 1.0)),
    ("Clip", {}, (None, 0.0)),
    ("Clip", {}, (0.0,)),
]


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize(("name", "fields", "others"), PIECES)
def test_steps_are_exact(name: str, fields: Any, others: Any, dtype: str) -> None:
    """At random places, and at the numbers of the type next to every bound."""
    op = made(name, **fields)
    steps = slope_of(op, 1, dtype, others)
    assert steps is not None and steps.exact and name in PIECEWISE
    numpy = DTYPES[dtype]
    bounds = np.array(steps.bounds).astype(numpy)
    near = [np.nextafter(bounds, numpy.type(s)) for s in (-np.inf, np.inf)]
    zeros = np.array([0.0, -0.0, np.nan]).astype(numpy)
    x = np.concatenate([np.random.default_rng(0).normal(0, 4, 500).astype(numpy), bounds, *near, zeros])
    codes = run(SlopeCodes(steps.bounds), x)
    found = run(SlopeGrad(steps.levels), np.ones_like(x), codes)
    with np.errstate(all="ignore"):
        expected = derivative_of(op, dtype, others)(x)
    assert found[:-1].tobytes() == (expected + 0)[:-1].tobytes()
    assert found[-1] == steps.levels[0] or numpy.itemsize == 2  # not a number: the first level


def test_none_where_there_are_no_steps() -> None:
    for op, others in (
        (made("Clip"), (2.0, 1.0)),
        (made("Clip"), ()),
        (made("LeakyRelu", alpha=1.0), ()),
        (made("Swish", alpha=0.0), ()),
        (made("Exp"), ()),
    ):
        assert slope_of(op, 2, "f32", others) is None
    assert slope_of(made("Gelu"), 2, "i32") is None
    for bits in (0, 5, 9, -1, 2.0, True):
        with pytest.raises(rc.UsageError, match=r"1 to 4 bits, not"):
            slope_of(made("Gelu"), bits, "f32")  # type: ignore[arg-type]


def run(op: Op, *inputs: np.ndarray, providers: tuple[str, ...] = ("numpy",)) -> np.ndarray:
    """One application."""
    values = tuple(rc.Value(f"x{i}", TensorType.of(a)) for i, a in enumerate(inputs))
    y = rc.Value("y", op.infer(*(v.type for v in values))[0])
    block = rc.Block("one", inputs=values, outputs=("y",)).with_operators([rc.Operator(op, values, (y,))])
    feed = {v.name: a for v, a in zip(values, inputs, strict=True)}
    return rc.Executor(providers=providers).run(rc.Program(block), feed, ["y"])[0]


def unpacked(codes: np.ndarray, bits: int, count: int) -> np.ndarray:
    """By bits, one at a time."""
    stream = np.unpackbits(codes, bitorder="little")[: count * bits].reshape(count, bits)
    return (stream << np.arange(bits)).sum(1)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 15])
@pytest.mark.parametrize("even", [0, 1])
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
def test_codes_and_gradients(count: int, even: int, dtype: str) -> None:
    """Beside a count of bounds, in a size that leaves a part of a byte; natively the same bits."""
    rng = np.random.default_rng(count)
    numpy, n = DTYPES[dtype], 33_003
    bounds = np.unique(np.abs(rng.normal(size=count)) if even else rng.normal(size=count)).astype("f4").tolist()
    levels = rng.normal(size=count + 1).astype("f4").tolist()
    x, dy = (rng.normal(size=n).astype(numpy) for _ in range(2))
    x[:3] = [np.nan, np.inf, bounds[0]]
    wide = x.astype("f8" if dtype == "f64" else "f4")
    with np.errstate(all="ignore"):
        above = (np.abs(wide) if even else wide)[:, None] > np.array(bounds, wide.dtype)
    expected = above.sum(1)
    op = SlopeCodes(tuple(bounds), even)
    codes = run(op, x)
    np.testing.assert_array_equal(unpacked(codes, op.bits, n), expected)
    grad = run(SlopeGrad(tuple(levels)), dy, codes)
    product = dy.astype(wide.dtype) * np.array(levels, wide.dtype)[expected]
    assert grad.tobytes() == product.astype(numpy).tobytes()
    assert run(op, x, providers=("numba", "numpy")).tobytes() == codes.tobytes()
    assert run(SlopeGrad(tuple(levels)), dy, codes, providers=("numba", "numpy")).tobytes() == grad.tobytes()


def test_large_ones_run_natively() -> None:
    text = """program p {
      input %x: f32[40000]
      %c: u8[5000] = SlopeCodes(%x) {bounds=[0.0]}
      %y: f32[40000] = SlopeGrad(%x, %c) {levels=[0.25, 1.0]}
      output %y
    }"""
    block = rc.run_passes(rc.parse(text), rc.pipeline("choose-kernels{providers=[numba]}"))
    assert rc.show(block).count("using numba") == 2
    x = np.random.default_rng(0).normal(size=40000).astype("f4")
    assert evaluate(block, {"x": x})[0].tobytes() == np.where(x > 0, x, x * np.float32(0.25)).tobytes()


@pytest.mark.parametrize(
    ("op", "types", "why"),
    [
        (SlopeCodes(()), ["f32[8]"], "1 to 15 bounds"),
        (SlopeCodes(tuple(map(float, range(16)))), ["f32[8]"], "1 to 15 bounds .* not 16"),
        (SlopeCodes((1.0, 0.0)), ["f32[8]"], "bounds must ascend"),
        (SlopeCodes((1.0, 1.0)), ["f32[8]"], "bounds must ascend"),
        (SlopeCodes((float("nan"),)), ["f32[8]"], "finite"),
        (SlopeCodes((0.0,), even=2), ["f32[8]"], "even must be 0 or 1"),
        (SlopeCodes((0.0,)), ["i32[8]"], "floats only"),
        (SlopeGrad((1.0,)), ["f32[8]", "u8[1]"], "2 to 16 levels"),
        (SlopeGrad((0.0, float("inf"))), ["f32[8]", "u8[1]"], "finite"),
        (SlopeGrad((0.0, float("nan"))), ["f32[8]", "u8[1]"], "finite"),
        (SlopeGrad((0.0, 1.0)), ["f32[9]", "u8[1]"], r"9 elements with 1 bits each are u8\[2\]"),
        (SlopeGrad((0.0, 1.0)), ["f32[8]", "i8[1]"], r"are u8\[1\]"),
    ],
)
def test_what_is_refused(op: Op, types: list[str], why: str) -> None:
    with pytest.raises(rc.RecomputeError, match=why) as e:
        op.infer(*map(TensorType.parse, types))
    assert "\n" not in str(e.value)
