"""Kernels of traced numerics: one source for each function and element types; shapes and strides are arguments.

A `Walk` says where the operands' elements are: dimensions from the innermost on, and each operand's steps in elements.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from ....language.element import argument
from ....language.types import FLOATS
from ..code.expressions import code
from ..device.kernel import C_TYPES, COMPUTE, Kernel
from .ufuncs import element

#: dimensions that a walk has, after those that can be walked as one have been joined
DIMENSIONS = 8

WALK = f"""\
// Dimensions from the innermost on, and each operand's steps along them, in elements.
template <int N> struct Walk {{ long long size, rank, shape[{DIMENSIONS}], step[N][{DIMENSIONS}]; }};

template <int N> DEVICE void find(const Walk<N>& w, long long i, long long* at)
{{
    for (int k = 0; k < N; k++)
        at[k] = 0;
    for (int d = 0; d + 1 < w.rank; d++) {{
        long long next = w.size < 0x7fffffff ? (long long)((unsigned)i / (unsigned)w.shape[d]) : i / w.shape[d];
        long long here = i - next * w.shape[d];
        for (int k = 0; k < N; k++)
            at[k] += here * w.step[k][d];
        i = next;
    }}
    for (int k = 0; k < N; k++)
        at[k] += i * w.step[k][w.rank - 1];
}}
"""
_THREAD = """\
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= w.size) return;
    long long at[{0}];
    find(w, i, at);
"""
_BYTES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
_NUMBERS = {"i8": "int", "i16": "int", "u8": "unsigned", "u16": "unsigned"}


def walk(shape: Sequence[int], steps: Sequence[Sequence[int]]) -> Any:
    """The structure's contents; dimensions from the outermost on, as arrays have them."""
    dims = list(shape)[::-1] or [1]
    size = 1
    for d in dims:
        size *= d
    words = [size, len(dims), *dims, *[1] * (DIMENSIONS - len(dims))]
    for s in steps:
        back = list(s)[::-1] or [0]
        words += [*back, *[0] * (DIMENSIONS - len(back))]
    return (ctypes.c_longlong * len(words))(*words)


