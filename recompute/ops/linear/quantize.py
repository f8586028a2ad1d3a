"""QuantizeLinear, DequantizeLinear and integer products, imported as compositions of existing operators.

`node.stand(q)`: the float q stands for the node's integer result, and carries its gradient; `node.whole(i)`: the float
that stands for input i (importer/whole.py).  So integer products have the gradients of float products.  By default no
gradient passes a QuantizeLinear that a DequantizeLinear reads.  With `load(..., quantization="ste")` the two become
x ↦ (clip(round(x / s) + z) - z') · s' in floats, with the scales s, s' and zero points z, z' of both; round passes
gradients on unchanged: the straight-through estimator (Bengio et al. 2013).  If s' = s, x gets dy where it is not
clipped, and s the gradient of Esser et al. (2020).
"""

from __future__ import annotations

import math

import numpy as np

from ...language.contexts import Imported, ImportedNode, NodeWriter, OperatorBuilder
from ...language.op import imports
from ...language.types import Value, dtype_from_onnx, dtype_to_onnx, need
from ..common import Ufunc

#: ONNX domain of Round, Cast and Numbers in the bodies (`node.body()`) that replace a node: they pass gradients on
STRAIGHT = "recompute.straight"
#: so many products of two bytes can be summed in int32 without overflow
_MOST_TERMS = (2**31 - 1) // 255**2
#: integer type → its least and greatest value
_RANGES = {f"{s}{n}": ((0, 2**n - 1) if s == "u" else (-(2 ** (n - 1)), 2 ** (n - 1) - 1))
           for s in "ui" for n in (2, 4, 8, 16, 32)}  # fmt: skip


class RoundStraight(Ufunc):
    """x rounded to whole numbers, halves to even, with the gradient of x (straight-through estimator)."""

    autocast = "full"
    ufunc = "rint"
    floats = True

    def infer(self, x):
        if not x.is_float:
            raise self.fail("needs floats", x)
        return (x,)

    def gradient(self, b, ins, outs, grads):
        """dy."""
        return [grads[0]]

    def export(self, g, ins, outs):
        g.node("Round", ins, outs)
        return True

    @classmethod
    def samples(cls, draw):
        """No gradient check: the estimator is not the derivative."""
        yield draw.case(cls(), draw("f64[2,3]", -3, 3), gradient=False)
        yield draw.case(cls(), draw("f32[2,3]", -3, 3))


def spread(b: OperatorBuilder, v: Value, x: Value, axis: int, block: int) -> Value:
    """A scale or zero point in a shape that broadcasts with x: per tensor, per index of `axis`, or per block."""
    if v.size == 1:
        return b.Reshape(v, shape=()) if v.ndim else v
    axis %= x.ndim
    if not block:
        return b.Reshape(v, shape=(v.shape[0], *(1,) * (x.ndim - 1 - axis))) if v.ndim == 1 else v
    wide = (*v.shape[: axis + 1], block, *v.shape[axis + 1 :])
    each = b.Expand(b.Reshape(v, shape=(*v.shape[: axis + 1], 1, *v.shape[axis + 1 :])), shape=wide)
    whole = b.Reshape(each, shape=(*v.shape[:axis], v.shape[axis] * block, *v.shape[axis + 1 :]))
    if whole.shape[axis] != x.shape[axis]:
        whole = b.Slice(whole, starts=(0,), ends=(x.shape[axis],), axes=(axis,))
    return whole


def _placed(node: ImportedNode, x: Value) -> tuple[Value, Value | None]:
    """Scale and zero point, ready to broadcast."""
    axis, block = node.attributes.get("axis", 1), node.attributes.get("block_size", 0)
    b, zero = node.builder, node.input(2)
    return spread(b, node.need(1), x, axis, block), None if zero is None else spread(b, zero, x, axis, block)


def _to(b: OperatorBuilder, v: Value, dtype: str) -> Value:
    return v if v.dtype == dtype else b.Cast(v, to=dtype)


