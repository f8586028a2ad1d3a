"""Triangles, diagonals, one-hot rows, the largest elements, sequences turned round."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ...language.factors import Factor, Place, factor, in_step
from ...language.op import Cost, Imported, ImportedNode, imports
from ...language.types import DTYPES, TensorType, dtype_from_onnx, dtype_name, dtype_to_onnx
from ..common import normal_axis
from ..shape.reshape import Move
from ..tiles import wide
from .flat import check_lengths
from .scatter import element_positions

#: bytes that sorting may take for a few rows at a time
_SORT_BYTES = 1 << 16


class Trilu(Move):
    """The upper (or lower) triangle of the last two axes from diagonal `k` on; zeros elsewhere."""

    linear = ((0,),)
    k: int = 0
    upper: int = 1

    def infer(self, x):
        if x.ndim < 2:
            raise self.fail("needs two dimensions", x)
        return (x,)

    def axis_factors(self, ins, outs):
        """All: a slice of rows or columns has the diagonal elsewhere."""
        return in_step(ins, outs, range(ins[0].ndim))

    def sliced(self, factor, start, size, outs):
        """The diagonal, counted from the slice."""
        return dataclasses.replace(self, k=self.k + _moved(factor, start, outs[0]))

    def compute(self, ins, outs, scratch):
        """A copy, then the zeros row by row."""
        y = outs[0]
        y[...] = ins[0]
        for i in range(y.shape[-2]):
            first = max(i + self.k + (0 if self.upper else 1), 0)
            zeros = y[..., i, :first] if self.upper else y[..., i, first:]
            zeros[...] = 0

    def gradient(self, b, ins, outs, grads):
        """The same triangle of dy."""
        return [b.Trilu(grads[0], k=self.k, upper=self.upper)]

    def export(self, g, ins, outs):
        """ONNX Trilu with k as an input."""
        g.node("Trilu", [ins[0], g.array(np.array(self.k, np.int64))], outs, upper=self.upper)
        return True

    @classmethod
    def from_onnx(cls, node):
        k = 0 if node.type(1) is None else int(node.need_constant(1, "diagonal k").reshape(()))
        return node.emit(cls(k, node.attributes.get("upper", 1)), node.need(0))

    @classmethod
    def samples(cls, draw):
        for k in (0, 1, -1, 5, -5):
            yield draw.case(cls(k), draw("f64[3,4]"))
            yield draw.case(cls(k, 0), draw("f64[2,4,3]"))
        yield draw.case(cls((1 << 63) - 1, 0), draw("f32[33,7]"))


def _moved(factor: Factor, start: int, y: TensorType) -> int:
    """How much further up a diagonal is, counted from a slice that begins at `start` of rows or columns."""
    place = factor.outputs[0]
    assert isinstance(place, Place)
    return {y.ndim - 2: start * place.inner, y.ndim - 1: -start * place.inner}.get(place.axis, 0)


class Eye(Move):
    """A matrix of `shape` with ones on diagonal `k`."""

    dtype: str
    shape: tuple[int, ...]
    k: int = 0

    def infer(self):
        return (TensorType(self.dtype, self.shape),)

    def axis_factors(self, ins, outs):
        """Rows and columns: a slice has the diagonal elsewhere."""
        return [factor(d, [], [a]) for a, d in enumerate(self.shape)]

    def sliced(self, factor, start, size, outs):
        """The diagonal, counted from the slice."""
        return dataclasses.replace(self, shape=outs[0].shape, k=self.k + _moved(factor, start, outs[0]))

    def compute(self, ins, outs, scratch):
        """Zeros, and a strided fill of the flat buffer."""
        rows, columns = self.shape
        outs[0].fill(0)
        start = self.k if self.k >= 0 else -self.k * columns
        count = min(rows - max(-self.k, 0), columns - max(self.k, 0))
        if count > 0:
            outs[0].reshape(-1)[start :: columns + 1][:count] = 1

    def export(self, g, ins, outs):
        zeros = g.call("Expand", g.array(np.zeros((), DTYPES[self.dtype])), g.ints(self.shape))
        g.node("EyeLike", [zeros], outs, k=self.k)
        return True

    @classmethod
    def samples(cls, draw):
        for k in (0, 1, -1, 3):
            yield draw.case(cls("f64", (2, 3), k))
        yield draw.case(cls("i64", (3, 2)))


@imports("EyeLike")
def eye_like(node: ImportedNode) -> Imported:
    """Only the shape and the element type of the input matter."""
    t = node.need_type(0)
    dtype = dtype_from_onnx(node.attributes["dtype"]) if "dtype" in node.attributes else t.dtype
    if dtype is None or t.ndim != 2:
        raise node.fail(f"cannot make an identity matrix like {t}")
    return node.builder.Eye(dtype=dtype, shape=t.shape, k=node.attributes.get("k", 0))


class OneHot(Move):
    """indices → `on` at each index along a new axis of length `depth`, `off` elsewhere."""

    depth: int
    axis: int = -1
    off: float = 0.0
    on: float = 1.0
    dtype: str = "f32"

    def infer(self, indices):
        """The indices' shape with `depth` put in at `axis`."""
        try:
            DTYPES[self.dtype].type(self.on), DTYPES[self.dtype].type(self.off)
        except (KeyError, ValueError, OverflowError):
            raise self.fail(f"on = {self.on} or off = {self.off} is no {self.dtype}", indices) from None
        shape = list(indices.shape)
        shape.insert(normal_axis(self.axis, len(shape) + 1, self), self.depth)
        return (TensorType(self.dtype, tuple(shape)),)

    def axis_factors(self, ins, outs):
        new = normal_axis(self.axis, outs[0].ndim, self)
        return [factor(d, [a], [a + (a >= new)]) for a, d in enumerate(ins[0].shape)]

    def scratch(self, ins, outs):
        """For each index: its position, whether it is inside, and what is written there."""
        t = ins[0]
        return t.with_dtype("i64"), t.with_dtype("bool"), t.with_dtype(self.dtype)

    def compute(self, ins, outs, scratch):
        """A fill, then one write for each index; one that is outside writes `off`."""
        at, inside, values = scratch
        y, axis = outs[0], self.axis % outs[0].ndim
        y.fill(y.dtype.type(self.off))
        if not y.size:
            return
        np.copyto(at, ins[0], casting="unsafe")
        np.less(at, 0, out=inside)
        np.add(at, self.depth, out=at, where=inside)
        np.less(at.view(np.uint64), np.uint64(self.depth), out=inside)  # negative numbers are huge there
        values.fill(y.dtype.type(self.off))
        np.copyto(values, y.dtype.type(self.on), where=inside)
        np.clip(at, 0, self.depth - 1, out=at)
        element_positions(np.expand_dims(at, axis), y.shape, axis, np.expand_dims(at, axis), self.name)
        y.reshape(-1)[at.reshape(-1)] = values.reshape(-1)

    def gradient(self, b, ins, outs, grads):
        """None: indices, of whatever element type."""
        return [None]

    def export(self, g, ins, outs):
        """ONNX OneHot with depth and values as inputs (ONNX Runtime wants i64 indices)."""
        values = g.array(np.array([self.off, self.on], DTYPES[self.dtype]))
        at = g.call("Cast", ins[0], to=dtype_to_onnx("i64"))
        g.node("OneHot", [at, g.array(np.array(self.depth, np.int64)), values], outs, axis=self.axis)
        return True

    @classmethod
    def from_onnx(cls, node):
        """Depth and values must be known."""
        depth = int(node.need_constant(1, "depth").reshape(()))
        values = node.need_constant(2, "values")
        off, on = (float(v) for v in values)
        op = cls(depth, node.attributes.get("axis", -1), off, on, dtype_name(values.dtype))
        return node.emit(op, node.need(0))

    @classmethod
    def samples(cls, draw):
        """A new last, first and middle axis; negative indices and ones outside."""
        yield draw.case(cls(4), draw.ints("i64[3]", -4, 6))
        yield draw.case(cls(3, 0, -1.0, 2.0, "f64"), draw.ints("i32[2,2]", 0, 3))
        yield draw.case(cls(3, 1, 0.0, 5.0, "i64"), draw.ints("i64[2,2]", 0, 3))


