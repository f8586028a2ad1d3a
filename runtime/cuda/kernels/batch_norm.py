"""Batch normalisation in both layouts: statistics in chunks, then one pass with a factor per channel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import TensorType, present
from ..code.channel_sums import Channels, moments_of, products, whole_sums
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from ..families import Buffers, Family, family

#: whether channels are last, and elements of a thread
_Form = tuple[bool, int]
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


def _form(form: Channels, x: Buffer, arrays: Sequence[Buffer], vectors: Sequence[Buffer]) -> Any:
    """The form of a kernel over elements, how many threads it needs, and the end of its arguments."""
    pack = form.pack(x.dtype)
    if any(b.address % (pack * b.type.numpy.itemsize) for b in (*arrays, *vectors)):
        pack = 1  # no sums: the same bits
    return (form.last, pack), x.size // pack, (x.size, form.c, max(form.p, 1))


def _elements(
    names: tuple[str, str], arrays: Sequence[str], vectors: Mapping[str, str], body: str, form: _Form
) -> Kernel:
    """A kernel of a thread for each element, or for `pack` of them that lie together, of as many channels.

    `names`: the kernel's, and the element type; `arrays`: as long as the result, which is the last; `vectors`: of
    channels, with their C types.  In the body NAME_ is an element.
    """
    name, c, (last, pack) = names[0], C_TYPES[names[1]], form
    channel = "i % channels" if last else "i / positions % channels"
    text = f"""    const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * {pack};
    if (i >= size) return;
    const int c = size <= 0xffffffffll ? {channel.replace("i ", "(unsigned)i ")} : {channel};
"""
    *given, out = arrays
    loaded = [(n, c, f"{n} + i") for n in given] + [(n, kind, f"{n} + c") for n, kind in vectors.items()]
    text += "".join(
        f"    const Pack<{t}, {pack}> {n}_all = *(const Pack<{t}, {pack}>*)({at});\n" for n, t, at in loaded
    )
    each = " ".join(f"const {t} {n}_ = {n}_all.of[j];" for n, t, _ in loaded)
    text += f"""    Pack<{c}, {pack}> {out}_all;
    for (int j = 0; j < {pack}; j++) {{
        {c}& {out}_ = {out}_all.of[j];
        {each}
        {body}
    }}
    *(Pack<{c}, {pack}>*)({out} + i) = {out}_all;
"""
    parameters = [*(f"const {c}* {n}" for n in given), *(f"const {t}* {n}" for n, t in vectors.items()), f"{c}* {out}"]
    shape = "long long size, int channels, unsigned positions"
    ending = f"{'_last' if last else ''}{f'_{pack}' if pack > 1 else ''}"
    return Kernel(f"{name}{ending}", f"{', '.join(parameters)}, {shape}", text)


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
def apply(dtype: str, bias: str, mean: str, form: _Form) -> Kernel:
    """(x - mean) · factor + bias."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    body = f"""const {a} centred = widen(x_) - ({a})widen(mean_);
        const {a} scaled = centred * factor_;
        y_ = narrow<{c}>(scaled + ({a})widen(bias_));"""
    vectors = {"mean": C_TYPES[mean], "factor": a, "bias": C_TYPES[bias]}
    return _elements((f"norm_apply_{dtype}_{bias}_{mean}", dtype), ("x", "y"), vectors, body, form)


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
def affine(dtype: str, form: _Form) -> Kernel:
    """x · factor + summand."""
    a = COMPUTE[dtype]
    body = f"y_ = narrow<{C_TYPES[dtype]}>(widen(x_) * factor_ + summand_);"
    return _elements((f"norm_affine_{dtype}", dtype), ("x", "y"), {"factor": a, "summand": a}, body, form)


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
def gradient(dtype: str, scale: str, mean: str, form: _Form) -> Kernel:
    """dx = factor · (dy - Σ dy / n - (x - mean) · inverse · Σ dy x̂ / n), `sum`: Σ dy, `product`: Σ dy x̂."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    body = f"""const {a} factor = ({a})widen(scale_) * inverse_;
        const {a} steep = product_ * inverse_ * factor / -({a})count_;
        const {a} offset = sum_ * factor / -({a})count_;
        const {a} centred = widen(x_) - ({a})widen(mean_);
        const {a} part = widen(dy_) * factor;
        dx_ = narrow<{c}>(centred * steep + part + offset);"""
    vectors = {"mean": C_TYPES[mean], "scale": C_TYPES[scale], "inverse": a, "sum": a, "product": a}
    k = _elements((f"norm_gradient_{dtype}_{scale}_{mean}", dtype), ("x", "dy", "dx"), vectors, body, form)
    return dataclasses.replace(k, parameters=f"{k.parameters}, double count_")


class ChannelNorms(Family):
    """What the operators share."""

    def accepts(self, op: Operator) -> bool:
        """Floats; as many elements and channels as kernels can have."""
        return all(v.dtype in _FLOATS for v in (*op.reads(), *op.writes())) and form_of(op).fits

    def vectors(self, op: Operator, count: int) -> TensorType:
        """Numbers of channels, as they are computed."""
        x: Any = op.inputs[0]
        return TensorType("f64" if x.dtype == "f64" else "f32", (count, form_of(op).c))

    def applied(self, op: Operator, buffers: Sequence[Any], factor: Buffer) -> list[Call]:
        """(x, scale, bias, mean, var, y): BatchNormApply."""
        form = form_of(op)
        rule: Any = op.op
        x, scale, bias, mean, var, y = buffers
        of, work, shape = _form(form, x, (x, y), (mean, factor, bias))
        k = apply(x.dtype, bias.dtype, mean.dtype, of)
        return [
            factors(x.dtype, scale.dtype, var.dtype)(form.c, scale, var, factor, rule.epsilon, form.c),
            k(work, x, mean, factor, bias, y, *shape),
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
        assert y is not None
        of, work, shape = _form(form, x, (x, y), pair)
        return [k(form.c, *given, *pair, rule.epsilon, form.c), affine(x.dtype, of)(work, x, *pair, y, *shape)]


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
        assert dscale is not None and dx is not None
        inverse, *two = _rows(scratch[1], 3)
        sums = scratch[1].at(form.c, [2, form.c])
        parts = [products(form, x, dy, mean, None, scratch[0])] if form.chunks else []
        total = whole_sums(x.dtype, dscale.dtype)
        of, work, shape = _form(form, x, (x, dy, dx), (mean, scale, inverse, *two))
        last = gradient(x.dtype, scale.dtype, mean.dtype, of)
        return [
            inverses(x.dtype, var.dtype)(form.c, var, inverse, rule.epsilon, form.c),
            *parts,
            total.blocks(form.c, args=(scratch[0], inverse, dscale, dbias, sums, form.c, form.chunks), block=(128,)),
            last(work, x, dy, mean, scale, inverse, *two, dx, *shape, max(form.count, 1)),
        ]
