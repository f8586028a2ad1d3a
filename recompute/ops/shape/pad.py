"""Padding: a constant, mirror images, the edge, or the tensor wrapped around."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...language.exact import exact
from ...language.factors import in_step
from ...language.layouts import Turned, turned_pads, turned_whole
from ...language.op import Imported, ImportedNode, imports
from ...language.types import TensorType, Values
from ..common import normal_axis
from .reshape import Move


def sources(mode: str, size: int, before: int, after: int) -> list[int]:
    """Which element each position along an axis shows, for the modes that repeat elements."""
    places = range(-before, size + after)
    if mode == "edge":
        return [min(max(i, 0), size - 1) for i in places]
    if mode == "wrap":
        return [i % size for i in places]
    period = max(2 * (size - 1), 1)
    return [min(i % period, period - i % period) if size > 1 else 0 for i in places]


def padded(op: Pad, x: TensorType) -> TensorType:
    """x's type with `op.pads` added.  TypeRuleError where they do not fit."""
    n = x.ndim
    if len(op.pads) != 2 * n:
        raise op.fail(f"pads must be {2 * n} numbers, not {list(op.pads)}", x)
    shape = [d + op.pads[i] + op.pads[n + i] for i, d in enumerate(x.shape)]
    if min(shape, default=0) < 0:
        raise op.fail(f"pads {list(op.pads)} leave less than nothing", x)
    if op.mode != "constant":
        empty = any(d == 0 and s for d, s in zip(x.shape, shape, strict=True))
        if op.mode not in ("reflect", "edge", "wrap") or min(op.pads, default=0) < 0 or empty:
            raise op.fail(f"mode '{op.mode}' is unknown, or does not fit pads {list(op.pads)}", x)
    return x.with_shape(shape)


