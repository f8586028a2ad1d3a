"""Operators of the domain com.microsoft: activations, products, normalisations, embeddings, dropout.

ONNX Runtime's optimizer and PyTorch-side exporters write them into files.  Each becomes plain ONNX nodes with the
same mathematics (as documented in ONNX Runtime's ContribOperators.md), which are imported like any others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...language.contexts import Imported, ImportedNode, NodeWriter
from ...language.op import imports

MS = "com.microsoft"
#: (operator, attributes that it takes): activations that fused nodes name
_ACTIVATIONS = {
    "Relu": (), "Tanh": (), "Sigmoid": (), "Softplus": (), "Softsign": (), "LeakyRelu": ("alpha",), "Elu": ("alpha",),
    "Selu": ("alpha", "gamma"), "HardSigmoid": ("alpha", "beta"), "Softmax": ("axis",), "Gelu": (), "HardSwish": (),
    "ThresholdedRelu": ("alpha",),
}  # fmt: skip


def activate(node: ImportedNode, g: NodeWriter, x: str, name: str, values: Any) -> str:
    """An activation by name; `values`: its parameters in order, or by name.  An empty name: none."""
    if not name:
        return x
    if name == "Clip":
        low, high = values
        return g.Clip(x, g.constant(low, node.need_type(0).numpy), g.constant(high, node.need_type(0).numpy))
    if name in ("QuickGelu", "FastGelu"):
        return _gelus(node, g, x, name, 1.702)
    if name not in _ACTIVATIONS:
        raise node.fail(f"its activation '{name}' is not known")
    wanted = _ACTIVATIONS[name]
    parameters = values if isinstance(values, dict) else dict(zip(wanted, values, strict=False))
    return getattr(g, name)(x, **{k: parameters[k] for k in wanted if parameters.get(k) is not None})


def scaled(node: ImportedNode, g: NodeWriter, x: str, factor: float) -> str:
    """x · factor."""
    return x if factor == 1 else g.Mul(x, g.constant(factor, node.need_type(0).numpy))


# -- activations -------------------------------------------------------------------------------------------------------


def _gelus(node: ImportedNode, g: NodeWriter, x: str, kind: str, alpha: float) -> str:
    if kind == "QuickGelu":
        return g.Mul(x, g.Sigmoid(scaled(node, g, x, alpha)))
    return g.Gelu(x, approximate="tanh" if kind == "FastGelu" else "none")


@imports("Gelu", "FastGelu", "QuickGelu", "BiasGelu", domain=MS)
def gelu(node: ImportedNode) -> Imported:
    """Gelu of x or of x + bias; FastGelu with tanh; QuickGelu: x · sigmoid(alpha x)."""
    g = node.body()
    x = g.Add(g.ins[0], g.ins[1]) if g.ins[1] else g.ins[0]
    return g.results(_gelus(node, g, x, node.op_type, node.attributes.get("alpha", 1.702)))


@imports("BiasSplitGelu", domain=MS)
def bias_split_gelu(node: ImportedNode) -> Imported:
    """The first half of x + bias times Gelu of the second."""
    g = node.body()
    first, second = g.Split(g.Add(*g.ins[:2]), axis=-1, num_outputs=2, outputs=2)
    return g.results(g.Mul(first, g.Gelu(second)))


@imports("BiasSoftmax", domain=MS)
def bias_softmax(node: ImportedNode) -> Imported:
    """softmax(x + bias) along all dimensions from `axis` on; the bias is repeated within, or over, the first ones."""
    g, t, bias = node.body(), node.need_type(0), node.need_type(1)
    axis = node.attributes.get("axis", 1) % t.ndim
    shape = bias.shape
    if node.attributes.get("is_inner_broadcast", 1) and bias.ndim < t.ndim:
        shape = (*shape[:-1], *(1,) * (t.ndim - bias.ndim), *shape[-1:])
    x = g.Add(g.ins[0], g.Reshape(g.ins[1], g.constant(shape)))
    if axis == t.ndim - 1:
        return g.results(g.Softmax(x, axis=-1))
    flat = g.Softmax(g.Reshape(x, g.constant((*t.shape[:axis], -1))), axis=-1)
    return g.results(g.Reshape(flat, g.constant(t.shape)))


@imports("GatedAdd", "BiasAdd", domain=MS)
def bias_add(node: ImportedNode) -> Imported:
    """BiasAdd: x + bias + skip."""
    g = node.body()
    if node.op_type == "GatedAdd":
        return g.results(g.Add(g.ins[0], g.Mul(g.ins[1], g.ins[2])))
    return g.results(g.Add(g.Add(g.ins[0], g.ins[1]), g.ins[2]))


# -- products ----------------------------------------------------------------------------------------------------------


@imports("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", domain=MS)
def fused_matmul(node: ImportedNode) -> Imported:
    """alpha · A B, each transposed where asked for; `transBatch`: its first dimension goes before the last."""
    g, attributes = node.body(), node.attributes
    names = []
    for i, side in enumerate("AB"):
        n = node.need_type(i).ndim
        perm = list(range(n))
        if n > 2 and attributes.get(f"transBatch{side}", 0):
            perm = [*perm[1:-1], 0, perm[-1]]
        if n > 1 and attributes.get(f"trans{side}", 0):
            perm[-2:] = perm[:-3:-1]
        names.append(g.Transpose(g.ins[i], perm=perm) if perm != list(range(n)) else g.ins[i])
    y = scaled(node, g, g.MatMul(*names), attributes.get("alpha", 1.0))
    values = {k: attributes.get(f"activation_{k}") for k in ("alpha", "beta", "gamma", "axis")}
    return g.results(activate(node, g, y, attributes.get("activation", ""), values))


@imports("FusedGemm", domain=MS)
def fused_gemm(node: ImportedNode) -> Imported:
    """Gemm and an activation."""
    g, attributes = node.body(), node.attributes
    y = g.Gemm(*g.ins[:3], **{k: attributes[k] for k in ("alpha", "beta", "transA", "transB") if k in attributes})
    values = {k: attributes.get(f"activation_{k}") for k in ("alpha", "beta", "gamma")}
    return g.results(activate(node, g, y, attributes.get("activation", ""), values))


@imports("GemmFastGelu", domain=MS)
def gemm_fast_gelu(node: ImportedNode) -> Imported:
    """FastGelu(x w + bias)."""
    g = node.body()
    y = g.MatMul(*g.ins[:2])
    return g.results(g.Gelu(g.Add(y, g.ins[2]) if g.ins[2] else y, approximate="tanh"))


@imports("CDist", domain=MS)
def cdist(node: ImportedNode) -> Imported:
    """Distances between the rows of A and those of B: sqeuclidean or euclidean."""
    g = node.body()
    one, zero = g.constant([1]), g.constant([0])
    apart = g.Sub(g.Unsqueeze(g.ins[0], one), g.Unsqueeze(g.ins[1], zero))
    square = g.ReduceSum(g.Mul(apart, apart), g.constant([2]), keepdims=0)
    return g.results(g.Sqrt(square) if node.attributes.get("metric", "sqeuclidean") == "euclidean" else square)


# -- normalisations ----------------------------------------------------------------------------------------------------


@imports("LayerNormalization", domain=MS)
def layer_normalization(node: ImportedNode) -> Imported:
    """ONNX's LayerNormalization (opset 17), which optimised files of older opsets hold, too."""
    g, attributes = node.body(), node.attributes
    count = max([i + 1 for i in range(3) if node.wants(i)], default=1)
    results = g.LayerNormalization(*g.ins[:3], axis=attributes.get("axis", -1), epsilon=attributes.get("epsilon", 1e-5),
                                outputs=count)  # fmt: skip
    return g.results(*([results] if count == 1 else results))


