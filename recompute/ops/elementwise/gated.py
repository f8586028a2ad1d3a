"""Activations x · gate(x): Gelu, Mish, Swish.  Their gradients are fused functions of x."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...language.contexts import OperatorBuilder
from ...language.element import Expr, exp, minimum, tanh
from ...language.element import erf as erf_of
from ...language.types import Array, NumPy, Value
from ..tiles import ERF_MASKS, ERF_WORK, Tiled, erf
from .piecewise import gradient_samples, unary_samples
from .smooth import sigmoid

_SQRT_HALF = math.sqrt(0.5)
_BELL = 1 / math.sqrt(2 * math.pi)  # the normal density at 0
_GELU_C = math.sqrt(2 / math.pi)
_GELU_A = 0.044715


@dataclass(frozen=True)
class Gelu(Tiled, onnx=True):
    """x · Φ(x), Φ the normal distribution; `approximate="tanh"`: Hendrycks & Gimpel's formula with tanh."""

    approximate: str = "none"

    flops_per_element = 35
    work = ERF_WORK + 1
    masks = ERF_MASKS

    def tile(self, xp, ins, out, temp, *temps):
        """x · (1 + erf or tanh) / 2."""
        x = ins[0]
        if self.approximate == "tanh":
            _gelu_tanh(xp, x, out)
        else:
            xp.multiply(x, _SQRT_HALF, out=temp)
            erf(xp, temp, out, *temps)
        xp.add(out, 1, out=out)
        xp.multiply(out, x, out=out)
        xp.multiply(out, 0.5, out=out)

    def element(self, x):
        """As the numerics."""
        inner = _gelu_inner(x) if self.approximate == "tanh" else erf_of(x * _SQRT_HALF)
        return (inner + 1) * x * 0.5

    def expand(self, b, x):
        """The formula."""
        inner = _tanh_of(b, x) if self.approximate == "tanh" else b.Erf(b.Mul(x, b.constant(_SQRT_HALF, x)))
        return (b.Mul(b.Mul(x, b.constant(0.5, x)), b.Add(b.constant(1, x), inner)),)

    def gradient(self, b, ins, outs, grads):
        """A function of x."""
        return [b.GeluGrad(ins[0], grads[0], approximate=self.approximate)]

    def export(self, g, ins, outs):
        """ONNX's own; its body rounds the constants to f32, so in f64 it is ours."""
        if g.type(ins[0]).dtype != "f64":
            return False
        g.expand(self, ins, outs)
        return True

    @classmethod
    def samples(cls, draw):
        """Both formulas."""
        for approximate in ("none", "tanh"):
            yield from unary_samples(cls(approximate=approximate), draw, 2.0)


def _gelu_tanh(xp: NumPy, x: Array, out: Array) -> None:
    """tanh(√(2/π) (x + a x³))."""
    xp.multiply(x, x, out=out)
    xp.multiply(out, _GELU_A, out=out)
    xp.add(out, 1, out=out)
    xp.multiply(out, x, out=out)
    xp.multiply(out, _GELU_C, out=out)
    xp.tanh(out, out=out)


def _gelu_inner(x: Expr) -> Expr:
    """The same of an element."""
    return tanh((x * x * _GELU_A + 1) * x * _GELU_C)


def _tanh_of(b: OperatorBuilder, x: Value) -> Value:
    cubic = b.Mul(x, b.Add(b.constant(1, x), b.Mul(b.constant(_GELU_A, x), b.Mul(x, x))))
    return b.Tanh(b.Mul(b.constant(_GELU_C, x), cubic))


