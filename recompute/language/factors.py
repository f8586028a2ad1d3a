"""What an operator does along each axis: the indices that its inputs and outputs share, as the letters of an einsum.

A `Factor` is one such index.  An operator can run in slices along it: inputs that carry the index are cut, the others
are read whole; outputs that carry it are slices of the whole results, the others are partial results.  What no factor
names is needed whole.  `Op.axis_factors` gives the factors of an operator, `Op.sliced` the operator of a slice; see
axes.py for their use.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .types import Array, TensorType, Types

#: partial results that are added up, or of which the largest, the smallest or the product is taken, or the logarithm
#: of the sum of exponentials
SUM, MAX, MIN, PROD, LOGSUMEXP = "sum", "max", "min", "prod", "logsumexp"
#: results of which each slice has its own, as batch statistics of micro-batches are: nothing combines them
OWN = "own"


@dataclass(frozen=True)
class Place:
    """Where an index is in a value: `axis` is [outer, the index, inner] in row-major order.

    Both are 1 where the index is the whole axis.  After a Reshape of [batch, steps] to one axis, `batch` is at
    Place(0, inner=steps) and `steps` at Place(0, outer=batch).
    """

    axis: int
    outer: int = 1
    inner: int = 1

    def extent(self, size: int) -> int:
        """The dimension of the axis where the index has `size` values."""
        return self.outer * size * self.inner

    def resized(self, t: TensorType, size: int) -> TensorType:
        """The type with `size` values of the index."""
        return t.with_shape((*t.shape[: self.axis], self.extent(size), *t.shape[self.axis + 1 :]))

    def cut(self, array: Array, size: int, start: int, stop: int) -> Array:
        """The part of an array in which the index, of `size` values, is in [start, stop)."""
        shape = array.shape
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        split = array.reshape((*before, self.outer, size, self.inner, *after))
        taken = split[(*[slice(None)] * (len(before) + 1), slice(start, stop))]
        return taken.reshape((*before, self.extent(stop - start), *after))

    def within(self, whole: Place, size: int, whole_size: int) -> tuple[int, int] | None:
        """How this index, of `size` values, is a part of a coarser one on the same axis.

        (outer, inner) of the coarser index, seen as [outer, this index, inner].  None: it is no part of it.
        """
        if self.axis != whole.axis or self.outer % whole.outer or self.inner % whole.inner:
            return None
        outer, inner = self.outer // whole.outer, self.inner // whole.inner
        return (outer, inner) if outer * size * inner == whole_size else None


@dataclass(frozen=True)
class Factor:
    """One index of an operator: `size` values.

    `inputs`: where the index is in each input (None: nowhere, it is read whole).  `outputs`: where it is in each
    output, or how partial outputs are combined (`SUM`, `MAX`, `MIN`, `PROD`, `LOGSUMEXP`); None for an absent output.
    `shares`: outputs that a slice of n values has to multiply by n / size: those that are divided by a count, as a
    mean over the index is.  `counts`: a field of the operator, if any, that is a multiple of the size, such as a number
    of groups.  `whole`: inputs and outputs share the index, but the operator needs all of it and cannot run in slices;
    so a batch normalisation needs the batch.
    """

    size: int
    inputs: tuple[Place | None, ...]
    outputs: tuple[Place | str | None, ...]
    shares: tuple[int, ...] = ()
    counts: str = ""
    whole: bool = False

    def fitted(self, ins: Types, outs: Types) -> Factor:
        """The same factor with one entry for each input and output, None where one is absent."""

        def fit(places: Sequence[Any], types: Types) -> tuple[Any, ...]:
            pairs = itertools.zip_longest(places[: len(types)], types)
            return tuple(None if t is None else p for p, t in pairs)

        outputs = fit(self.outputs, outs)
        shares = tuple(i for i in self.shares if outputs[i] is not None)
        return dataclasses.replace(self, inputs=fit(self.inputs, ins), outputs=outputs, shares=shares)

    def refined(self, size: int, outer: int, inner: int) -> Factor:
        """The middle one of the three indices [outer, size, inner] that this one consists of."""
        if outer == inner == 1:
            return self

        def finer(p: Any) -> Any:
            return Place(p.axis, p.outer * outer, inner * p.inner) if isinstance(p, Place) else p

        inputs, outputs = (tuple(map(finer, places)) for places in (self.inputs, self.outputs))
        return dataclasses.replace(self, size=size, inputs=inputs, outputs=outputs)

    def types(
        self, size: int, ins: Types, outs: Types
    ) -> tuple[tuple[TensorType | None, ...], tuple[TensorType | None, ...]]:
        """Types of the inputs and outputs of a slice of `size` values; `ins` and `outs` are those of the whole."""

        def one(t: TensorType | None, p: Any) -> TensorType | None:
            return p.resized(t, size) if t is not None and isinstance(p, Place) else t

        return tuple(map(one, ins, self.inputs)), tuple(map(one, outs, self.outputs))


#: a place, given as the number of an axis where the index is a whole axis
Where = Place | int | None


def factor(
    size: int,
    inputs: Iterable[Where],
    outputs: Iterable[Where | str] = (),
    shares: tuple[int, ...] = (),
    counts: str = "",
) -> Factor:
    """A factor; a number stands for a whole axis.  Values at the end that lack the index may be left out."""

    def place(p: Any) -> Any:
        return Place(p) if isinstance(p, int) else p

    return Factor(size, tuple(map(place, inputs)), tuple(map(place, outputs)), shares, counts)


def aligned(ins: Types, outs: Types) -> tuple[Factor, ...]:
    """The factors of an element-wise operator: inputs broadcast to the outputs, which have one shape."""
    shape = next(t.shape for t in outs if t is not None)

    def at(t: TensorType | None, axis: int) -> int | None:
        place = axis - len(shape) + (0 if t is None else t.ndim)
        return place if t is not None and place >= 0 and t.shape[place] == shape[axis] else None

    return tuple(
        factor(d, [at(t, i) for t in ins], [None if t is None else i for t in outs]) for i, d in enumerate(shape)
    )


def in_step(ins: Types, outs: Types, axes: Iterable[int]) -> tuple[Factor, ...]:
    """Factors of axes that are the same in all inputs and outputs, as the rows of a softmax are."""
    first = next(t for t in ins if t is not None)
    return tuple(factor(first.shape[a], [a] * len(ins), [a] * len(outs)) for a in axes)


def own_batch(
    inputs: Iterable[int], ins: Sequence[TensorType], outs: Sequence[TensorType], others: str
) -> Factor | None:
    """The factor of axis 0 for an operator that takes statistics over it, when each slice has statistics of its own.

    `inputs`: the inputs that have the axis, as output 0 has if it has more than one axis; other outputs are `others`.
    """
    x = ins[0]
    if x is None or x.shape[0] < 2:
        return None
    taken = set(inputs)
    axes = [None if t is None else 0 if t.shape == x.shape else others for t in outs]
    return factor(x.shape[0], [0 if i in taken else None for i in range(len(ins))], axes).fitted(ins, outs)


def needed_whole(found: Iterable[Factor]) -> tuple[Factor, ...]:
    """The factors, marked as needed whole: their indices cannot be divided."""
    return tuple(Factor(f.size, f.inputs, tuple(map(_only_place, f.outputs)), whole=True) for f in found)


def _only_place(p: Place | str | None) -> Place | None:
    return p if isinstance(p, Place) else None


def all_but(ins: Types, outs: Types, axis: int) -> tuple[Factor, ...]:
    """Factors of axes that are the same in all inputs and outputs, of which one is needed whole."""
    factors = in_step(ins, outs, range(next(t.ndim for t in ins if t is not None)))
    return (*factors[:axis], *needed_whole(factors[axis : axis + 1]), *factors[axis + 1 :])


def digits(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, Place, Place]]:
    """The indices that two shapes of the same elements share: size, place in `a`, place in `b`.

    Row-major order makes every axis a digit of the element's number; an index of both shapes is a digit that lies
    within one axis of each.
    """
    if 0 in a or 0 in b:
        return []
    borders = sorted({*_strides(a), *_strides(b)})
    numbers = []
    for low, high in itertools.pairwise(borders):
        at_a, at_b = _digit(a, low, high), _digit(b, low, high)
        if at_a is not None and at_b is not None:
            numbers.append((high // low, at_a, at_b))
    return numbers[::-1]


def _strides(shape: Sequence[int]) -> list[int]:
    """Elements below each axis, and all."""
    return [math.prod(shape[i:]) for i in range(len(shape) + 1)]


def _digit(shape: Sequence[int], low: int, high: int) -> Place | None:
    """The place of the digit of an element's number from `low` to `high`, if it lies within one axis."""
    for axis, d in enumerate(shape):
        stride = math.prod(shape[axis + 1 :])
        if d > 1 and stride <= low and high <= stride * d:
            whole = low % stride == 0 and high % low == 0 and stride * d % high == 0
            return Place(axis, stride * d // high, low // stride) if whole else None
    return None


def renumbered(factors: Iterable[Factor], inputs: Any, outputs: Any) -> tuple[Factor, ...]:
    """The factors with other numbers of axes: `inputs(i, axis)` and `outputs(i, axis)` give those of value i."""

    def move(places: Sequence[Any], number: Any) -> tuple[Any, ...]:
        return tuple(
            dataclasses.replace(p, axis=number(i, p.axis)) if isinstance(p, Place) else p for i, p in enumerate(places)
        )

    return tuple(
        dataclasses.replace(f, inputs=move(f.inputs, inputs), outputs=move(f.outputs, outputs)) for f in factors
    )
