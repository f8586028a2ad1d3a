"""Formulas that overflow or cancel, written with the operators that do not; exporters write them, and so do people."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...ops.elementwise.stable import BCE_BOUND
from ..attention.known import Known
from ..base import Pass

#: by how much π may be rounded (to half precision), and the product of an exponent and its inverse
_ROUNDED = 1e-3


@dataclass(frozen=True)
class FindStable(Pass):
    """Replace formulas by operators that are right for large and small numbers, too.

    For the forward pass; `load` runs it.  Found are the logarithm of a sigmoid, of a softmax and of sums of
    exponentials, log(1 + x), exp(x) - 1, sigmoid and softmax of exponentials, sin(x) / x, the angle made of
    atan(y / x), x · log(y) that is 0 with x, binary cross entropy of a sigmoid, and roots of deviations and norms.
    What they replace stays for its other readers, until `dead-code`.
    """

    refuses = ("gradients",)

    def run(self, block: Block) -> Block:
        """The block itself if there is none."""
        return find_stable(block)


def find_stable(block: Block) -> Block:
    """The block with stable operators; every value keeps its name."""
    if not any(op.op.name in _RULES for op in block.operators):
        return block
    search = Search(block)
    found = search.rewritten()
    return block.with_operators(found, constants=(*block.constants, *search.b.constants)) if found else block


class Search:
    """A walk over a block, which sees what it has replaced already; `b` takes what is emitted."""

    def __init__(self, block: Block) -> None:
        self.block, self.b = block, Builder.on(block)
        self.known = Known(block, {})
        self.by: dict[str, Operator] = {}
        self.readers = block.consumers()

    def rewritten(self) -> list[Operator] | None:
        """All operators in order; None where nothing is replaced."""
        done: list[Operator] = []
        changed = False
        for op in self.block.operators:
            made = self.replaced(op) if op.role is Role.FORWARD else None
            changed = changed or made is not None
            for new in made or (op,):
                done.append(new)
                self.by.update((v.name, new) for v in new.writes())
        return done if changed else None

    def replaced(self, op: Operator) -> list[Operator] | None:
        """What takes an operator's place; the last output gets its name."""
        for rule in _RULES.get(op.op.name, ()):
            self.b.operators.clear()
            out = _result(op)
            self.b.prefix = out.name
            found = rule(self, op)
            if found is not None and found.type == out.type:
                return [o.renamed({found.name: out.name}) for o in self.b.operators]
        return None

    def made(self, v: Value | None, *names: str) -> Operator | None:
        """The operator that makes a value, if it is one of these."""
        op = None if v is None else self.by.get(v.name)
        return op if op is not None and op.op.name in names else None

    def of(self, v: Value | None, name: str) -> Value | None:
        """x, where a value is f(x)."""
        op = self.made(v, name)
        return None if op is None else op.inputs[0]

    def number(self, v: Value | None) -> float | None:
        """The number that all elements of a value are known to be."""
        v = self.of(v, "Expand") or v
        fill = self.made(v, "Fill")
        return float(fill.op.value) if fill is not None else self.known.number(v)  # type: ignore[attr-defined]

    def beside(self, op: Operator, number: float) -> Value | None:
        """The other operand of an operator of two, one of which is this number."""
        for x, y in (op.inputs, op.inputs[::-1]):
            if self.close(y, number):
                return x
        return None

    def close(self, v: Value | None, number: float) -> bool:
        """Whether a value is this number; π may be rounded."""
        found = self.number(v)
        return found == number or (found is not None and number == math.pi and abs(found - number) < _ROUNDED)

    def exponent(self, v: Value | None) -> Value | None:
        """x, where a value is e^x or c^x."""
        power = self.made(v, "Pow")
        if power is None:
            return self.of(v, "Exp")
        base, x = power.inputs
        c = self.number(base)
        if c is None or c <= 0 or x is None or x.type != _result(power).type:
            return None
        return self.b.Mul(x, self.b.constant(math.log(c), x))

    def total(self, v: Value | None, x: Value | None) -> Operator | None:
        """The sum of exponentials of x along one axis that a value is."""
        op = self.made(v, "ReduceSum")
        if op is None or x is None or self.of(op.inputs[0], "Exp") != x:
            return None
        return op if _one_axis(op, x) is not None and _result(op).ndim == x.ndim else None


