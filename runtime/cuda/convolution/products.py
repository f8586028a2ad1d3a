"""1x1 convolutions as matrix products by cuBLAS.

With channels second, images are a batch: y = w · x for each; a weight's gradient, the sum over images, is kept in
parts, each of which takes images one after the other, so that there are enough products at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....language.types import TensorType
from ...shared.convolved import Convolved
from ..code.strided import Axis, gather_to
from ..device.kernel import Buffer, Call, Product
from . import text
from .gathered import ENOUGH, PARTIAL
from .tiles import wide

#: groups that are multiplied one after the other, at most
_GROUPS = 8


def spread_bias(bias: Buffer, out: Buffer, *, last: bool) -> list[Call]:
    """A bias for each channel, everywhere in the result."""
    inner = 1 if last else math.prod(out.shape[2:])
    sizes = out.size // (bias.size * inner), bias.size, inner
    return gather_to(out, bias, [Axis("copied", n, step) for n, step in zip(sizes, (0, 1, 0), strict=True)])


class PointwisePlan:
    """Any of the three products."""

    def __init__(self, c: Convolved, dtype: str) -> None:
        self.c, self.dtype = c, dtype
        self.parts = 0
        geo = c.geometry
        if c.kind == "weight" and not c.last and geo.batch > 1:
            tiles = -(-geo.mg // 128) * -(-geo.cg // 128) * geo.group
            most = max(PARTIAL // TensorType(wide(dtype), (math.prod(c.w),)).nbytes, 1)
            self.parts = min(geo.batch, -(-ENOUGH // tiles), most)

    @property
    def scratch(self) -> tuple[TensorType, ...]:
        """The parts."""
        return (TensorType(wide(self.dtype), (self.parts, *self.c.w)),) if self.parts else ()

    def bind(self, x: Buffer, w: Buffer, y: Buffer, bias: Buffer | None, scratch: Sequence[Buffer]) -> list[Call]:
        """For each group."""
        out = {"output": y, "input": x, "weight": w}[self.c.kind]
        calls: list[Call] = [] if bias is None else spread_bias(bias, out, last=self.c.last)
        beta = 0.0 if bias is None else 1.0
        geo = self.c.geometry
        for group in range(geo.group):
            a, b = (v.at(group * step, (v.size - group * step,)) for v, step in zip((x, y), self._steps(), strict=True))
            part = w.at(group * geo.mg * geo.cg, (geo.mg * geo.cg,))
            if self.parts:
                calls += self._sums(a, b, scratch[0], group)
            elif self.c.last:
                calls.append(self._rows(a, b, part, beta))
            else:
                calls.append(self._images(a, b, part, beta))
        if self.parts:
            calls.append(text.adding(self.dtype, False)(w.size, scratch[0], w, w.size, self.parts))
        return calls

    def _steps(self) -> tuple[int, int]:
        """Elements from one group's channels to the next, in x and in y."""
        geo = self.c.geometry
        inner = 1 if self.c.last else geo.window.positions
        return geo.cg * inner, geo.mg * inner

    def _rows(self, x: Buffer, y: Buffer, w: Buffer, beta: float) -> Call:
        """Channels last: every position is a row."""
        geo = self.c.geometry
        n, lx, ly = geo.batch * geo.window.positions, geo.group * geo.cg, geo.group * geo.mg
        if self.c.kind == "output":
            return Product(x, w, y, n, geo.mg, geo.cg, lx, geo.cg, ly, tb=True, beta=beta)
        if self.c.kind == "input":
            return Product(y, w, x, n, geo.cg, geo.mg, ly, geo.cg, lx, beta=beta)
        return Product(y, x, w, geo.mg, geo.cg, n, ly, lx, geo.cg, ta=True)

    def _images(self, x: Buffer, y: Buffer, w: Buffer, beta: float) -> Call:
        """Channels second: every image is a matrix."""
        geo = self.c.geometry
        p, (sx, sy) = geo.window.positions, (math.prod(self.c.x[1:]), math.prod(self.c.y[1:]))
        if self.c.kind == "output":
            return Product(w, x, y, geo.mg, p, geo.cg, geo.cg, p, p, beta=beta, batch=geo.batch, strides=(0, sx, sy))
        if self.c.kind == "input":
            return Product(w, y, x, geo.cg, p, geo.mg, geo.cg, p, p, ta=True, beta=beta, batch=geo.batch,
                           strides=(0, sy, sx))  # fmt: skip
        return Product(y, x, w, geo.mg, geo.cg, p, p, p, geo.cg, tb=True)

    def _sums(self, x: Buffer, y: Buffer, parts: Buffer, group: int) -> list[Call]:
        """A weight's gradient: part i adds up images i, i + parts, ..."""
        geo = self.c.geometry
        p, sx, sy = geo.window.positions, math.prod(self.c.x[1:]), math.prod(self.c.y[1:])
        size, whole = geo.mg * geo.cg, math.prod(self.c.w)
        target = parts.at(group * size, (parts.size - group * size,))
        calls: list[Call] = []
        for first in range(0, geo.batch, self.parts):
            count = min(self.parts, geo.batch - first)
            a, b = (v.at(first * s, (v.size - first * s,)) for v, s in ((y, sy), (x, sx)))
            calls.append(
                Product(a, b, target, geo.mg, geo.cg, p, p, p, geo.cg, tb=True, beta=1.0 if first else 0.0,
                        batch=count, strides=(sy, sx, whole))
            )  # fmt: skip
        return calls


def pointwise(c: Convolved, dtype: str) -> PointwisePlan | None:
    """The plan of a convolution that is a product of matrices; None where it is none."""
    return PointwisePlan(c, dtype) if c.geometry.pointwise and c.geometry.group <= _GROUPS else None
