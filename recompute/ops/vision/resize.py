"""Resizing by interpolation: a matrix product (or, for `nearest`, a gather) along each resized axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.factors import Factor, in_step
from ...language.layouts import Turned, turned_list, turned_pads, turned_whole
from ...language.op import Cost, Imported, ImportedNode, Op, imports
from ...language.types import Array, Operands, TensorType, Types, Values, present
from ..norm.numerics import wide
from ..shape.reshape import reshape
from .resize_maps import COORDINATES, NEAREST, Span, indices, matrix, outside


class Interpolation(Op, abstract=True):
    """The base of Resize and its gradient.

    `scales`: output by input size of every axis; () where they follow from the sizes.  `roi`: for
    tf_crop_and_resize, the starts and the ends, for all axes, of the part that is resized.
    """

    autocast = "follow"
    shape: tuple[int, ...]
    scales: tuple[float, ...] = ()
    mode: str = "nearest"
    coordinate_transformation_mode: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: int = 0
    antialias: int = 0
    roi: tuple[float, ...] = ()

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        x, y = present(ins[0], outs[0])
        resized = {a for a, _ in self.maps(x.shape, y.shape)} | {a for a, _ in self.maps(y.shape, x.shape)}
        return in_step(ins, outs, [a for a in range(x.ndim) if a not in resized])

    def maps(self, small: Sequence[int], large: Sequence[int]) -> list[tuple[int, Span]]:
        """Resized axes and what is done along each, those first that grow least; forward is `small` → `large`."""
        n = len(small)
        scales = self.scales or [o / i if i else 1.0 for i, o in zip(small, large, strict=True)]
        roi = self.roi or (*[0.0] * n, *[1.0] * n)
        spans = [(scales[a], roi[a], roi[n + a]) for a in range(n)]
        axes = [a for a in range(n) if small[a] != large[a] or spans[a] != (1.0, 0.0, 1.0)]
        return sorted(((a, spans[a]) for a in axes), key=lambda m: large[m[0]] / max(small[m[0]], 1))

    def check(self, small: TensorType, large: TensorType) -> None:
        """TypeRuleError for unknown modes and shapes of different rank."""
        if self.mode not in ("nearest", "linear", "cubic"):
            raise self.fail(f"mode '{self.mode}' is unknown", small)
        if self.coordinate_transformation_mode not in COORDINATES or self.nearest_mode not in NEAREST:
            raise self.fail("unknown coordinate_transformation_mode or nearest_mode", small)
        if small.ndim != large.ndim or (self.scales and len(self.scales) != small.ndim):
            raise self.fail("shape and scales need one entry an axis", small, large)
        if self.roi and len(self.roi) != 2 * small.ndim:
            raise self.fail("roi needs a start and an end for each axis", small)
        if small.size == 0 and large.size:
            raise self.fail("nothing can be made of an empty tensor", small, large)

    def steps(self, small: Sequence[int], large: Sequence[int], *, back: bool) -> list[tuple[int, Span, tuple, tuple]]:
        """(axis, span, shape before, shape after) one axis at a time, without the first axis where that stays."""
        maps = self.maps(small, large)
        result, now = [], list(large if back else small)
        for axis, span in reversed(maps) if back else maps:
            before = tuple(now)
            now[axis] = small[axis] if back else large[axis]
            result.append((axis, span, before, tuple(now)))
        if result and all(axis > 0 for axis, *_ in result):
            result = [(axis - 1, span, before[1:], after[1:]) for axis, span, before, after in result]
        return result

    def buffers(self, t: TensorType, steps: list[tuple[int, Span, tuple, tuple]]) -> tuple[TensorType, ...]:
        """One for what each axis leaves to the next; for 16-bit floats also the first and the last in float32."""
        if not steps:
            return ()
        work = wide(t) if t.is_float else t
        shapes = [s[3] for s in steps[:-1]]
        if work != t:
            shapes = [steps[0][2], *shapes, steps[-1][3]]
        return tuple(work.with_shape(s) for s in shapes)

    def run(self, x: Array, y: Array, scratch: Operands, steps: Any, *, back: bool) -> None:
        """All axes, image by image where the first axis stays."""
        if not steps:
            y[...] = x
            return
        images = len(steps[0][2]) < x.ndim
        for source, target in zip(x, y, strict=True) if images else ((x, y),):
            stages = [source, *scratch, target]
            if len(scratch) > len(steps):  # 16-bit floats
                scratch[0][...] = source
                stages = [*scratch]
            for (axis, span, before, after), a, b in zip(steps, stages[:-1], stages[1:], strict=True):
                self._along(axis, span, a.reshape(before), b.reshape(after), back=back)
            if len(scratch) > len(steps):
                target[...] = scratch[-1]

    def _along(self, axis: int, span: Span, x: Array, y: Array, *, back: bool) -> None:
        size, out = (y.shape[axis], x.shape[axis]) if back else (x.shape[axis], y.shape[axis])
        if self.mode == "nearest" and not back:
            where = np.asarray(indices(self._key(), size, out, span))
            np.take(x, where, axis=axis, out=y, mode="clip")
            return
        m = np.asarray(matrix(self._key(), size, out, span, x.dtype.name))
        m = m.T if back else m
        lead, rest = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
        if rest == 1:
            np.matmul(x.reshape(lead, -1), m.T, out=y.reshape(lead, -1))
        else:
            np.matmul(m, x.reshape(lead, -1, rest), out=y.reshape(lead, -1, rest))

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        """Each axis by a product of its own: the order of its sums may depend on what stands beside it."""
        x, y = ins[0], outs[0]
        if rank < 4 or x is None or y is None or x.shape[:2] != y.shape[:2]:
            return None
        roi = turned_pads(self.roi) if self.roi else ()
        scales = turned_list(self.scales) if self.scales else ()
        form = turned_whole(self, ins, outs, rank, shape=turned_list(self.shape), scales=scales, roi=roi)
        return dataclasses.replace(form, always=True)

    def _key(self) -> Resize:
        """A key that is equal for a resize and its gradient, and for all shapes."""
        return Resize(**{**self.options(Interpolation), "shape": (), "scales": (), "roi": ()})


class Resize(Interpolation):
    """x interpolated to `shape` (ONNX Resize); `extrapolation_value`: what tf_crop_and_resize finds outside of x."""

    extrapolation_value: float = 0.0

    def infer(self, x):
        y = x.with_shape(self.shape)
        self.check(x, y)
        if self.mode != "nearest" and not x.is_float:
            raise self.fail("only 'nearest' takes numbers that are not floats", x)
        return (y,)

    def scratch(self, ins, outs):
        """Results between the axes, for one image."""
        return self.buffers(ins[0], self.steps(ins[0].shape, self.shape, back=False))

    def compute(self, ins, outs, scratch):
        x, y = ins[0], outs[0]
        self.run(x, y, scratch, self.steps(x.shape, self.shape, back=False), back=False)
        if self.coordinate_transformation_mode == "tf_crop_and_resize":
            for axis, span in self.maps(x.shape, self.shape):
                away = np.asarray(outside(self._key(), x.shape[axis], y.shape[axis], span))
                y[(slice(None),) * axis + (away,)] = self.extrapolation_value

    def cost(self, ins, outs):
        """A product and a sum for each tap and axis."""
        width = {"nearest": 0, "linear": 2, "cubic": 4}[self.mode]
        return Cost(2 * width * len(self.maps(ins[0].shape, self.shape)) * outs[0].size, super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        """Linear: the transposed maps; nothing is kept."""
        return [b.ResizeGrad(grads[0], **{**self.options(Interpolation), "shape": ins[0].shape})]

    def export(self, g, ins, outs):
        """Native, with scales where they were given, else sizes."""
        roi = g.array(np.array(self.roi, np.float32)) if self.roi else ""
        if self.scales:
            options = [roi, g.array(np.array(self.scales, np.float32))]
        else:
            options = [roi, "", g.ints(self.shape)]
        attributes = self.options()
        del attributes["scales"], attributes["roi"], attributes["shape"]
        g.node("Resize", [ins[0], *options], outs, **attributes)
        return True

    @classmethod
    def from_onnx(cls, node):
        """Scales or sizes, of all axes or some, become the output's shape."""
        attributes = node.attributes
        coordinate = attributes.get("coordinate_transformation_mode", "half_pixel")
        x = node.need(0)
        shape, scales = _target(node, x.shape)
        roi = _roi(node, x.ndim) if coordinate == "tf_crop_and_resize" else ()
        if shape == x.shape and all(s == 1.0 for s in scales) and not roi:
            return x
        op = cls(
            shape=shape,
            scales=scales,
            mode=attributes.get("mode", "nearest"),
            coordinate_transformation_mode=coordinate,
            nearest_mode=attributes.get("nearest_mode", "round_prefer_floor"),
            cubic_coeff_a=attributes.get("cubic_coeff_a", -0.75),
            exclude_outside=attributes.get("exclude_outside", 0),
            antialias=attributes.get("antialias", 0),
            roi=roi,
            extrapolation_value=attributes.get("extrapolation_value", 0.0) if roi else 0.0,
        )
        return node.emit(op, x)

    @classmethod
    def samples(cls, draw):
        """All modes, up and down, one axis, integers, 16-bit floats."""
        for op, x in _resize_samples(cls):
            yield draw.case(op, draw(f"f64[{x}]"))
        op = cls(shape=(2, 1, 4, 4), scales=(1.0, 1.0, 2.0, 2.0), nearest_mode="floor")
        yield draw.case(op, draw("f32[2,1,2,2]"))
        yield draw.case(op, draw.ints("u8[2,1,2,2]", 0, 9))
        yield draw.case(cls(shape=(1, 2, 4, 5), mode="linear"), draw("f16[1,2,2,2]"))


