"""GridSample: a tensor read between its elements, at coordinates that are data.

All operators here evaluate one form, linear in x and in dy:  F(x, grid, dy) = Σ_p Σ_c dy[c, p] · Σ_q W(p, q) · x[c, q],
W(p, q) = Π_axis w(grid[p, axis], q[axis]), with `order[axis]` derivatives taken of w by the coordinate.  So each
derivative of each of them is one of them again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.factors import factor
from ...language.op import Cost, Op
from ...language.types import Array, Operands, TensorType

#: degree of the interpolation in the coordinate
DEGREE = {"nearest": 0, "linear": 1, "cubic": 3}
_PADDINGS = ("zeros", "border", "reflection")
_OLD = {"bilinear": "linear", "bicubic": "cubic"}


@functools.lru_cache(maxsize=64)
def taps(mode: str, order: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """(offset, coefficients of the weight as a polynomial in t, highest first) of each tap; t = p - floor(p).

    Cubic: the convolution of Keys (1981) with a = -0.75, as in PyTorch.
    """
    t = np.poly1d([1.0, 0.0])
    if mode == "nearest":
        weights = {0: np.poly1d([1.0])}
    elif mode == "linear":
        weights = {0: 1 - t, 1: t}
    else:
        a = -0.75

        def near(s: Any) -> Any:
            return ((a + 2) * s - (a + 3)) * s * s + 1

        def far(s: Any) -> Any:
            return ((a * s - 5 * a) * s + 8 * a) * s - 4 * a

        weights = {-1: far(t + 1), 0: near(t), 1: near(1 - t), 2: far(2 - t)}
    return tuple((k, tuple(w.deriv(order).coeffs.tolist() if order else w.coeffs.tolist())) for k, w in weights.items())


class Sampling(Op, abstract=True):
    """The base of the family: attributes, and indices and weights of the taps for one image.

    `order`: how often the weights are differentiated along each axis of x; (): nowhere.
    """

    mode: str = "linear"
    padding_mode: str = "zeros"
    align_corners: int = 0
    order: tuple[int, ...] = ()

    def plus(self, axis: int, rank: int) -> dict[str, Any]:
        """The shared attributes with one more derivative along `axis`; {} where that is 0 everywhere."""
        order = list(self.order or (0,) * rank)
        order[axis] += 1
        return {} if order[axis] > DEGREE[self.mode] else {**self.options(Sampling), "order": tuple(order)}

    def check(self, x: TensorType, grid: TensorType, dy: TensorType | None = None) -> None:
        """TypeRuleError where x [N, C, ...], grid [N, ..., rank] and dy [N, C, ...] do not fit."""
        rank = x.ndim - 2
        if self.mode not in DEGREE or self.padding_mode not in _PADDINGS:
            raise self.fail(f"mode '{self.mode}' or padding_mode '{self.padding_mode}' is unknown", x, grid)
        if not x.is_float or x.dtype != grid.dtype:
            raise self.fail("needs floats of one element type", x, grid)
        if rank < 1 or grid.ndim != x.ndim or grid.shape[0] != x.shape[0] or grid.shape[-1] != rank:
            raise self.fail("the grid must be [N, ..., number of spatial axes]", x, grid)
        if 0 in x.shape[2:] and 0 not in grid.shape[:-1]:
            raise self.fail("nothing can be sampled from an empty image", x, grid)
        if dy is not None and dy != x.with_shape((*x.shape[:2], *grid.shape[1:-1])):
            raise self.fail("dy does not fit", x, grid, dy)

    def rooms(self, grid: TensorType, channels: int, weights: int) -> tuple[TensorType, ...]:
        """Scratch: indices and weights [set, axis, tap, P], 3 rows of P, comparisons, flat indices, [C, P]."""
        rank, p = grid.shape[-1], math.prod(grid.shape[1:-1])
        n = len(taps(self.mode, 0))
        i64 = grid.with_dtype("i64")
        return (
            i64.with_shape((rank, n, p)),
            grid.with_shape((weights, rank, n, p)),
            grid.with_shape((3, p)),
            TensorType("bool", (p,)),
            i64.with_shape((p,)),
            grid.with_shape((channels, p)),
        )

    def prepare(self, grid: Array, size: tuple[int, ...], rooms: Operands) -> None:
        """Fills indices and weights for one image's grid [..., rank]; a second set has one more derivative."""
        index, weights, rows, mask = rooms[:4]
        rank = len(size)
        order = self.order or (0,) * rank
        for axis in range(rank):
            flat = grid[..., rank - 1 - axis]
            p, slope, t = rows
            p.reshape(flat.shape)[...] = flat
            self._coordinates(rows, mask, size[axis])
            if self.mode == "nearest":
                np.rint(p, out=p)
                t.fill(0)
                index[axis, 0] = p
            else:
                np.floor(p, out=t)
                for j, (offset, _) in enumerate(taps(self.mode, 0)):
                    index[axis, j] = t
                    index[axis, j] += offset
                np.subtract(p, t, out=t)
            for s in range(len(weights)):
                self._weights(weights[s, axis], order[axis] + s, t, slope, p)
            for j in range(index.shape[1]):
                self._inside(index[axis, j], weights[:, axis, j], mask, size[axis])

    def _coordinates(self, rows: Array, mask: Array, n: int) -> None:
        """Grid coordinates in the first row become places in [0, n), as padding says; the second gets derivatives."""
        p, slope, room = rows
        low, high = (0.0, n - 1.0) if self.align_corners else (-0.5, n - 0.5)
        scale = (high - low) / 2
        p += 1
        p *= scale
        p += low
        slope.fill(scale)
        if self.padding_mode == "reflection" and self.mode != "cubic":
            self._reflect(rows, mask, low, high)
        # what no integer can hold is outside, as in PyTorch
        np.absolute(p, out=room)
        np.less(room, 2.0**31, out=mask)
        np.logical_not(mask, out=mask)
        np.putmask(p, mask, -100.0)
        if self.padding_mode != "zeros" and self.mode != "cubic":
            for compare, limit in ((np.less_equal, 0.0), (np.greater_equal, n - 1.0)):
                compare(p, limit, out=mask)
                np.putmask(slope, mask, 0.0)
            np.clip(p, 0.0, n - 1.0, out=p)

    @staticmethod
    def _reflect(rows: Array, mask: Array, low: float, high: float) -> None:
        """Places mirrored at `low` and `high` until they are between them; each mirror turns the slope."""
        p, slope, room = rows
        span = high - low
        if span == 0:
            p.fill(0)
            slope.fill(0)
            return
        p -= low
        np.less(p, 0, out=mask)
        # factor 1 - 2·mask
        room[...] = mask
        room *= -2
        room += 1
        slope *= room
        np.absolute(p, out=p)
        np.floor_divide(p, span, out=room)
        np.remainder(p, span, out=p)
        np.remainder(room, 2, out=room)
        # an odd number of mirrors: p ← span - p, slope ← -slope
        room *= -2
        room += 1
        slope *= room
        p *= room
        room -= 1
        room *= -span / 2
        p += room
        p += low

    @staticmethod
    def _weights(out: Array, order: int, t: Array, slope: Array, room: Array) -> None:
        """Each tap's polynomial at t, times slope ^ order."""
        for tap, (_, coefficients) in zip(out, taps_of(out.shape[0], order), strict=True):
            tap.fill(coefficients[0])
            for c in coefficients[1:]:  # Horner's rule
                tap *= t
                tap += c
            for _ in range(order):
                tap *= slope

    def _inside(self, index: Array, weights: Array, mask: Array, n: int) -> None:
        """Indices outside [0, n) brought inside; their weights are 0 where padding is zeros."""
        if self.padding_mode == "zeros":
            for compare, limit in ((np.less, 0), (np.greater_equal, n)):
                compare(index, limit, out=mask)
                for w in weights:
                    np.putmask(w, mask, 0)
        elif self.padding_mode == "reflection" and self.mode == "cubic":
            if not self.align_corners:  # -1 → 0, -2 → 1, ..., period 2n
                np.remainder(index, 2 * n, out=index)
                index *= 2
                index -= 2 * n - 1
                np.absolute(index, out=index)
                np.subtract(2 * n - 1, index, out=index)
                index //= 2
            elif n > 1:  # -1 → 1, period 2(n - 1)
                index -= n - 1
                np.remainder(index, 2 * (n - 1), out=index)
                index -= n - 1
                np.absolute(index, out=index)
        np.clip(index, 0, n - 1, out=index)

    def each(self, rooms: Operands, size: tuple[int, ...]) -> Any:
        """Each combination of taps: its number along each axis, with the flat indices in rooms[4]."""
        index, flat = rooms[0], rooms[4]
        for pick in itertools.product(range(index.shape[1]), repeat=len(size)):
            flat[...] = index[0, pick[0]]
            for axis in range(1, len(size)):
                flat *= size[axis]
                flat += index[axis, pick[axis]]
            yield pick

    def product(self, rooms: Operands, pick: tuple[int, ...], more: int = -1) -> Array:
        """The weight of a combination, in rooms[2][0]; from the second set along axis `more`."""
        weights, room = rooms[1], rooms[2][0]
        room.fill(1)
        for axis, j in enumerate(pick):
            room *= weights[int(axis == more), axis, j]
        return room


