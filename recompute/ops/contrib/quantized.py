"""Operators of the domain com.microsoft on quantised tensors: dequantise, compute, quantise again.

Integer weights do not train: what is trained is around them.  Weights packed by blocks (MatMulNBits,
MatMulBnb4, GatherBlockQuantized) stay packed.
"""

from __future__ import annotations

import numpy as np

from ...language.contexts import Imported, ImportedNode, NodeWriter
from ...language.op import imports
from ...language.types import Value
from ..linear.quantize import STRAIGHT, clip_bounds
from .basic import MS

#: ONNX's numbers for the types of quantised elements
_KINDS = {"u8": 2, "i8": 3, "u16": 4, "i16": 5, "i32": 6}


def _real(g: NodeWriter, x: str, scale: str, zero: str) -> str:
    """(x - zero) · scale; scale and zero are one number or one for each column."""
    y = g.Numbers(x, to=1, domain=STRAIGHT)
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
    low, high = clip_bounds(kind)
    q = g.Round(g.Clip(q, g.constant(low, np.float32), g.constant(high, np.float32)), domain=STRAIGHT)
    return g.results(g.Cast(q, to=_KINDS[kind], domain=STRAIGHT))


@imports("QuantizeLinear", "DequantizeLinear", domain=MS)
def quantize(node: ImportedNode) -> Imported:
    """Between real numbers and quantised ones, by one scale or one for each element of `axis`."""
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
    g, attributes, t = node.body(), node.attributes, node.need_type(0)
    x = _real(g, *g.ins[:3])
    if node.op_type == "QLinearSigmoid":
        y = g.Sigmoid(x)
    elif node.op_type == "QLinearLeakyRelu":
        y = g.LeakyRelu(x, alpha=attributes.get("alpha", 0.01))
    elif node.op_type == "QLinearSoftmax":
        if attributes.get("opset", 13) < 13 and attributes.get("axis", 1) % t.ndim != t.ndim - 1:
            raise node.fail("flattens its input as Softmax did up to opset 12, which is not supported")
        y = g.Softmax(x, axis=attributes.get("axis", -1))
    else:
        last = attributes.get("channels_last", 0)
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
    g, attributes = node.body(), node.attributes
    a, b = _real(g, *g.ins[:3]), _real(g, *g.ins[3:6])
    y = g.Gemm(a, b, "", **{k: attributes[k] for k in ("alpha", "transA", "transB") if k in attributes})
    if g.ins[6]:
        scale = g.Mul(g.Mul(g.ins[1], g.ins[4]), g.constant(attributes.get("alpha", 1.0), np.float32))
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


@imports("DynamicQuantizeLSTM", domain=MS)
def dynamic_quantize_lstm(node: ImportedNode) -> Imported:
    """LSTM whose W [D, input, 4H] and R [D, H, 4H] are integers, with one scale for each direction, or each column.

    ONNX Runtime rounds what they multiply, input and states, to 8 bits at each step; here these stay as they are.
    """
    g, attributes = node.body(), node.attributes

    def turned(i: int, scale: int) -> str:
        parts = []
        for at in (scale, scale + 1):
            t = node.type(at)
            parts.append(g.Reshape(g.ins[at], g.constant((t.shape[0], 1, -1))) if t is not None else "")
        return g.Transpose(_real(g, g.ins[i], *parts), perm=[0, 2, 1])

    ins = [g.ins[0], turned(1, 8), turned(2, 10), *g.ins[3:8]]
    count = max((i + 1 for i, name in enumerate(node.outputs) if name), default=1)
    results = g.LSTM(*ins, outputs=count, **attributes)
    return g.results(*(results if count > 1 else [results]))


@imports("QAttention", domain=MS)
def qattention(node: ImportedNode) -> Imported:
    """Attention on quantised input and weights; what comes out is real."""
    g = node.body()
    x, w = _real(g, g.ins[0], g.ins[3], g.ins[6]), _real(g, g.ins[1], g.ins[4], g.ins[7])
    results = g.Attention(x, w, g.ins[2], g.ins[5], g.ins[8], domain=MS, outputs=2 if node.wants(1) else 1,
                       **node.attributes)  # fmt: skip
    return g.results(*(results if node.wants(1) else [results]))


@imports("MatMulNBits", domain=MS)
def matmul_nbits(node: ImportedNode) -> Imported:
    """A Bᵀ + bias, B [N, K] packed into a few bits with one scale for each block of a row, and kept so."""
    attributes, b = node.attributes, node.builder
    if node.type(4) is not None:
        raise node.fail("permutes its groups (g_idx, deprecated), which is not supported: quantize without act-order")
    if attributes.get("weight_prepacked", 0):
        raise node.fail("has its weights in a GPU's own order (weight_prepacked): export it without prepacking")
    sizes = {"bits": 4, **{k: attributes[k] for k in ("N", "K", "bits", "block_size") if k in attributes}}
    x = node.need(0)
    y = b.MatMulNBits(x, *_frozen(node, 1, 2, 3), **sizes)
    bias = node.input(5)
    return y if bias is None else b.Add(y, bias)


