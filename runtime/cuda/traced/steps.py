"""Steps of traced numerics: operations on views of buffers, each one or a few launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....language.types import DTYPES
from ..device.kernel import Buffer, Call, Copy, Fill, Kernel
from . import kernels

#: reductions of at most that many elements are done by a thread; threads that there should be
_SHORT, _THREADS = 32, 1 << 16
#: elements of a reduction that one thread or warp takes at least, where there are few results
_PART = 256


@dataclass(frozen=True)
class View:
    """Elements of a buffer: `base` says of which, `offset` bytes from its beginning on; strides in elements."""

    base: tuple[str, int]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dense(self) -> bool:
        """Whether its elements lie in order, without gaps."""
        return self.size == 0 or kernels.joined(self.shape, [self.strides])[1][0] in ([], [1])

    def span(self) -> tuple[int, int]:
        """The first byte, and the one behind the last."""
        item = DTYPES[self.dtype].itemsize
        reach = [(d - 1) * s * item for d, s in zip(self.shape, self.strides, strict=True)]
        low = self.offset + sum(r for r in reach if r < 0)
        return low, self.offset + sum(r for r in reach if r > 0) + item

    def broadcast(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Strides over a larger shape."""
        missing = len(shape) - len(self.shape)
        given = (1,) * missing + self.shape, (0,) * missing + self.strides
        return tuple(0 if d == 1 else s for d, s in zip(*given, strict=True))


@dataclass(frozen=True)
class Number:
    """An operand that is no array."""

    value: Any
    dtype: str


#: where a view's elements are when the operator is bound
Places = Callable[[View], Buffer]


class Step:
    """One of them."""

    def calls(self, at: Places) -> list[Call]:
        """Launches."""
        raise NotImplementedError


class CannotRecord(Exception):
    """Numerics that are no list of steps."""


def _walk(shape: Sequence[int], steps: Sequence[Sequence[int]]) -> Any:
    dims, found = kernels.joined(shape, steps)
    return kernels.walk(dims, found)


def check_walk(shape: Sequence[int], steps: Sequence[Sequence[int]]) -> None:
    """CannotRecord where there are too many dimensions."""
    if len(kernels.joined(shape, steps)[0]) > kernels.DIMENSIONS:
        raise CannotRecord("too many dimensions")


@dataclass(frozen=True)
class Map(Step):
    """out = function(operands), computed as `kind`, where the mask is set."""

    name: str
    kind: str
    out: View
    operands: tuple[View | Number, ...]
    mask: View | None = None

    def __post_init__(self) -> None:
        check_walk(self.out.shape, self._strides())

    def _strides(self) -> list[tuple[int, ...]]:
        arrays = [x for x in self.operands if isinstance(x, View)] + [x for x in [self.mask] if x]
        return [self.out.strides, *(x.broadcast(self.out.shape) for x in arrays)]

    def calls(self, at: Places) -> list[Call]:
        numbers = tuple(isinstance(x, Number) for x in self.operands)
        k = kernels.elementwise(self.name, self.kind, tuple(x.dtype for x in self.operands), numbers, self.out.dtype,
                                masked=self.mask is not None)  # fmt: skip
        given = [x.value if isinstance(x, Number) else at(x) for x in self.operands]
        mask = [] if self.mask is None else [at(self.mask)]
        return _over(k, self.out, _walk(self.out.shape, self._strides()), at(self.out), *given, *mask)


def _over(k: Kernel, out: View, *args: Any) -> list[Call]:
    return [k(out.size, *args)] if out.size else []


@dataclass(frozen=True)
class Move(Step):
    """Elements copied as they are, where the mask is set; `apart`: the two can never be the same memory."""

    out: View
    x: View
    mask: View | None = None
    apart: bool = True

    def __post_init__(self) -> None:
        check_walk(self.out.shape, self._strides())

    def _strides(self) -> list[tuple[int, ...]]:
        return [self.out.strides, *(v.broadcast(self.out.shape) for v in (self.x, self.mask) if v is not None)]

    def calls(self, at: Places) -> list[Call]:
        """A copy of bytes where that is all."""
        if self.mask is None and self.apart and self.x.shape == self.out.shape and self.x.dense and self.out.dense:
            return [Copy(at(self.out), at(self.x))] if self.out.size else []
        k = kernels.copy(DTYPES[self.out.dtype].itemsize, masked=self.mask is not None)
        mask = [] if self.mask is None else [at(self.mask)]
        return _over(k, self.out, _walk(self.out.shape, self._strides()), at(self.out), at(self.x), *mask)


@dataclass(frozen=True)
class Clear(Step):
    """All bytes are 0."""

    out: View

    def calls(self, at: Places) -> list[Call]:
        return [Fill(at(self.out))] if self.out.size else []


@dataclass(frozen=True)
class Iota(Step):
    """start + Σ index · step · by."""

    out: View
    start: Any
    by: Any
    steps: tuple[int, ...]

    def calls(self, at: Places) -> list[Call]:
        walk = _walk(self.out.shape, [self.out.strides, self.steps])
        return _over(kernels.iota(self.out.dtype), self.out, walk, at(self.out), self.start, self.by)