@dataclass(frozen=True)
class GeluGrad(Tiled):
    """(x, dy) → dy times the derivative of Gelu at x."""

    approximate: str = "none"

    flops_per_element = 45
    work = ERF_WORK + 1
    masks = ERF_MASKS

    def tile(self, xp, ins, out, temp, *temps):
        """By either formula."""
        x, dy = ins
        if self.approximate == "tanh":
            self.tanh_tile(xp, x, out, temp, temps[0])
        else:
            xp.multiply(x, _SQRT_HALF, out=temp)
            erf(xp, temp, out, *temps)
            xp.add(out, 1, out=out)
            xp.multiply(out, 0.5, out=out)
            # + x φ(x)
            xp.multiply(temp, temp, out=temp)
            xp.negative(temp, out=temp)
            xp.exp(temp, out=temp)
            xp.multiply(temp, x, out=temp)
            xp.multiply(temp, _BELL, out=temp)
            xp.add(out, temp, out=out)
        xp.multiply(out, dy, out=out)

    @staticmethod
    def tanh_tile(xp: NumPy, x: Array, out: Array, t: Array, u: Array) -> None:
        """(1 + t)/2 + x (1 - t²)/2 · c (1 + 3 a x²)."""
        _gelu_tanh(xp, x, t)
        xp.multiply(x, x, out=u)
        xp.multiply(u, 3 * _GELU_A, out=u)
        xp.add(u, 1, out=u)
        xp.multiply(u, x, out=u)
        xp.multiply(u, _GELU_C / 2, out=u)
        xp.multiply(t, t, out=out)
        xp.subtract(1, out, out=out)
        xp.multiply(out, u, out=out)
        xp.multiply(t, 0.5, out=t)
        xp.add(t, 0.5, out=t)
        xp.add(out, t, out=out)

    def element(self, x, dy):
        """As the numerics."""
        if self.approximate == "tanh":
            t = _gelu_inner(x)
            steep = (x * x * (3 * _GELU_A) + 1) * x * (_GELU_C / 2)
            return ((1 - t * t) * steep + (t * 0.5 + 0.5)) * dy
        z = x * _SQRT_HALF
        below = (erf_of(z) + 1) * 0.5
        return (below + exp(-(z * z)) * x * _BELL) * dy

    def expand(self, b, x, dy):
        """The formulas."""
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
        """Both formulas."""
        for approximate in ("none", "tanh"):
            yield from gradient_samples(cls(approximate=approximate), draw, 2.0)


