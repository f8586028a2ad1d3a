"""Kernels whose bits are the same on every processor: no order that a processor chooses, no function of a C library.

What a module's text asks of LLVM is changed before it is compiled:

- no operation may be reordered or contracted, so that a sum has the order in which it is written;
- a · b + c of float32 that rounds once is worked out in float64 where a processor has no instruction for it;
- functions of float64 that a C library rounds as its authors chose, such as exp, are those of float64.py;
- a conversion to an integer that cannot hold the number gives its nearest one, and 0 for NaN: processors differ there.

Other functions of a library are refused.  A NaN's sign and payload are a processor's own.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Any

from ....errors import UsageError
from . import float64, reals

_FLAGS = "reassoc|contract|arcp|afn|nsz|nnan|ninf|fast"
_LOOSE = re.compile(rf"\b(fadd|fsub|fmul|fdiv|frem|fneg|fcmp|call|select|phi)((?:\s+(?:{_FLAGS}))+)(?=\s)")
_WHOLE_NUMBER = re.compile(r"\bfpto([su])i (?:<(\d+) x )?(half|float|double)>? (\S+) to (?:<\d+ x )?(i\d+)>?")
_FMA = re.compile(r"@llvm\.fma\.((?:v\d+)?f32)\b")
#: how LLVM and C call functions that are ours
_OURS = "|".join(float64.FUNCTIONS)
_NAMES = re.compile(rf"@(?:llvm\.({_OURS})\.f(32|64)|({_OURS})(f?))(?=\()")
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
    """Another one whenever files change that adapt code."""
    files = (__file__, str(float64.__file__), str(reals.__file__))
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in files)).hexdigest()[:16]


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
    declared: dict[str, str] = {}
    for name in sorted(wanted):
        text, needed = float64.definition(name)
        more, declared = more + text, declared | needed
    return "\n".join([ir + more, *(text for name, text in declared.items() if f"{name}(" not in ir)])


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
        f"%inexact = fcmp one {double} %lost, {same('0.0', 'double')}",
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
