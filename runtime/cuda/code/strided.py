"""Strided copies, of which all operators that only move elements consist.

Elements are moved as words of 1 to 16 bytes, the largest that sizes, strides and addresses allow.  `gathering` writes a
whole output in order, wherever its elements come from; `pieces` copies many blocks of rows in one launch.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.kernel import Buffer, Call, Copy, Fill, Kernel
from .parts import WIDE, division, divisor

#: bytes of a word → its type in C
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "uint4"}
#: threads of a block, and words that each of them moves
THREADS, _EACH = 256, 4
#: pieces of one launch, few or many: their numbers are arguments, of which a kernel has 4 KiB
_FEW_PIECES, MOST_PIECES = 4, 32


class _Four(ctypes.Structure):
    _fields_ = (("of", ctypes.c_uint * 4),)


def word(bits: bytes, nbytes: int) -> Any:
    """The argument for a word that holds an element's bits again and again."""
    repeated = bits * (nbytes // len(bits))
    if nbytes in (4, 8):
        return int.from_bytes(repeated, "little")
    kinds: dict[int, Any] = {1: ctypes.c_ubyte, 2: ctypes.c_ushort, 16: _Four}
    return kinds[nbytes].from_buffer_copy(repeated)


def word_bytes(*numbers: int) -> int:
    """The largest word that divides all these numbers of bytes."""
    return math.gcd(16, *numbers)


def copy(y: Buffer, x: Buffer) -> list[Call]:
    """Calls that copy x to y, where it is not already."""
    return [Copy(y, x)] if y.nbytes and y.address != x.address else []


# -- outputs in order, from anywhere ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """An axis of the output: `size` places; place c is element (c - low) of the input's axis, `stride` apart.

    `kind`: "copied" (low is 0), "inside" (only places low to low + count, elsewhere the fill), "spread" (as inside,
    every `step`-th place), "reflect", "edge", "wrap" (of an input axis of `count` elements).
    """

    kind: str
    size: int
    stride: int
    low: int = 0
    count: int = 0
    step: int = 1

    @property
    def fills(self) -> bool:
        """Whether some places show no element."""
        return self.kind in ("inside", "spread")


_AXIS = {
    "copied": "at += (long long)c{0} * s{0};",
    "inside": """const long long t{0} = (long long)c{0} - low{0};
        inside &= t{0} >= 0 && t{0} < count{0};
        at += t{0} * s{0};""",
    "spread": """const long long t{0} = (long long)c{0} - low{0};
        inside &= t{0} >= 0 && t{0} < count{0} * step{0} && t{0} % step{0} == 0;
        at += t{0} / step{0} * s{0};""",
    "edge": "at += min(max((long long)c{0} - low{0}, 0ll), count{0} - 1) * s{0};",
    "wrap": "at += (((long long)c{0} - low{0}) % count{0} + count{0}) % count{0} * s{0};",
    "reflect": """const long long p{0} = max(2 * (count{0} - 1), 1ll);
        const long long t{0} = (((long long)c{0} - low{0}) % p{0} + p{0}) % p{0};
        at += min(t{0}, p{0} - t{0}) * s{0};""",
}  # fmt: skip


def joined(axes: Sequence[Axis]) -> list[Axis]:
    """The axes, merged: the same places along as few axes as possible."""
    result: list[Axis] = []
    for a in axes:
        if a.size == 1 and a.kind == "copied":
            continue
        outer = result[-1] if result else None
        if outer and a.kind == "copied" and outer.stride == a.size * a.stride:
            if outer.kind == "copied":
                result[-1] = Axis("copied", outer.size * a.size, a.stride)
                continue
            if outer.kind == "inside":
                low, count = outer.low * a.size, outer.count * a.size
                result[-1] = Axis("inside", outer.size * a.size, a.stride, low, count)
                continue
        result.append(a)
    return result or [Axis("copied", 1, 1)]


@functools.cache
def gathering(kinds: tuple[str, ...], nbytes: int, *, wide: bool) -> Kernel:
    """y in order from x, for axes of these kinds, in words of `nbytes`."""
    lines, parameters = [], [f"const {WORDS[nbytes]}* x", f"{WORDS[nbytes]}* y", "long long n", "long long start"]
    rest = "e"
    for i in range(len(kinds) - 1, 0, -1):
        lines += [f"const Index q{i} = over({rest}, d{i});", f"const Index c{i} = {rest} - q{i} * (Index)d{i}.by;"]
        rest = f"q{i}"
    lines.append(f"const Index c0 = {rest};")
    for i, kind in enumerate(kinds):
        lines += _AXIS[kind].format(i).split("\n        ")
        parameters += [*([f"Divisor d{i}"] if i else []), f"long long s{i}"]
        if kind != "copied":
            parameters += [f"long long low{i}", f"long long count{i}"]
        if kind == "spread":
            parameters.append(f"long long step{i}")
    fills = any(k in ("inside", "spread") for k in kinds)
    parameters += [f"{WORDS[nbytes]} fill"] if fills else []
    body = f"""    typedef {WORDS[nbytes]} W;
    const long long first = (long long)blockIdx.x * ({_EACH} * {THREADS}) + threadIdx.x;
    W found[{_EACH}];
    #pragma unroll
    for (int k = 0; k < {_EACH}; k++) {{
        if (first + k * {THREADS} >= n) break;
        const Index e = (Index)(first + k * {THREADS});
        long long at = start;{" bool inside = true;" if fills else ""}
        {(chr(10) + " " * 8).join(lines)}
        found[k] = {"inside ? x[at] : fill" if fills else "x[at]"};
    }}
    #pragma unroll
    for (int k = 0; k < {_EACH}; k++)
        if (first + k * {THREADS} < n) y[first + k * {THREADS}] = found[k];
"""
    name = "_".join(["gather", *(k[0] for k in kinds), f"{8 * nbytes}{'_wide' if wide else ''}"])
    return Kernel(name, ", ".join(parameters), body, division(wide=wide), THREADS)


def gather_to(y: Buffer, x: Buffer, axes: Sequence[Axis], start: int = 0, fill: float = 0) -> list[Call]:
    """Calls that write all of y: the element at `start` plus what each axis adds; strides in elements."""
    if not y.size:
        return []
    item, axes = y.type.numpy.itemsize, joined(axes)
    last, whole = axes[-1], len(axes) == 1 and axes[0].kind == "copied"
    if whole and last.stride == 1:
        return copy(y, x.at(start, y.shape))
    per = 1
    if last.kind in ("copied", "inside") and last.stride == 1:
        strides = [a.stride * item for a in axes[:-1]]
        sizes = [n * item for n in (last.size, last.low, last.count, start)]
        per = word_bytes(x.address, y.address, *strides, *sizes) // item
    cut = [Axis(a.kind, a.size, a.stride // per, a.low, a.count, a.step) for a in axes[:-1]]
    inner = last if per == 1 else Axis(last.kind, last.size // per, 1, last.low // per, last.count // per)
    n, args = y.size // per, []
    wide = n >= WIDE
    for i, a in enumerate((*cut, inner)):
        args += [divisor(a.size, wide=wide)] if i else []
        args += [a.stride] if a.kind == "copied" else [a.stride, a.low, a.count]
        args += [a.step] if a.kind == "spread" else []
    if any(a.fills for a in axes):
        args.append(word(np.array(fill, y.type.numpy).tobytes(), per * item))
    k = gathering(tuple(a.kind for a in axes), per * item, wide=wide)
    return [k(-(-n // _EACH), x, y, n, start // per, *args)]


# -- a value everywhere -----------------------------------------------------------------------------------------------


@functools.cache
def filling(nbytes: int) -> Kernel:
    """Words that are all alike."""
    body = f"""    const long long first = (long long)blockIdx.x * ({_EACH} * {THREADS}) + threadIdx.x;
    #pragma unroll
    for (int k = 0; k < {_EACH}; k++)
        if (first + k * {THREADS} < n) y[first + k * {THREADS}] = value;
"""
    return Kernel(f"fill_{8 * nbytes}", f"{WORDS[nbytes]}* y, {WORDS[nbytes]} value, long long n", body)


def fill_with(y: Buffer, value: float) -> list[Call]:
    """Calls that put a value everywhere."""
    if not y.size:
        return []
    bits = np.array(value).astype(y.type.numpy).tobytes()
    if len(set(bits)) == 1:
        return [Fill(y, bits[0])]
    nbytes = word_bytes(y.address, y.nbytes)
    n = y.nbytes // nbytes
    return [filling(nbytes)(-(-n // _EACH), y, word(bits, nbytes), n)]


# -- many blocks of rows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """`rows` rows of `run` elements, from `source` on, `source_step` elements apart, to `target`, `target_step` apart.

    Addresses are in bytes; one row at its own address is left alone.
    """

    source: int
    target: int
    rows: int
    run: int
    source_step: int
    target_step: int


@functools.cache
def _pieces(most: int, *, wide: bool) -> Any:
    """The structure of that name in the kernel's text."""
    kind = type(divisor(1, wide=wide))
    numbers = [(n, ctypes.c_longlong) for n in ("source", "target", "block", "words", "run", "from", "to")]
    piece: Any = type("Piece", (ctypes.Structure,), {"_fields_": [*numbers, ("by", kind), ("bytes", ctypes.c_int)]})
    fields = [("count", ctypes.c_int), ("piece", piece * most)]
    return type("Pieces", (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def copying(most: int, *, wide: bool) -> Kernel:
    """Pieces, each over some blocks."""
    before = f"""{division(wide=wide)}
// `words` words of `bytes` bytes in rows of `run`, `from` and `to` words apart; `block`: the first one that copies them
struct Piece {{ long long source, target, block, words, run, from, to; Divisor by; int bytes; }};
struct Pieces {{ int count; Piece piece[{most}]; }};

template <class W> DEVICE void copy(const Piece& p)
{{
    const long long first = (blockIdx.x - p.block) * ({_EACH} * {THREADS}) + threadIdx.x;
    W found[{_EACH}];
    long long row[{_EACH}];
    #pragma unroll
    for (int k = 0; k < {_EACH}; k++)
        if (first + k * {THREADS} < p.words) {{
            const Index e = (Index)(first + k * {THREADS});
            row[k] = over(e, p.by);
            found[k] = ((const W*)p.source)[row[k] * (p.from - p.run) + e];
        }}
    #pragma unroll
    for (int k = 0; k < {_EACH}; k++)
        if (first + k * {THREADS} < p.words)
            ((W*)p.target)[row[k] * (p.to - p.run) + (first + k * {THREADS})] = found[k];
}}
"""
    cases = "".join(f"        case {n}: copy<{w}>(p); break;\n" for n, w in WORDS.items())
    body = f"""    int which = 0;
    while (which + 1 < all.count && blockIdx.x >= all.piece[which + 1].block) which++;
    const Piece& p = all.piece[which];
    switch (p.bytes) {{
{cases}    }}
"""
    return Kernel(f"copy_{most}_pieces{'_wide' if wide else ''}", "Pieces all", body, before, THREADS)


def copy_rows(parts: Sequence[Rows], item: int) -> list[Call]:
    """Calls that copy them all, `MOST_PIECES` a launch; elements of `item` bytes."""
    parts = [p for p in parts if p.rows and p.run and (p.rows > 1 or p.source != p.target)]
    calls: list[Call] = []
    for i in range(0, len(parts), MOST_PIECES):
        some = parts[i : i + MOST_PIECES]
        wide = any(p.rows * p.run >= WIDE for p in some)
        most = _FEW_PIECES if len(some) <= _FEW_PIECES else MOST_PIECES
        all_, block = _pieces(most, wide=wide)(count=len(some)), 0
        for j, p in enumerate(some):
            steps = [item * s for s in (p.source_step, p.target_step) if p.rows > 1]
            nbytes = word_bytes(p.source, p.target, p.run * item, *steps)
            run, *apart = (s * item // nbytes for s in (p.run, p.source_step, p.target_step))
            numbers = (p.source, p.target, block, p.rows * run, run, *(apart if p.rows > 1 else (run, run)))
            piece = all_.piece[j]
            for (name, _), number in zip(piece._fields_, (*numbers, divisor(run, wide=wide), nbytes), strict=True):
                setattr(piece, name, number)
            block += -(-p.rows * run // (_EACH * THREADS))
        calls.append(copying(most, wide=wide).blocks(block, args=(all_,)))
    return calls
