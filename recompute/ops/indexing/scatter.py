"""Gathering and scattering by coordinates: the Elements and ND operators.

They turn their indices into flat positions, in declared scratch, and then move elements or rows by number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.factors import factor, in_step
from ...language.op import Op, OperatorBuilder
from ...language.types import Array, Operands, TensorType, Value
from ..common import normal_axis
from ..shape.reshape import Move
from .axes import backward, coordinates, elements, forward
from .flat import REDUCTIONS, add_rows, check_bounds, set_rows, take_rows
from .gather import coordinates_within, index_within, need_entries, need_indices


def strides(shape: Sequence[int]) -> list[int]:
    """How many elements apart neighbours along each axis are, in row-major order."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def element_positions(indices: Array, shape: Sequence[int], axis: int, out: Array, what: str) -> Array:
    """Flat positions in a tensor of `shape` of what GatherElements takes, written to `out` (i64)."""
    check_bounds(indices, shape[axis], what)
    out[...] = indices
    if shape[axis]:
        np.remainder(out, shape[axis], out=out)
    steps = strides(shape)
    np.multiply(out, steps[axis], out=out)
    for i, n in enumerate(indices.shape):
        if i != axis:
            place = np.arange(n, dtype=np.int64) * steps[i]
            np.add(out, place.reshape([n if j == i else 1 for j in range(out.ndim)]), out=out)
    return out.reshape(-1)


def row_positions(indices: Array, shape: Sequence[int], batch: int, scratch: Operands, what: str) -> Array:
    """Flat numbers of the rows that GatherND takes from a tensor of `shape`.

    `scratch`: two i64 buffers of shape indices.shape[:-1]; the result is in the first.
    """
    depth = indices.shape[-1]
    out, term = scratch
    out.fill(0)
    for i in range(depth):  # Horner's rule
        size = shape[batch + i]
        check_bounds(indices[..., i], size, what)
        np.multiply(out, size, out=out)
        if size:
            np.remainder(indices[..., i], size, out=term)
            np.add(out, term, out=out)
    steps = strides(shape[: batch + depth])
    for i in range(batch):
        place = np.arange(shape[i], dtype=np.int64) * steps[i]
        np.add(out, place.reshape([-1 if j == i else 1 for j in range(out.ndim)]), out=out)
    return out.reshape(-1)


def row_scratch(indices: TensorType) -> tuple[TensorType, TensorType]:
    """The scratch of `row_positions`."""
    t = indices.with_shape(indices.shape[:-1])
    return t, t


def check_elements(op: Op, x: TensorType, indices: TensorType, axis: int) -> None:
    """TypeRuleError where indices of the Elements operators do not fit."""
    need_indices(op, indices, x, indices)
    axis = normal_axis(axis, x.ndim, op)
    small = all(i == axis or n <= d for i, (n, d) in enumerate(zip(indices.shape, x.shape, strict=False)))
    if x.ndim == 0 or x.ndim != indices.ndim or not small:
        raise op.fail("indices must have as many dimensions, and nowhere larger ones", x, indices)
    need_entries(op, x, indices, (axis,))


class GatherElements(Move, onnx=True):
    """(x, indices) → y[i, j, ...] = x[i, indices[i, j, ...], ...] for `axis` 1, and so on for other axes."""

    linear = ((0,),)
    axis: int = 0

    def infer(self, x, indices):
        check_elements(self, x, indices, self.axis)
        return (x.with_shape(indices.shape),)

    def axis_factors(self, ins, outs):
        """The indices'; x is cut where it is as long."""
        return elements(ins[0].shape, ins[1], normal_axis(self.axis, ins[0].ndim, self))

    def scratch(self, ins, outs):
        return (ins[1].with_dtype("i64"),)

    def compute(self, ins, outs, scratch):
        x, axis = ins[0], self.axis % ins[0].ndim
        at = element_positions(ins[1], x.shape, axis, scratch[0], self.name)
        take_rows(x.reshape(-1), at, outs[0].reshape(-1))

    def checks(self, ins, outs):
        return ((1, index_within(ins[0].shape[self.axis])),)

    def gradient(self, b, ins, outs, grads):
        """dy added up where it came from."""
        return [b.GatherElementsGrad(ins[1], grads[0], shape=ins[0].shape, axis=self.axis), None]

    @classmethod
    def samples(cls, draw):
        """Both axes, negative and repeated indices, fewer rows than x has."""
        yield draw.case(cls(), draw("f64[4,3]"), draw.ints("i64[2,3]", -4, 4))
        yield draw.case(cls(-1), draw("f64[4,3]"), draw.ints("i32[2,5]", -3, 3))
        yield draw.case(cls(1), draw("f64[2,3,2]"), draw.ints("i64[2,4,1]", 0, 3))
        yield draw.case(cls(), draw("f32[3]"), draw.ints("i64[0]", 0, 3))


