"""Expressions: the formula of an element-wise operator for one element of its inputs.

    def element(self, x, y):
        return maximum(x + y, 0)

An expression is a tree (shared parts are one node) that is independent of the machine: loops for the CPU and for a GPU
are generated from it, and `evaluate` runs it on arrays.  Every node is rounded to its element type: nothing is
contracted or reordered, so that an element is bit-identical alone and in any group of operators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from .types import DTYPES, FLOATS, Array, TensorType

#: element types of computations
TYPES = ("f32", "f64", "bool", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
#: element types that operators compute in f32, rounding the results
HALVES = ("f16", "bf16")


def _binary(fn: str) -> tuple[Callable[[Expr, Any], Expr], Callable[[Expr, Any], Expr]]:
    """The methods of an operator of Python, with the expression on the left and on the right."""
    return (lambda self, other: _same(fn, self, other)), (lambda self, other: _same(fn, other, self))


class Expr:
    """A node: a function of others.  "input" (`value`: its position) and "constant" (`value`) have no arguments."""

    __slots__ = ("args", "dtype", "fn", "value")

    def __init__(self, fn: str, args: tuple[Expr, ...], dtype: str, value: Any = None) -> None:
        self.fn, self.args, self.dtype, self.value = fn, args, dtype, value

    @property
    def type(self) -> TensorType:
        """The type of one element: a scalar."""
        return TensorType(self.dtype, ())

    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("sub")
    __mul__, __rmul__ = _binary("mul")
    __truediv__, __rtruediv__ = _binary("div")
    __and__, __rand__ = _binary("and")
    __xor__, __rxor__ = _binary("xor")

    def __or__(self, other: Expr) -> Expr:
        return _same("or", self, other)

    def __neg__(self) -> Expr:
        return _same("neg", self)

    def __abs__(self) -> Expr:
        return _same("abs", self)

    def __invert__(self) -> Expr:
        return _same("not", self)

    def __lt__(self, other: Expr | float) -> Expr:
        return _compare("lt", self, other)

    def __le__(self, other: Expr | float) -> Expr:
        return _compare("le", self, other)

    def __gt__(self, other: Expr | float) -> Expr:
        return _compare("lt", other, self)

    def __ge__(self, other: Expr | float) -> Expr:
        return _compare("le", other, self)

    def __str__(self) -> str:
        if self.fn == "input":
            return f"%{self.value}"
        if self.fn == "constant":
            return repr(self.value)
        kind = f"{self.dtype}: " if self.fn == "cast" else ""
        return f"{self.fn}({kind}{', '.join(map(str, self.args))})"


#: the result of `Op.element`: the formula of the output, those of several (None: an absent one), or None
Formula: TypeAlias = Expr | tuple[Expr | None, ...] | None


def argument(position: int, dtype: str) -> Expr:
    """The element of the input at `position`."""
    return Expr("input", (), dtype, position)


def constant(value: float, dtype: str) -> Expr:
    """A number, rounded to the element type."""
    with np.errstate(over="ignore"):
        number = DTYPES[dtype].type(value)
    return Expr("constant", (), dtype, float(number) if dtype in HALVES else number.item())


def _same(fn: str, *args: Expr | float) -> Expr:
    """A function whose arguments and result have one element type; numbers take it from the expressions."""
    first = next(x for x in args if isinstance(x, Expr))
    operands = tuple((x if isinstance(x, Expr) else constant(x, first.dtype)) for x in args)
    if any(x.dtype != first.dtype for x in operands):
        raise TypeError(f"{fn} of {', '.join(x.dtype for x in operands)}")
    return Expr(fn, operands, first.dtype)


def _compare(fn: str, a: Expr | float, b: Expr | float) -> Expr:
    pair = _same(fn, a, b)
    return Expr(fn, pair.args, "bool")


def maximum(a: Expr | float, b: Expr | float) -> Expr:
    """The maximum; NaN if one is NaN."""
    return _same("max", a, b)


def minimum(a: Expr | float, b: Expr | float) -> Expr:
    """The minimum; NaN if one is NaN."""
    return _same("min", a, b)


def equal(a: Expr | float, b: Expr | float) -> Expr:
    """a = b."""
    return _compare("eq", a, b)


def where(condition: Expr, x: Expr | float, y: Expr | float) -> Expr:
    """x if the condition is true, else y."""
    chosen = _same("where", x, y)
    return Expr("where", (condition, *chosen.args), chosen.dtype)


def cast(x: Expr, dtype: str) -> Expr:
    """Conversion to another element type: floats are truncated towards zero, all numbers except 0 are true."""
    return x if x.dtype == dtype else Expr("cast", (x,), dtype)


def function(name: str) -> Callable[..., Expr]:
    """A function of that name whose arguments and result have one element type."""
    return functools.partial(_same, name)


absolute, sqrt, exp, expm1 = function("abs"), function("sqrt"), function("exp"), function("expm1")
log, log1p, tanh, erf = function("log"), function("log1p"), function("tanh"), function("erf")
sin, cos, power = function("sin"), function("cos"), function("pow")
floor, ceil, rint, trunc = function("floor"), function("ceil"), function("rint"), function("trunc")


def reciprocal(x: Expr) -> Expr:
    """1 / x."""
    return 1 / x


def sign(x: Expr) -> Expr:
    """-1, 0 or 1; NaN of NaN."""
    if x.dtype[0] == "u":
        return where(x > 0, 1, constant(0, x.dtype))
    return where(x > 0, 1, where(x < 0, -1, x * 0 if x.dtype in FLOATS else constant(0, x.dtype)))


#: NumPy's name of a ufunc → its expression; those of one and two arguments that every loop generator knows
UFUNCS: dict[str, Callable[..., Expr]] = {
    "add": Expr.__add__, "subtract": Expr.__sub__, "multiply": Expr.__mul__, "negative": Expr.__neg__,
    "maximum": maximum, "minimum": minimum, "absolute": absolute, "sign": sign,
    "equal": equal, "less": Expr.__lt__, "less_equal": Expr.__le__, "greater": Expr.__gt__,
    "greater_equal": Expr.__ge__, "logical_and": Expr.__and__, "logical_or": Expr.__or__,
    "logical_xor": Expr.__xor__, "logical_not": Expr.__invert__, "bitwise_and": Expr.__and__,
    "bitwise_or": Expr.__or__, "bitwise_xor": Expr.__xor__, "invert": Expr.__invert__,
}  # fmt: skip
#: the same for floats only
FLOAT_UFUNCS: dict[str, Callable[..., Expr]] = {
    "exp": exp, "log": log, "sqrt": sqrt, "tanh": tanh, "sin": sin, "cos": cos, "reciprocal": reciprocal,
    "floor": floor, "ceil": ceil, "rint": rint, "expm1": expm1, "log1p": log1p,
    "tan": function("tan"), "arcsin": function("asin"), "arccos": function("acos"), "arctan": function("atan"),
    "sinh": function("sinh"), "cosh": function("cosh"), "arcsinh": function("asinh"),
    "arccosh": function("acosh"), "arctanh": function("atanh"),
}  # fmt: skip
#: functions that loops for the processor leave to NumPy: only those for a device have them
DEVICE_ONLY = frozenset((
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "fmod", "copysign",
    "quotient", "shl", "shr",
))  # fmt: skip


def nodes(roots: Sequence[Expr], arguments: Callable[[Expr], Sequence[Expr]] = attrgetter("args")) -> Iterator[Expr]:
    """Every node once, arguments before the nodes that use them, in the order of `arguments`."""
    done: set[int] = set()
    stack = [(r, False) for r in reversed(roots)]
    while stack:
        x, ready = stack.pop()
        if ready:
            yield x
        elif id(x) not in done:
            done.add(id(x))
            stack.append((x, True))
            stack += [(a, False) for a in reversed(arguments(x))]


def substitute(roots: Sequence[Expr], inputs: Sequence[Expr | None] | Mapping[int, Expr]) -> list[Expr]:
    """The expressions with other expressions in place of their inputs (by position)."""
    new: dict[int, Expr] = {}
    for x in nodes(roots):
        if x.fn == "input":
            value = inputs[x.value]
            assert value is not None
            new[id(x)] = value
        else:
            new[id(x)] = Expr(x.fn, tuple(new[id(a)] for a in x.args), x.dtype, x.value) if x.args else x
    return [new[id(r)] for r in roots]


_NUMPY: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "max": np.maximum, "min": np.minimum, "abs": np.absolute, "sqrt": np.sqrt, "exp": np.exp, "expm1": np.expm1,
    "log": np.log, "log1p": np.log1p, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "pow": np.power,
    "floor": np.floor, "ceil": np.ceil, "rint": np.rint, "trunc": np.trunc, "where": np.where,
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.invert, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "fmod": np.fmod, "copysign": np.copysign, "shl": np.left_shift, "shr": np.right_shift,
    "quotient": lambda a, b: np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)),
    "erf": lambda x: np.array([math.erf(v) for v in np.ravel(x)], x.dtype).reshape(np.shape(x)),
}  # fmt: skip


def evaluate(roots: Sequence[Expr], inputs: Sequence[object]) -> list[Array]:
    """Evaluates the expressions on NumPy arrays with broadcasting: the reference of generated code."""
    values: dict[int, Array] = {}
    with np.errstate(all="ignore"):
        for x in nodes(roots):
            kind = DTYPES[x.dtype]
            if x.fn == "input":
                array = np.asarray(inputs[x.value])
            elif x.fn == "constant":
                array = np.asarray(x.value, kind)
            elif x.fn == "cast":
                array = np.asarray(values[id(x.args[0])]).astype(kind)
            else:
                array = np.asarray(_NUMPY[x.fn](*(values[id(a)] for a in x.args)))
            assert array.dtype == kind, f"{x.fn}: {array.dtype} where {kind} is expected"
            values[id(x)] = array
    return [values[id(r)] for r in roots]
