"""Activations made of exponentials.  Where the gradient can be had from the output, the input is not kept."""

from __future__ import annotations

from collections.abc import Sequence

from ...language.contexts import OperatorBuilder
from ...language.element import Expr, Formula, exp, expm1, log1p, maximum, minimum
from ...language.types import TensorType, Value, Values
from ..common import Elementwise
from ..tiles import Tiled
from .piecewise import gradient_samples, unary_samples


class Sigmoid(Tiled, onnx=True):
    """1 / (1 + exp(-x))."""

    flops_per_element = 12

    def element(self, x):
        return 1 / (1 + exp(-x))

    def gradient(self, b, ins, outs, grads):
        """dy · y · (1 - y): from the output."""
        return [b.SigmoidGrad(outs[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(), draw, 3.0)
        yield draw.case(cls(), draw("f32[9]", -200, 200))


class SigmoidGrad(Elementwise):
    """(y, dy) → dy · y · (1 - y)."""

    floats = True
    flops_per_element = 3

    def expand(self, b, y, dy):
        return (b.Mul(dy, b.Mul(b.Sub(b.constant(1, y), y), y)),)

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(cls(), draw)


class Unit(Tiled, abstract=True):
    """gain · x where x > 0, else height · (exp(x / width) - 1): Elu and its variations."""

    flops_per_element = 12

    def constants(self) -> tuple[float, float, float]:
        """gain, height, width."""
        raise NotImplementedError

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        if not self.constants()[2]:
            raise self.fail("divides by its alpha, which is 0", *inputs)
        return super().infer(*inputs)

    def element(self, x: Expr) -> Formula:
        gain, height, width = self.constants()
        low = minimum(x, 0)
        low = expm1(low if width == 1 else low / width) * height
        high = maximum(x, 0)
        return (high if gain == 1 else high * gain) + low

    def gradient(self, b: OperatorBuilder, ins: Values, outs: Sequence[Value], grads: Values) -> Values:
        """From the output, where its sign is x's: gain · dy, or dy · (y + height) / width."""
        gain, height, width = self.constants()
        options = {"gain": gain, "height": height, "width": width}
        if gain > 0 and height / width > 0:
            return [b.UnitGrad(outs[0], grads[0], **options)]
        dy, y = grads[0], outs[0]
        low = b.Div(b.Add(y, b.constant(height, y)), b.constant(width, y))
        positive = b.Greater(ins[0], b.constant(0, y))
        return [b.Where(positive, b.Mul(dy, b.constant(gain, y)), b.Mul(dy, low))]


class Elu(Unit, onnx=True):
    """x where x > 0, else alpha · (exp(x) - 1)."""

    alpha: float = 1.0

    def constants(self):
        return 1.0, self.alpha, 1.0

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(alpha=0.5), draw)
        for alpha in (1.0, 0.0, -0.5):
            yield draw.case(cls(alpha=alpha), draw.away("f64[3,4]"))


class Selu(Unit, onnx=True):
    """gamma · Elu(x): self-normalising (Klambauer et al. 2017)."""

    alpha: float = 1.67326319217681884765625
    gamma: float = 1.05070102214813232421875

    def constants(self):
        return self.gamma, self.gamma * self.alpha, 1.0

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(), draw)
        yield draw.case(cls(alpha=0.5, gamma=2.0), draw.away("f64[3,4]"))


class Celu(Unit, onnx=True):
    """max(0, x) + min(0, alpha · (exp(x / alpha) - 1))."""

    alpha: float = 1.0

    def constants(self):
        return 1.0, self.alpha, self.alpha

    def export(self, g, ins, outs):
        """ONNX has it for f32 only; elsewhere the formula."""
        x = ins[0]
        if g.type(x).dtype == "f32":
            return False
        alpha, zero = g.scalar(self.alpha, x), g.zero(x)
        power = g.call("Exp", g.call("Div", g.call("Min", x, zero), alpha))
        low = g.call("Mul", g.call("Sub", power, g.scalar(1, x)), alpha)
        g.node("Add", [g.call("Max", x, zero), low], outs)
        return True

    @classmethod
    def samples(cls, draw):
        for alpha in (1.0, 0.5, -0.5):
            yield draw.case(cls(alpha=alpha), draw.away("f64[3,4]"))


class UnitGrad(Tiled):
    """(y, dy) → gain · dy where y > 0, else dy · (y + height) / width: the gradient of Elu, Selu and Celu."""

    gain: float
    height: float
    width: float

    flops_per_element = 4

    def infer(self, *inputs):
        if not self.width:
            raise self.fail("divides by its width, which is 0", *inputs)
        return super().infer(*inputs)

    def expand(self, b, y, dy):
        low = b.Div(b.Add(y, b.constant(self.height, y)), b.constant(self.width, y))
        high = b.Mul(dy, b.constant(self.gain, dy))
        return (b.Where(b.Greater(y, b.constant(0, y)), high, b.Mul(low, dy)),)

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(cls(gain=1.0, height=1.5, width=1.0), draw)
        yield from gradient_samples(cls(gain=2.0, height=1.5, width=0.5), draw)


class Softplus(Tiled, onnx=True):
    """ln(1 + exp(x)), as max(x, 0) + ln(1 + exp(-|x|))."""

    autocast = "full"
    flops_per_element = 20

    def element(self, x):
        return maximum(x, 0) + log1p(exp(-abs(x)))

    def gradient(self, b, ins, outs, grads):
        """dy · (1 - exp(-y)): from the output."""
        return [b.SoftplusGrad(outs[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(), draw, 3.0)
        yield draw.case(cls(), draw("f32[9]", -200, 200))


class SoftplusGrad(Tiled):
    """(y, dy) → dy · (1 - exp(-y))."""

    flops_per_element = 10

    def element(self, y, dy):
        """Nothing is lost for small y."""
        return -(expm1(-y) * dy)

    def expand(self, b, y, dy):
        return (b.Mul(dy, b.Sub(b.constant(1, y), b.Exp(b.Neg(y)))),)

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(cls(), draw)


class Softsign(Tiled, onnx=True):
    """x / (1 + |x|)."""

    flops_per_element = 5

    def element(self, x):
        return x / (abs(x) + 1)

    def gradient(self, b, ins, outs, grads):
        """dy · (1 - |y|)²: from the output."""
        return [b.SoftsignGrad(outs[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(), draw, 3.0)


class SoftsignGrad(Tiled):
    """(y, dy) → dy · (1 - |y|)²."""

    flops_per_element = 4

    def expand(self, b, y, dy):
        root = b.Sub(b.constant(1, y), b.Abs(y))
        return (b.Mul(dy, b.Mul(root, root)),)

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(cls(), draw)