@imports("QMoE", domain=MS)
def quantized_experts(node: ImportedNode) -> Imported:
    """Never: the weights of all experts are one packed tensor, each in a form of its own."""
    raise node.fail(
        "has the weights of its experts in few bits, which are not multiplied here; take the model from before it was "
        "quantised (MoE is supported), or leave its experts in floats when it is"
    )


@imports("MatMulBnb4", domain=MS)
def matmul_bnb4(node: ImportedNode) -> Imported:
    """A Bᵀ, B [N, K] in bitsandbytes' floats of 4 bits (`quant_type` 0: FP4, 1: NF4), kept so."""
    attributes = node.attributes
    kind = attributes.get("quant_type", 0)
    if kind not in (0, 1) or not attributes.get("transB", 1):
        has = f"quant_type={kind}, transB={attributes.get('transB', 1)}"
        raise node.fail(f"has {has}; 0 (FP4) and 1 (NF4) are supported, with the weight as [N, K]")
    sizes = {k: attributes[k] for k in ("N", "K", "block_size") if k in attributes}
    return node.builder.MatMulNBits(node.need(0), *_frozen(node, 1, 2), **sizes, table="nf4" if kind else "fp4")


def _frozen(node: ImportedNode, *at: int) -> list[Value]:
    """Codes, scales and, where there are some, zero points: contents that are kept as they are in the file."""
    for i in at[:2]:
        node.need_type(i)
    return [node.frozen(i) for i in at if node.type(i) is not None]


@imports("GatherBlockQuantized", domain=MS)
def gather_block_quantized(node: ImportedNode) -> Imported:
    """Rows of a table that is packed into a few bits with one scale for each block of a row, dequantised when they are
    taken.

    Integers of 4 bits are packed as uint8 when the model is loaded; a table that is gathered or quantised along another
    axis, or whose rows do not fill their last block, is unpacked then.
    """
    attributes, t = node.attributes, node.need_type(0)
    bits, size = attributes.get("bits", 4) if t.dtype == "u8" else 4, attributes.get("block_size", 128)
    if bits not in (2, 4, 8) or size < 1 or t.dtype not in ("u8", "u4", "i4"):
        raise node.fail(f"has {t.dtype} with bits={bits}, block_size={size}; 2, 4 and 8 bits are supported")
    axis = attributes.get("quantize_axis", 1) % t.ndim
    width = t.shape[-1] * (8 // bits if t.dtype == "u8" else 1)
    if t.ndim != 2 or axis != 1 or attributes.get("gather_axis", 0) % t.ndim or width % size or size < 16:
        return _unpacked_table(node, bits, size, axis)
    if t.dtype != "u8":
        return _packed_again(node, size)
    parts = [node.builder.Gather(v, node.need(1), axis=0) for v in _frozen(node, 0, 2, 3)]
    return node.builder.DequantizeNBits(*parts, K=width, bits=bits, block_size=size)


def _packed_again(node: ImportedNode, size: int) -> Imported:
    """The same with the table in bytes: uint4 as it is, int4 with 8 added."""
    g, data, zeros = node.body(), node.need_constant(0, "table"), node.constant(3)
    signed = data.dtype.name == "int4"
    if zeros is None and not signed:
        zeros = np.zeros(node.need_type(2).shape, data.dtype)
    packed = [None if a is None else _in_bytes(a.astype(np.int8) + 8 * signed) for a in (data, zeros)]
    ins = [g.constant(packed[0], np.uint8), g.ins[1], g.ins[2]]
    ins += [] if packed[1] is None else [g.constant(packed[1], np.uint8)]
    return g.results(g.GatherBlockQuantized(*ins, domain=MS, bits=4, block_size=size, quantize_axis=1))


def _in_bytes(codes: np.ndarray) -> np.ndarray:
    """Rows of codes of 4 bits, two a byte, the low one first."""
    even = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2))).astype(np.uint8)
    return even[:, 0::2] | even[:, 1::2] << 4


def _unpacked_table(node: ImportedNode, bits: int, size: int, axis: int) -> Imported:
    """The same with the whole table in floats."""
    g, data, scales = node.body(), node.need_constant(0, "table"), node.need_constant(2, "scales")
    packed = data.dtype == np.uint8
    if packed and axis != data.ndim - 1:
        raise node.fail(f"is packed along its last axis, and quantized along axis {axis}")
    values = (_unpacked(data, bits) if packed else data).astype(np.float32)
    if (zeros := node.constant(3)) is None:
        zeros = np.array(1 << (bits - 1) if packed else 0, np.float32)
    else:
        zeros = (_unpacked(zeros, bits) if packed else zeros)[..., : scales.shape[-1]].astype(np.float32)
        zeros = _by_blocks(zeros, size, axis, values.shape[axis])
    whole = (values - zeros) * _by_blocks(scales.astype(np.float32), size, axis, values.shape[axis])
    table = g.constant(whole, scales.dtype)
    return g.results(g.Gather(table, g.ins[1], axis=node.attributes.get("gather_axis", 0)))


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """The elements of each byte, the lowest bits first."""
    parts = [packed >> i & ((1 << bits) - 1) for i in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)


def _by_blocks(x: np.ndarray, size: int, axis: int, length: int) -> np.ndarray:
    """Each element `size` times along an axis, `length` in all."""
    at = np.arange(length) // size
    return np.take(x, at, axis=axis)
