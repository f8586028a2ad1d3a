"""Functions of float64 whose bits every processor gives: additions, products, quotients and roots, each rounded once.

Errors in units of the last place: exp, log, sin and cos below 2, pow below 2 (1 + |y ln x|), the others below 4.
Polynomials are Taylor's unless said otherwise; angles of any size are reduced exactly (Payne & Hanek 1983).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from . import reals
from .reals import Format, Value, Writer, exp, expm1

_INF, _NAN = math.inf, math.nan
_LN2 = float.fromhex("0x1.62e42fefa39efp-1")
_LOW = float.fromhex("0x1.a39ef35793c76p-33")
DOUBLE = Format(
    "double", "i64", 52, False, float.fromhex("0x1.62e42fee00000p-1"), _LOW, 1.4426950408889634,
    [1 / math.factorial(k) for k in range(13, 1, -1)], lowest=-746.0, highest=710.0, minus_one=-60.0, one=20.0,
)  # fmt: skip
#: π/2, what its float64 lacks, and its first 26 bits
_TURN, _TURN_LOW = float.fromhex("0x1.921fb54442d18p+0"), float.fromhex("0x1.1a62633145c07p-54")
_TURN_26 = float.fromhex("0x1.921fb50000000p+0")
#: 2/π behind 64 bits of 0, in words of 64 bits
_TWO_OVER_PI = (
    "0000000000000000a2f9836e4e441529fc2757d1f534ddc0db6295993c439041fe5163abdebbc561b7246e3a424dd2e006492eea09d1921c"
    "fe1deb1cb129a73ee88235f52ebb4484e99c7026b45f7e413991d639835339f49c845f8bbdf9283b1ff897ffde05980fef2f118b5a0a6d1f"
    "6d367ecf27cb09b74f463f669e5fea2d7527bac7ebe5f17b3d0739f78a5292ea6bfb5fb11f8d5d0856033046fc7b6babf0cfbc209af4361d"
)
_TABLE = "@portable.two_over_pi"
_WORDS = [f"i64 u0x{_TWO_OVER_PI[i : i + 16]}" for i in range(0, len(_TWO_OVER_PI), 16)]


def _log(x: Value) -> Value:
    """The exponent's logarithm plus ln(1 + t), |t| < √2 - 1, by the series of 2 artanh(t / (2 + t))."""
    t, n = reals.split(x)
    s = t / (t + 2)
    z = s * s
    rest = z * z.horner([2 / (2 * k + 1) for k in range(12, 0, -1)])
    square = t * t * 0.5
    part = s * (square + rest) + n * _LOW
    return reals.ends(n * x.t.high - ((square - part) - t), x)


def _log1p(x: Value) -> Value:
    return reals.log1p(x, _log)


def _pow(x: Value, y: Value) -> Value:
    """exp(y ln |x|), negative for odd y and negative x; NaN for negative x and y that are no integers."""
    size = abs(x)
    power = size.test("oeq", 1).where(1, exp(y * _log(size)))
    twice = (y * 0.5).call("floor")
    signed = (twice + twice).test("oeq", y).where(power, -power)
    other = ((x < 0) & (x > -_INF)).where(_NAN, power)
    signed = y.call("floor").test("oeq", y).where(signed, other)
    power = (x.test("uno", x) | x.bits().test("slt", 0)).where(signed, power)
    power = x.test("uno", y).where(_NAN, power)
    return (x.test("oeq", 1) | y.test("oeq", 0)).where(1, power)


def _high(a: Value, b: Value) -> Value:
    """The first 64 bits of a product of 128, of integers without a sign."""
    low = (1 << 32) - 1
    (a0, a1), (b0, b1) = ((x & low, x.do("lshr", 32)) for x in (a, b))
    cross, other = a0 * b1, a1 * b0
    middle = (a0 * b0).do("lshr", 32) + (cross & low) + (other & low)
    return a1 * b1 + cross.do("lshr", 32) + other.do("lshr", 32) + middle.do("lshr", 32)


def _word(i: Value) -> Value:
    """A word of 2/π."""
    at = i.f.let(f"getelementptr i64, ptr {_TABLE}, i64 {i.name}")
    return dataclasses.replace(i, name=i.f.let(f"load i64, ptr {at}"))