def rms(g: NodeWriter, node: ImportedNode, x: str, scale: str, epsilon: float, axis: int = -1) -> tuple[str, str]:
    """x · scale / √(mean x² + epsilon), and 1 / √..."""
    y, inverse = _unscaled(g, node, x, epsilon, axis)
    return g.Mul(y, scale), inverse


def _unscaled(g: NodeWriter, node: ImportedNode, x: str, epsilon: float, axis: int) -> tuple[str, str]:
    t = node.need_type(0)
    axes = g.constant(list(range(axis % t.ndim, t.ndim)))
    mean = g.ReduceMean(g.Mul(x, x), axes, keepdims=1)
    inverse = g.Reciprocal(g.Sqrt(g.Add(mean, g.constant(epsilon, t.numpy))))
    return g.Mul(x, inverse), inverse


@imports("SimplifiedLayerNormalization", domain=MS)
@imports("SimplifiedLayerNormalization")
def simplified(node: ImportedNode) -> Imported:
    """Root mean square normalisation (Zhang and Sennrich 2019)."""
    g, attributes = node.body(), node.attributes
    axis, epsilon = attributes.get("axis", -1), attributes.get("epsilon", 1e-5)
    if not node.wants(1):
        return g.results(g.RMSNormalization(*g.ins[:2], axis=axis, epsilon=epsilon))
    return g.results(*rms(g, node, g.ins[0], g.ins[1], epsilon, axis))


