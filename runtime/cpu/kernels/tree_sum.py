"""TreeSum: all parts of an element in one pass, as a generated loop."""

from __future__ import annotations

import functools

from ....language.element import argument
from ....language.ir import Operator
from ....language.types import Operands
from ....ops.communication.base import tree_sum
from ..device import native
from ..device.native import Call
from ..families import Family, family, floats
from ..loops.kernel import Nest, Operand

#: elements that are one piece of work; from how many on a second thread is woken
_PIECE, _ALONE = 4096, 1 << 15
#: more parts than that are added by the operator's own numerics
_MOST = 64


@functools.lru_cache(maxsize=64)
def _text(dtype: str, parts: int) -> str:
    """The loop over one part: its operands are all of them."""
    operands = tuple(Operand(dtype, (), True) for _ in range(parts))
    return Nest(0, operands, (tree_sum([argument(i, dtype) for i in range(parts)]),)).kernel()


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
        pieces = -(-y.size // _PIECE)
        words = (*rows, y, y.size, min(y.size, _PIECE), pieces)
        text = _text(op.outputs[0].dtype, len(rows))  # type: ignore[union-attr]
        return [Call(native.compile_ir(text), words, pieces, parallel=y.size >= _ALONE)]