def _zeros(x: Value) -> Value:
    """Bits of 0 before the first 1."""
    x.f.declared["@llvm.ctlz.i64"] = "declare i64 @llvm.ctlz.i64(i64, i1)"
    return dataclasses.replace(x, name=x.f.let(f"call i64 @llvm.ctlz.i64(i64 {x.name}, i1 false)"))


def _quarters(a: Value) -> tuple[Value, Value, Value]:
    """(r, what r lacks, n): a = n π/2 + r, |r| ≤ π/4 for a ≥ π/4; of n the last two bits.

    The last bits before the point of a · 2/π, and 126 behind it, are those of the fraction's product with 192 bits of
    2/π: no float64 is nearer than 2⁻⁶² to a multiple of π/2.
    """
    bits = a.bits()
    start = bits.do("lshr", 52) - 1013
    near = [_word((start >> 6) + i) for i in range(4)]
    w0, w1, w2 = (near[i].call("fshl", near[i + 1], start & 63) for i in range(3))
    m = (bits & ((1 << 52) - 1)) | (1 << 52)
    under = _high(m, w2)
    low = m * w1 + under
    top = m * w0 + _high(m, w1) + low.test("ult", under).where(1, low.number(0))
    n = (top + (1 << 61)).do("lshr", 62)
    top = top - (n << 62)
    sign = top >> 63
    top, low = top ^ sign, low ^ sign
    up = _zeros(top)
    first, second = top.call("fshl", low, up), low << up
    lead, rest = first.do("lshr", 11), first.call("fshl", second, 53).do("lshr", 1)
    whole, more = lead.real("sitofp"), rest.real("sitofp") * 2.0**-63
    r = whole * _TURN
    # the rest of the product by halves of the factors, whose products are exact (Dekker 1971)
    upper = (lead & -(1 << 27)).real("sitofp")
    under, tail = whole - upper, _TURN - _TURN_26
    lost = ((upper * _TURN_26 - r) + upper * tail + under * _TURN_26) + under * tail
    lost = lost + (more * _TURN + whole * _TURN_LOW)
    near_r = r + lost
    scale = (reals.power_of_two(up.number(-51) - up).bits() | (sign << 63)).real()
    return near_r * scale, ((r - near_r) + lost) * scale, n