def joined(shape: Sequence[int], steps: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The same walk with as few dimensions as can be: those of one element go, those in a row become one."""
    dims: list[int] = []
    found: list[list[int]] = [[] for _ in steps]
    for i, d in enumerate(shape):
        if d == 1:
            continue
        here = [s[i] for s in steps]
        if dims and all(f[-1] == h * d for f, h in zip(found, here, strict=True)):
            dims[-1] *= d
            for f, h in zip(found, here, strict=True):
                f[-1] = h
        else:
            dims.append(d)
            for f, h in zip(found, here, strict=True):
                f.append(h)
    return dims, found


def number_type(dtype: str) -> str:
    """The C type in which a number of this element type is handed to a kernel."""
    return _NUMBERS.get(dtype) or COMPUTE[dtype]


@functools.cache
def elementwise(
    name: str, kind: str, operands: tuple[str, ...], numbers: tuple[bool, ...], out: str, *, masked: bool
) -> Kernel:
    """out = function(operands), where the mask is set if there is one; `numbers`: which operands are no arrays."""
    arrays = [i for i, n in enumerate(numbers) if not n]
    count = 1 + len(arrays) + masked
    given, texts, loads = [], [], []
    for i, t in enumerate(operands):
        if numbers[i]:
            given.append(f"{number_type(t)} n{i}")
            texts.append(f"({COMPUTE[t]})n{i}")
        else:
            given.append(f"const {C_TYPES[t]}* x{i}")
            texts.append(f"a{i}")
            loads.append(f"    const {COMPUTE[t]} a{i} = widen(x{i}[at[{1 + arrays.index(i)}]]);\n")
    root = element(name, kind, [argument(i, t) for i, t in enumerate(operands)], out)
    lines, (value,) = code([root], texts)
    keep = f"    if (!mask[at[{count - 1}]]) return;\n" if masked else ""
    body = _THREAD.format(count) + keep + "".join(loads) + "".join(f"    {x}\n" for x in lines)
    body += f"    out[at[0]] = narrow<{C_TYPES[out]}>({value});\n"
    title = [name, kind, *(t + "s" * n for t, n in zip(operands, numbers, strict=True)), "to", out]
    parameters = [f"Walk<{count}> w", f"{C_TYPES[out]}* out", *given, *(["const bool* mask"] if masked else [])]
    return Kernel("step_" + "_".join(title) + "_masked" * masked, ", ".join(parameters), body, WALK)


@functools.cache
def copy(itemsize: int, *, masked: bool = False) -> Kernel:
    """Elements of that many bytes."""
    t = _BYTES[itemsize]
    keep = "    if (!mask[at[2]]) return;\n" if masked else ""
    body = _THREAD.format(2 + masked) + keep + "    out[at[0]] = x[at[1]];\n"
    mask = ", const bool* mask" if masked else ""
    name = f"step_copy_{itemsize}" + "_masked" * masked
    return Kernel(name, f"Walk<{2 + masked}> w, {t}* out, const {t}* x{mask}", body, WALK)


@functools.cache
def iota(dtype: str) -> Kernel:
    """start + Σ index · step · by."""
    wide = "double" if dtype in FLOATS else "long long"
    body = _THREAD.format(2) + f"    out[at[0]] = narrow<{C_TYPES[dtype]}>(start + ({wide})at[1] * by);\n"
    return Kernel(f"step_iota_{dtype}", f"Walk<2> w, {C_TYPES[dtype]}* out, {wide} start, {wide} by", body, WALK)


# -- reductions -------------------------------------------------------------------------------------------------------


def accumulator(kind: str) -> str:
    """The element type in which values are added: floats in float64, so that no order matters; integers wrap."""
    return "f64" if kind in FLOATS else "u64"


@functools.cache
def reduction(dtype: str, kind: str, out: str, *, warp: bool) -> Kernel:
    """Each sum by one thread, or by a warp.  `w`: results and their elements, `v`: one's elements, in `parts`."""
    a, lanes = COMPUTE[accumulator(kind)], 32 if warp else 1
    body = f"""    typedef {a} A;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, me = i / {lanes}, lane = i % {lanes};
    if (me >= w.size * parts) return;
    long long at[2], in[1], part = me % parts, length = (v.size + parts - 1) / parts;
    find(w, me / parts, at);
    long long stop = (part + 1) * length < v.size ? (part + 1) * length : v.size;
    A a = 0;
    for (long long j = part * length + lane; j < stop; j += {lanes}) {{
        find(v, j, in);
        a += (A)({COMPUTE[kind]})widen(x[at[1] + in[0]]);
    }}
    {"a = warp_reduce(a, Plus());" if warp else ""}
    {"if (lane) return;" if warp else ""}
    out[at[0] * parts + part] = narrow<{C_TYPES[out]}>({"a" if kind in FLOATS else f"({COMPUTE[kind]})a"});
"""
    return Kernel(f"step_sum_{dtype}_{kind}_{out}_{'warp' if warp else 'thread'}",
                  f"Walk<2> w, Walk<1> v, {C_TYPES[out]}* out, const {C_TYPES[dtype]}* x, long long parts",
                  body, WALK)  # fmt: skip


@functools.cache
def place_of(dtype: str, out: str) -> Kernel:
    """The first place of a row's largest element; NaN is that."""
    body = (
        _THREAD.format(2)
        + f"""\
    {COMPUTE[dtype]} a = widen(x[at[1]]);
    long long best = 0;
    for (long long j = 1; j < n && a == a; j++) {{
        {COMPUTE[dtype]} b = widen(x[at[1] + j * step]);
        if (b > a || b != b) {{
            a = b;
            best = j;
        }}
    }}
    out[at[0]] = ({C_TYPES[out]})best;
"""
    )
    return Kernel(f"step_argmax_{dtype}_{out}",
                  f"Walk<2> w, {C_TYPES[out]}* out, const {C_TYPES[dtype]}* x, long long n, long long step",
                  body, WALK)  # fmt: skip


@functools.cache
def scan(fn: str, dtype: str, out: str) -> Kernel:
    """Running sums or products of rows, in the results' element type, one after another as NumPy does."""
    sign = {"cumsum": "+", "cumprod": "*"}[fn]
    t, a = C_TYPES[out], COMPUTE[out]
    body = (
        _THREAD.format(2)
        + f"""\
    {a} a = {"0" if sign == "+" else "1"};
    for (long long j = 0; j < n; j++) {{
        {a} b = ({a})widen(x[at[1] + j * step_x]);
        a = j ? ({a})widen(narrow<{t}>(a {sign} b)) : b;
        out[at[0] + j * step_out] = narrow<{t}>(a);
    }}
"""
    )
    return Kernel(f"step_{fn}_{dtype}_{out}",
                  f"Walk<2> w, {t}* out, const {C_TYPES[dtype]}* x, long long n, long long step_out, long long step_x",
                  body, WALK)  # fmt: skip


@functools.cache
def argsort(dtype: str, out: str) -> Kernel:
    """Each element counts those that come before it; NaN comes last."""
    body = (
        _THREAD.format(3)
        + f"""\
    {COMPUTE[dtype]} a = widen(x[at[1] + at[2] * step_x]);
    long long before = 0;
    for (long long j = 0; j < n; j++) {{
        {COMPUTE[dtype]} b = widen(x[at[1] + j * step_x]);
        before += a != a ? b == b || j < at[2] : b < a || (b == a && j < at[2]);
    }}
    out[at[0] + before * step_out] = ({C_TYPES[out]})at[2];
"""
    )
    return Kernel(f"step_argsort_{dtype}_{out}",
                  f"Walk<3> w, {C_TYPES[out]}* out, const {C_TYPES[dtype]}* x, long long n, long long step_out, "
                  "long long step_x", body, WALK)  # fmt: skip


# -- by index ---------------------------------------------------------------------------------------------------------

_BY_INDEX = """\
    long long k = (long long)index[at[2]];
    if (mode == 2) k = (k % n + n) % n;
    if (mode == 0 && k < 0) k += n;
    k = k < 0 ? 0 : k < n ? k : n - 1;
"""


@functools.cache
def take(itemsize: int, index: str) -> Kernel:
    """Elements at places along one dimension.  `mode`: 0 counts negative ones from the end, 1 clips, 2 wraps."""
    t = _BYTES[itemsize]
    body = _THREAD.format(3) + _BY_INDEX + "    out[at[0]] = x[at[1] + k * step];\n"
    return Kernel(f"step_take_{itemsize}_{index}",
                  f"Walk<3> w, {t}* out, const {t}* x, const {C_TYPES[index]}* index, long long n, long long step, "
                  "int mode", body, WALK)  # fmt: skip


@functools.cache
def put(dtype: str, index: str) -> Kernel:
    """Values added at places, one after another along `count`, each lane by one thread."""
    t, a = C_TYPES[dtype], COMPUTE[dtype]
    body = (
        _THREAD.format(2)
        + f"""\
    for (long long j = 0; j < count; j++) {{
        long long k = (long long)index[j * step_index];
        if (k < 0) k += n;
        if (k < 0 || k >= n) continue;
        {t}& place = out[at[0] + k * step_out];
        {a} a = widen(place), b = widen(x[at[1] + j * step_x]);
        place = narrow<{t}>(({a})(a + b));
    }}
"""
    )
    return Kernel(f"step_add_{dtype}_{index}",
                  f"Walk<2> w, {t}* out, const {t}* x, const {C_TYPES[index]}* index, long long count, long long n, "
                  "long long step_out, long long step_x, long long step_index", body, WALK)  # fmt: skip
