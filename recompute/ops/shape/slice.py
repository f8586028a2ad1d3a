"""Static slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

from ...language.factors import in_step
from ...language.layouts import Turned, turned_axes, turned_list, turned_whole
from ...language.types import Values
from ..common import normal_axis
from .reshape import Move

#: ends in ONNX models that mean "to the end"
_FAR = (1 << 62) - 1


def _bound(n: int) -> int:
    return max(-_FAR, min(_FAR, int(n)))


class Sliced(Move, abstract=True):
    """The base of Slice and its gradient: Python's slices, `starts:ends:steps`, of some axes."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    axes: tuple[int, ...]
    steps: tuple[int, ...] | None = None

    def index(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """The index that takes the slice from a tensor of `shape`."""
        slices = [slice(None)] * len(shape)
        steps = self.steps or (1,) * len(self.starts)
        for start, end, axis, step in zip(self.starts, self.ends, self.axes, steps, strict=True):
            slices[normal_axis(axis, len(shape), self)] = slice(start, end, step)
        return tuple(slices)

    def taken(self, shape: Sequence[int]) -> list[range]:
        """The positions taken along each axis of a tensor of `shape`."""
        lengths = {len(self.starts), len(self.ends), len(self.axes), len(self.steps or self.starts)}
        if len(lengths) > 1 or 0 in (self.steps or ()):
            raise self.fail("starts, ends, axes and steps differ in length, or a step is 0")
        if len({normal_axis(a, len(shape), self) for a in self.axes}) < len(self.axes):
            raise self.fail(f"axes {list(self.axes)} name an axis twice")
        return [range(*s.indices(d)) for s, d in zip(self.index(shape), shape, strict=True)]

    def untouched(self, shape: Sequence[int]) -> list[int]:
        """Axes that are taken whole."""
        return [a for a, (r, d) in enumerate(zip(self.taken(shape), shape, strict=True)) if r == range(d)]


class Slice(Sliced):
    """x[starts:ends:steps] along `axes`, with Python's rules for any numbers (ONNX has the same)."""

    linear = ((0,),)

    def infer(self, x):
        return (x.with_shape([len(r) for r in self.taken(x.shape)]),)

    def axis_factors(self, ins, outs):
        return in_step(ins, outs, self.untouched(ins[0].shape))

    def compute(self, ins, outs, scratch):
        outs[0][...] = ins[0][self.index(ins[0].shape)]

    def views(self, ins, outs):
        """Part of the same bytes, where whole rows are taken one after the other."""
        taken = self.taken(ins[0].shape)
        cut = [i for i, (r, d) in enumerate(zip(taken, ins[0].shape, strict=True)) if len(r) != d]
        steps_of_one = all(r.step == 1 or len(r) <= 1 for r in taken)
        if not steps_of_one or any(d != 1 for i in cut for d in ins[0].shape[:i]) or outs[0].size == 0:
            return ()
        elements = 0
        for r, d in zip(taken, ins[0].shape, strict=True):
            elements = elements * d + r.start
        return (elements * ins[0].numpy.itemsize,)

    def gradient(self, b, ins, outs, grads):
        """dy among zeros; nothing is kept."""
        return [b.SliceGrad(grads[0], shape=ins[0].shape, **self.attributes())]

    def export(self, g, ins, outs):
        """ONNX Slice: all but the data as inputs."""
        steps = [] if self.steps is None else [g.ints(self.steps)]
        g.node("Slice", [ins[0], g.ints(self.starts), g.ints(self.ends), g.ints(self.axes), *steps], outs)
        return True

    @classmethod
    def from_onnx(cls, node):
        """Everything but the data must be known; a slice that takes all is left out."""
        x, attributes = node.need(0), node.attributes
        if "starts" in attributes:
            starts, ends, axes, steps = attributes["starts"], attributes["ends"], attributes.get("axes"), None
        else:
            starts = node.need_constant(1, "starts").reshape(-1).tolist()
            ends = node.need_constant(2, "ends").reshape(-1).tolist()
            axes = None if node.type(3) is None else node.need_constant(3, "axes").reshape(-1).tolist()
            steps = None if node.type(4) is None else node.need_constant(4, "steps").reshape(-1).tolist()
        axes = range(len(starts)) if axes is None else axes
        steps = None if steps is None or set(steps) == {1} else tuple(map(int, steps))
        op = cls(tuple(map(_bound, starts)), tuple(map(_bound, ends)), tuple(map(int, axes)), steps)
        everything = all(r == range(d) for r, d in zip(op.taken(x.shape), x.shape, strict=True))
        return x if everything else node.emit(op, x)

    @classmethod
    def samples(cls, draw):
        """Strides, negative steps and positions, clipping, an empty result."""
        yield draw.case(cls((1,), (3,), (0,)), draw("f64[4,3]"))
        yield draw.case(cls((0, -1), (_FAR, -_FAR), (1, -3), (2, -1)), draw("f64[2,3,5]"))
        yield draw.case(cls((-2, -9), (9, -1), (0, 1)), draw("f64[4,3]"))
        yield draw.case(cls((4, 2), (0, 9), (0, 1), (-3, 1)), draw("f64[5,3]"))
        yield draw.case(cls((2,), (2,), (0,)), draw("f64[4,3]"))
        yield draw.case(cls((), (), ()), draw("f32[2]"))

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        return turned_whole(self, ins, outs, rank, axes=turned_axes(self.axes, rank))


class SliceGrad(Sliced):
    """dy at the places that the slice takes from a tensor of `shape`, zeros elsewhere."""

    linear = ((0,),)
    shape: tuple[int, ...] = field(kw_only=True)

    def infer(self, dy):
        if tuple(len(r) for r in self.taken(self.shape)) != dy.shape:
            raise self.fail(f"is not the gradient of that slice of {list(self.shape)}", dy)
        return (dy.with_shape(self.shape),)

    def axis_factors(self, ins, outs):
        return in_step(ins, outs, self.untouched(self.shape))

    def compute(self, ins, outs, scratch):
        outs[0].fill(0)
        outs[0][self.index(self.shape)] = ins[0]

    def gradient(self, b, ins, outs, grads):
        return [b.Slice(grads[0], **self.options(Sliced))]

    def export(self, g, ins, outs):
        """For each axis: a zero appended, then a Gather that puts elements and zeros in place."""
        name = ins[0]
        shape = list(g.shape(ins[0]))
        for axis, (places, size) in enumerate(zip(self.taken(self.shape), self.shape, strict=True)):
            if places != range(size):
                name = self._spread(g, name, tuple(shape), axis, places)
                shape[axis] = size
        g.node("Identity", [name], outs)
        return True

    def _spread(self, g: Any, name: str, shape: tuple[int, ...], axis: int, places: range) -> str:
        """Along one axis, element i goes to `places[i]`; a zero appended after the last fills the rest."""
        pads = [0] * (2 * len(shape))
        pads[len(shape) + axis] = 1
        padded = g.call("Pad", name, g.ints(pads))
        source = [shape[axis]] * self.shape[axis]
        for i, place in enumerate(places):
            source[place] = i
        return g.call("Gather", padded, g.ints(source), axis=axis)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls((1,), (3,), (0,), shape=(4, 3)), draw("f64[2,3]"))
        yield draw.case(cls((0, -1), (_FAR, -_FAR), (1, -3), (2, -1), shape=(2, 3, 5)), draw("f64[2,2,5]"))
        yield draw.case(cls((2,), (2,), (0,), shape=(4, 3)), draw("f64[0,3]"))
        yield draw.case(cls((), (), (), shape=(2,)), draw("f32[2]"))

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        axes = turned_axes(self.axes, rank)
        return turned_whole(self, ins, outs, rank, axes=axes, shape=turned_list(self.shape))
