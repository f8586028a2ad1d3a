"""Functions of floats as LLVM IR, for any number of lanes: of float32 in loops (loops/expressions.py), of float64 where
bits are those of every processor (float64.py).  One text is both: types differ in constants."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Format:
    """A type of floats, the integer of its size, and constants of its functions.

    `fraction`: its bits; `fused`: whether a · b + c is rounded once; `high` + `low`: ln 2, of which products of `high`
    with exponents are exact; `power`: (eʳ - 1 - r) / r² on |r| ≤ ½ ln 2, from the highest power; `lowest`, `highest`:
    e to the less and to the more are 0 and infinity; `minus_one`: below, eˣ - 1 is -1; `one`: from there, tanh x is 1.
    """

    element: str
    word: str
    fraction: int
    fused: bool
    high: Any
    low: Any
    log2e: Any
    power: Sequence[Any]
    lowest: Any
    highest: Any
    minus_one: Any
    one: Any

    @property
    def bias(self) -> int:
        """The exponent's bits of 1."""
        return (1 << (62 if self.word == "i64" else 30) - self.fraction) - 1

    @property
    def half(self) -> int:
        """The bits of √½."""
        kinds = "dq" if self.word == "i64" else "fi"
        return struct.unpack(kinds[1], struct.pack(kinds[0], math.sqrt(0.5)))[0]


class Writer(ABC):
    """A function under construction; `lanes` elements in each register (1: scalars)."""

    lanes = 1
    #: the functions called, by name: declarations, or definitions
    declared: dict[str, str]

    @abstractmethod
    def let(self, text: str) -> str:
        """An instruction with a result; its name."""

    def of(self, element: str) -> str:
        """The register type for an LLVM element type."""
        return element if self.lanes == 1 else f"<{self.lanes} x {element}>"

    def suffix(self, element: str) -> str:
        """The suffix of an intrinsic's name."""
        short = {"half": "f16", "float": "f32", "double": "f64"}.get(element, element)
        return short if self.lanes == 1 else f"v{self.lanes}{short}"

    def same(self, element: str, text: str) -> str:
        """The same literal in all lanes."""
        return text if self.lanes == 1 else "<" + ", ".join([f"{element} {text}"] * self.lanes) + ">"

    def op(self, name: str, element: str, *args: str) -> str:
        """`name type a, b`."""
        return self.let(f"{name} {self.of(element)} {', '.join(args)}")

    def call(self, function: str, element: str, *args: str) -> str:
        """An intrinsic of one type."""
        t, name = self.of(element), f"@llvm.{function}.{self.suffix(element)}"
        self.declared[name] = f"declare {t} {name}({', '.join([t] * len(args))})"
        return self.let(f"call {t} {name}({', '.join(f'{t} {a}' for a in args)})")

    def convert(self, name: str, x: str, source: str, target: str) -> str:
        """`name x to target`."""
        return self.let(f"{name} {self.of(source)} {x} to {self.of(target)}")

    def select(self, condition: str, element: str, x: str, y: str) -> str:
        """x where the condition holds, else y."""
        t = self.of(element)
        return self.let(f"select {self.of('i1')} {condition}, {t} {x}, {t} {y}")


def literal(value: Any, element: str) -> str:
    """A number of an LLVM type, rounded to it."""
    if element[0] == "i":
        return str(int(value))
    value = float(np.float32(value) if element == "float" else value)
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


