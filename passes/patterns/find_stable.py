"""Formulas that overflow or cancel, written with the operators that do not; exporters write them, and so do people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal

from ...language.ir import Block, Value
from ...ops.elementwise.stable import BCE_BOUND
from ..base import Pass
from ..matching.graph import result
from ..matching.pattern import Match, Pattern, any_of, match, number, op, through
from ..matching.rewrite import Rule, rewritten

#: by how much π may be rounded (to half precision), and the product of an exponent and its inverse
_ROUNDED = 1e-3
#: digits of logarithms, whatever this thread asks of its decimal numbers
_DIGITS = Context(prec=40, traps=[])


class FindStable(Pass):
    """Replace formulas by operators that are right for large and small numbers, too.

    For the forward pass; `load` runs it.  Found are the logarithm of a sigmoid, of a softmax and of sums of
    exponentials, log(1 + x), exp(x) - 1, sigmoid and softmax of exponentials, sin(x) / x, the angle made of
    atan(y / x), x · log(y) that is 0 with x, binary cross entropy of a sigmoid, and roots of deviations and norms.
    What they replace stays for its other readers, until `dead-code`.
    """

    refuses = ("gradients",)

    def run(self, block: Block) -> Block:
        return find_stable(block)


def find_stable(block: Block) -> Block:
    """The block with stable operators; every value keeps its name."""
    return rewritten(block, _RULES)


def _axis(axes: Sequence[int] | None, x: Value, reduced: Value) -> int | None:
    """The axis of a reduction of x that keeps it with size 1, where it is one."""
    axes = tuple(range(x.ndim)) if axes is None else axes
    return axes[0] if len(axes) == 1 and reduced.ndim == x.ndim else None


def _log_of_rest(m: Match) -> Value | None:
    """ln(1 - x), ln(1 - σ(x)); not where it is cut off and saturation has no gradient."""
    inner = match(op.Sigmoid("x"), m.graph, m.x)
    if inner is None:
        return m.b.Log1p(m.b.Neg(m.x))
    cut_off = op["Clip", "Max"](..., -BCE_BOUND, ...)
    if any(match(cut_off, m.graph, result(r)) is not None for r in m.graph.readers(result(m.op))):
        return None
    return m.b.Neg(m.b.Softplus(inner["x"]))


def _log_of_two(m: Match) -> Value | None:
    """ln(p^x + q^y), where a base is e or any constant above 0."""
    if not m.x.dtype == m.y.dtype == result(m.op).dtype:
        return None
    bases = m.names.get("p"), m.names.get("q")
    powers = [  # logarithms rounded once: C libraries differ in the last bit
        x if c is None else m.b.Mul(x, m.b.constant(float(Decimal(c).ln(_DIGITS)), x))
        for x, c in zip((m.x, m.y), bases, strict=True)
    ]
    return m.b.LogAddExp(*powers)


def _log_softmax(m: Match) -> Value | None:
    """x - ln Σ e^x."""
    axis = _axis(m.axes, m.x, m.total)
    return None if axis is None else m.b.LogSoftmax(m.x, axis=axis)


def _softmax(m: Match) -> Value | None:
    """e^x / Σ e^x; what is subtracted from x to keep it small is taken away."""
    axis = _axis(m.axes, m.x, m.total)
    if axis is None:
        return None
    largest = op.ReduceMax("x", axes="axes").named("largest")
    shifted = match(op.Sub("x", through(("Detach",), largest)), m.graph, m.x)
    plain = shifted is not None and _axis(shifted["axes"], shifted["x"], shifted["largest"]) == axis
    return m.b.Softmax(shifted["x"] if plain and shifted is not None else m.x, axis=axis)


def _product_with_log(m: Match) -> Value | None:
    """x · ln y, 0 where x = 0, NaN where y is: PyTorch's xlogy and, nested the other way, xlog1py."""
    b, x, log = m.b, m.x, m.graph.producer(m.log)
    assert log is not None
    least, neutral = (b.constant(c, x) for c in ((0, 1) if log.op.name == "Log" else (-1, 0)))
    far = b.Or(b.LessOrEqual(m.y, least), b.Equal(m.y, b.constant(math.inf, x)))
    safe = b.Where(b.And(b.Equal(x, b.constant(0, x)), far), neutral, m.y)
    return b.Mul(x, b.emit(log.op, safe))


def _root(m: Match) -> Value | None:
    """A root that is 0 at 0 and has no gradient there."""
    b, x, out = m.b, m.op.inputs[0], result(m.op)
    zero, one = b.constant(0, out), b.constant(1, out)
    none = b.Equal(x, zero)
    return b.Where(none, zero, b.emit(m.op.op, b.Where(none, one, x), *m.op.inputs[1:]))


def _norm(m: Match) -> Value | None:
    """(Σ |x|^p)^(1/p): no gradient where it is 0, as PyTorch's norm."""
    return _root(m) if abs(m.e * m.p - 1) < _ROUNDED else None


def _power(x: str, base: str) -> Pattern:
    """e^x, or the power of a constant."""
    return any_of(op.Exp(x), op.Pow(number(base, lambda c: c > 0), x))


