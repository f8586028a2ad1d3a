"""Values and gradients at infinities, NaN, zeros, bounds, ties and large numbers beside PyTorch's, in float64.

tests/data/make_extremes.py makes PyTorch's; what differs on purpose is the table of docs/extremes.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recompute.language.builder import Builder
from recompute.language.ir import Block, Value
from recompute.language.types import TensorType
from recompute.passes.gradient.autodiff import differentiate
from recompute.passes.patterns.find_stable import find_stable
from recompute.testing import evaluate

FOLDER = Path(__file__).parents[1]
PAGE = FOLDER.parent / "docs" / "extremes.md"
Code = Callable[..., Any]


def named(name: str, **attributes: Any) -> Code:
    """An operator by its name."""
    return lambda b, *xs: getattr(b, name)(*xs, **attributes)


def clip(b: Any, x: Any, low: float | None = None, high: float | None = None) -> Any:
    return b.Clip(x, *(None if v is None else b.constant(v, x) for v in (low, high)))


def power(e: float) -> Code:
    return lambda b, x: b.Pow(x, b.constant(e, x))


def root(code: Code) -> Code:
    return lambda b, *xs: b.Sqrt(code(b, *xs))


def first(name: str) -> Code:
    """The first column of an operator's result over rows."""
    return lambda b, x: b.Slice(getattr(b, name)(x, axis=1), starts=(0,), ends=(1,), axes=(1,), steps=(1,))


def cross_entropy(label: int) -> Code:
    """As PyTorch's exporter writes it."""

    def code(b: Any, z: Any) -> Any:
        p, one, least = b.Sigmoid(z), b.constant(1, z), b.constant(-100, z)
        return b.Neg(b.Max(b.Log(p if label else b.Add(b.Neg(p), one)), least))

    return code


def largest(name: str) -> Code:
    """`max(dim).values`."""
    return lambda b, x: b.GatherElements(x, getattr(b, name)(x, axis=1), axis=1)


def xlogy(b: Any, x: Any, y: Any) -> Any:
    rest = b.Where(b.IsNaN(y), y, b.Mul(x, b.Log(y)))
    return b.Where(b.Equal(x, b.constant(0, x)), x, rest)


def xlog1py(b: Any, x: Any, y: Any) -> Any:
    zero, one = b.constant(0, x), b.constant(1, x)
    rest = b.Where(b.Equal(x, zero), zero, b.Mul(x, b.Log(b.Add(y, one))))
    return b.Where(b.IsNaN(y), b.constant(math.nan, x), rest)


def angle(b: Any, y: Any, x: Any) -> Any:
    flat, zero, pi = b.Atan(b.Div(y, x)), b.constant(0, x), b.constant(math.pi, x)
    turned = b.Where(b.Greater(y, zero), b.Add(flat, pi), b.Sub(flat, pi))
    found = b.Where(b.Less(x, zero), turned, flat)
    return b.Where(b.IsNaN(found), zero, found)


def deviation(b: Any, x: Any) -> Any:
    c = b.Sub(x, b.ReduceMean(x, axes=(1,)))
    return b.Sqrt(b.Mul(b.ReduceMean(b.Mul(c, c), axes=(1,), keepdims=0), b.constant(1.5, x)))


def norm3(b: Any, x: Any) -> Any:
    return b.Pow(b.ReduceSum(b.Pow(b.Abs(x), b.constant(3, x)), axes=(1,), keepdims=0), b.constant(1 / 3, x))


def layer_norm(b: Any, x: Any) -> Any:
    y = b.LayerNormalization(x, b.fill(1, TensorType("f64", (3,))), None, axis=-1)
    return b.Slice(y, starts=(0,), ends=(1,), axes=(1,), steps=(1,))


def softshrink(b: Any, x: Any) -> Any:
    """As PyTorch's exporter writes it."""
    half, zero = b.constant(0.5, x), b.constant(0, x)
    return b.Where(b.Greater(b.Abs(x), half), b.Sub(x, b.Mul(b.Sign(x), half)), b.Mul(x, zero))


def reduced(name: str) -> Code:
    return named(name, axes=(1,), keepdims=0)