@dataclass(frozen=True)
class Reduction(Step):
    """Sums over axes of x; `kind`: the element type that it is done in.  `partial`: room for parts (see `parts_of`)."""

    kind: str
    out: View
    x: View
    axes: tuple[int, ...]
    partial: View | None = None

    def __post_init__(self) -> None:
        check_walk(self.out.shape, [self.out.strides])
        check_walk(self.x.shape, [self.x.strides])

    def calls(self, at: Places) -> list[Call]:
        """One launch, or two where each result is made in parts."""
        if not self.out.size:
            return []
        kept = [i for i in range(len(self.x.shape)) if i not in self.axes]
        shape, inner = ([self.x.shape[i] for i in part] for part in (kept, self.axes))
        steps, deep = ([self.x.strides[i] for i in part] for part in (kept, self.axes))
        v = _walk(inner, [deep])
        if self.partial is None:
            return [self._launch(self.x.dtype, self.out.dtype, self.out.size, 1, rowlike(self.x, self.axes),
                                 _walk(shape, [self.out.strides, steps]), v, at(self.out), at(self.x))]  # fmt: skip
        parts, kind = self.partial.shape[1], self.partial.dtype
        flat = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        first = self._launch(self.x.dtype, kind, self.out.size, parts, rowlike(self.x, self.axes),
                             _walk(shape, [flat, steps]), v, at(self.partial), at(self.x))  # fmt: skip
        second = self._launch(kind, self.out.dtype, self.out.size, 1, parts > _SHORT,
                              _walk(shape, [self.out.strides, [parts * f for f in flat]]), _walk([parts], [[1]]),
                              at(self.out), at(self.partial))  # fmt: skip
        return [first, second]

    def _launch(self, dtype: str, out: str, size: int, parts: int, warp: bool, w: Any, v: Any, *b: Any) -> Any:
        k = kernels.reduction(dtype, self.kind if dtype == self.x.dtype else dtype, out, warp=warp)
        return k(size * parts * (32 if warp else 1), w, v, *b, parts)


def rowlike(x: View, axes: Sequence[int]) -> bool:
    """Whether neighbours are of the same result, and many: a warp reads them together."""
    if math.prod(x.shape[a] for a in axes) <= _SHORT:
        return False
    near = [(abs(s), i in axes) for i, (s, d) in enumerate(zip(x.strides, x.shape, strict=True)) if d > 1 and s]
    return bool(near) and min(near)[1]


def parts_of(x: View, axes: Sequence[int], results: int) -> int:
    """In how many parts each result of a reduction is made; depends on the types only."""
    length = math.prod(x.shape[a] for a in axes)
    lanes = 32 if rowlike(x, axes) else 1
    wanted = _THREADS // max(results * lanes, 1)
    parts = min(wanted, length // (_PART * lanes), 1024)
    return parts if parts > 1 else 1


def _rows(x: View, axis: int) -> tuple[list[int], list[int]]:
    """Shape and strides of all but one axis."""
    kept = [i for i in range(len(x.shape)) if i != axis]
    return [x.shape[i] for i in kept], [x.strides[i] for i in kept]


@dataclass(frozen=True)
class PlaceOf(Step):
    """argmax along an axis; `out` has not that axis."""

    out: View
    x: View
    axis: int

    def calls(self, at: Places) -> list[Call]:
        shape, steps = _rows(self.x, self.axis)
        walk = _walk(shape, [self.out.strides, steps])
        k = kernels.place_of(self.x.dtype, self.out.dtype)
        return _over(k, self.out, walk, at(self.out), at(self.x), self.x.shape[self.axis], self.x.strides[self.axis])


@dataclass(frozen=True)
class Scan(Step):
    """cumsum, cumprod along an axis."""

    fn: str
    out: View
    x: View
    axis: int

    def calls(self, at: Places) -> list[Call]:
        shape, steps = _rows(self.x, self.axis)
        walk = _walk(shape, [_rows(self.out, self.axis)[1], steps])
        k = kernels.scan(self.fn, self.x.dtype, self.out.dtype)
        last = self.x.shape[self.axis], self.out.strides[self.axis], self.x.strides[self.axis]
        return [k(math.prod(shape), walk, at(self.out), at(self.x), *last)] if self.out.size else []


@dataclass(frozen=True)
class Sort(Step):
    """argsort along an axis, stable."""

    out: View
    x: View
    axis: int

    def calls(self, at: Places) -> list[Call]:
        a, n = self.axis, self.x.shape[self.axis]
        out, x = ([0 if i == a else s for i, s in enumerate(v.strides)] for v in (self.out, self.x))
        walk = _walk(self.x.shape, [out, x, [int(i == a) for i in range(len(x))]])
        k = kernels.argsort(self.x.dtype, self.out.dtype)
        return _over(k, self.out, walk, at(self.out), at(self.x), n, self.out.strides[a], self.x.strides[a])


@dataclass(frozen=True)
class Take(Step):
    """Elements of x at places along one dimension of it; `strides`: those of out, x without it, and the indices."""

    out: View
    x: View
    index: View
    strides: tuple[tuple[int, ...], ...]
    size: int
    step: int
    mode: int

    def __post_init__(self) -> None:
        check_walk(self.out.shape, self.strides)

    def calls(self, at: Places) -> list[Call]:
        k = kernels.take(DTYPES[self.x.dtype].itemsize, self.index.dtype)
        walk = _walk(self.out.shape, self.strides)
        return _over(k, self.out, walk, at(self.out), at(self.x), at(self.index), self.size, self.step, self.mode)


@dataclass(frozen=True)
class Put(Step):
    """out[..., index[j], ...] += x[..., j, ...] along an axis of both, in the order of j."""

    out: View
    x: View
    index: View
    axis: int

    def __post_init__(self) -> None:
        check_walk(self.x.shape, [self.x.strides])

    def calls(self, at: Places) -> list[Call]:
        shape, steps = _rows(self.x, self.axis)
        walk = _walk(shape, [_rows(self.out, self.axis)[1], steps])
        k = kernels.put(self.out.dtype, self.index.dtype)
        last = self.x.shape[self.axis], self.out.shape[self.axis], self.out.strides[self.axis]
        args = (at(self.out), at(self.x), at(self.index), *last, self.x.strides[self.axis], self.index.strides[0])
        return [k(math.prod(shape), walk, *args)] if self.x.size and self.out.size else []
