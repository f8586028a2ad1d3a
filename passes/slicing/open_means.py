"""Means over labels as a sum and a count, so that the sum can run in slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...language.builder import Builder
from ...language.ir import Block, Operator, Value
from ...ops.loss.cross_entropy import LabelLoss


def open_means(block: Block) -> Block:
    """Losses that are means over the labels that count, as Σ / count; and their gradients likewise.

    The divisor depends on all labels: a slice alone does not know it.  It is computed from the labels, which are small.
    """
    found: list[Operator] = []
    counts: dict[object, Value] = {}
    b = Builder.on(block)
    for o in block.operators:
        if not isinstance(o.op, LabelLoss) or o.op.reduction != "mean":
            found.append(o)
            continue
        b.role, b.prefix = o.role, next(o.writes()).name
        found += _opened(b, o, counts)
    if len(found) == len(block.operators):
        return block
    return block.with_operators(found, constants=(*block.constants, *b.constants))


def _opened(b: Builder, o: Operator, counts: dict[object, Value]) -> Sequence[Operator]:
    """The operators in place of a mean or its gradient; `counts`: the divisors so far, by what they count."""
    b.operators.clear()
    labels, weights, dloss = (*o.inputs[1:], None, None)[:3]
    op, result = o.op, o.outputs[0]
    assert isinstance(op, LabelLoss) and labels is not None and result is not None
    like = result if dloss is None else dloss
    what = (labels, weights, op.ignore_index, like.dtype)
    count = counts.get(what)
    if count is None:
        count = counts[what] = _count(b, op, labels, weights, like)
    total = dataclasses.replace(op, reduction="sum")  # type: ignore[call-arg]
    if dloss is not None:
        scaled = b.Div(dloss, count)
        return [*b.operators, dataclasses.replace(o, op=total, inputs=(*o.inputs[:3], scaled))]
    summed = Value(b.names.take(f"{result.name}.sum"), result.type)
    mean = b.Div(summed, count)
    *before, last = b.operators
    loss = dataclasses.replace(o, op=total, outputs=(summed, *o.outputs[1:]))
    return [*before, loss, last.renamed({mean.name: result.name})]


def _count(b: Builder, op: LabelLoss, labels: Value, weights: Value | None, like: Value) -> Value:
    """What the mean divides by: how many labels count, or the sum of their weights."""
    ignored = None if op.ignore_index is None else b.Equal(labels, b.constant(op.ignore_index, labels))
    if weights is not None:
        safe = labels if ignored is None else b.Where(ignored, b.constant(0, labels), labels)
        each = b.Gather(weights, safe, axis=0)
    elif ignored is None:
        return b.constant(labels.type.size, like)
    else:
        each = b.Where(ignored, b.constant(0, like), b.constant(1, like))
    if ignored is not None and weights is not None:
        each = b.Where(ignored, b.constant(0, each), each)
    found = b.ReduceSum(each, axes=tuple(range(each.ndim)), keepdims=0)
    return found if found.dtype == like.dtype else b.Cast(found, to=like.dtype)
