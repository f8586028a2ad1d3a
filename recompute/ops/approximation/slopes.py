"""Gradients of activations from a few bits an element (Novikov, Bershatsky et al. 2022, arXiv 2202.00441).

The derivative of an activation is replaced by a step function; the forward pass keeps, for each element of its input,
the number of the step that it is on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.factors import Factor, Place
from ...language.op import Cost, Draw, Op
from ...language.types import Array, TensorType, dtype_to_onnx
from ..tiles import TILE, wide
from .bits import export_pack, export_unpack, pack, packed_bytes, regions, scratch_bytes, unpack

#: bits of a code, at most
MOST_BITS = 4


def code_bits(steps: int) -> int:
    """Bits of the number of one of so many steps."""
    return max(1, (steps - 1).bit_length())


class _Slopes(Op, abstract=True):
    """The base of both operators: a tensor, and its codes in flat order."""

    autocast = "follow"

    def codes_type(self, x: TensorType, bits: int) -> TensorType:
        """The type of x's codes."""
        return TensorType("u8", (packed_bytes(x.size, bits),))

    def check_numbers(self, what: str, numbers: Sequence[float], x: TensorType | None, *others: TensorType) -> None:
        """TypeRuleError where the tensor is no float, or numbers are not finite."""
        if x is None or not x.is_float:
            raise self.fail("takes floats only", x, *others)
        if not all(math.isfinite(n) for n in numbers):
            raise self.fail(f"{what} must be finite numbers, not {list(numbers)}", x, *others)

    def codes_factors(self, x: TensorType, bits: int, *, out: bool) -> tuple[Factor, ...]:
        """Axes of x below which codes fill whole bytes; the others are needed whole.

        `out`: the codes are the output, not an input.
        """
        factors = []
        for axis, size in enumerate(x.shape):
            inner = math.prod(x.shape[axis + 1 :])
            whole = not x.size or inner * bits % 8 != 0
            mine, codes = Place(axis), None if whole else Place(0, math.prod(x.shape[:axis]), inner * bits // 8)
            inputs, outputs = ((mine,), (codes,)) if out else ((mine, codes), (mine,))
            factors.append(Factor(size, inputs, outputs, whole=whole))
        return tuple(factors)


class SlopeCodes(_Slopes):
    """x → for each element the number of bounds that it is above, packed in flat order, the lowest bits first.

    So len(bounds) + 1 codes of 1 to 4 bits.  `even`: the number of bounds that |x| is above.  NaN is above none.
    """

    approximates = True

    bounds: tuple[float, ...]
    even: int = 0

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return code_bits(len(self.bounds) + 1)

    def infer(self, *inputs):
        """u8[bytes]."""
        self.need(*inputs, count=1)
        x = inputs[0]
        self.check_numbers("bounds", self.bounds, x)
        if not 1 <= len(self.bounds) < 2**MOST_BITS:
            raise self.fail(f"takes 1 to {2**MOST_BITS - 1} bounds (codes of 1 to {MOST_BITS} bits), not "
                            f"{len(self.bounds)}", x)  # fmt: skip
        if any(a >= b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise self.fail(f"bounds must ascend, not {list(self.bounds)}", x)
        if self.even not in (0, 1):
            raise self.fail(f"even must be 0 or 1, not {self.even}", x)
        return (self.codes_type(x, self.bits),)

    def axis_factors(self, ins, outs):
        """Axes below which codes fill whole bytes."""
        return self.codes_factors(ins[0], self.bits, out=True)

    def scratch(self, ins, outs):
        """Buffers for a tile: codes, their packing, a comparison, and a copy where x or |x| is not compared itself."""
        x = ins[0]
        size = min(x.size, TILE)
        types = (TensorType("u8", (scratch_bytes(x.size, self.bits),)), TensorType("bool", (size,)))
        return (*types, TensorType(wide(x.dtype), (size,))) if self._copies(x.dtype) else types

    def _copies(self, dtype: str) -> bool:
        return bool(self.even) or wide(dtype) != dtype

    def compute(self, ins, outs, scratch):
        """Tile by tile: a comparison for each bound; the sums are packed."""
        x, out = ins[0].reshape(-1), outs[0]
        for start in range(0, x.size, TILE):
            stop = min(start + TILE, x.size)
            numbers, packed, temp = regions(scratch[0], stop - start, self.bits)
            numbers[...] = 0
            codes, above, piece = numbers.reshape(-1)[: stop - start], scratch[1][: stop - start], x[start:stop]
            if len(scratch) > 2:
                copy = scratch[2][: stop - start]
                copy[...] = piece
                piece = np.absolute(copy, out=copy) if self.even else copy
            for bound in self.bounds:
                np.greater(piece, piece.dtype.type(bound), out=above)
                np.add(codes, above, out=codes)
            pack(numbers, packed, temp)
            first, last = start * self.bits // 8, packed_bytes(stop, self.bits)
            out[first:last] = packed.reshape(-1)[: last - first]

    def cost(self, ins, outs):
        """A comparison and an addition for each bound."""
        return Cost(2 * len(self.bounds) * ins[0].size, super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        """None: codes are integers."""
        return [None]

    def export(self, g, ins, outs):
        """The comparisons summed up in integers, and packed."""
        t = g.type(ins[0])
        if not t.size:
            g.node("Reshape", [g.call("Cast", ins[0], to=_U8), g.ints((0,))], outs)
            return True
        x = g.call("Reshape", _widened(g, ins[0]), g.ints((t.size,)))
        x = g.call("Abs", x) if self.even else x
        above = [g.call("Cast", g.call("Greater", x, g.scalar(v, x)), to=_I64) for v in self.bounds]
        codes = above[0]
        for more in above[1:]:
            codes = g.call("Add", codes, more)
        g.node("Identity", [export_pack(g, codes, t.size, self.bits)], outs)
        return True

    @classmethod
    def samples(cls, draw):
        """1 to 4 bits; sizes that fill bytes and others; 16-bit floats; more than a tile; nothing."""
        for op in _SAMPLES:
            yield draw.case(op, draw("f64[3,5,8]", -3, 3))
            yield draw.case(op, draw("f32[13]", -3, 3))
        yield draw.case(_SAMPLES[2], draw("f32[33,1001]", -3, 3))
        yield draw.case(_SAMPLES[3], draw("f16[2,4]", -3, 3))
        yield draw.case(cls(bounds=(0.5, 1.5), even=1), draw("f64[9]", -3, 3))
        yield draw.case(_SAMPLES[0], draw("f32[0,2]"))


_U8, _I64 = 2, 7
_SAMPLES = (
    SlopeCodes(bounds=(0.0,)),
    SlopeCodes(bounds=(-0.5, 1.25)),
    SlopeCodes(bounds=(-2.0, -0.75, -0.25, 0.25, 0.75, 1.25, 2.0)),
    SlopeCodes(bounds=tuple(i / 4 - 2 for i in range(15))),
)


def _widened(g: Any, x: str) -> str:
    """A half in float32."""
    dtype = g.type(x).dtype
    return x if wide(dtype) == dtype else g.call("Cast", x, to=dtype_to_onnx(wide(dtype)))


class SlopeGrad(_Slopes):
    """(dy, codes) → dy · levels[code]: the gradient of an activation whose input had these codes."""

    levels: tuple[float, ...]

    inplace = (0,)
    linear = ((0,),)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return code_bits(len(self.levels))

    def table(self) -> tuple[float, ...]:
        """The levels of all codes that the bits can hold: those without a level have the last one."""
        return self.levels + self.levels[-1:] * (2**self.bits - len(self.levels))

    def infer(self, *inputs):
        self.need(*inputs, count=2)
        dy, codes = inputs
        self.check_numbers("levels", self.levels, dy, codes)
        if not 2 <= len(self.levels) <= 2**MOST_BITS:
            raise self.fail(f"takes 2 to {2**MOST_BITS} levels (codes of 1 to {MOST_BITS} bits), not "
                            f"{len(self.levels)}", dy, codes)  # fmt: skip
        if codes != self.codes_type(dy, self.bits):
            raise self.fail(f"codes of {dy.size} elements with {self.bits} bits each are "
                            f"{self.codes_type(dy, self.bits)}", dy, codes)  # fmt: skip
        return (dy,)

    def axis_factors(self, ins, outs):
        """Axes below which codes fill whole bytes."""
        return self.codes_factors(ins[0], self.bits, out=False)

    def scratch(self, ins, outs):
        """Buffers for a tile: codes, their unpacking, a comparison, levels, and dy in the computing type."""
        dy = ins[0]
        size = min(dy.size, TILE)
        rows = 1 if wide(dy.dtype) == dy.dtype else 2
        return (
            TensorType("u8", (scratch_bytes(dy.size, self.bits),)),
            TensorType("bool", (size,)),
            TensorType(wide(dy.dtype), (rows, size)),
        )

    def compute(self, ins, outs, scratch):
        """Tile by tile: unpack, choose the levels, multiply."""
        dy, out, source = ins[0].reshape(-1), outs[0].reshape(-1), ins[1]
        for start in range(0, dy.size, TILE):
            stop = min(start + TILE, dy.size)
            numbers, packed, temp = regions(scratch[0], stop - start, self.bits)
            first, last = start * self.bits // 8, packed_bytes(stop, self.bits)
            packed.reshape(-1)[last - first :] = 0
            packed.reshape(-1)[: last - first] = source[first:last]
            unpack(packed, numbers, temp)
            codes, here = numbers.reshape(-1)[: stop - start], scratch[1][: stop - start]
            level, *copy = (row[: stop - start] for row in scratch[2])
            level[...] = self.levels[-1]
            for code, value in enumerate(self.levels[:-1]):
                np.equal(codes, codes.dtype.type(code), out=here)
                np.copyto(level, level.dtype.type(value), where=here)
            if not copy:
                np.multiply(dy[start:stop], level, out=out[start:stop])
                continue
            copy[0][...] = dy[start:stop]
            np.multiply(copy[0], level, out=level)
            out[start:stop] = level

    def cost(self, ins, outs):
        """A choice and a product for each element."""
        return Cost(2 * ins[0].size, super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        return [b.SlopeGrad(grads[0], ins[1], levels=self.levels), None]

    def export(self, g, ins, outs):
        """The codes unpacked in integers, and the levels gathered."""
        t = g.type(ins[0])
        if not t.size:
            g.node("Identity", ins[:1], outs)
            return True
        dy = _widened(g, ins[0])
        codes = g.call("Reshape", export_unpack(g, ins[1], t.size, self.bits), g.ints(t.shape))
        table = g.array(np.array(self.table(), g.type(dy).numpy))
        product = g.call("Mul", dy, g.call("Gather", table, codes))
        g.node("Cast", [product], outs, to=dtype_to_onnx(t.dtype))
        return True

    @classmethod
    def samples(cls, draw):
        """1 to 4 bits; sizes that fill bytes and others; 16-bit floats; more than a tile; nothing."""
        for codes in _SAMPLES:
            op = cls(levels=tuple(0.5 * i - 0.25 for i in range(len(codes.bounds) + 1)))
            for dy in ("f64[3,5,8]", "f32[13]"):
                yield draw.case(op, draw(dy), _draw_codes(draw, dy, op.bits))
        yield draw.case(cls(levels=(0.0, 1.0)), draw("f32[33,1001]"), _draw_codes(draw, "f32[33,1001]", 1))
        yield draw.case(cls(levels=(0.1, 0.2, 1.1)), draw("f16[2,4]"), _draw_codes(draw, "f16[2,4]", 2))
        yield draw.case(cls(levels=(0.0, 1.0)), draw("f32[0,2]"), _draw_codes(draw, "f32[0,2]", 1))


def _draw_codes(draw: Draw, text: str, bits: int) -> Array:
    return draw.ints(f"u8[{packed_bytes(TensorType.parse(text).size, bits)}]", 0, 256)
