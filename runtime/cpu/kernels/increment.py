"""Increment: the counter of steps, where a library has no NumPy that adds one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.types import need
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, enough, family

if TYPE_CHECKING:
    from ....language.ir import Operator


@kernel
def incremented(x, unscale, y, begin, end):
    """y = x + 1, or x where `unscale` is there and 0."""
    for i in range(begin, end):
        if unscale.size and unscale[0] == 0:
            y[i] = x[i]
        else:
            y[i] = x[i] + 1


@family("Increment")
class Counters(Family):
    """(x, unscale?) → x + 1."""

    def accepts(self, op: Operator) -> bool:
        """Integers and floats that numba adds to."""
        x = need(op.inputs[0])
        return x.size >= enough() and x.dtype in ("i64", "i32", "f64", "f32")

    def bind(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Call]:
        """One call."""
        unscale = np.empty(0, np.float32) if ins[1] is None else ins[1].reshape(1)
        return [incremented.call(ins[0].reshape(-1), unscale, outs[0].reshape(-1), work=ins[0].size)]
