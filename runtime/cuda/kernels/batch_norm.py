"""Batch normalisation in both layouts: statistics in chunks, then one pass with a factor per channel."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....language.types import TensorType, present
from ..code.channel_sums import Channels, moments_of, over_chunks, products, whole_sums
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from ..families import Buffers, Family, family

if TYPE_CHECKING:
    from ....language.ir import Operator

_FLOATS = ("f16", "bf16", "f32", "f64")


def form_of(op: Operator) -> Channels:
    """How its first input is seen."""
    x: Any = op.inputs[0]
    if op.op.name.startswith("ChannelsLast"):
        return Channels(math.prod(x.shape[:-1]), x.shape[-1], 1, True)
    p = math.prod(x.shape[2:])
    if p == 1:
        return Channels(x.shape[0], x.shape[1], 1, True)
    return Channels(x.shape[0], x.shape[1], p, False)


def _wide(dtype: str) -> str:
    return "f64" if dtype == "f64" else "f32"


def _element(channels_last: bool) -> str:
    """The element of a thread and its channel."""
    c = "i % channels" if channels_last else "i / positions % channels"
    return f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const int c = size <= 0xffffffffll ? {c.replace("i ", "(unsigned)i ")} : {c};
"""


@functools.cache
def factors(dtype: str, scale: str, var: str) -> Kernel:
    """scale / √(var + epsilon), in what `dtype` is computed with."""
    a = COMPUTE[dtype]
    body = f"""    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < channels) factor[c] = ({a})widen(scale[c]) / sqrt_of(({a})widen(var[c]) + ({a})epsilon);
"""
    parameters = f"const {C_TYPES[scale]}* scale, const {C_TYPES[var]}* var, {a}* factor, double epsilon, int channels"
    return Kernel(f"norm_factor_{dtype}_{scale}_{var}", parameters, body)


@functools.cache
def apply(dtype: str, bias: str, mean: str, *, last: bool) -> Kernel:
    """(x - mean) · factor + bias."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    body = (
        _element(last)
        + f"""    const {a} centred = widen(x[i]) - ({a})widen(mean[c]);
    const {a} scaled = centred * factor[c];
    y[i] = narrow<{c}>(scaled + ({a})widen(bias[c]));
"""
    )
    return Kernel(
        f"norm_apply_{dtype}_{bias}_{mean}{'_last' if last else ''}",
        f"const {c}* x, const {C_TYPES[mean]}* mean, const {a}* factor, const {C_TYPES[bias]}* bias, {c}* y, "
        "long long size, int channels, unsigned positions",
        body,
    )


@functools.cache
def folded(dtype: str, kinds: tuple[str, ...]) -> Kernel:
    """Inference: a factor and a summand a channel from scale, bias, mean and variance."""
    a = COMPUTE[dtype]
    body = f"""    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    const {a} f = ({a})widen(scale[c]) / sqrt_of(({a})widen(var[c]) + ({a})epsilon);
    factor[c] = f;
    summand[c] = ({a})widen(bias[c]) - ({a})widen(mean[c]) * f;
"""
    vectors = ", ".join(
        f"const {C_TYPES[t]}* {n}" for t, n in zip(kinds, ("scale", "bias", "mean", "var"), strict=True)
    )
    parameters = f"{vectors}, {a}* factor, {a}* summand, double epsilon, int channels"
    return Kernel(f"norm_folded_{dtype}_{'_'.join(kinds)}", parameters, body)


@functools.cache
def affine(dtype: str, *, last: bool) -> Kernel:
    """x · factor + summand."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    body = _element(last) + f"    y[i] = narrow<{c}>(widen(x[i]) * factor[c] + summand[c]);\n"
    parameters = (
        f"const {c}* x, const {a}* factor, const {a}* summand, {c}* y, long long size, int channels, unsigned positions"
    )
    return Kernel(f"norm_affine_{dtype}{'_last' if last else ''}", parameters, body)


@functools.cache
def inverses(dtype: str, var: str) -> Kernel:
    """1 / √(var + epsilon)."""
    a = COMPUTE[dtype]
    body = f"""    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < channels) inverse[c] = 1 / sqrt_of(({a})widen(var[c]) + ({a})epsilon);
"""
    parameters = f"const {C_TYPES[var]}* var, {a}* inverse, double epsilon, int channels"
    return Kernel(f"norm_inverse_{dtype}_{var}", parameters, body)


