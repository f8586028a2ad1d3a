"""Operators that put tensors together, take them apart, and repeat them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from ...language.factors import Place, factor, in_step
from ...language.layouts import Turned, turned_axis, turned_whole
from ...language.types import TensorType, Values
from ..common import normal_axis
from .reshape import Move


def along(axis: int, start: int, stop: int) -> tuple[Any, ...]:
    """The index that takes `start:stop` of one axis and all of those before it."""
    return (slice(None),) * axis + (slice(start, stop),)


def leading(axis: int, x: TensorType) -> bool:
    """Whether a slice of `x` along `axis` is contiguous: only dimensions of one element stand before it."""
    return x.ndim > 0 and all(d == 1 for d in x.shape[: axis % x.ndim])


class Concat(Move, onnx=True):
    """Its inputs one after the other along `axis`."""

    axis: int

    def infer(self, *inputs):
        """The dimensions along `axis` added; the others are equal."""
        if not inputs:
            raise self.fail("it joins one input or more")
        first = inputs[0]
        axis = normal_axis(self.axis, first.ndim, self)
        rest = [(t.dtype, t.shape[:axis], t.shape[axis + 1 :]) for t in inputs]
        if first.ndim == 0 or any(r != rest[0] for r in rest):
            raise self.fail(f"inputs differ elsewhere than along axis {self.axis}", *inputs)
        total = sum(t.shape[axis] for t in inputs)
        return (first.with_shape([total if i == axis else d for i, d in enumerate(first.shape)]),)

    def axis_factors(self, ins, outs):
        """All but the joined one, of which equal inputs share an inner part."""
        axis, size = normal_axis(self.axis, ins[0].ndim, self), ins[0].shape[normal_axis(self.axis, ins[0].ndim, self)]
        factors = in_step(ins, outs, [a for a in range(ins[0].ndim) if a != axis])
        if any(t.shape[axis] != size for t in ins):
            return factors
        return (*factors, factor(size, [axis] * len(ins), [Place(axis, outer=len(ins))]))

    def compute(self, ins, outs, scratch):
        axis, at = self.axis % outs[0].ndim, 0
        for x in ins:
            outs[0][along(axis, at, at + x.shape[axis])] = x
            at += x.shape[axis]

    def joins(self, ins, outs):
        """One after the other, where nothing but dimensions of one element stands before the axis."""
        if not leading(self.axis, ins[0]):
            return ()
        offsets = [0, *itertools.accumulate(t.nbytes for t in ins)]
        return tuple(offsets[:-1])

    def gradient(self, b, ins, outs, grads):
        """The parts of dy, each by itself: those that nobody needs are never made."""
        axis, at, parts = self.axis % ins[0].ndim, 0, []
        for v in ins:
            end = at + v.shape[axis]
            parts.append(b.Slice(grads[0], starts=(at,), ends=(end,), axes=(axis,)))
            at = end
        return parts

    @classmethod
    def from_onnx(cls, node):
        """A single input is that input; inputs without elements along the axis are left out."""
        values = [x for x in node.inputs if x is not None]
        axis = node.attributes.get("axis", 1)
        inputs = [x for x in values if x.ndim == 0 or x.shape[normal_axis(axis, x.ndim, cls(axis))]] or values[:1]
        cls(axis).infer(*(x.type for x in values))
        return inputs[0] if len(inputs) == 1 else node.emit(cls(axis), *inputs)

    @classmethod
    def samples(cls, draw):
        """Two and three inputs, a negative axis, an empty input, one input."""
        yield draw.case(cls(axis=0), draw("f64[2,3]"), draw("f64[1,3]"))
        yield draw.case(cls(axis=-1), draw("f64[2,3]"), draw("f64[2,1]"), draw("f64[2,2]"))
        yield draw.case(cls(axis=1), draw("f64[2,3,2]"), draw("f64[2,0,2]"))
        yield draw.case(cls(axis=0), draw("f32[2]"))

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        return turned_whole(self, ins, outs, rank, axis=turned_axis(self.axis, rank))


class Split(Move):
    """x cut along `axis` into parts of `sizes`."""

    linear = ((0,),)
    sizes: tuple[int, ...]
    axis: int = 0

    @property
    def required_outputs(self):
        """All parts."""
        return len(self.sizes)

    def infer(self, x):
        axis = normal_axis(self.axis, x.ndim, self)
        if x.ndim == 0 or sum(self.sizes) != x.shape[axis] or min(self.sizes, default=-1) < 0:
            raise self.fail(f"cannot be cut into {list(self.sizes)} along axis {self.axis}", x)
        return tuple(x.with_shape([*x.shape[:axis], n, *x.shape[axis + 1 :]]) for n in self.sizes)

    def axis_factors(self, ins, outs):
        """All but the one that is cut, of which equal parts share an inner part."""
        axis = normal_axis(self.axis, ins[0].ndim, self)
        factors = in_step(ins, outs, [a for a in range(ins[0].ndim) if a != axis])
        if len(set(self.sizes)) != 1:
            return factors
        return (*factors, factor(self.sizes[0], [Place(axis, outer=len(self.sizes))], [axis] * len(self.sizes)))

    def sliced(self, factor, start, size, outs):
        """Smaller parts, where the index is inside of the axis that is cut."""
        axis = self.axis % next(t.ndim for t in outs if t is not None)
        inside = any(isinstance(p, Place) and p.axis == axis for p in factor.outputs)
        length = next(t.shape[axis] for t in outs if t is not None)
        return dataclasses.replace(self, sizes=(length,) * len(self.sizes)) if inside else self

    def compute(self, ins, outs, scratch):
        axis, at = self.axis % ins[0].ndim, 0
        for n, out in zip(self.sizes, outs, strict=False):
            if out is not None:
                out[...] = ins[0][along(axis, at, at + n)]
            at += n

    def views(self, ins, outs):
        """Parts of the same bytes, where nothing but dimensions of one element stands before the axis."""
        if not leading(self.axis, ins[0]):
            return ()
        part = ins[0].nbytes // max(ins[0].shape[self.axis], 1)
        return tuple(part * n for n in [0, *itertools.accumulate(self.sizes)][:-1])

    def gradient(self, b, ins, outs, grads):
        """The parts' gradients joined, zeros where there is none."""
        parts = [b.fill(0.0, v) if g is None else g for v, g in zip(outs, grads, strict=True)]
        return [parts[0] if len(parts) == 1 else b.Concat(*parts, axis=self.axis)]

    def export(self, g, ins, outs):
        """ONNX Split with the sizes as an input."""
        g.node("Split", [ins[0], g.ints(self.sizes)], outs, axis=self.axis)
        return True

    @classmethod
    def from_onnx(cls, node):
        """Sizes from the input or attribute, or equal parts of which the last may be smaller."""
        x, axis = node.need(0), node.attributes.get("axis", 0)
        whole = x.shape[normal_axis(axis, x.ndim, cls((), axis))]
        sizes = node.attributes.get("split")
        if sizes is None and node.type(1) is not None:
            sizes = node.need_constant(1, "split sizes").tolist()
        if sizes is None:
            count = node.attributes.get("num_outputs", len(node.outputs))
            if count != len(node.outputs):
                raise node.fail(f"num_outputs is {count}, but it has {len(node.outputs)} outputs")
            part = -(-whole // count)
            sizes = [max(0, min(part, whole - i * part)) for i in range(count)]
        if len(sizes) == 1:
            return x
        return node.emit(cls(tuple(int(n) for n in sizes), axis), x)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls((1, 2), -1), draw("f64[2,3]"))
        yield draw.case(cls((2, 0, 2)), draw("f64[4,3]"))
        yield draw.case(cls((3,), 1), draw("f64[2,3]"))
        yield draw.case(cls((1, 1), 1), draw("f32[2,2,3]"))

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        return turned_whole(self, ins, outs, rank, axis=turned_axis(self.axis, rank))


