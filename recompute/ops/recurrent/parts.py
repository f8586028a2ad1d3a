"""Parts of weights, sequences and steps, which the recurrent operators work with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.contexts import OperatorBuilder
from ...language.types import Array, Value


def filled(items: Sequence[Any], count: int) -> list[Any]:
    """`count` items, None for those that are not given."""
    return [*items, *[None] * (count - len(items))]


def row(b: OperatorBuilder, v: Value, i: int) -> Value:
    """v[i]."""
    part = v if v.shape[0] == 1 else b.Slice(v, starts=(i,), ends=(i + 1,), axes=(0,))
    return b.Reshape(part, shape=v.shape[1:])


def cut(b: OperatorBuilder, v: Value, start: int, stop: int, axis: int) -> Value:
    """v[start:stop] along an axis."""
    return b.Slice(v, starts=(start,), ends=(stop,), axes=(axis,))


def joint(b: OperatorBuilder, parts: Sequence[Value]) -> Value:
    """Parts concatenated along axis 0."""
    return parts[0] if len(parts) == 1 else b.Concat(*parts, axis=0)


def logistic(x: Array) -> None:
    """x = 1 / (1 + exp(-x)), in place."""
    np.multiply(x, x.dtype.type(-1), out=x)  # NumPy 2.4's `negative` takes columns 16 bytes apart for contiguous ones
    np.exp(x, out=x)
    np.add(x, x.dtype.type(1), out=x)
    np.divide(x.dtype.type(1), x, out=x)


def times_slope(dy: Array, y: Array, room: Array) -> None:
    """dy *= y · (1 - y), the logistic function's derivative from its result."""
    np.multiply(dy, y, out=dy)
    np.subtract(y.dtype.type(1), y, out=room)
    np.multiply(dy, room, out=dy)


def times_tanh_slope(dy: Array, y: Array, room: Array) -> None:
    """dy *= 1 - y², the hyperbolic tangent's derivative from its result."""
    np.multiply(y, y, out=room)
    np.subtract(y.dtype.type(1), room, out=room)
    np.multiply(dy, room, out=dy)


def column_sums(x: Array, out: Array) -> None:
    """out = Σ over the rows of x."""
    np.sum(x, axis=0, out=out)


def store(target: Array, new: Array, active: Array | None) -> None:
    """target = new, in the rows that are `active` (None: all)."""
    if active is None:
        target[...] = new
    else:
        np.copyto(target, new, where=active[:, None])


def clear(target: Array, active: Array | None) -> None:
    """Zeros in the rows that are not `active` (None: all are), whatever was there."""
    if active is not None:
        np.copyto(target, target.dtype.type(0), where=~active[:, None])