def rounded(b: OperatorBuilder, x: Value, scale: Value, zero: Value | None, kind: str) -> Value:
    """clip(round(x / scale) + zero) in floats; values that round to a bound get a gradient, clipped ones do not."""
    q = b.RoundStraight(b.Div(x, scale))
    if zero is not None:
        q = b.Add(q, _to(b, zero, q.dtype))
    low, high = clip_bounds(kind)
    return b.RoundStraight(b.Clip(q, b.constant(low, q), b.constant(high, q)))


def clip_bounds(kind: str) -> tuple[float, float]:
    """The range of an integer type, widened by 1/4, for Clip between two roundings of whole numbers.

    Clip passes no gradient at its own bounds; so values at the range's get one.
    """
    low, high = _RANGES[kind]
    return low - 0.25, high + 0.25


def _dtype(node: ImportedNode, attribute: str, otherwise: str) -> str:
    """The element type that an attribute names; `otherwise` where it is left out, or 0."""
    number = node.attributes.get(attribute)
    kind = dtype_from_onnx(number) if number else otherwise
    if kind is None:
        raise node.fail(f"its {attribute} {number} is not a supported element type")
    return kind


@imports("QuantizeLinear")
def quantize(node: ImportedNode) -> Imported:
    """(x, scale, zero) → round(x / scale) + zero, clipped; to 8- and 4-bit floats: x / scale + zero, cast."""
    b, x, attributes = node.builder, node.need(0), node.attributes
    kind = _dtype(node, "output_dtype", "u8")
    zero_type = node.type(2)
    kind = zero_type.dtype if zero_type is not None else kind
    scale, zero = _placed(node, x)
    work = _dtype(node, "precision", scale.dtype)
    if kind not in _RANGES:
        q = b.Div(_to(b, x, work), _to(b, scale, work))
        if zero is not None:
            q = b.Add(q, _to(b, zero, work))
        return b.Cast(q, to=kind, saturate=attributes.get("saturate", 1))
    # float16 and bfloat16 hold integers exactly only up to 2,048 and 256
    work = "f32" if work in ("f16", "bf16") else work
    scale = _to(b, scale, work)
    q = rounded(b, _to(b, x, work), scale, zero, kind)
    node.stand(q, stored=True)
    if node.quantized is not None:
        node.quantized[node.outputs[0]] = x, scale, zero, kind
    return b.Cast(q, to=kind)


@imports("DynamicQuantizeLinear")
def dynamic_quantize(node: ImportedNode) -> Imported:
    """x → (integers, scale, zero point): 256 levels from min(x, 0) to max(x, 0).

    The gradient of the integers passes to x; scale and zero point are constants.  If x is 0 everywhere, the scale is 1,
    as in ONNX Runtime.
    """
    b, x = node.builder, node.need(0)
    zero, top = b.constant(0, x), b.constant(255, x)
    low, high = b.Min(b.ReduceMin(x, keepdims=0), zero), b.Max(b.ReduceMax(x, keepdims=0), zero)
    span = b.Sub(high, low)
    scale = b.Detach(b.Where(b.Equal(span, zero), b.constant(1, x), b.Div(span, top)))
    z = b.Detach(b.Round(b.Clip(b.Sub(zero, b.Div(low, scale)), zero, top)))
    q = b.Add(b.RoundStraight(b.Div(x, scale)), z)
    # q is 256 at most (x / scale and -low / scale end in .5, rounded up); whole numbers: the correction is exact
    q = b.Add(q, b.Detach(b.Sub(b.Clip(q, zero, top), q)))
    node.stand(q)
    return b.Cast(q, to="u8"), scale, b.Cast(z, to="u8")


@imports("Round", "Cast", domain=STRAIGHT)
def straight(node: ImportedNode) -> Imported:
    """For bodies: Round, passing gradients on; Cast of whole numbers to integers, for which their float stands."""
    if node.op_type == "Round":
        return node.builder.RoundStraight(node.need(0))
    node.stand(node.need(0))
    return node.builder.Cast(node.need(0), to=dtype_from_onnx(node.attributes["to"]))


@imports("Numbers", domain=STRAIGHT)
def numbers(node: ImportedNode) -> Imported:
    """For bodies: Cast of integers to floats that is not folded when the model is loaded: an integer weight stays as it
    is in the file."""
    to = need(dtype_from_onnx(node.attributes["to"]))
    return _to(node.builder, node.numbers(to), to)