def taps_of(count: int, order: int) -> Any:
    """`taps` by their number."""
    return taps({1: "nearest", 2: "linear", 4: "cubic"}[count], order)


def sampling_cost(
    op: Any, grid: TensorType, channels: int, ins: Sequence[TensorType], outs: Sequence[TensorType]
) -> Cost:
    """The cost of reading `channels` numbers at every place of the grid."""
    places = math.prod(grid.shape[:-1])
    return Cost(2 * len(taps(op.mode, 0)) ** grid.shape[-1] * places * (channels + grid.shape[-1]),
                Op.cost(op, ins, outs).bytes)  # fmt: skip


class GridSample(Sampling):
    """(x [N, C, ...], grid [N, ..., rank]) → [N, C, ...]: x at each place of the grid (ONNX GridSample-22).

    The grid's last axis is (x, y, ...), x along the last axis of x, -1 and 1 at its edges.  Subgradients as
    PyTorch's: 0 by the grid for `nearest` and where border or reflection clips; one-sided at whole coordinates.
    """

    def infer(self, x, grid):
        """N, C of x, the places of the grid."""
        self.check(x, grid)
        return (x.with_shape((*x.shape[:2], *grid.shape[1:-1])),)

    def axis_factors(self, ins, outs):
        """Images, channels, places of the grid."""
        places = [factor(d, [None, 1 + i], [2 + i]) for i, d in enumerate(ins[1].shape[1:-1])]
        return [factor(ins[0].shape[0], [0, 0], [0]), factor(ins[0].shape[1], [1], [1]), *places]

    def scratch(self, ins, outs):
        return self.rooms(ins[1], ins[0].shape[1], 1)

    def compute(self, ins, outs, scratch):
        """Image by image, tap by tap: take, weigh, add."""
        x, grid = ins
        size, taken = x.shape[2:], scratch[5]
        for image, places, y in zip(x, grid, outs[0], strict=True):
            self.prepare(places, size, scratch)
            y = y.reshape(taken.shape)
            y.fill(0)
            if not y.size:
                continue
            for pick in self.each(scratch, size):
                np.take(image.reshape(image.shape[0], -1), scratch[4], axis=1, out=taken, mode="clip")
                taken *= self.product(scratch, pick)
                y += taken

    def cost(self, ins, outs):
        """A product and a sum for each tap."""
        return sampling_cost(self, ins[1], ins[0].shape[1], ins, outs)

    def gradient(self, b, ins, outs, grads):
        """dy spread over the taps, and dy against the slopes."""
        x, grid = ins
        options = self.options(Sampling)
        dx = b.GridSampleGradInput(grid, grads[0], size=x.shape[2:], **options)
        return [dx, b.GridSampleGradGrid(x, grid, grads[0], **options) if self.mode != "nearest" else None]

    def export(self, g, ins, outs):
        if any(self.order):
            return False
        options = {"padding_mode": self.padding_mode, "align_corners": self.align_corners}
        g.node("GridSample", ins, outs, mode=self.mode, **options)
        return True

    @classmethod
    def from_onnx(cls, node):
        """Names of opset 16 and 20; other element types in f32 (integers f64)."""
        attributes = node.attributes
        mode = attributes.get("mode", "linear")
        options = {k: attributes[k] for k in ("padding_mode", "align_corners") if k in attributes}
        x, grid = node.inputs
        b, kind = node.builder, x.dtype if x.dtype in ("f32", "f64") else ("f32" if x.type.is_float else "f64")
        wide = x if kind == x.dtype else b.Cast(x, to=kind)
        y = node.emit(cls(_OLD.get(mode, mode), **options), wide, grid if grid.dtype == kind else b.Cast(grid, to=kind))
        return y if kind == x.dtype else b.Cast(y, to=x.dtype)

    @classmethod
    def samples(cls, draw):
        """Modes, paddings, corners; one, two and three axes; nothing."""
        for options, x, grid in sampling_samples():
            # ONNX Runtime has two and three axes only
            native = len(x) > 5
            yield draw.case(cls(**options), draw(f"f64[{x}]"), draw(f"f64[{grid}]", -1.6, 1.6), export=native)
        yield draw.case(cls(), draw("f32[1,2,3,4]"), draw("f32[1,2,2,2]"))
        yield draw.case(cls("cubic", order=(1, 2)), draw("f64[1,1,5,4]"), draw("f64[1,3,1,2]", -0.7, 0.7), export=False)


def sampling_samples() -> list[tuple[dict[str, Any], str, str]]:
    """Attributes, and the shapes of x and of the grid, of the samples."""
    return [
        ({"mode": m, "padding_mode": p, "align_corners": c}, "1,2,4,3", "1,2,3,2")
        for i, (m, p) in enumerate(itertools.product(DEGREE, _PADDINGS))
        for c in ((i % 2,) if m != "linear" else (0, 1))
    ] + [
        ({"mode": "linear", "padding_mode": "zeros"}, "2,1,3", "2,4,1"),
        ({"mode": "linear", "padding_mode": "border"}, "1,2,2,3,2", "1,1,2,2,3"),
        ({"mode": "linear", "padding_mode": "reflection"}, "1,1,1,1", "1,0,2,2"),
    ]
