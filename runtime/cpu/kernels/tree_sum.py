"""TreeSum: all parts of an element in one pass, as a generated loop."""

from __future__ import annotations

from ....language.ir import Operator
from ....language.types import Operands, dtype_name
from ....ops.communication.base import tree_sums
from ..device.native import Call
from ..families import Family, family, floats
from ..providers.loops import computed

#: more parts than that are added by the operator's own numerics
_MOST = 64


@family("TreeSum")
class TreeSums(Family):
    """The same tree in registers; every addition is rounded there, too."""

    def accepts(self, op: Operator) -> bool:
        """Whether the type is float32 or float64, and the size large enough to benefit."""
        return floats(op) and 2 <= op.op.parts <= _MOST  # type: ignore[attr-defined]

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """One call, split over the threads by columns."""
        y = outs[0].reshape(-1)
        rows = ins[0].reshape(op.op.parts, -1)  # type: ignore[attr-defined]
        return [computed(tree_sums, dtype_name(y.dtype), list(rows), [y])]
