"""Layer, group, instance and RMS normalisation: fused forward operators and one fused gradient for all of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from ...language.factors import SUM, factor
from ...language.op import Cost, ImportedNode, OperatorBuilder
from ...language.types import TensorType, Types, Value, Values
from ..common import normal_axis
from ..rowwise import OverRows
from ..shape.reshape import reshape
from .axes import by_group, rows
from .numerics import View, wide
from .row_parts import last_steps


def as_type(b: OperatorBuilder, v: Value, dtype: str) -> Value:
    """v, cast where its element type is another."""
    return v if v.dtype == dtype else b.Cast(v, to=dtype)


class Normalization(OverRows, abstract=True):
    """(x, scale, bias) → y, optional mean (where `centred`), optional 1 / √(var + epsilon).

    Statistics are in at least float32.  Subclasses say how x is seen as [a, g, s, p]: normalised over (s, p) for each
    (a, g), scaled by a vector over (g, s).
    """

    autocast = "follow"
    autocast_inputs = (0,)
    small_outputs = (1, 2)
    centred: ClassVar[bool] = True
    #: scale and bias broadcast to x as they are, and the statistics do
    by_rows: ClassVar[bool] = False

    def view(self, x: TensorType) -> View:
        """x as [a, g, s, p]."""
        raise NotImplementedError

    def statistics(self, x: TensorType) -> TensorType:
        """The type of mean and inverse deviation."""
        raise NotImplementedError

    def vector(self, x: TensorType) -> tuple[int, ...]:
        """The shape of scale and bias."""
        raise NotImplementedError

    def infer(self, x, scale, bias=None):
        if not x.is_float:
            raise self.fail("needs floats", x, scale, bias)
        shape = self.vector(x)
        if scale is None or any(v is not None and (v.shape != shape or not v.is_float) for v in (scale, bias)):
            raise self.fail(f"scale and bias must be floats of shape {list(shape)}", x, scale, bias)
        statistic = self.statistics(x)
        return (x, statistic, statistic) if self.centred else (x, statistic)

    def compute(self: Any, ins, outs, scratch):
        """The formula; the variance of nothing is 0."""
        super().compute(ins, outs, scratch)
        inverse = (*outs[2 if self.centred else 1 :], None)[0]
        if not ins[0].size and inverse is not None:
            inverse.fill(1 / math.sqrt(self.epsilon) if self.epsilon else math.inf)

    def cost(self, ins: Types, outs: Types) -> Cost:
        assert ins[0] is not None
        return Cost(8 * ins[0].size, super().cost(ins, outs).bytes)

    def again(self, ins, outs):
        """The last steps, where rows lie together and nothing is rounded to a narrower type."""
        return last_steps(ins, outs[1:], centred=self.centred) if self.by_rows else None

    def expand(self: Any, b, x, scale, bias=None):
        """The formula, over x as [a, g, s, p]."""
        view, statistic = self.view(x.type), self.statistics(x.type)
        work = as_type(b, reshape(b, x, view), statistic.dtype)
        mean = b.ReduceMean(work, axes=(2, 3)) if self.centred else None
        centred = b.Sub(work, mean) if self.centred else work
        var = b.ReduceMean(b.Mul(centred, centred), axes=(2, 3))
        deviation = b.Sqrt(b.Add(var, b.constant(self.epsilon, var)))
        inverse = b.Div(b.constant(1.0, var), deviation)
        y = b.Mul(b.Mul(centred, inverse), self._vector(b, scale, view, statistic.dtype))
        if bias is not None:
            y = b.Add(y, self._vector(b, bias, view, statistic.dtype))
        y = reshape(b, as_type(b, y, x.dtype), x.shape)
        statistics = [reshape(b, s, statistic.shape) for s in (mean, inverse) if s is not None]
        return (y, *statistics)

    def _vector(self, b: OperatorBuilder, v: Value, view: View, dtype: str) -> Value:
        return as_type(b, reshape(b, v, (1, view[1], view[2], 1)), dtype)

    def gradient(self, b, ins, outs, grads):
        """One fused operator from x and the statistics; what flows into the statistics is added."""
        x, scale = ins[:2]
        bias = ins[2] if len(ins) > 2 else None
        view = self.view(x.type)
        mean, inverse = outs[1] if self.centred else None, outs[-1]
        dx = dscale = dbias = None
        if grads[0] is not None:
            dx, dscale, dbias = b.NormGrad(x, scale, mean, inverse, grads[0], view=view)
            dbias = None if bias is None else as_type(b, dbias, bias.dtype)
        flows = [f for f in self._through_statistics(b, x, mean, inverse, grads) if f is not None]
        if flows:
            flow = reshape(b, as_type(b, b.add_all(flows), x.dtype), x.shape)
            dx = flow if dx is None else b.Add(dx, flow)
        return [dx, dscale, dbias]

    def _through_statistics(
        self, b: OperatorBuilder, x: Value, mean: Value | None, inverse: Value, grads: Values
    ) -> list[Value]:
        """dmean / n, and -dinverse · inverse³ · (x - mean) / n, over x as [a, g, s, p]."""
        view = self.view(x.type)
        small = (*view[:2], 1, 1)
        count = b.constant(1.0 / max(view[2] * view[3], 1), inverse)
        gradients = []
        if self.centred and len(grads) > 1 and grads[1] is not None:
            gradients.append(b.Expand(b.Mul(reshape(b, grads[1], small), count), shape=view))
        last = 2 if self.centred else 1
        if len(grads) > last and (dlast := grads[last]) is not None:
            inv = reshape(b, inverse, small)
            factor = b.Neg(b.Mul(b.Mul(reshape(b, dlast, small), count), b.Mul(inv, b.Mul(inv, inv))))
            work = as_type(b, reshape(b, x, view), inverse.dtype)
            if mean is not None:
                work = b.Sub(work, reshape(b, mean, small))
            gradients.append(b.Mul(work, factor))
        return gradients

    def export(self, g, ins, outs):
        """Native where only y is wanted; in float64 ONNX's functions go through float32 (stash_type)."""
        if any(outs[1:]) or self.onnx_name is None or g.type(ins[0]).dtype == "f64":
            g.expand(self, ins, outs)
            return True
        return False


