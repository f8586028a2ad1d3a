"""Kernels whose bits are the same on every processor: no order that a processor chooses, no function of a C library.

What a module's text asks of LLVM is changed before it is compiled:

- no operation may be reordered or contracted, so that a sum has the order in which it is written;
- a · b + c of float32 that rounds once is worked out in float64 where a processor has no instruction for it;
- exp, log and pow in float64, which a C library rounds as its authors chose, are functions of this file: below 2 units
  in the last place, pow below 2 (1 + |y ln x|);
- a conversion to an integer that cannot hold the number gives its nearest one, and 0 for NaN: processors differ there.

Other functions of a library are refused.  A NaN's sign and payload are a processor's own.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import struct
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from ....errors import UsageError

_FLAGS = "reassoc|contract|arcp|afn|nsz|nnan|ninf|fast"
_LOOSE = re.compile(rf"\b(fadd|fsub|fmul|fdiv|frem|fneg|fcmp|call|select|phi)((?:\s+(?:{_FLAGS}))+)(?=\s)")
_WHOLE_NUMBER = re.compile(r"\bfpto([su])i (?:<(\d+) x )?(half|float|double)>? (\S+) to (?:<\d+ x )?(i\d+)>?")
_FMA = re.compile(r"@llvm\.fma\.((?:v\d+)?f32)\b")
#: functions of float64 that are written here; how LLVM and C call them
_OURS = ("exp", "log", "pow", "expm1", "tanh", "log1p")
_NAMES = re.compile(rf"@(?:llvm\.({'|'.join(_OURS)})\.f(32|64)|({'|'.join(_OURS)})(f?))(?=\()")
#: intrinsics that are exact, rounded once, or copy: those whose results do not depend on a processor
_EXACT = re.compile(
    r"llvm\.(fma|fabs|sqrt|floor|ceil|rint|roundeven|trunc|nearbyint|copysign|maximum|minimum|mem\w+|"
    r"masked\.\w+|[su](min|max|add|sub|mul)\w*(\.\w+)*|abs|ctpop|ctlz|cttz|bswap|fsh[lr]|"
    r"vector\.(?!reduce\.fm(?:ax|in)\b)\w+|lifetime\.\w+|prefetch|assume|experimental\.noalias\.\w+|"
    r"is\.constant|is\.fpclass|convert\.\w+|fpto[su]i\.sat)\b"
)
_EXACT_IN_C = re.compile(r"(sqrt|fabs|floor|ceil|trunc|rint|nearbyint|roundeven|copysign|fma|fmod)f?")
#: what compilers put in for copies, and which of a thread's rooms a kernel works in
_OTHERS = ("memcpy", "memset", "memmove", "omp_get_thread_num")


@functools.cache
def version() -> str:
    """Another one whenever this file changes, on which code depends that it has adapted."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def adapted(ir: str, *, fused: bool) -> str:
    """A module's text with bits that every processor gives.  `fused`: whether a · b + c is one instruction here."""
    ir = _LOOSE.sub(r"\1", ir)
    ir, more = _saturated(ir)
    if not fused:
        kinds = sorted(set(_FMA.findall(ir)))
        ir = _FMA.sub(r"@portable.fma.\1", _undeclared(ir, _FMA))
        more += "".join(_fma(k) for k in kinds)
    wanted: set[str] = set()

    def ours(m: re.Match[str]) -> str:
        name = f"{m[1] or m[3]}{'f' if m[2] == '32' or m[4] else ''}"
        wanted.add(name)
        return f"@portable.{name}"

    ir = _NAMES.sub(ours, _undeclared(ir, _NAMES))
    if wanted:
        doubles = {name.removesuffix("f") for name in wanted}
        doubles = doubles.union(*(_FUNCTIONS[name][1] for name in doubles))
        more += "".join(_FUNCTIONS[name][0]() for name in sorted(doubles))
        more += "".join(_single(name) for name in sorted(wanted) if name.endswith("f"))
        for name, args in _EXACTLY.items():
            if f"@llvm.{name}.f64(" not in ir:
                more += f"declare double @llvm.{name}.f64({args})\n"
    return ir + more


def _undeclared(ir: str, names: re.Pattern[str]) -> str:
    return "\n".join(x for x in ir.split("\n") if not (x.startswith("declare") and names.search(x)))


