"""The unary functions of mathematics, remainder and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from ...language import element
from ...language.factors import all_but
from ...language.op import Case, Draw, Op, OperatorBuilder
from ...language.types import Array, Value, Values
from ..common import Elementwise, Ufunc, define, normal_axis
from ..tiles import Tiled, wide


class Function(Ufunc, abstract=True):
    """A function of one variable; `domain` is where samples are drawn, `slope` the gradient of (b, x, y, dy)."""

    autocast = "full"
    floats = True
    flops_per_element = 12
    domain: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    slope: ClassVar[Callable[[OperatorBuilder, Value, Value, Value], Value]]

    def gradient(self, b: OperatorBuilder, ins: Values, outs: Sequence[Value], grads: Values) -> Values:
        """The gradient that the table below gives."""
        x, dy = ins[0], grads[0]
        assert x is not None and dy is not None
        return [type(self).slope(b, x, outs[0], dy)]

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        for shape in ("2,3", "", "0,2"):
            yield draw.case(cls(), draw(f"f64[{shape}]", *cls.domain))
        yield draw.case(cls(), draw("f32[4]", *cls.domain))


def _plus(b: OperatorBuilder, x: Value) -> Value:
    return b.Add(b.constant(1, x), b.Mul(x, x))


def _less(b: OperatorBuilder, x: Value) -> Value:
    return b.Sub(b.constant(1, x), b.Mul(x, x))


#: a gradient by (b, x, y, dy)
Slope = Callable[[OperatorBuilder, Value, Value, Value], Value]

#: name, ufunc, meaning, operations an element, where samples are drawn, gradient
_FUNCTIONS: list[tuple[str, str, str, int, tuple[float, float], Slope]] = [
    ("Exp", "exp", "e^x.", 8, (-1, 1), lambda b, x, y, dy: b.Mul(dy, y)),
    ("Log", "log", "Natural logarithm.", 8, (0.5, 3), lambda b, x, y, dy: b.LogGrad(x, dy)),
    ("Sqrt", "sqrt", "Square root.", 4, (0.5, 3), lambda b, x, y, dy: b.Div(dy, b.Add(y, y))),
    ("Reciprocal", "reciprocal", "1 / x.", 4, (0.5, 2), lambda b, x, y, dy: b.Neg(b.Mul(dy, b.Mul(y, y)))),
    ("Sin", "sin", "Sine.", 12, (-1, 1), lambda b, x, y, dy: b.Mul(dy, b.Cos(x))),
    ("Cos", "cos", "Cosine.", 12, (-1, 1), lambda b, x, y, dy: b.Neg(b.Mul(dy, b.Sin(x)))),
    ("Tan", "tan", "Tangent.", 12, (-1, 1), lambda b, x, y, dy: b.Mul(dy, _plus(b, y))),
    ("Asin", "arcsin", "Inverse sine.", 12, (-0.8, 0.8), lambda b, x, y, dy: b.Div(dy, b.Sqrt(_less(b, x)))),
    ("Acos", "arccos", "Inverse cosine.", 12, (-0.8, 0.8), lambda b, x, y, dy: b.Neg(b.Div(dy, b.Sqrt(_less(b, x))))),
    ("Atan", "arctan", "Inverse tangent.", 12, (-1, 1), lambda b, x, y, dy: b.Div(dy, _plus(b, x))),
    ("Sinh", "sinh", "Hyperbolic sine.", 12, (-1, 1), lambda b, x, y, dy: b.Mul(dy, b.Cosh(x))),
    ("Cosh", "cosh", "Hyperbolic cosine.", 12, (-1, 1), lambda b, x, y, dy: b.Mul(dy, b.Sinh(x))),
    ("Asinh", "arcsinh", "Inverse hyperbolic sine.", 12, (-1, 1), lambda b, x, y, dy: b.Div(dy, b.Sqrt(_plus(b, x)))),
    ("Acosh", "arccosh", "Inverse hyperbolic cosine, for x ≥ 1.", 12, (1.5, 3),
     lambda b, x, y, dy: b.Div(dy, b.Sqrt(b.Sub(b.Mul(x, x), b.constant(1, x))))),
    ("Atanh", "arctanh", "Inverse hyperbolic tangent, for |x| < 1.", 12, (-0.8, 0.8),
     lambda b, x, y, dy: b.Div(dy, _less(b, x))),
]  # fmt: skip
for _name, _ufunc, _meaning, _flops, _domain, _slope in _FUNCTIONS:
    _own = {"flops_per_element": _flops, "domain": _domain, "slope": staticmethod(_slope)}
    globals()[_name] = define(Function, __name__, _name, _ufunc, _meaning, **_own)
Tanh = define(
    Function, __name__, "Tanh", "tanh", "Hyperbolic tangent.", autocast="follow",
    slope=staticmethod(lambda b, x, y, dy: b.TanhGrad(y, dy)),
)  # fmt: skip


class Abs(Ufunc, onnx=True):
    """|x|."""

    ufunc = "absolute"

    def gradient(self, b, ins, outs, grads):
        """dy · sign x: 0 at 0, as PyTorch."""
        return [b.Mul(grads[0], b.Sign(ins[0]))]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw.away("f64[3,4]"))
        yield draw.case(cls(), draw.ints("i32[5]", -4, 4))


class Step(Ufunc, abstract=True):
    """A function that is constant between jumps: no gradient."""

    def gradient(self, b: OperatorBuilder, ins: Values, outs: Sequence[Value], grads: Values) -> Values:
        """None: it is 0 wherever it exists."""
        return [None]

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        yield draw.case(cls(), draw.away("f64[3,4]", 0.2) * 0.7)
        yield draw.case(cls(), draw.ints("i64[9]", -6, 6).astype("f4") / 2)


Sign = define(Step, __name__, "Sign", "sign", "-1, 0 or 1.", truths=False)
for _name, _ufunc, _meaning in (
    ("Floor", "floor", "The largest whole number that is not above x."),
    ("Ceil", "ceil", "The smallest whole number that is not below x."),
    ("Round", "rint", "The nearest whole number, the even one of two."),
):
    globals()[_name] = define(Step, __name__, _name, _ufunc, _meaning, floats=True)


class Erf(Tiled, onnx=True):
    """The error function 2/√π ∫₀ˣ exp(-t²) dt."""

    flops_per_element = 30

    def element(self, x):
        return element.erf(x)

    def gradient(self, b, ins, outs, grads):
        """dy · 2/√π · exp(-x²)."""
        x = ins[0]
        bell = b.Exp(b.Neg(b.Mul(x, x)))
        return [b.Mul(grads[0], b.Mul(b.constant(2 / math.sqrt(math.pi), x), bell))]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[3,20]", -2.5, 2.5))
        yield draw.case(cls(), draw("f64[]"))
        yield draw.case(cls(), draw("f32[33000]", -5, 5))
        yield draw.case(cls(), draw("f16[5]", -3, 3))


class Mod(Elementwise, onnx=True):
    """The remainder of a / b: with the divisor's sign, or with `fmod=1` the dividend's (as C's fmod)."""

    fmod: int = 0

    takes = 2
    flops_per_element = 8
    truths = False

    def compute(self, ins, outs, scratch):
        (np.fmod if self.fmod else np.remainder)(ins[0], ins[1], out=outs[0])

    def element(self, x, y):
        """fmod, moved to the divisor's side; of integers 0 where the divisor is 0."""
        rest = element.function("fmod")(x, y)
        if self.fmod:
            return rest
        other = ~element.equal(rest, 0) & ((rest < 0) ^ (y < 0))
        moved = element.where(other, rest + y, rest)
        if not x.type.is_float:
            return moved
        signed = element.function("copysign")(element.constant(0, x.dtype), y)
        return element.where(element.equal(y, 0), rest, element.where(element.equal(rest, 0), signed, moved))

    def gradient(self, b, ins, outs, grads):
        """dy, and -dy times the whole quotient."""
        x, y = ins
        whole = b.Round(b.Div(b.Sub(x, outs[0]), y))
        return [b.sum_to(grads[0], x.shape), b.Neg(b.sum_to(b.Mul(grads[0], whole), y.shape))]

    def export(self, g, ins, outs):
        """a - b·⌊a / b⌋ for floats, as ONNX has only the other kind for them."""
        if self.fmod or not g.type(ins[0]).is_float:
            return False
        g.node("Sub", [ins[0], g.call("Mul", g.call("Floor", g.call("Div", *ins)), ins[1])], outs)
        return True

    @classmethod
    def samples(cls, draw):
        """Quotients away from whole numbers; integers of both signs."""
        yield draw.case(cls(fmod=1), draw("f64[3,4]", 2.2, 2.8), draw("f64[4]", 0.98, 1.02))
        yield draw.case(cls(fmod=1), draw("f64[3,4]", -2.8, -2.2), draw("f64[4]", 0.98, 1.02))
        yield draw.case(cls(fmod=0), draw("f64[3,4]", -2.8, -2.2), draw("f64[4]", 0.98, 1.02))
        for fmod in (0, 1):
            yield draw.case(cls(fmod=fmod), draw.ints("i64[9]", -9, 9), draw.ints("i64[9]", 1, 4) * -1)


class Running(Op, abstract=True):
    """The elements up to each one along `axis`, taken together; `exclusive`: without it; `reverse`: from the end."""

    axis: int
    exclusive: int = 0
    reverse: int = 0

    def infer(self, x):
        if not x.ndim:
            raise self.fail("needs at least one dimension", x)
        normal_axis(self.axis, x.ndim, self)
        return (x,)

    def axis_factors(self, ins, outs):
        """All; that along which it runs is needed whole."""
        return all_but(ins, outs, normal_axis(self.axis, ins[0].ndim, self))

    def turned(self, x: Array, total: Array, first: float) -> tuple[Array, Array]:
        """(elements, totals), the axis in front, in the order of the run; an exclusive run has begun with `first`."""
        axis = normal_axis(self.axis, x.ndim, self)
        x, total = np.moveaxis(x, axis, 0), np.moveaxis(total, axis, 0)
        if self.reverse:
            x, total = x[::-1], total[::-1]
        if self.exclusive:
            total[:1] = first
            x, total = x[:-1], total[1:]
        return x, total

    @classmethod
    def from_onnx(cls, node):
        axis = int(node.need_constant(1, "axis").reshape(()))
        options = {k: node.attributes.get(k, 0) for k in ("exclusive", "reverse")}
        return node.emit(cls(axis=axis, **options), node.need(0))


class CumSum(Running):
    """Sums of the elements up to each one along `axis`; `exclusive`: without it; `reverse`: from the end."""

    def scratch(self, ins, outs):
        """float32 sums for the half precisions."""
        x = ins[0]
        return (x.with_dtype("f32"),) if wide(x.dtype) != x.dtype else ()

    def compute(self, ins, outs, scratch):
        x, total = self.turned(ins[0], (*scratch, outs[0])[0], 0)
        if total.size:
            np.cumsum(x, axis=0, dtype=total.dtype, out=total)
        if scratch:
            outs[0][...] = scratch[0]

    def gradient(self, b, ins, outs, grads):
        """The running sum of dy the other way round; nothing is kept."""
        return [b.CumSum(grads[0], axis=self.axis, exclusive=self.exclusive, reverse=1 - self.reverse)]

    def export(self, g, ins, outs):
        """ONNX CumSum, the axis as an input."""
        axis = g.array(np.array(self.axis, np.int64))
        g.node("CumSum", [ins[0], axis], outs, exclusive=self.exclusive, reverse=self.reverse)
        return True

    @classmethod
    def samples(cls, draw):
        for exclusive in (0, 1):
            for reverse in (0, 1):
                op = cls(axis=reverse - 1, exclusive=exclusive, reverse=reverse)
                yield draw.case(op, draw("f64[3,4]"))
        yield draw.case(cls(axis=0, exclusive=1), draw("f64[1,2]"))
        yield draw.case(cls(axis=0), draw.ints("i64[0]", 0, 2))
        yield draw.case(cls(axis=1), draw("f16[2,5]"))
