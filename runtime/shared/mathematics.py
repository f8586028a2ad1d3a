"""Mathematical functions for kernels: float32 by vectorisable polynomials, float64 by the C library.

float32 errors are below 2 units in the last place (tests/cpu/test_cpu_rows.py measures them).  The coefficients were
fitted for this project by reweighted least squares (Lawson's iteration) for the smallest relative error.  Everything is
rounded as written (`fma` is one rounding), so that an element's value does not depend on how a loop was compiled.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .texts import inline, instructions

if TYPE_CHECKING:
    from .llvm import IRBuilder, Word


def _same(types: Any, first: Any, *others: Any) -> Any:
    """The first argument's type."""
    return first


@instructions(_same, c="fma_of")
def fma(builder: IRBuilder, a: Word, b: Word, c: Word) -> Word:
    """a · b + c, rounded once."""
    return builder.fma(a, b, c)


@instructions(_same, c="larger")
def larger(builder: IRBuilder, a: Word, b: Word) -> Word:
    """NaN where one of them is."""
    from llvmlite import ir

    function = builder.module.declare_intrinsic("llvm.maximum", [a.type], ir.FunctionType(a.type, [a.type, a.type]))
    return builder.call(function, (a, b), fastmath=("nsz", "reassoc"))


@instructions(_same)
def scaled(builder: IRBuilder, x: Word, whole: Word) -> Word:
    """x · 2ⁿ for the float32 `whole` = n + 1.5 · 2²³."""
    from llvmlite import ir

    i32 = ir.IntType(32)
    n = builder.sub(builder.bitcast(whole, i32), i32(0x4B400000))
    first = builder.ashr(n, i32(1))
    for part in (first, builder.sub(n, first)):  # in two steps: each power of two is a normal number
        bits = builder.shl(builder.add(part, i32(127)), i32(23))
        x = builder.fmul(x, builder.bitcast(bits, x.type))
    return x


@instructions(_same)
def fraction(builder: IRBuilder, x: Word) -> Word:
    """x / 2^exponent(x) of a positive normal float32, from √½ to √2."""
    from llvmlite import ir

    i32 = ir.IntType(32)
    moved = builder.sub(builder.bitcast(x, i32), i32(0x3F3504F3))
    return builder.bitcast(builder.add(builder.and_(moved, i32(0x007FFFFF)), i32(0x3F3504F3)), x.type)


@instructions(_same)
def exponent(builder: IRBuilder, x: Word) -> Word:
    """The whole power of two of a positive normal float32, as `fraction` leaves it."""
    from llvmlite import ir

    i32 = ir.IntType(32)
    return builder.sitofp(builder.ashr(builder.sub(builder.bitcast(x, i32), i32(0x3F3504F3)), i32(23)), x.type)


_F = np.float32
_LOG2E, _LN2_HIGH, _LN2_LOW = _F(1.44269504088896341), _F(0.693359375), _F(-2.12194440054690583e-4)
_WHOLE = _F(12582912.0)  # 1.5 · 2²³: adding it rounds to an integer
_E0, _E1, _E2, _E3, _E4 = map(
    _F, (0.4999999305067813, 0.16666514790573114, 0.04166845679321404, 0.00836941893382855, 0.0013813144597133204)
)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7 = map(
    _F,
    (0.33333331707549335, -0.25000821039623355, 0.20001226896216898, -0.1662335715779972, 0.14201757369115253,
     -0.13160183674973763, 0.12761582451229295, -0.07634499985856125),
)  # fmt: skip
_T0, _T1, _T2, _T3, _T4 = map(
    _F, (-0.3333327805824672, 0.13331330994163454, -0.0537300065136983, 0.02060617466044211, -0.005666974936742887)
)
_ONE, _TWO, _HALF, _ZERO = _F(1), _F(2), _F(0.5), _F(0)
_LOWEST, _HIGHEST, _SWITCH, _TINY, _UP = _F(-104), _F(89), _F(0.625), _F(1.17549435e-38), _F(8388608)
_UP_BITS, _INFINITY, _NAN = _F(23), _F(np.inf), _F(np.nan)


def _exp64(x):
    return math.exp(x)


@inline(double=_exp64, c="exp_of")
def exp(x):
    """e to the x: 2ⁿ times a polynomial on |r| ≤ ½ ln 2."""
    t = _HIGHEST if x > _HIGHEST else x
    t = _LOWEST if t < _LOWEST else t
    whole = fma(t, _LOG2E, _WHOLE)
    n = whole - _WHOLE
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, t))
    p = fma(fma(fma(fma(_E4, r, _E3), r, _E2), r, _E1), r, _E0)
    return scaled(fma(r * r, p, r) + _ONE, whole)


def _log64(x):
    return math.log(x) if x > 0 else (-np.inf if x == 0 else np.nan)


@inline(double=_log64, c="log_of")
def log(x):
    """The natural logarithm: that of the exponent plus ln(1 + t) by a polynomial."""
    small = x < _TINY
    up = x * _UP if small else x
    t = fraction(up) - _ONE
    n = exponent(up) - (_UP_BITS if small else _ZERO)
    p = fma(fma(fma(fma(fma(fma(fma(_L7, t, _L6), t, _L5), t, _L4), t, _L3), t, _L2), t, _L1), t, _L0)
    z = t * t
    y = fma(n, _LN2_LOW, fma(z * t, p, -_HALF * z)) + t
    y = fma(n, _LN2_HIGH, y)
    y = y if x < _INFINITY else x  # also NaN
    y = -_INFINITY if x == _ZERO else y
    return _NAN if x < _ZERO else y


def _tanh64(x):
    return math.tanh(x)


@inline(double=_tanh64)
def tanh(x):
    """A polynomial near 0, else 1 - 2 / (e^2|x| + 1) with x's sign."""
    a = abs(x)
    z = x * x
    p = fma(fma(fma(fma(_T4, z, _T3), z, _T2), z, _T1), z, _T0)
    near = fma(z * x, p, x)
    far = _ONE - _TWO / (exp(a + a) + _ONE)
    far = -far if x < _ZERO else far
    return near if a < _SWITCH else far


def _sigmoid64(x):
    return 1.0 / (1.0 + math.exp(-x))


@inline(double=_sigmoid64)
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return _ONE / (_ONE + exp(-x))