def inner(pads: Sequence[int], shape: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Indices of what a padded tensor and the tensor (of `shape`) share: in the padded one, in the tensor."""
    n = len(shape)
    there, here = [], []
    for i, d in enumerate(shape):
        before, after = pads[i], pads[n + i]
        start, stop = max(0, -before), d - max(0, -after)
        stop = max(start, stop)
        here.append(slice(start, stop))
        there.append(slice(start + before, stop + before))
    return tuple(there), tuple(here)


class Pad(Move):
    """x with `pads` (ONNX's order: before each axis, then after each) more elements; negative ones cut.

    `mode`: constant (all of them `value`), reflect (mirrored, the edge not repeated), edge, wrap.
    """

    pads: tuple[int, ...]
    mode: str = "constant"
    value: float = 0.0

    def infer(self, x):
        return (padded(self, x),)

    def axis_factors(self, ins, outs):
        rank = ins[0].ndim
        return in_step(ins, outs, [a for a in range(rank) if not self.pads[a] and not self.pads[rank + a]])

    def compute(self, ins, outs, scratch):
        """One copy inside; then the borders, axis by axis, slice by slice."""
        x, y = ins[0], outs[0]
        there, here = inner(self.pads, x.shape)
        if self.mode == "constant":
            y.fill(y.dtype.type(self.value))
            y[there] = x[here]
            return
        y[there] = x
        for axis, size in enumerate(x.shape):
            before, after = self.pads[axis], self.pads[x.ndim + axis]
            full, rest = (slice(None),) * axis, there[axis + 1 :]  # axes before are written in full by now
            for i, source in enumerate(sources(self.mode, size, before, after)):
                if not before <= i < before + size:
                    y[(*full, i, *rest)] = y[(*full, before + source, *rest)]

    def gradient(self, b, ins, outs, grads):
        """constant: what is inside; else every copy's gradient added to the original's."""
        if self.mode == "constant":
            return [b.Pad(grads[0], pads=tuple(-p for p in self.pads))]
        return [b.PadGrad(grads[0], pads=self.pads, mode=self.mode)]

    def export(self, g, ins, outs):
        x = g.type(ins[0])
        value = (
            [g.array(x.numpy.type(self.value))] if self.mode == "constant" and exact(self.value) != exact(0.0) else []
        )
        g.node("Pad", [ins[0], g.ints(self.pads), *value], outs, mode=self.mode)
        return True

    @classmethod
    def from_onnx(cls, node):
        """Pads, value and axes must be known; negative pads of the repeating modes are cut first."""
        x, mode = node.need(0), node.attributes.get("mode", "constant")
        pads = node.attributes.get("pads")
        pads = node.need_constant(1, "pads").reshape(-1).tolist() if pads is None else list(pads)
        if node.type(3) is not None:
            pads = _for_all_axes(pads, node.need_constant(3, "axes").reshape(-1).tolist(), x.ndim, cls(()))
        value = float(node.attributes.get("value", 0.0))
        if node.type(2) is not None and mode == "constant":
            value = float(node.need_constant(2, "padding value").reshape(()))
        if mode != "constant" and min(pads, default=0) < 0:
            x = node.emit(cls(tuple(min(p, 0) for p in pads)), x)
            pads = [max(p, 0) for p in pads]
        return node.emit(cls(tuple(pads), mode, value), x) if any(pads) else x

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls((1, 0, 0, 2), value=1.5), draw("f64[2,3]"))
        yield draw.case(cls((-1, 1, 1, -2)), draw("f64[3,3]"))
        yield draw.case(cls((0, 1, 1, 1)), draw("f64[0,3]"))
        yield draw.case(cls((-2, -1)), draw("f64[3]"))
        for mode in ("reflect", "edge", "wrap"):
            yield draw.case(cls((0, 2, 1, 0, 1, 2), mode), draw("f64[2,3,4]"))
            yield draw.case(cls((1, 1), mode), draw("f32[2]"))

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        return turned_whole(self, ins, outs, rank, pads=turned_pads(self.pads))


def _for_all_axes(pads: Sequence[int], axes: Sequence[int], ndim: int, op: Pad) -> list[int]:
    """Pads given for some axes, written out for all."""
    result = [0] * (2 * ndim)
    for i, axis in enumerate(axes):
        at = normal_axis(int(axis), ndim, op)
        result[at], result[ndim + at] = pads[i], pads[len(axes) + i]
    return result


class PadGrad(Move):
    """The gradient of Pad in the modes that repeat elements: each element's own dy and that of all its copies."""

    linear = ((0,),)
    pads: tuple[int, ...]
    mode: str

    def _shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        n = len(shape)
        return tuple(d - self.pads[i] - self.pads[n + i] for i, d in enumerate(shape))

    def infer(self, dy):
        if len(self.pads) != 2 * dy.ndim or min(self._shape(dy.shape), default=0) < 0:
            raise self.fail(f"pads {list(self.pads)} do not fit", dy)
        return (dy.with_shape(self._shape(dy.shape)),)

    def axis_factors(self, ins, outs):
        rank = ins[0].ndim
        return in_step(ins, outs, [a for a in range(rank) if not self.pads[a] and not self.pads[rank + a]])

    def scratch(self, ins, outs):
        """A copy of dy, in which the borders are folded inwards."""
        return (ins[0],)

    def compute(self, ins, outs, scratch):
        """From the last axis to the first, each border slice is added to the one that it showed."""
        work, shape = scratch[0], outs[0].shape
        work[...] = ins[0]
        there, _ = inner(self.pads, shape)
        for axis in range(len(shape) - 1, -1, -1):
            before = self.pads[axis]
            full, rest = (slice(None),) * axis, there[axis + 1 :]
            for i, source in enumerate(sources(self.mode, shape[axis], before, self.pads[len(shape) + axis])):
                if not before <= i < before + shape[axis]:
                    target = work[(*full, slice(before + source, before + source + 1), *rest)]
                    np.add(target, work[(*full, slice(i, i + 1), *rest)], out=target)
        outs[0][...] = work[there]

    def gradient(self, b, ins, outs, grads):
        """dy, padded in the same way."""
        return [b.Pad(grads[0], pads=self.pads, mode=self.mode)]

    def expand(self, b, dy):
        """Axis by axis, the gradient of a Gather with the positions written out."""
        shape = self._shape(dy.shape)
        n = dy.ndim
        for axis in range(n):
            if self.pads[axis] or self.pads[n + axis]:
                rows = sources(self.mode, shape[axis], self.pads[axis], self.pads[n + axis])
                now = tuple(shape[i] if i == axis else d for i, d in enumerate(dy.shape))
                dy = b.GatherGrad(b.constant(rows, "i64"), dy, shape=now, axis=axis)
        return (dy,)

    @classmethod
    def samples(cls, draw):
        for mode in ("reflect", "edge", "wrap"):
            yield draw.case(cls((0, 2, 1, 0, 1, 2), mode), draw("f64[2,6,7]"))
            yield draw.case(cls((1, 1), mode), draw("f32[4]"))

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        """Borders are folded axis by axis: the order of the sums stays if no channels are among them."""
        if any(self.pads[a] or self.pads[a + rank] for a in (0, 1)):
            return None
        return turned_whole(self, ins, outs, rank, pads=turned_pads(self.pads))


@imports("CenterCropPad")
def _center_crop_pad(node: ImportedNode) -> Imported:
    """Slice, then Pad with zeros: what is odd is cut, and added, at the end."""
    x, wanted = node.need(0), node.need_constant(1, "shape").reshape(-1)
    axes = node.attributes.get("axes") or range(x.ndim)
    target = list(x.shape)
    for axis, n in zip(axes, wanted, strict=True):
        target[axis] = int(n)
    starts = [max(n - t, 0) // 2 for n, t in zip(x.shape, target, strict=True)]
    ends = [s + min(n, t) for s, n, t in zip(starts, x.shape, target, strict=True)]
    before = [max(t - n, 0) // 2 for n, t in zip(x.shape, target, strict=True)]
    after = [max(t - n, 0) - p for n, t, p in zip(x.shape, target, before, strict=True)]
    b = node.builder
    if any(t < n for n, t in zip(x.shape, target, strict=True)):
        x = b.Slice(x, starts=tuple(starts), ends=tuple(ends), axes=tuple(range(x.ndim)))
    return b.Pad(x, pads=(*before, *after)) if any((*before, *after)) else b.Identity(x)
