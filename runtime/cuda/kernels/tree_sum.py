"""TreeSum: all parts of an element in one pass, added in registers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....language.element import argument
from ....language.ir import Operator
from ....language.types import present
from ....ops.communication.base import tree_sum
from ..code.parts import MOST_LANES, WIDE, aligned, lanes
from ..device.kernel import C_TYPES, Buffer, Call, Kernel
from ..families import Buffers, Family, family
from ..loops.elements import Elements, Operand

#: more parts than that are added by the operator's own numerics: each takes registers
_MOST = 64
#: parts up to which a thread reads whole vectors of each
_FEW = 8


@functools.lru_cache(maxsize=64)
def _made(dtype: str, parts: int, *, vectors: bool, wide: bool) -> Elements:
    """The loop over one part: its operands are all of them.  Every addition is rounded, as in the other places."""
    total = tree_sum([argument(i, dtype) for i in range(parts)])
    width = min(lanes([dtype]), MOST_LANES) if vectors and parts <= _FEW else 1
    return Elements(1, (Operand(dtype, (), True),) * parts, (total,), width, inside=True, wide=wide)


@family("TreeSum")
class TreeSums(Family):
    """The same tree as on a processor."""

    def accepts(self, op: Operator) -> bool:
        """All element types, up to 64 parts."""
        return 2 <= op.op.parts <= _MOST and all(v.dtype in C_TYPES for v in op.reads())  # type: ignore[attr-defined]

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y = present(ins[0], outs[0])
        if not y.size:
            return []
        parts: int = op.op.parts  # type: ignore[attr-defined]
        rows = [x.reshape(-1).at(i * y.size, [y.size]) for i in range(parts)]
        vectors = aligned(b.address for b in (*rows, y))
        made = _made(y.dtype, parts, vectors=vectors, wide=y.size >= WIDE)
        return [_kernel(made).blocks(-(-y.size // made.per_block), args=(*rows, y, y.size))]


@functools.lru_cache(maxsize=64)
def _kernel(made: Elements) -> Kernel:
    return made.kernel("tree_sum")
