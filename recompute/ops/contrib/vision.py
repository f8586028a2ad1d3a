"""Operators of the domain com.microsoft on images: fused and channels-last convolutions and pools."""

from __future__ import annotations

from ...language.contexts import Imported, ImportedNode, NodeWriter
from ...language.op import imports
from .basic import MS, activate

_WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides", "ceil_mode", "count_include_pad")


def _first(g: NodeWriter, x: str, ndim: int) -> str:
    """Channels from the last axis to the second."""
    return g.Transpose(x, perm=[0, ndim - 1, *range(1, ndim - 1)])


def _last(g: NodeWriter, x: str, ndim: int) -> str:
    """Channels from the second axis to the last."""
    return g.Transpose(x, perm=[0, *range(2, ndim), 1])


@imports("FusedConv", "NhwcConv", "NhwcFusedConv", domain=MS)
def fused_conv(node: ImportedNode) -> Imported:
    """activation(Conv(x, w, b) + z); the weights stand as in ONNX, also where channels come last."""
    g, attributes, n = node.body(), node.attributes, node.need_type(0).ndim
    nhwc = node.op_type.startswith("Nhwc")
    x = _first(g, g.ins[0], n) if nhwc else g.ins[0]
    y = g.Conv(x, *g.ins[1:3], **{k: attributes[k] for k in _WINDOW if k in attributes})
    y = _last(g, y, n) if nhwc else y
    if g.ins[3]:
        y = g.Add(y, g.ins[3])
    return g.results(activate(node, g, y, attributes.get("activation", ""), attributes.get("activation_params", ())))


@imports("NhwcMaxPool", domain=MS)
def nhwc_max_pool(node: ImportedNode) -> Imported:
    """MaxPool, channels last."""
    g, attributes, n = node.body(), node.attributes, node.need_type(0).ndim
    y = g.MaxPool(_first(g, g.ins[0], n), **{k: attributes[k] for k in _WINDOW if k in attributes})
    return g.results(_last(g, y, n))


@imports("ConvTransposeWithDynamicPads", domain=MS)
def conv_transpose(node: ImportedNode) -> Imported:
    """ConvTranspose with pads as an input, which must be known."""
    g, attributes = node.body(), node.attributes
    kept = {k: attributes[k] for k in (*_WINDOW, "output_padding") if k in attributes}
    if g.ins[2]:
        kept["pads"] = node.need_constant(2, "pads").tolist()
    return g.results(g.ConvTranspose(g.ins[0], g.ins[1], g.ins[3], **kept))


@imports("Conv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "Upsample", "ReorderInput",
         "ReorderOutput", domain="com.microsoft.nchwc")  # fmt: skip
def blocked(node: ImportedNode) -> Imported:
    """Never: the file is for one kind of processor."""
    raise node.fail(
        "is in the blocked layout that ONNX Runtime makes for one processor; save the model with its basic or extended "
        "optimizations, or take the original"
    )
