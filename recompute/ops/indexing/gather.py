"""Gather: rows of a tensor by number, and the gradient of embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ...language.op import Op
from ...language.types import Array, Operands, TensorType
from ..common import normal_axis
from ..shape.reshape import Move
from .axes import backward, forward, gathered
from .flat import add_rows, check_bounds, take_rows

INDEX_TYPES = ("i64", "i32")


def need_indices(op: Op, t: TensorType, *types: TensorType) -> None:
    """TypeRuleError where `t` is no type of indices."""
    if t.dtype not in INDEX_TYPES:
        raise op.fail("indices must be i64 or i32", *types)


def need_entries(op: Op, x: TensorType, indices: TensorType, axes: Iterable[int]) -> None:
    """TypeRuleError where indices are to name something along an axis of x that is empty."""
    if indices.size and not all(x.shape[a] for a in axes):
        raise op.fail("there is nothing to take: an axis that indices count along is empty", x, indices)


def index_scratch(t: TensorType) -> tuple[TensorType, ...]:
    """Room for indices as i64, where they are not."""
    return () if t.dtype == "i64" else (t.with_dtype("i64"),)


def as_i64(indices: Array, scratch: Operands) -> Array:
    """The indices as i64: themselves, or a copy in the scratch declared by `index_scratch`."""
    if indices.dtype == np.int64:
        return indices
    scratch[0][...] = indices
    return scratch[0]


def index_within(*sizes: int) -> tuple:
    """The condition on indices along axes of these sizes (see `Op.checks`)."""
    return ("index", *sizes)


def coordinates_within(shape: Sequence[int], indices: TensorType, batch: int) -> tuple:
    """The condition on coordinates in a tensor of `shape` (see `Op.checks`)."""
    return index_within(*shape[batch : batch + indices.shape[-1]])


class Gather(Move, onnx=True):
    """(x, indices) → x[..., indices, ...] along `axis`; negative indices count from the end."""

    linear = ((0,),)
    axis: int = 0
    weights = (0,)

    def infer(self, x, indices):
        """x's dimension `axis` replaced by the dimensions of the indices."""
        need_indices(self, indices, x, indices)
        axis = normal_axis(self.axis, x.ndim, self)
        if x.ndim == 0:
            raise self.fail("needs at least one dimension", x, indices)
        need_entries(self, x, indices, (axis,))
        return (x.with_shape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]]),)

    def axis_factors(self, ins, outs):
        """The indices', and all of x but the one along which is taken."""
        return forward(gathered(ins[0].shape, ins[1], normal_axis(self.axis, ins[0].ndim, self)))

    def scratch(self, ins, outs):
        return index_scratch(ins[1])

    def compute(self, ins, outs, scratch):
        """One take.  IndexError where an index is out of range."""
        x, axis = ins[0], self.axis % ins[0].ndim
        check_bounds(ins[1], x.shape[axis], "Gather")
        take_rows(x, as_i64(ins[1], scratch), outs[0], axis)

    def checks(self, ins, outs):
        return ((1, index_within(ins[0].shape[self.axis])),)

    def gradient(self, b, ins, outs, grads):
        """dy added up at the rows it came from; only the indices are kept."""
        return [b.GatherGrad(ins[1], grads[0], shape=ins[0].shape, axis=self.axis), None]

    @classmethod
    def samples(cls, draw):
        """Rows, columns, one index, repeated and negative ones, no indices."""
        yield draw.case(cls(), draw("f64[4,3]"), draw.ints("i64[2,3]", -4, 4))
        yield draw.case(cls(axis=1), draw("f64[2,3,2]"), draw.ints("i32[4]", -3, 3))
        yield draw.case(cls(axis=-1), draw("f64[2,3]"), draw.ints("i64[]", 0, 3))
        yield draw.case(cls(), draw("f64[2,3]"), draw.ints("i64[0]", 0, 2))
        yield draw.case(cls(), draw("f32[5]"), draw.ints("i64[3]", 0, 5))


class GatherGrad(Move):
    """(indices, dy) → a tensor of `shape`: along `axis`, the sums of the rows of dy taken there.

    The sums run in the order of the indices: the same bits every time.  Half precision is added up in f32.
    """

    linear = ((1,),)
    shape: tuple[int, ...]
    axis: int = 0

    def infer(self, indices, dy):
        need_indices(self, indices, indices, dy)
        axis = normal_axis(self.axis, len(self.shape), self)
        if dy.shape != (*self.shape[:axis], *indices.shape, *self.shape[axis + 1 :]):
            raise self.fail(f"is not the gradient of Gather on {list(self.shape)}", indices, dy)
        need_entries(self, dy.with_shape(self.shape), indices, (axis,))
        return (dy.with_shape(self.shape),)

    def axis_factors(self, ins, outs):
        """Gather's factors; gradients of slices of the indices are partial sums."""
        return backward(gathered(self.shape, ins[0], normal_axis(self.axis, len(self.shape), self)))

    def scratch(self, ins, outs):
        """Indices as i64; the sums in f32 for half precision."""
        wide = (outs[0].with_dtype("f32"),) if outs[0].dtype in ("f16", "bf16") else ()
        return (*index_scratch(ins[0]), *wide)

    def compute(self, ins, outs, scratch):
        axis = self.axis % len(self.shape)
        inner = math.prod(self.shape[axis + 1 :])
        outer, size = math.prod(self.shape[:axis]), self.shape[axis]
        check_bounds(ins[0], size, "GatherGrad")
        rows = as_i64(ins[0], scratch).reshape(-1)
        target = scratch[-1] if outs[0].dtype.itemsize == 2 else outs[0]
        target.fill(0)
        add_rows(target.reshape(outer, size, inner), rows, ins[1].reshape(outer, rows.size, inner))
        if target is not outs[0]:
            np.copyto(outs[0], target, casting="unsafe")

    def checks(self, ins, outs):
        return ((0, index_within(self.shape[self.axis])),)

    def gradient(self, b, ins, outs, grads):
        return [None, b.Gather(grads[0], ins[0], axis=self.axis)]

    def expand(self, b, indices, dy):
        """ScatterND that adds, with the indexed axis in front."""
        axis = self.axis % len(self.shape)
        k = indices.ndim
        front = (*range(axis, axis + k), *range(axis), *range(axis + k, dy.ndim))
        order = (axis, *(i for i in range(len(self.shape)) if i != axis))
        updates = dy if axis == 0 else b.Transpose(dy, perm=front)
        places = indices if indices.dtype == "i64" else b.Cast(indices, to="i64")
        zeros = b.Fill(dtype=dy.dtype, shape=tuple(self.shape[i] for i in order))
        sums = b.ScatterND(zeros, b.Reshape(places, shape=(*indices.shape, 1)), updates, reduction="add")
        return (sums if axis == 0 else b.Transpose(sums, perm=tuple(order.index(i) for i in range(len(order)))),)

    def cost(self, ins, outs):
        """One addition for each element of dy."""
        base = super().cost(ins, outs)
        return type(base)(ins[1].size, base.bytes)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls((4, 3)), draw.ints("i64[2,3]", -4, 4), draw("f64[2,3,3]"))
        yield draw.case(cls((2, 3, 2), 1), draw.ints("i32[4]", -3, 3), draw("f64[2,4,2]"))
        yield draw.case(cls((2, 3), -1), draw.ints("i64[]", 0, 3), draw("f64[2]"))
        yield draw.case(cls((2, 3)), draw.ints("i64[0]", 0, 2), draw("f64[0,3]"))
        yield draw.case(cls((5, 128)), draw.ints("i64[7]", 0, 5), draw("f32[7,128]"))
