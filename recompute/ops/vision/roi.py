"""RoiAlign, and what poolings of regions of interest share.

Regions are read on the host (one copy from a device): where they lie decides what is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from ...language.factors import SUM, factor
from ...language.op import Cost, Draw, Op
from ...language.types import Array, Operands, TensorType, Value
from ..indexing.flat import add_rows

#: elements that are outside of every image
_FAR = 2.0**40
#: samples of a bin along one axis
_MOST_SAMPLES = 1 << 12


class Regions(Op, abstract=True):
    """The base of pools of regions: a maximum over candidates, each an element of x times a weight."""

    #: positions of the regions, and of their images' numbers where they are an input of their own
    asked: ClassVar[tuple[int, ...]] = (1,)

    def checks(self, ins: Sequence[TensorType], outs: Sequence[TensorType]) -> tuple:
        """Regions are finite, and their images are there."""
        x = ins[0] if ins[0].ndim == 4 else outs[0]
        return tuple((i, ("region", x.shape[0])) for i in self.asked)

    def bins(self) -> tuple[int, int]:
        """Rows and columns of a pooled region."""
        raise NotImplementedError

    def image(self, number: Any, count: int) -> int:
        """Which image a region lies in.  IndexError where there is none of that number."""
        if not 0 <= number < count:
            raise IndexError(f"{self.name}: image {number} is out of range for {count} images")
        return int(number)

    def corner(self: Any, at: Any) -> int:
        """A corner in whole elements, rounded as C does, halves away from zero.  IndexError if it is NaN."""
        v = float(at) * self.spatial_scale
        if math.isnan(v):
            raise IndexError(f"{self.name}: a corner of a region is NaN")
        return math.floor(min(abs(v), _FAR) + 0.5) * (1 if v >= 0 else -1)

    def candidates(self, roi: Any, h: int, w: int) -> Iterator[tuple[Any, Any]]:
        """(flat indices, weights) [rows, columns] of the elements that are compared, one of each bin at a time."""
        raise NotImplementedError

    def winners(self, image: Array, roi: Array, rooms: Operands) -> tuple[Array, Array]:
        """Flat indices and weights [C, rows, columns] of the largest products in each bin; weight 0: there is none."""
        index, weight, best, room, mask = rooms
        c, h, w = image.shape
        best.fill(-np.inf)
        index.fill(0)
        weight.fill(0)
        flat = image.reshape(c, h * w)
        for places, weights in self.candidates(roi, h, w):
            places, weights = np.asarray(places), np.asarray(weights.astype(image.dtype.name))
            np.take(flat, places, axis=1, out=room, mode="clip")
            room *= weights
            # a bin without this candidate has weight nan: never greater
            np.greater(room, best, out=mask)
            np.copyto(best, room, where=mask)
            np.copyto(index, places[None], where=mask)
            np.copyto(weight, weights[None], where=mask)
        return index, weight

    def rooms(self, x: TensorType) -> tuple[TensorType, ...]:
        """Scratch of `winners`."""
        t = x.with_shape((x.shape[1], *self.bins()))
        return t.with_dtype("i64"), t, t, t, t.with_dtype("bool")

    def pick(self, x: Array, found: tuple[Array, Array], out: Array) -> None:
        """out = x at the winners, times their weights."""
        index, weight = found
        for c in range(x.shape[0]):
            np.take(x[c].reshape(-1), index[c], out=out[c], mode="clip")
        out *= weight

    def put(self, dx: Array, found: tuple[Array, Array], dy: Array) -> None:
        """dx += dy times the weights, at the winners."""
        index, weight = found
        weight *= dy
        for c in range(dx.shape[0]):
            add_rows(dx[c].reshape(1, -1, 1), index[c].reshape(-1), weight[c].reshape(1, -1, 1))


def on_host(a: Array) -> np.ndarray:
    """The array as NumPy's."""
    return a.get() if hasattr(a, "get") else a