def _saturated(ir: str) -> tuple[str, str]:
    """Conversions to integers by intrinsics that define all of them, and the declarations."""
    declared: set[str] = set()

    def call(m: re.Match[str]) -> str:
        lanes, size = m[2], {"half": "f16", "float": "f32", "double": "f64"}[m[3]]
        to, source = (f"<{lanes} x {t}>" if lanes else t for t in (m[5], m[3]))
        suffix = f"v{lanes}{m[5]}.v{lanes}{size}" if lanes else f"{m[5]}.{size}"
        name = f"@llvm.fpto{m[1]}i.sat.{suffix}"
        declared.add(f"declare {to} {name}({source})\n")
        return f"call {to} {name}({source} {m[4]})"

    ir = _WHOLE_NUMBER.sub(call, ir)
    return ir, "".join(sorted(declared))


def check(module: Any) -> None:
    """UsageError where an optimised module calls what is not the same everywhere."""
    for f in module.functions:
        if f.is_declaration and not (_EXACT.match(f.name) or _EXACT_IN_C.fullmatch(f.name) or f.name in _OTHERS):
            raise UsageError(
                f"portable bits are not for a kernel that calls '{f.name}': C libraries differ in its last bits; leave "
                "out --portable-bits, or that function"
            )


def _number(x: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', x))[0]:016X}"


class _Function:
    """A function of float64 under construction."""

    def __init__(self, name: str, *args: str) -> None:
        self.name, self.args, self.lines = name, args, []  # type: tuple[str, tuple[str, ...], list[str]]

    def let(self, text: str) -> str:
        """An instruction's result."""
        self.lines.append(f"%t{len(self.lines)} = {text}")
        return f"%t{len(self.lines) - 1}"

    def do(self, name: str, a: str, b: str) -> str:
        """a name b."""
        return self.let(f"{name} double {a}, {b}")

    def select(self, condition: str, a: str, b: str) -> str:
        """a where the condition holds, else b."""
        return self.let(f"select i1 {self.let(condition)}, double {a}, double {b}")

    def clamp(self, x: str, low: float, high: float) -> str:
        """Within the bounds; NaN stays."""
        x = self.select(f"fcmp ogt double {x}, {_number(high)}", _number(high), x)
        return self.select(f"fcmp olt double {x}, {_number(low)}", _number(low), x)

    def horner(self, x: str, coefficients: list[float]) -> str:
        """A polynomial; the coefficients begin with that of the highest power."""
        found = _number(coefficients[0])
        for c in coefficients[1:]:
            found = self.do("fadd", self.do("fmul", found, x), _number(c))
        return found

    def text(self, result: str) -> str:
        """The definition."""
        body = "\n  ".join([*self.lines, f"ret double {result}"])
        args = ", ".join(f"double {a}" for a in self.args)
        return f"\ndefine internal double @portable.{self.name}({args}) {{\n  {body}\n}}\n"


#: ln 2 in two parts, of which the first has so few bits that its products with exponents are exact
_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LOW = float(Decimal(2).ln() - Decimal(_HIGH))
_WHOLE = 6755399441055744.0  # 1.5 · 2⁵²: adding it rounds to an integer


def _reduced(f: _Function, t: str) -> tuple[str, str]:
    """n as an i64, and eʳ - 1 by Taylor's polynomial, where t = n ln 2 + r, |r| ≤ ½ ln 2."""
    whole = f.do("fadd", f.do("fmul", t, _number(1 / math.log(2))), _number(_WHOLE))
    n = f.do("fsub", whole, _number(_WHOLE))
    r = f.do("fsub", f.do("fsub", t, f.do("fmul", n, _number(_HIGH))), f.do("fmul", n, _number(_LOW)))
    p = f.horner(r, [1 / math.factorial(k) for k in range(13, 1, -1)])
    bits = f.let(f"bitcast double {whole} to i64")
    return f.let(f"sub i64 {bits}, {0x4338000000000000}"), f.do("fadd", f.do("fmul", f.do("fmul", r, r), p), r)


def _power_of_two(f: _Function, n: str) -> str:
    bits = f.let(f"shl i64 {f.let(f'add i64 {n}, 1023')}, 52")
    return f.let(f"bitcast i64 {bits} to double")


def _exp() -> str:
    """2ⁿ eʳ, in two steps: each power of two is a normal number."""
    f = _Function("exp", "%x")
    n, p = _reduced(f, f.clamp("%x", -746.0, 710.0))
    found, first = f.do("fadd", p, _number(1.0)), f.let(f"ashr i64 {n}, 1")
    for part in (first, f.let(f"sub i64 {n}, {first}")):
        found = f.do("fmul", found, _power_of_two(f, part))
    return f.text(found)


def _expm1() -> str:
    """2 (2ⁿ⁻¹ (eʳ - 1) + 2ⁿ⁻¹ - ½)."""
    f = _Function("expm1", "%x")
    n, p = _reduced(f, f.clamp("%x", -60.0, 710.0))
    half = _power_of_two(f, f.let(f"sub i64 {n}, 1"))
    found = f.do("fadd", f.do("fmul", half, p), f.do("fsub", half, _number(0.5)))
    return f.text(f.do("fadd", found, found))


def _tanh() -> str:
    """t / (t + 2) with t = e^2|x| - 1, and x's sign."""
    f = _Function("tanh", "%x")
    size = f.clamp(f.let("call double @llvm.fabs.f64(double %x)"), 0.0, 20.0)
    t = f.let(f"call double @portable.expm1(double {f.do('fadd', size, size)})")
    found = f.do("fdiv", t, f.do("fadd", t, _number(2.0)))
    return f.text(f.let(f"call double @llvm.copysign.f64(double {found}, double %x)"))


def _log1p() -> str:
    """ln u, and what u = 1 + x lost by rounding, over u."""
    f = _Function("log1p", "%x")
    u = f.do("fadd", "%x", _number(1.0))
    part = f.do("fdiv", f.do("fsub", "%x", f.do("fsub", u, _number(1.0))), u)
    part = f.select(f"fcmp ogt double {u}, {_number(0.0)}", part, _number(0.0))
    part = f.select(f"fcmp olt double {u}, {_number(math.inf)}", part, _number(0.0))
    return f.text(f.do("fadd", f.let(f"call double @portable.log(double {u})"), part))


def _log() -> str:
    """The exponent's logarithm plus ln(1 + t), |t| < √2 - 1, by the series of 2 artanh(t / (2 + t))."""
    f = _Function("log", "%x")
    least, up, half = 2.0**-1022, 2.0**54, 0x3FE6A09E667F3BCD  # the bits of √½
    small = f.let(f"fcmp olt double %x, {_number(least)}")
    x = f.let(f"select i1 {small}, double {f.do('fmul', '%x', _number(up))}, double %x")
    moved = f.let(f"sub i64 {f.let(f'bitcast double {x} to i64')}, {half}")
    bits = f.let(f"add i64 {f.let(f'and i64 {moved}, {(1 << 52) - 1}')}, {half}")
    t = f.do("fsub", f.let(f"bitcast i64 {bits} to double"), _number(1.0))
    n = f.let(f"sitofp i64 {f.let(f'ashr i64 {moved}, 52')} to double")
    n = f.do("fsub", n, f.let(f"select i1 {small}, double {_number(54.0)}, double {_number(0.0)}"))
    s = f.do("fdiv", t, f.do("fadd", t, _number(2.0)))
    z = f.do("fmul", s, s)
    rest = f.do("fmul", z, f.horner(z, [2 / (2 * k + 1) for k in range(12, 0, -1)]))
    square = f.do("fmul", f.do("fmul", t, t), _number(0.5))
    part = f.do("fadd", f.do("fmul", s, f.do("fadd", square, rest)), f.do("fmul", n, _number(_LOW)))
    found = f.do("fsub", f.do("fmul", n, _number(_HIGH)), f.do("fsub", f.do("fsub", square, part), t))
    found = f.select(f"fcmp olt double %x, {_number(math.inf)}", found, "%x")  # also NaN
    found = f.select(f"fcmp oeq double %x, {_number(0.0)}", _number(-math.inf), found)
    return f.text(f.select(f"fcmp olt double %x, {_number(0.0)}", _number(math.nan), found))


def _pow() -> str:
    """exp(y ln |x|), negative for odd y and negative x; NaN for negative x and y that are no integers."""
    f = _Function("pow", "%x", "%y")
    size = f.let("call double @llvm.fabs.f64(double %x)")
    found = f.let(f"call double @portable.log(double {size})")
    found = f.let(f"call double @portable.exp(double {f.do('fmul', '%y', found)})")
    found = f.select(f"fcmp oeq double {size}, {_number(1.0)}", _number(1.0), found)
    whole = f.let("call double @llvm.floor.f64(double %y)")
    twice = f.let(f"call double @llvm.floor.f64(double {f.do('fmul', '%y', _number(0.5))})")
    even = f.let(f"fcmp oeq double {f.do('fadd', twice, twice)}, %y")
    minus = f.let(f"fneg double {found}")
    signed = f.let(f"select i1 {even}, double {found}, double {minus}")
    below = f.let(f"fcmp olt double %x, {_number(0.0)}")
    finite = f.let(f"fcmp ogt double %x, {_number(-math.inf)}")
    other = f.let(f"select i1 {f.let(f'and i1 {below}, {finite}')}, double {_number(math.nan)}, double {found}")
    signed = f.select(f"fcmp oeq double {whole}, %y", signed, other)
    below = f.let("icmp slt i64 " + f.let("bitcast double %x to i64") + ", 0")
    nan = f.let("fcmp uno double %x, %x")
    found = f.let(f"select i1 {f.let(f'or i1 {nan}, {below}')}, double {signed}, double {found}")
    found = f.select("fcmp uno double %x, %y", _number(math.nan), found)
    found = f.select(f"fcmp oeq double %x, {_number(1.0)}", _number(1.0), found)
    found = f.select(f"fcmp oeq double %y, {_number(0.0)}", _number(1.0), found)
    return f.text(found)


#: name → its definition, and which of them it calls
_FUNCTIONS: dict[str, tuple[Callable[[], str], set[str]]] = {
    "exp": (_exp, set()), "log": (_log, set()), "pow": (_pow, {"exp", "log"}), "expm1": (_expm1, set()),
    "tanh": (_tanh, {"expm1"}), "log1p": (_log1p, {"log"}),
}  # fmt: skip
_EXACTLY = {"fabs": "double", "floor": "double", "copysign": "double, double"}


def _single(name: str) -> str:
    """The float32 of a function of float64."""
    count = 2 if name == "powf" else 1
    lines = [f"%d{i} = fpext float %x{i} to double" for i in range(count)]
    given = ", ".join(f"double %d{i}" for i in range(count))
    lines += [f"%r = call double @portable.{name[:-1]}({given})", "%f = fptrunc double %r to float", "ret float %f"]
    args = ", ".join(f"float %x{i}" for i in range(count))
    return f"\ndefine internal float @portable.{name}({args}) {{\n  " + "\n  ".join(lines) + "\n}\n"


@functools.cache
def _fma(kind: str) -> str:
    """a · b + c: the product is exact in float64, and a sum there that is rounded to odd rounds once (Boldo &
    Melquiond 2008)."""
    lanes = int(kind[1 : kind.index("f")]) if kind[0] == "v" else 1

    def of(element: str) -> str:
        return element if lanes == 1 else f"<{lanes} x {element}>"

    def same(value: object, element: str) -> str:
        return str(value) if lanes == 1 else "<" + ", ".join([f"{element} {value}"] * lanes) + ">"

    single, double, word, flag = map(of, ("float", "double", "i64", "i1"))
    lines = [f"%{v}d = fpext {single} %{v} to {double}" for v in "abc"]
    lines += [
        f"%p = fmul {double} %ad, %bd",
        f"%s = fadd {double} %p, %cd",
        f"%t = fsub {double} %s, %p",
        f"%u = fsub {double} %s, %t",
        f"%v = fsub {double} %p, %u",
        f"%w = fsub {double} %cd, %t",
        f"%lost = fadd {double} %v, %w",  # s + lost is exact
        f"%inexact = fcmp one {double} %lost, {same(_number(0.0), 'double')}",
        f"%bits = bitcast {double} %s to {word}",
        f"%way = bitcast {double} %lost to {word}",
        f"%signs = xor {word} %bits, %way",
        f"%inward = icmp slt {word} %signs, {same(0, 'i64')}",
        f"%step = select {flag} %inward, {word} {same(-1, 'i64')}, {word} {same(0, 'i64')}",
        f"%cut = add {word} %bits, %step",  # towards zero
        f"%odd = or {word} %cut, {same(1, 'i64')}",
        f"%kept = select {flag} %inexact, {word} %odd, {word} %bits",
        f"%found = bitcast {word} %kept to {double}",
        f"%rounded = fptrunc {double} %found to {single}",
        f"ret {single} %rounded",
    ]
    args = ", ".join(f"{single} %{v}" for v in "abc")
    return f"\ndefine internal {single} @portable.fma.{kind}({args}) alwaysinline {{\n  " + "\n  ".join(lines) + "\n}\n"
