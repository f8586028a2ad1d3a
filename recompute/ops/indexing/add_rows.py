"""AddRows: a gradient of an embedding on top of another gradient of the same table."""

from __future__ import annotations

import math

import numpy as np

from ...language.op import Op
from .flat import add_rows, check_bounds
from .gather import GatherGrad, as_i64, index_scratch, index_within


class AddRows(Op):
    """(x, indices, dy) → x, and along `axis` the rows of dy added where the indices say, in their order.

    Float32 and float64.  The pass `scatter-gradients` makes it of GatherGrad and Add, which go through all of the table
    three times where a few rows change.
    """

    inplace = (0,)
    axis: int = 0

    def infer(self, x, indices, dy):
        (t,) = GatherGrad(x.shape, self.axis).infer(indices, dy)
        if t != x or x.dtype not in ("f32", "f64"):
            raise self.fail("adds rows of float32 or float64 to a tensor of their type", x, indices, dy)
        return (x,)

    def scratch(self, ins, outs):
        return index_scratch(ins[1])

    def compute(self, ins, outs, scratch):
        """A copy, unless it is there, then one addition for each index.  IndexError where one is out of range."""
        x, indices, dy = ins
        axis, y = self.axis % x.ndim, outs[0]
        size, inner = x.shape[axis], math.prod(x.shape[axis + 1 :])
        check_bounds(indices, size, "AddRows")
        rows = as_i64(indices, scratch).reshape(-1)
        if y is not x:
            np.copyto(y, x)
        outer = math.prod(x.shape[:axis])
        add_rows(y.reshape(outer, size, inner), rows, dy.reshape(outer, rows.size, inner))

    def checks(self, ins, outs):
        return ((1, index_within(ins[0].shape[self.axis])),)

    def gradient(self, b, ins, outs, grads):
        """dy of all of x, and its rows."""
        return [grads[0], None, b.Gather(grads[0], ins[1], axis=self.axis)]

    def expand(self, b, x, indices, dy):
        return (b.Add(x, b.GatherGrad(indices, dy, shape=x.shape, axis=self.axis)),)

    def cost(self, ins, outs):
        """One addition for each element of dy, which is read, and as much of x."""
        base = super().cost(ins, outs)
        return type(base)(ins[2].size, 3 * ins[2].nbytes + ins[1].nbytes)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[4,3]"), draw.ints("i64[2,3]", -4, 4), draw("f64[2,3,3]"))
        yield draw.case(cls(1), draw("f64[2,3,2]"), draw.ints("i32[4]", -3, 3), draw("f64[2,4,2]"))
        yield draw.case(cls(-1), draw("f64[2,3]"), draw.ints("i64[]", 0, 3), draw("f64[2]"))
        yield draw.case(cls(), draw("f32[5,128]"), draw.ints("i64[7]", 0, 5), draw("f32[7,128]"))