class NormGrad(OverRows):
    """(x, scale, mean, 1/deviation, dy) → (dx, dscale, dbias) of a normalisation over the last two axes of `view`.

    `view`: x as [a, g, s, p]; scale has g · s elements.  mean is absent where x is not centred (RMS).
    """

    required_outputs = 3
    inplace = (0,)
    view: tuple[int, int, int, int]

    def infer(self, x, scale, mean, inverse, dy):
        """x's type, scale's twice."""
        if math.prod(self.view) != x.size or len(self.view) != 4 or min(self.view) < 0 or dy != x:
            raise self.fail(f"x and dy must have the elements of view {list(self.view)}", x, scale, mean, inverse, dy)
        if not x.is_float:
            raise self.fail("needs floats", x, scale, mean, inverse, dy)
        a, g, s, _ = self.view
        if scale.size != g * s or inverse.size != a * g or (mean is not None and mean.size != a * g):
            raise self.fail("scale or statistics do not fit the view", x, scale, mean, inverse, dy)
        return (x, scale, scale)

    def axis_factors(self, ins, outs):
        """Rows, of which the gradients of scale and bias are sums."""
        x, _, mean, inverse, _ = ins
        factors = []
        for a, d in enumerate(x.shape):
            aligned = all(t is None or (a < t.ndim and t.shape[a] == d) for t in (mean, inverse))
            if aligned and self.view[0] % max(math.prod(x.shape[: a + 1]), 1) == 0:
                factors.append(factor(d, [a, None, a, a, a], [a, SUM, SUM]))
        return factors

    def sliced(self, factor, start, size, outs):
        return dataclasses.replace(self, view=(self.view[0] * size // factor.size, *self.view[1:]))

    def cost(self, ins, outs):
        return Cost(14 * ins[0].size, super().cost(ins, outs).bytes)

    def expand(self, b, x, scale, mean, inverse, dy):
        a, g, s, _ = self.view
        dtype = inverse.dtype
        small = (a, g, 1, 1)
        work, gradient = (as_type(b, reshape(b, v, self.view), dtype) for v in (x, dy))
        inv = reshape(b, inverse, small)
        centred = work if mean is None else b.Sub(work, reshape(b, mean, small))
        normal = b.Mul(centred, inv)
        dscale = b.ReduceSum(b.Mul(gradient, normal), axes=(0, 3), keepdims=0)
        dbias = b.ReduceSum(gradient, axes=(0, 3), keepdims=0)
        scaled = b.Mul(gradient, as_type(b, reshape(b, scale, (1, g, s, 1)), dtype))
        inner = b.Sub(scaled, b.Mul(normal, b.ReduceMean(b.Mul(scaled, normal), axes=(2, 3))))
        if mean is not None:
            inner = b.Sub(inner, b.ReduceMean(scaled, axes=(2, 3)))
        dx = reshape(b, as_type(b, b.Mul(inner, inv), x.dtype), x.shape)
        return (dx, *(reshape(b, as_type(b, v, scale.dtype), scale.shape) for v in (dscale, dbias)))

    @classmethod
    def samples(cls, draw):
        for view, shape, scale in (
            ((2, 1, 3, 1), "2,3", "3"),
            ((2, 2, 2, 3), "2,4,3", "4"),
            ((2, 3, 1, 4), "2,3,2,2", "3"),
        ):
            stats = f"{view[0]},{view[1]}"
            for mean in (draw(f"f64[{stats}]"), None):
                x, dy, inverse = draw(f"f64[{shape}]"), draw(f"f64[{shape}]"), draw(f"f64[{stats}]", 0.5, 1.5)
                yield draw.case(cls(view=view), x, draw(f"f64[{scale}]"), mean, inverse, dy)
        for t in ("f32", "f16"):
            x, dy, statistics = draw(f"{t}[2,3]"), draw(f"{t}[2,3]"), [draw("f32[2,1]"), draw("f32[2,1]", 0.5, 1.5)]
            yield draw.case(cls(view=(2, 1, 3, 1)), x, draw(f"{t}[3]"), *statistics, dy)


class LayerNormalization(Normalization, onnx=True):
    """Normalises over the axes from `axis` on (Ba, Kiros & Hinton 2016; ONNX LayerNormalization).

    scale and bias: the shape of those axes.  Mean and inverse deviation: x's shape with 1 there.
    """

    axis: int = -1
    epsilon: float = 1e-5
    inplace = (0,)
    by_rows = True
    weights = (1, 2)

    def axis_factors(self, ins, outs):
        return rows(ins[0], outs, normal_axis(self.axis, ins[0].ndim, self))

    def view(self, x):
        axis = normal_axis(self.axis, x.ndim, self)
        return (math.prod(x.shape[:axis]), 1, math.prod(x.shape[axis:]), 1)

    def vector(self, x):
        return x.shape[normal_axis(self.axis, x.ndim, self) :]

    def statistics(self, x):
        """1 in place of the normalised axes."""
        axis = normal_axis(self.axis, x.ndim, self)
        return wide(x).with_shape((*x.shape[:axis], *(1,) * (x.ndim - axis)))

    def export(self, g, ins, outs):
        """Native, with the statistics too, except that ONNX has no float64 ones."""
        if any(outs[1:]) and g.type(ins[0]).dtype == "f64":
            g.expand(self, ins, outs)
            return True
        return False

    @classmethod
    def from_onnx(cls, node):
        """Scale and bias in full shape; statistics on demand."""
        op = cls(axis=node.attributes.get("axis", -1), epsilon=node.attributes.get("epsilon", 1e-5))
        x = node.need(0)
        vectors = [_full_vector(node, op, x, i) for i in (1, 2)]
        want = max((i + 1 for i in range(3) if node.wants(i)), default=1)
        return node.emit(op, x, *vectors, want=want)

    @classmethod
    def samples(cls, draw):
        """Last axis, several axes, no bias, one element, 16-bit floats."""
        yield draw.case(cls(), draw("f64[2,3,4]"), draw("f64[4]"), draw("f64[4]"))
        yield draw.case(cls(axis=1, epsilon=0.01), draw("f64[2,3,2]"), draw("f64[3,2]"))
        yield draw.case(cls(axis=0, epsilon=0.5), draw("f64[3]"), draw("f64[3]"), draw("f64[3]"), want=1)
        yield draw.case(cls(epsilon=0.5), draw("f64[2,1]"), draw("f64[1]"), draw("f64[1]"))
        yield draw.case(cls(), draw("f64[0,3]"), draw("f64[3]"), draw("f64[3]"))
        yield draw.case(cls(), draw("f32[2,3,4]"), draw("f32[4]"), draw("f32[4]"))
        yield draw.case(cls(), draw("f16[2,3,4]"), draw("f16[4]"), draw("f16[4]"))


def _full_vector(node: ImportedNode, op: Normalization, x: Value, i: int) -> Value | None:
    """Scale or bias, repeated where ONNX lets it broadcast."""
    v, shape = node.input(i), op.vector(x.type)
    if v is None or v.shape == shape:
        return v
    try:
        fits = np.broadcast_shapes(v.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise node.fail(f"scale or bias of shape {list(v.shape)} does not fit the normalised axes {list(shape)}")
    return node.builder.Expand(v, shape=shape)


class RMSNormalization(Normalization):
    """x / √(mean(x²) + epsilon) · scale over the axes from `axis` on (Zhang & Sennrich 2019; ONNX 23)."""

    axis: int = -1
    epsilon: float = 1e-5
    inplace = (0,)
    by_rows = True
    centred = False
    weights = (1,)

    def infer(self, x, scale):
        """x's type, inverse root mean squares."""
        return super().infer(x, scale)

    def axis_factors(self, ins, outs):
        return rows(ins[0], outs, normal_axis(self.axis, ins[0].ndim, self))

    def view(self, x):
        return LayerNormalization(axis=self.axis).view(x)

    def vector(self, x):
        return x.shape[normal_axis(self.axis, x.ndim, self) :]

    def statistics(self, x):
        """1 in place of the normalised axes."""
        return LayerNormalization(axis=self.axis).statistics(x)

    @classmethod
    def from_onnx(cls, node):
        op = cls(axis=node.attributes.get("axis", -1), epsilon=node.attributes.get("epsilon", 1e-5))
        x = node.need(0)
        return node.emit(op, x, _full_vector(node, op, x, 1))

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,3,4]"), draw("f64[4]"))
        yield draw.case(cls(axis=1, epsilon=0.01), draw("f64[2,3,2]"), draw("f64[3,2]"), want=1)
        yield draw.case(cls(), draw("f32[2,3,4]"), draw("f32[4]"))
        yield draw.case(cls(), draw("f16[2,3,4]"), draw("f16[4]"))


class ChannelwiseNormalization(Normalization, abstract=True):
    """Channels in groups; scale and bias have one element a channel, statistics one for each image and group."""

    def groups(self, x: TensorType) -> int:
        """Number of groups."""
        raise NotImplementedError

    def view(self, x: TensorType) -> View:
        g = self.groups(x)
        if x.ndim < 2 or g < 1 or x.shape[1] % g:
            raise self.fail(f"{g} groups do not divide the channels", x)
        return (x.shape[0], g, x.shape[1] // g, math.prod(x.shape[2:]))

    def vector(self, x: TensorType) -> tuple[int, ...]:
        self.view(x)
        return (x.shape[1],)

    def statistics(self, x: TensorType) -> TensorType:
        """[n, groups]."""
        return wide(x).with_shape(self.view(x)[:2])


class GroupNormalization(ChannelwiseNormalization, onnx=True):
    """Normalises over groups of channels (Wu & He 2018; ONNX GroupNormalization-21)."""

    num_groups: int
    epsilon: float = 1e-5
    inplace = (0,)
    weights = (1, 2)

    def axis_factors(self, ins, outs):
        return by_group(ins[0], outs, self.num_groups, "num_groups")

    def groups(self, x: TensorType) -> int:
        return self.num_groups

    @classmethod
    def from_onnx(cls, node):
        """Before opset 21, scale and bias have one element a group."""
        op = cls(num_groups=node.attributes["num_groups"], epsilon=node.attributes.get("epsilon", 1e-5))
        x, *vectors = (node.input(i) for i in range(3))
        if node.opset < 21 and x.shape[1] != op.num_groups:
            each, b = x.shape[1] // op.num_groups, node.builder
            vectors = [
                b.Reshape(
                    b.Expand(b.Reshape(v, shape=(op.num_groups, 1)), shape=(op.num_groups, each)), shape=(x.shape[1],)
                )
                for v in vectors
            ]
        return node.emit(op, x, *vectors)

    @classmethod
    def samples(cls, draw):
        """Groups of two, one group, no spatial axes, 16-bit floats."""
        yield draw.case(cls(num_groups=2, epsilon=0.1), draw("f64[2,4,3]"), draw("f64[4]"), draw("f64[4]"))
        yield draw.case(cls(num_groups=1), draw("f64[2,2,2,2]"), draw("f64[2]"), draw("f64[2]"), want=1)
        yield draw.case(cls(num_groups=2, epsilon=0.1), draw("f64[2,4]"), draw("f64[4]"), draw("f64[4]"))
        yield draw.case(cls(num_groups=2), draw("f32[2,4,3,3]"), draw("f32[4]"), draw("f32[4]"))
        yield draw.case(cls(num_groups=2), draw("f16[2,4,3,3]"), draw("f16[4]"), draw("f16[4]"), want=1)


class InstanceNormalization(ChannelwiseNormalization, onnx=True):
    """Normalises each channel of each image (Ulyanov et al. 2016; ONNX InstanceNormalization)."""

    epsilon: float = 1e-5
    inplace = (0,)
    weights = (1, 2)

    def axis_factors(self, ins, outs):
        return by_group(ins[0], outs, ins[0].shape[1])

    def groups(self, x: TensorType) -> int:
        return x.shape[1]

    @classmethod
    def from_onnx(cls, node):
        return node.emit(cls(epsilon=node.attributes.get("epsilon", 1e-5)), *node.inputs)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(epsilon=0.1), draw("f64[2,3,4]"), draw("f64[3]"), draw("f64[3]"))
        yield draw.case(cls(), draw("f64[2,2,2,2]"), draw("f64[2]"), draw("f64[2]"), want=1)
        yield draw.case(cls(), draw("f32[2,2,2,2]"), draw("f32[2]"), draw("f32[2]"))
