"""LLVM IR of element expressions: text that computes `lanes` elements at a time.

Nothing is contracted or reordered and every node is rounded on its own, so that an element's bits do not depend on the
number of lanes or on what else a loop computes.  Elements of 16 bits are only read, written and converted: expressions
compute in float32 (recompute/language/formulas.py).  float32 functions are polynomials (see mathematics.py, whose bits
these are), float64 ones the C library's, lane by lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ....language.element import HALVES, Expr, cast
from ....language.types import DTYPES
from ...shared import mathematics as m
from ..code import emit
from ..device import native, reals
from ..device.reals import Format, Value, Writer

#: bfloat16 is its bits, and float16 where the processor does not convert it: LLVM would call functions of a library
_KINDS = {"bf16": "i16", "f16": "half", "f32": "float", "f64": "double", "bool": "i1"}
FLOATS = ("f32", "f64")


def kind(dtype: str) -> str:
    """LLVM's name of an element type in a register."""
    if dtype == "f16" and not native.converts_float16():
        return "i16"
    return _KINDS.get(dtype) or f"i{dtype[1:]}"


def stored(dtype: str) -> str:
    """LLVM's type of an element in memory: a truth is a byte."""
    return "i8" if dtype == "bool" else kind(dtype)


def width(dtype: str) -> int:
    """Bytes of an element in memory."""
    return DTYPES[dtype].itemsize


