"""The table of expressions, and how those by indices are written: the same for whatever layout, and for parts of it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..language.exact import exact
from ..language.factors import SUM
from ..language.ir import Constant, Value
from ..language.types import TensorType
from .views import Digit, View, joined, strides

#: more numbers than any step draws from one stream
STREAM = 1 << 62
#: an index of an expression: its size, and its stride in each operand
Index = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Node:
    """A numbered expression: what it is called, the values that it reads, and what tells it from all others."""

    name: str
    operands: tuple[View, ...]
    shape: tuple[int, ...]
    key: Any


@dataclass(frozen=True)
class Partial:
    """The contribution of slices [start, stop) of an index of `size` to `total`, which is a slice as in `seen`.

    `how` contributions are combined: SUM, MAX and so on (language/factors.py).  `spans`: in order, none of them
    neighbours.
    """

    total: View
    index: Any
    spans: tuple[tuple[int, int], ...]
    size: int
    seen: View | None = field(default=None, compare=False)
    how: str = SUM

    def with_(self, other: Partial) -> Partial | None:
        """The contribution of both, if they are to one total, of slices that do not overlap."""
        spans: list[tuple[int, int]] = []
        for start, stop in sorted((*self.spans, *other.spans)):
            if spans and start < spans[-1][1]:
                return None
            spans[-1:] = [(spans[-1][0], stop)] if spans and start == spans[-1][1] else [*spans[-1:], (start, stop)]
        both = replace(self, spans=tuple(spans))
        return both if both == replace(other, spans=both.spans) else None


@dataclass(frozen=True)
class Wide:
    """The whole expression of which another is a part: its operands and indices, beside the part's.

    `begun`, `ended`: of kept and summed indices that differ, which it is, where the part begins, and its whole size.
    """

    operands: list[View]
    kept: list[Index]
    summed: list[Index]
    whole: list[Index]
    totals: list[Index]
    begun: list[tuple[int, int, int]]
    ended: list[tuple[int, int, int]]
    #: whether operands begin or end at different places of an index
    unlike: bool

    def own_sums(self) -> Wide:
        """This result, wide along the kept indices only."""
        operands, totals = self.operands, list(self.totals)
        for i, start, _ in self.ended:
            at = totals[i][1]
            totals[i] = self.summed[i]
            operands = [
                View(v.base, v.offset + start * s, v.digits, v.shape) for v, s in zip(operands, at, strict=True)
            ]
        return replace(self, operands=operands, totals=totals, ended=[])


class Table:
    """Expressions by number, which all blocks that are compared share.

    `pulls`: division by one number comes last, and means are sums that are divided.  It takes more time.
    """

    def __init__(self, *, pulls: bool = True) -> None:
        self.pulls = pulls
        self.table: dict[Any, int] = {}
        self.nodes: list[Node] = []
        self.sizes: list[int] = []
        self.constants: dict[Constant, View] = {}
        self.partials: dict[int, Partial] = {}
        #: of what was joined: for each part, where it begins and ends, and its elements in the order of the joined ones
        self.joints: dict[int, list[tuple[int, int, View]]] = {}
        #: of values divided by one number: the values, in their order, and the number
        self.quotients: dict[int, tuple[View, View]] = {}
        #: of indices into a part of a table: what they are functions of (rows.py)
        self.parts: dict[tuple[int, int, int], tuple[int, int, int] | None] = {}
        #: of elements that are numbered in another order than they lie in: the value in that order
        self.ordered: dict[int, View] = {}
        #: whether an expression is 0 (rows.py)
        self.zeros: dict[int, bool] = {}
        #: of element-wise expressions over elements that lie one after the other: the operator and its operands
        self.flat: dict[int, tuple[Any, list[View]]] = {}

    def number(self, key: Any, name: str, shape: Sequence[int], operands: Sequence[View] = ()) -> int:
        """The number of an expression, whose elements lie densely in `shape`."""
        node = self.table.get(key)
        if node is None:
            node = self.table[key] = len(self.nodes)
            self.nodes.append(Node(name, tuple(operands), tuple(shape), key))
            self.sizes.append(math.prod(shape))
        return node

    def narrow(self, v: View) -> bool:
        """Whether a view lacks elements of its base."""
        return self.sizes[v.base] != math.prod([n for n, s in v.digits if s])

    def complete(self, v: View) -> bool:
        """Whether a view has all elements of its base, in order."""
        return v.offset == 0 and v.bare().digits == View.whole(v.base, self.nodes[v.base].shape).digits

    def with_ones(self, v: View) -> View:
        """The view with a digit for each dimension of the base of which one element is taken."""
        if not self.narrow(v) or any(n == 1 for n, _ in v.digits):
            return v
        shape = self.nodes[v.base].shape
        runs = [(v.offset % low, n * s, low) for n, s in v.digits if s for low in strides(shape) if low > s]
        if any(n % low if n > low else at + n > low for at, n, low in runs):
            return v  # a run goes on in the next row
        digits = list(v.digits)
        for d, low in zip(shape, strides(shape), strict=True):
            if d > 1 and not any(low <= s < d * low or s < low < n * s for n, s in v.digits):
                digits.insert(next((i for i, (_, s) in enumerate(digits) if s < low), len(digits)), (1, low))
        return View(v.base, v.offset, tuple(digits), v.shape)

    def run_of(self, v: View, inner: View) -> View:
        """The view `inner` of a value's elements in their order; where it is not evenly strided, of a copy of them."""
        if (part := v.part(inner)) is not None:
            return part
        size = math.prod(v.shape)
        base = self.number(("in order", v.base, v.offset, v.bare().digits), "in order", (size,), [v])
        self.ordered.setdefault(base, v.reshaped((size,)))
        return View(base, inner.offset, inner.digits, inner.shape)

    def in_order(self, base: int, v: View) -> bool:
        """Whether a base has the elements of a value in their order."""
        if (copied := self.ordered.get(base)) is None:
            return base == v.base and self.complete(v)
        return copied.bare() == v.reshaped(copied.shape).bare()

    def within(self, v: View) -> View:
        """The view without the digit of a part of a dimension of which all elements in a row are taken."""
        digits = v.digits
        shape = self.nodes[v.base].shape if any(n == 1 for n, _ in digits) else ()
        for d, low in zip(shape, strides(shape), strict=True):
            rows = [n * s for n, s in digits if n > 1 and s == low]
            digits = tuple((n, s) for n, s in digits if n > 1 or not (low < s < d * low and s in rows))
        return View(v.base, v.offset, digits, v.shape)

    def partial(self, part: Partial) -> View:
        """The number of a partial sum; the sum's where it is all of it."""
        if part.spans == ((0, part.size),):
            return part.seen or part.total
        total = part.total
        dims = self.nodes[total.base].shape if self.complete(total) else [n for n, _ in total.digits]
        part = replace(part, total=total.reshaped(dims))
        base = self.number(("partial", part), "partial sum", dims, [part.total])
        self.partials[base] = part
        return View.whole(base, dims).reshaped(total.shape)

    def span(self, v: View, digits: Sequence[Digit], digit: Digit) -> tuple[int, int] | None:
        """Where a digit begins in a dimension of the base, and how many values it could have up to the next digit.

        `digits`: all of the view.  None where they are not evenly apart.
        """
        size, stride = digit
        shape = self.nodes[v.base].shape
        above = [s for n, s in digits if s >= size * stride and s > stride]
        end = 0
        for d, low in zip(reversed(shape), reversed(strides(shape)), strict=True):
            high = d * low
            if not end and d > 1 and (low < size * stride <= high if size > 1 else low <= stride < high):
                end = high
            elif end and not any(low <= s < high for s in above):
                end = high  # of this dimension the view has no digit: what it takes is one element
            elif end:
                break
        end = min([end, *(s for s in above if s < end)])
        return (v.offset // stride % (end // stride), end // stride) if end and end % stride == 0 else None

    def cuts(self, v: View, indices: Sequence[Index], k: int) -> list[Index]:
        """Indices, split where operand `k`, this view, crosses a dimension of its base."""
        shape = self.nodes[v.base].shape
        borders = strides(shape)
        result: list[Index] = []
        for size, at in indices:
            inner: list[Index] = []
            for border in reversed(borders):
                low = at[k]
                if low and low < border < size * low and border % low == 0 and size % (border // low) == 0:
                    n = border // low
                    inner.append((n, at))
                    size, at = size // n, tuple(s * n for s in at)
            result += [(size, at), *inner[::-1]]
        return result

    def declared(self, kind: str, v: Value) -> View:
        """An input, or the contents of a persistent value before the step."""
        return View.whole(self.number((kind, v.name, v.type.placed(host=False)), v.name, v.shape), v.shape)

    def constant(self, c: Constant) -> View:
        """Its elements; one number for all if they are equal."""
        view = self.constants.get(c)
        if view is None:
            t, data = c.value.type, exact(c.data)
            if data and data.count(data[0]) == len(data):
                view = self.filled(t, c.data[0])
            else:
                view = View.whole(self.number(("constant", t, data), c.value.name, t.shape), t.shape)
            self.constants[c] = view
        return view

    def operand(self, base: int, k: int) -> View:
        """Operand `k` of an expression by indices: its element for each of the expression's, in their order."""
        _, operands, ordered, _ = self.nodes[base].key
        source, offset = operands[k]
        return View(source, offset, joined((size, at[k]) for size, at in ordered), (self.sizes[base],))

    def scalar(self, base: int) -> Any:
        """The number that is every element of a constant; None for anything else."""
        key = self.nodes[base].key
        if key[0] != "constant" or not isinstance(key[1], str):
            return None
        return np.frombuffer(key[2], TensorType(key[1], ()).numpy)[0]

    def filled(self, t: TensorType, value: Any) -> View:
        """A value all of whose elements are `value`."""
        x = t.numpy.type(value)
        base = self.number(("constant", t.dtype, x.tobytes()), str(x), ())
        return View.whole(base, ()).at([(t.size, 0)], t.shape) if t.size != 1 else View(base, 0, (), t.shape)

    def stream(self, seed: int, step: View, use: tuple[Any, ...]) -> int:
        """The number of the expression: `use` of each of the random numbers of a seed and a step, in order."""
        return self.number(("stream", use, seed, step.bare()), f"{use[0]} of random numbers", (STREAM,), [step])

    def expression(
        self,
        name: Any,
        operands: Sequence[View],
        kept: Sequence[Index],
        summed: Sequence[Index] = (),
        *,
        first: int = 1,
    ) -> tuple[int, Sequence[int]]:
        """An expression by indices: for each value of `kept`, a function of the operands' elements there.

        Of those at all values of `summed`, where there are any, a symmetric function, such as a sum.  Gives its number,
        the same in whatever order the indices are given, and the stride of each of `kept` in it.  `first`: values of
        an index of its own, outside of these.
        """
        ordered, gone, shape, places = _ordered(tuple(kept), tuple(summed))
        key = (name, tuple([(v.base, v.offset) for v in operands]), ordered, gone)
        return self.number(key, str(name[0]), shape if first == 1 else (first, *shape), operands), places

    def rows(
        self, name: Any, wide: Wide, count: int, before: int, shape: tuple[int, ...]
    ) -> tuple[View, Sequence[int]]:
        """An expression of `count` values for each value of the kept indices, which is the outermost of its own and the
        one behind `before` others in the view; and the stride of each whole index in it."""
        base, places = self.expression(name, wide.operands, wide.whole, wide.totals, first=count)
        digits = [(d, place) for (d, _), place in zip(wide.kept, places, strict=True)]
        digits.insert(before, (count, self.sizes[base] // count if count > 1 else 0))
        return View(base, sum(start * places[i] for i, start, _ in wide.begun), joined(digits), shape), places

    def indexed(
        self,
        name: Any,
        operands: Sequence[View],
        kept: Sequence[Index],
        summed: Sequence[Index] = (),
        shape: tuple[int, ...] = (),
        *,
        how: str = SUM,
    ) -> View:
        """The value of such an expression, with the indices in the order given.

        Of parts of its operands that begin and end at the same values of an index: the part of the whole expression;
        along what is summed only if something says `how` it is made of those of parts, as nothing does of a mean.
        """
        if not any(map(self.narrow, operands)):
            base, places = self.expression(name, operands, kept, summed)
            return View(base, 0, joined([(n, s) for (n, _), s in zip(kept, places, strict=True)]), shape)
        wide = self.widest(name, operands, kept, summed, how=how)
        base, places = self.expression(name, wide.operands, wide.whole, wide.totals)
        offset = sum(start * places[i] for i, start, _ in wide.begun)
        digits = joined((n, s) for (n, _), s in zip(wide.kept, places, strict=True))
        view = View(base, offset, digits, shape)
        for i, start, size in wide.ended:
            stop = start + wide.summed[i][0]
            view = self.partial(Partial(view.bare(), wide.totals[i], ((start, stop),), size, view, how))
        return view

    def widest(
        self, name: Any, operands: Sequence[View], kept: Sequence[Index], summed: Sequence[Index] = (), how: str = SUM
    ) -> Wide:
        """The whole expression of which one by indices is a part.

        A slice of one element may be seen as one of the next larger index, of the next smaller, or of none: all are
        tried, until the whole is an expression that there is.
        """
        first: Wide | None = None
        for some in _ways(kept, summed):
            for common in (False, True):
                wide = self.wider(operands, *some, common=common)
                wide = wide if how else wide.own_sums()
                ordered, gone, _, _ = _ordered(tuple(wide.whole), tuple(wide.totals))
                if (name, tuple([(v.base, v.offset) for v in wide.operands]), ordered, gone) in self.table:
                    return wide
                first = wide if first is None or (first.unlike and not wide.unlike) else first
                if not wide.unlike:
                    break
        assert first is not None
        return first

    def wider(
        self,
        operands: Sequence[View],
        kept: Sequence[Index],
        summed: Sequence[Index],
        fixed: Sequence[Index] = (),
        *,
        common: bool = False,
    ) -> Wide:
        """The expression over indices as wide as operands allow; those in `fixed` stay as they are.

        `common`: also where operands begin or end at different places, as far as all of them go.
        """
        operands, kept, summed = list(operands), list(kept), list(summed)
        cut = [k for k, v in enumerate(operands) if self.narrow(v)]
        for k in cut:
            kept, summed = self.cuts(operands[k], kept, k), self.cuts(operands[k], summed, k)
        digits = [[(n, at[k]) for n, at in (*kept, *summed) if at[k]] for k in range(len(operands))] if cut else []
        spans = [[self.spans(operands, digits, x) if cut else set() for x in some] for some in (kept, summed)]
        begun, ended = (
            [
                (i, before, before + x[0] + behind)
                for i, (some, x) in enumerate(zip(every, among, strict=True))
                if (len(some) == 1 or (some and common)) and x not in fixed
                for before, behind in [(min(a for a, _ in some), min(n - a - x[0] for a, n in some))]
                if before >= 0 and before + behind
            ]
            for every, among in zip(spans, (kept, summed), strict=True)
        )
        unlike = any(len(some) > 1 for every in spans for some in every)
        whole, totals = list(kept), list(summed)
        for some, all_ in ((begun, whole), (ended, totals)):
            for i, start, size in some:
                at = all_[i][1]
                all_[i] = (size, at)
                operands = [
                    View(v.base, v.offset - start * s, v.digits, v.shape) for v, s in zip(operands, at, strict=True)
                ]
        return Wide(operands, kept, summed, whole, totals, begun, ended, unlike)

    def spans(self, operands: Sequence[View], digits: Sequence[Sequence[Digit]], index: Index) -> set[tuple[int, int]]:
        """Where an index begins in the dimensions that it is part of, and their sizes, for operands that have it."""
        size, at = index
        starts = {
            self.span(v, axis, (size, s)) or (-1, 0)
            for v, axis, s in zip(operands, digits, at, strict=True)
            if s and self.nodes[v.base].shape != (STREAM,)
        }
        return {(-1, 0), (0, 0)} if any(not 0 <= start <= whole - size for start, whole in starts) else starts


def _ways(kept: Sequence[Index], summed: Sequence[Index]) -> Iterator[tuple[list[Index], list[Index], Sequence[Index]]]:
    """Indices, and those that are not widened, in ways that come to the same: as they are; without those of one
    element in operands in which they are next to another; with two of one element, of different operands, as one, none
    of one element summed, and some of them not widened."""
    yield list(kept), list(summed), ()
    every, n = [*kept, *summed], len(kept)
    if not any(size == 1 and any(at) for size, at in every):
        return

    def beside(at: tuple[int, ...]) -> Index:
        near = (any(n > 1 and n * other[k] == s for n, other in every) for k, s in enumerate(at))
        return 1, tuple(0 if some else s for s, some in zip(at, near, strict=True))

    fewer = [beside(at) if size == 1 else (size, at) for size, at in every]
    yield fewer[:n], fewer[n:], ()
    if any(size > 1 for size, _ in summed):
        kept = [*(x for x in summed if x[0] == 1 and any(x[1])), *kept]
        summed = [x for x in summed if x[0] > 1 or not any(x[1])]
    ones = [i for i, (size, at) in enumerate(kept) if size == 1 and any(at)][:4]
    pairs = [
        (i, j) for i, j in itertools.combinations(ones, 2)
        if not any(a and b for a, b in zip(kept[i][1], kept[j][1], strict=True))
    ]  # fmt: skip
    beyond = [max((n * at[k] for n, at in (*kept, *summed)), default=0) for k in range(len(every[0][1]))]
    for i in ones:
        at = tuple(a or b for a, b in zip(kept[i][1], beyond, strict=True))
        yield [*kept[:i], (1, at), *kept[i + 1 :]], list(summed), ()
    for i, j in [(0, 0), *pairs]:
        other = list(kept)
        if i != j:
            both = tuple(map(sum, zip(kept[i][1], kept[j][1], strict=True)))
            other[i], other[j] = (1, both), (1, (0,) * len(both))
        for count in range(len(ones) + 1):
            for some in itertools.combinations([other[i] for i in ones], count):
                yield other, list(summed), some
    yield [(size, at if size > 1 else (0,) * len(at)) for size, at in kept], list(summed), ()


@functools.lru_cache(maxsize=1 << 14)
def _ordered(
    kept: tuple[Index, ...], summed: tuple[Index, ...]
) -> tuple[tuple[Index, ...], tuple[Index, ...], tuple[int, ...], tuple[int, ...]]:
    """Indices in an order that does not depend on theirs, the sizes of those kept, and the stride of each of `kept`."""
    inner = [i for i, (size, at) in enumerate(kept) if size > 1 and any(at)]
    order = sorted(inner, key=lambda i: [-s for s in kept[i][1]])
    shape = [kept[i][0] for i in order]
    place = dict(zip(order, strides(shape), strict=True))
    gone = sorted(summed, key=lambda x: [-s for s in x[1]])
    places = tuple([place.get(i, 0) for i in range(len(kept))])
    return merged([kept[i] for i in order]), merged(gone), tuple(shape), places


def merged(indices: Sequence[Index]) -> tuple[Index, ...]:
    """Indices, neighbours joined that lie one after the other in all operands."""
    result: list[Index] = []
    for size, at in indices:
        if size == 1:
            continue
        if result and all(a == size * b for a, b in zip(result[-1][1], at, strict=True)):
            result[-1] = (result[-1][0] * size, at)
        else:
            result.append((size, at))
    return tuple(result)
