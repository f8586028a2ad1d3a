"""Attention (ONNX opset 23) as attention in tiles; what is rare is left to ONNX's function body.

What differs from that body: no scores are kept, no copies of keys and values for shared heads are made, there is one
scaling, and causal masks and windows are attributes and no tensors.
"""

from __future__ import annotations

import math
from typing import Any

from ...language.op import Imported, ImportedNode, OperatorBuilder, imports
from ...language.types import Value, dtype_to_onnx
from ..shape.reshape import reshape
from .tiled import TiledAttention

_FLOAT = 1


@imports("Attention")
def attention(node: ImportedNode) -> Imported:
    """softmax(cap(scale · q kᵀ) + bias) v, with a window from `is_causal`; None where the body is to be used."""
    q_type, mask_type = node.need_type(0), node.type(3)
    attributes = node.attributes
    past = node.type(4)
    precision = attributes.get("softmax_precision") or dtype_to_onnx(q_type.dtype)
    precisions = {dtype_to_onnx(q_type.dtype), *((_FLOAT,) if q_type.dtype in ("f16", "bf16") else ())}
    rare = [node.wants(3), node.type(6) is not None, precision not in precisions, (past is None) != (
        node.type(5) is None)]  # fmt: skip
    if any(rare):
        return None
    b = node.builder
    q, k, v = (_heads(b, node.need(i), attributes.get("kv_num_heads" if i else "q_num_heads"), node) for i in range(3))
    if past is not None:
        k, v = (b.Concat(node.input(i), new, axis=2) for i, new in ((4, k), (5, v)))
    steps, total = q.shape[2], k.shape[2]
    if mask_type is not None and (mask_type.ndim < 2 or mask_type.shape[-2:] != (steps, total)):
        return None
    mask = None if mask_type is None else node.input(3)
    batch, heads, _, size = q.shape
    groups, keys, values = heads // k.shape[1], k, v
    if groups > 1:  # several heads share keys and values
        q = b.Reshape(q, shape=(batch, k.shape[1], groups, steps, size))
        keys, values = (b.Reshape(x, shape=(*x.shape[:2], 1, *x.shape[2:])) for x in (k, v))
    bias = [] if mask is None else [_bias(b, mask, q.dtype, groups)]
    first, last = _window(attributes, past.shape[2] if past is not None else 0)
    scale = attributes.get("scale") or 1.0 / math.sqrt(size)
    op = TiledAttention(scale=scale, first=first, last=last, cap=attributes.get("softcap", 0.0))
    y = b.emit(op, q, keys, values, *bias, want=1)
    y = reshape(b, y, (batch, heads, steps, y.shape[-1]))
    if q_type.ndim == 3:
        y = b.Reshape(b.Transpose(y, perm=(0, 2, 1, 3)), shape=(batch, steps, heads * y.shape[3]))
    return tuple([y, k, v][: len(node.outputs)])


def _heads(b: OperatorBuilder, x: Value, heads: int | None, node: ImportedNode) -> Value:
    """[batch, heads, steps, size], from that or from [batch, steps, heads · size]."""
    if x.ndim == 4:
        return x
    if x.ndim != 3 or not heads or x.shape[2] % heads:
        raise node.fail(f"{x.type} does not divide into {heads} heads")
    apart = b.Reshape(x, shape=(*x.shape[:2], heads, x.shape[2] // heads))
    return b.Transpose(apart, perm=(0, 2, 1, 3))


def _window(options: Any, offset: int) -> tuple[int | None, int | None]:
    """The first and the last key that query 0 may look at, -inf and inf being None; query i: i further on.

    `offset`: keys of the past, before that of query 0.  A window's size is -1 where that side is open (opset 25).
    """
    left, right = options.get("left_window_size", -1), options.get("right_window_size", -1)
    right = 0 if options.get("is_causal", 0) else right
    return (offset - left if left >= 0 else None), (offset + right if right >= 0 else None)


def _bias(b: OperatorBuilder, mask: Value, dtype: str, groups: int) -> Value:
    """The mask as numbers to add: those of a boolean one are 0 and -inf; shared heads get their axis."""
    if mask.dtype == "bool":
        mask = b.Where(mask, b.constant(0.0, dtype), b.constant(-math.inf, dtype))
    if groups == 1 or mask.ndim < 3:
        return mask
    heads = mask.shape[-3]
    apart = (1, 1) if heads == 1 else (heads // groups, groups)
    return b.Reshape(mask, shape=(*mask.shape[:-3], *apart, *mask.shape[-2:]))
