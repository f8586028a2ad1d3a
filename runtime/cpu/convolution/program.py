"""The kernel of a convolution's products: register tiles over tasks, rows of pixels and taps."""

from __future__ import annotations

import dataclasses
import functools

from ..code.emit import Code, module
from ..code.tiles import Tile, emit_tile
from ..device import native


@functools.cache
def program(tile: Tile, cells: int, narrow: int) -> int:
    """The address of a kernel over tasks.  `cells`: tile rows to cover; `narrow`: columns of the last panel, or 0.

    Arguments: C, A, B, tasks, pairs, offA, offB, how many of these, how many at a time, whether C is added to.
    A task is (offset in C, in A, in B, first pair, pair after, whether its panel is the last); a pair (offset in C,
    offset in A) is a row of pixels, or, for a weight's gradient, a tap.
    """
    rest = cells % tile.rows
    tiles = {}
    for columns in {tile.columns, narrow} - {0}:
        for rows in {tile.rows, rest} - {0}:
            one = dataclasses.replace(tile, rows=rows, columns=columns)
            tiles[rows, columns] = emit_tile(f"tile_{rows}_{columns}", one)
    f = Code()
    c, a, b, tasks, pairs, oa, ob = (f.word("%args", i, "ptr") for i in range(7))
    count, chunk, more = (f.word("%args", i) for i in range(7, 10))

    def sweep(columns: int, task: list[str], r: str) -> None:
        """A panel's columns of all of a task's pairs, for the terms from `r` on."""
        n = f.smaller(f.sub(count, r), chunk)
        again = f.let(f"or i1 {f.let(f'icmp ne i64 {more}, 0')}, {f.let(f'icmp sgt i64 {r}, 0')}")
        bs, ra, rb = f.at(b, task[2]), f.at(oa, r, "i64"), f.at(ob, r, "i64")
        with f.loop(task[3], task[4]) as i:
            cs = f.at(c, f.add(task[0], f.word(pairs, f.mul(i, 2))))
            as_ = f.at(a, f.add(task[1], f.word(pairs, f.add(f.mul(i, 2), 1))))

            def call(rows: int, t: str) -> None:
                at_c, at_a = f.at(cs, f.mul(t, tile.c)), f.at(as_, f.mul(t, tile.am))
                operands = f"ptr {at_c}, ptr {at_a}, ptr {bs}, ptr {ra}, ptr {rb}, i64 {n}, i1 {again}"
                f.line(f"call void @tile_{rows}_{columns}({operands})")

            with f.loop(0, cells - rest, tile.rows) as t:
                call(tile.rows, t)
            if rest:
                call(rest, str(cells - rest))

    with f.loop("%begin", "%end") as item:
        task = [f.word(tasks, f.add(f.mul(item, 6), i)) for i in range(6)]
        last = f.let(f"icmp ne i64 {task[5]}, 0")
        with f.loop(0, count, chunk) as r:
            if narrow:
                with f.when(last):
                    sweep(narrow, task, r)
            with f.unless(last):
                sweep(tile.columns, task, r)
    return native.compile_ir(module(*tiles.values(), f))
