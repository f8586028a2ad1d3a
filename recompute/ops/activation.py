"""Activations.  Where the gradient can be had from the output, the input is not kept."""

from __future__ import annotations

from dataclasses import dataclass

from .common import Elementwise, Ufunc


@dataclass(frozen=True)
class Relu(Elementwise, onnx=True):
    """max(x, 0)."""

    def compute(self, xp, ins, outs, scratch):
        """One maximum; NaN passes through."""
        xp.maximum(ins[0], ins[0].dtype.type(0), out=outs[0])

    def gradient(self, b, ins, outs, grads):
        """From the output; 0 at the kink, as PyTorch."""
        return [b.ReluGrad(outs[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        """Both sides of the kink."""
        yield draw.case(cls(), draw.away("f64[3,4]"))


@dataclass(frozen=True)
class ReluGrad(Elementwise):
    """(y, dy) → dy where y > 0, else 0."""

    def compute(self, xp, ins, outs, scratch):
        """dy · (y > 0), the mask written into the output first."""
        y, dy = ins
        xp.greater(y, y.dtype.type(0), out=outs[0])
        xp.multiply(outs[0], dy, out=outs[0])

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
class Tanh(Ufunc, onnx=True):
    """Hyperbolic tangent."""

    ufunc = "tanh"
    flops_per_element = 12

    def gradient(self, b, ins, outs, grads):
        """dy · (1 - y²): from the output."""
        return [b.TanhGrad(outs[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        """One matrix."""
        yield draw.case(cls(), draw("f64[3,4]"))


@dataclass(frozen=True)
class TanhGrad(Elementwise):
    """(y, dy) → dy · (1 - y²)."""

    flops_per_element = 3

    def compute(self, xp, ins, outs, scratch):
        """In the output, without temporaries."""
        y, dy = ins
        xp.multiply(y, y, out=outs[0])
        xp.subtract(outs[0].dtype.type(1), outs[0], out=outs[0])
        xp.multiply(outs[0], dy, out=outs[0])

    def expand(self, b, y, dy):
        """The formula."""
        return (b.Mul(dy, b.Sub(b.constant(1, y), b.Mul(y, y))),)

    @classmethod
    def samples(cls, draw):
        """One matrix."""
        yield draw.case(cls(), draw("f64[3,4]"), draw("f64[3,4]"))
