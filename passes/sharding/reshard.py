"""Values between ranks in other states: whole, cut at a place, partial sums; each change with its bytes.

With n ranks and a whole value of B bytes, a rank sends:

    whole → cut       a slice, no bytes                cut → whole       AllGather, B(n-1)/n
    partial → whole   AllReduce, 2B(n-1)/n             partial → cut     ReduceScatter, B(n-1)/n
    cut → cut at another place                         AllToAll, B(n-1)/n²
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...language.axes import Cut, Partial
from ...language.builder import Builder
from ...language.factors import SUM, Place
from ...language.ir import Value
from ...language.types import TensorType
from ...ops.communication.base import Communication, Numbers, communicated
from ...ops.communication.collectives import AllGather, AllReduce, AllToAll, ReduceScatter
from ..slicing.ranks import REDUCE

#: the state of a value on the ranks of an axis; None: whole, the same on all of them
State = Cut | Partial | None


@dataclass(frozen=True)
class Division:
    """The ranks of the mesh's axis `axis`, of which this is the `rank`-th of `ranks`.

    `order`: how sums over ranks are added, "tree" or "library" (see ops/communication/base.py).
    """

    axis: str
    ranks: int
    rank: int
    order: str = "tree"

    def cut(self, t: TensorType, axis: int, blocks: int = 1) -> Cut | None:
        """An axis that is cut in each of `blocks` equal blocks; None where it cannot be in equal parts."""
        if not 0 <= axis < t.ndim or t.shape[axis] == 0 or t.shape[axis] % (blocks * self.ranks):
            return None
        return Cut(Place(axis, blocks, t.shape[axis] // (blocks * self.ranks)), self.ranks)


def price(nbytes: int, n: int, now: State, then: State) -> float:
    """The bytes that a rank sends to change a value of `nbytes` bytes from one state to another."""
    if now == then or now is None:
        return 0
    share = nbytes * (n - 1) / n
    if isinstance(now, Partial):
        return 2 * share if then is None else share
    return share if then is None or _beside(now, then) else share / n


def local_type(t: TensorType, state: State) -> TensorType:
    """The type of a rank's part of a value of type `t`."""
    return state.place.resized(t, 1) if isinstance(state, Cut) else t


class Reshard:
    """Emits changes of states among the ranks of a division."""

    def __init__(self, b: Builder, how: Division, numbers: Numbers) -> None:
        self.b, self.how, self.numbers = b, how, numbers

    def change(self, x: Value, whole: TensorType, now: State, then: State) -> Value:
        """x, which is in the state `now`, in the state `then`; `whole`: the type of the whole value."""
        if now == then:
            return x
        if now is None:
            return self.sliced(x, then)
        if isinstance(now, Partial):
            return self.summed(x, now, then)
        if then is None:
            return self.gathered(x, whole, now)
        if isinstance(then, Cut) and not _beside(now, then):
            return self.exchanged(x, now, then)
        return self.sliced(self.gathered(x, whole, now), then)

    def sliced(self, x: Value, cut: State) -> Value:
        """This rank's part of a whole value: a view, where the parts are contiguous."""
        assert isinstance(cut, Cut)
        p, rank = cut.place, self.how.rank
        opened = self.opened(x, p, self.how.ranks)
        axis, low = (p.axis + 1, rank) if p.outer > 1 else (p.axis, rank * p.inner)
        high = low + (1 if p.outer > 1 else p.inner)
        part = self.b.Slice(opened, starts=(low,), ends=(high,), axes=(axis,))
        return self.shaped(part, p.resized(x.type, 1))

    def gathered(self, x: Value, whole: TensorType, cut: Cut) -> Value:
        """The whole value from all ranks' parts."""
        p, n = cut.place, self.how.ranks
        lead = (*x.shape[: p.axis], p.outer)
        rest = (p.inner, *x.shape[p.axis + 1 :])
        joined = self.send(AllGather, self.shaped(x, x.type.with_shape((1, *lead, *rest))))
        return self.shaped(self.to_place(joined, len(lead)) if math.prod(lead) > 1 else joined, whole) if n > 1 else x

    def summed(self, x: Value, now: Partial, then: State) -> Value:
        """The sum of all ranks' parts, or this rank's part of it."""
        if now.how != SUM:
            many = self.send(AllGather, self.b.Reshape(x, shape=(1, *x.shape)))
            total = getattr(self.b, REDUCE[now.how])(many, axes=(0,), keepdims=0)
            return total if then is None else self.sliced(total, then)
        if then is None:
            many = self.shaped(x, x.type.with_shape((1, *x.shape)))  # so that x's first axis can run in slices
            return self.shaped(self.send(AllReduce, many), x.type)
        assert isinstance(then, Cut)
        parts = self.to_front(x, then.place)
        return self.shaped(self.send(ReduceScatter, parts), then.place.resized(x.type, 1))

    def exchanged(self, x: Value, now: Cut, then: Cut) -> Value:
        """Parts at another place: part j of this rank's part goes to rank j."""
        p, q = now.place, then.place
        received = self.send(AllToAll, self.to_front(x, q))
        part = q.resized(x.type, 1).shape
        lead, rest = (*part[: p.axis], p.outer), (p.inner, *part[p.axis + 1 :])
        opened = self.shaped(received, x.type.with_shape((self.how.ranks, *lead, *rest)))
        moved = self.to_place(opened, len(lead)) if math.prod(lead) > 1 else opened
        return self.shaped(moved, x.type.with_shape((*part[: p.axis], p.extent(self.how.ranks), *part[p.axis + 1 :])))

    # -- shapes -------------------------------------------------------------------------------------------------------

    def opened(self, x: Value, p: Place, n: int) -> Value:
        """x with an axis of its own for what is outside of the index."""
        if p.outer == 1:
            return x
        return self.b.Reshape(x, shape=(*x.shape[: p.axis], p.outer, n, p.inner, *x.shape[p.axis + 1 :]))

    def to_front(self, x: Value, p: Place) -> Value:
        """[n, all the rest of x] in which axis 0 is the index at `p`."""
        n = self.how.ranks
        lead, rest = (*x.shape[: p.axis], p.outer), (p.inner, *x.shape[p.axis + 1 :])
        if math.prod(lead) == 1:
            return self.shaped(x, x.type.with_shape((n, *lead, *rest)))
        k = len(lead)
        reshaped = self.b.Reshape(x, shape=(*lead, n, *rest))
        return self.b.Transpose(reshaped, perm=(k, *range(k), *range(k + 1, reshaped.ndim)))

    def to_place(self, x: Value, k: int) -> Value:
        """x with axis 0 behind the next k axes."""
        return self.b.Transpose(x, perm=(*range(1, k + 1), 0, *range(k + 1, x.ndim)))

    def shaped(self, x: Value, t: TensorType) -> Value:
        """x in the shape of `t`."""
        return x if x.shape == t.shape else self.b.Reshape(x, shape=t.shape)

    def send(self, kind: type[Communication], x: Value) -> Value:
        """The result of a collective among the ranks."""
        order = self.how.order if kind.sums else "tree"
        op = kind(self.how.axis, self.how.ranks, self.numbers.take(self.how.axis), order=order)
        return communicated(self.b, op, x)


def _beside(a: State, b: State) -> bool:
    """Whether two cuts are of the same axis, so that one part cannot be exchanged for another at once."""
    return isinstance(a, Cut) and isinstance(b, Cut) and a.place.axis == b.place.axis
