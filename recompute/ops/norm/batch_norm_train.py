"""Batch normalisation with the batch's own statistics, whole and in two parts, and its gradient.

All work in blocks of channels, so that the several passes over a block stay in the cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import UsageError
from ...language.element import sqrt
from ...language.factors import OWN, SUM, own_batch
from ...language.op import Cost, Op, OperatorBuilder
from ...language.types import Array, Value
from ..channels_last import channels_last
from .axes import by_channel, by_element
from .batch_norm import ChannelNorm, as_type_of, block_channels, channel_axes, channel_blocks, per_channel, planes
from .numerics import row_dots, wide


@channels_last(inputs=(0,), outputs=(0,))
class BatchNormTrain(ChannelNorm):
    """(x, scale, bias) → (x - mean) / √(var + epsilon) · scale + bias with the batch's own mean and biased variance.

    Ioffe & Szegedy 2015.  Optional outputs: mean and variance, in scale's element type.
    """

    inplace = (0,)
    small_outputs = (1, 2)

    def infer(self, x, scale, bias):
        """x's type; one statistic a channel."""
        self.check(x, scale, bias)
        return (x, scale, scale)

    def own_slice(self, ins, outs):
        return own_batch((0,), ins, outs, OWN)

    def scratch(self, ins, outs):
        """Vectors of a block; 16-bit floats also the block in float32."""
        x = ins[0]
        c = block_channels(x.shape)
        types = [wide(x).with_shape((3, c)), wide(x).with_shape((x.shape[0], c))]
        if wide(x) != x:
            types.append(wide(x).with_shape((c * x.size // max(x.shape[1], 1),)))
        return tuple(types)

    def compute(self, ins, outs, scratch):
        """Two passes for the statistics (mean, then squares of what is centred), one for scale and bias."""
        x, scale, bias = planes(ins[0]), ins[1], ins[2]
        y = planes(outs[0])
        for c in channel_blocks(x):
            mean, var, factor = scratch[0][:, : c.stop - c.start]
            target = y[:, c]
            work = target if len(scratch) < 3 else scratch[2][: target.size].reshape(target.shape)
            _moments(x[:, c], work, scratch[1], mean, var)
            _scale(work, var, self.epsilon, scale[c], bias[c], factor, target)
            for out, statistic in zip(outs[1:], (mean, var), strict=False):
                if out is not None:
                    out[c] = statistic

    def inference(self, b, ins, running):
        x, scale, bias = ins
        mean, var = running_statistics(self, b, running[1:], scale, x)
        return (b.BatchNormalization(x, scale, bias, mean, var, epsilon=self.epsilon), mean, var)[: len(running)]

    def expand(self, b, x, scale, bias):
        axes = channel_axes(x.ndim)
        work = as_type_of(b, x, scale) if wide(x.type) != x.type else x
        mean = b.ReduceMean(work, axes=axes)
        centred = b.Sub(work, mean)
        var = b.ReduceMean(b.Mul(centred, centred), axes=axes)
        y = _scaled(b, x, centred, var, scale, bias, self.epsilon)
        shape = (x.shape[1],)
        return (y, *(as_type_of(b, b.Reshape(s, shape=shape), scale) for s in (mean, var)))

    def cost(self, ins, outs):
        """x is read twice: for the statistics, and with them."""
        cost = super().cost(ins, outs)
        return Cost(cost.flops, cost.bytes + ins[0].nbytes)

    def again(self, ins, outs):
        """BatchNormApply, where the statistics were not rounded to a narrower type."""
        x, scale = ins[:2]
        if len(outs) < 3 or outs[1] is None or outs[2] is None or wide(x.type).dtype != scale.dtype:
            return None
        return BatchNormApply(epsilon=self.epsilon), (*ins, outs[1], outs[2])

    def gradient(self, b, ins, outs, grads):
        """From x and the statistics; what flows into the statistics (second derivatives) is added."""
        x, scale, bias = ins
        dx = dscale = dbias = None
        if grads[0] is not None:
            dx, dscale, dbias = b.BatchNormGrad(x, scale, outs[1], outs[2], grads[0], epsilon=self.epsilon)
            dbias = as_type_of(b, dbias, bias)
        count = max(x.type.size // max(x.shape[1], 1), 1)
        if len(grads) > 1 and grads[1] is not None:
            each = b.Mul(as_type_of(b, grads[1], x), b.constant(1.0 / count, x))
            flow = b.Expand(per_channel(b, each, x), shape=x.shape)
            dx = flow if dx is None else b.Add(dx, flow)
        if len(grads) > 2 and grads[2] is not None:
            each = b.Mul(as_type_of(b, grads[2], x), b.constant(2.0 / count, x))
            flow = b.Mul(b.Sub(x, per_channel(b, as_type_of(b, outs[1], x), x)), per_channel(b, each, x))
            dx = flow if dx is None else b.Add(dx, flow)
        return [dx, dscale, dbias]

    @classmethod
    def samples(cls, draw):
        """0 to 3 spatial axes, one output only, 16-bit floats."""
        for shape in ("4,2", "2,3,2,2", "2,2,3", "2,1,1,2,2"):
            c = shape.split(",")[1]
            yield draw.case(cls(epsilon=0.1), draw(f"f64[{shape}]"), draw(f"f64[{c}]"), draw(f"f64[{c}]"))
        yield draw.case(cls(), draw("f64[3,2,2]"), draw("f64[2]"), draw("f64[2]"), want=1)
        yield draw.case(cls(), draw("f32[2,3,4]"), draw("f32[3]"), draw("f32[3]"))
        yield draw.case(cls(), draw("f16[2,3,4]"), draw("f32[3]"), draw("f32[3]"))


def _mean(x: Array, partial: Array, mean: Array, count: int) -> None:
    """Mean of each channel of [n, c, p]: pairwise sums of the planes, then over the images."""
    np.sum(x, axis=2, dtype=partial.dtype, out=partial)
    np.sum(partial, axis=0, out=mean)
    np.multiply(mean, mean.dtype.type(1.0 / count), out=mean)


def _scale(centred: Array, var: Array, epsilon: float, scale: Array, bias: Array, factor: Array, out: Array) -> None:
    """out = centred · scale / √(var + epsilon) + bias; `centred` is overwritten, `factor` a vector to work in."""
    np.add(var, var.dtype.type(epsilon), out=factor)
    np.sqrt(factor, out=factor)
    np.divide(scale, factor, out=factor)
    np.multiply(centred, factor[:, None], out=centred)
    np.add(centred, bias[:, None], out=out)


def _scaled(
    b: OperatorBuilder, x: Value, centred: Value, var: Value, scale: Value, bias: Value, epsilon: float
) -> Value:
    """The same as operators, in x's type; `var` broadcasts against x."""
    scale, bias = (per_channel(b, as_type_of(b, v, centred), x) for v in (scale, bias))
    factor = b.BatchNormFactor(scale, var, epsilon=epsilon)
    return as_type_of(b, b.Add(b.Mul(centred, factor), bias), x)


@channels_last(inputs=(0,), outputs=())
class BatchNormStatistics(Op):
    """x → mean and biased variance of each channel: BatchNormTrain's small outputs, to the bit.

    In x's element type, float32 for 16-bit floats.
    """

    small_outputs = (0, 1)

    def infer(self, x):
        """One of each for a channel."""
        if x.ndim < 2 or not x.is_float:
            raise self.fail("x needs floats and at least the axes n, c", x)
        t = wide(x).with_shape(x.shape[1:2])
        return (t, t)

    def axis_factors(self, ins, outs):
        return by_channel(ins, outs)

    def own_slice(self, ins, outs):
        return own_batch((0,), ins, outs, OWN)

    def scratch(self, ins, outs):
        """Vectors of a block, and the block in the statistics' element type."""
        x = ins[0]
        c = block_channels(x.shape)
        rows = [wide(x).with_shape((3, c)), wide(x).with_shape((x.shape[0], c))]
        return (*rows, wide(x).with_shape((c * x.size // max(x.shape[1], 1),)))

    def compute(self, ins, outs, scratch):
        x = planes(ins[0])
        for c in channel_blocks(x):
            mean, var, _ = scratch[0][:, : c.stop - c.start]
            work = scratch[2][: x[:, c].size].reshape(x[:, c].shape)
            _moments(x[:, c], work, scratch[1], mean, var)
            outs[0][c], outs[1][c] = mean, var

    def inference(self, b, ins, running):
        return running_statistics(self, b, running, wide(ins[0].type), ins[0])

    def cost(self, ins, outs):
        return Cost(7 * ins[0].size, super().cost(ins, outs).bytes)

    def expand(self, b, x):
        axes, wanted = channel_axes(x.ndim), wide(x.type).dtype
        work = x if x.dtype == wanted else b.Cast(x, to=wanted)
        mean = b.ReduceMean(work, axes=axes)
        centred = b.Sub(work, mean)
        var = b.ReduceMean(b.Mul(centred, centred), axes=axes)
        return tuple(b.Reshape(s, shape=(x.shape[1],)) for s in (mean, var))

    @classmethod
    def samples(cls, draw):
        for shape in ("4,2", "2,3,2,2", "2,2,3", "2,1,1,2,2"):
            yield draw.case(cls(), draw(f"f64[{shape}]"))
        yield draw.case(cls(), draw("f32[2,3,4]"))
        yield draw.case(cls(), draw("f16[2,3,4]"))


def running_statistics(op: Op, b: OperatorBuilder, running: Any, like: Any, x: Any) -> tuple[Any, Any]:
    """Mean and variance of inference mode, in `like`'s element type.  UsageError if nothing follows the batch's."""
    if len(running) < 2 or None in running:
        raise UsageError(
            f"the batch normalisation of '{x.name}' has no running statistics that the program keeps: it cannot be "
            "used in inference mode"
        )
    mean, var = (as_type_of(b, v, like) for v in running)
    return mean, var


def _moments(x: Array, work: Array, partials: Array, mean: Array, var: Array) -> None:
    """Mean and biased variance of each channel of [n, c, p]; what is centred stays in `work`."""
    n, width = x.shape[:2]
    partial = partials.reshape(-1)[: n * width].reshape(n, width)
    count = max(n * x.shape[2], 1)
    _mean(x, partial, mean, count)
    np.subtract(x, mean[:, None], out=work)
    row_dots(work, work, partial)
    np.sum(partial, axis=0, out=var)
    np.multiply(var, var.dtype.type(1.0 / count), out=var)


@channels_last(inputs=(0,), outputs=(0,))
class BatchNormApply(ChannelNorm):
    """(x, scale, bias, mean, var) → BatchNormTrain's output, to the bit, from the statistics that it gave.

    What remains of it once its statistics are known: one pass over x.  (BatchNormalization, for inference, folds
    scale and mean into one factor and one summand a channel: other bits.)
    """

    inplace = (0,)

    def infer(self, x, scale, bias, mean, var):
        self.check(x, scale, bias, mean, var)
        return (x,)

    def axis_factors(self, ins, outs):
        return (*by_channel(ins, outs), *by_element(ins, outs))

    def scratch(self, ins, outs):
        """Vectors of a block; 16-bit floats also the block in float32."""
        x = ins[0]
        c = block_channels(x.shape)
        types = [wide(x).with_shape((3, c))]
        if wide(x) != x:
            types.append(wide(x).with_shape((c * x.size // max(x.shape[1], 1),)))
        return tuple(types)

    def compute(self, ins, outs, scratch):
        x, y = planes(ins[0]), planes(outs[0])
        scale, bias = ins[1:3]
        for c in channel_blocks(x):
            mean, var, factor = scratch[0][:, : c.stop - c.start]
            mean[...], var[...] = ins[3][c], ins[4][c]
            target = y[:, c]
            work = target if len(scratch) < 2 else scratch[1][: target.size].reshape(target.shape)
            np.subtract(x[:, c], mean[:, None], out=work)
            _scale(work, var, self.epsilon, scale[c], bias[c], factor, target)

    def channel_element(self, x, scale, bias, mean, var):
        """The formula of one element; None where the vectors have another type."""
        if any(v.dtype != x.dtype for v in (scale, bias, mean, var)):
            return None
        return (x - mean) * (scale / sqrt(var + self.epsilon)) + bias

    def cost(self, ins, outs):
        return Cost(3 * ins[0].size, super().cost(ins, outs).bytes)

    def expand(self, b, x, scale, bias, mean, var):
        work = as_type_of(b, x, scale) if wide(x.type) != x.type else x
        mean, var = (per_channel(b, as_type_of(b, v, work), x) for v in (mean, var))
        return (_scaled(b, x, b.Sub(work, mean), var, scale, bias, self.epsilon),)

    @classmethod
    def samples(cls, draw):
        for shape in ("4,2", "2,3,2,2", "2,2,3", "2,1,1,2,2", "0,2,3"):
            c = shape.split(",")[1]
            vectors = [draw(f"f64[{c}]") for _ in range(3)]
            yield draw.case(cls(epsilon=0.1), draw(f"f64[{shape}]"), *vectors, draw(f"f64[{c}]", 0.5, 2))
        f32 = [draw("f32[3]") for _ in range(3)]
        yield draw.case(cls(), draw("f32[2,3,4]"), *f32, draw("f32[3]", 0.5, 2))
        yield draw.case(cls(), draw("f16[2,3,4]"), *f32, draw("f32[3]", 0.5, 2))


@channels_last(inputs=(0, 4), outputs=(0,))
class BatchNormGrad(ChannelNorm):
    """(x, scale, mean, var, dy) → (dx, dscale, dbias) of BatchNormTrain, whose statistics mean and var are.

    With x̂ = (x - mean) / √(var + epsilon): dbias = Σ dy, dscale = Σ dy · x̂,
    dx = scale / √(var + epsilon) · (dy - dbias / n - x̂ · dscale / n), n elements a channel.
    """

    required_outputs = 3
    inplace = (0,)

    def infer(self, x, scale, mean, var, dy):
        self.check(x, scale, mean, var)
        if dy != x:
            raise self.fail("dy must have x's type", x, scale, mean, var, dy)
        return (x, scale, scale)

    def own_slice(self, ins, outs):
        """Images; gradients of the weights are added up."""
        return own_batch((0, 4), ins, outs, SUM)

    def scratch(self, ins, outs):
        """A block, its sums; 16-bit floats also two blocks in float32."""
        x = ins[0]
        c = block_channels(x.shape)
        block = wide(x).with_shape((c * x.size // max(x.shape[1], 1),))
        types = [block, wide(x).with_shape((4, c)), wide(x).with_shape((x.shape[0], c))]
        if wide(x) != x:
            types += [block, block]
        return tuple(types)

    def compute(self, ins, outs, scratch):
        """Block by block: the two sums, then dx as a sum of dy, centred x and 1, each with a factor a channel."""
        x, dy, dx = planes(ins[0]), planes(ins[4]), planes(outs[0])
        scale, mean, var = ins[1:4]
        for c in channel_blocks(x):
            width = c.stop - c.start
            shape = (x.shape[0], width, x.shape[2])
            size = math.prod(shape)
            gradient, work = dy[:, c], dx[:, c]
            if len(scratch) > 3:
                gradient, work = (s[:size].reshape(shape) for s in scratch[3:])
                gradient[...] = dy[:, c]
            np.subtract(x[:, c], mean[c, None], out=work)
            partial = scratch[2].reshape(-1)[: shape[0] * width].reshape(shape[:2])
            self._sums(gradient, work, partial, scratch[1][:, :width], (scale[c], var[c]))
            inverse, factor, total, against = scratch[1][:, :width]
            for out, s in ((outs[1], against), (outs[2], total)):
                out[c] = s
            count = float(max(shape[0] * shape[2], 1))
            # dx = factor · dy - centred · factor · inverse · against / n - factor · total / n
            np.multiply(against, inverse, out=against)
            np.multiply(against, factor, out=against)
            np.divide(against, -count, out=against)
            np.multiply(total, factor, out=total)
            np.divide(total, -count, out=total)
            np.multiply(work, against[:, None], out=work)
            product = scratch[0][:size].reshape(shape)
            np.multiply(gradient, factor[:, None], out=product)
            np.add(work, product, out=work)
            np.add(work, total[:, None], out=dx[:, c])

    def _sums(self, dy: Array, centred: Array, partial: Array, vectors: Array, given: tuple[Array, Array]) -> None:
        """1 / √(var + epsilon), that times scale, Σ dy, Σ dy · x̂."""
        inverse, factor, total, against = vectors
        scale, var = given
        np.add(var, self.epsilon, out=inverse)
        np.sqrt(inverse, out=inverse)
        np.divide(1, inverse, out=inverse)
        np.multiply(scale, inverse, out=factor)
        np.sum(dy, axis=2, out=partial)
        np.sum(partial, axis=0, out=total)
        row_dots(dy, centred, partial)
        np.sum(partial, axis=0, out=against)
        np.multiply(against, inverse, out=against)

    def cost(self, ins, outs):
        """x and dy are read twice: for the sums, and with them."""
        cost = super().cost(ins, outs)
        return Cost(cost.flops, cost.bytes + 2 * ins[0].nbytes)

    def expand(self, b, x, scale, mean, var, dy):
        axes, shape = channel_axes(x.ndim), (x.shape[1],)
        work, gradient = (as_type_of(b, v, scale) if wide(x.type) != x.type else v for v in (x, dy))
        scale_, mean_, var_ = (per_channel(b, as_type_of(b, v, work), x) for v in (scale, mean, var))
        total = b.ReduceSum(gradient, axes=axes)
        against = b.ReduceSum(b.CentredProduct(work, mean_, gradient), axes=axes)
        dscale = b.BatchNormFactor(against, var_, epsilon=self.epsilon)
        count = max(x.type.size // max(x.shape[1], 1), 1)
        dx = b.BatchNormSlope(work, mean_, scale_, var_, total, against, gradient, count=count, epsilon=self.epsilon)
        return (as_type_of(b, dx, x), *(as_type_of(b, b.Reshape(v, shape=shape), scale) for v in (dscale, total)))

    @classmethod
    def samples(cls, draw):
        for shape in ("4,2", "2,3,2,2", "2,2,3"):
            c = shape.split(",")[1]
            x, dy = draw(f"f64[{shape}]"), draw(f"f64[{shape}]")
            yield draw.case(cls(epsilon=0.1), x, draw(f"f64[{c}]"), draw(f"f64[{c}]"), draw(f"f64[{c}]", 0.5, 2), dy)
        v = [draw("f32[3]"), draw("f32[3]"), draw("f32[3]", 0.5, 2)]
        yield draw.case(cls(), draw("f32[2,3,4]"), *v, draw("f32[2,3,4]"))
        yield draw.case(cls(), draw("f16[2,3,4]"), *v, draw("f16[2,3,4]"))
