"""TreeSum: all parts of an element in one pass, added in registers."""

from __future__ import annotations

from collections.abc import Sequence

from ....language.ir import Operator
from ....language.types import present
from ....ops.communication.base import tree_sums
from ..device.kernel import C_TYPES, Buffer, Call
from ..families import Buffers, Family, family
from .loops import computed

#: more parts than that are added by the operator's own numerics: each takes registers
_MOST = 64


@family("TreeSum")
class TreeSums(Family):
    """The same tree as on a processor."""

    def accepts(self, op: Operator) -> bool:
        """All element types, up to 64 parts."""
        return 2 <= op.op.parts <= _MOST and all(v.dtype in C_TYPES for v in op.reads())  # type: ignore[attr-defined]

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y = present(ins[0], outs[0])
        parts: int = op.op.parts  # type: ignore[attr-defined]
        rows = [x.reshape(-1).at(i * y.size, [y.size]) for i in range(parts)]
        return computed(tree_sums, y.dtype, rows, [y.reshape(-1)])
