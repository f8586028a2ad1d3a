"""Operators of the domain com.microsoft on quantized tensors: dequantize, compute, quantize again.

Integer weights do not train.  Weights packed by blocks (MatMulNBits) are unpacked at import into a buffer: what is
trained is around them.
"""

from __future__ import annotations

import numpy as np

from ...language.contexts import Imported, ImportedNode, NodeWriter
from ...language.op import imports
from ...language.types import Array
from ..linear.quantize import STRAIGHT
from .basic import MS

#: ONNX's numbers for the types of quantized elements
_KINDS = {"u8": 2, "i8": 3, "u16": 4, "i16": 5, "i32": 6}


def _real(g: NodeWriter, x: str, scale: str, zero: str) -> str:
    """(x - zero) · scale; scale and zero are one number or one for each column."""
    y = g.Cast(x, to=1)
    return g.Mul(g.Sub(y, g.Cast(zero, to=1)) if zero else y, scale)


def _again(node: ImportedNode, g: NodeWriter, y: str, scale: str, zero: int) -> Imported:
    """y / scale + zero, rounded to even and clipped to the type of the zero point, input number `zero` (u8: none)."""
    t = node.type(zero)
    kind = "u8" if t is None else t.dtype
    if kind not in _KINDS or kind == "i32":
        raise node.fail(f"quantizes to {kind}, which is not supported")
    q = g.Round(g.Div(y, scale), domain=STRAIGHT)
    if t is not None:
        q = g.Add(q, g.Cast(g.ins[zero], to=1))
    low, high = (0, 1 << int(kind[1:])) if kind[0] == "u" else (-1 << int(kind[1:]) - 1, 1 << int(kind[1:]) - 1)
    q = g.Clip(q, g.constant(low, np.float32), g.constant(high - 1, np.float32))
    return g.results(g.Cast(q, to=_KINDS[kind], domain=STRAIGHT))


@imports("QuantizeLinear", "DequantizeLinear", domain=MS)
def quantize(node: ImportedNode) -> Imported:
    """Between real numbers and quantized ones, by one scale or one for each element of `axis`."""
    g, t, scale = node.body(), node.need_type(0), node.need_type(1)
    if scale.ndim and scale.size > 1:
        axis = node.attributes.get("axis", 1) % t.ndim
        shape = g.constant((-1, *(1,) * (t.ndim - 1 - axis)))
        g.ins[1:3] = [g.Reshape(n, shape) if n else n for n in g.ins[1:3]]
    if node.op_type == "DequantizeLinear":
        return g.results(_real(g, *g.ins[:3]))
    return _again(node, g, g.ins[0], g.ins[1], 2)


@imports("QLinearAdd", "QLinearMul", domain=MS)
def qlinear_binary(node: ImportedNode) -> Imported:
    """A + B or A · B."""
    g = node.body()
    a, b = _real(g, *g.ins[:3]), _real(g, *g.ins[3:6])
    y = g.Add(a, b) if node.op_type == "QLinearAdd" else g.Mul(a, b)
    return _again(node, g, y, g.ins[6], 7)


@imports("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearGlobalAveragePool", domain=MS)
def qlinear_unary(node: ImportedNode) -> Imported:
    """One operator between two scales."""
    g, given, t = node.body(), node.attributes, node.need_type(0)
    x = _real(g, *g.ins[:3])
    if node.op_type == "QLinearSigmoid":
        y = g.Sigmoid(x)
    elif node.op_type == "QLinearLeakyRelu":
        y = g.LeakyRelu(x, alpha=given.get("alpha", 0.01))
    elif node.op_type == "QLinearSoftmax":
        if given.get("opset", 13) < 13 and given.get("axis", 1) % t.ndim != t.ndim - 1:
            raise node.fail("flattens its input as Softmax did up to opset 12, which is not supported")
        y = g.Softmax(x, axis=given.get("axis", -1))
    else:
        last = given.get("channels_last", 0)
        axes = range(1, t.ndim - 1) if last else range(2, t.ndim)
        y = g.ReduceMean(x, g.constant(list(axes)), keepdims=1)
    return _again(node, g, y, g.ins[3], 4)


@imports("QLinearConcat", domain=MS)
def qlinear_concat(node: ImportedNode) -> Imported:
    """(scale, zero, then x, scale, zero for each): joined along `axis`."""
    g = node.body()
    count = sum(bool(n) for n in g.ins)
    parts = [_real(g, *g.ins[i : i + 3]) for i in range(2, count, 3)]
    return _again(node, g, g.Concat(*parts, axis=node.attributes["axis"]), g.ins[0], 1)


@imports("QGemm", domain=MS)
def qgemm(node: ImportedNode) -> Imported:
    """alpha · A B + C; C is in the scale of the product."""
    g, given = node.body(), node.attributes
    a, b = _real(g, *g.ins[:3]), _real(g, *g.ins[3:6])
    y = g.Gemm(a, b, "", **{k: given[k] for k in ("alpha", "transA", "transB") if k in given})
    if g.ins[6]:
        scale = g.Mul(g.Mul(g.ins[1], g.ins[4]), g.constant(given.get("alpha", 1.0), np.float32))
        y = g.Add(y, g.Mul(g.Cast(g.ins[6], to=1), scale))
    return _again(node, g, y, g.ins[7], 8) if g.ins[7] else g.results(y)


