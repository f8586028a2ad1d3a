"""Launches of the kernels that are Python functions: their operands as parameters in C."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from ....language.types import dtype_name
from ...shared import trouble
from ...shared.texts import Absent, Columns, Divisors, Fixed, Room, Text, Work
from ..device.kernel import C_TYPES, STATUS, Buffer, Kernel, Launch
from .parts import WIDE, divisor
from .python_text import Writer

#: threads of a block; such blocks that a multiprocessor is to have at a time, where an item is a thread's
_THREADS, _BESIDE = 256, 8
#: axes of an array of which kernels take a `piece`
_AXES = 5
#: threads of an item, at most
_MOST = 1024


@functools.cache
def _header() -> str:
    return (Path(__file__).parents[1] / "device" / "texts.h").read_text()


def _declared(a: str, kind: tuple, size: str) -> tuple[list[str], str, str]:
    """An operand's parameters, the statement that makes it of them, and a structure that stands before."""
    match kind:
        case ("absent",):
            return [], f"const Absent {a};", ""
        case ("array" | "columns", c, ndim, *ones):
            sizes = ", ".join("Size(1)" if d in ones else f"Size({a}_{d})" for d in range(ndim))
            name = f"Array<{c}, {ndim}>" if kind[0] == "array" else f"Columns<{c}>"
            line = f"const {name} {a} = {{{a}_at, {{{sizes}}}}};"
            return [f"{c}* {a}_at", *(f"{size} {a}_{d}" for d in range(ndim) if d not in ones)], line, ""
        case ("table", c, shape):
            sizes = ", ".join(f"Size({d})" for d in shape)
            line = f"const Array<const {c}, {len(shape)}> {a} = {{{a}_of.of, {{{sizes}}}}};"
            structure = f"struct Table{a} {{ {c} of[{max(math.prod(shape), 1)}]; }};\n"
            return [f"const __grid_constant__ Table{a} {a}_of"], line, structure
        case ("fixed", tuple() as rows):
            flat = [v for row in rows for v in row]
            c, each = "long long" if min(flat) < 0 else "unsigned", ", ".join(map(str, flat))
            return [], f"const Constants<{c}, {len(rows[0])}, {each}> {a};", ""
        case ("divisors", *ones):
            each = ", ".join("1_n" if one else f"{a}_{i}" for i, one in enumerate(ones))
            return [f"Divisor {a}_{i}" for i, one in enumerate(ones) if not one], f"const auto {a} = many({each});", ""
        case ("room", c):
            return [], f"Rooms<{c}> {a};", ""
        case ("fixed", value):
            return [], f"const Natural {a} = {value}_n;", ""
        case ("whole", c):
            return [f"{c} {a}_v"], f"const Whole<{c}> {a}({a}_v);", ""
    return [f"{kind[0]} {a}"], "", ""


def _named(value: int | tuple[tuple[int, ...], ...]) -> str:
    """A fixed operand in a kernel's name."""
    return str(value) if isinstance(value, int) else "_".join("x".join(map(str, row)) for row in value)


