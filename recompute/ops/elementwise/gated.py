"""Activations x · gate(x): Gelu, Mish, Swish.  Their gradients are fused functions of x."""

from __future__ import annotations

import math

from ...language.contexts import OperatorBuilder
from ...language.element import Expr, exp, minimum, tanh
from ...language.element import erf as erf_of
from ...language.types import Value
from ..tiles import Tiled
from .piecewise import gradient_samples, unary_samples

_SQRT_HALF = math.sqrt(0.5)
_BELL = 1 / math.sqrt(2 * math.pi)  # the normal density at 0
_GELU_C = math.sqrt(2 / math.pi)
_GELU_A = 0.044715


class Gelu(Tiled, onnx=True):
    """x · Φ(x), Φ the normal distribution; `approximate="tanh"`: Hendrycks & Gimpel's formula with tanh."""

    approximate: str = "none"

    flops_per_element = 35

    def element(self, x):
        inner = _gelu_inner(x) if self.approximate == "tanh" else erf_of(x * _SQRT_HALF)
        return (inner + 1) * x * 0.5

    def expand(self, b, x):
        inner = _tanh_of(b, x) if self.approximate == "tanh" else b.Erf(b.Mul(x, b.constant(_SQRT_HALF, x)))
        return (b.Mul(b.Mul(x, b.constant(0.5, x)), b.Add(b.constant(1, x), inner)),)

    def gradient(self, b, ins, outs, grads):
        return [b.GeluGrad(ins[0], grads[0], approximate=self.approximate)]

    def export(self, g, ins, outs):
        """ONNX's own; its body rounds the constants to f32, so in f64 it is ours."""
        if g.type(ins[0]).dtype != "f64":
            return False
        g.expand(self, ins, outs)
        return True

    @classmethod
    def samples(cls, draw):
        for approximate in ("none", "tanh"):
            yield from unary_samples(cls(approximate=approximate), draw, 2.0)


def _gelu_inner(x: Expr) -> Expr:
    """tanh(√(2/π) (x + a x³))."""
    return tanh((x * x * _GELU_A + 1) * x * _GELU_C)


def _tanh_of(b: OperatorBuilder, x: Value) -> Value:
    cubic = b.Mul(x, b.Add(b.constant(1, x), b.Mul(b.constant(_GELU_A, x), b.Mul(x, x))))
    return b.Tanh(b.Mul(b.constant(_GELU_C, x), cubic))


class GeluGrad(Tiled):
    """(x, dy) → dy times the derivative of Gelu at x."""

    approximate: str = "none"

    flops_per_element = 45

    def element(self, x, dy):
        if self.approximate == "tanh":
            t = _gelu_inner(x)
            steep = (x * x * (3 * _GELU_A) + 1) * x * (_GELU_C / 2)
            return ((1 - t * t) * steep + (t * 0.5 + 0.5)) * dy
        z = x * _SQRT_HALF
        below = (erf_of(z) + 1) * 0.5
        return (below + exp(-(z * z)) * x * _BELL) * dy

    def expand(self, b, x, dy):
        one, half = b.constant(1, x), b.constant(0.5, x)
        if self.approximate == "tanh":
            t = _tanh_of(b, x)
            slope = b.Add(one, b.Mul(b.constant(3 * _GELU_A, x), b.Mul(x, x)))
            steep = b.Mul(b.Sub(one, b.Mul(t, t)), b.Mul(b.Mul(x, b.constant(_GELU_C / 2, x)), slope))
            return (b.Mul(dy, b.Add(b.Mul(half, b.Add(one, t)), steep)),)
        below = b.Mul(half, b.Add(one, b.Erf(b.Mul(x, b.constant(_SQRT_HALF, x)))))
        bell = b.Exp(b.Neg(b.Mul(half, b.Mul(x, x))))
        return (b.Mul(dy, b.Add(below, b.Mul(b.Mul(x, b.constant(_BELL, x)), bell))),)

    @classmethod
    def samples(cls, draw):
        for approximate in ("none", "tanh"):
            yield from gradient_samples(cls(approximate=approximate), draw, 2.0)


class Mish(Tiled, onnx=True):
    """x · tanh(ln(1 + exp x)) (Misra 2019), as x · n / (n + 2) with n = e^x (e^x + 2)."""

    flops_per_element = 16

    def element(self, x):
        e = exp(minimum(x, 20.0 if x.dtype == "f64" else 10.0))
        n = e * (e + 2)
        return n / (n + 2) * x

    def expand(self, b, x):
        return (b.Mul(x, b.Tanh(b.Softplus(x))),)

    def gradient(self, b, ins, outs, grads):
        return [b.MishGrad(ins[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(), draw, 3.0)
        yield draw.case(cls(), draw("f32[9]", -100, 100))


class MishGrad(Tiled):
    """(x, dy) → dy · (w + x · (1 - w²) · sigmoid(x)) with w = tanh(ln(1 + exp x))."""

    flops_per_element = 22

    def element(self, x, dy):
        low = minimum(x, 20.0 if x.dtype == "f64" else 10.0)
        e = exp(low)
        n = e * (e + 2)
        return (4 * (e * (e + 1) * low) / (n + 2) + n) / (n + 2) * dy

    def expand(self, b, x, dy):
        w = b.Tanh(b.Softplus(x))
        steep = b.Mul(b.Sub(b.constant(1, x), b.Mul(w, w)), b.Mul(x, b.Sigmoid(x)))
        return (b.Mul(dy, b.Add(w, steep)),)

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(cls(), draw, 3.0)
        yield draw.case(cls(), draw("f32[9]", -60, 60), draw("f32[9]"))


class Swish(Tiled):
    """x · sigmoid(alpha · x)."""

    alpha: float = 1.0

    flops_per_element = 13

    def element(self, x):
        return x / (1 + exp(x * -self.alpha))

    def expand(self, b, x):
        scaled = x if self.alpha == 1 else b.Mul(x, b.constant(self.alpha, x))
        return (b.Mul(x, b.Sigmoid(scaled)),)

    def gradient(self, b, ins, outs, grads):
        return [b.SwishGrad(ins[0], grads[0], alpha=self.alpha)]

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(), draw, 3.0)
        yield draw.case(cls(alpha=1.5), draw("f64[3,4]"))


class SwishGrad(Tiled):
    """(x, dy) → dy · s · (1 + alpha · x · (1 - s)) with s = sigmoid(alpha · x)."""

    alpha: float = 1.0

    flops_per_element = 17

    def element(self, x, dy):
        s = 1 / (1 + exp(x * -self.alpha))
        return ((1 - s) * (x if self.alpha == 1 else x * self.alpha) + 1) * s * dy

    def expand(self, b, x, dy):
        scaled = x if self.alpha == 1 else b.Mul(x, b.constant(self.alpha, x))
        s = b.Sigmoid(scaled)
        one = b.constant(1, x)
        return (b.Mul(dy, b.Mul(s, b.Add(one, b.Mul(scaled, b.Sub(one, s))))),)

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(cls(), draw, 3.0)
        yield from gradient_samples(cls(alpha=1.5), draw, 2.0)