@imports("MatMulIntegerToFloat", "DynamicQuantizeMatMul", domain=MS)
def matmul_integer_to_float(node: ImportedNode) -> Imported:
    """A B + bias in real numbers; DynamicQuantizeMatMul rounds A to 8 bits first."""
    g = node.body()
    if node.op_type == "DynamicQuantizeMatMul":
        codes, scale, zero = g.DynamicQuantizeLinear(g.ins[0], outputs=3)
        a, b, bias = _real(g, codes, scale, zero), _real(g, *g.ins[1:4]), g.ins[4]
    else:
        a, b, bias = _real(g, g.ins[0], g.ins[2], g.ins[4]), _real(g, g.ins[1], g.ins[3], g.ins[5]), g.ins[6]
    y = g.MatMul(a, b)
    return g.results(g.Add(y, bias) if bias else y)


@imports("QAttention", domain=MS)
def qattention(node: ImportedNode) -> Imported:
    """Attention on quantized input and weights; what comes out is real."""
    g = node.body()
    x, w = _real(g, g.ins[0], g.ins[3], g.ins[6]), _real(g, g.ins[1], g.ins[4], g.ins[7])
    made = g.Attention(x, w, g.ins[2], g.ins[5], g.ins[8], domain=MS, outputs=2 if node.wants(1) else 1,
                       **node.attributes)  # fmt: skip
    return g.results(*(made if node.wants(1) else [made]))


@imports("MatMulNBits", domain=MS)
def matmul_nbits(node: ImportedNode) -> Imported:
    """A Bᵀ + bias, B [N, K] packed into 4 or 8 bits with one scale for each block of a row."""
    g, given = node.body(), node.attributes
    if g.ins[4]:
        raise node.fail("permutes its groups (g_idx), which is not supported")
    n, k, bits, size = (int(given.get(name, 4)) for name in ("N", "K", "bits", "block_size"))
    if bits not in (4, 8) or n < 1 or k < 1 or size < 1:
        raise node.fail(f"has N={n}, K={k}, bits={bits}, block_size={size}; 4 and 8 bits are supported")
    blocks = -(-k // size)
    packed = node.need_constant(1, "packed weights").reshape(n, blocks, -1)
    scales = node.need_constant(2, "scales").reshape(n, blocks, 1)
    zeros = _zero_points(node, n, blocks, bits)
    whole = (_unpacked(packed, bits)[:, :, :size].astype(np.float32) - zeros) * scales.astype(np.float32)
    weights = whole.reshape(n, blocks * size)[:, :k].T.astype(node.need_type(0).numpy)
    y = g.MatMul(g.ins[0], g.constant(np.ascontiguousarray(weights), weights.dtype))
    return g.results(g.Add(y, g.ins[5]) if g.ins[5] else y)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Two elements from each byte, the low one first, where there are 4 bits."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _zero_points(node: ImportedNode, n: int, blocks: int, bits: int) -> Array:
    given = node.constant(3)
    if node.type(3) is None:
        return np.array(1 << (bits - 1), np.float32)
    if given is None:
        raise node.fail("its zero points are computed from data")
    if given.dtype == np.uint8:
        given = _unpacked(given.reshape(n, -1), bits)[:, :blocks]
    return given.reshape(n, blocks, 1).astype(np.float32)


@imports("GatherBlockQuantized", domain=MS)
def gather_block_quantized(node: ImportedNode) -> Imported:
    """Rows of a table that is packed into 4 or 8 bits with one scale for each block along `quantize_axis`."""
    g, given = node.body(), node.attributes
    data, scales = node.need_constant(0, "table"), node.need_constant(2, "scales")
    bits, size = given.get("bits", 4), given.get("block_size", 128)
    packed = data.dtype == np.uint8
    axis = given.get("quantize_axis", 1) % data.ndim
    if bits not in (4, 8) or size < 1 or (packed and axis != data.ndim - 1):
        raise node.fail(f"has bits={bits}, block_size={size}, quantize_axis={axis}, which is not supported")
    values = (_unpacked(data, bits) if packed else data).astype(np.float32)
    if (zeros := node.constant(3)) is None:
        zeros = np.array(1 << (bits - 1) if packed else 0, np.float32)
    else:
        zeros = (_unpacked(zeros, bits) if packed else zeros)[..., : scales.shape[-1]].astype(np.float32)
        zeros = _by_blocks(zeros, size, axis, values.shape[axis])
    whole = (values - zeros) * _by_blocks(scales.astype(np.float32), size, axis, values.shape[axis])
    table = g.constant(whole, scales.dtype)
    return g.results(g.Gather(table, g.ins[1], axis=given.get("gather_axis", 0)))


def _by_blocks(x: np.ndarray, size: int, axis: int, length: int) -> np.ndarray:
    """Each element `size` times along an axis, `length` in all."""
    at = np.arange(length) // size
    return np.take(x, at, axis=axis)