class GatherElementsGrad(Move):
    """(indices, dy) → a tensor of `shape`, each element the sum of what was taken there."""

    linear = ((1,),)
    shape: tuple[int, ...]
    axis: int = 0

    def infer(self, indices, dy):
        check_elements(self, dy.with_shape(self.shape), indices, self.axis)
        if indices.shape != dy.shape:
            raise self.fail("indices and dy differ in shape", indices, dy)
        return (dy.with_shape(self.shape),)

    def axis_factors(self, ins, outs):
        """GatherElements' factors; gradients of slices of the indices are partial sums."""
        return elements(self.shape, ins[0], normal_axis(self.axis, len(self.shape), self), back=True)

    def scratch(self, ins, outs):
        return (ins[0].with_dtype("i64"),)

    def compute(self, ins, outs, scratch):
        axis = self.axis % len(self.shape)
        at = element_positions(ins[0], self.shape, axis, scratch[0], self.name)
        outs[0].fill(0)
        add_rows(outs[0].reshape(1, -1, 1), at, ins[1].reshape(1, -1, 1))

    def checks(self, ins, outs):
        return ((0, index_within(self.shape[self.axis])),)

    def gradient(self, b, ins, outs, grads):
        return [None, b.GatherElements(grads[0], ins[0], axis=self.axis)]

    def expand(self, b, indices, dy):
        zeros = b.Fill(dtype=dy.dtype, shape=self.shape)
        return (b.ScatterElements(zeros, indices, dy, axis=self.axis, reduction="add"),)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls((4, 3)), draw.ints("i64[2,3]", -4, 4), draw("f64[2,3]"))
        yield draw.case(cls((2, 3, 2), 1), draw.ints("i64[2,4,1]", 0, 3), draw("f64[2,4,1]"))
        yield draw.case(cls((3,)), draw.ints("i64[2]", 0, 3), draw("f32[2]"))


def rows_taken(op: Op, x: TensorType, indices: TensorType, batch: int) -> tuple[int, ...]:
    """The shape of what GatherND takes.  TypeRuleError where the indices do not fit."""
    if indices.dtype != "i64":
        raise op.fail("indices must be i64", x, indices)
    depth = indices.shape[-1] if indices.ndim else 0
    fits = 0 <= batch < indices.ndim and batch + depth <= x.ndim and x.shape[:batch] == indices.shape[:batch]
    if not fits:
        raise op.fail("indices do not fit", x, indices)
    need_entries(op, x, indices, range(batch, batch + depth))
    return (*indices.shape[:-1], *x.shape[batch + depth :])


class GatherND(Move, onnx=True):
    """(x, indices) → the parts of x at the coordinates in the indices' last axis."""

    linear = ((0,),)
    batch_dims: int = 0

    def infer(self, x, indices):
        """The indices' shape without the last axis, then what remains of x's."""
        return (x.with_shape(rows_taken(self, x, indices, self.batch_dims)),)

    def axis_factors(self, ins, outs):
        """Batches, the indices' own, and what remains of x."""
        return forward(coordinates(ins[0].shape, ins[1], self.batch_dims))

    def scratch(self, ins, outs):
        return row_scratch(ins[1])

    def compute(self, ins, outs, scratch):
        x, indices = ins
        at = row_positions(indices, x.shape, self.batch_dims, scratch, self.name)
        inner = math.prod(x.shape[self.batch_dims + indices.shape[-1] :])
        if outs[0].size:
            take_rows(x.reshape(-1, inner), at, outs[0].reshape(-1, inner))

    def checks(self, ins, outs):
        return ((1, coordinates_within(ins[0].shape, ins[1], self.batch_dims)),)

    def gradient(self, b, ins, outs, grads):
        """dy added up where it came from."""
        return [b.GatherNDGrad(ins[1], grads[0], shape=ins[0].shape, batch_dims=self.batch_dims), None]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[3,4]"), draw.ints("i64[5,2]", -3, 3))
        yield draw.case(cls(), draw("f64[3,2]"), draw.ints("i64[2,2,1]", 0, 3))
        yield draw.case(cls(1), draw("f64[2,3,2]"), draw.ints("i64[2,4,1]", -3, 3))
        yield draw.case(cls(2), draw("f64[2,2,3]"), draw.ints("i64[2,2,1]", 0, 3))
        yield draw.case(cls(), draw("f32[3]"), draw.ints("i64[0,1]", 0, 3))


