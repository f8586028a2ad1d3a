"""Plans of convolutions by the kernels of text.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....language.types import TensorType
from ...shared.convolved import Convolved
from ..device.kernel import COMPUTE, Buffer, Call, Fill
from . import text, weigh_text
from .gathered import CHAIN, Gather, Tile, gradients, output, splits, tile, weigh

#: types of sums
WIDE = {"float": "f32", "double": "f64"}


def wide(dtype: str) -> str:
    """The element type that is computed with."""
    return WIDE[COMPUTE[dtype]]


class GatherPlan:
    """A convolution's output, or its input's gradient: weights are packed, then each Gather runs over them."""

    def __init__(self, c: Convolved, dtype: str) -> None:
        self.c, self.dtype = c, dtype
        forward = c.kind == "output"
        kernels = (
            [output(c.geometry, dtype, last=c.last)] if forward else list(gradients(c.geometry, dtype, last=c.last))
        )
        self.nothing = any(not g.terms for g in kernels)
        self.gathers = [g for g in kernels if g.terms or c.bias]
        self.tiles = [tile(g.rows, self._columns(g), g.group, double=dtype == "f64") for g in self.gathers]
        self.size = math.prod(c.y if forward else c.x)
        self.parts = 1
        if not self.nothing:
            self.parts = min(map(self._splits, self.gathers, self.tiles))

    def _columns(self, g: Gather) -> int:
        return self.c.geometry.batch * g.positions

    def _splits(self, g: Gather, t: Tile) -> int:
        blocks = t.count(g.rows, self._columns(g)) * g.group
        item = TensorType(wide(self.dtype), ()).nbytes
        return min(splits(blocks, g.steps(t), self.size * item, least=16), 16)

    @property
    def scratch(self) -> tuple[TensorType, ...]:
        """Packed weights, and parts of sums."""
        packed = sum(g.packed(t) for g, t in zip(self.gathers, self.tiles, strict=True))
        sizes = [packed, *([self.parts * self.size] if self.parts > 1 else [])]
        return tuple(TensorType(wide(self.dtype), (size,)) for size in sizes)

    def bind(self, x: Buffer, w: Buffer, y: Buffer, bias: Buffer | None, scratch: Sequence[Buffer]) -> list[Call]:
        """Packs and runs each; adds up."""
        source, out = (x, y) if self.c.kind == "output" else (y, x)
        calls: list[Call] = [Fill(out)] if self.nothing and bias is None else []
        at = 0
        for g, t in zip(self.gathers, self.tiles, strict=True):
            packed = scratch[0].at(at, (g.packed(t),))
            at += packed.size
            if packed.size:
                padded = -(-g.rows // t.bm) * t.bm
                calls.append(pack(g, self.c.kind, w, packed, g.steps(t) * t.bk, padded))
            calls.append(self._run(g, t, packed, source, out if self.parts == 1 else scratch[1], bias))
        if self.parts > 1:
            inner = 1 if self.c.last else math.prod(out.shape[2:])
            extra = () if bias is None else (bias, inner, bias.size)
            kernel = text.adding(self.dtype, bias is not None)
            calls.append(kernel(self.size, scratch[1], out, self.size, self.parts, *extra))
        return calls

    def _run(self, g: Gather, t: Tile, packed: Buffer, source: Buffer, out: Buffer, bias: Buffer | None) -> Call:
        columns = self._columns(g)
        item = out.type.numpy.itemsize
        even = g.rows if g.last else g.positions if g.plain else 1
        pack = even % 4 == 0 and out.address % (4 * item) == 0 and self.size % 4 == 0
        parts = self.parts > 1
        fours = g.last and g.channels % t.bk == 0 and t.bk * t.bn % (4 * t.threads) == 0
        fours = fours and source.address % (4 * source.type.numpy.itemsize) == 0
        kernel = text.gather(g, t, result=out.dtype, bias=bias is not None and not parts, pack=pack, fours=fours)
        grid = (t.count(g.rows, columns) * g.group, self.parts)
        return kernel.blocks(*grid, args=(packed, source, out, columns, self.size, None if parts else bias))


def pack(g: Gather, kind: str, w: Buffer, packed: Buffer, terms: int, rows: int) -> Call:
    """The weights of a Gather as [group, terms, rows], with zeros behind its own."""
    kernel = math.prod(g.kernel)
    # elements from one row, and one channel, to the next
    per_row, per_channel = (g.channels * kernel, kernel) if kind == "output" else (kernel, g.rows * kernel)
    area = g.kernel[1] * g.kernel[2], g.kernel[2], 1
    start = sum(f * a for f, a in zip(g.first, area, strict=True))
    steps = (e * a for e, a in zip(g.every, area, strict=True))
    return text.packing(w.dtype, packed.dtype)(
        packed.size, w, packed, packed.size, rows, terms, g.rows, g.channels, math.prod(g.taps), g.taps[1], g.taps[2],
        start, *steps, w.size // g.group, per_row, per_channel,
    )  # fmt: skip


class WeighPlan:
    """A weight's gradient: parts of the images and positions, then their sum."""

    def __init__(self, c: Convolved, dtype: str) -> None:
        self.dtype, self.g = dtype, weigh(c.geometry, dtype, last=c.last)
        self.tile = tile(self.g.rows, self.g.columns, self.g.group, double=dtype == "f64", weigh=True)
        self.terms = c.geometry.batch * self.g.positions
        self.blocks = self.tile.count(self.g.rows, self.g.columns) * self.g.group
        self.size = math.prod(c.w)
        steps = -(-self.terms // self.tile.bk)
        nbytes = TensorType(wide(dtype), (self.size,)).nbytes
        self.parts = splits(self.blocks, steps, nbytes, least=4, chain=CHAIN // self.tile.bk)

    @property
    def scratch(self) -> tuple[TensorType, ...]:
        """The parts."""
        return (TensorType(wide(self.dtype), (self.parts, self.size)),) if self.parts > 1 else ()

    def bind(self, x: Buffer, w: Buffer, y: Buffer, bias: Buffer | None, scratch: Sequence[Buffer]) -> list[Call]:
        """One launch, and one that adds up."""
        target = scratch[0] if self.parts > 1 else w
        kind = "long long" if self.terms >= 1 << 30 else "int"
        kernel = weigh_text.weigh(self.g, self.tile, result=target.dtype, kind=kind)
        calls: list[Call] = [kernel.blocks(self.blocks, self.parts, args=(x, y, target, self.terms))]
        if self.parts > 1:
            calls.append(text.adding(self.dtype, False)(self.size, target, w, self.size, self.parts))
        return calls
