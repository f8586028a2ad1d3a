"""Bits of another type, and windows as columns and back; each element computes its source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import DTYPES, present
from ....ops.window import full
from ..code.parts import WIDE, divisor
from ..code.pooling import Form, columns_of, image_of
from ..code.strided import copy
from ..device.kernel import C_TYPES, Buffer, Call
from ..families import Buffers, Family, family

#: planes of a thread where windows are made columns
_PLANES = 4


@family("BitCast")
class Bits(Family):
    """The same bytes."""

    def accepts(self, op: Operator) -> bool:
        return True

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y = present(ins[0], outs[0])
        return copy(y, x)


@family("Im2Col", "Col2Im")
class Columns(Family):
    """Windows as columns, and back; the sums of these go in the order of the taps."""

    def accepts(self, op: Operator) -> bool:
        kinds = {v.dtype for v in (*op.reads(), *op.writes())}
        return kinds <= {t for t in C_TYPES if DTYPES[t].kind != "b"}

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule: Any = op.op
        x, y = present(ins[0], outs[0])
        if not y.size:
            return []
        w, back = rule.window(), rule.name == "Col2Im"
        planes = (y if back else x).shape[0] * (y if back else x).shape[1]
        near, far = (w.inp, w.out) if back else (w.out, w.inp)
        wide = max(x.size, y.size) >= WIDE
        end = full(rule.pads, 2 * len(near), 0)[len(near) :]
        form = Form(w.kernel, w.strides, w.dilations, w.begin, end, False, _PLANES, wide)
        k = (image_of if back else columns_of)(form, x.dtype)
        area = math.prod(near)
        work = -(-planes // _PLANES) * area
        sizes = [divisor(d, wide=wide) for d in near[1:]]
        return [k(work, x, y, work, planes, divisor(area, wide=wide), *sizes, *far, near[0])]
