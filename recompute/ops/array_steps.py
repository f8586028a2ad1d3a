"""The formula of an element as calls on whole arrays: what an element-wise operator computes with NumPy, step by step.

Every step writes into an array that is given: the output, or a temporary.  A temporary is used again once nothing reads
it any more, so that a formula has few of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..language.element import Expr, nodes
from ..language.formulas import element_of
from ..language.op import Op
from ..language.types import DTYPES
from .erf import ERF_FLOATS, ERF_MASKS, erf

#: function of an expression → the one of NumPy that takes the arguments and `out=`
FUNCTIONS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "neg": "negative", "max": "maximum",
    "min": "minimum", "abs": "absolute", "sqrt": "sqrt", "exp": "exp", "expm1": "expm1", "log": "log", "log1p": "log1p",
    "tanh": "tanh", "sin": "sin", "cos": "cos", "pow": "power", "floor": "floor", "ceil": "ceil", "rint": "rint",
    "trunc": "trunc", "lt": "less", "le": "less_equal", "eq": "equal", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "not": "invert", "erf": "erf",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A temporary: number `index` of those with this element type.  Number 0 of the result's type is the output."""

    dtype: str
    index: int


@dataclass(frozen=True)
class Step:
    """`function` of arguments (rows, positions of inputs, or scalars in a tuple of one) into a row; "copy" with a mask
    `where`, if it has one.  `spare`: rows that are free meanwhile."""

    function: str
    arguments: tuple[Any, ...]
    to: Row
    where: Any = None
    spare: tuple[Row, ...] = ()


@dataclass(frozen=True)
class ArraySteps:
    """Steps in order, and how many rows of each element type they need, the output among them."""

    steps: tuple[Step, ...]
    dtype: str
    rows: dict[str, int]

    @property
    def temporaries(self) -> list[str]:
        """The element type of each temporary, those of the output's type first."""
        dtypes = [self.dtype] * (self.rows.get(self.dtype, 1) - 1)
        return dtypes + [dtype for dtype, count in self.rows.items() if dtype != self.dtype for _ in range(count)]

    @functools.cached_property
    def _calls(self) -> tuple[list[tuple[str, tuple[int, ...], int, int | None, tuple[int, ...]]], list[Any]]:
        """The steps by positions in (output, temporaries, inputs, scalars), those of scalars from the end."""
        first = {self.dtype: 0}
        for dtype in self.rows:
            first.setdefault(dtype, sum(self.rows[other] for other in first))
        scalars: list[Any] = []

        def position(x: Any) -> int:
            if isinstance(x, Row):
                return first[x.dtype] + x.index
            if isinstance(x, int):
                return sum(self.rows.values()) + x
            scalars.insert(0, x[0])
            return -len(scalars)

        calls = []
        for s in self.steps:
            where = None if s.where is None else position(s.where)
            arguments, spare = (tuple(map(position, rows)) for rows in (s.arguments, s.spare))
            calls.append((s.function, arguments, position(s.to), where, spare))
        return calls, scalars

    def run(self, inputs: Sequence[Any], out: Any, temporaries: Sequence[Any]) -> None:
        """Computes `out`, which may be none of the inputs that a later step reads, from arrays that broadcast to it."""
        calls, scalars = self._calls
        arrays = [out, *temporaries, *inputs, *scalars]
        for function, arguments, to, where, spare in calls:
            if function == "copy":
                np.copyto(arrays[to], arrays[arguments[0]], where=True if where is None else arrays[where])
            elif function == "erf":
                erf(arrays[arguments[0]], arrays[to], *(arrays[i] for i in spare))
            else:
                getattr(np, function)(*[arrays[i] for i in arguments], out=arrays[to])


@functools.lru_cache(maxsize=1 << 12)
def array_steps(op: Op, dtypes: tuple[str | None, ...], inplace: tuple[int, ...] = ()) -> ArraySteps:
    """The steps of an operator with a formula and one output, for inputs of these element types (None: absent).

    `inplace`: inputs whose array the output may be.
    """
    elements = element_of(op, dtypes)
    root = None if elements is None or len(elements) > 1 else elements[0]
    if root is None:
        raise op.fail(f"has no formula for operands of {', '.join(d or 'no type' for d in dtypes) or 'no type'}")
    return _Writer([root]).written(inplace)


def updating_steps(roots: Sequence[Expr], dtype: str) -> ArraySteps:
    """The steps that write each expression over the array of the input of its number, all of this element type.

    `run` takes that of number 0 as the output, and the others before the temporaries.
    """
    return _Writer(roots).updating(dtype)


