"""Convolution and transposed convolution, with their gradients as operators of their own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from ...language.op import Cost, Op, OperatorBuilder
from ...language.types import Array, Operands, TensorType, Types, Value
from ..channels_last import channels_last
from ..norm.numerics import wide
from ..window import Window, full, output_size, window_attributes
from . import numerics as kernels
from .axes import convolution, weight_gradient
from .export import export_grad_input, export_grad_weight
from .numerics import Geometry

#: elements of 16-bit floats that are converted at a time
_HALVES = 1 << 16
#: strides, dilations and pads are smaller: sweeps over windows have tables as long
_FARTHEST = 1 << 24


class Convolution(Op, abstract=True):
    """The base of convolutions.  `pads`: those before each spatial axis, then those after."""

    autocast = "low"
    #: inputs whose first axis is that of images; whether the result is a sum over images
    by_image: ClassVar[tuple[int, ...]] = (0,)
    sums: ClassVar[bool] = False
    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    group: int = 1

    def window(self, inp: Sequence[int], out: Sequence[int], kernel: Sequence[int]) -> Window:
        """The windows over spatial sizes `inp`, one for each position of `out`."""
        n = len(kernel)
        begin = full(self.pads, 2 * n, 0)[:n]
        return Window(
            tuple(inp), tuple(out), tuple(kernel), full(self.strides, n, 1), full(self.dilations, n, 1), begin
        )

    def geometry(self, x: Sequence[int], w: Sequence[int], y: Sequence[int]) -> Geometry:
        """From the shapes of the convolution's input, weight and output."""
        return Geometry(x[0], self.group, w[1], w[0] // max(self.group, 1), self.window(x[2:], y[2:], w[2:]))

    def output_shape(self, x: TensorType, w: TensorType) -> tuple[int, ...]:
        """[n, m, positions...].  TypeRuleError where the shapes do not fit."""
        self.check(x, w)
        if x.shape[1] != w.shape[1] * self.group:
            raise self.fail(f"{x.shape[1]} channels for {self.group} group(s) of {w.shape[1]}", x, w)
        n = x.ndim - 2
        pads = full(self.pads, 2 * n, 0)
        strides, dilations = full(self.strides, n, 1), full(self.dilations, n, 1)
        sizes = [
            output_size(x.shape[2 + i], w.shape[2 + i], strides[i], dilations[i], pads[i] + pads[n + i])
            for i in range(n)
        ]
        if min(sizes) < 0:
            raise self.fail("the kernel is larger than the padded input", x, w)
        return (x.shape[0], w.shape[0], *sizes)

    def check(self, x: TensorType, w: TensorType) -> None:
        """Rank, element types, lengths of the attributes, groups."""
        n = x.ndim - 2
        if n < 1 or w.ndim != x.ndim or x.dtype != w.dtype or not x.is_float:
            raise self.fail("needs two float tensors of one rank ≥ 3 and one element type", x, w)
        if any(len(a) not in (0, k) for a, k in ((self.strides, n), (self.dilations, n), (self.pads, 2 * n))):
            raise self.fail(f"strides, dilations and pads need {n}, {n} and {2 * n} entries", x, w)
        if self.group < 1 or w.shape[0] % self.group:
            raise self.fail(f"group {self.group} does not divide {w.shape[0]}", x, w)
        if min((*self.strides, *self.dilations), default=1) < 1:
            raise self.fail("strides and dilations must be at least 1", x, w)
        if max(map(abs, (*self.strides, *self.dilations, *self.pads)), default=0) >= _FARTHEST:
            raise self.fail(f"strides, dilations and pads must be below {_FARTHEST:,}", x, w)

    def buffers(self, geo: Geometry) -> list[int]:
        """Elements of the scratch buffers of the numerics."""
        raise NotImplementedError

    def shapes(self, ins: Sequence[Any], outs: Sequence[Any]) -> Geometry:
        """The geometry from this operator's inputs and outputs."""
        raise NotImplementedError

    def numerics(self, geo: Geometry, ins: Sequence[Any], out: Any, scratch: Sequence[Any]) -> None:
        """In float32 or float64."""
        raise NotImplementedError

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """Columns and partial sums; for 16-bit floats also a few images of all operands in float32."""
        assert outs[0] is not None
        geo, dtype = self.shapes(ins, outs), wide(outs[0]).dtype
        if dtype == outs[0].dtype:
            return tuple(TensorType(dtype, (size,)) for size in self.buffers(geo))
        few = _few_images(geo)

        def part(t: TensorType, whole: bool) -> TensorType:
            return wide(t) if whole else wide(t).with_shape((few.batch, *t.shape[1:]))

        types = [part(t, i not in self.by_image) for i, t in enumerate(ins) if t is not None]
        sums = [wide(outs[0])] if self.sums else []
        buffers = [TensorType(dtype, (size,)) for size in self.buffers(few)]
        return (*types, part(outs[0], self.sums), *sums, *buffers)

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """One block of columns and one BLAS product at a time."""
        geo = self.shapes(ins, outs)
        if outs[0].dtype.itemsize > 2:
            self.numerics(geo, ins, outs[0], scratch)
            return
        self._halves(geo, ins, outs[0], list(scratch))

    def _halves(self, geo: Geometry, ins: Operands, out: Array, scratch: list[Array]) -> None:
        """A few images at a time in float32."""
        inputs: list[Any] = [None if a is None else scratch.pop(0) for a in ins]
        output = scratch.pop(0)
        sums = scratch.pop(0) if self.sums else None
        for i, a in enumerate(ins):
            if a is not None and i not in self.by_image:
                inputs[i][...] = a
        few = _few_images(geo)
        if sums is not None:
            sums.fill(0)
        for n in range(0, geo.batch, few.batch):
            for i in self.by_image:
                inputs[i][...] = ins[i][n : n + few.batch]
            self.numerics(few, inputs, output, scratch)
            if sums is None:
                out[n : n + few.batch] = output
            else:
                np.add(sums, output, out=sums)
        if sums is not None:
            out[...] = sums

    def cost(self, ins: Types, outs: Types) -> Cost:
        """A multiplication and an addition for each tap, channel pair and position."""
        geo = self.shapes(ins, outs)
        flops = 2 * geo.multiplications
        return Cost(flops, super().cost(ins, outs).bytes)


def _few_images(geo: Geometry) -> Geometry:
    """The geometry with as many images as are worked on at a time in float32: a divisor of their number."""
    w = geo.window
    each = geo.group * (geo.cg * math.prod(w.inp) + geo.mg * w.positions)
    most = max(min(geo.batch, _HALVES // max(each, 1)), 1)
    return dataclasses.replace(geo, batch=next(k for k in range(most, 0, -1) if geo.batch % k == 0))


def bias_gradient(b: OperatorBuilder, dy: Value) -> Value:
    """Σ dy over images and positions."""
    return b.ReduceSum(dy, axes=(0, *range(2, dy.ndim)), keepdims=0)


def cropped(b: OperatorBuilder, x: Value, shape: Sequence[int]) -> Value:
    """The first elements of x along its spatial axes."""
    axes = tuple(i for i in range(x.ndim) if x.shape[i] != shape[i])
    if not axes:
        return x
    return b.Slice(x, starts=(0,) * len(axes), ends=tuple(shape[a] for a in axes), axes=axes)


@channels_last(inputs=(0,), outputs=(0,))
class Conv(Convolution, onnx=True):
    """y[n, m, p] = bias[m] + Σ w[m, c, k] · x[n, c, p · stride + k · dilation - pad] (ONNX Conv; 1 to 3 axes or more).

    x: [n, group · c, ...], w: [m, c, ...], bias: [m]; m is a multiple of `group`.
    """

    linear = ((0, 2), (1, 2))
    weights = (1, 2)

    def infer(self, x, w, bias=None):
        """[n, m, positions...]."""
        shape = self.output_shape(x, w)
        if bias is not None and (bias.shape != (w.shape[0],) or bias.dtype != x.dtype):
            raise self.fail("the bias must have one element an output channel", x, w, bias)
        return (x.with_shape(shape),)

    def axis_factors(self, ins, outs):
        """Images, groups, output channels of a group; its input channels where there is no bias."""
        x, w = ins[:2]
        sizes = x.shape[0], self.group, w.shape[0] // self.group, w.shape[1]
        return convolution(*sizes, bias=len(ins) > 2 and ins[2] is not None, forward=True)

    def shapes(self, ins, outs):
        return self.geometry(ins[0].shape, ins[1].shape, outs[0].shape)

    def buffers(self, geo):
        return kernels.forward_scratch(geo)

    def numerics(self, geo, ins, out, scratch):
        kernels.forward(geo, ins[0], ins[1], ins[2] if len(ins) > 2 else None, out, scratch)

    def gradient(self, b, ins, outs, grads):
        """By the input: from the weight only; by the weight: from the input only.

        The weight's comes first: x and the input's gradient need not be there together then.
        """
        x, w = ins[:2]
        dy = grads[0]
        dw = b.ConvGradWeight(x, dy, kernel=w.shape[2:], **self.options(Convolution))
        db = bias_gradient(b, dy) if len(ins) > 2 and ins[2] is not None else None
        return [b.ConvGradInput(w, dy, shape=x.shape[2:], **self.options(Convolution)), dw, db]

    @classmethod
    def from_onnx(cls, node):
        x, w = node.type(0), node.type(1)
        fields = window_attributes(node, x.shape[2:], w.shape[2:])
        return node.emit(cls(**fields, group=node.attributes.get("group", 1)), *node.inputs)

    @classmethod
    def samples(cls, draw):
        """1 to 3 axes, strides, dilations, uneven pads, groups, depthwise, 1x1, no bias, float32, no images."""
        for op, x, w, with_bias in _conv_samples(cls):
            bias = draw(f"f64[{w.split(',')[0]}]") if with_bias else None
            inputs = [draw(f"f64[{x}]"), draw(f"f64[{w}]")] + ([bias] if with_bias else [])
            yield draw.case(op, *inputs)
        yield draw.case(cls(pads=(1, 1, 1, 1)), draw("f32[2,3,5,5]"), draw("f32[4,3,3,3]"), draw("f32[4]"))
        yield draw.case(cls(), draw("f16[2,3,5,5]"), draw("f16[4,3,3,3]"), draw("f16[4]"))


def _conv_samples(cls: Any) -> list[tuple[Any, str, str, bool]]:
    return [
        (cls(pads=(1, 1, 1, 1)), "2,2,5,4", "3,2,3,3", True),
        (cls(strides=(2, 2), pads=(1, 0, 0, 2)), "1,2,6,5", "2,2,3,2", True),
        (cls(), "2,3,3,2", "4,3,1,1", True),
        (cls(strides=(2, 2)), "2,3,5,4", "4,3,1,1", False),
        (cls(group=2, pads=(0, 1, 0, 1)), "2,4,3,3", "4,2,2,3", False),
        (cls(group=3, pads=(1, 1, 1, 1), strides=(2, 1)), "2,3,4,3", "6,1,3,3", True),
        (cls(dilations=(2, 1), strides=(1, 2)), "1,2,6,5", "2,2,2,3", False),
        (cls(pads=(3, 3)), "2,2,3", "2,2,2", True),
        (cls(pads=(1, 0, 1, 0, 1, 1), strides=(1, 2, 1)), "1,2,3,3,2", "2,2,2,2,2", False),
        (cls(), "0,2,4,4", "2,2,3,3", True),
    ]


@channels_last(inputs=(1,), outputs=(0,))
class ConvGradInput(Convolution):
    """(w, dy) → the gradient of Conv by its input, whose spatial sizes are `shape`."""

    linear = ((0,), (1,))
    by_image = (1,)
    shape: tuple[int, ...] = field(kw_only=True)

    def infer(self, w, dy):
        """[n, group · c, shape...]."""
        self.check(dy, w)
        if dy.shape[1] != w.shape[0] or len(self.shape) != dy.ndim - 2:
            raise self.fail(f"dy does not fit the weight and shape {list(self.shape)}", w, dy)
        return (dy.with_shape((dy.shape[0], w.shape[1] * self.group, *self.shape)),)

    def axis_factors(self, ins, outs):
        """The factors of a transposed convolution without bias, with its inputs exchanged."""
        w, dy = ins
        factors = convolution(dy.shape[0], self.group, w.shape[0] // self.group, w.shape[1], bias=False, forward=False)
        return [dataclasses.replace(f, inputs=((*f.inputs, None)[1], f.inputs[0])) for f in factors]

    def shapes(self, ins, outs):
        return self.geometry(outs[0].shape, ins[0].shape, ins[1].shape)

    def buffers(self, geo):
        return kernels.grad_input_scratch(geo)

    def numerics(self, geo, ins, out, scratch):
        """The kernel of the input's gradient."""
        kernels.grad_input(geo, ins[0], ins[1], out, scratch)

    def gradient(self, b, ins, outs, grads):
        """Linear in both: a convolution by dy, a weight gradient by w."""
        w, dy = ins
        again = cropped(b, b.Conv(grads[0], w, **self.options(Convolution)), dy.shape)
        return [b.ConvGradWeight(grads[0], dy, kernel=w.shape[2:], **self.options(Convolution)), again]

    def export(self, g, ins, outs):
        return export_grad_input(self, g, ins, outs)

    @classmethod
    def samples(cls, draw):
        """Conv's samples, and a dy that is shorter than the convolution's output would be."""
        for op, x, w, _ in _conv_samples(Conv):
            xs, ws = _shape(x), _shape(w)
            y = op.infer(TensorType("f64", xs), TensorType("f64", ws))[0]
            yield draw.case(cls(shape=xs[2:], **op.options(Convolution)), draw(f"f64[{w}]"), draw(str(y)))
        yield draw.case(cls(shape=(6, 7)), draw("f64[3,2,3,3]"), draw("f64[1,3,2,4]"))
        yield draw.case(cls(shape=(5, 5), pads=(1, 1, 1, 1)), draw("f32[4,3,3,3]"), draw("f32[2,4,5,5]"))


@channels_last(inputs=(0, 1), outputs=())
class ConvGradWeight(Convolution):
    """(x, dy) → the gradient of Conv by its weight, whose spatial sizes are `kernel`."""

    linear = ((0,), (1,))
    by_image = (0, 1)
    sums = True
    kernel: tuple[int, ...] = field(kw_only=True)

    def infer(self, x, dy):
        """[m, c, kernel...]."""
        if x.ndim != dy.ndim or x.dtype != dy.dtype or x.shape[0] != dy.shape[0] or len(self.kernel) != x.ndim - 2:
            raise self.fail("x and dy do not fit", x, dy)
        if x.shape[1] % self.group or dy.shape[1] % self.group:
            raise self.fail(f"group {self.group} does not divide the channels", x, dy)
        w = x.with_shape((dy.shape[1], x.shape[1] // self.group, *self.kernel))
        self.check(x, w)
        return (w,)

    def axis_factors(self, ins, outs):
        """Channels and groups; images are summed over."""
        x, w = ins[0], outs[0]
        return weight_gradient(x.shape[0], self.group, w.shape[0] // self.group, w.shape[1])

    def shapes(self, ins, outs):
        return self.geometry(ins[0].shape, outs[0].shape, ins[1].shape)

    def buffers(self, geo):
        return kernels.grad_weight_scratch(geo)

    def numerics(self, geo, ins, out, scratch):
        """The kernel of the weight's gradient."""
        kernels.grad_weight(geo, ins[0], ins[1], out, scratch)

    def gradient(self, b, ins, outs, grads):
        """Linear in both: with the incoming gradient as the weight."""
        x, dy = ins
        dx = b.ConvGradInput(grads[0], dy, shape=x.shape[2:], **self.options(Convolution))
        return [dx, cropped(b, b.Conv(x, grads[0], **self.options(Convolution)), dy.shape)]

    def export(self, g, ins, outs):
        """ONNX Conv over the batch, strides and dilations swapped."""
        return export_grad_weight(self, g, ins, outs)

    @classmethod
    def samples(cls, draw):
        for op, x, w, _ in _conv_samples(Conv):
            xs, ws = _shape(x), _shape(w)
            y = op.infer(TensorType("f64", xs), TensorType("f64", ws))[0]
            yield draw.case(cls(kernel=ws[2:], **op.options(Convolution)), draw(f"f64[{x}]"), draw(str(y)))
        yield draw.case(cls(kernel=(3, 3)), draw("f64[1,2,6,7]"), draw("f64[1,3,2,4]"))
        yield draw.case(cls(kernel=(3, 3), pads=(1, 1, 1, 1)), draw("f32[2,3,5,5]"), draw("f32[2,4,5,5]"))


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in text.split(","))