class Aligned(Regions, abstract=True):
    """The base of RoiAlign and its gradient."""

    output_height: int = 1
    output_width: int = 1
    spatial_scale: float = 1.0
    sampling_ratio: int = 0
    mode: str = "avg"
    coordinate_transformation_mode: str = "half_pixel"

    def bins(self) -> tuple[int, int]:
        return self.output_height, self.output_width

    def check(self, x: TensorType, rois: TensorType, batch: TensorType, by: TensorType | None) -> None:
        """TypeRuleError where x [N, C, H, W], rois [R, 4] and the images' numbers i64 [R] do not fit."""
        if self.mode not in ("avg", "max") or self.coordinate_transformation_mode not in (
            "half_pixel",
            "output_half_pixel",
        ):
            raise self.fail(f"mode '{self.mode}', '{self.coordinate_transformation_mode}' is unknown", x, rois)
        if x.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 4 or batch.shape != rois.shape[:1] or batch.dtype != "i64":
            raise self.fail("needs x [N, C, H, W], rois [R, 4] and batch_indices i64 [R]", x, rois, batch)
        if not x.is_float or rois.dtype != x.dtype or (by is not None and by != x):
            raise self.fail("needs floats of one element type", x, rois)
        if not math.prod(x.shape[2:]) and rois.shape[0]:
            raise self.fail("there is nothing to take", x, rois)
        if min(self.bins()) < 1:
            raise self.fail("output_height and output_width must be at least 1", x, rois)
        if self.sampling_ratio > _MOST_SAMPLES:
            raise self.fail(f"sampling_ratio is {_MOST_SAMPLES} at the most, not {self.sampling_ratio}", x, rois)

    def spans(self, roi: Array, h: int, w: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """For rows and for columns: elements and weights [bins, samples, 2], and the number of samples."""
        half = self.coordinate_transformation_mode == "half_pixel"
        result = []
        for at, n, size in ((1, self.output_height, h), (0, self.output_width, w)):
            start, end = (
                roi[i] * roi.dtype.type(self.spatial_scale) - roi.dtype.type(0.5 * half) for i in (at, at + 2)
            )
            extent = end - start if half else max(end - start, roi.dtype.type(1))
            samples = self.sampling_ratio if self.sampling_ratio > 0 else self.adaptive(extent / n)
            step = extent / n
            p = start + np.arange(n)[:, None] * step + (np.arange(samples) + 0.5) * step / max(samples, 1)
            inside = (p >= -1) & (p <= size)
            p = np.clip(np.where(inside, p, 0), 0, size - 1)
            low = np.floor(p).astype(np.int64)
            t = p - low
            index = np.stack([low, np.minimum(low + 1, size - 1)], axis=-1)
            result.append((index, np.stack([1 - t, t], axis=-1) * inside[..., None], samples))
        return result

    def adaptive(self, extent: Any) -> int:
        """Samples of a bin along an axis: one an element.  IndexError where a region is far larger than any image."""
        if not extent < _MOST_SAMPLES:
            raise IndexError(f"{self.name}: a region has {extent:.3g} elements a bin: give a sampling_ratio")
        return max(math.ceil(extent), 0)

    def candidates(self, roi: Array, h: int, w: int) -> Iterator[tuple[Any, Any]]:
        (rows, row_weights, _), (columns, column_weights, _) = self.spans(roi, h, w)
        for i, j in itertools.product(range(rows.shape[1]), range(columns.shape[1])):
            for k, m in itertools.product(range(2), repeat=2):
                places = rows[:, i, k, None] * w + columns[None, :, j, m]
                yield places, row_weights[:, i, k, None] * column_weights[None, :, j, m]

    def matrices(self, roi: Array, h: int, w: int) -> list[tuple[slice, np.ndarray]]:
        """For rows and for columns: the part that is read, and the matrix [bins, part] whose rows are the means."""
        result = []
        for (index, weights, samples), _ in zip(self.spans(roi, h, w), (h, w), strict=True):
            low, high = (int(index.min()), int(index.max()) + 1) if index.size else (0, 1)
            m = np.zeros((len(index), high - low))
            rows = np.broadcast_to(np.arange(len(index))[:, None, None], index.shape)
            np.add.at(m, (rows, index - low), weights)
            result.append((slice(low, high), m / max(samples, 1)))
        return result

    def room_for(self, x: TensorType) -> tuple[TensorType, ...]:
        """Scratch."""
        if self.mode == "max":
            return self.rooms(x)
        _, c, h, w = x.shape
        return (x.with_shape((c * self.output_height * w,)), x.with_shape((c * h * w,)))


class RoiAlign(Aligned):
    """(x [N, C, H, W], rois [R, 4], batch_indices [R], by=None) → [R, C, height, width] (ONNX RoiAlign-22).

    avg: means of bilinear samples (He et al. 2017), a product with a small matrix on each side of x.  max: the
    largest of all neighbours times their weights, as ONNX has it; `by`: where the largest are looked for instead
    of x.  No gradient by the regions, as in torchvision.  All floats have one element type.
    """

    asked: ClassVar[tuple[int, ...]] = (1, 2)
    on_host = "the regions say what is read"

    def infer(self, x, rois, batch, by=None):
        """One small image for each region."""
        self.check(x, rois, batch, by)
        return (x.with_shape((rois.shape[0], x.shape[1], self.output_height, self.output_width)),)

    def axis_factors(self, ins, outs):
        return [factor(ins[1].shape[0], [None, 0, 0], [0]), factor(ins[0].shape[1], [1, None, None, 1], [1])]

    def scratch(self, ins, outs):
        return self.room_for(ins[0])

    def compute(self, ins, outs, scratch):
        x, by = ins[0], (*ins, None)[3]
        _, c, h, w = x.shape
        for roi, n, y in zip(on_host(ins[1]), on_host(ins[2]).tolist(), outs[0], strict=True):
            if self.mode == "max":
                self.pick(x[n], self.winners((x if by is None else by)[n], roi, scratch), y)
                continue
            (rows, left), (columns, right) = self.matrices(roi, h, w)
            left, right = (np.asarray(m.astype(x.dtype.name)) for m in (left, right))
            part = scratch[0][: c * len(left) * right.shape[1]].reshape(c, len(left), right.shape[1])
            np.matmul(left, x[n][:, rows, columns], out=part)
            np.matmul(part, right.T, out=y)

    def cost(self, ins, outs):
        """Four neighbours of about four samples each."""
        return Cost(32 * outs[0].size, super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        """dy through the transposed matrices, or to the largest."""
        x, rois, batch, by = (*ins, None)[:4]
        to = (x if by is None else by) if self.mode == "max" else None
        dx = b.RoiAlignGrad(*_given(rois, batch, grads[0], to), shape=x.shape, **self.options(Aligned))
        return [dx, None, None, None][: len(ins)]

    def export(self, g, ins, outs):
        if len(ins) > 3:
            return False
        g.node("RoiAlign", ins, outs, **self.options(Aligned))
        return True

    @classmethod
    def from_onnx(cls, node):
        """Up to opset 15 half_pixel was not known; half precision in f32."""
        fields = cls().options(Aligned)
        options = {k: v for k, v in node.attributes.items() if k in fields}
        if node.opset < 16:
            options.setdefault("coordinate_transformation_mode", "output_half_pixel")
        x, rois, batch = node.inputs
        b, kind = node.builder, "f64" if x.dtype == "f64" else "f32"
        wide, places = (v if v.dtype == kind else b.Cast(v, to=kind) for v in (x, rois))
        y = node.emit(cls(**options), wide, places, batch if batch.dtype == "i64" else b.Cast(batch, to="i64"))
        return y if x.dtype == kind else b.Cast(y, to=x.dtype)

    @classmethod
    def samples(cls, draw):
        """Both modes, both coordinates, samples given or not; regions that leave the image; none."""
        for options, rois, batch, x, _ in _samples(draw):
            yield draw.case(
                cls(**options), draw.distinct(x) + 0.03, rois, batch, still=(1,), export=not _apart(options)
            )
        yield draw.case(cls(2, 2), draw("f32[1,2,4,5]"), np.array([[0.5, 0, 4, 3]], np.float32), np.array([0]))


def _given(*values: Value | None) -> list[Value]:
    return [v for v in values if v is not None]


def _apart(options: dict[str, Any]) -> bool:
    """Whether ONNX Runtime means something else than ONNX: its max is of interpolated values."""
    return options.get("mode") == "max"


def _samples(draw: Draw) -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray, str, str]]:
    rois = np.array([[0.3, 0.2, 3.6, 2.9], [-3.0, 1.1, 2.2, 9.3], [1.2, 1.3, 1.4, 1.5]])
    batch = np.array([1, 0, 1])
    for mode in ("avg", "max"):
        for where in ("half_pixel", "output_half_pixel"):
            for ratio in (0, 2):
                options: dict[str, Any] = {"output_height": 2, "output_width": 3, "sampling_ratio": ratio, "mode": mode}
                options |= {"coordinate_transformation_mode": where, "spatial_scale": 0.9}
                yield options, rois, batch, "f64[2,2,4,5]", "f64[3,2,2,3]"
    yield {}, rois[:0], batch[:0], "f64[1,2,2,2]", "f64[0,2,1,1]"


