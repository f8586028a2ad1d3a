"""Batch normalisation of channels-last activations, seen as rows of channels.

Statistics: x is read once, in blocks of rows that stay in the cache.  Each block gets its mean and the squares of what
is centred by it, in the element type; blocks are put together in float64 by the formula of Chan, Golub and LeVeque
1983, in parts whose number depends on the shape alone, and these in their order.  So nothing cancels, whatever the
mean, and the bits are the same for any number of threads.  What is made from the statistics is made by the operators'
own formulas, rounding by rounding.
"""

from __future__ import annotations

import math

from ....language.ir import Operator
from ....language.types import Array, Operands, TensorType, dtype_name, need
from ...shared import batch_norms as formulas
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, family, floats, parts
from ..families import computed as computing
from ..providers.loops import computed

#: rows of a block, at least and at most, and its elements
_LEAST, _MOST, _BLOCK = 8, 64, 1 << 15
#: channels that a thread takes at a time where parts are put together
_CHANNELS = 64
#: as many of these are not worth waking a thread
_ALONE = 8


def _block(channels: int) -> int:
    return max(_LEAST, min(_MOST, _BLOCK // channels))


@kernel
def moments(x, work, out, block, begin, end):
    """Mean and sum of squares of each part of the rows: found [parts, 2, c] in float64; work the same in x's type."""
    for part in range(begin, end):
        first = x.shape[0] * part // out.shape[0]
        stop = x.shape[0] * (part + 1) // out.shape[0]
        mean, squares = out[part, 0], out[part, 1]
        m, q = work[part, 0], work[part, 1]
        for c in range(x.shape[1]):
            mean[c] = 0
        for c in range(x.shape[1]):
            squares[c] = 0
        for r0 in range(first, stop, block):
            r1 = min(r0 + block, stop)
            share = x.dtype.type(1.0 / (r1 - r0))
            for c in range(x.shape[1]):
                m[c] = 0
            for r in range(r0, r1):
                row = x[r]
                for c in range(x.shape[1]):
                    m[c] += row[c]
            for c in range(x.shape[1]):
                m[c] *= share
            for c in range(x.shape[1]):
                q[c] = 0
            for r in range(r0, r1):
                row = x[r]
                for c in range(x.shape[1]):
                    q[c] += (row[c] - m[c]) * (row[c] - m[c])
            weight = float(r1 - r0) / (r1 - first)
            cross = weight * (r0 - first)
            for c in range(x.shape[1]):
                more = m[c] - mean[c]
                mean[c] += more * weight
                squares[c] += q[c] + more * more * cross


@kernel
def together(found, mean, var, rows, begin, end):
    """Mean and variance of all rows from those of the parts; pieces of `_CHANNELS` channels."""
    for c in range(begin * _CHANNELS, min(end * _CHANNELS, mean.shape[0])):
        m, q = 0.0, 0.0
        for part in range(found.shape[0]):
            first = rows * part // found.shape[0]
            stop = rows * (part + 1) // found.shape[0]
            more = found[part, 0, c] - m
            weight = float(stop - first) / stop
            m += more * weight
            q += found[part, 1, c] + more * more * weight * first
        mean[c] = m
        var[c] = q / rows


@kernel
def sums(x, dy, mean, work, out, block, begin, end):
    """Σ dy and Σ dy · (x - mean) of each part of the rows: found [parts, 2, c]; work the same in x's type."""
    for part in range(begin, end):
        first = x.shape[0] * part // out.shape[0]
        stop = x.shape[0] * (part + 1) // out.shape[0]
        total, against = work[part, 0], work[part, 1]
        for c in range(x.shape[1]):
            out[part, 0, c] = 0
        for c in range(x.shape[1]):
            out[part, 1, c] = 0
        for r0 in range(first, stop, block):
            for c in range(x.shape[1]):
                total[c] = 0
            for c in range(x.shape[1]):
                against[c] = 0
            for r in range(r0, min(r0 + block, stop)):
                a, g = x[r], dy[r]
                for c in range(x.shape[1]):
                    total[c] += g[c]
                for c in range(x.shape[1]):
                    against[c] += g[c] * (a[c] - mean[c])
            for c in range(x.shape[1]):
                out[part, 0, c] += total[c]
            for c in range(x.shape[1]):
                out[part, 1, c] += against[c]


@kernel
def coefficients(found, scale, var, dscale, dbias, gradient, rows, epsilon, begin, end):
    """The gradients of scale and bias, and given [3, c] with dx = centred · given₀ + dy · given₁ + given₂."""
    one, e, count = var.dtype.type(1), var.dtype.type(epsilon), var.dtype.type(-float(rows))
    for c in range(begin * _CHANNELS, min(end * _CHANNELS, scale.shape[0])):
        total, against = 0.0, 0.0
        for part in range(found.shape[0]):
            total += found[part, 0, c]
            against += found[part, 1, c]
        inverse = one / var.dtype.type(math.sqrt(var[c] + e))
        factor = scale[c] * inverse
        dbias[c] = total
        dscale[c] = var.dtype.type(against) * inverse
        gradient[0, c] = dscale[c] * inverse * factor / count
        gradient[1, c] = factor
        gradient[2, c] = dbias[c] * factor / count


def _rows(a: Array) -> Array:
    return a.reshape(-1, a.shape[-1])


def _in_parts(op: Operator) -> tuple[TensorType, TensorType]:
    """Two sums for each part, in float64 and in the type of the computation."""
    x = need(op.inputs[0])
    shape = (parts(x.size // x.shape[-1]), 2, x.shape[-1])
    return TensorType("f64", shape), computing(x.type).with_shape(shape)


def _statistics(x: Array, mean: Array, var: Array, found: Array, work: Array) -> list[Call]:
    """Calls that give mean and variance of the columns of x."""
    pieces = -(-x.shape[1] // _CHANNELS)
    return [
        moments.call(x, work, found, _block(x.shape[1]), work=len(found)),
        together.call(found, mean, var, x.shape[0], work=pieces, parallel=pieces > _ALONE),
    ]


class Normalisation(Family):
    """The base of the families here."""

    def accepts(self, op: Operator) -> bool:
        """All in one type of float32 and float64, or activations in bfloat16."""
        return floats(op, halves=True) and op.inputs[0] is not None and op.inputs[0].size > 0

    def vector(self, op: Operator) -> TensorType:
        """One element a channel."""
        x = need(op.inputs[0])
        return computing(x.type).with_shape(x.shape[-1:])


@family("ChannelsLastBatchNormStatistics")
class Statistics(Normalisation):
    """Mean and variance."""

    def accepts(self, op: Operator) -> bool:
        return super().accepts(op) and len(list(op.writes())) == 2

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        return _in_parts(op)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Over the parts, then over the channels."""
        return _statistics(_rows(ins[0]), outs[0], outs[1], *scratch)


@family("ChannelsLastBatchNormTrain")
class Train(Normalisation):
    """Statistics, then what BatchNormApply does."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Sums of parts; factor, mean and variance."""
        return (*_in_parts(op), *(self.vector(op),) * 3)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        mean, var = (s if o is None else o for s, o in zip(scratch[3:], outs[1:3], strict=True))
        return [
            *_statistics(_rows(ins[0]), mean, var, *scratch[:2]),
            *_apply(op, ins[0], ins[1], ins[2], mean, var, outs[0], scratch[2]),
        ]


def _apply(
    op: Operator, x: Array, scale: Array, bias: Array, mean: Array, var: Array, y: Array, factor: Array
) -> list[Call]:
    epsilon, kind = op.op.epsilon, dtype_name(factor.dtype)  # type: ignore[attr-defined]
    return [
        computed(formulas.factor, kind, [scale, var], [factor], (epsilon,)),
        computed(formulas.applied, kind, [_rows(x), mean, factor, bias], [_rows(y)]),
    ]


@family("ChannelsLastBatchNormApply")
class Apply(Normalisation):
    """One pass."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        return (self.vector(op),)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        x, scale, bias, mean, var = ins[:5]
        return _apply(op, x, scale, bias, mean, var, outs[0], scratch[0])


@family("BatchNormFactor")
class Factor(Family):
    """Small, but among kernels, so that no Python comes between them."""

    def accepts(self, op: Operator) -> bool:
        types = {v.type for v in op.reads()}
        return len(types) == 1 and all(t.dtype in ("f32", "f64") and t.ndim == 1 and t.size for t in types)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        epsilon = op.op.epsilon  # type: ignore[attr-defined]
        return [computed(formulas.factor, dtype_name(outs[0].dtype), ins[:2], outs[:1], (epsilon,))]


@family("ChannelsLastBatchNormalization")
class Inference(Normalisation):
    """One pass."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A factor and a summand a channel."""
        return (self.vector(op),) * 2

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        epsilon = op.op.epsilon  # type: ignore[attr-defined]
        kind = dtype_name(scratch[0].dtype)
        return [
            computed(formulas.folded, kind, ins[1:5], scratch, (epsilon,)),
            computed(formulas.affine, kind, [_rows(ins[0]), *scratch], [_rows(outs[0])]),
        ]


@family("ChannelsLastBatchNormGrad")
class Gradient(Normalisation):
    """Sums, then one pass."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Sums of parts, and three coefficients a channel."""
        return (*_in_parts(op), self.vector(op).with_shape((3, *self.vector(op).shape)))

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Three calls."""
        x, dy, dx = _rows(ins[0]), _rows(ins[4]), _rows(outs[0])
        scale, mean, var = ins[1:4]
        found, work, gradient = scratch
        epsilon = op.op.epsilon  # type: ignore[attr-defined]
        pieces = -(-x.shape[1] // _CHANNELS)
        return [
            sums.call(x, dy, mean, work, found, _block(x.shape[1]), work=len(found)),
            coefficients.call(
                found,
                scale,
                var,
                outs[1],
                outs[2],
                gradient,
                x.shape[0],
                epsilon,
                work=pieces,
                parallel=pieces > _ALONE,
            ),
            computed(formulas.gradient, dtype_name(gradient.dtype), [x, dy, mean, *gradient], [dx]),
        ]
