"""Expressions over elements (recompute/language/element.py) as CUDA C.

Every node is a variable of its own, rounded to its element type: the compiler contracts nothing.  Halves are computed
in float and rounded behind every node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ....language.element import HALVES, Expr, nodes
from ..device.kernel import C_TYPES, COMPUTE

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "eq": "==", "and": "&", "or": "|",
          "xor": "^"}  # fmt: skip
_FUNCTIONS = {"sqrt", "exp", "expm1", "log", "log1p", "tanh", "erf", "sin", "cos", "pow", "floor", "ceil", "rint",
              "trunc", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "copysign", "fmod",
              "exp2", "log2", "cbrt", "atan2"}  # fmt: skip
#: functions of integers; what is divided by 0 is 0, and the least number by -1 itself, as on NumPy
_OF_INTEGERS = {"fmod": "{1} == 0 ? 0 : {0} % {1}", "quotient": "{1} == 0 ? 0 : {0} / {1}", "shl": "{0} << {1}",
                "shr": "{0} >> {1}", "floor": "{0}", "ceil": "{0}", "rint": "{0}", "trunc": "{0}"}  # fmt: skip

_OF_SIGNED = {"fmod": "{1} == 0 || {1} == -1 ? 0 : {0} % {1}",
              "quotient": "{1} == 0 ? 0 : {1} == -1 ? 0 - (unsigned long long){0} : {0} / {1}"}  # fmt: skip


def literal(value: object, dtype: str) -> str:
    """A constant of an element type, to the bit."""
    if dtype == "bool":
        return "true" if value else "false"
    if isinstance(value, float) or dtype in ("f16", "bf16", "f32", "f64"):
        x = float(value)  # type: ignore[arg-type]
        kind = COMPUTE[dtype]
        if math.isnan(x):
            return f"narrow<{kind}>(__uint_as_float(0x7fc00000u))"
        if math.isinf(x):
            return f"{'-' if x < 0 else ''}infinity<{kind}>()"
        text = x.hex()
        return f"{text}f" if kind == "float" else text
    number = int(value)  # type: ignore[call-overload]
    if number == -(1 << 63):
        return "(-9223372036854775807ll - 1)"
    suffix = {"i64": "ll", "u64": "ull", "u32": "u"}.get(dtype, "")
    return f"({C_TYPES[dtype]}){number}{suffix}"


def rounded(text: str, dtype: str) -> str:
    """A float as it is in memory: 16-bit floats lose their last bits."""
    return f"widen(narrow<{dtype}>({text}))" if dtype in ("f16", "bf16") else text


def code(
    roots: Sequence[Expr], inputs: Sequence[str], prefix: str = "v", known: Mapping[int, str] | None = None
) -> tuple[list[str], list[str]]:
    """Statements, and the variable (or constant) that holds each root.

    `inputs`: C expressions of the inputs' elements, as they are computed with (halves widened).  `known`: variables of
    nodes that are there already, by id.
    """
    lines: list[str] = []
    names: dict[int, str] = dict(known or {})
    for x in nodes(roots, lambda x: () if id(x) in names else x.args):
        if id(x) in names:
            continue
        if x.fn == "input":
            names[id(x)] = inputs[x.value]
        elif x.fn == "constant":
            names[id(x)] = literal(x.value, x.dtype)
        elif x.fn == "cast" and x.dtype == "f32" and x.args[0].dtype in HALVES:
            names[id(x)] = names[id(x.args[0])]  # it is one already
        else:
            name = f"{prefix}{len(lines)}"
            lines.append(f"const {COMPUTE[x.dtype]} {name} = {_node(x, [names[id(a)] for a in x.args])};")
            names[id(x)] = name
    return lines, [names[id(r)] for r in roots]


def stored(x: Expr) -> Expr:
    """The operand of `narrow` for an element of x: a 16-bit float is rounded only once."""
    halved = x.fn == "cast" and x.dtype in HALVES and x.args[0].dtype == "f32"
    return x.args[0] if halved else x


def _node(x: Expr, args: Sequence[str]) -> str:
    """One function of variables."""
    kind = COMPUTE[x.dtype]
    if x.fn == "cast":
        return _cast(x, args[0])
    if x.fn == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if x.fn in ("max", "min"):
        return f"{'larger' if x.fn == 'max' else 'smaller'}<{kind}>({args[0]}, {args[1]})"
    if x.fn == "not":
        return f"!{args[0]}" if x.dtype == "bool" else f"({kind})~{args[0]}"
    if x.fn == "neg":
        return f"({kind})-{args[0]}"
    if x.fn == "abs":
        if kind in ("float", "double"):
            return f"{'fabsf' if kind == 'float' else 'fabs'}({args[0]})"
        return f"({kind})({args[0]} < 0 ? -{args[0]} : {args[0]})" if x.dtype[0] == "i" else args[0]
    if x.fn in _INFIX:
        text = f"{args[0]} {_INFIX[x.fn]} {args[1]}"
        if x.fn in ("lt", "le", "eq"):
            return text
        return rounded(text, x.dtype) if kind in ("float", "double") else f"({kind})({text})"
    if x.fn in _OF_INTEGERS and kind not in ("float", "double"):
        formats = {**_OF_INTEGERS, **_OF_SIGNED} if x.dtype[0] == "i" else _OF_INTEGERS
        return f"({kind})({formats[x.fn].format(*args)})"
    if x.fn in _FUNCTIONS:
        return rounded(f"{x.fn}{'f' if kind == 'float' else ''}({', '.join(args)})", x.dtype)
    raise NotImplementedError(f"{x.fn} has no CUDA C")


def _cast(x: Expr, a: str) -> str:
    source = x.args[0].dtype
    if x.dtype == "bool":
        return f"{a} != 0"
    if x.dtype in ("f16", "bf16"):
        return rounded(f"(float){a}" if source not in ("f64",) else a, x.dtype)
    return f"({COMPUTE[x.dtype]}){a}"
