"""The same bits under another element type."""

from __future__ import annotations

from ...language.factors import aligned
from ...language.op import Op
from ...language.types import DTYPES, dtype_from_onnx


class BitCast(Op):
    """x's bits read as element type `to` (a short name) of the same size (ONNX BitCast-26); no gradient."""

    to: str

    moves_data = True

    def infer(self, x):
        if x.numpy.itemsize != DTYPES[self.to].itemsize:
            raise self.fail(f"an element of {self.to} has another size", x)
        return (x.with_dtype(self.to),)

    def axis_factors(self, ins, outs):
        return aligned(ins, outs)

    def compute(self, ins, outs, scratch):
        outs[0].reshape(-1).view(ins[0].dtype)[...] = ins[0].reshape(-1)

    def views(self, ins, outs):
        return (0,)

    def gradient(self, b, ins, outs, grads):
        """None: bits are not numbers."""
        return [None]

    @classmethod
    def from_onnx(cls, node):
        """`to` is ONNX's number of an element type."""
        to = dtype_from_onnx(node.attributes["to"])
        if to is None:
            raise node.fail(f"its element type {node.attributes['to']} is not supported")
        return node.emit(cls(to=to), node.need(0))

    @classmethod
    def samples(cls, draw):
        """Floats, integers, no dimension; the exported opset does not have it."""
        yield draw.case(cls(to="i32"), draw("f32[2,3]"), export=False)
        yield draw.case(cls(to="f64"), draw.ints("i64[3]", 0, 9), gradient=False, export=False)
        yield draw.case(cls(to="u8"), draw.bools("4"), export=False)
        yield draw.case(cls(to="i16"), draw("f16[]"), export=False)