SPECIAL: dict[str, Code] = {
    "Celu": named("Celu", alpha=0.5), "Clip": lambda b, x: clip(b, x, -1, 2),
    "Clip from below": lambda b, x: clip(b, x, 0), "Clip from above": lambda b, x: clip(b, x, None, 1),
    "Expm1": lambda b, x: b.Sub(b.Exp(x), b.constant(1, x)), "Gelu by tanh": named("Gelu", approximate="tanh"),
    "HardSigmoid": named("HardSigmoid", alpha=1 / 6), "LeakyRelu": named("LeakyRelu", alpha=0.0),
    "Log1p": lambda b, x: b.Log(b.Add(b.constant(1, x), x)), "log of Sigmoid": lambda b, x: b.Log(b.Sigmoid(x)),
    "Shrink, hard": named("Shrink"), "Shrink, soft": named("Shrink", bias=0.5),
    "logit": lambda b, x: b.Log(b.Div(x, b.Sub(b.constant(1, x), x))),
    "Sinc": lambda b, x: b.Where(b.Equal(x, b.constant(0, x)), b.constant(1, x), b.Div(b.Sin(x), x)),
    "x ** 0": power(0), "x ** 2": power(2), "x ** 3": power(3), "x ** 0.5": power(0.5), "x ** -1": power(-1),
    "root of Relu": root(named("Relu")), "root of Clip": root(lambda b, x: clip(b, x, 0)),
    "Acos of Clip": lambda b, x: b.Acos(clip(b, x, -1, 1)), "log of Clip": lambda b, x: b.Log(clip(b, x, 0)),
    "root of Relu6": root(named("Relu6")), "root of HardSigmoid": root(named("HardSigmoid", alpha=1 / 6)),
    "root of HardSwish": root(lambda b, x: b.Abs(b.HardSwish(x))), "root of Shrink": root(softshrink),
    "root of ThresholdedRelu": root(named("ThresholdedRelu")), "root of Celu": root(named("Celu")),
    "binary cross entropy of Sigmoid, 0": cross_entropy(0), "binary cross entropy of Sigmoid, 1": cross_entropy(1),
    "root of Where": root(lambda b, x: b.Where(b.Greater(x, b.constant(0, x)), x, b.constant(0, x))),
    "root of Floor": root(named("Floor")), "Atan2": angle, "Mod": named("Mod", fmod=1),
    "LogAddExp": lambda b, x, y: b.Log(b.Add(b.Exp(x), b.Exp(y))), "xlogy": xlogy, "xlog1py": xlog1py,
    "Where": lambda b, x, y: b.Where(b.Less(x, y), x, y), "root of Max": root(lambda b, x, y: b.Max(x, b.Abs(y))),
    "LogSoftmax": first("LogSoftmax"), "Softmax": first("Softmax"), "CumProd": named("CumProd", axis=1),
    "CumSum": named("CumSum", axis=1), "max(dim)": largest("ArgMax"), "min(dim)": largest("ArgMin"), "std": deviation,
    "norm(inf)": lambda b, x: b.ReduceMax(b.Abs(x), axes=(1,)), "norm(3)": norm3,
    "TopK": lambda b, x: b.TopK(x, k=2, axis=1)[0], "root of ReduceMax": root(reduced("ReduceMax")),
    "MaxPool": lambda b, x: b.MaxPool(b.Reshape(x, shape=(x.shape[0], 1, 3)), kernel_shape=(3,)),
    "root of max(dim)": root(largest("ArgMax")), "LayerNormalization": layer_norm,
}  # fmt: skip


@functools.cache
def theirs() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "data" / "extremes.npz") as found:
        return dict(found)


NAMES = sorted({n.rpartition(".")[0] for n in theirs()})


def ours(name: str, xs: list[np.ndarray]) -> list[np.ndarray]:
    """The value, and the gradients of its sum."""
    inputs = [Value(f"x{i}", TensorType.of(a)) for i, a in enumerate(xs)]
    b = Builder()
    for v in inputs:
        b.names.take(v.name)
    code = SPECIAL.get(name) or (reduced(name) if name.startswith("Reduce") else named(name))
    y = b.Identity(code(b, *inputs))
    loss = b.ReduceSum(y, keepdims=0)
    constants, outputs = tuple(b.constants), (y.name, loss.name)
    block = Block("p", tuple(inputs), constants=constants, operators=tuple(b.operators), outputs=outputs)
    found, pairs = differentiate(find_stable(block), loss.name, [v.name for v in inputs])
    grads = {p.name: g.name for p, g in pairs}
    feed = {v.name: a for v, a in zip(inputs, xs, strict=True)}
    names = [y.name, *dict.fromkeys(grads.values())]
    with np.errstate(all="ignore"):
        made = dict(zip(names, evaluate(found, feed, names, providers=()), strict=True))
    return [made[y.name], *(made[grads[v.name]] if v.name in grads else np.zeros(v.shape) for v in inputs)]


def differences(name: str) -> list[tuple[str, ...]]:
    """What differs: operator, "value" or the gradient's name, at which numbers (or rows), PyTorch's, and ours."""
    xs = [theirs()[f"{name}.x{i}"] for i in range(2) if f"{name}.x{i}" in theirs()]
    wanted = [theirs()[f"{name}.y"], *(theirs()[f"{name}.d{i}"] for i in range(len(xs)))]
    rows, unknown = [], np.isnan(wanted[0]).reshape(len(wanted[0]), -1).any(1)
    for what, a, b in zip(("value", "dx", "dy"), wanted, ours(name, xs), strict=False):
        wrong = ~np.isclose(b.reshape(a.shape), a, rtol=1e-6, atol=1e-12, equal_nan=True)
        wrong = wrong.reshape(len(a), -1).any(1)
        if what != "value":
            wrong &= ~unknown  # of what is no number, no gradient says anything
        if wrong.any():
            at = np.flatnonzero(wrong)
            places = [tuple(np.ravel(x[i]) for x in xs) for i in at]
            texts = (["(" + _text(np.concatenate(p)) + ")" for p in places], [_text(a[i]) for i in at])
            cells = [*texts, [_text(b.reshape(a.shape)[i]) for i in at]]
            rows.append((name, what, *("; ".join(dict.fromkeys(c)) for c in cells)))
    return rows


def _text(numbers: Any) -> str:
    return ", ".join(f"{v:g}" for v in np.ravel(numbers))


def table() -> list[tuple[str, ...]]:
    """The rows of the page without their reasons."""
    text = PAGE.read_text(encoding="utf-8").partition("## What differs from PyTorch")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[1:]]
    assert all(len(row) == 6 and row[-1] for row in rows), "a reason is missing"
    return [row[:-1] for row in rows]


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_pytorchs_but_for_the_table(name: str) -> None:
    assert differences(name) == [row for row in table() if row[0] == name]


def test_the_table_names_what_is_compared() -> None:
    assert {row[0] for row in table()} <= set(NAMES)
