"""Samples of operators: small applications to concrete inputs, which `Op.samples` draws and the tests check."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from .types import Array, TensorType

#: an operator, which this module does not import: `op.Op` names it
O_co = TypeVar("O_co", covariant=True)
Other = TypeVar("Other")


@dataclass(frozen=True)
class Case(Generic[O_co]):
    """One application of an operator to concrete inputs.

    `want`: how many outputs to make (default: all).  `tolerance`: relative and absolute, for gradients in float64.
    `gradient`, `second_order`: whether first and second derivatives are checked.  `export`: whether the sample has a
    form in the opset of exported models that ONNX Runtime's Python interface can run.  `still`: inputs by which there
    is no gradient although the result depends on them.
    """

    op: O_co
    inputs: tuple[Array | None, ...]
    want: int | None = None
    tolerance: float = 1e-6
    gradient: bool = True
    second_order: bool = True
    export: bool = True
    still: tuple[int, ...] = ()


class Draw:
    """Draws sample inputs; the same for the same key."""

    def __init__(self, key: str = "") -> None:
        self.generator = np.random.default_rng(zlib.crc32(key.encode()))

    def __call__(self, text: str, low: float = -1.0, high: float = 1.0) -> Array:
        """Uniform floats in [low, high) of a type such as `f64[2,3]`."""
        t = TensorType.parse(text)
        return self.generator.uniform(low, high, t.shape).astype(t.numpy)

    def away(self, text: str, margin: float = 0.2) -> Array:
        """Floats with margin ≤ |x| < 1: away from a kink at 0."""
        x = self(text)
        return (np.sign(x) * (margin + (1 - margin) * np.abs(x))).astype(x.dtype)

    def distinct(self, text: str) -> Array:
        """Floats that all differ by at least 0.1: away from ties."""
        t = TensorType.parse(text)
        return (self.generator.permutation(t.size).reshape(t.shape) * 0.1 - t.size * 0.05).astype(t.numpy)

    def ints(self, text: str, low: int, high: int) -> Array:
        """Uniform integers in [low, high)."""
        t = TensorType.parse(text)
        return self.generator.integers(low, high, t.shape).astype(t.numpy)

    def bools(self, shape: str) -> Array:
        """Booleans of a shape such as `2,3`."""
        t = TensorType.parse(f"bool[{shape}]")
        return self.generator.random(t.shape) < 0.5

    def case(self, op: Other, *inputs: Array | None, **options: object) -> Case[Other]:
        """A `Case`."""
        return Case(op, inputs, **options)  # type: ignore[arg-type]
