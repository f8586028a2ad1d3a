"""Numerics of float16 and bfloat16 in float32, rounded once: matrix products by tiles, other operators whole."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ...language.op import Op
from ...language.types import Array, Operands, TensorType, Types
from ..norm.numerics import wide

C = TypeVar("C", bound=type[Op])

#: rows and columns of a tile of the result; elements of a tile up to which several matrices are multiplied at a time
_SIDE, _STACK = 256, 1 << 15

#: a function that may change a tile of the result, its rows and its columns, before it is rounded
Finish = Callable[[Any, slice, slice], None]


@dataclass(frozen=True)
class HalfProduct:
    """a [..., m, k] · b [..., k, n] with batch dimensions that broadcast (shapes of at least two dimensions)."""

    batch: tuple[int, ...]
    m: int
    k: int
    n: int

    @staticmethod
    def of(a: Sequence[int], b: Sequence[int]) -> HalfProduct:
        """From the shapes of the factors."""
        return HalfProduct(np.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2])), a[-2], a[-1], b[-1])

    @property
    def tile(self) -> tuple[int, int, int]:
        """Matrices, rows and columns of a tile of the result."""
        m, n = min(self.m, _SIDE), min(self.n, _SIDE)
        largest = max(m * self.k, self.k * n, m * n, 1)
        return max(min(self.batch[-1] if self.batch else 1, _STACK // largest), 1), m, n

    def scratch(self) -> tuple[TensorType, ...]:
        """Tiles of a, b and the result."""
        s, m, n = self.tile
        return tuple(TensorType("f32", (s * size,)) for size in (m * self.k, self.k * n, m * n))

    def run(self, a: Array, b: Array, out: Array, scratch: Operands, finish: Finish | None = None) -> None:
        """out = a · b, each tile through `finish`."""
        batch = self.batch or (1,)
        a, b = (np.broadcast_to(v, (*batch, *v.shape[-2:])) for v in (a, b))
        out = out.reshape(*batch, self.m, self.n)
        s, m, n = self.tile
        for outer in itertools.product(*(range(d) for d in batch[:-1])):
            for at in _slices(batch[-1], s):
                for columns in _slices(self.n, n):
                    right = _copied(scratch[1], b[outer][at, :, columns])
                    for rows in _slices(self.m, m):
                        left = _copied(scratch[0], a[outer][at, rows])
                        result = _part(scratch[2], (left.shape[0], left.shape[1], right.shape[2]))
                        np.matmul(left, right, out=result)
                        if finish is not None:
                            finish(result, rows, columns)
                        out[outer][at, rows, columns] = result


def _slices(size: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, size)) for i in range(0, size, step)]


def _part(buffer: Array, shape: tuple[int, ...]) -> Array:
    return buffer[: math.prod(shape)].reshape(shape)


def _copied(buffer: Array, source: Array) -> Array:
    """The source in float32, in the start of a buffer."""
    part = _part(buffer, source.shape)
    part[...] = source
    return part


def halves_in_float32(cls: C) -> C:
    """Wraps an operator's numerics: operands that are halves are copied to float32 scratch, results rounded from it.

    For operators whose state goes from step to step: it is rounded at the end only.
    """
    scratch, compute = cls.scratch, cls.compute

    @functools.wraps(scratch)
    def whole(self: Any, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        copied = [wide(t) for t in (*ins, *outs) if t is not None and wide(t) != t]
        if not copied:
            return scratch(self, ins, outs)
        inputs, outputs = ([None if t is None else wide(t) for t in ts] for ts in (ins, outs))
        return (*copied, *scratch(self, inputs, outputs))

    @functools.wraps(compute)
    def rounded(self: Any, ins: Operands, outs: Operands, temps: Operands) -> None:
        spare = list(temps)
        inputs, outputs = ([spare.pop(0) if _is_half(a) else a for a in arrays] for arrays in (ins, outs))
        for to, a in zip(inputs, ins, strict=True):
            if to is not a:
                to[...] = a
        compute(self, tuple(inputs), tuple(outputs), tuple(spare))
        for a, result in zip(outs, outputs, strict=True):
            if result is not a:
                a[...] = result

    cls.scratch, cls.compute = whole, rounded  # type: ignore[method-assign, assignment]
    return cls


def _is_half(a: Array | None) -> bool:
    return a is not None and a.dtype.kind not in "biu" and a.dtype.itemsize == 2
