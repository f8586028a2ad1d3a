"""ReLU and ReLU6, whose gradients need the output only."""

from __future__ import annotations

from dataclasses import dataclass

from ...language.element import cast, maximum, minimum
from ..common import Elementwise
from ..tiles import Tiled


@dataclass(frozen=True)
class Relu(Elementwise, onnx=True):
    """max(x, 0)."""

    inplace = (0,)

    def compute(self, xp, ins, outs, scratch):
        """One maximum; NaN passes through."""
        xp.maximum(ins[0], ins[0].dtype.type(0), out=outs[0])

    def element(self, x):
        """A maximum."""
        return maximum(x, 0)

    def gradient(self, b, ins, outs, grads):
        """From the output; 0 at the kink, as PyTorch."""
        return [b.ReluGrad(outs[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        """Both sides of the kink."""
        yield draw.case(cls(), draw.away("f64[3,4]"))


@dataclass(frozen=True)
class ReluGrad(Tiled):
    """(y, dy) → dy where y > 0, else 0."""

    def tile(self, xp, ins, out, *temps):
        """dy · (y > 0), the mask written into the output first."""
        y, dy = ins
        xp.greater(y, y.dtype.type(0), out=out)
        xp.multiply(out, dy, out=out)

    def element(self, y, dy):
        """As the numerics: a product."""
        return cast(y > 0, dy.dtype) * dy

    def gradient(self, b, ins, outs, grads):
        """Linear in dy; flat in y."""
        return [None, b.ReluGrad(ins[0], grads[0])]

    def export(self, g, ins, outs):
        """dy · Cast(y > 0)."""
        mask = g.call("Greater", ins[0], g.zero(ins[0]))
        g.node("Mul", [ins[1], g.cast_like(mask, ins[1])], outs)
        return True

    @classmethod
    def samples(cls, draw):
        """Both sides of the kink."""
        yield draw.case(cls(), draw.away("f64[3,4]"), draw("f64[3,4]"))


@dataclass(frozen=True)
class Relu6(Elementwise):
    """min(max(x, 0), 6): what Clip with these bounds becomes, since its gradient needs no more than the output."""

    inplace = (0,)
    flops_per_element = 2

    def compute(self, xp, ins, outs, scratch):
        """A maximum and a minimum; NaN passes through."""
        kind = ins[0].dtype.type
        xp.maximum(ins[0], kind(0), out=outs[0])
        xp.minimum(outs[0], kind(6), out=outs[0])

    def element(self, x):
        """A maximum and a minimum."""
        return minimum(maximum(x, 0), 6)

    def expand(self, b, x):
        """Clip."""
        return (b.Clip(x, b.constant(0, x), b.constant(6, x)),)

    def gradient(self, b, ins, outs, grads):
        """From the output; 0 at both kinks, as PyTorch's relu6."""
        return [b.Relu6Grad(outs[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        """Below, between and above the kinks."""
        yield draw.case(cls(), draw.distinct("f64[9,20]") + 0.05)


@dataclass(frozen=True)
class Relu6Grad(Tiled):
    """(y, dy) → dy where 0 < y < 6, else 0."""

    flops_per_element = 3
    masks = 1

    def tile(self, xp, ins, out, mask):
        """dy · (y > 0) · (y < 6)."""
        y, dy = ins
        xp.greater(y, y.dtype.type(0), out=out)
        xp.less(y, y.dtype.type(6), out=mask)
        xp.multiply(out, mask, out=out)
        xp.multiply(out, dy, out=out)

    def element(self, y, dy):
        """As the numerics: a product."""
        return cast((y > 0) & (y < 6), dy.dtype) * dy

    def expand(self, b, y, dy):
        """A choice."""
        inside = b.And(b.Greater(y, b.constant(0, y)), b.Less(y, b.constant(6, y)))
        return (b.Where(inside, dy, b.constant(0, dy)),)

    def gradient(self, b, ins, outs, grads):
        """Linear in dy; flat in y."""
        return [None, b.Relu6Grad(ins[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        """Below, between and above the kinks."""
        yield draw.case(cls(), draw.distinct("f64[9,20]") + 0.05, draw("f64[9,20]"))