class TopK(Move):
    """The `k` largest (or smallest) elements along `axis`, in order (ties: the first first), and where they are (i64).

    NaN counts as the largest number.
    """

    k: int
    axis: int = -1
    largest: int = 1
    required_outputs = 2

    def infer(self, x):
        """k along the axis, for values and indices."""
        axis = normal_axis(self.axis, x.ndim, self)
        if x.ndim == 0 or not 0 <= self.k <= x.shape[axis]:
            raise self.fail(f"k = {self.k} is out of range", x)
        t = x.with_shape([self.k if i == axis else d for i, d in enumerate(x.shape)])
        return t, t.with_dtype("i64")

    def axis_factors(self, ins, outs):
        """All but the one that is sorted."""
        axis = normal_axis(self.axis, ins[0].ndim, self)
        return in_step(ins, outs, [a for a in range(ins[0].ndim) if a != axis])

    def compute(self, ins, outs, scratch):
        """A stable sort of the positions, a few rows at a time."""
        x = np.moveaxis(ins[0], self.axis, -1)
        values, indices = (np.moveaxis(o, self.axis, -1) for o in outs)
        if not values.size:
            return
        n = x.shape[-1]
        rows = max(1, _SORT_BYTES // (8 * n))
        for at in _blocks(x.shape[:-1], rows):
            part = x[at]
            numbers = part.astype(DTYPES[wide(dtype_name(x.dtype))], copy=False)  # NumPy puts no NaN of bf16 last
            if self.largest:
                order = n - 1 - np.argsort(numbers[..., ::-1], axis=-1, kind="stable")[..., ::-1][..., : self.k]
            else:
                order = np.argsort(numbers, axis=-1, kind="stable")[..., : self.k]
            indices[at] = order
            values[at] = np.take_along_axis(part, order, axis=-1)

    def cost(self, ins, outs):
        n = ins[0].shape[self.axis]
        return Cost(ins[0].size * max(n, 2).bit_length(), super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        """dy at the places found; only the indices are kept."""
        if grads[0] is None:
            return [None]
        return [b.GatherElementsGrad(outs[1], grads[0], shape=ins[0].shape, axis=self.axis)]

    def export(self, g, ins, outs):
        """ONNX TopK with k as an input."""
        g.node("TopK", [ins[0], g.ints((self.k,))], outs, axis=self.axis, largest=self.largest, sorted=1)
        return True

    @classmethod
    def from_onnx(cls, node):
        k = int(node.need_constant(1, "k").reshape(()))
        return node.emit(cls(k, node.attributes.get("axis", -1), node.attributes.get("largest", 1)), node.need(0))

    @classmethod
    def samples(cls, draw):
        """Largest and smallest, first and last axis, all, none, with ties."""
        yield draw.case(cls(2), draw.distinct("f64[3,4]"))
        yield draw.case(cls(2, 0, 0), draw.distinct("f64[4,2,3]"))
        yield draw.case(cls(3), draw.distinct("f64[3]"))
        yield draw.case(cls(0), draw.distinct("f64[2,3]"))
        yield draw.case(cls(3), draw.ints("i64[4,6]", 0, 3))


def _blocks(shape: tuple[int, ...], rows: int) -> Any:
    """Indices that go over `shape` in blocks of about `rows` elements."""
    if not shape:
        yield ()
        return
    inner = int(np.prod(shape[1:]))
    if inner <= rows or len(shape) == 1:
        step = max(1, rows // max(inner, 1))
        for i in range(0, shape[0], step):
            yield (slice(i, i + step),)
        return
    for i in range(shape[0]):
        for rest in _blocks(shape[1:], rows):
            yield (i, *rest)


class ReverseSequence(Move, onnx=True):
    """(x, lengths i64): for each b along `batch_axis`, the first lengths[b] along `time_axis` turned round."""

    batch_axis: int = 1
    time_axis: int = 0

    def infer(self, x, lengths):
        axes = {self.batch_axis, self.time_axis}
        if x.ndim < 2 or axes != {0, 1} or lengths.shape != (x.shape[self.batch_axis],):
            raise self.fail("needs axes 0 and 1, and a length for each row", x, lengths)
        return (x,)

    def axis_factors(self, ins, outs):
        """The batch, and all behind the first two."""
        batch = factor(ins[1].shape[0], [self.batch_axis, 0], [self.batch_axis])
        return [batch, *(factor(d, [a + 2], [a + 2]) for a, d in enumerate(ins[0].shape[2:]))]

    def compute(self, ins, outs, scratch):
        x, y = (np.swapaxes(a, 0, 1) if self.batch_axis == 1 else a for a in (ins[0], outs[0]))
        check_lengths(ins[1], x.shape[1], self.name)
        for i, length in enumerate(int(n) for n in ins[1]):
            y[i, :length] = x[i, :length][::-1]
            y[i, length:] = x[i, length:]

    def checks(self, ins, outs):
        return ((1, ("length", ins[0].shape[self.time_axis])),)

    def gradient(self, b, ins, outs, grads):
        """dy, reversed in the same way."""
        return [b.ReverseSequence(grads[0], ins[1], batch_axis=self.batch_axis, time_axis=self.time_axis), None]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[4,3,2]"), np.array([4, 0, 3]))
        yield draw.case(cls(0, 1), draw("f64[2,3]"), np.array([1, 2]))
