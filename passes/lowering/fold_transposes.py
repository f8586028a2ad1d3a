"""Folding of transposes into matrix products."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from ...language.ir import Block, Operator, Value
from ...ops.linear.products import Gemm, MatMul
from ...ops.shape.reshape import Transpose
from ..base import Pass


class FoldTransposes(Pass):
    """Fold Transposes of the last two axes into the matrix products before and after them.

    An operand is folded if it is the result of a Transpose, a result if only a Transpose reads it.  Nothing is folded
    across an update of the value that would be read.
    """

    def run(self, block: Block) -> Block:
        """The same values but for transposed ones that nobody reads any more."""
        operators = _results(block, _operands(block))
        read = {v.name for op in operators for v in op.reads()} | set(block.outputs)
        return block.with_operators(
            op for op in operators if not (_swaps(op) and all(v.name not in read for v in op.writes()))
        )


def _swaps(op: Operator) -> bool:
    """Whether an operator is a Transpose of the last two axes."""
    if not isinstance(op.op, Transpose) or len(op.op.perm) < 2:
        return False
    n = len(op.op.perm)
    return op.op.perm == (*range(n - 2), n - 1, n - 2)


def _operands(block: Block) -> list[Operator]:
    values: dict[str, tuple[int, Value]] = {}  # a transposed value → its place in the list, and what it was made of
    updated: dict[str, int] = {}
    transposes: list[Operator] = []
    for i, op in enumerate(block.operators):
        if isinstance(op.op, (MatMul, Gemm)):
            op = _with_operands(op, values, updated)
        transposes.append(op)
        for k in op.op.updates:
            if k < len(op.inputs) and (v := op.inputs[k]) is not None:
                updated[v.name] = i
        if _swaps(op) and op.inputs[0] is not None and op.outputs[0] is not None:
            values[op.outputs[0].name] = i, op.inputs[0]
    return transposes


def _with_operands(op: Operator, made: dict[str, tuple[int, Value]], updated: dict[str, int]) -> Operator:
    inputs, rule = list(op.inputs), cast(Any, op.op)
    flags = [rule.transA, rule.transB]
    for k in range(2):
        v = inputs[k]
        at, source = made.get(v.name, (0, None)) if v is not None else (0, None)
        if source is not None and updated.get(source.name, -1) < at:
            inputs[k], flags[k] = source, 1 - flags[k]
    if tuple(inputs) == op.inputs:
        return op
    folded = dataclasses.replace(rule, transA=flags[0], transB=flags[1])
    return dataclasses.replace(op, op=folded, inputs=tuple(inputs))


def _results(block: Block, operators: list[Operator]) -> list[Operator]:
    """The operators, where products write transposed results: (A B)ᵀ = Bᵀ Aᵀ."""
    readers: dict[str, list[Operator]] = {}
    for op in operators:
        for v in op.reads():
            readers.setdefault(v.name, []).append(op)
    gone: set[str] = set()
    transposes = []
    kept = set(block.outputs)
    for op in operators:
        y = op.outputs[0] if op.outputs else None
        only = readers.get(y.name, []) if y is not None and y.name not in kept else []
        product = isinstance(op.op, MatMul) and all(v is not None and v.ndim > 1 for v in op.inputs)
        if product and len(only) == 1 and _swaps(only[0]):
            rule = MatMul(transA=1 - op.op.transB, transB=1 - op.op.transA)  # type: ignore[attr-defined]
            op = dataclasses.replace(op, op=rule, inputs=op.inputs[::-1], outputs=only[0].outputs)
            gone.add(y.name)  # type: ignore[union-attr]
        elif _swaps(op) and op.inputs[0] is not None and op.inputs[0].name in gone:
            continue
        transposes.append(op)
    return transposes
