"""Means over labels as a sum and a count, so that the sum can run in slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...language.builder import Builder
from ...language.ir import Block, Operator, Value
from ...ops.loss.cross_entropy import LabelLoss, divisor
from ...ops.loss.linear_cross_entropy import LinearLoss
from ..base import Pass


class OpenMeans(Pass):
    """Losses that are means over labels become a sum and a count, so that the sum can run in slices."""

    def run(self, block: Block) -> Block:
        return open_means(block)


def open_means(block: Block) -> Block:
    """Losses that are means over the labels that count, as Σ / count; and their gradients likewise.

    The divisor depends on all labels: a slice alone does not know it.  It is computed from the labels, which are small.
    The block remembers the result, as each number of slices asks for it.
    """
    if "open means" not in block.facts:
        block.facts["open means"] = _with_open_means(block)
    return block.facts["open means"]


def _with_open_means(block: Block) -> Block:
    operators: list[Operator] = []
    counts: dict[object, Value] = {}
    b = Builder.on(block)
    for o in block.operators:
        if not isinstance(o.op, (LabelLoss, LinearLoss)) or o.op.reduction != "mean":
            operators.append(o)
            continue
        b.role, b.prefix = o.role, next(o.writes()).name
        operators += _opened(b, o, counts)
    if len(operators) == len(block.operators):
        return block
    return block.with_operators(operators, constants=(*block.constants, *b.constants))


def _opened(b: Builder, o: Operator, counts: dict[object, Value]) -> Sequence[Operator]:
    """The operators in place of a mean or its gradient; `counts`: the divisors so far, by what they count."""
    b.operators.clear()
    op = o.op
    assert isinstance(op, (LabelLoss, LinearLoss))
    labels, weights, dloss = _labels(o)
    like = dloss or o.outputs[0]
    assert labels is not None and like is not None
    what = (labels, weights, op.ignore_index, like.dtype)
    count = counts.get(what)
    if count is None:
        count = counts[what] = _count(b, op.ignore_index, labels, weights, like)
    total = dataclasses.replace(op, reduction="sum")
    if dloss is not None:
        inputs = tuple(b.Div(v, divisor(b, count)) if v is dloss else v for v in o.inputs)
        return [*b.operators, dataclasses.replace(o, op=total, inputs=inputs)]
    before = list(b.operators)
    b.operators.clear()
    # the loss, and what it makes of gradients with it, are divided; a log-sum-exp is not
    divided = [
        i for i, v in enumerate(o.outputs) if v is not None and (i == 0 or (isinstance(op, LinearLoss) and i > 1))
    ]
    outputs = list(o.outputs)
    names: dict[str, str] = {}
    for i in divided:
        v = outputs[i]
        assert v is not None
        outputs[i] = Value(b.names.take(f"{v.name}.sum"), v.type)
        by = count if i == 0 else divisor(b, count)
        names[b.Div(outputs[i], by if v.dtype == by.dtype else b.Cast(by, to=v.dtype)).name] = v.name
    return [*before, dataclasses.replace(o, op=total, outputs=tuple(outputs)), *(x.renamed(names) for x in b.operators)]


def _labels(o: Operator) -> tuple[Value | None, Value | None, Value | None]:
    """Labels, class weights and the gradient of the loss (of a gradient's operator) among the inputs."""
    if isinstance(o.op, LinearLoss):
        return o.inputs[3], None, (*o.inputs[5:], None)[0]
    labels, weights, dloss = (*o.inputs[1:], None, None)[:3]
    return labels, weights, dloss


def _count(b: Builder, ignore_index: int | None, labels: Value, weights: Value | None, like: Value) -> Value:
    """The divisor of the mean: how many labels count, or the sum of their weights."""
    ignored = None if ignore_index is None else b.Equal(labels, b.constant(ignore_index, labels))
    if weights is None and ignored is None:
        return b.constant(labels.type.size, like)
    if weights is None:
        each = b.constant(1, like)
    else:
        each = b.Gather(weights, labels if ignored is None else b.Where(ignored, b.constant(0, labels), labels), axis=0)
    if ignored is not None:
        each = b.Where(ignored, b.constant(0, each), each)
    total = b.ReduceSum(each, axes=tuple(range(each.ndim)), keepdims=0)
    return total if total.dtype == like.dtype else b.Cast(total, to=like.dtype)
