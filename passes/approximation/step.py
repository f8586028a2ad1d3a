"""A training step as approximations see it: which forward values wait for the backward pass, and for which readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

from ...language.builder import Names
from ...language.ir import Block, Operator, Role, Value
from ...ops.optimizer.updates import Increment

T = TypeVar("T")
#: a result that is so many times smaller than another one of its operator is a statistic
_STATISTIC = 8
_EARLY = (Role.FORWARD, Role.LOSS, Role.COMMUNICATE)


@dataclass(frozen=True)
class Leaf:
    """An operator of the backward pass that reads a forward value.

    `at`: its position; `read`: what it reads, `origin` itself, a view of it, or a copy that was made again;
    `origin`: the forward value with these contents.
    """

    at: int
    read: Value
    origin: Value


class Step:
    """Forward values, the views of each, and what reads them late.

    A late operator that makes a forward value again, from the same inputs, is looked through: what reads its result
    reads the forward value, as far as approximations are concerned.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.operators = block, block.operators
        self.producers, self.readers = block.producers(), block.consumers()
        always = {v.name for v in block.persistent()}
        self.kept = always.union(block.outputs)
        #: value → the forward value whose contents it has (whole views, and copies that were made again)
        self.origin: dict[str, Value] = {v.name: v for v in block.inputs}
        #: forward values of which a part is a value of its own
        self.parted: set[str] = set()
        self.counter = next((o.inputs[0] for o in self.operators if isinstance(o.op, Increment)), None)
        self._remembered: dict[Any, Any] = {}
        self._find_origins()

    def remembered(self, key: Any, make: Callable[[], T]) -> T:
        """The result of `make`, computed once for this step and cached under a key."""
        if key not in self._remembered:
            self._remembered[key] = make()
        return cast(T, self._remembered[key])

    @cached_property
    def names(self) -> Names:
        """Names for new values."""
        return Names(self.block.values())

    def early(self, i: int) -> bool:
        """Whether an operator belongs to the forward pass."""
        return self.operators[i].role in _EARLY

    def _find_origins(self) -> None:
        makers: dict[tuple[object, ...], Operator] = {}
        for i, o in enumerate(self.operators):
            if whole_view(o):
                x, y = o.inputs[0], o.outputs[0]
                assert x is not None and y is not None
                if x.name in self.origin:
                    self.origin[y.name] = self.origin[x.name]
                continue
            if any(offset is not None for offset in o.views()):
                self.parted.update(self.origin[v.name].name for v in o.inputs[:1] if v and v.name in self.origin)
            if o.op.updates or o.op.communicates or o.op.copies:
                self.origin.update((v.name, v) for v in o.writes() if self.early(i) and not o.op.updates)
                continue
            key = (o.op, tuple(None if v is None else self.origin.get(v.name, v).name for v in o.inputs))
            if self.early(i):
                makers.setdefault(key, o)
                self.origin.update((v.name, v) for v in o.writes())
            elif key in makers:
                for v, first in zip(o.outputs, makers[key].outputs, strict=False):
                    if v is not None and first is not None:
                        self.origin[v.name] = self.origin[first.name]

    def waiting(self) -> Iterator[Value]:
        """Forward values that something reads late, in order of production; of views, what they look into."""
        values: dict[str, Value] = {}
        for i, o in enumerate(self.operators):
            if not self.early(i):
                for v in o.reads():
                    if (x := self.origin.get(v.name)) is not None and self.is_early(v.name):
                        values.setdefault(x.name, x)
        order = self.producers
        yield from sorted(
            (
                v
                for v in values.values()
                if v.name not in self.kept and v.name not in self.parted and not self.is_shared(v)
            ),
            key=lambda v: order.get(v.name, -1),
        )

    def is_early(self, name: str) -> bool:
        """Whether a value is made in the forward pass."""
        position = self.producers.get(name, -1)
        return position < 0 or self.early(position)

    def is_activation(self, value: Value) -> bool:
        """Whether a value depends on inputs and on parameters, and is no statistic of its operator, such as a mean or
        a log-sum-exp: a small error there is a large one in all that is made of it.  Weights in another type or order,
        or gathered from ranks, are none."""
        at = self.producers.get(value.name, -1)
        largest = max((v.nbytes for v in self.operators[at].writes()), default=0)
        return value.name in self._active and value.nbytes * _STATISTIC > largest

    @cached_property
    def _active(self) -> set[str]:
        """Values that depend on inputs and on parameters."""
        return self._depending(self.block.inputs) & self._depending(self.block.parameters)

    def _depending(self, values: Iterable[Value]) -> set[str]:
        """These values, and all that is made of them."""
        names = {v.name for v in values}
        for o in self.operators:
            if any(v.name in names for v in o.reads()):
                names.update(v.name for v in o.writes())
        return names

    def leaves(self, value: Value) -> list[Leaf]:
        """The late readers of a waiting value, through views and copies of other values that are made from it."""
        return self.remembered(("leaves", value.name), lambda: self._leaves(value))

    def _leaves(self, value: Value) -> list[Leaf]:
        leaves: dict[int, Leaf] = {}
        names, seen = [value], {value.name}
        for v in names:
            for i in self.readers.get(v.name, ()):
                o = self.operators[i]
                outputs = [w for w in o.writes() if w.name in self.origin]
                through = whole_view(o) or (not self.early(i) and outputs)
                if through:
                    names += [w for w in outputs if w.name not in seen]
                    seen.update(w.name for w in outputs)
                elif not self.early(i):
                    leaves.setdefault(i, Leaf(i, v, self.origin[v.name]))
        return [leaves[i] for i in sorted(leaves)]

    def slot(self, origin: Value) -> int:
        """Where something may be made of a forward value: right before its last forward reader, which may overwrite
        it; behind its operator where there is none."""
        early, _ = self._ends(origin)
        return early if early >= 0 else self.producers.get(origin.name, -1) + 1

    def is_shared(self, value: Value) -> bool:
        """Whether the forward pass reads a value after the backward pass has begun to, as that of a later slice does
        with what all slices read: it stays until then anyway."""
        early, late = self._ends(value)
        return early > late

    def _ends(self, value: Value) -> tuple[int, int]:
        """The last early reader of a forward value or of its views (-1: none), and the first late one."""
        last, first = -1, len(self.operators)
        names = [value]
        for v in names:
            for i in self.readers.get(v.name, ()):
                if not self.early(i):
                    first = min(first, i)
                elif whole_view(self.operators[i]):
                    names += list(self.operators[i].writes())
                else:
                    last = max(last, i)
        return last, first


def whole_view(o: Operator) -> bool:
    """Whether an operator's result is its input under another shape."""
    x, y = o.inputs[0] if o.inputs else None, o.outputs[0] if len(o.outputs) == 1 else None
    return x is not None and y is not None and o.views() == (0,) and x.nbytes == y.nbytes
