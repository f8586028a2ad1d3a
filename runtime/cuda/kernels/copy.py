"""Copies of boxes of elements: concatenation, slicing, padding, tiling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import need, present
from ....ops.communication.shard import Shard
from ....ops.indexing.scatter import strides
from ....ops.shape.pad import inner
from ...shared.boxes import boxes, grid
from ..code.python_kernels import words
from ..code.strided import Axis, Rows, copy, copy_rows, fill_with, gather_to
from ..device.kernel import Buffer, Call, Fill
from ..families import FAMILIES, Buffers, Moving, family

FAMILIES.copied, FAMILIES.filled, FAMILIES.words = copy, fill_with, words


@family("Concat", "Split")
class Rejoining(Moving):
    """All parts at once: blocks of rows."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """One launch for many parts; a copy for a single whole one."""
        parts = []
        for i, o, box in boxes(op):
            x, y = present(ins[i], outs[o])
            if not math.prod(box[0]):
                continue
            item = x.type.numpy.itemsize
            *outer, (run, step, target) = grid(box)
            if (step, target) != (1, 1):  # rows of one element
                outer, run = [(run, step, target)], 1
            rows, source_step, target_step = outer[0] if outer else (1, run, run)
            if not outer and len(op.inputs) == len(op.outputs) == 1:
                return copy(y.at(box[4], [run]), x.at(box[3], [run]))
            at, to = x.address + box[3] * item, y.address + box[4] * item
            parts.append(Rows(at, to, rows, run, source_step, target_step))
        return copy_rows(parts, next(v for v in op.reads()).type.numpy.itemsize)


@family("Slice", "Expand", "Tile", "Identity", "Reshape")
class Boxes(Moving):
    """Outputs that are a box of the input, with strides of any sign, or 0."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y = present(ins[0], outs[0])
        (_, _, (sizes, in_x, _, start, _)) = next(iter(boxes(op)))
        return gather_to(y, x, [Axis("copied", n, s) for n, s in zip(sizes, in_x, strict=True)], start)


@family("Border", "Detach", "Gate", "Shard")
class Copies(Moving):
    """All elements, or a rank's part of them with zeros behind."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y = present(ins[0], outs[0])
        start = min(op.op.rank * y.size, x.size) if isinstance(op.op, Shard) else 0
        count = min(y.size, x.size - start)
        zeros = [] if count == y.size else [Fill(y.reshape(-1).at(count, [y.size - count]))]
        return [*copy(y.reshape(-1).at(0, [count]), x.reshape(-1).at(start, [count])), *zeros]


@family("SliceGrad", "Pad")
class Among(Moving):
    """Inputs among fills, or among their own elements repeated."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule: Any = op.op
        x, y = present(ins[0], outs[0])
        steps = strides(x.shape)
        if rule.name == "SliceGrad":
            start, axes = 0, []
            for n, s, r in zip(y.shape, steps, rule.taken(y.shape), strict=True):
                backwards = r[::-1] if r.step < 0 else r
                start += (len(r) - 1) * s if r.step < 0 and len(r) else 0
                kind = "copied" if r == range(n) else "spread" if backwards.step > 1 and len(r) > 1 else "inside"
                axes.append(
                    Axis(kind, n, -s if r.step < 0 else s, backwards.start if len(r) else 0, len(r), backwards.step)
                )
            return gather_to(y, x, axes, start) if x.size else fill_with(y, 0)
        if rule.mode == "constant":
            if not x.size:
                return fill_with(y, rule.value)
            there, here = inner(rule.pads, x.shape)
            start = sum(h.start * s for h, s in zip(here, steps, strict=True))
            axes = [
                Axis("copied" if (t.start, t.stop) == (0, n) else "inside", n, s, t.start, t.stop - t.start)
                for n, s, t in zip(y.shape, steps, there, strict=True)
            ]
            return gather_to(y, x, axes, start, rule.value)
        axes = [
            Axis("copied" if n == m else rule.mode, n, s, before, m)
            for n, m, s, before in zip(y.shape, x.shape, steps, rule.pads, strict=False)
        ]
        return gather_to(y, x, axes)


@family("Fill")
class Filling(Moving):
    """One value everywhere."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        y = need(outs[0])
        return fill_with(y, op.op.value)  # type: ignore[attr-defined]