def _resize_samples(cls: Any) -> list[tuple[Resize, str]]:
    coordinate = "coordinate_transformation_mode"
    crop = (0.0, 0.0, 0.25, 0.5, 1.0, 1.0, 0.75, 1.25)
    return [
        (cls(shape=(1, 2, 5, 4)), "1,2,3,2"),
        (cls(shape=(1, 1, 2, 5), nearest_mode="ceil", **{coordinate: "asymmetric"}), "1,1,4,3"),
        (cls(shape=(2, 2, 5, 6), mode="linear"), "2,2,3,4"),
        (cls(shape=(1, 2, 3, 2), mode="linear", **{coordinate: "align_corners"}), "1,2,5,4"),
        (cls(shape=(1, 1, 1, 7), mode="linear", **{coordinate: "pytorch_half_pixel"}), "1,1,3,4"),
        (cls(shape=(1, 1, 6, 5), mode="cubic"), "1,1,4,4"),
        (cls(shape=(1, 1, 6, 3), mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5), "1,1,4,4"),
        (cls(shape=(1, 2, 5), mode="linear", scales=(1.0, 1.0, 1.7)), "1,2,3"),
        (cls(shape=(2, 1, 3), mode="linear"), "2,1,3"),
        (cls(shape=(1, 1, 3, 2), mode="linear", antialias=1), "1,1,7,5"),
        (cls(shape=(1, 1, 3, 6), mode="cubic", antialias=1, exclude_outside=1), "1,1,7,5"),
        (cls(shape=(1, 2, 3, 4), mode="linear", roi=crop, **{coordinate: "tf_crop_and_resize"}), "1,2,4,5"),
        (cls(shape=(1, 2, 1, 4), roi=crop, **{coordinate: "tf_crop_and_resize"}), "1,2,4,5"),
    ]