@imports("DequantizeLinear")
def dequantize(node: ImportedNode) -> Imported:
    """(x, scale, zero) → (x - zero) · scale, with a gradient for the scale, and for a float that stands for x."""
    b, q = node.builder, node.need(0)
    scale, zero = _placed(node, q)
    kind = _dtype(node, "output_dtype", scale.dtype)
    work = "f32" if scale.dtype in ("f16", "bf16", "f8e8m0") else scale.dtype
    scale = _to(b, scale, work)
    fake = (node.quantized or {}).get(node.name(0))
    if fake is not None:
        x, own_scale, own_zero, limits = fake
        y = rounded(b, _to(b, x, work), _to(b, own_scale, work), own_zero, limits)
    else:
        held = node.whole(0, stored=False)
        y = _to(b, q if held is None else held, work)
    if zero is not None:
        y = b.Sub(y, _to(b, zero, work))
    return _to(b, b.Mul(y, scale), kind)


@imports("MatMulInteger", "ConvInteger")
def integer_product(node: ImportedNode) -> Imported:
    """The int32 product, computed in f64, whose 53 bits hold every sum of 2^37 products of bytes; overflow wraps.

    If int32 cannot overflow, gradients pass to the floats that stand for the factors.
    """
    g = node.body()
    y = _product(node, g, (0, 1), (2, 3), "")
    conv = "Conv" in node.op_type
    if math.prod(node.need_type(1).shape[1:] if conv else node.need_type(0).shape[-1:]) <= _MOST_TERMS:
        return g.results(g.Cast(y, to=dtype_to_onnx("i32"), domain=STRAIGHT))
    return g.results(g.Cast(g.Cast(y, to=dtype_to_onnx("i64")), to=dtype_to_onnx("i32")))


def _product(
    node: ImportedNode, g: NodeWriter, factors_at: tuple[int, int], zeros_at: tuple[int, int], bias: str
) -> str:
    """The matrix product, or the convolution with a bias, of two factors minus their zero points, in f64."""
    conv, wide = "Conv" in node.op_type, dtype_to_onnx("f64")
    factors = []
    for i, zero in zip(factors_at, zeros_at, strict=True):
        v, t = g.Numbers(g.ins[i], to=wide, domain=STRAIGHT), node.type(zero)
        if t is not None:
            z = g.Cast(g.ins[zero], to=wide)
            if t.size > 1 and t.ndim == 1 and (conv or i == 0):  # one for each kernel, or each row of the first matrix
                z = g.Reshape(z, g.constant((-1, *(1,) * (node.need_type(i).ndim - 1 if conv else 1))))
            v = g.Sub(v, z)
        factors.append(v)
    if not conv:
        return g.MatMul(*factors)
    return g.Conv(*factors, g.Cast(bias, to=wide) if bias else "", **node.attributes)


@imports("QLinearMatMul", "QLinearConv")
def qlinear_product(node: ImportedNode) -> Imported:
    """The exact integer product, times a_scale · b_scale / y_scale, rounded, plus y_zero, clipped."""
    g = node.body()
    wide = dtype_to_onnx("f64")
    y = _product(node, g, (0, 3), (2, 5), g.ins[8])
    by = g.Cast(g.ins[4], to=wide)
    t = node.need_type(4)
    if "Conv" in node.op_type and t.size > 1:
        by = g.Reshape(by, g.constant((-1, *(1,) * (node.need_type(3).ndim - 2))))
    left = g.Cast(g.ins[1], to=wide)
    if "Conv" not in node.op_type and node.need_type(1).ndim == 1 and node.need_type(1).size > 1:
        left = g.Reshape(left, g.constant((-1, 1)))
    factor = g.Div(g.Mul(left, by), g.Cast(g.ins[6], to=wide))
    kind = node.need_type(7).dtype
    low, high = clip_bounds(kind)
    q = g.Add(g.Round(g.Mul(y, factor), domain=STRAIGHT), g.Cast(g.ins[7], to=wide))
    q = g.Round(g.Clip(q, g.constant(low, np.float64), g.constant(high, np.float64)), domain=STRAIGHT)
    return g.results(g.Cast(q, to=dtype_to_onnx(kind), domain=STRAIGHT))
