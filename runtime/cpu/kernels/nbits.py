"""Products with matrices of a few bits an element, dequantised a part at a time."""

from __future__ import annotations

from ....language.ir import Operator
from ....language.types import Operands, TensorType, need
from ....ops.linear.nbits import PART, MatMulNBits
from ...shared.kernels import nbits
from ..device.native import Call
from ..families import enough, family
from ..providers import products
from .recurrent_steps import Products


@family("MatMulNBits")
class Multiplied(nbits.Multiplied):
    """By a BLAS, or kernels of ours."""

    part = PART

    def accepts(self, op: Operator) -> bool:
        """float32 or float64, some of them, where a BLAS is there."""
        x, y, rule = need(op.inputs[0]), need(op.outputs[0]), op.of(MatMulNBits)
        large = y.size > 0 and enough() <= rule.N * rule.K
        return x.dtype == y.dtype and large and self.fits(op, 2) and products.available(x.dtype)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A part of W; the workspace of products."""
        rule, x = op.of(MatMulNBits), need(op.inputs[0])
        sizes = [c.stop - c.start if not rule.transB else r.stop - r.start for r, c in rule.parts()]
        terms = x.shape[-1]
        high, across = rule.part_sizes()
        room = products.room(x.dtype, *((x.size // terms, width, terms) for width in sizes))
        return TensorType(x.dtype, (high * min(across, rule.K),)), room

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Part by part."""
        x, todo = ins[0].reshape(-1, ins[0].shape[-1]), Products(scratch[1])
        out = outs[0].reshape(len(x), -1)
        for work, rows, columns, part in self.dequantised(op, ins, scratch[0]):
            todo.add(self.place.made(work))
            if op.of(MatMulNBits).transB:
                todo.product(x, part.T, out[:, rows])
            else:
                todo.product(x, part, out[:, columns])
        return todo.calls