@dataclass(frozen=True)
class Value:
    """A register under construction, on which Python's operators write instructions: floats, or integers as words."""

    f: Writer
    t: Format
    name: str
    element: str

    def _new(self, name: str, element: str = "") -> Value:
        return Value(self.f, self.t, name, element or self.element)

    def number(self, x: Any) -> Value:
        """A number of this type."""
        return x if isinstance(x, Value) else self._new(self.f.same(self.element, literal(x, self.element)))

    def do(self, name: str, other: Any) -> Value:
        """An instruction with two operands of this type."""
        return self._new(self.f.op(name, self.element, self.name, self.number(other).name))

    def _sum(self, name: str, other: Any) -> Value:
        return self.do(name if self.element[0] == "i" else f"f{name}", other)

    def call(self, function: str, *others: Any) -> Value:
        """An intrinsic of this type."""
        return self._new(self.f.call(function, self.element, self.name, *(self.number(x).name for x in others)))

    def __add__(self, other: Any) -> Value:
        return self._sum("add", other)

    def __sub__(self, other: Any) -> Value:
        return self._sum("sub", other)

    def __rsub__(self, other: Any) -> Value:
        return self.number(other)._sum("sub", self)

    def __mul__(self, other: Any) -> Value:
        return self._sum("mul", other)

    def __truediv__(self, other: Any) -> Value:
        return self._sum("div", other)

    def __rtruediv__(self, other: Any) -> Value:
        return self.number(other)._sum("div", self)

    __radd__, __rmul__ = __add__, __mul__

    def __and__(self, other: Any) -> Value:
        return self.do("and", other)

    def __or__(self, other: Any) -> Value:
        return self.do("or", other)

    def __xor__(self, other: Any) -> Value:
        return self.do("xor", other)

    def __lshift__(self, other: Any) -> Value:
        return self.do("shl", other)

    def __rshift__(self, other: Any) -> Value:
        """Copies of the sign come in."""
        return self.do("ashr", other)

    def __abs__(self) -> Value:
        return self.call("fabs")

    def __neg__(self) -> Value:
        return self._new(self.f.op("fneg", self.element, self.name))

    def __lt__(self, other: Any) -> Value:
        return self.test("olt", other)

    def __gt__(self, other: Any) -> Value:
        return self.test("ogt", other)

    def test(self, how: str, other: Any) -> Value:
        """A comparison, by LLVM's name of it."""
        name = "icmp" if self.element[0] == "i" else "fcmp"
        return self._new(self.f.op(f"{name} {how}", self.element, self.name, self.number(other).name), "i1")

    def where(self, x: Any, y: Any) -> Value:
        """x where this truth holds, else y; one of them is a value."""
        kind = x if isinstance(x, Value) else y
        x, y = kind.number(x), kind.number(y)
        return kind._new(self.f.select(self.name, kind.element, x.name, y.name))

    def times(self, b: Any, c: Any) -> Value:
        """self · b + c."""
        if not self.t.fused:
            return self * b + c
        return self.call("fma", b, c)

    def clamp(self, low: Any, high: Any) -> Value:
        """Within the bounds; NaN stays."""
        x = (self > high).where(high, self)
        return (x < low).where(low, x)

    def horner(self, coefficients: Sequence[Any]) -> Value:
        """A polynomial; the coefficients begin with that of the highest power."""
        total = self.number(coefficients[0])
        for c in coefficients[1:]:
            total = total.times(self, c)
        return total

    def bits(self) -> Value:
        """A float as an integer."""
        return self._new(self.f.convert("bitcast", self.name, self.element, self.t.word), self.t.word)

    def real(self, how: str = "bitcast") -> Value:
        """A float of these bits, or (`sitofp`) of this integer."""
        return self._new(self.f.convert(how, self.name, self.element, self.t.element), self.t.element)

    def signed(self, x: Value) -> Value:
        """This, not below 0, with x's sign, which LLVM would take from a float64 behind x, to round to float16 by a
        function that no library has."""
        sign = -1 << (63 if self.t.word == "i64" else 31)
        return (self.bits() | (x.bits() & sign)).real()


def _reduced(t: Value) -> tuple[Value, Value]:
    """An integer n, and eʳ - 1 by a polynomial, where t = n ln 2 + r."""
    c = t.t
    shift = 1.5 * 2.0**c.fraction  # adding it rounds to an integer
    whole = t.times(c.log2e, shift)
    n = whole - shift
    r = n.times(-c.low, n.times(-c.high, t))
    p = (r * r).times(r.horner(c.power), r)
    return whole.bits() - whole.number(shift).bits(), p


def power_of_two(n: Value) -> Value:
    """2ⁿ, a normal number."""
    return ((n + n.t.bias) << n.t.fraction).real()


def exp(x: Value) -> Value:
    """2ⁿ eʳ, in two steps: each power of two is a normal number."""
    n, p = _reduced(x.clamp(x.t.lowest, x.t.highest))
    first = n >> 1
    return (p + 1) * power_of_two(first) * power_of_two(n - first)


def expm1(x: Value) -> Value:
    """2 (2ⁿ⁻¹ (eʳ - 1) + 2ⁿ⁻¹ - ½)."""
    n, p = _reduced(x.clamp(x.t.minus_one, x.t.highest))
    half = power_of_two(n - 1)
    y = half.times(p, half - 0.5)
    return (y + y).signed(x)


def tanh(x: Value) -> Value:
    """t / (t + 2) with t = e^2|x| - 1, and x's sign."""
    a = abs(x).clamp(0, x.t.one)
    t = expm1(a + a)
    return (t / (t + 2)).signed(x)


def split(x: Value) -> tuple[Value, Value]:
    """(t, n): x = (1 + t) 2ⁿ, √½ ≤ 1 + t < √2, of a positive number."""
    c = x.t
    small = x < 2.0 ** (1 - c.bias)
    moved = small.where(x * 2.0**c.fraction, x).bits() - c.half
    fraction = (moved & ((1 << c.fraction) - 1)) + c.half
    n = (moved >> c.fraction).real("sitofp") - small.where(c.fraction, x.number(0))
    return fraction.real() - 1, n


def ends(y: Value, x: Value) -> Value:
    """The logarithm y of x, with those of 0, of infinity and of what has none."""
    y = (x < float("inf")).where(y, x)
    y = x.test("oeq", 0).where(float("-inf"), y)
    return (x < 0).where(float("nan"), y)


def log1p(x: Value, log: Any) -> Value:
    """ln u, and what u = 1 + x lost by rounding, over u."""
    u = x + 1
    part = (x - (u - 1)) / u
    part = ((u > 0) & (u < float("inf"))).where(part, 0)
    return (log(u) + part).signed(x)
