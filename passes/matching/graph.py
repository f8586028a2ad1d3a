"""A block as a graph: what makes a value, what reads it, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ...language.ir import Block, Free, Operator, Role, Value
from ..cleanup.dead_code import prune
from .known import Known

#: operators of two operands whose order does not matter
COMMUTATIVE = frozenset(["Add", "Mul", "Max", "Min", "And", "Or", "Xor", "Equal"])
FORWARD = (Role.FORWARD, Role.LOSS)


class NoMatchError(Exception):
    """Why something is not what was looked for."""


def result(op: Operator) -> Value:
    """The first value that an operator writes."""
    return next(op.writes())


class Graph:
    """The operators of a block by the values that they make and read.

    `data`: contents of buffers (see `Known`); `outputs`: what has to stay readable, in place of the block's outputs;
    only operators needed for these count as readers then.
    """

    def __init__(
        self, block: Block, data: Mapping[str, Any] | None = None, outputs: Sequence[str] | None = None
    ) -> None:
        self.block, self.data = block, data or {}
        self.outputs = block.outputs if outputs is None else outputs
        self._counted = block.operators if outputs is None else prune(block.operators, outputs, FORWARD)

    @cached_property
    def known(self) -> Known:
        """The values that are known before a step runs."""
        return Known(self.block, self.data)

    @cached_property
    def places(self) -> dict[str, int]:
        """Value name → position of the operator that makes it."""
        return self.block.producers()

    @cached_property
    def _producers(self) -> dict[str, Operator]:
        return {name: self.block.operators[i] for name, i in self.places.items()}

    @cached_property
    def _readers(self) -> dict[str, list[Operator]]:
        readers: dict[str, list[Operator]] = {}
        for op in self._counted:
            for v in () if isinstance(op.op, Free) else op.reads():
                readers.setdefault(v.name, []).append(op)
        return readers

    def replace(self, operators: Iterable[Operator]) -> None:
        """From now on, these make what they write."""
        self._producers.update((v.name, op) for op in operators for v in op.writes())

    def producer(self, v: Value | None, *kinds: str) -> Operator | None:
        """The operator that makes a value; None where there is none, or none of these kinds."""
        op = None if v is None else self._producers.get(v.name)
        return op if op is not None and (not kinds or op.op.name in kinds) else None

    def readers(self, v: Value) -> list[Operator]:
        """The operators that read a value, in order; twice where one reads it twice."""
        return self._readers.get(v.name, [])

    def only_reader(self, v: Value) -> Operator:
        """The one operator that reads a value, once; NoMatchError where others do, or the program's caller."""
        if v.name in self.outputs:
            raise NoMatchError(f"'{v.name}' is an output")
        readers = self.readers(v)
        if len(readers) != 1:
            raise NoMatchError(f"'{v.name}' has {len(readers)} readers")
        return readers[0]

    def below(self, op: Operator, steps: int) -> Iterator[Operator]:
        """An operator, the only reader of its result, the only reader of that one's result, and so on; of one role."""
        yield op
        for _ in range(steps):
            try:
                after = self.only_reader(result(op))
            except NoMatchError:
                return
            if after.role is not op.role:
                return
            op = after
            yield op

    def above(self, v: Value, *kinds: str) -> Value:
        """Where a value comes from, through first operands of these kinds."""
        while (op := self.producer(v, *kinds)) is not None and op.inputs[0] is not None and op.outputs[0] == v:
            v = op.inputs[0]
        return v

    def number(self, v: Value | None) -> float | None:
        """The one number that all elements of a value are known to be."""
        while (spread := self.producer(v, "Expand")) is not None:
            v = spread.inputs[0]
        fill = self.producer(v, "Fill")
        return float(fill.op.value) if fill is not None else self.known.number(v)  # type: ignore[attr-defined]

    def scaled(self, op: Operator) -> tuple[Value, float] | None:
        """x and c, where a Mul or Div makes x · c with a known number; of x's shape."""
        for x, by in operands(op):
            c = self.number(by)
            if c is not None and x.shape == result(op).shape:
                return x, c if op.op.name == "Mul" else 1 / c if c else float("inf")
        return None


def operands(op: Operator) -> Iterator[tuple[Value, Value]]:
    """The first two operands; the other way round, too, where their order does not matter."""
    a, b = (*op.inputs, None)[:2]
    if a is not None and b is not None:
        yield a, b
        if op.op.name in COMMUTATIVE:
            yield b, a
