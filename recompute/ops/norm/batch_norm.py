"""Batch normalisation as ONNX has it, with given statistics, and running statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...language.element import sqrt
from ...language.factors import Factor, aligned, needed_whole
from ...language.formulas import through_expansion
from ...language.op import Cost, Op, OperatorBuilder
from ...language.types import Array, TensorType, Types, Value
from ..channels_last import channels_last
from ..window import BLOCK
from .axes import by_channel, by_element
from .numerics import wide


def channel_axes(ndim: int) -> tuple[int, ...]:
    """All axes but the channels'."""
    return (0, *range(2, ndim))


def per_channel(b: OperatorBuilder, v: Value, x: Value) -> Value:
    """[c] as [1, c, 1, ...], to broadcast against x."""
    return b.Reshape(v, shape=(1, x.shape[1], *(1,) * (x.ndim - 2)))


def channel_blocks(x: Array) -> Iterator[slice]:
    """Blocks of channels of [n, c, p] of about `BLOCK` bytes."""
    step = block_channels(x.shape)
    for c in range(0, x.shape[1], step):
        yield slice(c, min(c + step, x.shape[1]))


def block_channels(shape: Sequence[int]) -> int:
    """Channels that are computed at a time: at most BLOCK bytes of float32, or one channel."""
    return min(max(BLOCK // (4 * max(shape[0] * math.prod(shape[2:]), 1)), 1), max(shape[1], 1))


def planes(a: Array) -> Array:
    """[n, c, ...] as [n, c, p]."""
    return a.reshape(a.shape[0], a.shape[1], math.prod(a.shape[2:]))


class ChannelNorm(Op, abstract=True):
    """Inputs x, then vectors with one element a channel."""

    autocast = "follow"
    autocast_inputs = (0,)
    epsilon: float = 1e-05

    def check(self, x: TensorType, *vectors: TensorType) -> None:
        """TypeRuleError where the vectors do not fit x."""
        if x.ndim < 2 or not x.is_float:
            raise self.fail("x needs floats and at least the axes n, c", x, *vectors)
        if any(v.shape != (x.shape[1],) or not v.is_float for v in vectors):
            raise self.fail("the others need one float a channel", x, *vectors)

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        """Channels; images and positions are needed whole."""
        return (*by_channel(ins, outs), *needed_whole(by_element(ins, outs)))

    def cost(self, ins: Types, outs: Types) -> Cost:
        assert ins[0] is not None
        return Cost(10 * ins[0].size, super().cost(ins, outs).bytes)


@channels_last(inputs=(0,), outputs=(0,))
class BatchNormalization(ChannelNorm, onnx=True):
    """(x, scale, bias, mean, var) → (x - mean) / √(var + epsilon) · scale + bias (ONNX, inference)."""

    inplace = (0,)
    weights = (1, 2)

    def infer(self, x, scale, bias, mean, var):
        self.check(x, scale, bias, mean, var)
        return (x,)

    def axis_factors(self, ins, outs):
        return (*by_channel(ins, outs), *by_element(ins, outs))

    def scratch(self, ins, outs):
        """Factor and summand of each channel; 16-bit floats also a block in float32."""
        x = ins[0]
        types = [wide(x).with_shape((2, x.shape[1]))]
        if wide(x) != x:
            types.append(wide(x).with_shape((block_channels(x.shape) * x.size // max(x.shape[1], 1),)))
        return tuple(types)

    def compute(self, ins, outs, scratch):
        """One factor and one summand a channel, applied block by block."""
        x, y = planes(ins[0]), planes(outs[0])
        scale, bias, mean, var = ins[1:]
        factor, summand = scratch[0]
        np.add(var, self.epsilon, out=factor)
        np.sqrt(factor, out=factor)
        np.divide(scale, factor, out=factor)
        np.multiply(factor, mean, out=summand)
        np.subtract(bias, summand, out=summand)
        for c in channel_blocks(x):
            target = y[:, c]
            work = target if len(scratch) < 2 else scratch[1][: target.size].reshape(target.shape)
            np.multiply(x[:, c], factor[c, None], out=work)
            np.add(work, summand[c, None], out=target)

    def channel_element(self, x, scale, bias, mean, var):
        """The formula of one element; None where the vectors have another type."""
        if any(v.dtype != x.dtype for v in (scale, bias, mean, var)):
            return None
        factor = scale / sqrt(var + self.epsilon)
        return x * factor + (bias - factor * mean)

    def gradient(self, b, ins, outs, grads):
        """Gradients of an affine function of each channel; the statistics' gradients, too."""
        x, scale, _, mean, var = ins
        dy = grads[0]
        axes = channel_axes(x.ndim)
        # in the vectors' types, so that scale's and x's may differ
        deviation = b.Sqrt(b.Add(var, b.constant(self.epsilon, var)))
        factor = b.Div(as_type_of(b, scale, var), deviation)
        dx = b.Mul(dy, per_channel(b, as_type_of(b, factor, x), x))
        centred = b.Sub(x, per_channel(b, as_type_of(b, mean, x), x))
        total = as_type_of(b, b.ReduceSum(dy, axes=axes, keepdims=0), var)
        against = b.Div(as_type_of(b, b.ReduceSum(b.Mul(dy, centred), axes=axes, keepdims=0), var), deviation)
        dmean = b.Neg(b.Mul(total, factor))
        dvar = b.Mul(b.Div(b.Mul(against, factor), deviation), b.constant(-0.5, var))
        return [dx, as_type_of(b, against, scale), as_type_of(b, total, ins[2]), as_type_of(b, dmean, mean), dvar]

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
        b = node.builder
        y, *batch = b.BatchNormTrain(x, scale, bias, epsilon=epsilon, want=3)
        momentum = node.attributes.get("momentum", 0.9)
        results = []
        for i, statistic in zip((3, 4), batch, strict=True):
            running = node.buffer(i)
            statistic = as_type_of(b, statistic, running)
            count = x.size // max(x.shape[1], 1)
            if i == 4 and node.unbiased and count > 1:
                statistic = b.Mul(statistic, b.constant(count / (count - 1), statistic))
            if node.kept(running):
                results.append(node.emit(RunningUpdate(momentum=momentum), running, statistic))
            else:  # fed or computed: nothing that could be updated
                kept = b.Mul(running, b.constant(momentum, running))
                results.append(b.Add(kept, b.Mul(statistic, b.constant(1 - momentum, running))))
        return (y, *results)

    @classmethod
    def samples(cls, draw):
        for shape in ("3,2", "2,3,2,2", "2,2,3", "1,2,1,2,2"):
            c = shape.split(",")[1]
            vectors = [draw(f"f64[{c}]") for _ in range(3)]
            yield draw.case(cls(epsilon=0.1), draw(f"f64[{shape}]"), *vectors, draw(f"f64[{c}]", 0.5, 2))
        f32 = [draw("f32[3]") for _ in range(3)]
        yield draw.case(cls(), draw("f32[2,3,4]"), *f32, draw("f32[3]", 0.5, 2))
        yield draw.case(cls(), draw("f16[2,3,4]"), *f32, draw("f32[3]", 0.5, 2))


def as_type_of(b: OperatorBuilder, v: Value, like: Value) -> Value:
    """`v` in the element type of `like`."""
    return v if v.dtype == like.dtype else b.Cast(v, to=like.dtype)


class RunningUpdate(Op):
    """(running, batch): running ← momentum · running + (1 - momentum) · batch, in place.

    With momentum 0 it is a copy, of any type.
    """

    updates = (0,)
    momentum: float = 0.9

    def infer(self, running, batch):
        if running != batch or not (running.is_float or self.momentum == 0):
            raise self.fail("both need the same type, a float one unless momentum is 0", running, batch)
        return (running,)

    def axis_factors(self, ins, outs):
        return aligned(ins, outs)

    def scratch(self, ins, outs):
        return (ins[1],)

    def compute(self, ins, outs, scratch):
        if self.momentum == 0:
            outs[0][...] = ins[1]
            return
        kind = outs[0].dtype.type
        np.multiply(ins[1], kind(1 - self.momentum), out=scratch[0])
        np.multiply(ins[0], kind(self.momentum), out=outs[0])
        np.add(outs[0], scratch[0], out=outs[0])

    def gradient(self, b, ins, outs, grads):
        """None: statistics are not trained."""
        return [None, None]

    def element(self, running, batch):
        return through_expansion(self, (running, batch))

    def expand(self, b, running, batch):
        if self.momentum == 0:
            return (b.Identity(batch),)
        kept = b.Mul(running, b.constant(self.momentum, running))
        return (b.Add(kept, b.Mul(batch, b.constant(1 - self.momentum, batch))),)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[3]"), draw("f64[3]"))
        yield draw.case(cls(momentum=0.5), draw("f32[3]"), draw("f32[3]"))