def number(value: Any, dtype: str) -> str:
    """A literal."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype in HALVES:
        bits = int(np.array(value).astype(DTYPES[dtype]).view(np.uint16))
        return f"0xH{bits:04X}" if kind(dtype) == "half" else str(bits)
    return reals.literal(value, kind(dtype))


class Code(emit.Code, Writer):
    """A kernel under construction; `lanes` elements in each register (1: scalars)."""

    def __init__(self, lanes: int) -> None:
        super().__init__()
        self.lanes = lanes

    # -- types ----------------------------------------------------------------------------------------------------

    def literal(self, value: Any, dtype: str) -> str:
        """The same number in all lanes."""
        return self.same(kind(dtype), number(value, dtype))

    def f32(self, value: Any) -> str:
        """A float32 in all lanes."""
        return self.literal(value, "f32")

    def i32(self, value: int) -> str:
        """An integer in all lanes."""
        return self.literal(value, "i32")

    # -- instructions ---------------------------------------------------------------------------------------------

    def part(self, x: str, element: str, first: int, count: int) -> str:
        """Lanes [first, first + count) of a register."""
        if count == 1:
            return self.let(f"extractelement {self.of(element)} {x}, i64 {first}")
        wanted = ", ".join(f"i32 {first + i}" for i in range(count))
        whole = self.of(element)
        return self.let(f"shufflevector {whole} {x}, {whole} poison, <{count} x i32> <{wanted}>")

    def fma(self, a: str, b: str, c: str) -> str:
        """a · b + c in float32, rounded once."""
        return self.call("fma", "float", a, b, c)

    def function(self, fn: str, x: str) -> str:
        """One of `SINGLES` of a float32."""
        return SINGLES[fn](self.single(x)).name

    def single(self, x: str) -> Value:
        """A float32 to compute with."""
        return Value(self, SINGLE, x, "float")

    # -- expressions ----------------------------------------------------------------------------------------------

    def values(self, roots: Sequence[Expr], known: Mapping[int, str]) -> list[str]:
        """Registers of expressions; `known` has those of nodes that are there already, by id."""
        result = dict(known)
        stack = [(r, False) for r in reversed(roots)]
        while stack:
            x, ready = stack.pop()
            if id(x) in result:
                continue
            if ready:
                result[id(x)] = self.node(x, [result[id(a)] for a in x.args])
            else:
                stack.append((x, True))
                stack += [(a, False) for a in reversed(x.args)]
        return [result[id(r)] for r in roots]

    def node(self, x: Expr, args: Sequence[str]) -> str:
        """The register of one node."""
        if x.fn == "constant":
            return self.literal(x.value, x.dtype)
        dtype = x.args[0].dtype
        if x.fn == "cast":
            return self.cast(args[0], dtype, x.dtype)
        if x.fn == "where":
            return self.select(args[0], kind(x.dtype), args[1], args[2])
        if dtype in HALVES:
            wide = Expr(x.fn, tuple(cast(a, "f32") for a in x.args), "f32" if x.dtype in HALVES else x.dtype)
            value = self.node(wide, [self.cast(a, dtype, "f32") for a in args])
            return self.cast(value, wide.dtype, x.dtype)
        if x.fn in ("and", "or", "xor"):
            return self.op(x.fn, kind(dtype), *args)
        if x.fn == "not":
            return self.op("xor", kind(dtype), args[0], self.literal(1 if dtype == "bool" else -1, dtype))
        if x.fn in ("lt", "le", "eq"):
            return self.compare(x.fn, dtype, *args)
        if x.fn in ("max", "min"):
            return self.extreme(x, *args)
        if dtype in FLOATS:
            return self.float_node(x.fn, x.dtype, args)
        return self.integer_node(x.fn, x.dtype, args)

    def compare(self, fn: str, dtype: str, a: str, b: str) -> str:
        """a < b, a ≤ b, a = b; false where one is NaN."""
        if dtype in FLOATS:
            return self.op(f"fcmp o{fn}", kind(dtype), a, b)
        if fn == "eq":
            return self.op("icmp eq", kind(dtype), a, b)
        return self.op(f"icmp {'s' if dtype[0] == 'i' else 'u'}{fn}", kind(dtype), a, b)

    def extreme(self, x: Expr, a: str, b: str) -> str:
        """The larger or smaller; NaN where one is."""
        dtype, element = x.dtype, kind(x.dtype)
        if x.args[1].fn == "constant" and x.args[1].value == x.args[1].value:
            a, b = b, a  # the second is taken where it is NaN
        chosen = self.select(self.compare("lt", dtype, *((b, a) if x.fn == "max" else (a, b))), element, a, b)
        if dtype not in FLOATS or any(y.fn == "constant" and y.value == y.value for y in x.args):
            return chosen
        return self.select(self.op("fcmp uno", element, a, a), element, a, chosen)

    def cast(self, x: str, source: str, target: str) -> str:
        """Another element type."""
        if source == target:
            return x
        if source in HALVES:
            return self.cast(self.widened(x, source), "f32", target)
        if target in HALVES:
            return self.narrowed(self.cast(x, source, "f32"), target)
        a, b = kind(source), kind(target)
        if target == "bool":
            compare = "fcmp une" if source in FLOATS else "icmp ne"
            return self.op(compare, a, x, self.literal(0, source))
        if source == "bool":
            return self.select(x, b, self.literal(1, target), self.literal(0, target))
        if source in FLOATS and target in FLOATS:
            return self.convert("fpext" if target == "f64" else "fptrunc", x, a, b)
        if source in FLOATS and native.toolchain().portable:  # the nearest number that there is
            return self.convert("fptoui" if target[0] == "u" else "fptosi", x, a, b)
        if source in FLOATS:
            middle = "i64" if target in ("i64", "u64", "u32") else "i32"
            whole = self.convert("fptosi", x, a, middle)
            return whole if middle == b else self.convert("trunc", whole, middle, b)
        signed = source[0] == "i"
        if target in FLOATS:
            return self.convert("sitofp" if signed else "uitofp", x, a, b)
        if width(source) == width(target):
            return x
        name = "trunc" if width(target) < width(source) else "sext" if signed else "zext"
        return self.convert(name, x, a, b)

    def widened(self, x: str, source: str) -> str:
        """16 bits as a float32."""
        if kind(source) == "half":
            return self.convert("fpext", x, "half", "float")
        bits = Value(self, SINGLE, self.convert("zext", x, "i16", "i32"), "i32")
        if source == "bf16":
            return (bits << 16).real().name
        size = ((bits & 0x7FFF) << 13).real() * 2.0**112  # the exponent's bias, and subnormal numbers
        huge = (bits & 0x7C00).test("eq", 0x7C00).where(0x7F800000, bits.number(0))
        return (size.bits() | huge | ((bits & 0x8000) << 16)).real().name

    def narrowed(self, x: str, target: str) -> str:
        """A float32 rounded to 16 bits, to the nearest and to even numbers between two."""
        if kind(target) == "half":
            return self.convert("fptrunc", x, "float", "half")
        if target == "bf16" and native.converts_bfloat16():
            return self.convert("bitcast", self.convert("fptrunc", x, "float", "bfloat"), "bfloat", "i16")
        number = self.single(x)
        bits, drop = number.bits(), 16 if target == "bf16" else 13
        up = bits + ((bits.do("lshr", drop) & 1) + ((1 << drop - 1) - 1))
        if target == "bf16":
            up = number.test("uno", number).where(bits | 0x400000, up).do("lshr", drop)
            return self.convert("trunc", up.name, "i32", "i16")
        small = (abs(number) + 0.5).bits() - number.number(0.5).bits()  # their last bits are alike
        up = ((up & 0x7FFFFFFF) - (112 << 23)).do("lshr", drop)
        up = (abs(number) < 2.0**-14).where(small, (abs(number) < 65536).where(up, up.number(0x7C00)))
        up = number.test("uno", number).where(0x7E00, up) | (bits.do("lshr", 16) & 0x8000)
        return self.convert("trunc", up.name, "i32", "i16")

    def integer_node(self, fn: str, dtype: str, args: Sequence[str]) -> str:
        """Arithmetic that wraps around."""
        element = kind(dtype)
        if fn == "neg":
            return self.op("sub", element, self.literal(0, dtype), args[0])
        if fn == "abs":
            if dtype[0] == "u":
                return args[0]
            below = self.compare("lt", dtype, args[0], self.literal(0, dtype))
            return self.select(below, element, self.op("sub", element, self.literal(0, dtype), args[0]), args[0])
        return self.op(fn, element, *args)

    def float_node(self, fn: str, dtype: str, args: Sequence[str]) -> str:
        """Arithmetic, intrinsics, own functions for float32, the C library for the rest."""
        element = kind(dtype)
        if fn in ("add", "sub", "mul", "div"):
            return self.op(f"f{fn}", element, *args)
        if fn == "neg":
            return self.let(f"fneg {self.of(element)} {args[0]}")
        intrinsic = {"abs": "fabs", "sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "rint": "rint", "trunc": "trunc"}
        if fn in intrinsic:
            return self.call(intrinsic[fn], element, *args)
        if dtype == "f32" and fn in SINGLES:
            return self.function(fn, *args)
        if dtype == "f32":
            value = self.library(fn, [self.cast(a, "f32", "f64") for a in args])
            return self.convert("fptrunc", value, "double", "float")
        return self.library(fn, args)

    def library(self, fn: str, args: Sequence[str]) -> str:
        """A function of the C library, for each lane."""
        doubles = ", ".join(["double"] * len(args))
        self.declared[f"@{fn}"] = f"declare double @{fn}({doubles})"
        if self.lanes == 1:
            return self.let(f"call double @{fn}({', '.join(f'double {a}' for a in args)})")
        name = f"@{fn}.lanes{self.lanes}"
        t = self.of("double")
        self.declared[name] = _lanes(fn, name, t, self.lanes, len(args))
        return self.let(f"call {t} {name}({', '.join(f'{t} {a}' for a in args)})")


SINGLE = Format(
    "float", "i32", 23, True, m._LN2_HIGH, m._LN2_LOW, m._LOG2E, (m._E4, m._E3, m._E2, m._E1, m._E0),
    lowest=m._LOWEST, highest=m._HIGHEST, minus_one=-30, one=10,
)  # fmt: skip


def _log(x: Value) -> Value:
    """The exponent's logarithm plus a polynomial in the fraction; see mathematics.py."""
    t, n = reals.split(x)
    z = t * t
    p = t.horner((m._L7, m._L6, m._L5, m._L4, m._L3, m._L2, m._L1, m._L0))
    y = n.times(m._LN2_LOW, (z * t).times(p, z * -0.5)) + t
    return reals.ends(n.times(m._LN2_HIGH, y), x)


