"""The gradients of GridSample."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

import numpy as np

from ...language.factors import SUM, factor
from ..indexing.flat import add_rows
from .grid_sample import Sampling, sampling_cost, sampling_samples


class GridSampleGradInput(Sampling):
    """(grid, dy [N, C, ...]) → the gradient of GridSample by x, whose spatial shape is `size`."""

    size: tuple[int, ...] = field(kw_only=True)

    def infer(self, grid, dy):
        x = dy.with_shape((*dy.shape[:2], *self.size))
        self.check(x, grid, dy)
        return (x,)

    def axis_factors(self, ins, outs):
        """Images, channels; places of the grid are summed over."""
        places = [factor(d, [1 + i, 2 + i], [SUM]) for i, d in enumerate(ins[0].shape[1:-1])]
        return [factor(ins[0].shape[0], [0, 0], [0]), factor(ins[1].shape[1], [None, 1], [1]), *places]

    def scratch(self, ins, outs):
        return self.rooms(ins[0], ins[1].shape[1], 1)

    def compute(self, ins, outs, scratch):
        """Image by image, tap by tap: weigh, add where it was taken, in order."""
        grid, dy = ins
        part = scratch[5]
        outs[0].fill(0)
        if not dy.size:
            return
        for places, up, x in zip(grid, dy, outs[0], strict=True):
            self.prepare(places, self.size, scratch)
            for pick in self.each(scratch, self.size):
                np.multiply(up.reshape(part.shape), self.product(scratch, pick), out=part)
                add_rows(x.reshape(x.shape[0], -1, 1), scratch[4], part[..., None])

    def cost(self, ins, outs):
        return sampling_cost(self, ins[0], ins[1].shape[1], ins, outs)

    def gradient(self, b, ins, outs, grads):
        """GridSample of what comes, and its slopes against dy."""
        grid, dy = ins
        u = grads[0]
        slopes = b.GridSampleGradGrid(u, grid, dy, **self.options(Sampling)) if self.mode != "nearest" else None
        return [slopes, b.GridSample(u, grid, **self.options(Sampling))]

    @classmethod
    def samples(cls, draw):
        for options, x, grid in sampling_samples():
            n, c, *size = (int(d) for d in x.split(","))
            dy = ",".join([str(n), str(c), *grid.split(",")[1:-1]])
            op = cls(size=tuple(size), **options)
            yield draw.case(op, draw(f"f64[{grid}]", -1.6, 1.6), draw(f"f64[{dy}]"), export=False)


class GridSampleGradGrid(Sampling):
    """(x, grid, dy) → the gradient of GridSample by the grid."""

    def infer(self, x, grid, dy):
        self.need(x, grid, dy, count=3)
        self.check(x, grid, dy)
        return (grid,)

    def axis_factors(self, ins, outs):
        """Images, places of the grid; channels are summed over."""
        x, grid = ins[:2]
        places = [factor(d, [None, 1 + i, 2 + i], [1 + i]) for i, d in enumerate(grid.shape[1:-1])]
        return [factor(x.shape[0], [0, 0, 0], [0]), factor(x.shape[1], [1, None, 1], [SUM]), *places]

    def scratch(self, ins, outs):
        """Taps of one image, their slopes, a row for the sums over channels."""
        return (*self.rooms(ins[1], ins[0].shape[1], 2), ins[1].with_shape((math.prod(ins[1].shape[1:-1]),)))

    def compute(self, ins, outs, scratch):
        """Image by image, tap by tap: Σ_c x · dy once, then its part along each axis."""
        x, grid, dy = ins
        size, taken, sums = x.shape[2:], scratch[5], scratch[6]
        rank = len(size)
        for image, places, up, out in zip(x, grid, dy, outs[0], strict=True):
            out.fill(0)
            if not taken.size:
                continue
            self.prepare(places, size, scratch)
            out = out.reshape(-1, rank)
            for pick in self.each(scratch, size):
                np.take(image.reshape(image.shape[0], -1), scratch[4], axis=1, out=taken, mode="clip")
                taken *= up.reshape(taken.shape)
                np.sum(taken, axis=0, out=sums)
                for axis in range(rank):
                    part = self.product(scratch, pick, axis)
                    part *= sums
                    out[:, rank - 1 - axis] += part

    def cost(self, ins, outs):
        return sampling_cost(self, ins[1], ins[0].shape[1], ins, outs)

    def gradient(self, b, ins, outs, grads):
        """For each axis the same form with one more derivative along it."""
        x, grid, dy = ins
        rank = grid.shape[-1]
        sums: list[list[Any]] = [[], [], []]
        for axis in range(rank):
            more = self.plus(axis, rank)
            if not more:
                continue
            at = rank - 1 - axis
            u = b.Slice(grads[0], starts=(at,), ends=(at + 1,), axes=(grid.ndim - 1,))
            u = b.Reshape(u, shape=(grid.shape[0], 1, *grid.shape[1:-1]))
            up = b.Mul(dy, u)
            sums[0].append(b.GridSampleGradInput(grid, up, size=x.shape[2:], **more))
            sums[1].append(b.GridSampleGradGrid(x, grid, up, **more))
            sums[2].append(b.Mul(b.GridSample(x, grid, **more), u))
        return [b.add_all(terms) if terms else None for terms in sums]

    @classmethod
    def samples(cls, draw):
        for options, x, grid in sampling_samples():
            if options["mode"] != "nearest":
                dy = ",".join([*x.split(",")[:2], *grid.split(",")[1:-1]])
                yield draw.case(cls(**options), draw(f"f64[{x}]"), draw(f"f64[{grid}]", -1.6, 1.6),
                                draw(f"f64[{dy}]"), export=False)  # fmt: skip
