"""Where the elements of a value are in another: what reshapes, transposes, slices and broadcasts come to.

A `View` says it by sizes and strides, as NumPy does, in a form that is the same for all ways to write it: dimensions of
one element are left out, and neighbours that lie one after the other are joined.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: a dimension: its size, and how many elements of the base lie between two of its neighbours (0: the same one)
Digit = tuple[int, int]


@dataclass(frozen=True, slots=True)
class View:
    """A value of `shape` whose elements, in row-major order, are those of value `base` at `offset` and so on."""

    base: int
    offset: int
    digits: tuple[Digit, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(base: int, shape: Sequence[int]) -> View:
        """All elements of a value, in order."""
        digits = joined((n, s) for n, s in zip(shape, strides(shape), strict=True) if n != 1)
        return View(base, 0, digits, tuple(shape))

    def bare(self) -> View:
        """The view without the digits of dimensions of which one element is taken: equal for equal values."""
        if all(n > 1 for n, _ in self.digits):
            return self
        return View(self.base, self.offset, joined(d for d in self.digits if d[0] > 1), self.shape)

    def plain(self) -> View:
        """The view without the digits that say which part of a larger axis the elements are."""
        axes = self.axes()
        if axes is None:
            return self.bare()
        return self.at([x for a, d in zip(axes, self.shape, strict=True) for x in a if d == 1 or x[0] > 1], self.shape)

    def at(self, digits: Iterable[Digit], shape: Sequence[int], offset: int = 0) -> View:
        """Other elements of the same base."""
        return View(self.base, self.offset + offset, joined(digits), tuple(shape))

    def reshaped(self, shape: Sequence[int]) -> View:
        """The same elements under another shape."""
        return View(self.base, self.offset, self.digits, tuple(shape))

    def part(self, inner: View) -> View | None:
        """The view `inner` of these elements as if they were dense; None if the result is not evenly strided."""
        sizes = [n for n, _ in self.digits]
        every = list(zip(sizes, strides(sizes), (s for _, s in self.digits), strict=True))
        last = [inner.offset // dense % n for n, dense, _ in every]
        offset, digits = sum(at * s for at, (_, _, s) in zip(last, every, strict=True)), []
        for size, stride in inner.digits:
            low: list[Digit] = []
            while size > 1 or (stride and not low):
                fits = [k for k, (n, d, _) in enumerate(every) if stride and d <= stride < d * n and stride % d == 0]
                if stride and not fits and size == 1:
                    break
                n, dense, s = every[fits[0]] if fits else (0, 1, 0)
                taken = min(size, n * dense // stride) if stride else size
                if not taken or size % taken or taken == 1 < size:
                    return None
                if fits:
                    last[fits[0]] += (taken - 1) * (stride // dense)
                low.append((taken, s * (stride // dense)))
                size, stride = size // taken, stride * taken
            digits += low[::-1]
        if any(at >= n for at, (n, _, _) in zip(last, every, strict=True)):
            return None  # it goes on in the next digit
        return self.at(digits, inner.shape, offset)

    def axes(self) -> list[Sequence[Digit]] | None:
        """The digits of each axis; None where one spans two axes and cannot be split, or there are no elements."""
        result = _axes(self.digits, self.shape)
        return None if result is None else list(result)

    def transposed(self, perm: Sequence[int]) -> View | None:
        """Axes in another order; None where the elements are not evenly apart."""
        axes = self.axes()
        return None if axes is None else self.at([x for p in perm for x in axes[p]], [self.shape[p] for p in perm])

    def sliced(self, axis: int, start: int, size: int, step: int = 1) -> View | None:
        """`size` elements of an axis from `start` on, `step` apart; None where they are not evenly apart."""
        axes = self.axes()
        if axes is None:
            return None
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        if start == 0 and step == 1 and size == self.shape[axis]:
            return self
        (outer, stride), *own = joined(axes[axis]) or ((1, 0),)
        inner = math.prod(n for n, _ in own)
        if start % inner or size % inner or (inner > 1 and step != 1) or outer * inner != self.shape[axis]:
            return None
        axes[axis] = [(size // inner, stride * step), *own]
        return self.at([x for a in axes for x in a], shape, start // inner * stride)

    def expanded(self, shape: Sequence[int]) -> View | None:
        """Broadcast to a shape."""
        if shape == self.shape:
            return self
        axes = self.axes()
        if axes is None:
            return None
        lead = len(shape) - len(self.shape)
        digits: list[Digit] = []
        for i, d in enumerate(shape):
            axis_digits = axes[i - lead] if i >= lead else []
            digits += axis_digits if i >= lead and self.shape[i - lead] == d else [*axis_digits, (d, 0)]
        return self.at(digits, shape)


@functools.lru_cache(maxsize=1 << 16)
def _axes(digits: tuple[Digit, ...], shape: tuple[int, ...]) -> tuple[tuple[Digit, ...], ...] | None:
    if 0 in shape:
        return None
    rest, axes = list(digits), []
    narrow = any(n == 1 for n, _ in rest)
    for at in range(len(shape) - 1, -1, -1):
        need, inner = shape[at], []
        while need > 1:
            size, stride = rest.pop()
            if size == 1:
                inner.append((size, stride))
            elif need % size == 0:
                inner.append((size, stride))
                need //= size
            elif size % need == 0:
                inner.append((need, stride))
                rest.append((size // need, stride * need))
                need = 1
            else:
                return None
        if narrow:
            left = at and shape[at - 1] == 1
            while rest and rest[-1][0] == 1 and not left:  # slices of one element are of an axis of one element
                inner.append(rest.pop())
        axes.append(tuple(inner[::-1]))
    return tuple(axes[::-1])


def strides(shape: Sequence[int]) -> list[int]:
    """The strides of a dense, row-major value, in elements."""
    steps = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        steps[i - 1] = steps[i] * shape[i]
    return steps


def joined(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    """Digits, neighbours that lie one after the other joined.

    One of size 1 stays if it has a stride: it is a slice of one element.
    """
    result: list[Digit] = []
    for size, stride in digits:
        if size == 1 and not stride:
            continue
        if result and 1 not in (size, result[-1][0]) and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return tuple(result)


def aligned(views: Sequence[Sequence[Digit]]) -> list[tuple[int, tuple[int, ...]]] | None:
    """Digits of views of one size, refined to common sizes: (size, the stride in each); None if there are none."""
    first = views[0]
    if all(v == first for v in views[1:]):
        return [(n, (s,) * len(views)) for n, s in first]
    rest = [list(v) for v in views]
    result: list[tuple[int, tuple[int, ...]]] = []
    ones: list[list[int]] = [[] for _ in views]
    places: list[int] = []
    while any(rest):
        for r, digit in zip(rest, ones, strict=True):
            while r and r[-1][0] == 1:  # slices of one element go together in whatever place they are
                digit.append(r.pop()[1])
                if len(digit) > len(places):
                    places.append(len(result))
        if not any(rest):
            break
        if not all(rest):
            return None
        size = math.gcd(*(r[-1][0] for r in rest))
        if size == 1:
            return None
        result.append((size, tuple(r[-1][1] for r in rest)))
        for r in rest:
            last, stride = r.pop()
            if last > size:
                r.append((last // size, stride * size))
    for i in reversed(range(len(places))):
        result.insert(places[i], (1, tuple(digit[i] if i < len(digit) else 0 for digit in ones)))
    return result[::-1]
