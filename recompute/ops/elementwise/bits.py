"""Integers, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...language.element import constant, function, where
from ...language.samples import Case, Draw
from ...language.types import DTYPES, TensorType
from ..common import Ufunc, arity, define


class Bits(Ufunc, abstract=True):
    """Integers, bit by bit."""

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        if any(t is None or t.dtype[0] not in "iu" for t in inputs):
            raise self.fail("takes integers only", *inputs)
        return super().infer(*inputs)

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        pairs = (draw.ints("i32[3,4]", -99, 99), draw.ints("i32[4]", -99, 99)), (draw.ints("u8[5]", 0, 255),) * 2
        for pair in pairs:
            yield draw.case(cls(), *pair[: arity(cls)])


for _name, _ufunc, _meaning in (
    ("BitwiseAnd", "bitwise_and", "a & b."),
    ("BitwiseOr", "bitwise_or", "a | b."),
    ("BitwiseXor", "bitwise_xor", "a ^ b."),
    ("BitwiseNot", "invert", "~a."),
):
    globals()[_name] = define(Bits, __name__, _name, _ufunc, _meaning)


class BitShift(Bits, onnx=True):
    """Unsigned integers shifted by b bits to the "LEFT" or "RIGHT"."""

    direction: str

    takes = 2

    def compute(self, ins, outs, scratch):
        (np.left_shift if self.direction == "LEFT" else np.right_shift)(ins[0], ins[1], out=outs[0])

    def element(self, x, by):
        """0 where all bits go; to the right the sign's bit stays."""
        bits, left = 8 * DTYPES[x.dtype].itemsize, self.direction == "LEFT"
        fits = (by < bits) & (by >= 0)
        shifted = function("shl" if left else "shr")(x, where(fits, by, 0))
        return where(fits, shifted, where(x < 0, -1, constant(0, x.dtype)) if not left and x.dtype[0] == "i" else 0)

    @classmethod
    def samples(cls, draw):
        for direction in ("LEFT", "RIGHT"):
            yield draw.case(cls(direction=direction), draw.ints("u64[3,4]", 0, 1 << 40), draw.ints("u64[4]", 0, 9))
