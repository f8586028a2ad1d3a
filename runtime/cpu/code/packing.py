"""Kernels that move data for convolutions: padded rows, packed weights, bias rows, zeros."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ....language.types import Array
from ..device import native
from ..device.native import Call
from .emit import Code, module
from .tiles import load_lanes, machine, store_lanes


@functools.cache
def copy_rows() -> str:
    """IR: (source, block, offsets, pixels, channels, pitch, before, after): rows of a block, padded with zeros.

    Each is `before` pixels of zeros, a row of the source at an offset (-1: zeros), `after` pixels of zeros; `pitch`:
    elements from pixel to pixel in the block.
    """
    f = Code()
    source, block, offsets = (f.word("%args", i, "ptr") for i in range(3))
    pixels, channels, pitch, before, after = (f.word("%args", i) for i in range(3, 8))
    line = f.mul(f.add(pixels, before, after), pitch)
    dense = f.let(f"icmp eq i64 {channels}, {pitch}")
    pieces = f.let(f"select i1 {dense}, i64 1, i64 {pixels}")
    size = f.mul(f.let(f"select i1 {dense}, i64 {f.mul(pixels, channels)}, i64 {channels}"), 4)
    with f.loop("%begin", "%end") as i:
        at = f.word(offsets, i)
        to = f.at(block, f.mul(i, line))
        inside = f.let(f"icmp sge i64 {at}, 0")
        left = f.let(f"select i1 {inside}, i64 {f.mul(before, pitch)}, i64 {line}")
        f.zero(to, f.mul(left, 4))
        with f.when(inside):
            middle, start = f.at(to, f.mul(before, pitch)), f.at(source, at)
            with f.loop(0, pieces) as p:
                f.copy(f.at(middle, f.mul(p, pitch)), f.at(start, f.mul(p, channels)), size)
            f.zero(f.at(middle, f.mul(pixels, pitch)), f.mul(after, pitch, 4))
    return module(f)


@functools.cache
def fill_rows() -> str:
    """IR: (target, row of values or null, elements of a row): each row becomes the values, or zeros."""
    f = Code()
    target, values = (f.word("%args", i, "ptr") for i in range(2))
    size = f.word("%args", 2)
    some = f.let(f"icmp ne ptr {values}, null")
    nbytes = f.mul(size, 4)
    with f.loop("%begin", "%end") as i:
        to = f.at(target, f.mul(i, size))
        with f.when(some):
            f.copy(to, values, nbytes)
        with f.unless(some):
            f.zero(to, nbytes)
    return module(f)


def chunks(runs: int, length: int, step: int) -> np.ndarray:
    """[chunks, 3]: the runs, `step` elements apart, in chunks of a vector: offset, elements, number of the first."""
    width = machine().width
    rows = [
        (r * step + i, min(width, length - i), r * length + i) for r in range(runs) for i in range(0, length, width)
    ]
    return np.array(rows, np.int64)


def turned(
    rows: Array, columns: Array, panels: Any, table: Array, offsets: Array, apart: int, *, unpack: bool = False,
    parallel: bool = True,
) -> Call:  # fmt: skip
    """The call of `turn` over all panels and chunks; `rows` become `columns`, or are what they become."""
    words = (rows, columns, np.array(panels, np.int64), table, len(table), offsets, apart)
    return Call(native.compile_ir(turn(unpack=unpack)), words, len(panels) * len(table), parallel)


@functools.cache
def turn(*, unpack: bool) -> str:
    """IR that turns rows into columns, or back, a square of a vector's width at a time.

    (rows, columns, panels, chunks, count of chunks, offsets, rows apart): panel p is (offset in rows, offset in
    columns, rows that there are); row j's element e lies at `j · apart + e` in rows, at `offsets[e] + j` in columns.
    A pack gives all rows of a panel up to the next whole vector, zeros where there are none.
    """
    w = machine().width
    f = Code()
    rows, columns, panels, table = (f.word("%args", i, "ptr") for i in range(4))
    count = f.word("%args", 4)
    offsets = f.word("%args", 5, "ptr")
    apart = f.word("%args", 6)
    with f.loop("%begin", "%end") as item:
        p = f.mul(f.div(item, count), 3)
        c = f.mul(f.rem(item, count), 3)
        from_rows = f.at(rows, f.add(f.word(panels, p), f.word(table, c)))
        to = f.at(columns, f.word(panels, f.add(p, 1)))
        there, length, first = f.word(panels, f.add(p, 2)), f.word(table, f.add(c, 1)), f.word(table, f.add(c, 2))
        some, last = lanes_below(f, length), f.add(length, -1)
        with f.loop(0, there, w) as j:
            left = f.sub(there, j)
            full = lanes_below(f, left)
            at_row = [f.at(from_rows, f.mul(f.add(j, i), apart)) for i in range(w)]
            exists = [f.let(f"icmp sgt i64 {left}, {i}") for i in range(w)]
            if unpack:
                square = []
                for e in range(w):  # columns behind the last read it once more
                    at = f.at(to, f.add(f.word(offsets, f.add(first, f.smaller(e, last))), j))
                    square.append(load_lanes(f, at, full))
                for i, x in enumerate(transposed(f, square)):
                    store_lanes(f, x, at_row[i], both(f, some, exists[i]))
            else:
                square = [load_lanes(f, at_row[i], both(f, some, exists[i])) for i in range(w)]
                for e, x in enumerate(transposed(f, square)):
                    with f.when(f.let(f"icmp sgt i64 {length}, {e}")):
                        at = f.at(to, f.add(f.word(offsets, f.add(first, e)), j))
                        f.line(f"store {machine().vector} {x}, ptr {at}, align 4")
    return module(f)


def lanes_below(f: Code, count: str) -> str:
    """Which lanes' numbers are less than a count."""
    w = machine().width
    numbers = "<" + ", ".join(f"i64 {i}" for i in range(w)) + ">"
    return f.let(f"icmp slt <{w} x i64> {numbers}, {f.spread(count, 'i64', w)}")


def both(f: Code, lanes: str, condition: str) -> str:
    """Lanes, or none where the condition does not hold."""
    w = machine().width
    return f.let(f"select i1 {condition}, <{w} x i1> {lanes}, <{w} x i1> zeroinitializer")


def transposed(f: Code, square: list[str]) -> list[str]:
    """Rows of a square of vectors become its columns: blocks of 1, 2, 4, ... elements change places."""
    w, v = len(square), machine().vector
    size = 1
    while size < w:
        low = [i if not i & size else i - size + w for i in range(w)]
        high = [i + size if not i & size else i + w for i in range(w)]
        vectors = list(square)
        for i in range(w):
            if not i & size:
                a, b = square[i], square[i + size]
                for target, order in ((i, low), (i + size, high)):
                    lanes = ", ".join(f"i32 {o}" for o in order)
                    vectors[target] = f.let(f"shufflevector {v} {a}, {v} {b}, <{w} x i32> <{lanes}>")
        square = vectors
        size *= 2
    return square