class GatherNDGrad(Move):
    """(indices, dy) → a tensor of `shape`, each part the sum of what was taken there."""

    linear = ((1,),)
    shape: tuple[int, ...]
    batch_dims: int = 0

    def infer(self, indices, dy):
        x = dy.with_shape(self.shape)
        if rows_taken(self, x, indices, self.batch_dims) != dy.shape:
            raise self.fail("indices and dy do not fit", indices, dy)
        return (x,)

    def axis_factors(self, ins, outs):
        """GatherND's factors; gradients of slices of the indices are partial sums."""
        return backward(coordinates(self.shape, ins[0], self.batch_dims))

    def scratch(self, ins, outs):
        return row_scratch(ins[0])

    def compute(self, ins, outs, scratch):
        indices, dy = ins
        at = row_positions(indices, self.shape, self.batch_dims, scratch, self.name)
        inner = math.prod(self.shape[self.batch_dims + indices.shape[-1] :])
        outs[0].fill(0)
        if dy.size:
            add_rows(outs[0].reshape(1, -1, inner), at, dy.reshape(1, -1, inner))

    def checks(self, ins, outs):
        return ((0, coordinates_within(self.shape, ins[0], self.batch_dims)),)

    def gradient(self, b, ins, outs, grads):
        return [None, b.GatherND(grads[0], ins[0], batch_dims=self.batch_dims)]

    def expand(self, b, indices, dy):
        """ScatterND that adds, the batch's own coordinates written before the given ones."""
        zeros = b.Fill(dtype=dy.dtype, shape=self.shape)
        grids = []
        for i in range(self.batch_dims):
            shape = [1] * indices.ndim
            shape[i] = self.shape[i]
            place = b.constant(list(range(self.shape[i])), "i64")
            grids.append(b.Expand(b.Reshape(place, shape=tuple(shape)), shape=(*indices.shape[:-1], 1)))
        places = b.Concat(*grids, indices, axis=-1) if grids else indices
        return (b.ScatterND(zeros, places, dy, reduction="add"),)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls((3, 4)), draw.ints("i64[5,2]", -3, 3), draw("f64[5]"))
        yield draw.case(cls((2, 3, 2), 1), draw.ints("i64[2,4,1]", -3, 3), draw("f64[2,4,2]"))
        yield draw.case(cls((2, 2, 3), 2), draw.ints("i64[2,2,1]", 0, 3), draw("f64[2,2]"))
        yield draw.case(cls((3,)), draw.ints("i64[2,1]", 0, 3), draw("f32[2]"))


class Scatter(Move, abstract=True):
    """The base of ScatterElements and ScatterND: the gradients of their reductions."""

    def check(self: Any, *types: TensorType) -> None:
        """TypeRuleError where the reduction is unknown or element types differ."""
        if self.reduction not in ("none", *REDUCTIONS) or types[0].dtype != types[2].dtype:
            raise self.fail(f"reduction '{self.reduction}' is unknown or element types differ", *types)

    def take(self, b: OperatorBuilder, x: Value, indices: Value) -> Value:
        """The elements of x at the indices, before the updates."""
        raise NotImplementedError

    def put(self, b: OperatorBuilder, x: Value, indices: Value, updates: Value, how: str) -> Value:
        """This operator with another reduction."""
        raise NotImplementedError

    def gradient(self: Any, b, ins, outs, grads):
        """none: the old contents get nothing where they were written over; add: dy; mul, max, min below."""
        (x, indices, updates), y, dy = ins, outs[0], grads[0]
        if self.reduction == "none":
            kept = self.put(b, dy, indices, b.fill(0.0, updates), "none")
            return [kept, None, self.take(b, dy, indices)]
        if self.reduction == "add":
            return [dy, None, self.take(b, dy, indices)]
        if self.reduction == "mul":  # the product of all other factors: y / u, and for the only zero y without it
            dx = b.Mul(dy, self.put(b, b.fill(1.0, x), indices, updates, "mul"))
            zero = b.Equal(updates, b.constant(0, updates))
            safe = b.Where(zero, b.constant(1, updates), updates)
            zeros = self.put(b, b.fill(0.0, x), indices, b.Cast(zero, to=x.dtype), "add")
            one = b.Equal(zeros, b.constant(1, x))
            product = b.Where(one, self.put(b, x, indices, safe, "mul"), y)
            others = b.Where(zero, self.take(b, b.Mul(dy, product), indices), self.take(b, b.Mul(dy, y), indices))
            return [dx, None, b.Div(others, safe)]
        # shared evenly among all that equal the result (as PyTorch does)
        stayed = b.Cast(b.Equal(x, y), to=x.dtype)
        won = b.Cast(b.Equal(updates, self.take(b, y, indices)), to=x.dtype)
        share = b.Div(dy, self.put(b, stayed, indices, won, "add"))
        return [b.Mul(stayed, share), None, b.Mul(won, self.take(b, share, indices))]


