"""Pooling over all spatial positions."""

from __future__ import annotations

import math

import numpy as np

from ...language.factors import in_step, needed_whole
from ...language.op import Op
from ..channels_last import channels_last
from ..norm.numerics import wide
from ..reduction.sums import ReduceMean


@channels_last(inputs=(0,), outputs=(0,))
class GlobalAveragePool(Op, onnx=True):
    """The mean over all spatial axes, which become 1."""

    linear = ((0,),)
    autocast = "follow"

    def infer(self, x):
        """[n, c, 1, ...]."""
        if x.ndim < 3 or not x.is_float:
            raise self.fail("needs floats with a spatial axis", x)
        return (x.with_shape((*x.shape[:2], *(1,) * (x.ndim - 2))),)

    def axis_factors(self, ins, outs):
        return in_step(ins, outs, range(2))

    def scratch(self, ins, outs):
        """For 16-bit floats the sums in float32."""
        return (wide(outs[0]),) if wide(outs[0]) != outs[0] else ()

    def compute(self, ins, outs, scratch):
        x = ins[0].reshape(*ins[0].shape[:2], math.prod(ins[0].shape[2:]))
        total = (scratch[0] if scratch else outs[0]).reshape(x.shape[:2])
        np.sum(x, axis=2, dtype=total.dtype, out=total)
        np.divide(total, total.dtype.type(x.shape[2]), out=total)
        if scratch:
            outs[0][...] = scratch[0]

    def cost(self, ins, outs):
        return ReduceMean().cost(ins, outs)

    def gradient(self, b, ins, outs, grads):
        """dy / n repeated; nothing is kept."""
        return ReduceMean(axes=tuple(range(2, ins[0].ndim))).gradient(b, ins, outs, grads)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,3,2,2]"))
        yield draw.case(cls(), draw("f64[2,2,3]"))
        yield draw.case(cls(), draw("f32[1,2,2,1,3]"))
        yield draw.case(cls(), draw("f16[1,2,2,3]"))


@channels_last(inputs=(0,), outputs=(0, 1))
class GlobalMaxPool(Op, onnx=True):
    """The largest element over all spatial axes, which become 1.

    Optional output: its index in x, flat (i64), the first of equal ones.
    """

    autocast = "follow"

    def infer(self, x):
        """[n, c, 1, ...], twice."""
        if x.ndim < 3 or 0 in x.shape[2:]:
            raise self.fail("needs a spatial axis, none empty", x)
        y = x.with_shape((*x.shape[:2], *(1,) * (x.ndim - 2)))
        return (y, y.with_dtype("i64"))

    def axis_factors(self, ins, outs):
        """Images and channels; needed whole where flat indices are wanted, which count through all images."""
        factors = in_step(ins, outs, range(2))
        return factors if outs[1] is None else needed_whole(factors)

    def compute(self, ins, outs, scratch):
        x = ins[0].reshape(ins[0].shape[0], ins[0].shape[1], -1)
        np.max(x, axis=2, out=outs[0].reshape(x.shape[:2]))
        if len(outs) > 1 and outs[1] is not None:
            index = outs[1].reshape(x.shape[:2])
            np.argmax(x, axis=2, out=index)
            for n in range(x.shape[0]):
                index[n] += np.arange(n * x.shape[1], (n + 1) * x.shape[1]) * x.shape[2]

    def gradient(self, b, ins, outs, grads):
        """dy at the index."""
        return [b.GlobalMaxPoolGrad(outs[1], grads[0], shape=ins[0].shape[2:])]

    def export(self, g, ins, outs):
        """Native; the index from MaxPool over everything."""
        if len(outs) < 2 or not outs[1]:
            return False
        g.node("MaxPool", ins, outs, kernel_shape=g.shape(ins[0])[2:])
        return True

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw.distinct("f64[2,3,2,2]"))
        yield draw.case(cls(), draw.distinct("f64[2,2,3]"))
        yield draw.case(cls(), draw("f32[1,2,2,1,3]"), want=1)

    @classmethod
    def from_onnx(cls, node):
        return node.emit(cls(), node.need(0))


@channels_last(inputs=(0, 1), outputs=(0,))
class GlobalMaxPoolGrad(Op):
    """(flat index, dy) → dy at the indices, 0 elsewhere; the result's spatial sizes are `shape`."""

    shape: tuple[int, ...]

    def infer(self, index, dy):
        """[n, c, shape...]."""
        one = math.prod(dy.shape[2:]) == 1
        if index.dtype != "i64" or index.shape != dy.shape or len(self.shape) != dy.ndim - 2 or not one:
            raise self.fail("index and dy do not fit", index, dy)
        return (dy.with_shape((*dy.shape[:2], *self.shape)),)

    def axis_factors(self, ins, outs):
        """Images and channels, needed whole: the indices count through all images."""
        return needed_whole(in_step(ins, outs, range(2)))

    def compute(self, ins, outs, scratch):
        outs[0].fill(0)
        outs[0].reshape(-1)[ins[0].reshape(-1)] = ins[1].reshape(-1)

    def gradient(self, b, ins, outs, grads):
        """The elements at the indices."""
        flat = b.Reshape(grads[0], shape=(grads[0].type.size,))
        return [None, b.Gather(flat, ins[0])]

    def export(self, g, ins, outs):
        dy = g.type(ins[1])
        shape = (*dy.shape[:2], *self.shape)
        zeros = g.call("Expand", g.zero(ins[1]), g.ints([math.prod(shape)]))
        flat = [g.call("Reshape", n, g.ints([-1])) for n in ins]
        g.node("Reshape", [g.call("ScatterElements", zeros, *flat), g.ints(shape)], outs)
        return True

    @classmethod
    def samples(cls, draw):
        places = draw.ints("i64[2,2,1,1]", 0, 6)
        for n in range(4):
            places[n // 2, n % 2] += 6 * n
        yield draw.case(cls(shape=(2, 3)), places, draw("f64[2,2,1,1]"))
        yield draw.case(cls(shape=(2, 3)), places, draw("f32[2,2,1,1]"))