@functools.cache
def _kernel(text: Text, kinds: tuple[tuple, ...], lanes: int, *, wide: bool, whole: bool, unrolled: bool) -> Kernel:
    """The kernel for operands of these kinds; `lanes`: the threads of an item."""
    name, size = text.function.__name__, "unsigned long long" if wide else "unsigned"
    names = [f"a{i}" for i in range(len(kinds))]
    parts = [_declared(a, kind, size) for a, kind in zip(names, kinds, strict=True)]
    parameters, lines = [p for ps, _, _ in parts for p in ps], [line for _, line, _ in parts if line]
    items = ["Size(item)", "Size(item + 1)"]
    if text.rows:
        parameters.append(f"{size} per")
        lines.append(f"const {size} row = ({size})item / per, in_row = ({size})item - row * per;")
        items = ["Size(row)", "Size(in_row)", "Size(in_row + 1)"]
    writer = Writer(unrolled=unrolled)
    called = writer.function(text.function, f"{name}_items", divided=False)
    written = "".join([*(structure for _, _, structure in parts), *writer.parts.values(), called])
    constants = f"typedef Whole<{size}> Size;\nenum {{ LANES = {lanes}, WHOLE = {int(whole)} }};\n\n"
    before = _header().replace("// -- arrays", f"{constants}// -- arrays", 1)
    before = (before if "reduced_(" in written else before.partition("// -- sums")[0]) + written
    body = f"""    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x, item = thread / LANES;
    if (item >= work) return;
    {(chr(10) + "    ").join(lines)}
    {name}_items({", ".join([*names, *items])});
"""
    called_by = dict.fromkeys(k[1].replace(" ", "") for k in kinds if k[0] == "array")
    ends = [_named(k[1]) for k in kinds if k[0] == "fixed"] + [f"by{lanes}"] * (lanes > 1)
    full = "_".join([name, *called_by, *ends, *["wide"] * wide, *["whole"] * whole])
    declared = ", ".join([*parameters, "long long work"])
    return Kernel(full, declared, body, before, max(_THREADS, lanes), _BESIDE * (lanes == 1 and not text.heavy))


def _operand(x: Any, wide: bool) -> tuple[tuple, list[Any]]:
    """An operand's kind, and its arguments."""
    if isinstance(x, Divisors):
        more = [n for n in x.values if n != 1]
        return ("divisors", *(n == 1 for n in x.values)), [divisor(n, wide=wide) for n in more]
    if x is None or isinstance(x, Absent):
        return ("absent",), []
    if x is trouble.STATUS:
        return ("array", "long long", 1), [STATUS, trouble.WORDS]
    if isinstance(x, Buffer):
        ones = [d for d, n in enumerate(x.shape) if n == 1 and x.ndim == _AXES]  # of a piece: constants
        return ("array", C_TYPES[x.dtype], x.ndim, *ones), [x, *(n for d, n in enumerate(x.shape) if d not in ones)]
    if isinstance(x, Columns):
        return ("columns", C_TYPES[x.matrices.dtype], 3), [x.matrices, *x.matrices.shape]
    if isinstance(x, np.ndarray):
        flat = np.ascontiguousarray(x).reshape(-1)
        held = (np.ctypeslib.as_ctypes_type(x.dtype) * max(x.size, 1))(*flat.tolist())
        return ("table", C_TYPES[dtype_name(x.dtype)], x.shape), [held]
    if isinstance(x, Fixed):
        return ("fixed", x.value), []
    if isinstance(x, Room):
        return ("room", C_TYPES[x.dtype]), []
    if isinstance(x, np.uint64):
        return ("unsigned long long",), [int(x)]
    if isinstance(x, (float, np.floating)):
        return ("double",), [float(x)]
    return ("whole", "unsigned" if 0 <= x < WIDE else "long long"), [int(x)]


def call_of(work: Work) -> Launch:
    """The launch that does the work of a kernel for every place."""
    operands = (x.matrices if isinstance(x, Columns) else x for x in work.operands)
    buffers = [x for x in operands if isinstance(x, Buffer)]
    wide = max([work.items, *(x.size for x in buffers)]) >= WIDE
    kinds, args = zip(*(_operand(x, wide) for x in work.operands), strict=True)
    whole = work.whole and not any(x.address % (8 * x.type.numpy.itemsize) for x in buffers if x.size >= 8)
    lanes = min(1 << (work.lanes - 1).bit_length(), _MOST)
    k = _kernel(work.text, kinds, lanes, wide=wide, whole=whole, unrolled=work.unrolled)
    block = max(lanes, _THREADS if lanes <= 32 else 0)
    given = [a for some in args for a in some] + [work.per] * work.text.rows
    return k(work.items * lanes, *given, work.items, block=block)