def _result(op: Operator) -> Value:
    return next(op.writes())


def _one_axis(op: Operator, x: Value) -> int | None:
    """The axis of a reduction, where it is one."""
    axes = tuple(range(x.ndim)) if op.op.axes is None else op.op.axes  # type: ignore[attr-defined]
    return axes[0] if len(axes) == 1 else None


# -- rules: what a formula becomes, or None; the last operator emitted gives it ----------------------------------------


def _log_of_activation(s: Search, op: Operator) -> Value | None:
    """ln σ(x), ln softmax(x)."""
    found = s.made(op.inputs[0], "Sigmoid", "Softmax")
    if found is None:
        return None
    x = found.inputs[0]
    if found.op.name == "Softmax":
        return s.b.LogSoftmax(x, axis=found.op.axis)  # type: ignore[attr-defined]
    return s.b.Neg(s.b.Softplus(s.b.Neg(x)))


def _log_of_sum(s: Search, op: Operator) -> Value | None:
    """ln(1 + x), ln(1 + e^x), ln(1 - σ(x)), ln(e^a + e^b)."""
    add = s.made(op.inputs[0], "Add")
    if add is None:
        return None
    x = s.beside(add, 1.0)
    if x is not None:
        raised, negative = s.of(x, "Exp"), s.of(s.of(x, "Neg"), "Sigmoid")
        if negative is not None:
            return s.b.Neg(s.b.Softplus(negative))
        return s.b.Log1p(x) if raised is None else s.b.Softplus(raised)
    first, second = map(s.exponent, add.inputs)
    return None if first is None or second is None else s.b.LogAddExp(first, second)


def _log_of_rest(s: Search, op: Operator) -> Value | None:
    """ln(1 - x), ln(1 - σ(x)); not where it is cut off and saturation has no gradient."""
    rest = s.made(op.inputs[0], "Sub")
    if rest is None or not s.close(rest.inputs[0], 1.0):
        return None
    x = rest.inputs[1]
    inner = s.of(x, "Sigmoid")
    if inner is None:
        return s.b.Log1p(s.b.Neg(x))
    readers = (s.block.operators[i] for i in s.readers.get(_result(op).name, ()))
    if any(r.op.name in ("Clip", "Max") and s.close(r.inputs[1], -BCE_BOUND) for r in readers if len(r.inputs) > 1):
        return None
    return s.b.Neg(s.b.Softplus(inner))


def _logit(s: Search, op: Operator) -> Value | None:
    """ln(x / (1 - x)), as a difference: it has a gradient at 0 and 1, too."""
    ratio = s.made(op.inputs[0], "Div")
    rest = None if ratio is None else s.made(ratio.inputs[1], "Sub")
    if ratio is None or rest is None or rest.inputs[1] != ratio.inputs[0] or not s.close(rest.inputs[0], 1.0):
        return None
    x = ratio.inputs[0]
    return s.b.Sub(s.b.Log(x), s.b.Log1p(s.b.Neg(x)))


def _log_of_exponentials(s: Search, op: Operator) -> Value | None:
    """ln Σ e^x, of a sum or of ReduceLogSum."""
    total = op if op.op.name == "ReduceLogSum" else s.made(op.inputs[0], "ReduceSum")
    x = None if total is None else s.of(total.inputs[0], "Exp")
    if total is None or x is None:
        return None
    return s.b.ReduceLogSumExp(x, axes=total.op.axes, keepdims=total.op.keepdims)  # type: ignore[attr-defined]


def _less_one(s: Search, op: Operator) -> Value | None:
    """e^x - 1."""
    if op.op.name == "Sub":
        raised = op.inputs[0] if s.close(op.inputs[1], 1.0) else None
    else:
        raised = s.beside(op, -1.0)
    x = s.of(raised, "Exp")
    return None if x is None else s.b.Expm1(x)


def _log_softmax(s: Search, op: Operator) -> Value | None:
    """x - ln Σ e^x."""
    x, total = op.inputs[0], s.made(op.inputs[1], "ReduceLogSumExp")
    if x is None or total is None or total.inputs[0] != x or _result(total).ndim != x.ndim:
        return None
    axis = _one_axis(total, x)
    return None if axis is None else s.b.LogSoftmax(x, axis=axis)