class ScatterElements(Scatter, onnx=True):
    """(x, indices, updates) → x with y[i, indices[i, j], ...] = updates[i, j, ...] for `axis` 1."""

    axis: int = 0
    reduction: str = "none"

    def infer(self, x, indices, updates):
        self.check(x, indices, updates)
        check_elements(self, x, indices, self.axis)
        if indices.shape != updates.shape:
            raise self.fail("indices and updates differ in shape", x, indices, updates)
        return (x,)

    def axis_factors(self, ins, outs):
        """Others than `axis` along which x is as long as the indices."""
        axis, shape = normal_axis(self.axis, ins[0].ndim, self), ins[1].shape
        return in_step(ins, outs, [a for a, d in enumerate(ins[0].shape) if a != axis and shape[a] == d])

    def scratch(self, ins, outs):
        return (ins[1].with_dtype("i64"),)

    def compute(self, ins, outs, scratch):
        """A copy, then the updates in their order."""
        x, indices, updates = ins
        at = element_positions(indices, x.shape, self.axis % x.ndim, scratch[0], self.name)
        outs[0][...] = x
        set_rows(outs[0].reshape(-1, 1), at, updates.reshape(-1, 1), self.reduction)

    def checks(self, ins, outs):
        return ((1, index_within(ins[0].shape[self.axis])),)

    def take(self, b, x, indices):
        return b.GatherElements(x, indices, axis=self.axis)

    def put(self, b, x, indices, updates, how):
        return b.ScatterElements(x, indices, updates, axis=self.axis, reduction=how)

    @classmethod
    def samples(cls, draw):
        """Every reduction; repeated places only where they are reduced."""
        once = draw.generator.permuted(draw.ints("i64[3,4]", 0, 1) + range(4), axis=1)[:, :2] - 2
        yield draw.case(cls(1), draw("f64[3,4]"), once, draw("f64[3,2]"))
        yield draw.case(cls(0, "add"), draw("f64[4,3]"), draw.ints("i32[2,3]", -4, 4), draw("f64[2,3]"))
        yield draw.case(cls(1, "mul"), draw("f64[2,3]"), draw.ints("i64[2,4]", 0, 3), draw("f64[2,4]", 0.5, 2.0))
        for how in ("max", "min"):
            data = draw.distinct("f64[2,7]")
            yield draw.case(cls(1, how), data[:, :3], draw.ints("i64[2,4]", 0, 3), data[:, 3:])
        yield draw.case(cls(), draw("f32[3]"), draw.ints("i64[1]", 0, 3), draw("f32[1]"))


class ScatterND(Scatter, onnx=True):
    """(x, indices, updates) → x with parts, at the coordinates in the last axis, replaced or reduced."""

    reduction: str = "none"

    def infer(self, x, indices, updates):
        self.check(x, indices, updates)
        if rows_taken(self, x, indices, 0) != updates.shape:
            raise self.fail("updates do not fit", x, indices, updates)
        return (x,)

    def axis_factors(self, ins, outs):
        """The axes of x behind the coordinates."""
        return [factor(d, [x, None, y], [x]) for d, x, _, y in coordinates(ins[0].shape, ins[1], 0) if x is not None]

    def scratch(self, ins, outs):
        return row_scratch(ins[1])

    def compute(self, ins, outs, scratch):
        """A copy, then the updates in their order."""
        x, indices, updates = ins
        at = row_positions(indices, x.shape, 0, scratch, self.name)
        inner = math.prod(x.shape[indices.shape[-1] :])
        outs[0][...] = x
        if updates.size:
            set_rows(outs[0].reshape(-1, inner), at, updates.reshape(-1, inner), self.reduction)

    def checks(self, ins, outs):
        return ((1, coordinates_within(ins[0].shape, ins[1], 0)),)

    def take(self, b, x, indices):
        return b.GatherND(x, indices)

    def put(self, b, x, indices, updates, how):
        return b.ScatterND(x, indices, updates, reduction=how)

    @classmethod
    def samples(cls, draw):
        """Every reduction; repeated places only where they are reduced; no updates."""
        once = draw.generator.permutation(4)[:2].reshape(2, 1) - 4
        yield draw.case(cls(), draw("f64[4,3]"), once, draw("f64[2,3]"))
        yield draw.case(cls("add"), draw("f64[3,4]"), draw.ints("i64[5,2]", -3, 3), draw("f64[5]"))
        yield draw.case(cls("mul"), draw("f64[3,2]"), draw.ints("i64[4,1]", 0, 3), draw("f64[4,2]", 0.5, 2.0))
        for how in ("max", "min"):
            data = draw.distinct("f64[7,2]")
            yield draw.case(cls(how), data[:3], draw.ints("i64[4,1]", 0, 3), data[3:])
        yield draw.case(cls("add"), draw("f32[3]"), draw.ints("i64[0,1]", 0, 3), draw("f32[0]"))
