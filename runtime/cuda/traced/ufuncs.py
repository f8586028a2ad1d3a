"""NumPy's ufuncs as element expressions, for traced numerics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....language.element import (
    FLOAT_UFUNCS,
    UFUNCS,
    Expr,
    absolute,
    cast,
    constant,
    equal,
    function,
    maximum,
    minimum,
    where,
)
from ....language.types import DTYPES, FLOATS, dtype_name

_LOGICAL = ("logical_and", "logical_or", "logical_xor", "logical_not")


def _divided(a: Expr, b: Expr) -> Expr:
    return a / b


def _not_equal(a: Expr, b: Expr) -> Expr:
    return ~equal(a, b)


def _remainder(a: Expr, b: Expr) -> Expr:
    """With the divisor's sign; 0 where an integer is divided by 0."""
    rest = function("fmod")(a, b)
    other = ~equal(rest, 0) & ((rest < 0) ^ (b < 0))
    if a.dtype not in FLOATS:
        return where(other, rest + b, rest)
    exact = where(equal(rest, 0), function("copysign")(constant(0, a.dtype), b), where(other, rest + b, rest))
    return where(equal(b, 0), rest, exact)


def _floor_divide(a: Expr, b: Expr) -> Expr:
    """Towards minus infinity; 0 where an integer is divided by 0."""
    rest = function("fmod")(a, b)
    other = ~equal(rest, 0) & ((rest < 0) ^ (b < 0))
    if a.dtype not in FLOATS:
        whole = function("quotient")(a, b)
        return where(other, whole - constant(1, a.dtype), whole)
    exact = (a - rest) / b
    exact = where(other, exact - 1, exact)
    down = function("floor")(exact)
    near = where(exact - down > 0.5, down + 1, down)
    signed = where(equal(exact, 0), function("copysign")(constant(0, a.dtype), a / b), near)
    return where(equal(b, 0), a / b, signed)


def _clip(x: Expr, low: Expr, high: Expr) -> Expr:
    return minimum(maximum(x, low), high)


def _is_nan(x: Expr) -> Expr:
    return ~equal(x, x)


def _is_finite(x: Expr) -> Expr:
    return equal(x - x, 0)


def _is_infinite(x: Expr) -> Expr:
    return equal(absolute(x), float("inf"))


def _shift(name: str) -> Callable[[Expr, Expr], Expr]:
    """0 where all bits go (right: the sign's bit stays)."""

    def shift(a: Expr, by: Expr) -> Expr:
        bits = 8 * DTYPES[a.dtype].itemsize
        fits = by < bits
        if name == "shr" and a.dtype[0] == "i":
            return function(name)(a, where(fits, by, bits - 1))
        return where(fits, function(name)(a, where(fits, by, 0)), 0)

    return shift


def _same(x: Expr) -> Expr:
    return x


#: ufunc (or another function of elements) → its expression, of arguments of one element type
FUNCTIONS: dict[str, Callable[..., Expr]] = {
    **UFUNCS, **FLOAT_UFUNCS, "divide": _divided, "square": lambda x: x * x, "not_equal": _not_equal,
    "remainder": _remainder, "floor_divide": _floor_divide, "fmod": function("fmod"), "clip": _clip,
    "isnan": _is_nan, "isfinite": _is_finite, "isinf": _is_infinite,
    "left_shift": _shift("shl"), "right_shift": _shift("shr"),
    "power": function("pow"), "positive": _same, "copysign": function("copysign"), "arctan2": function("atan2"),
    "trunc": function("trunc"), "tan": function("tan"), "arcsin": function("asin"),
    "arccos": function("acos"), "arctan": function("atan"), "sinh": function("sinh"), "cosh": function("cosh"),
    "arcsinh": function("asinh"), "arccosh": function("acosh"), "arctanh": function("atanh"),
    "log2": function("log2"), "exp2": function("exp2"), "cbrt": function("cbrt"),
}  # fmt: skip


def element(name: str, kind: str, args: Sequence[Expr], out: str) -> Expr:
    """A function computed in the element type `kind`, cast to `out`.  "where": the first argument is a boolean."""
    if name == "where":
        found = where(args[0], *(cast(a, kind) for a in args[1:]))
    elif name in _LOGICAL:
        found = FUNCTIONS[name](*(cast(a, "bool") for a in args))
    else:
        found = FUNCTIONS[name](*(cast(a, kind) for a in args))
    return cast(found, out)


@functools.lru_cache(maxsize=4096)
def result(name: str, kinds: tuple[Any, ...]) -> tuple[str, str]:
    """The element types in which a ufunc computes, and of what it gives, as NumPy chooses them.

    `kinds`: dtypes of arrays, and Python's own numbers' types (int, float, bool), which take the arrays' types.
    """
    ufunc = getattr(np, name)
    given = [k(1) if isinstance(k, type) else np.ones(1, k) for k in kinds]
    with np.errstate(all="ignore"):
        out = dtype_name(ufunc(*given).dtype)
        if out != "bool" or name in _LOGICAL:
            return out, out
        return dtype_name(np.result_type(*given) if len(given) > 1 else kinds[0]), out
