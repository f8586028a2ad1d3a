"""How a configuration is written down: the node's inputs, its attributes, and PyTorch's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: numbers are multiples of this: float32 and float64 hold them exactly
STEP = 2.0**-16


@dataclass(frozen=True)
class Const:
    """An input that is an initializer: it must be known when the model is read."""

    value: np.ndarray


@dataclass(frozen=True)
class Uniform:
    """An input of floats in [low, high)."""

    shape: tuple[int, ...]
    low: float
    high: float


@dataclass(frozen=True)
class Ints:
    """An input of integers in [low, high)."""

    shape: tuple[int, ...]
    low: int
    high: int


@dataclass(frozen=True)
class Bools:
    """An input of booleans."""

    shape: tuple[int, ...]


def const(*values: Any) -> Const:
    """An initializer of 64-bit integers, one dimension."""
    return Const(np.array(values, np.int64))


def scalar(value: int) -> Const:
    """An initializer of one 64-bit integer without dimensions."""
    return Const(np.array(value, np.int64))


def number(value: float) -> Const:
    """An initializer of one 32-bit float without dimensions."""
    return Const(np.array(value, np.float32))


def floats(*values: Any) -> Const:
    """An initializer of 32-bit floats, one dimension."""
    return Const(np.array(values, np.float32))


def exact(values: Any) -> np.ndarray:
    """An input with these elements: floats become float32."""
    array = np.array(values)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def draw(a: Any, rng: np.random.Generator) -> Any:
    """The array of an input: a tuple is the shape of normally distributed numbers."""
    if a is None or isinstance(a, (Const, np.ndarray)):
        return a
    if isinstance(a, Ints):
        return rng.integers(a.low, a.high, a.shape, dtype=np.int64)
    if isinstance(a, Bools):
        return rng.random(a.shape) < 0.6
    x = rng.uniform(a.low, a.high, a.shape) if isinstance(a, Uniform) else rng.standard_normal(a)
    return np.asarray(np.round(np.asarray(x) / STEP) * STEP, np.float32)


@dataclass(frozen=True)
class Spec:
    """One configuration.  `torch` takes the inputs that are not initializers and gives the outputs in ONNX's order.

    `fixed`: inputs whose gradient is not asked for; `unread`: how many further outputs the node has;
    `chain`: operators behind it, each with the result before it and this node's further inputs.
    """

    name: str
    op: str
    inputs: Sequence[Any]
    torch: Callable[..., Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    opset: int = 21
    fixed: tuple[int, ...] = ()
    unread: int = 0
    chain: tuple[str, ...] = ()

    def wanted(self, feed: dict[str, np.ndarray]) -> list[str]:
        """Names of the inputs whose gradient is asked for."""
        fixed = {f"x{i}" for i in self.fixed}
        return [n for n, a in feed.items() if n.startswith("x") and a.dtype.kind == "f" and n not in fixed]


class Table(list):
    """The configurations of a file."""

    def add(
        self,
        op: str,
        note: str,
        inputs: Sequence[Any],
        torch: Callable[..., Any],
        *,
        opset: int = 21,
        fixed: tuple[int, ...] = (),
        unread: int = 0,
        chain: tuple[str, ...] = (),
        **attributes: Any,
    ) -> None:
        """One more; its name is the operator's with the note."""
        self.append(Spec(f"{op} {note}".strip(), op, inputs, torch, attributes, opset, fixed, unread, chain))
