"""The gradients of convolution as plain ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .window import full


def export_grad_input(op: Any, g: Any, ins: Sequence[str], outs: Sequence[str]) -> bool:
    """ConvTranspose; its `output_padding` covers the input elements behind the last window."""
    w, dy = ins
    kernel, maps = g.shape(w)[2:], g.shape(dy)[2:]
    n = len(kernel)
    strides, dilations, pads = full(op.strides, n, 1), full(op.dilations, n, 1), full(op.pads, 2 * n, 0)
    fields = {"strides": strides, "dilations": dilations, "group": op.group}
    uncropped = [(maps[i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1 for i in range(n)]
    after = [uncropped[i] - pads[i] - op.shape[i] for i in range(n)]
    extra = [max(-a, 0) for a in after]
    if all(e < max(s, 1) for e, s in zip(extra, strides, strict=True)):
        after = [max(a, 0) for a in after]
        g.node("ConvTranspose", [dy, w], outs, pads=(*pads[:n], *after), output_padding=extra, **fields)
        return True
    whole = g.call("ConvTranspose", dy, w, **fields)
    edges = (0, 0, *(-p for p in pads[:n]), 0, 0, *(-a for a in after))
    g.node("Pad", [whole, g.ints(edges)], outs)
    return True


def export_transposed(op: Any, g: Any, ins: Sequence[str], outs: Sequence[str]) -> bool:
    """ConvTranspose; an `output_padding` not below the stride, which runtimes refuse, is a Pad behind it."""
    n = len(g.shape(ins[1])) - 2
    strides, dilations, pads = full(op.strides, n, 1), full(op.dilations, n, 1), full(op.pads, 2 * n, 0)
    extra = full(op.output_padding, n, 0)
    if all(e < s for e, s in zip(extra, strides, strict=True)):
        return False
    whole = g.call("ConvTranspose", *ins[:2], strides=strides, dilations=dilations, group=op.group)
    after = [e - p for e, p in zip(extra, pads[n:], strict=True)]
    padded = g.call("Pad", whole, g.ints((0, 0, *(-p for p in pads[:n]), 0, 0, *after)))
    if len(ins) > 2 and ins[2]:
        bias = g.call("Reshape", ins[2], g.ints((-1, *(1,) * n)))
        g.node("Add", [padded, bias], outs)
    else:
        g.node("Identity", [padded], outs)
    return True


def export_grad_weight(op: Any, g: Any, ins: Sequence[str], outs: Sequence[str]) -> bool:
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
