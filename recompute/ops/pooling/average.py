"""Average pooling and its gradient; Lp pooling and local response normalisation, which are made of it."""

from __future__ import annotations

import math
from dataclasses import field

import numpy as np

from ...language.op import Imported, ImportedNode, OperatorBuilder, imports
from ...language.types import DTYPES, Array, TensorType, Value
from ..channels_last import channels_last
from ..convolution.export import transposed
from ..shape.reshape import reshape
from ..window import Window, full
from .windows import Pooling, _pool_samples, block_planes, cut, planes


class Averaging(Pooling, abstract=True):
    """The base of AveragePool and its gradient."""

    count_include_pad: int = 0

    def counts(self, w: Window) -> list[list[int]]:
        """By how many elements each window's sum is divided: one factor for each position along each axis."""
        n = len(w.out)
        end = full(self.pads, 2 * n, 0)[n:]
        result = []
        for a in range(n):
            low, high = (-w.begin[a], w.inp[a] + end[a]) if self.count_include_pad else (0, w.inp[a])
            starts = [o * w.strides[a] - w.begin[a] for o in range(w.out[a])]
            step, size = w.dilations[a], w.kernel[a]
            inside = [(max(0, -((s - low) // step)), min(size, -((s - high) // step))) for s in starts]
            result.append([max(last - first, 1) for first, last in inside])
        return result

    def divide(self, w: Window, a: Array, out: Array) -> None:
        """a / counts, position by position, into `out`."""
        counts = self.counts(w)
        if all(len(set(c)) <= 1 for c in counts):
            total = math.prod(c[0] for c in counts if c)
            np.divide(a, a.dtype.type(total), out=out)
            return
        for i, c in enumerate(counts):
            shape = tuple(-1 if j == i else 1 for j in range(len(counts)))
            np.divide(a if i == 0 else out, np.asarray(c, dtype=a.dtype).reshape(shape), out=out)


#: windows that LpPool counts at import
_MOST = 1 << 24


@channels_last(inputs=(0,), outputs=(0,))
class AveragePool(Averaging, onnx=True):
    """The mean of each window (ONNX AveragePool).

    Padding counts only with `count_include_pad`; what lies behind the padding (ceil_mode) never does.
    """

    def infer(self, x):
        """[n, c, positions...]."""
        if not x.is_float:
            raise self.fail("needs floats", x)
        return (x.with_shape(self.pooled(x)),)

    def scratch(self, ins, outs):
        """For 16-bit floats a block of sums in float32."""
        if ins[0].dtype in ("f32", "f64"):
            return ()
        w = self.window(ins[0].shape[2:], outs[0].shape[2:])
        return (TensorType("f32", (min(block_planes(w), math.prod(ins[0].shape[:2])) * w.positions,)),)

    def compute(self, ins, outs, scratch):
        w = self.window(ins[0].shape[2:], outs[0].shape[2:])
        x, y = ins[0].reshape(-1, *w.inp), outs[0].reshape(-1, *w.out)
        for block in planes(w, x.shape[0]):
            total = cut(scratch[0], y[block].shape) if scratch else y[block]
            total.fill(0)
            for tap in w.reach():
                target = total[(slice(None), *tap.out)]
                np.add(target, x[block][(slice(None), *tap.inp)], out=target)
            self.divide(w, total, total)
            if scratch:
                y[block] = total

    def gradient(self, b, ins, outs, grads):
        """Linear: nothing is kept."""
        return [b.AveragePoolGrad(grads[0], shape=ins[0].shape[2:], **self.options(Averaging))]

    @classmethod
    def from_onnx(cls, node):
        include = node.attributes.get("count_include_pad", 0)
        return node.emit(cls(**cls.onnx_fields(node), count_include_pad=include), node.need(0))

    @classmethod
    def samples(cls, draw):
        """MaxPool's samples, with and without counting the padding."""
        for op, x in _pool_samples(cls):
            for include in (0, 1):
                yield draw.case(cls(**{**op.options(Averaging), "count_include_pad": include}), draw(f"f64[{x}]"))
        yield draw.case(cls(kernel_shape=(3, 3), pads=(1, 1, 1, 1)), draw("f32[2,3,5,5]"))
        yield draw.case(cls(kernel_shape=(3, 3), pads=(1, 1, 1, 1)), draw("f16[2,3,5,5]"))


@channels_last(inputs=(0,), outputs=(0,))
class AveragePoolGrad(Averaging):
    """dy → the gradient of AveragePool by its input, whose spatial sizes are `shape`."""

    shape: tuple[int, ...] = field(kw_only=True)

    def infer(self, dy):
        """[n, c, shape...]."""
        x = dy.with_shape((*dy.shape[:2], *self.shape))
        if self.pooled(x) != dy.shape:
            raise self.fail(f"does not fit an input of sizes {list(self.shape)}", dy)
        return (x,)

    def scratch(self, ins, outs):
        """A block of dy divided; for 16-bit floats also a block of sums, both in float32."""
        w = self.window(outs[0].shape[2:], ins[0].shape[2:])
        count = min(block_planes(w), math.prod(ins[0].shape[:2]))
        exact = ins[0].dtype in ("f32", "f64")
        dtype = ins[0].dtype if exact else "f32"
        divided = TensorType(dtype, (count * w.positions,))
        return (divided,) if exact else (divided, TensorType(dtype, (count * math.prod(w.inp),)))

    def compute(self, ins, outs, scratch):
        w = self.window(outs[0].shape[2:], ins[0].shape[2:])
        dy, dx = ins[0].reshape(-1, *w.out), outs[0].reshape(-1, *w.inp)
        for block in planes(w, dy.shape[0]):
            divided = cut(scratch[0], dy[block].shape)
            divided[...] = dy[block]
            self.divide(w, divided, divided)
            total = cut(scratch[1], dx[block].shape) if len(scratch) > 1 else dx[block]
            total.fill(0)
            for tap in w.reach():
                target = total[(slice(None), *tap.inp)]
                np.add(target, divided[(slice(None), *tap.out)], out=target)
            if len(scratch) > 1:
                dx[block] = total

    def gradient(self, b, ins, outs, grads):
        """Linear: the average pooling itself."""
        return [b.AveragePool(grads[0], **self.options(Averaging))]

    def export(self, g, ins, outs):
        """Division, and a ConvTranspose of every channel with ones."""
        shape = g.shape(ins[0])
        w = self.window(self.shape, shape[2:])
        dtype = DTYPES[g.type(ins[0]).dtype]
        counts = np.ones(w.out, np.float64)
        for i, c in enumerate(self.counts(w)):
            counts *= np.array(c, np.float64).reshape(tuple(-1 if j == i else 1 for j in range(len(w.out))))
        divided = g.call("Div", ins[0], g.array(counts.astype(dtype)))
        ones = g.array(np.ones((shape[1], 1, *w.kernel), dtype))
        transposed(g, w, divided, ones, shape[1], outs)
        return True

    @classmethod
    def samples(cls, draw):
        for op, text in _pool_samples(AveragePool):
            x = TensorType.parse(f"f64[{text}]")
            for include in (0, 1):
                fields = {**op.options(Averaging), "count_include_pad": include}
                yield draw.case(cls(shape=x.shape[2:], **fields), draw(str(op.infer(x)[0])))
        op = cls(kernel_shape=(3, 3), shape=(5, 5), pads=(1, 1, 1, 1))
        yield draw.case(op, draw("f32[2,3,5,5]"))
        yield draw.case(op, draw("f16[2,3,5,5]"))


def _root(b: OperatorBuilder, total: Value, p: int) -> Value:
    """total^(1/p), with gradient 0 where total is 0."""
    if p == 1:
        return total
    zero = b.Equal(total, b.constant(0, total))
    safe = b.Where(zero, b.constant(1, total), total)
    root = b.Sqrt(safe) if p == 2 else b.Pow(safe, b.constant(1.0 / p, total))
    return b.Where(zero, b.constant(0, total), root)


def _power(b: OperatorBuilder, x: Value, p: int) -> Value:
    """|x|^p."""
    if p == 2:
        return b.Mul(x, x)
    return b.Abs(x) if p == 1 else b.Pow(b.Abs(x), b.constant(p, x))


@imports("LpPool")
def lp_pool(node: ImportedNode) -> Imported:
    """(Σ |x|^p)^(1/p) over each window: average pooling of |x|^p, times the counts."""
    b, x, p = node.builder, node.need(0), node.attributes.get("p", 2)
    op = AveragePool(**AveragePool.onnx_fields(node), count_include_pad=1)
    mean = node.emit(op, _power(b, x, p))
    if math.prod(mean.shape[2:]) > _MOST:
        raise node.fail(f"its output {mean.type} has more positions than can be counted")
    counts = np.ones((), np.float64)
    for axis in op.counts(op.window(x.shape[2:], mean.shape[2:])):
        counts = counts[..., None] * np.array(axis, np.float64)
    if counts.size and (counts == counts.flat[0]).all():
        counts = counts.reshape(-1)[0]
    return _root(b, b.Mul(mean, b.constant(counts, mean)), p)


@imports("GlobalLpPool")
def global_lp_pool(node: ImportedNode) -> Imported:
    """(Σ |x|^p)^(1/p) over all spatial axes."""
    b, x, p = node.builder, node.need(0), node.attributes.get("p", 2)
    return _root(b, b.ReduceSum(_power(b, x, p), axes=tuple(range(2, x.ndim))), p)


@imports("LpNormalization")
def lp_normalization(node: ImportedNode) -> Imported:
    """x / ‖x‖_p along an axis; 0 where the norm is."""
    b, x, p = node.builder, node.need(0), node.attributes.get("p", 2)
    total = b.ReduceSum(_power(b, x, p), axes=(node.attributes.get("axis", -1) % x.ndim,))
    one = b.constant(1, x)
    safe = b.Where(b.Equal(total, b.constant(0, x)), one, total)
    return b.Div(x, safe if p == 1 else b.Sqrt(safe))


@imports("LRN")
def lrn(node: ImportedNode) -> Imported:
    """x / (bias + alpha / size · Σ x² over `size` neighbouring channels)^beta (Krizhevsky et al. 2012)."""
    b, x, attributes = node.builder, node.need(0), node.attributes
    size = attributes["size"]
    flat = reshape(b, b.Mul(x, x), (x.shape[0], 1, x.shape[1], math.prod(x.shape[2:])))
    before = (size - 1) // 2
    pads = (before, 0, size - 1 - before, 0)
    mean = b.AveragePool(flat, kernel_shape=(size, 1), pads=pads if any(pads) else (), count_include_pad=1)
    scaled = b.Mul(reshape(b, mean, x.shape), b.constant(attributes.get("alpha", 1e-4), x))
    base = b.Add(scaled, b.constant(attributes.get("bias", 1.0), x))
    return b.Mul(x, b.Pow(base, b.constant(-attributes.get("beta", 0.75), x)))