def _softmax(s: Search, op: Operator) -> Value | None:
    """e^x / Σ e^x; what is subtracted from x to keep it small is taken away."""
    x = s.of(op.inputs[0], "Exp")
    total = s.total(op.inputs[1], x)
    if x is None or total is None:
        return None
    axis = _one_axis(total, x)
    shifted = s.made(x, "Sub")
    if shifted is not None:
        y, most = shifted.inputs
        largest = s.made(s.of(most, "Detach") or most, "ReduceMax")
        if largest is not None and y is not None and largest.inputs[0] == y and _result(largest).ndim == y.ndim:
            x = y if _one_axis(largest, y) == axis else x
    return s.b.Softmax(x, axis=axis)


def _sigmoid(s: Search, op: Operator) -> Value | None:
    """1 / (1 + e^-x)."""
    if op.op.name == "Div" and not s.close(op.inputs[0], 1.0):
        return None
    add = s.made(op.inputs[-1], "Add")
    x = None if add is None else s.of(s.of(s.beside(add, 1.0), "Exp"), "Neg")
    return None if x is None else s.b.Sigmoid(x)


def _sinc(s: Search, op: Operator) -> Value | None:
    """1 where x = 0, else sin(ax) / (ax)."""
    condition, one, quotient = s.made(op.inputs[0], "Equal"), op.inputs[1], s.made(op.inputs[2], "Div")
    if condition is None or quotient is None or not s.close(one, 1.0):
        return None
    x, inside = s.beside(condition, 0.0), quotient.inputs[1]
    if x is None or s.of(quotient.inputs[0], "Sin") != inside:
        return None
    scaled = s.made(inside, "Mul")
    factors = () if scaled is None else scaled.inputs
    if inside != x and not any(a == x and s.number(c) for a, c in (factors, factors[::-1]) if factors):
        return None
    return s.b.Sinc(inside)


def _angle(s: Search, op: Operator) -> Value | None:
    """The arc tangent of y / x, turned by π where x < 0."""
    behind, turned, flat = s.made(op.inputs[0], "Less"), s.made(op.inputs[1], "Where"), s.of(op.inputs[2], "Atan")
    ratio = s.made(flat, "Div")
    if behind is None or turned is None or ratio is None or not s.close(behind.inputs[1], 0.0):
        return None
    y, x = ratio.inputs
    above = s.made(turned.inputs[0], "Greater")
    up, down = s.made(turned.inputs[1], "Add"), s.made(turned.inputs[2], "Sub")
    if behind.inputs[0] != x or above is None or above.inputs[0] != y or not s.close(above.inputs[1], 0.0):
        return None
    if up is None or down is None or s.beside(up, math.pi) != op.inputs[2]:
        return None
    if down.inputs[0] != op.inputs[2] or not s.close(down.inputs[1], math.pi):
        return None
    return s.b.Atan2(y, x)


def _angle_of_any(s: Search, op: Operator) -> Value | None:
    """An angle, 0 where the formula has none; Atan2 has one for every point."""
    unknown, angle = s.made(op.inputs[0], "IsNaN"), op.inputs[2]
    if unknown is None or unknown.inputs[0] != angle or not s.close(op.inputs[1], 0.0):
        return None
    return None if s.made(angle, "Atan2") is None else s.b.Identity(angle)


