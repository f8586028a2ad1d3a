"""Comparisons, logic, and tests of single elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...language.contexts import OperatorBuilder
from ...language.samples import Case, Draw
from ...language.types import TensorType, Value, Values
from ..common import Elementwise, Ufunc


class Compare(Ufunc, abstract=True):
    """Two values of one type (with broadcasting) to bool; no gradient."""

    def out_dtype(self, dtype: str) -> str:
        """bool."""
        return "bool"

    def gradient(self, b: OperatorBuilder, ins: Values, outs: Sequence[Value], grads: Values) -> Values:
        """None."""
        return [None, None]

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        """Integers with ties, broadcast floats."""
        yield draw.case(cls(), draw.ints("i64[3,4]", 0, 3), draw.ints("i64[4]", 0, 3))
        yield draw.case(cls(), draw("f64[3,1]"), draw("f64[2]"))


@dataclass(frozen=True)
class Equal(Compare, onnx=True):
    """a = b."""

    ufunc = "equal"


@dataclass(frozen=True)
class Less(Compare, onnx=True):
    """a < b."""

    ufunc = "less"


@dataclass(frozen=True)
class LessOrEqual(Compare, onnx=True):
    """a ≤ b."""

    ufunc = "less_equal"


@dataclass(frozen=True)
class Greater(Compare, onnx=True):
    """a > b."""

    ufunc = "greater"


@dataclass(frozen=True)
class GreaterOrEqual(Compare, onnx=True):
    """a ≥ b."""

    ufunc = "greater_equal"


class Logic(Ufunc, abstract=True):
    """Booleans to a boolean."""

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """bool only."""
        if any(t is None or t.dtype != "bool" for t in inputs):
            raise self.fail("takes booleans only", *inputs)
        return super().infer(*inputs)

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        """With broadcasting."""
        yield draw.case(cls(), draw.bools("3,4"), draw.bools("4"))


@dataclass(frozen=True)
class And(Logic, onnx=True):
    """a and b."""

    ufunc = "logical_and"


@dataclass(frozen=True)
class Or(Logic, onnx=True):
    """a or b."""

    ufunc = "logical_or"


@dataclass(frozen=True)
class Xor(Logic, onnx=True):
    """Either a or b."""

    ufunc = "logical_xor"


@dataclass(frozen=True)
class Not(Logic, onnx=True):
    """The opposite."""

    ufunc = "logical_not"

    @classmethod
    def samples(cls, draw):
        """A matrix."""
        yield draw.case(cls(), draw.bools("3,4"))


class Test(Elementwise, abstract=True):
    """A question about each element."""

    takes = 1

    def out_dtype(self, dtype: str) -> str:
        """bool."""
        return "bool"

    def gradient(self, b: OperatorBuilder, ins: Values, outs: Sequence[Value], grads: Values) -> Values:
        """None."""
        return [None]

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        """Infinities of both signs, and what is no number."""
        x = draw("f64[2,3]")
        x[0] = [float("inf"), float("-inf"), float("nan")]
        for dtype in ("f8", "f4", "f2"):
            yield draw.case(cls(), x.astype(dtype))


@dataclass(frozen=True)
class IsNaN(Test, onnx=True):
    """Whether x is no number."""

    def compute(self, xp, ins, outs, scratch):
        """One test."""
        xp.isnan(ins[0], out=outs[0])


@dataclass(frozen=True)
class IsInf(Test, onnx=True):
    """Whether x is infinite; one sign can be left out."""

    detect_negative: int = 1
    detect_positive: int = 1

    def compute(self, xp, ins, outs, scratch):
        """One comparison or test."""
        if self.detect_negative and self.detect_positive:
            xp.isinf(ins[0], out=outs[0])
        elif self.detect_positive or self.detect_negative:
            value = ins[0].dtype.type("inf" if self.detect_positive else "-inf")
            xp.equal(ins[0], value, out=outs[0])
        else:
            outs[0].fill(False)

    @classmethod
    def samples(cls, draw):
        """Either sign, both, none."""
        yield from super().samples(draw)
        x = draw("f32[3]")
        x[:2] = [float("inf"), float("-inf")]
        for negative, positive in ((1, 0), (0, 1), (0, 0)):
            yield draw.case(cls(detect_negative=negative, detect_positive=positive), x)