class Tile(Move):
    """x repeated `repeats[i]` times along axis i."""

    linear = ((0,),)
    repeats: tuple[int, ...]

    def infer(self, x):
        if len(self.repeats) != x.ndim or min(self.repeats, default=0) < 0:
            raise self.fail(f"repeats {list(self.repeats)} do not fit", x)
        return (x.with_shape([d * r for d, r in zip(x.shape, self.repeats, strict=True)]),)

    def _split(self, shape):
        """(r0, d0, r1, d1, ...): the result's dimensions with the repeats apart."""
        return [n for pair in zip(self.repeats, shape, strict=True) for n in pair]

    def axis_factors(self, ins, outs):
        """All; the repeats of an axis are its outer part."""
        x = ins[0].shape
        return [factor(d, [a], [Place(a, outer=r)]) for a, (d, r) in enumerate(zip(x, self.repeats, strict=True)) if r]

    def compute(self, ins, outs, scratch):
        x = ins[0]
        outs[0].reshape(self._split(x.shape))[...] = x.reshape([n for d in x.shape for n in (1, d)])

    def gradient(self, b, ins, outs, grads):
        """dy summed over the repeats."""
        shape = tuple(self._split(ins[0].shape))
        return [b.ReduceSum(b.Reshape(grads[0], shape=shape), axes=tuple(range(0, len(shape), 2)), keepdims=0)]

    def export(self, g, ins, outs):
        g.node("Tile", [ins[0], g.ints(self.repeats)], outs)
        return True

    @classmethod
    def from_onnx(cls, node):
        """Nothing where every count is 1."""
        x, repeats = node.need(0), tuple(int(r) for r in node.need_constant(1, "repeats"))
        return x if set(repeats) <= {1} and len(repeats) == x.ndim else node.emit(cls(repeats), x)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls((2, 3)), draw("f64[2,3]"))
        yield draw.case(cls((1, 2, 1)), draw("f64[2,1,3]"))
        yield draw.case(cls((2, 0)), draw("f64[2,3]"))
        yield draw.case(cls((2,)), draw("f32[3]"))
