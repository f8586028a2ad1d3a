"""Batch normalisation in both layouts: statistics in chunks, then one pass with a factor per channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....language.element import Expr, sqrt
from ....language.ir import Operator
from ....language.types import FLOATS, TensorType, present
from ...shared import batch_norms as formulas
from ..code.channel_sums import Channels, moments_of, products, whole_sums
from ..device.kernel import Buffer, Call
from ..families import Buffers, Family, family
from .loops import computed


def form_of(op: Operator) -> Channels:
    """How its first input is seen."""
    x: Any = op.inputs[0]
    if op.op.name.startswith("ChannelsLast"):
        return Channels(math.prod(x.shape[:-1]), x.shape[-1], 1, True)
    p = math.prod(x.shape[2:])
    if p == 1:
        return Channels(x.shape[0], x.shape[1], 1, True)
    return Channels(x.shape[0], x.shape[1], p, False)


def _inverse(var: Expr, epsilon: float) -> tuple[Expr, ...]:
    return (1 / sqrt(var + epsilon),)


def _gradient(
    x: Expr, dy: Expr, mean: Expr, scale: Expr, inverse: Expr, dy_mean: Expr, slope: Expr
) -> tuple[Expr, ...]:
    """dx = factor · (dy - Σ dy / n - (x - mean) · inverse · Σ dy x̂ / n)."""
    factor = scale * inverse
    return ((x - mean) * -(slope * inverse * factor) + dy * factor - dy_mean * factor,)


class ChannelNorms(Family):
    """The base of the operators' families."""

    def accepts(self, op: Operator) -> bool:
        """Floats; as many elements and channels as kernels can have."""
        return all(v.dtype in FLOATS for v in (*op.reads(), *op.writes())) and form_of(op).fits

    def kind(self, op: Operator) -> str:
        """The element type in which it is computed."""
        x: Any = op.inputs[0]
        return "f64" if x.dtype == "f64" else "f32"

    def vectors(self, op: Operator, count: int) -> TensorType:
        """Numbers of channels, as they are computed."""
        return TensorType(self.kind(op), (count, form_of(op).c))

    def each(self, op: Operator, formula: Any, arrays: Sequence[Any], vectors: Sequence[Any], y: Any) -> list[Call]:
        """The elements of y, of those of arrays and of vectors of channels."""
        form = form_of(op)
        shape = (form.count, form.c) if form.last else (form.n, form.c, form.p)
        columns = [v.reshape(*((form.c,) if form.last else (form.c, 1))) for v in vectors]
        return computed(formula, self.kind(op), [*(x.reshape(*shape) for x in arrays), *columns], [y.reshape(*shape)])

    def applied(self, op: Operator, buffers: Sequence[Any], factor: Buffer) -> list[Call]:
        """(x, scale, bias, mean, var, y): BatchNormApply."""
        x, scale, bias, mean, var, y = buffers
        first = computed(formulas.factor, self.kind(op), [scale, var], [factor], (_epsilon(op),))
        return [*first, *self.each(op, formulas.applied, [x], [mean, factor, bias], y)]


def _epsilon(op: Operator) -> float:
    rule: Any = op.op
    return rule.epsilon


def _rows(b: Buffer, count: int) -> list[Buffer]:
    """The rows of a matrix of vectors."""
    size = b.size // count
    return [b.at(i * size, [size]) for i in range(count)]


@family("BatchNormStatistics", "ChannelsLastBatchNormStatistics")
class Statistics(ChannelNorms):
    """Mean and variance."""

    def accepts(self, op: Operator) -> bool:
        return super().accepts(op) and len(list(op.writes())) == 2

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        x: Any = op.inputs[0]
        return (form_of(op).partial(x.dtype),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, mean, var = present(ins[0], outs[0], outs[1])
        return moments_of(form_of(op), x, scratch[0], mean, var, [])


@family("BatchNormTrain", "ChannelsLastBatchNormTrain")
class Train(ChannelNorms):
    """Statistics, then what BatchNormApply does."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Chunks' numbers; mean, variance and factor."""
        x: Any = op.inputs[0]
        return (form_of(op).partial(x.dtype), self.vectors(op, 3))

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, scale, bias = ins[:3]
        assert x is not None
        mean, var, factor = _rows(scratch[1], 3)
        statistics = list(outs[1:3]) if any(o is not None for o in outs[1:3]) else []
        first = moments_of(form_of(op), x, scratch[0], mean, var, statistics)
        return [*first, *self.applied(op, (x, scale, bias, mean, var, outs[0]), factor)]


@family("BatchNormApply", "ChannelsLastBatchNormApply")
class Apply(ChannelNorms):
    """One pass."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        return (self.vectors(op, 1),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        return self.applied(op, (*ins[:5], outs[0]), scratch[0])


@family("BatchNormalization", "ChannelsLastBatchNormalization")
class Inference(ChannelNorms):
    """One pass."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A factor and a summand a channel."""
        return (self.vectors(op, 2),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Two launches."""
        x, y, vectors = ins[0], outs[0], [b for b in ins[1:5] if b is not None]
        pair = _rows(scratch[0], 2)
        first = computed(formulas.folded, self.kind(op), vectors, pair, (_epsilon(op),))
        return [*first, *self.each(op, formulas.affine, [x], pair, y)]


@family("BatchNormGrad", "ChannelsLastBatchNormGrad")
class Gradient(ChannelNorms):
    """Sums, then one pass."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Chunks' sums; the inverse deviation, and the sums as they are computed."""
        x: Any = op.inputs[0]
        return (form_of(op).partial(x.dtype), self.vectors(op, 3))

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Four launches."""
        form = form_of(op)
        x, scale, mean, var, dy = (b for b in ins[:5] if b is not None)
        dx, dscale, dbias = outs[:3]
        assert dscale is not None and dx is not None
        inverse, *two = _rows(scratch[1], 3)
        sums = scratch[1].at(form.c, [2, form.c])
        parts = [products(form, x, dy, mean, None, scratch[0])] if form.chunks else []
        total = whole_sums(x.dtype, dscale.dtype)
        args = (scratch[0], inverse, dscale, dbias, sums, form.c, form.chunks, max(form.count, 1))
        return [
            *computed(_inverse, self.kind(op), [var], [inverse], (_epsilon(op),)),
            *parts,
            total.blocks(form.c, args=args, block=(128,)),
            *self.each(op, _gradient, [x, dy], [mean, scale, inverse, *two], dx),
        ]
