"""Attention operators of the domain com.microsoft, taken apart into products and softmax.

Names: batch B, heads N, steps S of queries and T of keys, head size H.  Masks are additive here as there: where they
forbid, `mask_filter_value` is added to the score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.contexts import Imported, ImportedNode, NodeWriter
from ...language.op import imports
from .basic import MS, scaled


def heads(g: NodeWriter, x: str, batch: int, steps: int, count: int) -> str:
    """[B, S, N·H] as [B, N, S, H]."""
    return g.Transpose(g.Reshape(x, g.constant((batch, steps, count, -1))), perm=[0, 2, 1, 3])


def attend(
    node: ImportedNode,
    g: NodeWriter,
    q: str,
    k: str,
    v: str,
    biases: list[str],
    *,
    scale: float,
    softcap: float = 0.0,
    ndim: int = 4,
    sink: str = "",
) -> str:
    """softmax(scale · q kᵀ + biases) v on [B, N, S, H]; a cap c makes scores c · tanh(score / c) first.

    `sink`: one more score for each row, [B, N, S, 1], whose weight goes nowhere.
    """
    perm = [*range(ndim - 2), ndim - 1, ndim - 2]
    scores = g.MatMul(scaled(node, g, q, scale), g.Transpose(k, perm=perm))
    if softcap:
        scores = scaled(node, g, g.Tanh(scaled(node, g, scores, 1 / softcap)), softcap)
    for bias in biases:
        if bias:
            scores = g.Add(scores, bias)
    if not sink:
        return g.MatMul(g.Softmax(scores, axis=-1), v)
    weights = g.Softmax(g.Concat(scores, sink, axis=-1), axis=-1)
    kept = g.Slice(weights, g.constant([0]), g.constant([-1]), g.constant([-1]))
    return g.MatMul(kept, v)


def merged(g: NodeWriter, y: str, batch: int, steps: int) -> str:
    """[B, N, S, H] as [B, S, N·H]."""
    return g.Reshape(g.Transpose(y, perm=[0, 2, 1, 3]), g.constant((batch, steps, -1)))


def forbidden(g: NodeWriter, node: ImportedNode, allowed: str, value: float) -> str:
    """0 where `allowed`, else `value`."""
    dtype = node.need_type(0).numpy
    return g.Where(allowed, g.constant(0, dtype), g.constant(value, dtype))


def ahead(g: NodeWriter, node: ImportedNode, steps: int, total: int, past: int = 0, window: int = -1) -> str:
    """A causal mask [steps, total] of 0 and -inf; the first step follows `past` others.  With `window`, steps that lie
    `window` or more before are masked, too."""
    dtype = node.need_type(0).numpy

    def make() -> str:
        all_of_it = g.ConstantOfShape(g.constant([steps, total]), value=onnx_scalar(-np.inf, dtype))
        after = g.Trilu(all_of_it, g.constant(past + 1), upper=1)
        return g.Add(after, g.Trilu(all_of_it, g.constant(past - window), upper=0)) if window > 0 else after

    return g.shared(f"com.microsoft.causal.{steps}x{total}.{past}.{max(window, 0)}.{np.dtype(dtype).name}", make)


def onnx_scalar(value: float, dtype: Any) -> Any:
    """One number as ONNX has it in attributes."""
    from onnx.numpy_helper import from_array

    return from_array(np.array([value], dtype))


def mask_of(node: ImportedNode, g: NodeWriter, i: int, batch: int, steps: int, total: int, value: float) -> str:
    """Input `i`, a mask of any of the forms that ONNX Runtime has, as a bias [B, 1, 1 or S, T]."""
    t, mask = node.type(i), g.ins[i]
    if t is None:
        return ""
    if t.shape in ((batch,), (2 * batch,)):  # ends (and starts) of what may be seen
        at = g.arange(total, t.numpy)
        parts = g.Reshape(mask, g.constant((t.shape[0] // batch, batch, 1, 1, 1)))
        if t.shape[0] == batch:
            return forbidden(g, node, g.Less(at, g.Squeeze(parts, g.constant([0]))), value)
        end, start = (g.Gather(parts, g.constant(k), axis=0) for k in (0, 1))
        return forbidden(g, node, g.And(g.Less(at, end), g.GreaterOrEqual(at, start)), value)
    if t.shape == (batch, total):
        shape = (batch, 1, 1, total)
    elif t.shape == (batch, steps, total):
        shape = (batch, 1, steps, total)
    elif t.ndim == 4 and t.shape[:2] == (batch, 1) and t.shape[2] == t.shape[3] >= total:
        starts, ends = g.constant([total - steps, 0]), g.constant([total, total])
        mask, shape = g.Slice(mask, starts, ends, g.constant([2, 3])), (batch, 1, steps, total)
    else:
        raise node.fail(f"its mask {t} does not fit batch {batch}, {steps} queries and {total} keys")
    return forbidden(g, node, g.Cast(g.Reshape(mask, g.constant(shape)), to=9), value)


def _shared_past(node: ImportedNode) -> None:
    if node.attributes.get("past_present_share_buffer", 0):
        raise node.fail("writes keys and values into the past's buffer, which is for generation only")


@imports("Attention", domain=MS)
def attention(node: ImportedNode) -> Imported:
    """(x, weights, bias?, mask?, past [2, B, N, P, H]?, attention_bias?): one product gives queries, keys, values."""
    g, attributes = node.body(), node.attributes
    _shared_past(node)
    if attributes.get("do_rotary", 0):
        raise node.fail("rotates queries and keys itself (do_rotary), which is not supported")
    batch, steps, _ = node.need_type(0).shape
    count, width = attributes["num_heads"], node.need_type(1).shape[1]
    sizes = list(attributes.get("qkv_hidden_sizes", ())) or [width // 3] * 3
    product = g.MatMul(g.ins[0], g.ins[1])
    product = g.Add(product, g.ins[2]) if g.ins[2] else product
    parts = g.Split(product, g.constant(sizes), axis=-1, outputs=3)
    q, k, v = (heads(g, x, batch, steps, count) for x in parts)
    past = node.need_type(4).shape[3] if g.ins[4] else 0
    total = past + steps
    if past:
        before = (g.Gather(g.ins[4], g.constant(i), axis=0) for i in (0, 1))
        k, v = (g.Concat(p, x, axis=2) for p, x in zip(before, (k, v), strict=True))
    present = None
    if node.wants(1):
        zero = g.constant([0])
        present = g.Concat(g.Unsqueeze(k, zero), g.Unsqueeze(v, zero), axis=0)
    biases = [mask_of(node, g, 3, batch, steps, total, attributes.get("mask_filter_value", -10000.0)), g.ins[5]]
    if attributes.get("unidirectional", 0):
        biases.append(ahead(g, node, steps, total, past))
    scale = attributes.get("scale") or 1 / math.sqrt(sizes[0] // count)
    y = attend(node, g, q, k, v, biases, scale=scale)
    return g.results(merged(g, y, batch, steps), present)


@imports("MultiHeadAttention", domain=MS)
def multi_head_attention(node: ImportedNode) -> Imported:
    """(query, key?, value?, bias?, key_padding_mask?, attention_bias?, past_key?, past_value?); packed forms too."""
    g, attributes = node.body(), node.attributes
    _shared_past(node)
    count = attributes["num_heads"]
    batch, steps = node.need_type(0).shape[:2]
    q, k, v = _three(node, g, count)
    size = _head_size(node, count)
    if g.ins[6]:
        k, v = g.Concat(g.ins[6], k, axis=2), g.Concat(g.ins[7], v, axis=2)
    past = node.need_type(6).shape[2] if g.ins[6] else 0
    total = _keys(node) + past
    biases = [mask_of(node, g, 4, batch, steps, total, attributes.get("mask_filter_value", -10000.0)), g.ins[5]]
    if attributes.get("unidirectional", 0):
        biases.append(ahead(g, node, steps, total, past))
    y = attend(node, g, q, k, v, biases, scale=attributes.get("scale") or 1 / math.sqrt(size))
    return g.results(merged(g, y, batch, steps), k, v)


def _head_size(node: ImportedNode, count: int) -> int:
    t = node.need_type(0)
    return t.shape[-1] if t.ndim == 5 else t.shape[2] // count


def _keys(node: ImportedNode) -> int:
    """How many keys come with the node itself."""
    key = node.type(1)
    if key is None:
        return node.need_type(0).shape[1]
    return key.shape[2] if key.ndim == 4 else key.shape[1]


def _three(node: ImportedNode, g: NodeWriter, count: int) -> list[str]:
    """Queries, keys and values as [B, N, S, H], the bias added."""
    t, key = node.need_type(0), node.type(1)
    batch, steps = t.shape[:2]
    packed: list[str] = []
    if t.ndim == 5:  # [B, S, N, 3, H]
        packed = [_slot(g, g.ins[0], i) for i in range(3)]
    elif key is not None and key.ndim == 5:  # [B, T, N, 2, H]
        packed = ["", *(_slot(g, g.ins[1], i) for i in range(2))]
    biases = [""] * 3
    if g.ins[3]:
        if t.ndim == 5:
            widths = [t.shape[2] * t.shape[4]] * 3
        else:
            rest = node.need_type(3).shape[0] - t.shape[2]
            value = node.type(2)
            last = value.shape[2] if value is not None and value.ndim == 3 else rest // 2
            widths = [t.shape[2], rest - last, last]
        biases = g.Split(g.ins[3], g.constant(widths), axis=0, outputs=3)
    values = []
    for i in range(3):
        x, split = (packed[i], True) if packed and packed[i] else (g.ins[i], False)
        if split:  # [B, S, N, H]
            x = g.Add(x, g.Reshape(biases[i], g.constant((count, -1)))) if biases[i] else x
            values.append(g.Transpose(x, perm=[0, 2, 1, 3]))
        elif node.need_type(i).ndim == 4:  # the keys of a past, ready
            values.append(x)
        else:
            x = g.Add(x, biases[i]) if biases[i] else x
            values.append(heads(g, x, batch, steps if i == 0 else _keys(node), count))
    return values


def _slot(g: NodeWriter, x: str, i: int) -> str:
    """[B, S, N, i, H] for one i."""
    return g.Gather(x, g.constant(i), axis=3)


# -- rotary embeddings -------------------------------------------------------------------------------------------------


def rotated(
    node: ImportedNode, g: NodeWriter, x: str, shape: Sequence[int], angles: tuple[str, str], interleaved: int
) -> str:
    """x [..., H] with pairs turned; angles: cos and sin, broadcast to [..., R/2].  What follows R passes through."""
    cos, sin, size = *angles, shape[-1]
    width = 2 * node.need_type(2 if node.op_type == "RotaryEmbedding" else 7).shape[1]
    if width > size:
        raise node.fail(f"its caches turn {width} elements of heads of {size}")
    rest = ""
    if width < size:
        x, rest = g.Split(x, g.constant([width, size - width]), axis=-1, outputs=2)
    if interleaved:
        pairs = g.Reshape(x, g.constant((*shape[:-1], width // 2, 2)))
        a, b = (g.Gather(pairs, g.constant(i), axis=-1) for i in (0, 1))
    else:
        a, b = g.Split(x, g.constant([width // 2] * 2), axis=-1, outputs=2)
    first, second = g.Sub(g.Mul(a, cos), g.Mul(b, sin)), g.Add(g.Mul(a, sin), g.Mul(b, cos))
    if interleaved:
        end = g.constant([-1])
        joined = g.Concat(g.Unsqueeze(first, end), g.Unsqueeze(second, end), axis=-1)
        y = g.Reshape(joined, g.constant((*shape[:-1], width)))
    else:
        y = g.Concat(first, second, axis=-1)
    return g.Concat(y, rest, axis=-1) if rest else y


def angles_at(g: NodeWriter, caches: tuple[str, str], positions: str, axis: int) -> tuple[str, str]:
    """cos and sin at positions [B, S], with a dimension for the heads at `axis`."""
    cos, sin = (g.Unsqueeze(g.Gather(c, positions), g.constant([axis])) for c in caches)
    return cos, sin


@imports("RotaryEmbedding", domain=MS)
def rotary_embedding(node: ImportedNode) -> Imported:
    """(x [B, S, N·H] or [B, N, S, H], position_ids [B, S] or [1], cos and sin caches [M, R/2], which do not train)."""
    g, attributes, t = node.body(), node.attributes, node.need_type(0)
    node.buffer(2)
    node.buffer(3)
    flat = t.ndim == 3
    batch, steps = t.shape[0], t.shape[1 if flat else 2]
    places = g.ins[1]
    if node.need_type(1).size == 1 and batch * steps != 1:
        places = g.Add(g.Reshape(places, g.constant([1, 1])), g.arange(steps))
    x, shape = g.ins[0], t.shape
    if flat:
        size = t.shape[2] // attributes["num_heads"] if attributes.get("num_heads") else 2 * node.need_type(2).shape[1]
        shape = (batch, steps, t.shape[2] // size, size)
        x = g.Reshape(x, g.constant(shape))
    angles = angles_at(g, (g.ins[2], g.ins[3]), places, 2 if flat else 1)
    y = rotated(node, g, x, shape, angles, attributes.get("interleaved", 0))
    return g.results(g.Reshape(y, g.constant(t.shape)) if flat else y)


@imports("GroupQueryAttention", domain=MS)
def group_query_attention(node: ImportedNode) -> Imported:
    """Causal attention in which several heads share keys and values; the form without a past, as one trains it.

    Sequences of a batch may be shorter than the longest (`seqlens_k`): they are padded at their ends, where causal
    attention never looks; what is computed there means nothing.
    """
    g, attributes, t = node.body(), node.attributes, node.need_type(0)
    past = node.type(3)
    if past is not None and past.size:
        raise node.fail("continues a past (past_key), which is for generation; train it without")
    batch, steps, width = t.shape
    count, shared = attributes["num_heads"], attributes["kv_num_heads"]
    q, k, v = g.ins[:3]
    if not k:
        size = width // (count + 2 * shared)
        sizes = [count * size, shared * size, shared * size]
        q, k, v = g.Split(q, g.constant(sizes), axis=-1, outputs=3)
    else:
        size = width // count
    q, k, v = (heads(g, x, batch, steps, n) for x, n in ((q, count), (k, shared), (v, shared)))
    if attributes.get("do_rotary", 0):
        node.buffer(7)
        node.buffer(8)
        places = g.ins[9] or g.arange(steps)
        angles = angles_at(g, (g.ins[7], g.ins[8]), places, 1)
        turn = attributes.get("rotary_interleaved", 0)
        q = rotated(node, g, q, (batch, count, steps, size), angles, turn)
        k = rotated(node, g, k, (batch, shared, steps, size), angles, turn)
    biases = [ahead(g, node, steps, steps, 0, attributes.get("local_window_size", -1)), g.ins[10]]
    y = _grouped(node, g, (q, k, v), biases, (batch, count, shared, steps, size))
    return g.results(merged(g, y, batch, steps), k, v)


def _grouped(
    node: ImportedNode, g: NodeWriter, qkv: tuple[str, str, str], biases: list[str], sizes: tuple[int, ...]
) -> str:
    """Attention of N heads on N' keys and values: [B, N, S, H]."""
    batch, count, shared, steps, size = sizes
    attributes = node.attributes
    options = {"scale": attributes.get("scale") or 1 / math.sqrt(size), "softcap": attributes.get("softcap", 0.0)}
    q, k, v = qkv
    group = count // shared  # heads that share keys and values: products repeat these, nothing is copied
    q = g.Reshape(q, g.constant((batch, shared, group, steps, size)))
    k, v = (g.Reshape(x, g.constant((batch, shared, 1, steps, size))) for x in (k, v))
    t = node.type(10)
    if t is not None:
        apart = (1, 1) if t.shape[1] == 1 else (shared, group)
        biases = [biases[0], g.Reshape(biases[1], g.constant((t.shape[0], *apart, *t.shape[2:])))]
    sink = ""
    if node.type(11) is not None or attributes.get("smooth_softmax", 0) == 1:
        each = (
            g.Reshape(g.ins[11], g.constant((1, shared, group, 1, 1)))
            if g.ins[11]
            else g.constant(0, node.need_type(0).numpy)
        )
        sink = g.Expand(each, g.constant((batch, shared, group, steps, 1)))
    y = attend(node, g, q, k, v, biases, ndim=5, sink=sink, **options)
    return g.Reshape(y, g.constant((batch, count, steps, size)))