def _product_with_log(s: Search, op: Operator) -> Value | None:
    """x · ln y, 0 where x = 0, NaN where y is: PyTorch's xlogy and, nested the other way, xlog1py."""
    outer, inner = op, s.made(op.inputs[2], "Where")
    if inner is None:
        return None
    if s.made(op.inputs[0], "IsNaN") is not None:
        outer, inner = inner, op
    zero, unknown = s.made(outer.inputs[0], "Equal"), s.made(inner.inputs[0], "IsNaN")
    product = s.made(outer.inputs[2] if inner is op else inner.inputs[2], "Mul")
    if zero is None or unknown is None or product is None:
        return None
    x, log = product.inputs[0], s.made(product.inputs[1], "Log", "Log1p")
    if x is None or log is None or s.beside(zero, 0.0) != x or log.inputs[0] != unknown.inputs[0]:
        return None
    if outer.inputs[1] != x and not s.close(outer.inputs[1], 0.0):
        return None
    b, y = s.b, unknown.inputs[0]
    least, neutral = (b.constant(c, x) for c in ((0, 1) if log.op.name == "Log" else (-1, 0)))
    far = b.Or(b.LessOrEqual(y, least), b.Equal(y, b.constant(math.inf, x)))
    safe = b.Where(b.And(b.Equal(x, b.constant(0, x)), far), neutral, y)
    return b.Mul(x, b.emit(log.op, safe))


def _shrunk(s: Search, op: Operator) -> Value | None:
    """0 · x where nothing is left of x, which has no gradient: PyTorch's softshrink."""
    rest = s.made(op.inputs[2], "Mul")
    x = None if rest is None else s.beside(rest, 0.0)
    return None if x is None or rest is None else s.b.Where(*op.inputs[:2], s.b.Detach(rest.outputs[0]))


def _bounded(s: Search, op: Operator) -> Value | None:
    """max(ln σ(x), -100), as PyTorch's binary cross entropy is lowered."""
    log = s.of(s.of(s.beside(op, -BCE_BOUND), "Neg"), "Softplus")
    if log is None:
        return None
    x = s.of(log, "Neg")
    return s.b.BoundedLogSigmoid(s.b.Neg(log) if x is None else x)


def _deviation(s: Search, op: Operator) -> Value | None:
    """The root of a mean square of differences: no gradient where it is 0, as PyTorch's std."""
    v = op.inputs[0]
    while (scaled := s.made(v, "Mul", "Div", "Reshape")) is not None and scaled.inputs[0] != scaled.inputs[-1]:
        if scaled.op.name != "Reshape" and s.number(scaled.inputs[1]) is None:
            return None
        v = scaled.inputs[0]
    mean = s.made(v, "ReduceMean", "ReduceSum")
    square = None if mean is None else s.made(mean.inputs[0], "Mul")
    if square is None or square.inputs[0] != square.inputs[1] or s.made(square.inputs[0], "Sub") is None:
        return None
    return _root(s, op)


def _norm(s: Search, op: Operator) -> Value | None:
    """(Σ |x|^p)^(1/p): no gradient where it is 0, as PyTorch's norm."""
    inner = s.made(s.of(op.inputs[0], "ReduceSum"), "Pow")
    e = s.number(op.inputs[1])
    p = None if inner is None else s.number(inner.inputs[1])
    return None if not e or p is None or not abs(e * p - 1) < _ROUNDED else _root(s, op)


def _root(s: Search, op: Operator) -> Value:
    """A root that is 0 at 0 and has no gradient there."""
    b, x = s.b, op.inputs[0]
    zero, one = b.constant(0, _result(op)), b.constant(1, _result(op))
    none = b.Equal(x, zero)
    return b.Where(none, zero, b.emit(op.op, b.Where(none, one, x), *op.inputs[1:]))


def _one_clip(s: Search, op: Operator) -> Value | None:
    """Both bounds in one operator."""
    inner = s.made(op.inputs[0], "Clip")
    bounds = (*op.inputs[1:], None, None)[:2]
    if inner is None or bounds[0] is not None or bounds[1] is None or len(inner.inputs) != 2:
        return None
    return s.b.Clip(*inner.inputs, bounds[1])


_RULES: dict[str, tuple[Callable[[Search, Operator], Value | None], ...]] = {
    "Log": (_log_of_activation, _log_of_sum, _log_of_rest, _log_of_exponentials, _logit),
    "ReduceLogSum": (_log_of_exponentials,),
    "Sub": (_less_one, _log_softmax),
    "Add": (_less_one,),
    "Div": (_softmax, _sigmoid),
    "Reciprocal": (_sigmoid,),
    "Where": (_sinc, _angle, _angle_of_any, _product_with_log, _shrunk),
    "Max": (_bounded,),
    "Sqrt": (_deviation,),
    "Pow": (_norm,),
    "Clip": (_one_clip,),
}
