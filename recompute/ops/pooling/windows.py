"""Pooling over windows.  Numerics go tap by tap over blocks of planes (one plane: one channel of one image)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from ...language.factors import Factor, in_step, needed_whole
from ...language.op import Cost, Draw, ImportedNode, Op
from ...language.types import Array, Operands, TensorType, Types
from ..channels_last import channels_last
from ..window import BLOCK, Window, full, output_size, window_attributes
from .export import export_max_gather, export_max_grad, export_max_window


class Pooling(Op, abstract=True):
    """The base of window poolings.  `pads`: those before each spatial axis, then those after."""

    autocast = "follow"
    kernel_shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    ceil_mode: int = 0

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        return in_step(ins, outs, range(2))

    def pooled(self, x: TensorType) -> tuple[int, ...]:
        """[n, c, positions...].  TypeRuleError where x does not fit the attributes."""
        n = len(self.kernel_shape)
        if x.ndim != n + 2 or n < 1:
            raise self.fail(f"needs {n} spatial axes, as kernel_shape has", x)
        if any(len(a) not in (0, k) for a, k in ((self.strides, n), (self.dilations, n), (self.pads, 2 * n))):
            raise self.fail(f"strides, dilations and pads need {n}, {n} and {2 * n} entries", x)
        strides, dilations = full(self.strides, n, 1), full(self.dilations, n, 1)
        if min(*strides, *dilations, *self.kernel_shape) < 1:
            raise self.fail("kernel_shape, strides and dilations must be at least 1", x)
        sizes = self._counts(x)
        if min(sizes) < 1:
            raise self.fail("the window is larger than the padded input", x)
        return (*x.shape[:2], *sizes)

    def _counts(self, x: TensorType) -> tuple[int, ...]:
        """How many windows there are along each spatial axis."""
        n = len(self.kernel_shape)
        strides, dilations, pads = full(self.strides, n, 1), full(self.dilations, n, 1), full(self.pads, 2 * n, 0)
        return tuple(
            output_size(
                x.shape[2 + i], self.kernel_shape[i], strides[i], dilations[i], pads[i] + pads[n + i],
                begin=pads[i], ceil=self.ceil_mode,
            )
            for i in range(n)
        )  # fmt: skip

    def window(self, inp: Sequence[int], out: Sequence[int]) -> Window:
        """The windows over spatial sizes `inp`."""
        n = len(self.kernel_shape)
        return Window(
            tuple(inp), tuple(out), self.kernel_shape, full(self.strides, n, 1), full(self.dilations, n, 1),
            full(self.pads, 2 * n, 0)[:n],
        )  # fmt: skip

    def cost(self, ins: Types, outs: Types) -> Cost:
        windows = min((t.size for t in (*ins, *outs[:1]) if t is not None), default=0)
        return Cost(windows * math.prod(self.kernel_shape), super().cost(ins, outs).bytes)

    @classmethod
    def onnx_fields(cls, node: ImportedNode) -> dict[str, Any]:
        """Attributes of an ONNX pooling node, `auto_pad` resolved; `ceil_mode` only where it adds a window.

        Up to opset 21 ONNX's inference counts windows with it that begin behind the end, and that nobody computes.
        """
        x, kernel = node.need_type(0), tuple(node.attributes["kernel_shape"])
        fields: dict[str, Any] = {"kernel_shape": kernel, **window_attributes(node, x.shape[2:], kernel)}
        if node.attributes.get("ceil_mode", 0) and cls(**fields, ceil_mode=1).pooled(x)[2:] != cls(**fields)._counts(x):
            fields["ceil_mode"] = 1
        return fields


def block_planes(w: Window) -> int:
    """Planes of a block of about `BLOCK` bytes."""
    return max(BLOCK // (4 * max(w.positions, math.prod(w.inp), 1)), 1)


def planes(w: Window, count: int) -> Iterator[slice]:
    """Slices of `count` planes, `block_planes` each."""
    step = block_planes(w)
    for p in range(0, count, step):
        yield slice(p, min(p + step, count))


def cut(buffer: Array, shape: Sequence[int]) -> Array:
    """The start of a buffer under a shape."""
    return buffer.reshape(-1)[: math.prod(shape)].reshape(shape)


def window_dtype(taps: int) -> str:
    """The smallest element type that numbers the taps of a window."""
    return "u8" if taps <= 256 else "u16" if taps <= 65536 else "u32"


@channels_last(inputs=(0,), outputs=(0, 1, 2))
class MaxPool(Pooling, onnx=True):
    """The largest element of each window (ONNX MaxPool); padding does not count; the first of equal ones.

    Optional outputs: their indices in x, flat (i64, ONNX's second output), and their numbers within their windows
    (u8 or u16), from which the gradient goes without x or y.
    """

    def infer(self, x):
        y = x.with_shape(self.pooled(x))
        return (y, y.with_dtype("i64"), y.with_dtype(window_dtype(math.prod(self.kernel_shape))))

    def axis_factors(self, ins, outs):
        """Images and channels; needed whole where flat indices are wanted, which count through all images."""
        factors = in_step(ins, outs, range(2))
        return factors if outs[1] is None else needed_whole(factors)

    def scratch(self, ins, outs):
        """Comparison and numbers of a block of planes."""
        if all(t is None for t in outs[1:]):
            return ()
        w = self.window(ins[0].shape[2:], outs[0].shape[2:])
        size = min(block_planes(w), math.prod(ins[0].shape[:2])) * w.positions
        number = window_dtype(w.taps)
        types = [TensorType("bool", (size,)), TensorType(number, (size,))]
        if len(outs) < 3 or outs[2] is None:
            types.append(TensorType(number, (size,)))  # numbers only needed for the indices
        return tuple(types)

    def compute(self, ins, outs, scratch):
        """A maximum a tap; numbers grow with the taps, so their maximum is the number of the last improvement."""
        w = self.window(ins[0].shape[2:], outs[0].shape[2:])
        x, y = ins[0].reshape(-1, *w.inp), outs[0].reshape(-1, *w.out)
        indices, numbers = (*outs[1:], None, None)[:2]
        for block in planes(w, x.shape[0]):
            if not scratch:
                self._block(w, x[block], y[block], None, scratch)
                continue
            shape = y[block].shape
            mine = cut(scratch[2], shape) if numbers is None else numbers.reshape(y.shape)[block]
            self._block(w, x[block], y[block], mine, scratch)
            if indices is not None:
                self._indices(w, mine, indices.reshape(y.shape)[block], block.start)

    def _block(self, w: Window, x: Array, y: Array, numbers: Array | None, scratch: Operands) -> None:
        y.fill(-math.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min)
        if numbers is not None:
            numbers.fill(0)
        for tap in w.reach():
            source, target = x[(slice(None), *tap.inp)], y[(slice(None), *tap.out)]
            if numbers is not None and tap.number:
                better, number = cut(scratch[0], target.shape), cut(scratch[1], target.shape)
                np.greater(source, target, out=better)
                np.multiply(better, number.dtype.type(tap.number), out=number)
                mine = numbers[(slice(None), *tap.out)]
                np.maximum(mine, number, out=mine)
            np.maximum(target, source, out=target)

    def _indices(self, w: Window, numbers: Array, out: Array, first: int) -> None:
        """Flat indices: Σ over the axes of (position · stride + number along the axis · dilation - pad) · step."""
        out.fill(0)
        step, inner = 1, 1
        for a in reversed(range(len(w.out))):
            place = tuple(-1 if i == a else 1 for i in range(len(w.out)))
            starts = np.arange(w.out[a], dtype=out.dtype) * w.strides[a] - w.begin[a]
            along = (numbers // inner) % w.kernel[a]
            out += (starts.reshape(place) + along.astype(out.dtype) * w.dilations[a]) * step
            inner *= w.kernel[a]
            step *= w.inp[a]
        out += (np.arange(first, first + out.shape[0]) * step).reshape(-1, *(1 for _ in w.out))

    def gradient(self, b, ins, outs, grads):
        """From the window numbers only."""
        if grads[0] is None:
            return [None]
        return [b.MaxPoolGrad(outs[2], grads[0], shape=ins[0].shape[2:], **self.options(Pooling))]

    def export(self, g, ins, outs):
        """Native; window numbers are worked out from the indices."""
        if len(outs) < 3 or not outs[2]:
            return False
        export_max_window(self, g, ins, outs)
        return True

    @classmethod
    def from_onnx(cls, node):
        """The indices are row-major here; `storage_order` 1 turns them."""
        op = cls(**cls.onnx_fields(node))
        if not node.wants(1):
            return node.emit(op, node.need(0), want=1)
        # The numbers are for a MaxUnpool that may come; what nobody reads is not made.
        y, indices, _ = node.emit(op, node.need(0), want=3)
        if node.attributes.get("storage_order", 0):
            indices = _column_major(node.builder, indices, node.need(0).shape[2:])
        return y, indices

    @classmethod
    def samples(cls, draw):
        """1 to 3 axes, pads, overlaps, gaps, dilations, ceil mode, ties, integers, without numbers."""
        for op, x in _pool_samples(cls):
            yield draw.case(op, draw.distinct(f"f64[{x}]"))
        op = cls(kernel_shape=(3, 3), pads=(1, 1, 1, 1))
        yield draw.case(op, draw("f32[2,3,5,5]"), want=1)
        yield draw.case(op, draw("f32[2,3,5,5]"), want=2)
        yield draw.case(op, draw.ints("f64[1,2,5,5]", 0, 2), gradient=False)
        yield draw.case(op, draw.ints("i8[1,2,5,5]", -9, 9))
        yield draw.case(cls(kernel_shape=(17, 17)), draw.distinct("f64[1,1,18,18]"))
        yield draw.case(cls(kernel_shape=(2, 2), pads=(-1, 0, 0, 0)), draw.distinct("f64[1,2,4,4]"), export=False)


def _column_major(b, indices, shape):
    """Indices into images of `shape` with the first spatial axis running fastest."""
    rest, stride, index = indices, math.prod(shape), None
    for size in reversed(shape):
        stride //= size
        above = b.Div(rest, b.constant(size, "i64"))
        digit = b.Sub(rest, b.Mul(above, b.constant(size, "i64")))
        part = b.Mul(digit, b.constant(stride, "i64"))
        index, rest = part if index is None else b.Add(index, part), above
    return b.Add(index, b.Mul(rest, b.constant(math.prod(shape), "i64")))


def _pool_samples(cls: Any) -> list[tuple[Any, str]]:
    return [
        (cls(kernel_shape=(2, 2), strides=(2, 2)), "2,2,4,5"),
        (cls(kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)), "2,2,5,6"),
        (cls(kernel_shape=(3, 2), strides=(2, 3), pads=(0, 1, 1, 0), ceil_mode=1), "1,2,6,6"),
        (cls(kernel_shape=(2, 2), dilations=(2, 3)), "1,2,4,5"),
        (cls(kernel_shape=(3,), pads=(1, 2)), "2,1,5"),
        (cls(kernel_shape=(3, 3), pads=(1, 1, 1, 1)), "1,2,4,4"),
        (cls(kernel_shape=(2, 1, 2), strides=(1, 2, 2)), "1,2,3,3,2"),
        (cls(kernel_shape=(2, 2)), "0,2,3,3"),
    ]


class MaxPoolLinear(Pooling, abstract=True):
    """The base of the gradient of MaxPool and its transpose, which route values by window numbers."""

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """Mask and product for a block of planes."""
        number, _ = ins
        assert number is not None and outs[0] is not None
        w = self.windows(ins, outs)
        size = min(block_planes(w), math.prod(number.shape[:2])) * w.positions
        return (TensorType("bool", (size,)), TensorType(outs[0].dtype, (size,)))

    def windows(self, ins: Sequence[Any], outs: Sequence[Any]) -> Window:
        """The windows of the pooling that made the numbers."""
        raise NotImplementedError

    def route(self, w: Window, number: Array, source: Array, target: Array, scratch: Operands, *, gather: bool) -> None:
        """Adds to `target`, tap by tap, the elements of `source` whose window number is the tap's.

        `gather`: from inputs to positions, else from positions to inputs.
        """
        alone = all(s >= (k - 1) * d + 1 for s, k, d in zip(w.strides, w.kernel, w.dilations, strict=True))
        for block in planes(w, number.shape[0]):
            here = target[block]
            here.fill(0)
            for tap in w.reach():
                numbers = number[block][(slice(None), *tap.out)]
                small, large = (slice(None), *tap.out), (slice(None), *tap.inp)
                given, taken = source[block][large if gather else small], here[small if gather else large]
                mask = cut(scratch[0], numbers.shape)
                np.equal(numbers, number.dtype.type(tap.number), out=mask)
                if alone and not gather:  # windows do not overlap: nothing to add to
                    np.copyto(taken, given, where=mask)
                    continue
                product = cut(scratch[1], numbers.shape)
                product.fill(0)
                np.copyto(product, given, where=mask)
                taken += product


@channels_last(inputs=(0, 1), outputs=(0,))
class MaxPoolGrad(MaxPoolLinear):
    """(window numbers, dy) → the gradient of MaxPool by its input, whose spatial sizes are `shape`."""

    shape: tuple[int, ...] = field(kw_only=True)

    def infer(self, number, dy):
        """[n, c, shape...]."""
        x = dy.with_shape((*dy.shape[:2], *self.shape))
        if number.shape != dy.shape or self.pooled(x) != dy.shape:
            raise self.fail(f"does not fit an input of sizes {list(self.shape)}", number, dy)
        return (x,)

    def windows(self, ins, outs):
        return self.window(outs[0].shape[2:], ins[0].shape[2:])

    def compute(self, ins, outs, scratch):
        """Each element of dy goes to its window's maximum."""
        w = self.windows(ins, outs)
        number, dy = (a.reshape(-1, *w.out) for a in ins)
        self.route(w, number, dy, outs[0].reshape(-1, *w.inp), scratch, gather=False)

    def gradient(self, b, ins, outs, grads):
        """Linear in dy: the elements at the maxima."""
        return [None, b.MaxPoolGather(ins[0], grads[0], **self.options(Pooling))]

    def export(self, g, ins, outs):
        """ScatterElements with addition, over flat planes."""
        export_max_grad(self, g, ins, outs)
        return True

    @classmethod
    def samples(cls, draw):
        for op, x, y, number in _numbered(draw):
            yield draw.case(cls(shape=x.shape[2:], **op.options(Pooling)), number, draw(str(y)))


def _numbered(draw: Draw) -> Iterator[tuple[MaxPool, TensorType, TensorType, Any]]:
    """Samples: the pool, types of input and output, window numbers of a random input."""
    import numpy as np

    for op, text in _pool_samples(MaxPool):
        x = TensorType.parse(f"f64[{text}]")
        types = op.infer(x)
        outs = [np.empty(t.shape, t.numpy) for t in types]
        op.compute([draw(str(x))], outs, [np.empty(t.shape, t.numpy) for t in op.scratch((x,), types)])
        yield op, x, types[0], outs[2]


@channels_last(inputs=(0, 1), outputs=(0,))
class MaxPoolGather(MaxPoolLinear):
    """(window numbers, x) → the elements of x at the numbered places of their windows; transpose of MaxPoolGrad."""

    def infer(self, number, x):
        if self.pooled(x) != number.shape:
            raise self.fail("the numbers are not those of windows over this input", number, x)
        return (x.with_shape(number.shape),)

    def windows(self, ins, outs):
        return self.window(ins[1].shape[2:], outs[0].shape[2:])

    def compute(self, ins, outs, scratch):
        w = self.windows(ins, outs)
        number, x = ins[0].reshape(-1, *w.out), ins[1].reshape(-1, *w.inp)
        self.route(w, number, x, outs[0].reshape(-1, *w.out), scratch, gather=True)

    def gradient(self, b, ins, outs, grads):
        """Linear in x: the gradient of MaxPool."""
        return [None, b.MaxPoolGrad(ins[0], grads[0], shape=ins[1].shape[2:], **self.options(Pooling))]

    def export(self, g, ins, outs):
        export_max_gather(self, g, ins, outs)
        return True

    @classmethod
    def samples(cls, draw):
        for op, x, _, number in _numbered(draw):
            yield draw.case(cls(**op.options(Pooling)), number, draw(str(x)))
