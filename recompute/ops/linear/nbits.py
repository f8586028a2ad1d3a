"""Matrices of a few bits an element, with a scale for each block of a row, and products with them.

As ONNX Runtime's MatMulNBits stores them (docs/ContribOperators.md there).  W [N, K] has the codes of a row packed into
bytes, the lowest bits first; rows are filled up to whole blocks of `block_size` codes; and

    W[n, k] = (code[n, k] - zero[n, k // block_size]) · scale[n, k // block_size]

A zero point is 2^(bits - 1) where there are none, packed as the codes of a row are (uint8), or a float.  As its
MatMulBnb4 stores them (`table`), codes of 4 bits, the first of a byte in its high half, stand for 16 numbers:

    W[n, k] = table[code[n, k]] · scale[n, k // block_size]

Codes, scales and zero points are constants: they have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ...language.factors import SUM, Place, factor
from ...language.op import Cost, Op, OperatorBuilder
from ...language.samples import Draw
from ...language.types import Array, Operands, TensorType, Value
from ..shape.reshape import reshape
from ..tiles import wide
from .half_products import HalfProduct

#: elements of a part of W that is dequantised at a time: 4 MiB of float32
PART = 1 << 20
#: the values of codes 0 to 15: floats of 4 bits over their largest, 12, and the quantiles of a normal distribution
#: (NormalFloat, Dettmers et al. 2023, arXiv 2305.14314), with the digits of bitsandbytes and ONNX Runtime
_FP4 = (0.0, 5.208333333e-3, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
TABLES = {
    "fp4": np.array([*_FP4, *(-x for x in _FP4)], np.float32),
    "nf4": np.array([
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ], np.float32),
}  # fmt: skip
#: bytes of codes that are looked up at a time
_LOOKED_UP = 1 << 14
#: columns of a part that is narrower than a block, at least
_NARROWEST = 16


class Packed(Op, abstract=True):
    """The base of the operators: how rows of K elements are packed."""

    K: int = 0
    bits: int = 4
    block_size: int = 32
    table: str = ""

    @property
    def places(self) -> range:
        """The lowest bit of each code of a byte, in order."""
        return range(4, -1, -4) if self.table else range(0, 8, self.bits)

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.K // self.block_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes."""
        return self.blocks * self.block_size * self.bits // 8

    @property
    def zero_bytes(self) -> int:
        """Bytes of a row of packed zero points."""
        return -(-self.blocks * self.bits // 8)

    def check_options(self, *given: TensorType | None) -> None:
        """TypeRuleError where options do not fit."""
        if self.bits not in (2, 4, 8) or self.block_size < 16 or self.block_size & (self.block_size - 1) or self.K < 1:
            what = f"K={self.K}, bits={self.bits}, block_size={self.block_size}"
            raise self.fail(f"{what}: 2, 4 and 8 bits in blocks of a power of two from 16 are supported", *given)
        if self.table and (self.table not in TABLES or self.bits != 4 or self.K % self.block_size):
            what = f"table={self.table!r}, bits={self.bits}, K={self.K}, block_size={self.block_size}"
            raise self.fail(f"{what}: fp4 and nf4 of 4 bits are supported, with whole blocks in a row", *given)

    def zeros_in(self, zeros: TensorType | None) -> int:
        """Elements of a row of zero points."""
        return self.blocks if zeros is None or zeros.is_float else self.zero_bytes

    def check(self, codes: TensorType, scales: TensorType, zeros: TensorType | None, rows: int) -> None:
        """TypeRuleError where options, sizes or types do not fit."""
        types = (codes, scales, zeros)
        self.check_options(*types)
        if self.table and zeros is not None:
            raise self.fail("a table has no zero points", *types)
        if codes.dtype != "u8" or not scales.is_float or not (zeros is None or zeros.is_float or zeros.dtype == "u8"):
            raise self.fail("codes must be uint8, scales floats, zero points uint8 or floats", *types)
        for what, t, width in (
            ("codes", codes, self.row_bytes),
            ("scales", scales, self.blocks),
            ("zero points", zeros, self.zeros_in(zeros)),
        ):
            if t is not None and (t.size != rows * width or (not rows and t.shape[-1] != width)):
                raise self.fail(f"{what} must be {width} a row, {rows * width} in all", *types)

    def unpack(self, codes: Array, out: Array, temporary: Array) -> None:
        """Codes of rows [rows, n] as numbers [rows, n · 8 / bits]; `temporary`: bytes like the codes."""
        per = 8 // self.bits
        kind, mask = np.uint8, np.uint8((1 << self.bits) - 1)
        for i, place in enumerate(self.places):
            np.right_shift(codes, kind(place), out=temporary)
            np.bitwise_and(temporary, mask, out=temporary)
            if not self.table:
                out[:, i::per] = temporary
                continue
            high = max(1, _LOOKED_UP // codes.shape[1])
            for start in range(0, len(codes), high):
                out[start : start + high, i::per] = TABLES[self.table][temporary[start : start + high]]

    def scratch_of_part(self, kind: str, rows: int, columns: int) -> tuple[TensorType, ...]:
        """Bytes of a part of W, and zero points of its rows."""
        taken = (columns * self.bits // 8, self.zero_bytes)
        return (TensorType("u8", (rows * max(taken),)), TensorType(kind, (rows * self.zero_bytes * 8 // self.bits,)))

    def dequantise(self, ins: Any, rows: slice, columns: slice, out: Array, scratch: Operands) -> None:
        """Rows and columns of W, of (codes, scales, zero points) as matrices; columns of whole blocks, or of one."""
        codes, scales, zeros = ins[0][rows], ins[1][rows], None if ins[2] is None else ins[2][rows]
        count, width = out.shape
        per = 8 // self.bits
        part = codes[:, columns.start // per : columns.start // per + width // per]
        self.unpack(part, out, scratch[0][: part.size].reshape(part.shape))
        first = columns.start // self.block_size
        blocks = slice(first, first + max(width // self.block_size, 1))
        split = out.reshape(count, blocks.stop - blocks.start, -1)
        if zeros is None and not self.table:
            np.subtract(split, out.dtype.type(1 << (self.bits - 1)), out=split)
        elif zeros is not None:
            if zeros.dtype == np.uint8:
                whole = scratch[1][: count * zeros.shape[1] * per].reshape(count, -1)
                self.unpack(zeros, whole, scratch[0][: zeros.size].reshape(zeros.shape))
                zeros = whole
            np.subtract(split, zeros[:, blocks, None], out=split)
        np.multiply(split, scales[:, blocks, None], out=split)


class DequantizeNBits(Packed):
    """(codes [..., bytes], scales [..., blocks], zero points?) → [..., K], of the scales' type."""

    def infer(self, codes, scales, zeros=None):
        lead = scales.shape[:-1]
        if not scales.ndim or codes.shape[:-1] != lead or (zeros is not None and zeros.shape[:-1] != lead):
            raise self.fail("rows of codes, scales and zero points differ", codes, scales, zeros)
        self.check_options(codes, scales, zeros)
        self.check(codes, scales, zeros, scales.size // self.blocks)
        return (scales.with_shape((*lead, self.K)),)

    def axis_factors(self, ins, outs):
        """A factor for each axis of rows; packed columns cannot be divided."""
        return [factor(d, [i] * len(ins), [i]) for i, d in enumerate(outs[0].shape[:-1])]

    def _rows(self, out: TensorType) -> tuple[int, int, int]:
        """Rows, rows of a part, and columns with those that fill up the last block."""
        columns = self.blocks * self.block_size
        rows = out.size // self.K
        return rows, max(1, min(rows, PART // columns)), columns

    def scratch(self, ins, outs):
        """A part of W with whole blocks, in at least float32."""
        _, high, columns = self._rows(outs[0])
        kind = wide(outs[0].dtype)
        return (TensorType(kind, (high * columns,)), *self.scratch_of_part(kind, high, columns))

    def compute(self, ins, outs, scratch):
        """Some rows at a time."""
        rows, high, columns = self._rows(TensorType.of(outs[0]))
        operands = [None if a is None else a.reshape(rows, a.shape[-1]) for a in (*ins, None)[:3]]
        out = outs[0].reshape(rows, self.K)
        for start in range(0, rows, high):
            at = slice(start, min(start + high, rows))
            part = scratch[0][: (at.stop - start) * columns].reshape(-1, columns)
            self.dequantise(operands, at, slice(0, columns), part, scratch[1:])
            out[at] = part[:, : self.K]

    def gradient(self, b, ins, outs, grads):
        """None: codes and scales are constants."""
        return [None] * len(ins)

    def expand(self, b, codes, scales, zeros=None):
        """Shifts and masks, then the formula."""
        lead, kind = scales.shape[:-1], wide(scales.dtype)
        split = (*lead, self.blocks, self.block_size)
        x = reshape(b, self._unpacked(b, codes), split)
        s, column = b.Cast(scales, to=kind) if scales.dtype != kind else scales, (*lead, self.blocks, 1)
        if self.table:
            x = b.Gather(b.constant(TABLES[self.table], kind), b.Cast(x, to="i32"), axis=0)
        elif zeros is None:
            x = b.Cast(x, to=kind)
            x = b.Sub(x, b.constant(1 << (self.bits - 1), x))
        else:
            if not zeros.type.is_float:
                zeros = self._unpacked(b, zeros)
                zeros = b.Slice(zeros, starts=(0,), ends=(self.blocks,), axes=(len(lead),))
            z = reshape(b, b.Cast(zeros, to=kind) if zeros.dtype != kind else zeros, column)
            x = b.Sub(b.Cast(x, to=kind), z)
        y = reshape(b, b.Mul(x, reshape(b, s, column)), (*lead, self.blocks * self.block_size))
        if y.shape[-1] != self.K:
            y = b.Slice(y, starts=(0,), ends=(self.K,), axes=(len(lead),))
        return (y if kind == scales.dtype else b.Cast(y, to=scales.dtype),)

    def _unpacked(self, b: OperatorBuilder, codes: Value) -> Value:
        """The codes of rows, one an element."""
        per = 8 // self.bits
        if per == 1:
            return codes
        mask = b.constant((1 << self.bits) - 1, codes)
        parts = []
        for place in self.places:
            moved = b.BitShift(codes, b.constant(place, codes), direction="RIGHT") if place else codes
            parts.append(b.Reshape(b.BitwiseAnd(moved, mask), shape=(*codes.shape, 1)))
        joined = b.Concat(*parts, axis=codes.ndim)
        return b.Reshape(joined, shape=(*codes.shape[:-1], codes.shape[-1] * per))

    def cost(self, ins, outs):
        """Four operations an element."""
        return Cost(4 * outs[0].size, super().cost(ins, outs).bytes)

    @classmethod
    def samples(cls, draw):
        """Bits, blocks that are not full, forms of zero points, several axes, 16-bit floats, nothing."""
        for bits, zeros in ((4, "u8"), (8, "u8"), (2, "u8"), (4, ""), (8, "f64")):
            op = cls(K=40, bits=bits, block_size=16)
            yield draw.case(op, *_drawn(draw, op, 3, "f64", zeros), gradient=False)
        op = cls(K=64, bits=4, block_size=32)
        codes, scales, zeros = _drawn(draw, op, 6, "f32", "u8")
        yield draw.case(op, codes.reshape(2, 3, -1), scales.reshape(2, 3, -1), zeros.reshape(2, 3, -1), gradient=False)
        yield draw.case(op, *_drawn(draw, op, 2, "f16", "")[:2], gradient=False)
        yield draw.case(op, *_drawn(draw, op, 0, "f32", ""), gradient=False)
        op = cls(K=100, bits=4, block_size=16)
        yield draw.case(op, *_drawn(draw, op, 300, "f32", "u8"), gradient=False)
        for table, kind in (("nf4", "f64"), ("fp4", "f32"), ("nf4", "f16")):
            op = cls(K=64, block_size=32, table=table)
            yield draw.case(op, *_drawn(draw, op, 9, kind, ""), gradient=False)


class MatMulNBits(Packed):
    """(x, codes, scales, zero points?) → x Wᵀ, or x W without `transB`, over x's last axis; of x's type.

    x: [..., K], or [..., N] without `transB`.  Codes: uint8, N rows of whole blocks; scales: N rows of one a block;
    both in any shape of that size whose first axis is N, or flat.  A part of W is dequantised at a time: some rows, or
    without `transB` some columns, so that each element of the result is one sum.
    """

    N: int = 0
    transB: int = 1

    linear = ((0,),)
    autocast = "low"
    autocast_inputs = (0,)

    def infer(self, x, codes, scales, zeros=None):
        if not x.is_float or x.ndim < 1 or x.shape[-1] != self._terms or self.N < 1:
            raise self.fail(f"x must be floats with {self._terms} along the last axis", x, codes, scales, zeros)
        self.check(codes, scales, zeros, self.N)
        return (x.with_shape((*x.shape[:-1], self.N if self.transB else self.K)),)

    @property
    def _terms(self) -> int:
        return self.K if self.transB else self.N

    def axis_factors(self, ins, outs):
        """Rows of x; rows of W, over which the product without `transB` is summed."""
        last = outs[0].ndim - 1
        factors = [factor(d, [i], [i]) for i, d in enumerate(outs[0].shape[:-1])]
        rows = [None if t is None else Place(0, inner=t.shape[0] // self.N) for t in ins[1:]]
        at, to = (None, last) if self.transB else (last, SUM)
        if all(t is None or t.shape[0] in (self.N, t.size) for t in ins[1:]):
            factors.append(factor(self.N, [at, *rows], [to], counts="N"))
        return factors

    def parts(self, limit: int = PART) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of W of at most `limit` elements: rows, or columns without `transB`."""
        columns = self.blocks * self.block_size
        if self.transB:
            high = max(1, limit // columns)
            high = min(high // 16 * 16 if high >= 16 else high, self.N)
            for start in range(0, self.N, high):
                yield slice(start, min(start + high, self.N)), slice(0, columns)
            return
        across = limit // self.N // self.block_size * self.block_size
        if not across:
            across = min(self.block_size, max(_NARROWEST, 1 << (limit // self.N).bit_length() >> 1))
        for start in range(0, self.K, across):
            yield slice(0, self.N), slice(start, min(start + across, columns))

    def matrices(self, ins: Any) -> tuple[Any, ...]:
        """(codes, scales, zero points) as matrices of N rows; of arrays."""
        return tuple(None if a is None else a.reshape(self.N, -1) for a in (*ins[1:], None)[:3])

    def part_sizes(self, limit: int = PART) -> tuple[int, int]:
        """Rows and columns of the largest part."""
        rows, columns = next(self.parts(limit))
        return rows.stop - rows.start, columns.stop - columns.start

    def scratch(self, ins, outs):
        """A part of W in at least float32; for 16-bit floats tiles of the product."""
        kind, (high, across) = wide(ins[0].dtype), self.part_sizes()
        types = (TensorType(kind, (high * across,)), *self.scratch_of_part(kind, high, across))
        if kind == ins[0].dtype:
            return types
        rows = ins[0].size // self._terms
        width = high if self.transB else min(across, self.K)
        return (*types, *HalfProduct.of((rows, self._terms), (self._terms, width)).scratch())

    def compute(self, ins, outs, scratch):
        """A product for each part of W."""
        x, out = ins[0].reshape(-1, self._terms), outs[0].reshape(-1, self.N if self.transB else self.K)
        matrices = self.matrices(ins)
        for rows, columns in self.parts():
            shape = rows.stop - rows.start, columns.stop - columns.start
            whole = scratch[0][: shape[0] * shape[1]].reshape(shape)
            self.dequantise(matrices, rows, columns, whole, scratch[1:3])
            part = whole[:, : min(columns.stop, self.K) - columns.start]
            to = out[:, rows] if self.transB else out[:, columns.start : columns.start + part.shape[1]]
            w = part.T if self.transB else part
            if len(scratch) > 3 and len(x):
                HalfProduct.of(x.shape, w.shape).run(x, w, to, scratch[3:])
            elif len(x):
                np.matmul(x, w, out=to)

    def gradient(self, b, ins, outs, grads):
        """dx by the same matrix; codes, scales and zero points are constants."""
        dx = b.emit(replace(self, transB=0 if self.transB else 1), grads[0], *ins[1:])
        return [dx, *[None] * (len(ins) - 1)]

    def expand(self, b, x, codes, scales, zeros=None):
        """The whole of W, in at least float32, and MatMul."""
        kind = wide(x.dtype)
        scales = scales if scales.dtype == kind else b.Cast(scales, to=kind)
        values = [None if v is None else reshape(b, v, (self.N, v.size // self.N)) for v in (codes, scales, zeros)]
        w = b.DequantizeNBits(*values, K=self.K, bits=self.bits, block_size=self.block_size, table=self.table)
        y = b.MatMul(x if x.dtype == kind else b.Cast(x, to=kind), w, transB=self.transB)
        return (y if y.dtype == x.dtype else b.Cast(y, to=x.dtype),)

    def cost(self, ins, outs):
        """The product, and four operations for each element of W."""
        rows = ins[0].size // self._terms
        return Cost((2 * rows + 4) * self.N * self.K, super().cost(ins, outs).bytes)

    @classmethod
    def samples(cls, draw):
        """Both products: bits, blocks that are not full, forms of zero points and shapes, several axes, halves, parts
        of rows and of columns; nothing."""
        for transposed in (1, 0):
            for bits, zeros in ((4, "u8"), (8, "u8"), (2, ""), (4, "f64"), (8, "")):
                op = cls(N=6, K=40, bits=bits, block_size=16, transB=transposed)
                yield draw.case(op, draw(f"f64[2,3,{op._terms}]"), *_drawn(draw, op, 6, "f64", zeros), still=(2, 3))
            op = cls(N=5, K=32, bits=4, block_size=32, transB=transposed)
            codes, scales, zeros = _drawn(draw, op, 5, "f32", "u8")
            arrays = codes.reshape(5, 1, -1), scales.reshape(-1), zeros.reshape(-1)
            yield draw.case(op, draw(f"f32[{op._terms}]"), *arrays)
            for kind in ("f16", "bf16"):
                yield draw.case(op, draw(f"{kind}[4,{op._terms}]"), codes, scales, export=kind == "f16")
            for table, kind in (("nf4", "f64"), ("fp4", "f64"), ("nf4", "f16")):
                op = cls(N=6, K=64, block_size=32, table=table, transB=transposed)
                yield draw.case(op, draw(f"{kind}[3,{op._terms}]"), *_drawn(draw, op, 6, kind, ""), still=(2,))
            op = cls(N=5, K=32, bits=4, block_size=32, transB=transposed)
            yield draw.case(op, draw(f"f32[0,{op._terms}]"), codes, scales, zeros)
            op = cls(N=300, K=4100 if transposed else 500, bits=4, block_size=64, transB=transposed)
            yield draw.case(op, draw(f"f32[3,{op._terms}]"), *_drawn(draw, op, 300, "f32", "u8"), gradient=False)
        op = cls(N=40000, K=40, bits=4, block_size=32, transB=0)
        yield draw.case(op, draw("f32[2,40000]", 0, 0.01), *_drawn(draw, op, 40000, "f32", ""), gradient=False)


def _drawn(draw: Draw, op: Packed, rows: int, kind: str, zeros: str) -> tuple[Any, ...]:
    """Codes, scales and zero points ("": none) of a matrix of so many rows."""
    codes, scales = draw.ints(f"u8[{rows},{op.row_bytes}]", 0, 256), draw(f"{kind}[{rows},{op.blocks}]", 0.05, 0.2)
    if zeros == "u8":
        return codes, scales, draw.ints(f"u8[{rows},{op.zero_bytes}]", 0, 256)
    return (codes, scales, draw(f"{zeros}[{rows},{op.blocks}]", 0, 9)) if zeros else (codes, scales)
