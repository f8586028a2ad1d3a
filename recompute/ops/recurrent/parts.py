"""Parts of weights and of sequences, which the fused and the unrolled recurrent operators both work with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...language.contexts import OperatorBuilder
from ...language.types import Value


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
    """Parts under each other."""
    return parts[0] if len(parts) == 1 else b.Concat(*parts, axis=0)