def _circle(x: Value) -> tuple[Value, Value, Value]:
    """(sin r, cos r, n) for |x| = n π/2 + r; of n the last two bits."""
    a = abs(x)
    large = a > math.pi / 4
    r, low, n = _quarters(large.where(a, 1.0))
    r, low, n = large.where(r, a), large.where(low, 0.0), large.where(n, n.number(0))
    z = r * r
    half = z * 0.5
    p, q = (z.horner([(-1) ** (k // 2) / math.factorial(k) for k in range(m, 2, -2)]) for m in (17, 18))
    sin = r + (r * z * p + low * (1 - half))
    near = 1 - half
    return sin, near + (((1 - near) - half) + (z * z * q - r * low)), n


def _sin(x: Value) -> Value:
    s, c, n = _circle(x)
    sign = (x.bits() & (-1 << 63)) ^ ((n & 2) << 62)
    return (abs(x) < _INF).where((_odd(n).where(c, s).bits() ^ sign).real(), _NAN)


def _cos(x: Value) -> Value:
    s, c, n = _circle(x)
    return (abs(x) < _INF).where((_odd(n).where(s, c).bits() ^ (((n + 1) & 2) << 62)).real(), _NAN)


def _tan(x: Value) -> Value:
    s, c, n = _circle(x)
    odd = _odd(n)
    sign = (x.bits() & (-1 << 63)) ^ (n << 63)
    return (abs(x) < _INF).where(((odd.where(c, s) / odd.where(s, c)).bits() ^ sign).real(), _NAN)


def _odd(n: Value) -> Value:
    return (n & 1).test("eq", 1)


def _atan(x: Value) -> Value:
    """Angles of a fraction t below √2 - 1 and of 0, 1 or infinity."""
    a = abs(x)
    large, small = a > math.sqrt(2) + 1, a < math.sqrt(2) - 1
    t = large.where(-1, small.where(a, a - 1)) / large.where(a, small.where(1, a + 1))
    z = t * t
    p = t * z * z.horner([(-1) ** k / (2 * k + 1) for k in range(22, 0, -1)])
    turn, low = (large.where(v, small.where(0, x.number(v / 2))) for v in (_TURN, _TURN_LOW))
    return (turn + ((p + low) + t)).signed(x)


def _asin(x: Value) -> Value:
    return _atan(x / ((1 - x) * (x + 1)).call("sqrt"))


def _acos(x: Value) -> Value:
    return 2 * _atan(((1 - x) / (x + 1)).call("sqrt"))


def _sinh(x: Value) -> Value:
    a = abs(x)
    e, h = expm1(a), exp(a * 0.5)
    return (a < 1).where((e + e / (e + 1)) * 0.5, h * 0.5 * h - 0.5 / h / h).signed(x)


def _cosh(x: Value) -> Value:
    h = exp(abs(x) * 0.5)
    return h * 0.5 * h + 0.5 / h / h


def _asinh(x: Value) -> Value:
    a = abs(x)
    near = _log1p(a + a * a / ((a * a + 1).call("sqrt") + 1))
    return (a > 2.0**28).where(_log(a) + _LN2, near).signed(x)


def _acosh(x: Value) -> Value:
    t = x - 1
    y = (x > 2.0**28).where(_log(x) + _LN2, _log1p(t + (t * (t + 2)).call("sqrt")))
    return (x < 1).where(_NAN, y)


def _atanh(x: Value) -> Value:
    a = abs(x)
    return (_log1p((a + a) / (1 - a)) * 0.5).signed(x)


#: e^(x²) (1 - erf x) on 1 ≤ x ≤ 6 as a polynomial in (x - 2.5) / (x + 2.5): Chebyshev's interpolation
_ERFCX = (
    3.3424766671139917e-07, 1.292956880330712e-07, -1.7954503462228672e-06, -2.31386075623643e-06,
    7.55084615794585e-06, 1.861701443908485e-05, -3.418199642275705e-05, -0.00012887740810537537,
    0.00022838036049431778, 0.0008759154625918533, -0.002642365963540494, -0.003993701166206419, 0.0399225390755696,
    -0.12503305237882495, 0.2517131932174494, -0.3717367339489734, 0.2108063640611436,
)  # fmt: skip


def _erf(x: Value) -> Value:
    """A series up to 1; from there 1 - e^(-x²) times a polynomial, which is 1 from 6 on."""
    a = abs(x).clamp(0, 6)
    z = a * a
    near = a * z.horner(
        [2 / math.sqrt(math.pi) * (-1) ** k / math.factorial(k) / (2 * k + 1) for k in range(19, -1, -1)]
    )
    far = 1 - exp(-z) * ((a - 2.5) / (a + 2.5)).horner(_ERFCX)
    return (a < 1).where(near, far).signed(x)


#: name → the function, as C's library calls it
FUNCTIONS: dict[str, Callable[..., Value]] = {
    "exp": exp, "log": _log, "pow": _pow, "expm1": expm1, "log1p": _log1p, "tanh": reals.tanh, "sin": _sin,
    "cos": _cos, "tan": _tan, "asin": _asin, "acos": _acos, "atan": _atan, "sinh": _sinh, "cosh": _cosh,
    "asinh": _asinh, "acosh": _acosh, "atanh": _atanh, "erf": _erf,
}  # fmt: skip


class _Function(Writer):
    """A function of scalars under construction."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.declared = {}

    def let(self, text: str) -> str:
        self.lines.append(f"%t{len(self.lines)} = {text}")
        return f"%t{len(self.lines) - 1}"


def definition(name: str) -> tuple[str, dict[str, str]]:
    """`@portable.NAME` as text, for C's name of a function of float64 or (`expf`) float32, and what it calls."""
    single = name not in FUNCTIONS
    function, kind, f = (
        FUNCTIONS[name.removesuffix("f") if single else name],
        "float" if single else "double",
        _Function(),
    )
    args = ("%x", "%y") if function is _pow else ("%x",)
    wide = [f.convert("fpext", a, kind, "double") if single else a for a in args]
    result = function(*(Value(f, DOUBLE, a, "double") for a in wide)).name
    if single:
        result = f.convert("fptrunc", result, "double", kind)
    if any(_TABLE in line for line in f.lines):
        f.declared[_TABLE] = f"{_TABLE} = internal constant [{len(_WORDS)} x i64] [{', '.join(_WORDS)}]"
    body, head = "\n  ".join([*f.lines, f"ret {kind} {result}"]), ", ".join(f"{kind} {a}" for a in args)
    return f"\ndefine internal {kind} @portable.{name}({head}) {{\n  {body}\n}}\n", f.declared
