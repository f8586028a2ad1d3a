"""TreeSum: a rank's own sum of the parts that it got from all ranks."""

from __future__ import annotations

import numpy as np

from ...language.factors import Factor, Place, factor
from ...language.op import Cost, Op
from ...language.types import Array, Operands, TensorType, Types, need
from ..tiles import TILE
from .base import MAX_RANKS, doublings


class TreeSum(Op):
    """The sum of the `parts` equal parts of x along axis 0, in the fixed binary tree of `base.tree_sum`: neighbours
    first, each addition rounded to the element type.

    What makes sums over ranks independent of the library that moves the data (passes/communication/tree_sums.py).
    """

    linear = ((0,),)
    parts: int

    def infer(self, x):
        if x.dtype == "bool":
            raise self.fail("booleans cannot be added: cast them first", x)
        if not 1 <= self.parts <= MAX_RANKS or not x.shape or x.shape[0] % self.parts:
            raise self.fail(f"axis 0 cannot be divided into {self.parts} parts", x)
        return (x.with_shape((x.shape[0] // self.parts, *x.shape[1:])),)

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...]:
        """Those of a part; all parts are needed, as a sum of some would not be in the tree."""
        y = need(outs[0])
        first = factor(y.shape[0], [Place(0, outer=self.parts)], [0])
        return (first, *(factor(y.shape[a], [a], [a]) for a in range(1, y.ndim)))

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """A tile for each level of the tree that waits for its neighbour."""
        y = need(outs[0])
        levels = doublings(self.parts) - 1
        return (TensorType(y.dtype, (levels, min(y.size, TILE))),) if levels > 0 and y.size else ()

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """Tile by tile, so that what waits stays in the cache."""
        y = outs[0].reshape(-1)
        x = ins[0].reshape((self.parts, y.size))
        for start in range(0, y.size, TILE):
            stop = min(start + TILE, y.size)
            spare = [row[: stop - start] for row in scratch[0]] if scratch else []
            _add_up([x[i, start:stop] for i in range(self.parts)], y[start:stop], spare)

    def expand(self, b, x):
        """Slices, which are views, and additions."""
        rows = x.shape[0] // self.parts
        level = [
            b.Slice(x, starts=(i * rows,), ends=((i + 1) * rows,), axes=(0,)) if self.parts > 1 else b.Identity(x)
            for i in range(self.parts)
        ]
        while len(level) > 1:
            pairs = [b.Add(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
            level = pairs + level[len(pairs) * 2 :]
        return (level[0],)

    def gradient(self, b, ins, outs, grads):
        """Each part gets the whole."""
        x, dy = ins[0], grads[0]
        one = b.Reshape(dy, shape=(1, *dy.shape))
        return [b.Reshape(b.Expand(one, shape=(self.parts, *dy.shape)), shape=x.shape)]

    def cost(self, ins: Types, outs: Types) -> Cost:
        """One addition less than there are parts, for each element."""
        y = need(outs[0])
        return Cost((self.parts - 1) * y.size, super().cost(ins, outs).bytes)

    @classmethod
    def samples(cls, draw):
        """Powers of two and others, one part, matrices, integers, half precision, nothing."""
        for parts in (1, 2, 3, 4, 7):
            yield draw.case(cls(parts), draw(f"f64[{2 * parts},3]"))
        yield draw.case(cls(5), draw("f32[5]"))
        yield draw.case(cls(4), draw("f16[8]"), gradient=False, export=False)
        yield draw.case(cls(3), draw.ints("i64[6]", -9, 9), gradient=False)
        yield draw.case(cls(2), draw("f64[0,3]"))


def _add_up(parts: Operands, out: Array, spare: Operands) -> None:
    """The sum of vectors, into `out`: of the largest power of two that is below their number, and of the rest."""
    if len(parts) == 1:
        out[...] = parts[0]
        return
    half = 1 << doublings(len(parts)) - 1
    if half == 1:
        np.add(parts[0], parts[1], out=out)
        return
    _add_up(parts[:half], out, spare)
    rest = parts[half]
    if len(parts) > half + 1:
        rest = spare[0]
        _add_up(parts[half:], rest, spare[1:])
    np.add(out, rest, out=out)
