"""TreeSum: all parts of an element in one pass, added in registers by a generated loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import need
from ....ops.communication.base import tree_sums
from ..families import SharedFamily, family

#: more parts than that are added by the operator's own numerics: each takes registers
_MOST = 64


@family("TreeSum")
class TreeSums(SharedFamily):
    """The same tree everywhere; every addition is rounded."""

    def accepts(self, op: Operator) -> bool:
        """Up to 64 parts."""
        rule: Any = op.op
        return super().accepts(op) and 2 <= rule.parts <= _MOST

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> Sequence[Any]:
        """One loop over the elements."""
        rule: Any = op.op
        rows = ins[0].reshape(rule.parts, -1)
        parts = [rows[i] for i in range(rule.parts)]
        return self.place.computed(tree_sums, need(op.outputs[0]).dtype, parts, [outs[0].reshape(-1)])
