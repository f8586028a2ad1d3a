"""Changes to a block's operators, collected by position and made at once."""

from __future__ import annotations

from collections.abc import Sequence

from ...language.ir import Block, Operator, Role, Value
from ...language.op import Op
from ...ops.shape.reshape import Reshape
from .step import Step


class Edits:
    """Operators that come before others or take their place, and reads of other values."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.names = step.names
        self.replaced: dict[int, list[Operator]] = {}
        self._before: dict[int, list[Operator]] = {}
        self._reads: dict[int, dict[str, Value]] = {}
        self._kept: dict[tuple[Op, str], tuple[Value, ...]] = {}

    def emit(self, to: list[Operator], op: Op, inputs: Sequence[Value], name: str, role: Role) -> tuple[Value, ...]:
        """Adds an operator to a list; its results, with names after `name`."""
        outs = tuple(Value(self.names.take(name), t) for t in op.infer(*(v.type for v in inputs)))
        to.append(Operator(op, tuple(inputs), outs, role))
        return outs

    def shaped(self, to: list[Operator], x: Value, shape: Sequence[int], role: Role) -> Value:
        """x under another shape, which is a view; x itself where it has it."""
        if x.shape == tuple(shape):
            return x
        return self.emit(to, Reshape(tuple(shape)), [x], f"{x.name}.shaped", role)[0]

    def kept(
        self, op: Op, origin: Value, shape: Sequence[int], suffix: str, turned: Op | None = None
    ) -> tuple[Value, ...]:
        """An operator's results from a forward value under a shape (and from the step counter, if it draws), emitted
        once in the forward pass.  `turned`: what is done to the value first."""
        key = op, origin.name
        if key not in self._kept:
            to = self._before.setdefault(self.step.slot(origin), [])
            x = self.shaped(to, origin, shape, Role.FORWARD)
            if turned is not None:
                (x,) = self.emit(to, turned, [x], f"{origin.name}.turned", Role.FORWARD)
            self._kept[key] = self.emit(to, op, [x, *self.counter(op)], f"{origin.name}.{suffix}", Role.FORWARD)
        return self._kept[key]

    def counter(self, op: Op) -> list[Value]:
        """The step counter, for an operator that draws."""
        if not op.random:
            return []
        assert self.step.counter is not None, "a training step counts its steps"
        return [self.step.counter]

    def before(self, at: int) -> list[Operator]:
        """The list of what comes right before an operator."""
        return self._before.setdefault(at, [])

    def read(self, at: int, name: str, value: Value) -> None:
        """Has an operator read another value."""
        self._reads.setdefault(at, {})[name] = value

    def result(self) -> Block:
        """The block with all changes."""
        operators: list[Operator] = []
        for i, o in enumerate(self.step.operators):
            operators += self._before.get(i, ())
            operators += self.replaced[i] if i in self.replaced else [o.reading(self._reads.get(i, {}))]
        operators += self._before.get(len(self.step.operators), ())
        return self.step.block.with_operators(operators)

    def changes(self) -> tuple[list[Operator], list[Operator]]:
        """The operators that are added, and those whose place some of them take."""
        added = [o for operators in (*self._before.values(), *self.replaced.values()) for o in operators]
        return added, [self.step.operators[i] for i in self.replaced]
