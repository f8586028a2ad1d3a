"""Integers, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...language.samples import Case, Draw
from ...language.types import TensorType
from ..common import Ufunc


class Bits(Ufunc, abstract=True):
    """Integers, bit by bit."""

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """Integers only."""
        if any(t is None or t.dtype[0] not in "iu" for t in inputs):
            raise self.fail("takes integers only", *inputs)
        return super().infer(*inputs)

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        """Signed and unsigned."""
        yield draw.case(cls(), draw.ints("i32[3,4]", -99, 99), draw.ints("i32[4]", -99, 99))
        yield draw.case(cls(), draw.ints("u8[5]", 0, 255), draw.ints("u8[5]", 0, 255))


@dataclass(frozen=True)
class BitwiseAnd(Bits, onnx=True):
    """a & b."""

    ufunc = "bitwise_and"


@dataclass(frozen=True)
class BitwiseOr(Bits, onnx=True):
    """a | b."""

    ufunc = "bitwise_or"


@dataclass(frozen=True)
class BitwiseXor(Bits, onnx=True):
    """a ^ b."""

    ufunc = "bitwise_xor"


@dataclass(frozen=True)
class BitwiseNot(Bits, onnx=True):
    """~a."""

    ufunc = "invert"

    @classmethod
    def samples(cls, draw):
        """Signed and unsigned."""
        yield draw.case(cls(), draw.ints("i64[3]", -99, 99))
        yield draw.case(cls(), draw.ints("u8[3]", 0, 255))


@dataclass(frozen=True)
class BitShift(Bits, onnx=True):
    """Unsigned integers shifted by b bits to the "LEFT" or "RIGHT"."""

    direction: str

    takes = 2

    def compute(self, xp, ins, outs, scratch):
        """One shift."""
        (xp.left_shift if self.direction == "LEFT" else xp.right_shift)(*ins, out=outs[0])

    @classmethod
    def samples(cls, draw):
        """Both directions."""
        for direction in ("LEFT", "RIGHT"):
            yield draw.case(cls(direction=direction), draw.ints("u64[3,4]", 0, 1 << 40), draw.ints("u64[4]", 0, 9))
