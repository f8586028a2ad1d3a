"""Gradients of embeddings that are added to another gradient are added to it row by row."""

from __future__ import annotations

from collections import Counter

from ...language.ir import Block, Operator, Value
from ...language.kernels import accepting
from ...ops.elementwise.arithmetic import Add
from ...ops.indexing.add_rows import AddRows
from ...ops.indexing.gather import GatherGrad
from ..base import Pass


class ScatterGradients(Pass):
    """Add(x, GatherGrad(indices, dy)) becomes AddRows(x, indices, dy) where one of `providers` has a kernel for it
    (none given: always).

    Of a table that is also a network's last layer few rows have a gradient as an embedding.  Only where nobody else
    reads the sparse gradient, and where dy, which has to stay until then, is no larger than the table.
    """

    providers: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        reads = Counter(v.name for op in block.operators for v in op.reads())
        reads.update(block.outputs)
        changing = {v.name for op in block.operators if op.op.updates for v in op.writes()}
        sparse = {
            op.outputs[0].name: op
            for op in block.operators
            if isinstance(op.op, GatherGrad) and op.outputs[0] is not None and _small(op)
            and reads[op.outputs[0].name] == 1 and not any(v.name in changing for v in op.reads())
        }  # fmt: skip
        result: list[Operator] = []
        gone: set[int] = set()
        for op in block.operators:
            taken = self._onto(op, sparse) if sparse and isinstance(op.op, Add) else None
            if taken is not None:
                gone.add(id(taken[1]))
            result.append(op if taken is None else taken[0])
        return block.with_operators(op for op in result if id(op) not in gone) if gone else block

    def _onto(self, op: Operator, sparse: dict[str, Operator]) -> tuple[Operator, Operator] | None:
        """The operator in place of an Add, and the GatherGrad that it takes in."""
        for k in (1, 0):
            rows, x = op.inputs[k], op.inputs[1 - k]
            taken = sparse.get(rows.name) if rows is not None else None
            if taken is None or x is None or rows is None or x.type != rows.type or x.name == rows.name:
                continue
            rule: GatherGrad = taken.op  # type: ignore[assignment]
            operator = Operator(AddRows(rule.axis), (x, *taken.inputs), op.outputs, op.role)
            if x.dtype in ("f32", "f64") and (not self.providers or accepting(self.providers, operator)):
                return operator, taken
        return None


def _small(op: Operator) -> bool:
    """Whether dy is no larger than the table."""
    dy, table = op.inputs[1], op.outputs[0]
    return isinstance(dy, Value) and isinstance(table, Value) and dy.size <= table.size
