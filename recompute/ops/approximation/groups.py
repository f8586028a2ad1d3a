"""CompressGroups and DecompressGroups: floats as codes of 8, 4 or 2 bits, with a minimum and a scale for each group.

The storage of kept activations of ActNN (Chen et al. 2021, arXiv 2104.14129) and GACT (Liu et al. 2022, arXiv
2206.11357).  Consecutive elements in flat order are a group, of which the last may be short.  With its least element m,
its greatest M and n = 2^bits - 1,

    scale = (M - m) / n,    code = ⌊(x - m) / scale + u⌋,    x' = m + code · scale.

u is uniform in [0, 1), so that E[x'] = x.  (x - m) / scale is rounded to 16 bits behind the point first, and u has as
many, so that the expectation is right to 2⁻¹⁷ of a step, which for 8 bits is the rounding of float32.

Random bits are the most expensive part, so that a block of the stream (32 bytes, see ops/random/philox.py) serves 32
elements: the upper byte of element i's u is the block's byte i, the lower one its byte i ± 16.  Each u is uniform over
all 2¹⁶ values, and only elements 16 apart share a byte, of which one has it at 2⁻⁸ of the other's weight.

Arithmetic is in float32, float64 for float64, whose ranges are float64 too.  A group of equal elements comes back
exactly.  A group in which an element is NaN or infinite, or that spans more than the largest float, comes back as NaN.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import numpy as np

from ...language.factors import Factor, Place, factor
from ...language.op import Cost, FunctionWriter, Op
from ...language.types import DTYPES, FLOATS, Array, TensorType, Types, dtype_to_onnx, need
from ..random.draws import Draw
from ..random.philox import byte_stream, export_halves
from ..tiles import wide

#: elements that share a block of the random stream; what the length of a group is a multiple of
BLOCK = 32
#: the longest group, and how many elements the numerics take at a time
LONGEST = 8192
#: bits behind the point of a code before it is rounded
POINT = 16
#: the least scale: its reciprocal times 2^POINT is a normal float32
LEAST = 2.0**-110
#: bits of a code
BITS = (8, 4, 2)


def code_bytes(size: int, bits: int) -> int:
    """Bytes that the codes of `size` elements take."""
    return -(-size * bits // 8)


class _Grouped(Op, abstract=True):
    """The base of both operators: `bits` a code, `group` elements with one range."""

    approximates = True

    def check_groups(self: Any, *types: TensorType | None) -> None:
        """TypeRuleError for bits or a length of groups for which there is no code."""
        if self.bits not in BITS:
            raise self.fail(f"bits must be 8, 4 or 2, not {self.bits}", *types)
        if not (BLOCK <= self.group <= LONGEST and self.group % BLOCK == 0):
            raise self.fail(f"group must be a multiple of {BLOCK} up to {LONGEST}, not {self.group}", *types)

    def compressed(self: Any, x: TensorType) -> tuple[TensorType, TensorType]:
        """Types of the codes and the ranges of a tensor."""
        ranges = TensorType(wide(x.dtype), (-(-x.size // self.group), 2))
        return TensorType("u8", (code_bytes(x.size, self.bits),)), ranges

    def places(self: Any, x: TensorType) -> tuple[int, Place, Place, Place] | None:
        """The outermost axis whose slices are whole groups: its size, its place in x, in the codes, in the ranges."""
        lead = next((a for a, d in enumerate(x.shape) if d != 1), None)
        inner = 0 if lead is None else math.prod(x.shape[lead + 1 :])
        if lead is None or not inner or inner % self.group:
            return None
        parts = Place(0, inner=inner * self.bits // 8), Place(0, inner=inner // self.group)
        return x.shape[lead], Place(lead), *parts


class CompressGroups(Draw, _Grouped):
    """(x, step) → codes, packed lowest bits first, and each group's minimum and scale; see the module's text.

    `first`: the number of x's first element, for a slice of a larger tensor, which draws what the whole draws there.
    """

    bits: int
    group: int = 256
    seed: int = 0
    first: int = 0

    required_outputs = 2

    def infer(self, x, step):
        """u8[ceil(size · bits / 8)], and [groups, 2] of float32 (float64 for float64)."""
        self.check_step(step)
        self.check_groups(x, step)
        if x.dtype not in FLOATS:
            raise self.fail("takes floats only", x, step)
        if self.first % BLOCK:
            raise self.fail(f"the first element's number must be a multiple of {BLOCK}, not {self.first}", x, step)
        return self.compressed(x)

    def cost(self, ins, outs):
        """Two comparisons for the range, five operations for the code, four for its share of the cipher."""
        return Cost(11 * ins[0].size, super().cost(ins, outs).bytes)

    def axis_factors(self, ins, outs):
        """The outermost axis, if its slices are whole groups; the others are needed whole."""
        place = self.places(cast(TensorType, ins[0]))
        return () if place is None else (factor(place[0], [place[1]], place[2:]),)

    def sliced(self, factor: Factor, start: int, size: int, outs: Types) -> Any:
        """The same random bits: those before the slice are left out."""
        place = factor.outputs[1]
        assert isinstance(place, Place)
        return dataclasses.replace(self, first=self.first + start * place.inner * self.group)

    def scratch(self, ins, outs):
        """A tile of elements, of their codes, of random bytes."""
        x = need(ins[0])
        size = -(-min(x.size, LONGEST) // self.group) * self.group
        kind = wide(x.dtype)
        return TensorType(kind, (2, size)), TensorType("i32", (2, size)), TensorType("u8", (size,))

    def compute(self, ins, outs, scratch):
        """Tile by tile of whole groups; the last one is filled up with its last element."""
        x, codes, ranges = ins[0].reshape(-1), outs[0], outs[1]
        fill = byte_stream(self.seed, ins[1], self.first // BLOCK)
        tile = LONGEST // self.group * self.group
        for start in range(0, x.size, tile):
            part = x[start : start + tile]
            size = -(-part.size // self.group) * self.group
            values, temp = (s[:size] for s in scratch[0])
            values[: part.size] = part
            values[part.size :] = part[-1]
            at = start // self.group
            low, scale = _ranges(values.reshape(-1, self.group), temp.reshape(-1, self.group), (1 << self.bits) - 1)
            ranges[at : at + len(low), 0], ranges[at : at + len(low), 1] = low, scale
            noise = scratch[2][:size]
            fill(noise)
            work, bits = (s[:size] for s in scratch[1])
            self.codes(values.reshape(-1, self.group), low, scale, noise, work, bits)
            work[part.size :] = 0
            first = start * self.bits // 8
            _pack(work, self.bits, codes[first : first + code_bytes(part.size, self.bits)])

    def codes(self, rows: Array, low: Array, scale: Array, noise: Array, found: Array, bits: Array) -> None:
        """Codes of elements into `found`: what is in `rows` is overwritten."""
        unit = rows.dtype.type(1 << POINT)
        fine = np.isfinite(scale)
        factor = np.divide(unit, scale, out=np.zeros_like(scale), where=fine)
        np.copyto(rows, 0, where=~fine[:, None])
        np.subtract(rows, np.where(fine, low, 0)[:, None], out=rows)
        np.multiply(rows, factor[:, None], out=rows)
        np.minimum(rows, ((1 << self.bits) - 1) * unit, out=rows)
        np.rint(rows, out=rows)
        np.copyto(found.reshape(rows.shape), rows, casting="unsafe")
        pairs, sums = noise.reshape(-1, 2, BLOCK // 2), bits.reshape(-1, 2, BLOCK // 2)
        np.left_shift(pairs, 8, out=sums, dtype=np.int32)
        np.add(sums, pairs[:, ::-1], out=sums)
        np.add(found, bits, out=found)
        np.right_shift(found, POINT, out=found)

    def export(self, g, ins, outs):
        """The cipher in integers, the same random bits as here; the arithmetic as ONNX Runtime rounds it."""
        t = g.type(ins[0])
        if not t.size:
            packed = self.compressed(t)
            for out, m in zip(outs, packed, strict=True):
                g.node("Identity", [g.array(np.zeros(m.shape, m.numpy))], [out])
            return True
        kind, groups = dtype_to_onnx(wide(t.dtype)), -(-t.size // self.group)
        flat = g.call("Cast", g.call("Reshape", ins[0], g.ints([t.size])), to=kind)
        padding = groups * self.group - t.size
        if padding:
            flat = g.call("Pad", flat, g.ints([0, padding]), mode="edge")
        rows = g.call("Reshape", flat, g.ints([groups, self.group]))
        ranges = self._export_ranges(g, rows, DTYPES[wide(t.dtype)].type)
        g.node("Concat", ranges, [outs[1]], axis=1)
        codes = self._export_codes(g, rows, ranges, ins[1], t.size)
        g.node("Identity", [codes], [outs[0]])
        return True

    def _export_ranges(self, g: FunctionWriter, rows: str, kind: Any) -> tuple[str, str]:
        """Minimum and scale, [groups, 1]; NaN where one element is not finite: x - x is 0 elsewhere."""
        axis = g.ints([1])
        low, high = (g.call(f"Reduce{m}", rows, axis, keepdims=1) for m in ("Min", "Max"))
        spread = g.call("Sub", high, low)
        trouble = g.call("ReduceSum", g.call("Sub", rows, rows), axis, keepdims=1)
        trouble = g.call("Add", trouble, g.call("Sub", spread, spread))
        levels = g.array(np.array((1 << self.bits) - 1, kind))
        scale = g.call("Max", g.call("Div", spread, levels), g.array(np.array(LEAST, kind)))
        return g.call("Add", low, trouble), g.call("Add", scale, trouble)

    def _export_codes(self, g: FunctionWriter, rows: str, ranges: tuple[str, str], step: str, size: int) -> str:
        (low, scale), kind = ranges, g.type(rows).numpy.type
        factor = g.call("Div", g.array(np.array(1 << POINT, kind)), scale)
        moved = g.call("Mul", g.call("Sub", rows, low), factor)
        moved = g.call("Where", g.call("IsNaN", moved), g.array(np.array(0, kind)), moved)
        most = g.array(np.array(((1 << self.bits) - 1) << POINT, kind))
        whole = g.call("Cast", g.call("Round", g.call("Min", moved, most)), to=_INT64)
        count = g.type(rows).size
        noise = _export_noise(g, self.seed, step, count, self.first)
        total = g.call("Add", g.call("Reshape", whole, g.ints([count])), noise)
        codes = g.call("Div", total, g.array(np.array(1 << POINT, np.int64)))
        if size != count:
            codes = g.call("Mul", codes, g.array((np.arange(count) < size).astype(np.int64)))
        per = 8 // self.bits
        weights = g.array(np.array([1 << self.bits * i for i in range(per)], np.int64))
        parts = g.call("Mul", g.call("Reshape", codes, g.ints([count // per, per])), weights)
        packed = g.call("Cast", g.call("ReduceSum", parts, g.ints([1]), keepdims=0), to=_UINT8)
        taken = code_bytes(size, self.bits)
        return packed if taken == count // per else g.call("Slice", packed, g.ints([0]), g.ints([taken]))

    @classmethod
    def samples(cls, draw):
        """All codes and types; several tiles; a short group, one element, a constant, what is not finite; nothing."""
        step = np.array(3)
        yield draw.case(cls(bits=8, seed=5), draw("f64[3,100]"), step, gradient=False)
        yield draw.case(cls(bits=4, group=64, seed=2**62 + 1), draw("f32[33,1001]"), step)
        yield draw.case(cls(bits=2, group=32, seed=7), draw("f32[4,9,32]"), np.array(-2))
        yield draw.case(cls(bits=8, group=32, first=96), draw("f32[5,7]", 3, 3), step)
        for dtype, bits in (("f16", 4), ("bf16", 2), ("bf16", 8)):
            yield draw.case(cls(bits=bits, group=32), draw(f"{dtype}[7,31]"), step, export=dtype == "f16")
        lost = draw("f32[5,64]")
        lost[0, 3], lost[1, 40], lost[2, 63] = np.nan, np.inf, -np.inf
        yield draw.case(cls(bits=4, group=64), lost, step, export=False)
        yield draw.case(cls(bits=4), draw("f32[1]"), step)
        yield draw.case(cls(bits=2), draw("f32[0,2]"), step)


class DecompressGroups(_Grouped):
    """(codes, ranges) → minimum + code · scale: what `CompressGroups` made, in `shape` and `dtype`."""

    bits: int
    group: int
    shape: tuple[int, ...]
    dtype: str

    def infer(self, codes, ranges):
        self.check_groups(codes, ranges)
        if self.dtype not in FLOATS or any(d < 0 for d in self.shape):
            raise self.fail(f"makes floats, not {self.dtype}{list(self.shape)}", codes, ranges)
        t = TensorType(self.dtype, self.shape)
        if (codes, ranges) != self.compressed(t):
            needed = " and ".join(map(str, self.compressed(t)))
            raise self.fail(f"{t} in {self.bits} bits and groups of {self.group} needs {needed}", codes, ranges)
        return (t,)

    def cost(self, ins, outs):
        """Three operations an element: its bits, a product, a sum."""
        return Cost(3 * outs[0].size, super().cost(ins, outs).bytes)

    def axis_factors(self, ins, outs):
        """The outermost axis, if its slices are whole groups; the others are needed whole."""
        place = self.places(TensorType(self.dtype, self.shape))
        return () if place is None else (factor(place[0], place[2:], [place[1]]),)

    def gradient(self, b, ins, outs, grads):
        """None: the codes are integers, and the ranges are the statistics of what was compressed."""
        return [None, None]

    def scratch(self, ins, outs):
        """A tile of codes and of elements."""
        size = -(-min(outs[0].size, LONGEST) // self.group) * self.group
        return TensorType("u8", (size,)), TensorType(wide(self.dtype), (size,))

    def compute(self, ins, outs, scratch):
        codes, ranges, out = ins[0], ins[1], outs[0].reshape(-1)
        tile = LONGEST // self.group * self.group
        for start in range(0, out.size, tile):
            part = out[start : start + tile]
            rows = -(-part.size // self.group)
            whole, values = (s[: rows * self.group] for s in scratch)
            first = start * self.bits // 8
            _unpack(codes[first : first + code_bytes(part.size, self.bits)], self.bits, whole)
            taken = ranges[start // self.group :][:rows]
            groups = values.reshape(rows, self.group)
            np.multiply(whole.reshape(rows, self.group), taken[:, 1:], out=groups, dtype=groups.dtype, casting="unsafe")
            np.add(groups, taken[:, :1], out=groups)
            part[...] = values[: part.size]

    def export(self, g, ins, outs):
        size = math.prod(self.shape)
        to = dtype_to_onnx(self.dtype)
        if not size:
            g.node("Identity", [g.array(np.zeros(self.shape, DTYPES[self.dtype]))], outs)
            return True
        groups, per = -(-size // self.group), 8 // self.bits
        bytes_, padding = code_bytes(size, self.bits), groups * self.group // per - code_bytes(size, self.bits)
        whole = g.call("Cast", ins[0], to=_INT64)
        if padding:
            whole = g.call("Pad", whole, g.ints([0, padding]))
        weights = g.array(np.array([[1 << self.bits * i for i in range(per)]], np.int64))
        parts = g.call("Div", g.call("Reshape", whole, g.ints([bytes_ + padding, 1])), weights)
        mask = g.array(np.array((1 << self.bits) - 1, np.int64))
        kind = dtype_to_onnx(wide(self.dtype))
        codes = g.call("Cast", g.call("BitwiseAnd", parts, mask), to=kind)
        rows = g.call("Reshape", codes, g.ints([groups, self.group]))
        low, scale = (g.call("Gather", ins[1], g.array(np.array([i])), axis=1) for i in (0, 1))
        flat = g.call("Reshape", g.call("Add", g.call("Mul", rows, scale), low), g.ints([groups * self.group]))
        if groups * self.group != size:
            flat = g.call("Slice", flat, g.ints([0]), g.ints([size]))
        g.node("Reshape", [g.call("Cast", flat, to=to), g.ints(self.shape)], outs)
        return True

    @classmethod
    def samples(cls, draw):
        """All codes and types; several tiles; a short group, one element, what was not finite; nothing."""
        for bits, group, t in (
            (8, 256, "f64[3,100]"), (4, 64, "f32[33,1001]"), (2, 32, "f32[4,9,32]"), (4, 32, "f16[7,31]"),
            (2, 32, "bf16[7,31]"), (8, 32, "bf16[9]"), (4, 256, "f32[1]"), (2, 256, "f32[0,2]"),
        ):  # fmt: skip
            made = TensorType.parse(t)
            op = cls(bits=bits, group=group, shape=made.shape, dtype=made.dtype)
            codes, ranges = op.compressed(made)
            inputs = draw.ints(str(codes), 0, 256), draw(str(ranges))
            yield draw.case(op, *inputs, gradient=False, export=made.dtype != "bf16")
        op = cls(bits=4, group=32, shape=(40,), dtype="f32")
        lost = np.array([[np.nan, np.nan], [1, 0.5]], np.float32)
        yield draw.case(op, draw.ints("u8[20]", 0, 256), lost)


_UINT8, _INT64 = 2, 7


def _ranges(rows: Array, temp: Array, levels: int) -> tuple[Array, Array]:
    """Minimum and scale of each row; NaN where an element is not finite.

    Extrema are those of the bits as integers in the same order: -0 is below 0, so that they have one sign everywhere.
    """
    kind = np.dtype(f"i{rows.itemsize}")
    sign, rest = 8 * rows.itemsize - 1, np.iinfo(kind).max
    keys, bits = temp.view(kind), rows.view(kind)
    np.right_shift(bits, sign, out=keys)
    np.bitwise_and(keys, rest, out=keys)
    np.bitwise_xor(keys, bits, out=keys)
    ends = [np.bitwise_xor(k, (k >> sign) & rest).view(rows.dtype) for k in (keys.min(axis=1), keys.max(axis=1))]
    with np.errstate(over="ignore", invalid="ignore"):
        spread = ends[1] - ends[0]
        scale = np.maximum(spread / rows.dtype.type(levels), rows.dtype.type(LEAST))
    trouble = ~np.isfinite(spread)
    ends[0][trouble] = scale[trouble] = np.nan
    return ends[0], scale


def _pack(codes: Array, bits: int, out: Array) -> None:
    """Codes (int32, overwritten; a multiple of 8 of them) as bytes, lowest bits first."""
    per = 8 // bits
    parts = codes.reshape(-1, per)
    for i in range(1, per):
        parts[:, i] <<= bits * i
        parts[:, 0] |= parts[:, i]
    np.copyto(out, parts[: out.size, 0], casting="unsafe")


def _unpack(codes: Array, bits: int, out: Array) -> None:
    """Bytes as codes; those behind them are 0."""
    per = 8 // bits
    parts = out.reshape(-1, per)
    parts[codes.size :] = 0
    for i in range(per):
        np.right_shift(codes, bits * i, out=parts[: codes.size, i])
        parts[: codes.size, i] &= (1 << bits) - 1


def _export_noise(g: FunctionWriter, seed: int, step: str, count: int, first: int) -> str:
    """Random integers of POINT bits for each element, as ONNX nodes (int64 [count])."""
    halves = export_halves(g, seed, step, count // 4, first // 4)
    shifts = g.array(np.array([[1, 1 << 8, 1 << 16, 1 << 24]]))
    divided = g.call("Div", g.call("Unsqueeze", halves, g.ints([1])), shifts)
    codes = g.call("BitwiseAnd", divided, g.array(np.array(255)))
    pairs = g.call("Reshape", codes, g.ints([count // BLOCK, 2, BLOCK // 2]))
    others = g.call("Gather", pairs, g.ints([1, 0]), axis=1)
    total = g.call("Add", g.call("Mul", pairs, g.array(np.array(256))), others)
    return g.call("Reshape", total, g.ints([count]))