@imports("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MS)
def skip_normalization(node: ImportedNode) -> Imported:
    """The normalisation of x + skip + bias; outputs: that, mean, 1 / deviation, the sum."""
    g, epsilon = node.body(), node.attributes.get("epsilon", 1e-12)
    x, skip, gamma = g.ins[:3]
    simple = node.op_type == "SkipSimplifiedLayerNormalization"
    beta, bias = ("", g.ins[3]) if simple else g.ins[3:5]
    total = g.Add(x, skip)
    if bias:
        total = g.Add(total, bias)
    if simple:
        if node.wants(2):
            y, inverse = rms(g, node, total, gamma, epsilon)
            return g.results(y, None, inverse, total)
        return g.results(g.RMSNormalization(total, gamma, axis=-1, epsilon=epsilon), None, None, total)
    y, mean, inverse = g.LayerNormalization(total, gamma, beta, axis=-1, epsilon=epsilon, outputs=3)
    return g.results(y, mean, inverse, total)


@imports("GroupNorm", "SkipGroupNorm", domain=MS)
def group_norm(node: ImportedNode) -> Imported:
    """Group normalisation, channels last unless said otherwise, of x or x + skip + bias; then SiLU where asked for."""
    g, attributes, t = node.body(), node.attributes, node.need_type(0)
    x, last = g.ins[0], attributes.get("channels_last", 1)
    if node.op_type == "SkipGroupNorm":
        skip = g.ins[3]
        if node.need_type(3).ndim == 2:
            shape = node.need_type(3).shape
            skip = g.Reshape(skip, g.constant((shape[0], 1, 1, shape[1]) if last else (*shape, 1, 1)))
        x = g.Add(x, skip)
        if g.ins[4]:
            x = g.Add(x, g.ins[4] if last else g.Reshape(g.ins[4], g.constant((-1, 1, 1))))
    first = g.Transpose(x, perm=[0, t.ndim - 1, *range(1, t.ndim - 1)]) if last else x
    if attributes.get("groups", 0) < 1 or t.shape[-1 if last else 1] % attributes["groups"]:
        raise node.fail(f"its channels do not divide into {attributes.get('groups', 0)} groups")
    y = _grouped(g, node, first, attributes["groups"], attributes.get("epsilon", 1e-5))
    if attributes.get("activation", 0):
        y = g.Mul(y, g.Sigmoid(y))
    y = g.Transpose(y, perm=[0, *range(2, t.ndim), 1]) if last else y
    return g.results(y, x)


def _grouped(g: NodeWriter, node: ImportedNode, x: str, groups: int, epsilon: float) -> str:
    """x [N, C, ...] normalised by groups, times gamma [C] plus beta [C], whatever the model's opset."""
    t = node.need_type(0)
    shape = (t.shape[0], t.shape[-1], *t.shape[1:-1]) if node.attributes.get("channels_last", 1) else t.shape
    one, zero = (g.constant(np.full(groups, v), t.numpy) for v in (1, 0))
    flat = g.InstanceNormalization(g.Reshape(x, g.constant((shape[0], groups, -1))), one, zero, epsilon=epsilon)
    gamma, beta = (g.Reshape(n, g.constant((-1, *(1,) * (len(shape) - 2)))) for n in g.ins[1:3])
    return g.Add(g.Mul(g.Reshape(flat, g.constant(shape)), gamma), beta)


# -- embeddings --------------------------------------------------------------------------------------------------------


@imports("EmbedLayerNormalization", domain=MS)
def embed_layer_normalization(node: ImportedNode) -> Imported:
    """The normalised sum of word, position and segment embeddings; outputs: that, the number of unmasked words, the
    sum."""
    g, (batch, steps) = node.body(), node.need_type(0).shape
    ids, segments, words, places, kinds, gamma, beta, mask, positions = g.ins[:9]
    total = g.Gather(words, ids)
    if positions:
        total = g.Add(total, g.Gather(places, positions))
    else:
        total = g.Add(total, g.Gather(places, g.arange(steps)))
    if segments and kinds:
        total = g.Add(total, g.Gather(kinds, segments))
    y = g.LayerNormalization(total, gamma, beta, axis=-1, epsilon=node.attributes.get("epsilon", 1e-12))
    count = None
    if mask:
        count = g.Cast(g.ReduceSum(mask, g.constant([1]), keepdims=0), to=6)
    elif node.wants(1):
        count = g.constant(np.zeros(batch), np.int32)
    return g.results(y, count, total)


@imports("TorchEmbedding", domain=MS)
def torch_embedding(node: ImportedNode) -> Imported:
    """Rows of a table; one row, `padding_idx`, is read and not trained."""
    b, (table, ids) = node.builder, (node.need(0), node.need(1))
    rows = b.Gather(table, ids)
    if node.type(3) is not None and node.need_constant(3, "scale_grad_by_freq").any():
        raise node.fail("gradients that are divided by how often a row is read (scale_grad_by_freq) are not supported")
    padding = -1 if node.type(2) is None else int(node.need_constant(2, "padding_idx").reshape(()))
    if padding < 0:  # PyTorch's way to say that there is none
        return rows
    same = b.Equal(ids, b.constant(padding, ids))
    return b.Where(b.Reshape(same, shape=(*ids.shape, 1)), b.Detach(rows), rows)


# -- dropout -----------------------------------------------------------------------------------------------------------


@imports("BiasDropout", "BitmaskDropout", "BitmaskBiasDropout", domain=MS)
def bias_dropout(node: ImportedNode) -> Imported:
    """dropout(x + bias) + residual.  A mask of bits is not made."""
    g = node.body()
    plain = node.op_type == "BitmaskDropout"
    ratio, training = g.ins[1:3] if plain else g.ins[3:5]
    x = g.ins[0] if plain else g.Add(*g.ins[:2])
    wanted = node.wants(1) and node.op_type == "BiasDropout"
    results = g.Dropout(x, ratio, training, outputs=2 if wanted else 1)
    y, mask = results if wanted else (results, None)
    if not plain and g.ins[2]:
        y = g.Add(y, g.ins[2])
    return g.results(y, mask)


# -- the same as in ONNX -----------------------------------------------------------------------------------------------


@imports("Trilu", "GatherND", "Pad", "Range", "GridSample", domain=MS)
def as_in_onnx(node: ImportedNode) -> Imported:
    """Operators that ONNX has taken over."""
    g, attributes = node.body(), dict(node.attributes)
    count = max(i for i in range(len(g.ins)) if i == 0 or g.ins[i]) + 1
    ins = g.ins[:count]
    if node.op_type == "Range" and not ins[2:]:
        ins = [*ins, g.constant(1, node.need_type(0).numpy)]
    if node.op_type == "GridSample" and attributes.get("mode") in ("bilinear", "bicubic"):
        attributes["mode"] = {"bilinear": "linear", "bicubic": "cubic"}[attributes["mode"]]
    return g.results(getattr(g, node.op_type)(*ins, **attributes))


@imports("ExpandDims", domain=MS)
def expand_dims(node: ImportedNode) -> Imported:
    """Unsqueeze with one axis."""
    g = node.body()
    axis = int(node.need_constant(1, "axis").reshape(()))
    return g.results(g.Unsqueeze(g.ins[0], g.constant([axis])))
