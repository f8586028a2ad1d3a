"""Copies of boxes of elements: concatenation, slicing, padding, tiling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import need, present
from ....ops.communication.shard import Shard
from ....ops.indexing.scatter import strides
from ...shared.boxes import Box, boxes, grid
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


def _among(box: Box, shape: Sequence[int]) -> tuple[list[Axis], int]:
    """The axes of an output of `shape` that a box is a part of, and the first element that it takes."""
    axes, first = [], box[3]
    for m, a, b, n, s in zip(*box[:3], shape, strides(shape), strict=True):
        low, step = box[4] // s % n, b // s
        if step < 0:
            first, low, a, step = first + (m - 1) * a, low + (m - 1) * step, -a, -step
        kind = "copied" if m == n else "spread" if step > 1 and m > 1 else "inside"
        axes.append(Axis(kind, n, a, low, m, step))
    return axes, first


@family("Slice", "Expand", "Tile", "Identity", "Reshape", "SliceGrad", "Pad")
class Boxes(Moving):
    """Outputs that are a box of the input, with strides of any sign, or 0, among fills or its own elements repeated."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule: Any = op.op
        x, y = present(ins[0], outs[0])
        fill = rule.value if rule.name == "Pad" else 0
        if not x.size or not y.size:
            return fill_with(y, fill)
        if rule.name == "Pad" and rule.mode != "constant":
            each = zip(y.shape, x.shape, strides(x.shape), rule.pads, strict=False)
            return gather_to(y, x, [Axis("copied" if n == m else rule.mode, n, s, low, m) for n, m, s, low in each])
        ((_, _, box),) = boxes(op)
        return gather_to(y, x, *_among(box, y.shape if rule.name in ("SliceGrad", "Pad") else box[0]), fill)


@family("Border", "Detach", "Gate", "Shard")
class Copies(Moving):
    """All elements, or a rank's part of them with zeros behind."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y = present(ins[0], outs[0])
        start = min(op.op.rank * y.size, x.size) if isinstance(op.op, Shard) else 0
        count = min(y.size, x.size - start)
        zeros = [] if count == y.size else [Fill(y.reshape(-1).at(count, [y.size - count]))]
        return [*copy(y.reshape(-1).at(0, [count]), x.reshape(-1).at(start, [count])), *zeros]


@family("Fill")
class Filling(Moving):
    """One value everywhere."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        y = need(outs[0])
        return fill_with(y, op.op.value)  # type: ignore[attr-defined]