@functools.cache
def gradient(dtype: str, scale: str, mean: str, *, last: bool) -> Kernel:
    """dx = factor · (dy - Σ dy / n - (x - mean) · inverse · Σ dy x̂ / n), `sums` [2, channels]: Σ dy, Σ dy x̂."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    body = (
        _element(last)
        + f"""    const {a} factor = ({a})widen(scale[c]) * inverse[c];
    const {a} steep = sums[channels + c] * inverse[c] * factor / -({a})count;
    const {a} offset = sums[c] * factor / -({a})count;
    const {a} centred = widen(x[i]) - ({a})widen(mean[c]);
    const {a} part = widen(dy[i]) * factor;
    dx[i] = narrow<{c}>(centred * steep + part + offset);
"""
    )
    return Kernel(
        f"norm_gradient_{dtype}_{scale}_{mean}{'_last' if last else ''}",
        f"const {c}* x, const {c}* dy, const {C_TYPES[mean]}* mean, const {C_TYPES[scale]}* scale, "
        f"const {a}* inverse, const {a}* sums, {c}* dx, double count, long long size, int channels, unsigned positions",
        body,
    )


class ChannelNorms(Family):
    """What the operators share."""

    def accepts(self, op: Operator) -> bool:
        """Floats; as many elements and channels as kernels can have."""
        return all(v.dtype in _FLOATS for v in (*op.reads(), *op.writes())) and form_of(op).fits

    def vectors(self, op: Operator, count: int) -> TensorType:
        """Numbers of channels, as they are computed."""
        x: Any = op.inputs[0]
        return TensorType(_wide(x.dtype), (count, form_of(op).c))

    def applied(self, op: Operator, buffers: Sequence[Any], factor: Buffer) -> list[Call]:
        """(x, scale, bias, mean, var, y): BatchNormApply."""
        form = form_of(op)
        rule: Any = op.op
        x, scale, bias, mean, var, y = buffers
        k = apply(x.dtype, bias.dtype, mean.dtype, last=form.last)
        return [
            factors(x.dtype, scale.dtype, var.dtype)(form.c, scale, var, factor, rule.epsilon, form.c),
            k(x.size, x, mean, factor, bias, y, x.size, form.c, max(form.p, 1)),
        ]


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
        given = list(outs[1:3]) if any(o is not None for o in outs[1:3]) else []
        first = moments_of(form_of(op), x, scratch[0], mean, var, given)
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
        form = form_of(op)
        rule: Any = op.op
        x, y, given = ins[0], outs[0], [b for b in ins[1:5] if b is not None]
        assert x is not None
        pair = _rows(scratch[0], 2)
        k = folded(x.dtype, tuple(b.dtype for b in given))
        return [
            k(form.c, *given, *pair, rule.epsilon, form.c),
            affine(x.dtype, last=form.last)(x.size, x, *pair, y, x.size, form.c, max(form.p, 1)),
        ]


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
        rule: Any = op.op
        x, scale, mean, var, dy = (b for b in ins[:5] if b is not None)
        dx, dscale, dbias = outs[:3]
        assert dscale is not None
        inverse, sums = scratch[1].at(0, [form.c]), scratch[1].at(form.c, [2, form.c])
        k = products(x.dtype, mean.dtype, last=form.last, grouped=False, scaled=False)
        parts = [over_chunks(k, form, (x, dy, mean, None, scratch[0], 1, 1))] if form.chunks else []
        total = whole_sums(x.dtype, dscale.dtype)
        last = gradient(x.dtype, scale.dtype, mean.dtype, last=form.last)
        return [
            inverses(x.dtype, var.dtype)(form.c, var, inverse, rule.epsilon, form.c),
            *parts,
            total.blocks(form.c, args=(scratch[0], inverse, dscale, dbias, sums, form.c, form.chunks), block=(128,)),
            last(x.size, x, dy, mean, scale, inverse, sums, dx, max(form.count, 1), x.size, form.c, max(form.p, 1)),
        ]
