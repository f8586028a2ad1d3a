"""Matrices of a few bits an element: dequantised a part at a time, which cuBLAS then multiplies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import FLOATS, TensorType, need
from ....ops.linear.nbits import TABLES, DequantizeNBits, MatMulNBits, Packed
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel, Product
from ..families import Buffers, Family, family

#: elements of a part of W: 32 MiB of float32, products that fill a large device
PART = 1 << 23


@functools.cache
def _dequantise(out: str, scale: str, zero: str, bits: int, table: str) -> Kernel:
    """out [rows, width] from rows of codes, scales and zero points ("": none), from a column on; a byte a thread.

    `table`: what the codes stand for ("": numbers).
    """
    t, per = COMPUTE[out], 8 // bits
    packed = f"(zeros[row * zero_row + block / {per}] >> {bits} * (block % {per}) & {(1 << bits) - 1})"
    value = {"": f"{1 << bits - 1}", "u8": packed}.get(zero, "widen(zeros[row * zero_row + block])")
    declared = f"const {t} zero = ({t}){value}, scale = ({t})widen(scales[row * blocks + block]);"
    code = f"const {t} code = ({t})(byte >> {bits} * j & {(1 << bits) - 1})"
    number = "(code - zero)"
    if table:
        numbers = ", ".join(repr(float(x)) for x in TABLES[table])
        declared = (
            f"static const {t} table[16] = {{{numbers}}}; const {t} scale = ({t})widen(scales[row * blocks + block]);"
        )
        code, number = "const unsigned code = byte >> (4 - 4 * j) & 15", "table[code]"
    body = f"""
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long across = (width + {per - 1}) / {per};
    if (i >= rows * across) return;
    const long long r = i / across, row = first + r, at = (i % across) * {per}, block = (column + at) / size;
    {declared}
    const unsigned byte = codes[row * row_bytes + column / {per} + i % across];
    for (int j = 0; j < {per} && at + j < width; j++) {{
        {code};
        out[r * width + at + j] = narrow<{C_TYPES[out]}>({number} * scale);
    }}
"""
    sizes = ("rows", "width", "first", "column", "row_bytes", "blocks", "zero_row", "size")
    zeros = f"const {C_TYPES[zero or 'u8']}* zeros"
    parameters = f"const unsigned char* codes, const {C_TYPES[scale]}* scales, {zeros}, {C_TYPES[out]}* out"
    named = "_".join((out, scale, zero or table or "none", str(bits)))
    return Kernel(f"dequantise_{named}", ", ".join((parameters, *(f"long long {n}" for n in sizes))), body)


def _part(rule: Packed, sources: Buffers, out: Buffer, first: int, column: int) -> Call:
    """The launch that dequantises a part [rows, width], of (codes, scales, zero points)."""
    codes, scales, zeros = need(sources[0]), need(sources[1]), sources[2]
    rows, width = out.shape
    zero_row = 0 if zeros is None else rule.zeros_in(zeros.type)
    kernel = _dequantise(out.dtype, scales.dtype, "" if zeros is None else zeros.dtype, rule.bits, rule.table)
    sizes = (rows, width, first, column, rule.row_bytes, rule.blocks, zero_row, rule.block_size)
    across = -(-width // (8 // rule.bits))
    return kernel(rows * across, codes, scales, codes if zeros is None else zeros, out, *sizes)


def _computed(*values: Any) -> bool:
    """Whether the types are floats that kernels compute with, or bytes."""
    return all(v is None or v.dtype in (*FLOATS, "u8") for v in values)


@family("DequantizeNBits")
class Dequantised(Family):
    """(codes, scales, zero points?) → W."""

    def accepts(self, op: Operator) -> bool:
        """All floats."""
        return _computed(*op.inputs, *op.outputs)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """One launch; none where there are no rows."""
        rule, out = op.of(DequantizeNBits), need(outs[0])
        return [_part(rule, ins[:3], out.reshape(out.size // rule.K, rule.K), 0, 0)] if out.size else []


@family("MatMulNBits")
class Multiplied(Family):
    """(x, codes, scales, zero points?) → x Wᵀ or x W."""

    def accepts(self, op: Operator) -> bool:
        """All floats."""
        return _computed(*op.inputs, *op.outputs)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A part of W, in x's type."""
        rule = op.of(MatMulNBits)
        high, across = rule.part_sizes(PART)
        return (TensorType(need(op.inputs[0]).dtype, (high * min(across, rule.K),)),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """A launch and a product for each part."""
        rule, x, out = op.of(MatMulNBits), need(ins[0]), need(outs[0])
        terms, wide = x.shape[-1], out.shape[-1]
        count, calls = x.size // terms, list[Call]()
        for rows, columns in rule.parts(PART) if count else ():
            high, across = rows.stop - rows.start, min(columns.stop, rule.K) - columns.start
            part = scratch[0].at(0, (high, across))
            calls.append(_part(rule, ins[1:4], part, rows.start, columns.start))
            n, start = (high, rows.start) if rule.transB else (across, columns.start)
            to = out.at(start, (out.size - start,))
            calls.append(Product(x, part, to, count, n, terms, terms, across, wide, tb=bool(rule.transB)))
        return calls