def _arguments(x: Expr) -> Sequence[Expr]:
    """In the order in which they are worked out: of a choice the condition last, as it is needed last."""
    return x.args[::-1] if x.fn == "where" else x.args


class _Writer:
    def __init__(self, roots: Sequence[Expr]) -> None:
        self.roots, self.order = roots, list(nodes(roots, _arguments))
        self.last = {id(a): i for i, x in enumerate(self.order) for a in x.args}
        self.last.update((id(root), len(self.order)) for root in roots)
        self.updated = 0  # inputs of the first numbers that are rows
        self.places: dict[int, Any] = {}
        self.free: dict[str, list[int]] = {}
        self.rows: dict[str, int] = {}
        self.steps: list[Step] = []

    def written(self, inplace: tuple[int, ...]) -> ArraySteps:
        for i, x in enumerate(self.order):
            self.places[id(x)] = self._place(x, i)
        result = self.places[id(self.roots[0])]
        first = next((i for i, s in enumerate(self.steps) if s.to == result), len(self.steps))
        read = {a for s in self.steps[first + 1 :] for a in (*s.arguments, s.where) if isinstance(a, int)}
        if not isinstance(result, Row) or not read.isdisjoint(inplace):
            self.free.clear()  # a row that was written before may be the output only where no input is
            to = self._take(self.roots[0].dtype)
            self.steps.append(Step("copy", (result,), to))
            result = to
        return ArraySteps(tuple(self._turned(s, result) for s in self.steps), result.dtype, self.rows)

    def updating(self, dtype: str) -> ArraySteps:
        self.updated = self.rows[dtype] = len(self.roots)
        for i, x in enumerate(self.order):
            self.places[id(x)] = self._place(x, i)
        for number, root in enumerate(self.roots):
            assert self.places[id(root)] == Row(dtype, number), f"{root} is not worked out in its own place"
        return ArraySteps(tuple(self.steps), dtype, self.rows)

    def _place(self, x: Expr, at: int) -> Any:
        """Where the value of a node is, once its steps are written."""
        if x.fn == "input":
            return Row(x.dtype, x.value) if x.value < self.updated else x.value
        if x.fn == "constant":
            return (DTYPES[x.dtype].type(x.value),)
        arguments = tuple(self.places[id(a)] for a in x.args)
        ends = (a for n, a in zip(x.args, arguments, strict=True) if self.last[id(n)] == at)
        ending = {a: None for a in ends if isinstance(a, Row)}
        if x.fn == "where":
            to = self._choice(x.dtype, arguments, ending)
        else:
            spare: tuple[Row, ...] = ()
            if x.fn == "erf":
                to = self._take(x.dtype)
                spare = tuple(self._take(t) for t in [x.dtype] * ERF_FLOATS + ["bool"] * ERF_MASKS)
            else:
                to = next((r for r in ending if r.dtype == x.dtype), None) or self._take(x.dtype)
            function = "copy" if x.fn == "cast" else FUNCTIONS[x.fn]
            self.steps.append(Step(function, arguments, to, spare=spare))
            for row in spare:
                self._release(row)
        for row in ending:
            if row != to:
                self._release(row)
        return to

    def _choice(self, dtype: str, arguments: tuple[Any, ...], ending: dict[Row, None]) -> Row:
        """x over y where the condition holds; y over x where it does not, if only x's row can be written."""
        condition, x, y = arguments
        if y in ending:
            if x != y:
                self.steps.append(Step("copy", (x,), y, condition))
            return y
        if x in ending and condition in ending:
            self.steps.append(Step("invert", (condition,), condition))
            self.steps.append(Step("copy", (y,), x, condition))
            return x
        to = self._take(dtype)
        self.steps += [Step("copy", (y,), to), Step("copy", (x,), to, condition)]
        return to

    def _take(self, dtype: str) -> Row:
        if self.free.get(dtype):
            return Row(dtype, self.free[dtype].pop())
        self.rows[dtype] = self.rows.get(dtype, 0) + 1
        return Row(dtype, self.rows[dtype] - 1)

    def _release(self, row: Row) -> None:
        self.free.setdefault(row.dtype, []).append(row.index)

    @staticmethod
    def _turned(step: Step, result: Row) -> Step:
        """The step with the row of the result as number 0, which is the output."""

        def turned(x: Any) -> Any:
            if isinstance(x, Row) and x.dtype == result.dtype and x.index in (0, result.index):
                return Row(x.dtype, result.index - x.index)
            return x

        return Step(
            step.function, tuple(map(turned, step.arguments)), turned(step.to), turned(step.where),
            tuple(map(turned, step.spare)),
        )  # fmt: skip