class ResizeGrad(Interpolation):
    """dy → the gradient of Resize by its input, whose shape is `shape`."""

    def infer(self, dy):
        x = dy.with_shape(self.shape)
        self.check(x, dy)
        if not dy.is_float:
            raise self.fail("needs floats", dy)
        return (x,)

    def scratch(self, ins, outs):
        """Results between the axes, for one image."""
        return self.buffers(ins[0], self.steps(self.shape, ins[0].shape, back=True))

    def compute(self, ins, outs, scratch):
        self.run(ins[0], outs[0], scratch, self.steps(self.shape, ins[0].shape, back=True), back=True)

    def cost(self, ins, outs):
        width = {"nearest": 1, "linear": 2, "cubic": 4}[self.mode]
        return Cost(2 * width * len(self.maps(self.shape, ins[0].shape)) * ins[0].size, super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        """Linear: Resize itself."""
        return [b.Resize(grads[0], **{**self.options(Interpolation), "shape": ins[0].shape})]

    def export(self, g, ins, outs):
        """A MatMul with a constant for each axis."""
        dy = g.type(ins[0])
        now, name = list(dy.shape), ins[0]
        for axis, span in reversed(self.maps(self.shape, dy.shape)):
            m = matrix(self._key(), self.shape[axis], dy.shape[axis], span, wide(dy).numpy.name).T
            lead, rest = math.prod(now[:axis]), math.prod(now[axis + 1 :])
            flat = g.call("Reshape", name, g.ints((lead, now[axis], rest)))
            name = g.call("MatMul", g.array(np.ascontiguousarray(m.astype(dy.numpy))), flat)
            now[axis] = self.shape[axis]
        g.node("Reshape", [name, g.ints(self.shape)], outs)
        return True

    @classmethod
    def samples(cls, draw):
        for op, x in _resize_samples(Resize):
            shape = tuple(int(d) for d in x.split(","))
            back = cls(**{**op.options(Interpolation), "shape": shape})
            yield draw.case(back, draw(f"f64[{','.join(map(str, op.shape))}]"))
        yield draw.case(cls(shape=(1, 2, 2, 2), mode="linear"), draw("f16[1,2,4,5]"))


def _roi(node: ImportedNode, ndim: int) -> tuple[float, ...]:
    """Starts and ends for all axes."""
    axes = node.attributes.get("axes") or range(ndim)
    numbers = node.need_constant(1, "roi").tolist()
    roi = [0.0] * ndim + [1.0] * ndim
    for i, a in enumerate(axes):
        roi[a % ndim], roi[a % ndim + ndim] = numbers[i], numbers[len(axes) + i]
    return tuple(roi)


def _target(node: ImportedNode, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Output shape and scales (() where sizes were given) of a Resize node."""
    axes = node.attributes.get("axes") or range(len(shape))
    axes = [a % len(shape) for a in axes]
    scales = node.constant(2) if node.type(2) is not None and node.need_type(2).size else None
    if scales is None and node.type(2) is not None and node.need_type(2).size:
        node.need_constant(2, "scales")
    if scales is not None and scales.size:
        factors = [1.0] * len(shape)
        for a, s in zip(axes, scales.tolist(), strict=True):
            factors[a] = float(s)
        return tuple(math.floor(d * f) for d, f in zip(shape, factors, strict=True)), tuple(factors)
    sizes = node.need_constant(3, "sizes").tolist()
    policy = node.attributes.get("keep_aspect_ratio_policy", "stretch")
    out, factors = list(shape), [1.0] * len(shape)
    if policy == "stretch":
        for a, size in zip(axes, sizes, strict=True):
            out[a] = int(size)
        return tuple(out), ()
    pick = min if policy == "not_larger" else max
    factor = pick(size / shape[a] for a, size in zip(axes, sizes, strict=True))
    for a in axes:
        out[a], factors[a] = math.floor(factor * shape[a] + 0.5), factor
    return tuple(out), tuple(factors)


@imports("Upsample")
def upsample(node: ImportedNode) -> Imported:
    """The operator that Resize took the place of: scales only, from the corner."""
    x = node.need(0)
    scales = node.attributes.get("scales") or node.need_constant(1, "scales").tolist()
    mode = node.attributes.get("mode", "nearest")
    shape = tuple(math.floor(d * s) for d, s in zip(x.shape, scales, strict=True))
    mode = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    op = Resize(
        shape=shape,
        scales=tuple(map(float, scales)),
        mode=mode,
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    return node.emit(op, x)


@imports("DepthToSpace")
def depth_to_space(node: ImportedNode) -> Imported:
    """Blocks of channels become blocks of positions."""
    x, b, s = node.need(0), node.builder, node.attributes["blocksize"]
    n, c, h, w = x.shape
    if c % (s * s):
        raise node.fail(f"{c} channels are no multiple of blocksize² = {s * s}")
    if node.attributes.get("mode", "DCR") == "DCR":
        split, perm = (n, s, s, c // (s * s), h, w), (0, 3, 4, 1, 5, 2)
    else:
        split, perm = (n, c // (s * s), s, s, h, w), (0, 1, 4, 2, 5, 3)
    moved = b.Transpose(reshape(b, x, split), perm=perm)
    return reshape(b, moved, (n, c // (s * s), h * s, w * s))


@imports("SpaceToDepth")
def space_to_depth(node: ImportedNode) -> Imported:
    """Blocks of positions become blocks of channels, before the channels (DCR) or after them (CRD, opset 28)."""
    x, b, s = node.need(0), node.builder, node.attributes["blocksize"]
    n, c, h, w = x.shape
    if h % s or w % s:
        raise node.fail(f"{h}×{w} positions are no multiple of blocksize {s}")
    perm = (0, 3, 5, 1, 2, 4) if node.attributes.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    moved = b.Transpose(reshape(b, x, (n, c, h // s, s, w // s, s)), perm=perm)
    return reshape(b, moved, (n, c * s * s, h // s, w // s))
