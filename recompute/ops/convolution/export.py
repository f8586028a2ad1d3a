"""The gradients of convolution as plain ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...language.contexts import FunctionWriter
from ..window import Window, full


def export_grad_input(op: Any, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
    """ConvTranspose from the weight and dy."""
    w, dy = ins
    window = op.window(op.shape, g.shape(dy)[2:], g.shape(w)[2:])
    transposed(g, window, dy, w, op.group, outs)
    return True


def transposed(g: Any, window: Window, dy: str, w: str, group: int, outs: Sequence[str]) -> None:
    """ConvTranspose; its `output_padding` covers the input elements behind the last window, else Pad does."""
    n = len(window.kernel)
    strides, dilations, begin = window.strides, window.dilations, window.begin
    fields = {"strides": strides, "dilations": dilations, "group": group}
    after = [
        (window.out[i] - 1) * strides[i] + (window.kernel[i] - 1) * dilations[i] + 1 - begin[i] - window.inp[i]
        for i in range(n)
    ]
    extra = [max(-a, 0) for a in after]
    if all(e < s for e, s in zip(extra, strides, strict=True)):
        pads = (*begin, *(max(a, 0) for a in after))
        g.node("ConvTranspose", [dy, w], outs, pads=pads, output_padding=extra, **fields)
        return
    whole = g.call("ConvTranspose", dy, w, **fields)
    edges = (0, 0, *(-p for p in begin), 0, 0, *(-a for a in after))
    g.node("Pad", [whole, g.ints(edges)], outs)


def export_transposed(op: Any, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
    """ConvTranspose; an `output_padding` not below the stride, which runtimes refuse, is a Pad behind it."""
    n = len(g.shape(ins[1])) - 2
    strides, extra = full(op.strides, n, 1), full(op.output_padding, n, 0)
    if all(e < s for e, s in zip(extra, strides, strict=True)):
        return False
    x, w = (g.type(name) for name in ins[:2])
    window = op.window(op.infer(x, w)[0].shape[2:], x.shape[2:], w.shape[2:])
    if len(ins) > 2 and ins[2]:
        padded = g.fresh("padded")
        transposed(g, window, ins[0], ins[1], op.group, [padded])
        bias = g.call("Reshape", ins[2], g.ints((-1, *(1,) * n)))
        g.node("Add", [padded, bias], outs)
    else:
        transposed(g, window, ins[0], ins[1], op.group, outs)
    return True


def export_grad_weight(op: Any, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
    """Conv with the batch as channels: dw[m, c] is the correlation of x[:, c] and dy[:, m].

    Groups: input channels become [c, group · batch], so that one grouped Conv pairs each group with its own maps.
    """
    x, dy = ins
    batch, channels, *sizes = g.shape(x)
    n, c = len(sizes), channels // op.group
    if 0 in (*g.shape(x), *g.shape(dy)):  # runtimes refuse a convolution without channels
        g.node("Expand", [g.zero(x), g.ints((g.shape(dy)[1], c, *op.kernel))], outs)
        return True
    strides, dilations = full(op.strides, n, 1), full(op.dilations, n, 1)
    spatial = list(range(2, 2 + n))
    split = g.call("Reshape", x, g.ints((batch, op.group, c, *sizes)))
    turned = g.call("Transpose", split, perm=[2, 1, 0, *(s + 1 for s in spatial)])
    image = g.call("Reshape", turned, g.ints((c, op.group * batch, *sizes)))
    weight = g.call("Transpose", dy, perm=[1, 0, *spatial])
    correlated = g.call(
        "Conv", image, weight, strides=dilations, dilations=strides, pads=full(op.pads, 2 * n, 0), group=op.group
    )  # [c, maps, ≥ kernel...]
    first = g.call("Slice", correlated, g.ints((0,) * n), g.ints(op.kernel), g.ints(spatial))
    g.node("Transpose", [first], outs, perm=[1, 0, *spatial])
    return True