def _erf(x: Value) -> Value:
    """x · P(x²) / Q(x²) on |x| ≤ 4, as ops/tiles.py has it."""
    from ....ops.erf import _P32, _Q32

    a = x.clamp(-4, 4)
    z = a * a
    return (a * z.horner(_P32[::-1]) / z.horner(_Q32[::-1])).clamp(-1, 1)


#: functions of float32 that are polynomials
SINGLES: dict[str, Callable[[Value], Value]] = {
    "exp": reals.exp, "expm1": reals.expm1, "tanh": reals.tanh, "log": _log, "erf": _erf,
    "log1p": lambda x: reals.log1p(x, _log),
}  # fmt: skip


def _lanes(fn: str, name: str, t: str, lanes: int, count: int) -> str:
    """A function that calls a scalar one for each lane."""
    args = range(count)
    lines = [f"define internal {t} {name}({', '.join(f'{t} %x{i}' for i in args)}) noinline {{", "entry:"]
    for i in args:
        lines += [f"  %a{i} = alloca {t}", f"  store {t} %x{i}, ptr %a{i}"]
    lines += ["  br label %loop", "loop:", "  %i = phi i64 [0, %entry], [%n, %loop]"]
    for i in args:
        lines += [f"  %p{i} = getelementptr double, ptr %a{i}, i64 %i", f"  %v{i} = load double, ptr %p{i}"]
    lines += [
        f"  %r = call double @{fn}({', '.join(f'double %v{i}' for i in args)})",
        "  store double %r, ptr %p0",
        "  %n = add i64 %i, 1",
        f"  %more = icmp slt i64 %n, {lanes}",
        "  br i1 %more, label %loop, label %done",
        "done:",
        f"  %found = load {t}, ptr %a0",
        f"  ret {t} %found",
        "}",
    ]
    return "\n".join(lines)
