"""Comparisons, logic, and predicates of single elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...language.contexts import OperatorBuilder
from ...language.element import equal
from ...language.samples import Case, Draw
from ...language.types import TensorType, Value, Values
from ..common import Elementwise, Ufunc, arity, define


class Compare(Ufunc, abstract=True):
    """Two values of one type (with broadcasting) to bool; no gradient."""

    def out_dtype(self, dtype: str) -> str:
        return "bool"

    def gradient(self, b: OperatorBuilder, ins: Values, outs: Sequence[Value], grads: Values) -> Values:
        return [None, None]

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        yield draw.case(cls(), draw.ints("i64[3,4]", 0, 3), draw.ints("i64[4]", 0, 3))
        yield draw.case(cls(), draw("f64[3,1]"), draw("f64[2]"))


for _name, _ufunc, _sign in (
    ("Equal", "equal", "="),
    ("Less", "less", "<"),
    ("LessOrEqual", "less_equal", "≤"),
    ("Greater", "greater", ">"),
    ("GreaterOrEqual", "greater_equal", "≥"),
):
    globals()[_name] = define(Compare, __name__, _name, _ufunc, f"a {_sign} b.")


class Logic(Ufunc, abstract=True):
    """Booleans to a boolean."""

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        if any(t is None or t.dtype != "bool" for t in inputs):
            raise self.fail("takes booleans only", *inputs)
        return super().infer(*inputs)

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        yield draw.case(cls(), *(draw.bools("3,4"), draw.bools("4"))[: arity(cls)])


for _name, _ufunc, _meaning in (
    ("And", "logical_and", "a and b."),
    ("Or", "logical_or", "a or b."),
    ("Xor", "logical_xor", "Exactly one of a and b."),
    ("Not", "logical_not", "Logical negation of a."),
):
    globals()[_name] = define(Logic, __name__, _name, _ufunc, _meaning)


class Predicate(Elementwise, abstract=True):
    """A predicate of each element: bool, without gradient."""

    takes = 1

    def out_dtype(self, dtype: str) -> str:
        return "bool"

    def gradient(self, b: OperatorBuilder, ins: Values, outs: Sequence[Value], grads: Values) -> Values:
        return [None]

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        """Infinities of both signs, and NaN."""
        x = draw("f64[2,3]")
        x[0] = [float("inf"), float("-inf"), float("nan")]
        for dtype in ("f8", "f4", "f2"):
            yield draw.case(cls(), x.astype(dtype))


class IsNaN(Predicate, onnx=True):
    """Whether x is NaN."""

    def element(self, x):
        return ~equal(x, x)


class IsInf(Predicate, onnx=True):
    """Whether x is infinite: ∞ only with `detect_positive`, -∞ only with `detect_negative`."""

    detect_negative: int = 1
    detect_positive: int = 1

    def compute(self, ins, outs, scratch):
        if self.detect_negative and self.detect_positive:
            np.isinf(ins[0], out=outs[0])
        elif self.detect_positive or self.detect_negative:
            value = ins[0].dtype.type("inf" if self.detect_positive else "-inf")
            np.equal(ins[0], value, out=outs[0])
        else:
            outs[0].fill(False)

    def element(self, x):
        if self.detect_negative and self.detect_positive:
            return equal(abs(x), math.inf)
        if self.detect_positive or self.detect_negative:
            return equal(x, math.inf if self.detect_positive else -math.inf)
        return x < -math.inf  # always false

    @classmethod
    def samples(cls, draw):
        yield from super().samples(draw)
        x = draw("f32[3]")
        x[:2] = [float("inf"), float("-inf")]
        for negative, positive in ((1, 0), (0, 1), (0, 0)):
            yield draw.case(cls(detect_negative=negative, detect_positive=positive), x)
