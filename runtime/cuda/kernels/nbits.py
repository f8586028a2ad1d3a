"""Products with matrices of a few bits an element, dequantised a part at a time, which cuBLAS then multiplies."""

from __future__ import annotations

from collections.abc import Sequence

from ....language.ir import Operator
from ....language.types import TensorType, need
from ....ops.linear.nbits import MatMulNBits
from ...shared.kernels import nbits
from ..device.kernel import Buffer, Call, Product
from ..families import Buffers, family


@family("MatMulNBits")
class Multiplied(nbits.Multiplied):
    """A launch and a product for each part; one is 32 MiB of float32: products that fill a large device."""

    part = 1 << 23

    def accepts(self, op: Operator) -> bool:
        """All floats."""
        return self.fits(op, 2) and self.fits(op, 0)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A part of W, in x's type."""
        rule = op.of(MatMulNBits)
        high, across = rule.part_sizes(self.part)
        return (TensorType(need(op.inputs[0]).dtype, (high * min(across, rule.K),)),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Part by part."""
        x, out, turned = need(ins[0]), need(outs[0]), bool(op.of(MatMulNBits).transB)
        terms, wide = x.shape[-1], out.shape[-1]
        count, calls = x.size // terms, list[Call]()
        for work, rows, columns, part in self.dequantised(op, ins, scratch[0]) if count else ():
            high, across = part.shape
            n, start = (high, rows.start) if turned else (across, columns.start)
            to = out.at(start, (out.size - start,))
            calls += [self.place.made(work), Product(x, part, to, count, n, terms, terms, across, wide, tb=turned)]
        return calls
