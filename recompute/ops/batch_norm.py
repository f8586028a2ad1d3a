"""Batch normalisation: with given statistics (ONNX), with the batch's own (training), and running statistics.

Training works in blocks of channels, so that the several passes over a block stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..op import Cost, Op
from ..types import TensorType
from .norm_kernels import row_dots, wide
from .window import BLOCK


def channel_axes(ndim: int) -> tuple[int, ...]:
    """All axes but the channels'."""
    return (0, *range(2, ndim))


def per_channel(b: Any, v: Any, x: Any) -> Any:
    """[c] as [1, c, 1, ...], to broadcast against x."""
    return b.Reshape(v, shape=(1, x.shape[1], *(1,) * (x.ndim - 2)))


def _channels(x: Any) -> Iterator[slice]:
    """Blocks of channels of [n, c, p] of about `BLOCK` bytes."""
    step = block_channels(x.shape)
    for c in range(0, x.shape[1], step):
        yield slice(c, min(c + step, x.shape[1]))


def block_channels(shape: Sequence[int]) -> int:
    """Channels of a block."""
    return min(max(BLOCK // (4 * max(shape[0] * math.prod(shape[2:]), 1)), 1), max(shape[1], 1))


def _planes(a: Any) -> Any:
    """[n, c, ...] as [n, c, p]."""
    return a.reshape(a.shape[0], a.shape[1], math.prod(a.shape[2:]))


class ChannelNorm(Op, abstract=True):
    """Inputs x, then vectors with one element a channel."""

    epsilon: float

    def check(self, x: TensorType, *vectors: TensorType) -> None:
        """TypeRuleError where the vectors do not fit x."""
        if x.ndim < 2 or not x.is_float:
            raise self.fail("x needs floats and at least the axes n, c", x, *vectors)
        if any(v.shape != (x.shape[1],) or not v.is_float for v in vectors):
            raise self.fail("the others need one float a channel", x, *vectors)

    def cost(self, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]) -> Cost:
        """About ten operations an element."""
        assert ins[0] is not None
        return Cost(10 * ins[0].size, super().cost(ins, outs).bytes)


@dataclass(frozen=True)
class BatchNormalization(ChannelNorm, onnx=True):
    """(x, scale, bias, mean, var) → (x - mean) / √(var + epsilon) · scale + bias (ONNX, inference)."""

    epsilon: float = 1e-5
    inplace = (0,)

    def infer(self, x, scale, bias, mean, var):
        """x's type."""
        self.check(x, scale, bias, mean, var)
        return (x,)

    def scratch(self, ins, outs):
        """Factor and summand of each channel; halves also a block in float32."""
        x = ins[0]
        found = [wide(x).with_shape((2, x.shape[1]))]
        if wide(x) != x:
            found.append(wide(x).with_shape((block_channels(x.shape) * x.size // max(x.shape[1], 1),)))
        return tuple(found)

    def compute(self, xp, ins, outs, scratch):
        """One factor and one summand a channel, applied block by block."""
        x, y = _planes(ins[0]), _planes(outs[0])
        scale, bias, mean, var = ins[1:]
        factor, summand = scratch[0]
        xp.add(var, self.epsilon, out=factor)
        xp.sqrt(factor, out=factor)
        xp.divide(scale, factor, out=factor)
        xp.multiply(factor, mean, out=summand)
        xp.subtract(bias, summand, out=summand)
        for c in _channels(x):
            target = y[:, c]
            work = target if len(scratch) < 2 else scratch[1][: target.size].reshape(target.shape)
            xp.multiply(x[:, c], factor[c, None], out=work)
            xp.add(work, summand[c, None], out=target)

    def gradient(self, b, ins, outs, grads):
        """As for an affine function of each channel; the statistics' gradients too."""
        x, scale, _, mean, var = ins
        dy = grads[0]
        axes = channel_axes(x.ndim)
        # in the vectors' types, so that scale's and x's may differ
        deviation = b.Sqrt(b.Add(var, b.constant(self.epsilon, var)))
        factor = b.Div(_as(b, scale, var), deviation)
        dx = b.Mul(dy, per_channel(b, _as(b, factor, x), x))
        centred = b.Sub(x, per_channel(b, _as(b, mean, x), x))
        total = _as(b, b.ReduceSum(dy, axes=axes, keepdims=0), var)
        against = b.Div(_as(b, b.ReduceSum(b.Mul(dy, centred), axes=axes, keepdims=0), var), deviation)
        dmean = b.Neg(b.Mul(total, factor))
        dvar = b.Mul(b.Div(b.Mul(against, factor), deviation), b.constant(-0.5, var))
        return [dx, _as(b, against, scale), _as(b, total, ins[2]), _as(b, dmean, mean), dvar]

    @classmethod
    def from_onnx(cls, node):
        """In training: the batch's statistics, and the running ones updated."""
        epsilon = node.attributes.get("epsilon", 1e-5)
        if node.attributes.get("spatial", 1) != 1:
            raise node.fail("spatial=0 is not supported")
        x, scale, bias = (node.input(i) for i in range(3))
        if not node.training:
            running_mean, running_var = node.buffer(3), node.buffer(4)
            return (
                node.emit(cls(epsilon=epsilon), x, scale, bias, running_mean, running_var),
                running_mean,
                running_var,
            )
        y, *batch = node.emit(BatchNormTrain(epsilon=epsilon), x, scale, bias, want=3)
        update = RunningUpdate(momentum=node.attributes.get("momentum", 0.9))
        b = node.builder
        found = []
        for i, statistic in zip((3, 4), batch, strict=True):
            running = node.buffer(i)
            found.append(node.emit(update, running, _as(b, statistic, running)))
        return (y, *found)

    @classmethod
    def samples(cls, draw):
        """0 to 3 spatial axes, halves."""
        for shape in ("3,2", "2,3,2,2", "2,2,3", "1,2,1,2,2"):
            c = shape.split(",")[1]
            vectors = [draw(f"f64[{c}]") for _ in range(3)]
            yield draw.case(cls(epsilon=0.1), draw(f"f64[{shape}]"), *vectors, draw(f"f64[{c}]", 0.5, 2))
        f32 = [draw("f32[3]") for _ in range(3)]
        yield draw.case(cls(), draw("f32[2,3,4]"), *f32, draw("f32[3]", 0.5, 2))
        yield draw.case(cls(), draw("f16[2,3,4]"), *f32, draw("f32[3]", 0.5, 2))


def _as(b: Any, v: Any, like: Any) -> Any:
    return v if v.dtype == like.dtype else b.Cast(v, to=like.dtype)


@dataclass(frozen=True)
class BatchNormTrain(ChannelNorm):
    """(x, scale, bias) → (x - mean) / √(var + epsilon) · scale + bias with the batch's own mean and biased variance.

    Ioffe & Szegedy 2015.  Optional outputs: mean and variance, in scale's element type.
    """

    epsilon: float = 1e-5
    inplace = (0,)
    small_outputs = (1, 2)

    def infer(self, x, scale, bias):
        """x's type; one statistic a channel."""
        self.check(x, scale, bias)
        return (x, scale, scale)

    def scratch(self, ins, outs):
        """Vectors of a block; halves also the block in float32."""
        x = ins[0]
        c = block_channels(x.shape)
        found = [wide(x).with_shape((3, c)), wide(x).with_shape((x.shape[0], c))]
        if wide(x) != x:
            found.append(wide(x).with_shape((c * x.size // max(x.shape[1], 1),)))
        return tuple(found)

    def compute(self, xp, ins, outs, scratch):
        """Two passes for the statistics (mean, then squares of what is centred), one for scale and bias."""
        x, scale, bias = _planes(ins[0]), ins[1], ins[2]
        y = _planes(outs[0])
        count = max(x.shape[0] * x.shape[2], 1)
        for c in _channels(x):
            width = c.stop - c.start
            mean, var, factor = scratch[0][:, :width]
            partial = scratch[1].reshape(-1)[: x.shape[0] * width].reshape(x.shape[0], width)
            target = y[:, c]
            work = target if len(scratch) < 3 else scratch[2][: target.size].reshape(target.shape)
            _mean(xp, x[:, c], partial, mean, count)
            xp.subtract(x[:, c], mean[:, None], out=work)
            row_dots(xp, work, work, partial)
            xp.sum(partial, axis=0, out=var)
            xp.multiply(var, var.dtype.type(1.0 / count), out=var)
            _scale(xp, work, var, self.epsilon, scale[c], bias[c], factor, target)
            for out, statistic in zip(outs[1:], (mean, var), strict=False):
                if out is not None:
                    out[c] = statistic

    def expand(self, b, x, scale, bias):
        """The formula."""
        axes = channel_axes(x.ndim)
        work = _as(b, x, scale) if wide(x.type) != x.type else x
        mean = b.ReduceMean(work, axes=axes)
        centred = b.Sub(work, mean)
        var = b.ReduceMean(b.Mul(centred, centred), axes=axes)
        y = _scaled(b, x, centred, var, scale, bias, self.epsilon)
        shape = (x.shape[1],)
        return (y, *(_as(b, b.Reshape(s, shape=shape), scale) for s in (mean, var)))

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
            dbias = _as(b, dbias, bias)
        count = max(x.type.size // max(x.shape[1], 1), 1)
        if len(grads) > 1 and grads[1] is not None:
            each = b.Mul(_as(b, grads[1], x), b.constant(1.0 / count, x))
            flow = b.Expand(per_channel(b, each, x), shape=x.shape)
            dx = flow if dx is None else b.Add(dx, flow)
        if len(grads) > 2 and grads[2] is not None:
            each = b.Mul(_as(b, grads[2], x), b.constant(2.0 / count, x))
            flow = b.Mul(b.Sub(x, per_channel(b, _as(b, outs[1], x), x)), per_channel(b, each, x))
            dx = flow if dx is None else b.Add(dx, flow)
        return [dx, dscale, dbias]

    @classmethod
    def samples(cls, draw):
        """0 to 3 spatial axes, one output only, halves."""
        for shape in ("4,2", "2,3,2,2", "2,2,3", "2,1,1,2,2"):
            c = shape.split(",")[1]
            yield draw.case(cls(epsilon=0.1), draw(f"f64[{shape}]"), draw(f"f64[{c}]"), draw(f"f64[{c}]"))
        yield draw.case(cls(), draw("f64[3,2,2]"), draw("f64[2]"), draw("f64[2]"), want=1)
        yield draw.case(cls(), draw("f32[2,3,4]"), draw("f32[3]"), draw("f32[3]"))
        yield draw.case(cls(), draw("f16[2,3,4]"), draw("f32[3]"), draw("f32[3]"))


def _mean(xp: Any, x: Any, partial: Any, mean: Any, count: int) -> None:
    """Mean of each channel of [n, c, p]: pairwise sums of the planes, then over the images."""
    xp.sum(x, axis=2, dtype=partial.dtype, out=partial)
    xp.sum(partial, axis=0, out=mean)
    xp.multiply(mean, mean.dtype.type(1.0 / count), out=mean)


def _scale(xp: Any, centred: Any, var: Any, epsilon: float, scale: Any, bias: Any, factor: Any, out: Any) -> None:
    """out = centred · scale / √(var + epsilon) + bias; `centred` is overwritten, `factor` a vector to work in."""
    xp.add(var, var.dtype.type(epsilon), out=factor)
    xp.sqrt(factor, out=factor)
    xp.divide(scale, factor, out=factor)
    xp.multiply(centred, factor[:, None], out=centred)
    xp.add(centred, bias[:, None], out=out)


def _scaled(b: Any, x: Any, centred: Any, var: Any, scale: Any, bias: Any, epsilon: float) -> Any:
    """The same as operators, in x's type; `var` broadcasts against x."""
    deviation = b.Sqrt(b.Add(var, b.constant(epsilon, var)))
    scaled = b.Mul(b.Div(centred, deviation), per_channel(b, _as(b, scale, centred), x))
    return _as(b, b.Add(scaled, per_channel(b, _as(b, bias, centred), x)), x)


@dataclass(frozen=True)
class BatchNormApply(ChannelNorm):
    """(x, scale, bias, mean, var) → BatchNormTrain's output, to the bit, from the statistics that it gave.

    What remains of it once its statistics are known: one pass over x.  (BatchNormalization, for inference, folds
    scale and mean into one factor and one summand a channel: other bits.)
    """

    epsilon: float = 1e-5
    inplace = (0,)

    def infer(self, x, scale, bias, mean, var):
        """x's type."""
        self.check(x, scale, bias, mean, var)
        return (x,)

    def scratch(self, ins, outs):
        """Vectors of a block; halves also the block in float32."""
        x = ins[0]
        c = block_channels(x.shape)
        found = [wide(x).with_shape((3, c))]
        if wide(x) != x:
            found.append(wide(x).with_shape((c * x.size // max(x.shape[1], 1),)))
        return tuple(found)

    def compute(self, xp, ins, outs, scratch):
        """BatchNormTrain's last steps, block by block."""
        x, y = _planes(ins[0]), _planes(outs[0])
        scale, bias = ins[1:3]
        for c in _channels(x):
            mean, var, factor = scratch[0][:, : c.stop - c.start]
            mean[...], var[...] = ins[3][c], ins[4][c]
            target = y[:, c]
            work = target if len(scratch) < 2 else scratch[1][: target.size].reshape(target.shape)
            xp.subtract(x[:, c], mean[:, None], out=work)
            _scale(xp, work, var, self.epsilon, scale[c], bias[c], factor, target)

    def cost(self, ins, outs):
        """Three operations an element."""
        return Cost(3 * ins[0].size, super().cost(ins, outs).bytes)

    def expand(self, b, x, scale, bias, mean, var):
        """BatchNormTrain's formula."""
        work = _as(b, x, scale) if wide(x.type) != x.type else x
        mean, var = (per_channel(b, _as(b, v, work), x) for v in (mean, var))
        return (_scaled(b, x, b.Sub(work, mean), var, scale, bias, self.epsilon),)

    @classmethod
    def samples(cls, draw):
        """0 to 3 spatial axes, nothing, halves."""
        for shape in ("4,2", "2,3,2,2", "2,2,3", "2,1,1,2,2", "0,2,3"):
            c = shape.split(",")[1]
            vectors = [draw(f"f64[{c}]") for _ in range(3)]
            yield draw.case(cls(epsilon=0.1), draw(f"f64[{shape}]"), *vectors, draw(f"f64[{c}]", 0.5, 2))
        f32 = [draw("f32[3]") for _ in range(3)]
        yield draw.case(cls(), draw("f32[2,3,4]"), *f32, draw("f32[3]", 0.5, 2))
        yield draw.case(cls(), draw("f16[2,3,4]"), *f32, draw("f32[3]", 0.5, 2))


@dataclass(frozen=True)
class BatchNormGrad(ChannelNorm):
    """(x, scale, mean, var, dy) → (dx, dscale, dbias) of BatchNormTrain, whose statistics mean and var are.

    With x̂ = (x - mean) / √(var + epsilon): dbias = Σ dy, dscale = Σ dy · x̂,
    dx = scale / √(var + epsilon) · (dy - dbias / n - x̂ · dscale / n), n elements a channel.
    """

    required_outputs = 3
    epsilon: float = 1e-5
    inplace = (0,)

    def infer(self, x, scale, mean, var, dy):
        """x's type, scale's type twice."""
        self.check(x, scale, mean, var)
        if dy != x:
            raise self.fail("dy must have x's type", x, scale, mean, var, dy)
        return (x, scale, scale)

    def scratch(self, ins, outs):
        """A block, its sums; halves also two blocks in float32."""
        x = ins[0]
        c = block_channels(x.shape)
        block = wide(x).with_shape((c * x.size // max(x.shape[1], 1),))
        found = [block, wide(x).with_shape((4, c)), wide(x).with_shape((x.shape[0], c))]
        if wide(x) != x:
            found += [block, block]
        return tuple(found)

    def compute(self, xp, ins, outs, scratch):
        """Block by block: the two sums, then dx as a sum of dy, centred x and 1, each with a factor a channel."""
        x, dy, dx = _planes(ins[0]), _planes(ins[4]), _planes(outs[0])
        scale, mean, var = ins[1:4]
        for c in _channels(x):
            width = c.stop - c.start
            shape = (x.shape[0], width, x.shape[2])
            size = math.prod(shape)
            given, work = dy[:, c], dx[:, c]
            if len(scratch) > 3:
                given, work = (s[:size].reshape(shape) for s in scratch[3:])
                given[...] = dy[:, c]
            xp.subtract(x[:, c], mean[c, None], out=work)
            partial = scratch[2].reshape(-1)[: shape[0] * width].reshape(shape[:2])
            self._sums(xp, given, work, partial, scratch[1][:, :width], (scale[c], var[c]))
            inverse, factor, total, against = scratch[1][:, :width]
            for out, s in ((outs[1], against), (outs[2], total)):
                out[c] = s
            count = float(max(shape[0] * shape[2], 1))
            # dx = factor · dy - centred · factor · inverse · against / n - factor · total / n
            xp.multiply(against, inverse, out=against)
            xp.multiply(against, factor, out=against)
            xp.divide(against, -count, out=against)
            xp.multiply(total, factor, out=total)
            xp.divide(total, -count, out=total)
            xp.multiply(work, against[:, None], out=work)
            product = scratch[0][:size].reshape(shape)
            xp.multiply(given, factor[:, None], out=product)
            xp.add(work, product, out=work)
            xp.add(work, total[:, None], out=dx[:, c])

    def _sums(self, xp: Any, dy: Any, centred: Any, partial: Any, vectors: Any, given: tuple[Any, Any]) -> None:
        """1 / √(var + epsilon), that times scale, Σ dy, Σ dy · x̂."""
        inverse, factor, total, against = vectors
        scale, var = given
        xp.add(var, self.epsilon, out=inverse)
        xp.sqrt(inverse, out=inverse)
        xp.divide(1, inverse, out=inverse)
        xp.multiply(scale, inverse, out=factor)
        xp.sum(dy, axis=2, out=partial)
        xp.sum(partial, axis=0, out=total)
        row_dots(xp, dy, centred, partial)
        xp.sum(partial, axis=0, out=against)
        xp.multiply(against, inverse, out=against)

    def expand(self, b, x, scale, mean, var, dy):
        """The formulas."""
        axes = channel_axes(x.ndim)
        work, given = (_as(b, v, scale) if wide(x.type) != x.type else v for v in (x, dy))
        count = b.constant(float(max(x.type.size // max(x.shape[1], 1), 1)), work)
        deviation = b.Sqrt(b.Add(_as(b, var, work), b.constant(self.epsilon, work)))
        inverse = per_channel(b, b.Div(b.constant(1.0, work), deviation), x)
        normal = b.Mul(b.Sub(work, per_channel(b, _as(b, mean, work), x)), inverse)
        dbias = b.ReduceSum(given, axes=axes)
        dscale = b.ReduceSum(b.Mul(given, normal), axes=axes)
        inner = b.Sub(b.Sub(given, b.Div(dbias, count)), b.Mul(normal, b.Div(dscale, count)))
        dx = b.Mul(b.Mul(per_channel(b, _as(b, scale, work), x), inverse), inner)
        shape = (x.shape[1],)
        return (_as(b, dx, x), *(_as(b, b.Reshape(v, shape=shape), scale) for v in (dscale, dbias)))

    @classmethod
    def samples(cls, draw):
        """0 to 3 spatial axes, halves."""
        for shape in ("4,2", "2,3,2,2", "2,2,3"):
            c = shape.split(",")[1]
            x, dy = draw(f"f64[{shape}]"), draw(f"f64[{shape}]")
            yield draw.case(cls(epsilon=0.1), x, draw(f"f64[{c}]"), draw(f"f64[{c}]"), draw(f"f64[{c}]", 0.5, 2), dy)
        v = [draw("f32[3]"), draw("f32[3]"), draw("f32[3]", 0.5, 2)]
        yield draw.case(cls(), draw("f32[2,3,4]"), *v, draw("f32[2,3,4]"))
        yield draw.case(cls(), draw("f16[2,3,4]"), *v, draw("f16[2,3,4]"))


@dataclass(frozen=True)
class RunningUpdate(Op):
    """(running, batch): running ← momentum · running + (1 - momentum) · batch, in place."""

    updates = (0,)
    momentum: float = 0.9

    def infer(self, running, batch):
        """running's type."""
        if running != batch or not running.is_float:
            raise self.fail("both need the same float type", running, batch)
        return (running,)

    def scratch(self, ins, outs):
        """batch scaled."""
        return (ins[1],)

    def compute(self, xp, ins, outs, scratch):
        """Three element-wise steps."""
        kind = outs[0].dtype.type
        xp.multiply(ins[1], kind(1 - self.momentum), out=scratch[0])
        xp.multiply(ins[0], kind(self.momentum), out=outs[0])
        xp.add(outs[0], scratch[0], out=outs[0])

    def gradient(self, b, ins, outs, grads):
        """None: statistics are not trained."""
        return [None, None]

    def expand(self, b, running, batch):
        """The formula."""
        kept = b.Mul(running, b.constant(self.momentum, running))
        return (b.Add(kept, b.Mul(batch, b.constant(1 - self.momentum, batch))),)

    @classmethod
    def samples(cls, draw):
        """Two types."""
        yield draw.case(cls(), draw("f64[3]"), draw("f64[3]"))
        yield draw.case(cls(momentum=0.5), draw("f32[3]"), draw("f32[3]"))