class RoiAlignGrad(Aligned):
    """(rois, batch_indices, dy, by=None) → the gradient of RoiAlign by x, which has `shape`."""

    asked: ClassVar[tuple[int, ...]] = (0, 1)
    shape: tuple[int, ...] = field(kw_only=True)
    on_host = "the regions say what is read"

    def infer(self, rois, batch, dy, by=None):
        x = dy.with_shape(self.shape)
        self.check(x, rois, batch, by)
        if dy.shape != (rois.shape[0], x.shape[1], *self.bins()) or (self.mode == "max") != (by is not None):
            raise self.fail("dy does not fit", rois, batch, dy, by)
        return (x,)

    def axis_factors(self, ins, outs):
        return [factor(ins[0].shape[0], [0, 0, 0], [SUM]), factor(self.shape[1], [None, None, 1, 1], [1])]

    def scratch(self, ins, outs):
        return self.room_for(outs[0])

    def compute(self, ins, outs, scratch):
        dx, by = outs[0], (*ins, None)[3]
        dx.fill(0)
        _, c, h, w = dx.shape
        for roi, n, dy in zip(on_host(ins[0]), on_host(ins[1]).tolist(), ins[2], strict=True):
            if self.mode == "max":
                self.put(dx[n], self.winners(by[n], roi, scratch), dy)
                continue
            (rows, left), (columns, right) = self.matrices(roi, h, w)
            left, right = (np.asarray(m.astype(dx.dtype.name)) for m in (left, right))
            part = scratch[0][: c * len(left) * right.shape[1]].reshape(c, len(left), right.shape[1])
            whole = scratch[1][: c * left.shape[1] * right.shape[1]].reshape(c, left.shape[1], right.shape[1])
            np.matmul(dy, right, out=part)
            np.matmul(left.T, part, out=whole)
            dx[n][:, rows, columns] += whole

    def cost(self, ins, outs):
        return Cost(32 * ins[2].size, super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        """Linear in dy: RoiAlign."""
        rois, batch, _, by = (*ins, None)[:4]
        up = b.RoiAlign(*_given(grads[0], rois, batch, by), **self.options(Aligned))
        return [None, None, up, None][: len(ins)]

    @classmethod
    def samples(cls, draw):
        for options, rois, batch, x, dy in _samples(draw):
            shape = draw(x).shape
            by = [draw.distinct(x) + 0.03] if options.get("mode") == "max" else []
            yield draw.case(cls(shape=shape, **options), rois, batch, draw(dy), *by, still=(0,), export=False)
