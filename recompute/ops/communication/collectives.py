"""Communication in which all ranks of a group take part with the same operator."""

from __future__ import annotations

import numpy as np

from ...language.types import Operands, TensorType
from .base import Communication, Traffic, doublings, tree_sum


class Collective(Communication, abstract=True):
    """All members of the group have the same operator and the same types."""


class AllReduce(Collective):
    """The sum of all ranks' x, on each of them."""

    sums = True

    def infer(self, x):
        self.check(x)
        return (x,)

    def together(self, ins, outs):
        total = tree_sum(ins)
        for out in outs:
            out[...] = total

    def traffic(self, x: TensorType | None, y: TensorType) -> Traffic:
        """Each part goes to the rank that adds it, and back to all."""
        return Traffic(2 * _shares(y.nbytes, self.ranks), 2 * doublings(self.ranks))

    def gradient(self, b, ins, outs, grads):
        """The sum of what all ranks' losses give."""
        return [self.backward(b, AllReduce, grads[0])]


class ReduceScatter(Collective):
    """The sum of all ranks' x, of which each rank gets the part along axis 0 that its coordinate names."""

    sums = True

    def infer(self, x):
        self.check(x)
        return (x.with_shape(self.blocks(x)),)

    def together(self, ins, outs):
        """Each gets its part of the sum."""
        for part, out in zip(np.split(tree_sum(ins), self.ranks), outs, strict=True):
            out[...] = part

    def traffic(self, x: TensorType | None, y: TensorType) -> Traffic:
        """Each part goes to the rank that adds it."""
        return Traffic(y.nbytes * (self.ranks - 1), doublings(self.ranks))

    def gradient(self, b, ins, outs, grads):
        """Every rank's input has contributed to every part."""
        return [self.backward(b, AllGather, grads[0])]


class AllGather(Collective):
    """All ranks' x behind one another along axis 0, in the order of their coordinates, on each of them.

    `repeat`: it may be repeated, in place of keeping the result (passes/communication/regather.py).
    """

    repeat: bool = False

    def infer(self, x):
        """The values of all ranks behind one another, along axis 0."""
        self.check(x)
        if not x.shape:
            raise self.fail("a number has no axis 0: reshape it to one dimension", x)
        return (x.with_shape((x.shape[0] * self.ranks, *x.shape[1:])),)

    def together(self, ins, outs):
        whole = np.concatenate(ins)
        for out in outs:
            out[...] = whole

    def traffic(self, x: TensorType | None, y: TensorType) -> Traffic:
        """The own part goes to all others."""
        return Traffic(_shares(y.nbytes, self.ranks), doublings(self.ranks))

    def gradient(self, b, ins, outs, grads):
        """Every rank's result has used this rank's part."""
        return [self.backward(b, ReduceScatter, grads[0])]


class AllToAll(Collective):
    """Part j along axis 0 of rank i's x becomes part i of rank j's result."""

    def infer(self, x):
        self.check(x)
        self.blocks(x)
        return (x,)

    def together(self, ins, outs):
        parts = [np.split(x, self.ranks) for x in ins]
        for j, out in enumerate(outs):
            out[...] = np.concatenate([p[j] for p in parts])

    def traffic(self, x: TensorType | None, y: TensorType) -> Traffic:
        """A part to each of the others."""
        return Traffic(_shares(y.nbytes, self.ranks), self.ranks - 1)

    def gradient(self, b, ins, outs, grads):
        """The parts go back where they came from."""
        return [self.backward(b, AllToAll, grads[0])]


class Rooted(Collective, abstract=True):
    """One rank, whose coordinate is `root`, is not like the others."""

    root: int = 0

    def infer(self, x):
        self.check(x)
        if not 0 <= self.root < self.ranks:
            raise self.fail(f"root must be a coordinate from 0 to {self.ranks - 1}, not {self.root}", x)
        return (x,)

    def traffic(self, x: TensorType | None, y: TensorType) -> Traffic:
        """Along a binary tree: one message a level."""
        return Traffic(y.nbytes * doublings(self.ranks), doublings(self.ranks))


class Broadcast(Rooted):
    """The root's x, on each rank; what the others have as x is not used."""

    def together(self, ins, outs):
        for out in outs:
            out[...] = ins[self.root]

    def gradient(self, b, ins, outs, grads):
        """To the root the sum, to the others nothing."""
        return [self.backward(b, Reduce, grads[0], root=self.root)]


class Reduce(Rooted):
    """The sum of all ranks' x on the root, and zeros on the others: what the gradient of `Broadcast` is."""

    sums = True

    def together(self, ins: Operands, outs: Operands) -> None:
        """The sum is where the root is."""
        total = tree_sum(ins)
        for coordinate, out in enumerate(outs):
            out[...] = total if coordinate == self.root else 0

    def gradient(self, b, ins, outs, grads):
        """Each rank's input has contributed to the root's result."""
        return [self.backward(b, Broadcast, grads[0], root=self.root)]


def _shares(nbytes: int, ranks: int) -> int:
    """All but one of `ranks` equal shares of a value, rounded up."""
    return -(-nbytes * (ranks - 1) // ranks)
