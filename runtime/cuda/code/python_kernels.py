"""Launches of the kernels that are Python functions: their operands as parameters in C."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ....language.types import dtype_name
from ...shared import trouble
from ...shared.texts import Absent, Columns, Divisor, Fixed, Own, Scratch, Text, Work
from ..device.kernel import C_TYPES, STATUS, Buffer, Kernel, Launch
from .parts import WIDE, divisor
from .python_text import Writer
from .strided import WORDS, word_bytes

#: threads of a block; such blocks that a multiprocessor is to have at a time, where an item is a thread's
_THREADS, _BESIDE = 256, 8
#: axes of an array of which kernels take a `piece`
_AXES = 5
#: threads of an item, at most
_MOST = 1024
#: items of a thread that stores their own elements
_EACH = 4


@dataclass(frozen=True)
class Words:
    """A buffer as words of `nbytes` bytes, in another shape."""

    of: Buffer
    nbytes: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many words."""
        return math.prod(self.shape)

    def reshape(self, *shape: int) -> Words:
        """The same words in another shape, whose first dimension is -1."""
        return replace(self, shape=(self.size // math.prod(shape[1:]), *shape[1:]))


def words(run: int, *operands: Buffer) -> Sequence[Words]:
    """Operands as matrices with rows of `run` elements, of the largest words that their addresses allow."""
    nbytes = run * operands[0].type.numpy.itemsize
    each = word_bytes(nbytes, *(x.address for x in operands))
    return [Words(x, each, (x.nbytes // nbytes, nbytes // each)) for x in operands]


@functools.cache
def header() -> str:
    """What all texts are made of."""
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
        case ("own", c):
            return [f"{c}* {a}_at"], f"Own<{c}> {a}_[{_EACH}];", ""
        case ("fixed", tuple() as rows):
            flat = [v for row in rows for v in row]
            small = min(flat) >= 0 and max(flat) < WIDE
            c, each = "unsigned" if small else "long long", ", ".join(map(str, flat))
            return [], f"const Constants<{c}, {len(rows[0])}, {each}> {a};", ""
        case ("divisor",):
            return [f"Divisor {a}"], "", ""
        case ("divisor", *ones):
            each = ", ".join("1_n" if one else f"{a}_{i}" for i, one in enumerate(ones))
            return [f"Divisor {a}_{i}" for i, one in enumerate(ones) if not one], f"const auto {a} = many({each});", ""
        case ("scratch", c):
            return [], f"Scratch<{c}> {a};", ""
        case ("fixed", value):
            return [], f"const Natural {a} = {value}_n;", ""
        case ("whole", c):
            return [f"{c} {a}_v"], f"const Whole<{c}> {a}({a}_v);", ""
    return [f"{kind[0]} {a}"], "", ""


def _named(value: int | tuple[tuple[int, ...], ...]) -> str:
    """A fixed operand in a kernel's name."""
    text = str(value) if isinstance(value, int) else "_".join("x".join(map(str, row)) for row in value)
    return text.replace("-", "m")


@functools.cache
def _kernel(
    text: Text, kinds: tuple[tuple, ...], lanes: int, *, wide: bool, whole: bool, unrolled: bool, single: bool
) -> Kernel:
    """The kernel for operands of these kinds; `lanes`: the threads of an item."""
    name, size = text.function.__name__, "unsigned long long" if wide else "unsigned"
    names = [f"a{i}" for i in range(len(kinds))]
    parts = [_declared(a, kind, size) for a, kind in zip(names, kinds, strict=True)]
    parameters, lines = [p for ps, _, _ in parts for p in ps], [line for _, line, _ in parts if line]
    parameters += ["Divisor per"] * text.rows
    writer = Writer(unrolled=unrolled)
    called = writer.function(text.function, f"{name}_items", "")
    written = "".join([*(structure for _, _, structure in parts), *writer.parts.values(), called])
    before = f"typedef Whole<{size}> Size;\nenum {{ LANES = {lanes}, WHOLE = {int(whole)} }};\n\n"
    before = header().replace("// -- arrays", f"{before}// -- arrays", 1)
    before = (before if "reduced_(" in written else before.partition("// -- sums")[0]) + written
    own = [a for a, k in zip(names, kinds, strict=True) if k[0] == "own"]
    body = "".join(f"    {line}\n" for line in [*lines, *_items(name, names, own, size, text.rows + single)])
    called_by = dict.fromkeys(k[1].replace(" ", "") for k in kinds if k[0] == "array")
    ends = [_named(k[1]) for k in kinds if k[0] == "fixed"] + [f"by{lanes}"] * (lanes > 1)
    full = "_".join([name, *called_by, *ends, *["wide"] * wide, *["whole"] * whole])
    declared = ", ".join([*parameters, "long long work"])
    light = lanes == 1 and not (own or text.heavy)
    return Kernel(full, declared, body, before, max(_THREADS, lanes), _BESIDE * light)


def _items(name: str, names: Sequence[str], own: Sequence[str], size: str, rows: int) -> list[str]:
    """Statements that process a thread's item, or some of them; `rows`: there are none (0), or have one item (2)."""
    given = [f"{a}_[k]" if a in own else a for a in names]
    found = "const long long item = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / LANES;"
    if own:
        found = f"const {size} item = ({size})blockIdx.x * {_EACH * _THREADS} + k * {_THREADS} + threadIdx.x;"
    lines = [found, f"if (item >= ({size})work) break;" if own else "if (item >= work) return;"]
    items = ["Size(item)", "Size(item + 1)"]
    if rows == 2:
        items = ["Size(item)", "Size(0)", "Size(1)"]
    elif rows:
        lines.append("const Size row = floor_of(Size(item), per), in_row = rest_of(Size(item), per);")
        items = ["row", "in_row", "Size(in_row.v + 1)"]
    lines.append(f"{name}_items({', '.join([*given, *items])});")
    if not own:
        return lines
    loop = ["#pragma unroll", f"for (int k = 0; k < {_EACH}; k++) {{"]
    stores = [f"if (item < ({size})work) {a}_at[item] = {a}_[k].value;" for a in own]
    return [*loop, *(f"    {x}" for x in lines), "}", *loop, *(f"    {x}" for x in (found, *stores)), "}"]


def _operand(x: Any, wide: bool) -> tuple[tuple, list[Any]]:
    """An operand's kind, and its arguments."""
    if x is None or isinstance(x, Absent):
        return ("absent",), []
    if x is trouble.STATUS:
        return ("array", "long long", 1), [STATUS, trouble.WORDS]
    if isinstance(x, Words):
        return ("array", WORDS[x.nbytes], len(x.shape)), [x.of, *x.shape]
    if isinstance(x, Own):
        (_, kind, *_), (at, *_) = _operand(x.elements, wide)
        return ("own", kind), [at]
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
    if isinstance(x, Divisor):
        if isinstance(x.value, int):
            return ("divisor",), [divisor(x.value, wide=wide)]
        more = [n for n in x.value if n != 1]
        return ("divisor", *(n == 1 for n in x.value)), [divisor(n, wide=wide) for n in more]
    if isinstance(x, Scratch):
        return ("scratch", C_TYPES[x.dtype]), []
    if isinstance(x, np.uint64):
        return ("unsigned long long",), [int(x)]
    if isinstance(x, (float, np.floating)):
        return ("double",), [float(x)]
    return ("whole", "unsigned" if 0 <= x < WIDE else "long long"), [int(x)]


def call_of(work: Work) -> Launch:
    """The launch that does the work of a kernel for every place."""
    seen = [x.matrices if isinstance(x, Columns) else x for x in work.operands]
    buffers = [x for x in seen if isinstance(x, Buffer)]
    wide = max([work.items, *(x.size for x in seen if isinstance(x, (Buffer, Words)))]) >= WIDE
    kinds, args = zip(*(_operand(x, wide) for x in work.operands), strict=True)
    whole = work.whole and not any(x.address % (8 * x.type.numpy.itemsize) for x in buffers if x.size >= 8)
    lanes = min(1 << (work.lanes - 1).bit_length(), _MOST)
    k = _kernel(work.text, kinds, lanes, wide=wide, whole=whole, unrolled=work.unrolled, single=work.per == 1)
    block = max(lanes, _THREADS if lanes <= 32 else 0)
    given = [a for some in args for a in some] + [divisor(work.per, wide=wide)] * work.text.rows
    each = _EACH if any(kind[0] == "own" for kind in kinds) else 1
    return k(-(-work.items * lanes // each), *given, work.items, block=block)
