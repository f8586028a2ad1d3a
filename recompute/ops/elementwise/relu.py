"""ReLU and ReLU6, whose gradients need the output only."""

from __future__ import annotations

from ...language.element import maximum
from ..common import Elementwise
from ..tiles import Tiled


class Relu(Elementwise, onnx=True):
    """max(x, 0)."""

    inplace = (0,)

    def element(self, x):
        return maximum(x, 0)

    def gradient(self, b, ins, outs, grads):
        """From the output; 0 at the kink, as PyTorch."""
        return [b.ReluGrad(outs[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw.away("f64[3,4]"))


class ReluGrad(Tiled):
    """(y, dy) → 0 where y ≤ 0, whatever dy is, else dy."""

    def expand(self, b, y, dy):
        zero = b.constant(0, y)
        return (b.Where(b.LessOrEqual(y, zero), zero, dy),)

    def gradient(self, b, ins, outs, grads):
        """Linear in dy; flat in y."""
        return [None, b.ReluGrad(ins[0], grads[0])]

    def export(self, g, ins, outs):
        zero = g.zero(ins[0])
        g.node("Where", [g.call("LessOrEqual", ins[0], zero), zero, ins[1]], outs)
        return True

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw.away("f64[3,4]"), draw("f64[3,4]"))


class Relu6(Elementwise):
    """min(max(x, 0), 6): what Clip with these bounds becomes, since its gradient needs no more than the output."""

    inplace = (0,)
    flops_per_element = 2

    def expand(self, b, x):
        return (b.Clip(x, b.constant(0, x), b.constant(6, x)),)

    def gradient(self, b, ins, outs, grads):
        """From the output; 0 at both kinks, as PyTorch's relu6."""
        return [b.Relu6Grad(outs[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw.distinct("f64[9,20]") + 0.05)


class Relu6Grad(Tiled):
    """(y, dy) → 0 where y ≤ 0 or y ≥ 6, whatever dy is, else dy."""

    flops_per_element = 3

    def expand(self, b, y, dy):
        cut = b.Or(b.LessOrEqual(y, b.constant(0, y)), b.GreaterOrEqual(y, b.constant(6, y)))
        return (b.Where(cut, b.constant(0, dy), dy),)

    def gradient(self, b, ins, outs, grads):
        """Linear in dy; flat in y."""
        return [None, b.Relu6Grad(ins[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw.distinct("f64[9,20]") + 0.05, draw("f64[9,20]"))
