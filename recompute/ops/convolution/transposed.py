"""Transposed convolution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..channels_last import channels_last
from ..window import compact, full, window_attributes
from . import numerics as kernels
from .axes import convolution
from .conv import Convolution, bias_gradient, cropped
from .export import export_transposed


@channels_last(inputs=(0,), outputs=(0,))
class ConvTranspose(Convolution, onnx=True):
    """Transposed convolution (ONNX ConvTranspose): what the gradient of Conv by its input computes, plus a bias.

    x: [n, group · c, ...], w: [group · c, m, ...], bias: [group · m].  Sizes: (size - 1) · stride + output_padding +
    (kernel - 1) · dilation + 1 - pads.
    """

    linear = ((0, 2), (1, 2))
    output_padding: tuple[int, ...] = ()
    weights = (1, 2)

    def infer(self, x, w, bias=None):
        """[n, group · m, positions...]."""
        self.check(x, w)
        if x.shape[1] != w.shape[0] or len(self.output_padding) not in (0, x.ndim - 2):
            raise self.fail(f"{x.shape[1]} channels for a weight of {w.shape[0]}", x, w)
        if bias is not None and (bias.shape != (w.shape[1] * self.group,) or bias.dtype != x.dtype):
            raise self.fail("the bias must have one element an output channel", x, w, bias)
        sizes = transposed_sizes(x.shape[2:], w.shape[2:], self.strides, self.pads, self.dilations, self.output_padding)
        if min(sizes) < 0:
            raise self.fail("pads take away more than there is", x, w)
        return (x.with_shape((x.shape[0], w.shape[1] * self.group, *sizes)),)

    def axis_factors(self, ins, outs):
        """Images, groups, output channels of a group; its input channels where there is no bias."""
        x, w = ins[:2]
        sizes = x.shape[0], self.group, w.shape[0] // self.group, w.shape[1]
        return convolution(*sizes, bias=len(ins) > 2 and ins[2] is not None, forward=False)

    def shapes(self, ins, outs):
        return self.geometry(outs[0].shape, ins[1].shape, ins[0].shape)

    def buffers(self, geo):
        return kernels.grad_input_scratch(geo)

    def numerics(self, geo, ins, out, scratch):
        """The kernel of the input's gradient, then the bias."""
        kernels.grad_input(geo, ins[1], ins[0], out, scratch)
        if len(ins) > 2 and ins[2] is not None:
            np.add(out, ins[2].reshape(-1, *(1 for _ in geo.window.out)), out=out)

    def gradient(self, b, ins, outs, grads):
        """A convolution by the input, a weight gradient by the weight."""
        x, w = ins[:2]
        dx = cropped(b, b.Conv(grads[0], w, **self.options(Convolution)), x.shape)
        dw = b.ConvGradWeight(grads[0], x, kernel=w.shape[2:], **self.options(Convolution))
        return [dx, dw, bias_gradient(b, grads[0]) if len(ins) > 2 and ins[2] is not None else None]

    def export(self, g, ins, outs):
        """ONNX ConvTranspose; its own form where `output_padding` reaches the stride."""
        return export_transposed(self, g, ins, outs)

    @classmethod
    def from_onnx(cls, node):
        """`output_shape` and `auto_pad` become pads."""
        x, w = node.type(0), node.type(1)
        n = x.ndim - 2
        fields = window_attributes(node, (0,) * n, w.shape[2:])
        extra = full(node.attributes.get("output_padding", ()), n, 0)
        auto = node.attributes.get("auto_pad", "NOTSET")
        strides = full(fields["strides"], n, 1)
        wanted = node.attributes.get("output_shape", ())[-n:]
        if not wanted and auto in ("SAME_UPPER", "SAME_LOWER"):
            wanted = [d * s for d, s in zip(x.shape[2:], strides, strict=True)]
        if wanted:
            whole = transposed_sizes(x.shape[2:], w.shape[2:], strides, (), fields["dilations"], extra)
            total = [have - want for have, want in zip(whole, wanted, strict=True)]
            extra = tuple(e - min(t, 0) for e, t in zip(extra, total, strict=True))
            total = [max(t, 0) for t in total]
            less = [t // 2 for t in total]
            more = [t - s for t, s in zip(total, less, strict=True)]
            pads = (*less, *more) if auto == "SAME_UPPER" else (*more, *less)
            fields = compact(strides, pads, full(fields["dilations"], n, 1))
        extra = extra if any(extra) else ()
        op = cls(**fields, group=node.attributes.get("group", 1), output_padding=extra)
        return node.emit(op, *node.inputs)

    @classmethod
    def samples(cls, draw):
        """Strides, pads, output padding, groups, dilations, 1 and 3 axes, depthwise."""
        for op, x, w, bias in (
            (cls(strides=(2, 2), pads=(1, 1, 1, 1), output_padding=(1, 0)), "2,3,3,2", "3,2,3,3", "2"),
            (cls(group=2, dilations=(2, 1)), "1,4,3,3", "4,2,2,2", "4"),
            (cls(group=3, strides=(2, 2)), "1,3,2,3", "3,1,2,2", "3"),
            (cls(strides=(2,), dilations=(3,), output_padding=(2,)), "2,2,3", "2,3,2", None),
            (cls(dilations=(3,), pads=(1, 2), output_padding=(2,)), "2,2,3", "2,3,2", "3"),
            (cls(strides=(1, 2, 1)), "1,2,2,2,2", "2,2,2,1,2", None),
        ):
            inputs = [draw(f"f64[{x}]"), draw(f"f64[{w}]")] + ([draw(f"f64[{bias}]")] if bias else [])
            yield draw.case(op, *inputs)
        yield draw.case(cls(), draw("f32[2,3,3,3]"), draw("f32[3,2,3,3]"))


def transposed_sizes(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    extra: Sequence[int],
) -> list[int]:
    """Spatial sizes of a transposed convolution's output."""
    n = len(kernel)
    pads, extra = full(pads, 2 * n, 0), full(extra, n, 0)
    strides, dilations = full(strides, n, 1), full(dilations, n, 1)
    return [
        (sizes[i] - 1) * strides[i] + extra[i] + (kernel[i] - 1) * dilations[i] + 1 - pads[i] - pads[n + i]
        for i in range(n)
    ]
