"""Bits of another type, and windows as columns and back; each element computes its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import DTYPES, present
from ...shared.kernels.pooling import AXES, over_places, three
from ...shared.kernels.windows import from_windows, window_columns
from ...shared.texts import Absent
from ..code.python_kernels import call_of
from ..code.strided import copy
from ..device.kernel import C_TYPES, Buffer, Call
from ..families import Buffers, Family, family


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
    """Windows of up to three axes as columns, and back; the sums of these go in the order of the taps."""

    def accepts(self, op: Operator) -> bool:
        kinds = {v.dtype for v in (*op.reads(), *op.writes())}
        return kinds <= {t for t in C_TYPES if DTYPES[t].kind != "b"} and len(op.op.image) <= AXES  # type: ignore[attr-defined]

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule: Any = op.op
        x, y = present(ins[0], outs[0])
        if not y.size:
            return []
        w, back = rule.window(), rule.name == "Col2Im"
        planes = (y if back else x).shape[0] * (y if back else x).shape[1]
        deep, *rest = three(w.out, 1)
        image, columns = (planes, *three(w.inp, 1), 1), (planes, w.taps * deep, *rest, 1)
        if back:
            operands, text = [Absent(5), x.reshape(*columns), y.reshape(*image)], from_windows
        else:
            operands, text = [x.reshape(*image), y.reshape(*columns)], window_columns
        return [call_of(work) for work in over_places(text, rule, w, operands, columns=w.taps)]