@dataclass(frozen=True)
class Mish(Tiled, onnx=True):
    """x · tanh(ln(1 + exp x)) (Misra 2019), as x · n / (n + 2) with n = e^x (e^x + 2)."""

    flops_per_element = 16
    work = 1

    def tile(self, xp, ins, out, n):
        """Without overflow: from the limit on the quotient is 1."""
        xp.minimum(ins[0], _mish_limit(ins[0]), out=n)
        xp.exp(n, out=n)
        xp.add(n, 2, out=out)
        xp.multiply(n, out, out=n)
        xp.add(n, 2, out=out)
        xp.divide(n, out, out=out)
        xp.multiply(out, ins[0], out=out)

    def element(self, x):
        """As the numerics."""
        e = exp(minimum(x, 20.0 if x.dtype == "f64" else 10.0))
        n = e * (e + 2)
        return n / (n + 2) * x

    def expand(self, b, x):
        """The formula."""
        return (b.Mul(x, b.Tanh(b.Softplus(x))),)

    def gradient(self, b, ins, outs, grads):
        """A function of x."""
        return [b.MishGrad(ins[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        """Small and large numbers."""
        yield from unary_samples(cls(), draw, 3.0)
        yield draw.case(cls(), draw("f32[9]", -100, 100))


def _mish_limit(x: Array) -> float:
    """Above this x the quotient n / (n + 2) rounds to 1."""
    return 20.0 if x.dtype.itemsize == 8 else 10.0


@dataclass(frozen=True)
class MishGrad(Tiled):
    """(x, dy) → dy · (w + x · (1 - w²) · sigmoid(x)) with w = tanh(ln(1 + exp x))."""

    flops_per_element = 22
    work = 2

    def tile(self, xp, ins, out, e, n):
        """w = n / (n + 2) and (1 - w²) · sigmoid(x) = 4 e (1 + e) / (n + 2)², with e = exp x, n = e (e + 2)."""
        x, dy = ins
        xp.minimum(x, _mish_limit(x), out=n)
        xp.exp(n, out=e)
        xp.add(e, 1, out=out)
        xp.multiply(out, e, out=out)
        xp.multiply(out, n, out=out)
        xp.multiply(out, 4, out=out)
        xp.add(e, 2, out=n)
        xp.multiply(n, e, out=n)
        xp.add(n, 2, out=e)
        xp.divide(out, e, out=out)
        xp.add(out, n, out=out)
        xp.divide(out, e, out=out)
        xp.multiply(out, dy, out=out)

    def element(self, x, dy):
        """As the numerics."""
        low = minimum(x, 20.0 if x.dtype == "f64" else 10.0)
        e = exp(low)
        n = e * (e + 2)
        return (4 * (e * (e + 1) * low) / (n + 2) + n) / (n + 2) * dy

    def expand(self, b, x, dy):
        """The formula."""
        w = b.Tanh(b.Softplus(x))
        steep = b.Mul(b.Sub(b.constant(1, x), b.Mul(w, w)), b.Mul(x, b.Sigmoid(x)))
        return (b.Mul(dy, b.Add(w, steep)),)

    @classmethod
    def samples(cls, draw):
        """Small and large numbers."""
        yield from gradient_samples(cls(), draw, 3.0)
        yield draw.case(cls(), draw("f32[9]", -60, 60), draw("f32[9]"))


@dataclass(frozen=True)
class Swish(Tiled):
    """x · sigmoid(alpha · x)."""

    alpha: float = 1.0

    flops_per_element = 13

    def tile(self, xp, ins, out):
        """x over 1 + exp(-alpha x)."""
        xp.multiply(ins[0], -self.alpha, out=out)
        xp.exp(out, out=out)
        xp.add(out, 1, out=out)
        xp.divide(ins[0], out, out=out)

    def element(self, x):
        """As the numerics."""
        return x / (1 + exp(x * -self.alpha))

    def expand(self, b, x):
        """The formula."""
        scaled = x if self.alpha == 1 else b.Mul(x, b.constant(self.alpha, x))
        return (b.Mul(x, b.Sigmoid(scaled)),)

    def gradient(self, b, ins, outs, grads):
        """A function of x."""
        return [b.SwishGrad(ins[0], grads[0], alpha=self.alpha)]

    @classmethod
    def samples(cls, draw):
        """Several scales."""
        yield from unary_samples(cls(), draw, 3.0)
        yield draw.case(cls(alpha=1.5), draw("f64[3,4]"))


@dataclass(frozen=True)
class SwishGrad(Tiled):
    """(x, dy) → dy · s · (1 + alpha · x · (1 - s)) with s = sigmoid(alpha · x)."""

    alpha: float = 1.0

    flops_per_element = 17
    work = 1

    def tile(self, xp, ins, out, s):
        """By the formula."""
        x, dy = ins
        sigmoid(xp, x, s, self.alpha)
        xp.subtract(1, s, out=out)
        xp.multiply(out, x, out=out)
        if self.alpha != 1:
            xp.multiply(out, self.alpha, out=out)
        xp.add(out, 1, out=out)
        xp.multiply(out, s, out=out)
        xp.multiply(out, dy, out=out)

    def element(self, x, dy):
        """By the formula."""
        s = 1 / (1 + exp(x * -self.alpha))
        return ((1 - s) * (x if self.alpha == 1 else x * self.alpha) + 1) * s * dy

    def expand(self, b, x, dy):
        """The formula."""
        scaled = x if self.alpha == 1 else b.Mul(x, b.constant(self.alpha, x))
        s = b.Sigmoid(scaled)
        one = b.constant(1, x)
        return (b.Mul(dy, b.Mul(s, b.Add(one, b.Mul(scaled, b.Sub(one, s))))),)

    @classmethod
    def samples(cls, draw):
        """Several scales."""
        yield from gradient_samples(cls(), draw, 3.0)
        yield from gradient_samples(cls(alpha=1.5), draw, 2.0)