_PI = number("pi", lambda c: abs(c - math.pi) < _ROUNDED)
_SUMMED = {"axes": "axes", "keepdims": "keepdims"}
_ONE_AND_EXP = op.Add(1.0, op.Exp(op.Neg("x")))
_LOG = op["Log", "Log1p"]("y").named("log")
_X_LOG_Y, _X_OR_0 = op.Mul("x", _LOG), any_of("x", 0.0)
_MEAN_SQUARE = op["ReduceMean", "ReduceSum"](op.Mul("d", op.Sub(..., ...).named("d")))

#: rewritten formulas; the first rule that matches counts
_RULES = (
    # ln σ(x), ln softmax(x), ln(1 - σ(x)), ln(1 + e^x), ln(1 + x)
    Rule(op.Log(op.Sigmoid("x")), lambda m: m.b.Neg(m.b.Softplus(m.b.Neg(m.x)))),
    Rule(op.Log(op.Softmax("x", axis="axis")), lambda m: m.b.LogSoftmax(m.x, axis=m.axis)),
    Rule(op.Log(op.Add(1.0, op.Neg(op.Sigmoid("x")))), lambda m: m.b.Neg(m.b.Softplus(m.x))),
    Rule(op.Log(op.Add(1.0, op.Exp("x"))), lambda m: m.b.Softplus(m.x)),
    Rule(op.Log(op.Add(1.0, "x")), lambda m: m.b.Log1p(m.x)),
    Rule(op.Log(op.Add(_power("x", "p"), _power("y", "q"))), _log_of_two),
    Rule(op.Log(op.Sub(1.0, "x")), _log_of_rest),
    # ln Σ e^x
    Rule(
        any_of(op.Log(op.ReduceSum(op.Exp("x"), **_SUMMED)), op.ReduceLogSum(op.Exp("x"), **_SUMMED)),
        lambda m: m.b.ReduceLogSumExp(m.x, axes=m.axes, keepdims=m.keepdims),
    ),
    # ln(x / (1 - x)), as a difference: it has a gradient at 0 and 1, too
    Rule(op.Log(op.Div("x", op.Sub(1.0, "x"))), lambda m: m.b.Sub(m.b.Log(m.x), m.b.Log1p(m.b.Neg(m.x)))),
    # e^x - 1
    Rule(any_of(op.Sub(op.Exp("x"), 1.0), op.Add(op.Exp("x"), -1.0)), lambda m: m.b.Expm1(m.x)),
    Rule(op.Sub("x", op.ReduceLogSumExp("x", axes="axes").named("total")), _log_softmax),
    Rule(op.Div(op.Exp("x"), op.ReduceSum(op.Exp("x"), axes="axes").named("total")), _softmax),
    # 1 / (1 + e^-x)
    Rule(any_of(op.Div(1.0, _ONE_AND_EXP), op.Reciprocal(_ONE_AND_EXP)), lambda m: m.b.Sigmoid(m.x)),
    # 1 where x = 0, else sin(ax) / (ax)
    Rule(
        op.Where(
            op.Equal("x", 0.0), 1.0, op.Div(op.Sin(any_of("x", op.Mul("x", number("a", bool))).named("ax")), "ax")
        ),
        lambda m: m.b.Sinc(m.ax),
    ),
    # the arc tangent of y / x, turned by π where x < 0
    Rule(
        op.Where(
            op.Less("x", 0.0),
            op.Where(op.Greater("y", 0.0), op.Add("flat", _PI), op.Sub("flat", _PI)),
            op.Atan(op.Div("y", "x")).named("flat"),
        ),
        lambda m: m.b.Atan2(m.y, m.x),
    ),
    # an angle, 0 where the formula has none; Atan2 has one for every point
    Rule(op.Where(op.IsNaN("angle"), 0.0, op.Atan2(..., ...).named("angle")), lambda m: m.b.Identity(m.angle)),
    Rule(
        any_of(
            op.Where(op.Equal("x", 0.0), _X_OR_0, op.Where(op.IsNaN("y"), ..., _X_LOG_Y)),
            op.Where(op.IsNaN("y"), ..., op.Where(op.Equal("x", 0.0), _X_OR_0, _X_LOG_Y)),
        ),
        _product_with_log,
    ),
    # 0 · x where nothing is left of x, which has no gradient: PyTorch's softshrink
    Rule(op.Where("far", "x", op.Mul(..., 0.0).named("rest")), lambda m: m.b.Where(m.far, m.x, m.b.Detach(m.rest))),
    # max(ln σ(x), -100), as PyTorch's binary cross entropy is lowered
    Rule(op.Max(op.Neg(op.Softplus(op.Neg("x"))), -BCE_BOUND), lambda m: m.b.BoundedLogSigmoid(m.x)),
    Rule(op.Max(op.Neg(op.Softplus("x")), -BCE_BOUND), lambda m: m.b.BoundedLogSigmoid(m.b.Neg(m.x))),
    # the root of a mean square of differences: no gradient where it is 0, as PyTorch's std
    Rule(op.Sqrt(through(("Mul", "Div", "Reshape"), _MEAN_SQUARE)), _root),
    Rule(op.Pow(op.ReduceSum(op.Pow(..., number("p"))), number("e")), _norm),
    # both bounds in one operator
    Rule(op.Clip(op.Clip("x", "low"), None, "high"), lambda m: m.b.Clip(m.x, m.low, m.high)),
)
