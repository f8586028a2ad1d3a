"""Batch normalisation as sums over the batch and element-wise steps, for statistics over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ...language.builder import Builder
from ...language.ir import Block, Operator, Value
from ...ops.norm.batch_norm import as_type_of, channel_axes, per_channel
from ...ops.norm.batch_norm_train import BatchNormApply, BatchNormGrad, BatchNormStatistics, BatchNormTrain
from ...ops.norm.numerics import wide
from ..base import Pass


class OpenBatchNorms(Pass):
    """Batch normalisations become sums of the batch, and what is computed from them element by element.

    Sums can be taken in parts, by ranks that have a part of the batch each: synchronised batch normalisation.
    """

    def run(self, block: Block) -> Block:
        kinds = (BatchNormTrain, BatchNormStatistics, BatchNormGrad)
        if not any(isinstance(o.op, kinds) for o in block.operators):
            return block
        operators: list[Operator] = []
        b = Builder.on(block)
        for o in block.operators:
            if not isinstance(o.op, kinds):
                operators.append(o)
                continue
            b.operators, b.role, b.prefix = [], o.role, next(o.writes()).name
            total = _opened(b, o)
            names = {v.name: w.name for v, w in zip(total, o.outputs, strict=False) if v is not None and w is not None}
            operators += [x.renamed(names) for x in b.operators]
        return block.with_operators(operators, constants=(*block.constants, *b.constants))


def _opened(b: Builder, o: Operator) -> tuple[Value | None, ...]:
    """The outputs, from operators of their own each."""
    op = o.op
    x, *others = (v for v in o.inputs if v is not None)
    if isinstance(op, BatchNormGrad):
        return _gradient(b, (x, *others), op.epsilon)
    mean, var = _statistics(b, x)
    if not isinstance(op, BatchNormTrain):
        return mean, var
    scale, bias = others
    mean, var = as_type_of(b, mean, scale), as_type_of(b, var, scale)
    y = b.emit(BatchNormApply(epsilon=op.epsilon), x, scale, bias, mean, var)
    return (y, mean, var)[: len(o.outputs)]


def _statistics(b: Builder, x: Value) -> tuple[Value, Value]:
    axes, wanted = channel_axes(x.ndim), wide(x.type).dtype
    work = x if x.dtype == wanted else b.Cast(x, to=wanted)
    count = b.constant(max(x.size // max(x.shape[1], 1), 1), work)
    mean = b.Div(b.ReduceSum(work, axes=axes, keepdims=0), count)
    centred = b.Sub(work, per_channel(b, mean, x))
    return mean, b.Div(b.ReduceSum(b.Mul(centred, centred), axes=axes, keepdims=0), count)


def _gradient(b: Builder, inputs: Sequence[Value], epsilon: float) -> tuple[Value, Value, Value]:
    """dx, dscale, dbias from x, scale, mean, var and dy."""
    axes, wanted = channel_axes(inputs[0].ndim), wide(inputs[0].type).dtype
    x, scale, mean, var, dy = (v if v.dtype == wanted else b.Cast(v, to=wanted) for v in inputs)
    vectors = [per_channel(b, v, x) for v in (mean, scale, var)]
    total = b.ReduceSum(dy, axes=axes, keepdims=0)
    against = b.ReduceSum(b.CentredProduct(x, vectors[0], dy), axes=axes, keepdims=0)
    sums = [per_channel(b, v, x) for v in (total, against)]
    count = max(x.size // max(x.shape[1], 1), 1)
    dx = b.BatchNormSlope(x, *vectors, *sums, dy, count=count, epsilon=epsilon)
    dscale = b.Div(against, b.Sqrt(b.Add(var, b.constant(epsilon, var))))
    return as_type_of(b, dx, inputs[0]), as_type_of(b, dscale, inputs[1]), b.Cast(total, to=inputs[1].dtype)
