"""Grouping of a step's updates of one kind into a single launch.

An update waits until an operator comes that writes what it reads, or reads what it writes: which one that is follows
from the planned addresses, so that waiting takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ..device.kernel import Buffer, Call, Launch
from .many import Part, together

Calls = tuple[Operator, tuple[Call, ...]]
Used = tuple[Sequence[Buffer], Sequence[Buffer]]


class _Ranges:
    """Addresses that are read, or written."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []
        self._arrays: Any = None

    def add(self, buffers: Iterable[Buffer]) -> None:
        self.found += [(b.address, b.address + b.nbytes) for b in buffers if b.nbytes]
        self._arrays = None

    def meets(self, buffers: Iterable[Buffer]) -> bool:
        """Whether any byte of these is among them."""
        if self._arrays is None:
            both = np.array(self.found or [(0, 0)], np.int64)
            self._arrays = both[:, 0].copy(), both[:, 1].copy()
        starts, ends = self._arrays
        return any(bool(((starts < b.address + b.nbytes) & (ends > b.address)).any()) for b in buffers if b.nbytes)


class _Group:
    """Updates that wait."""

    def __init__(self) -> None:
        self.members: list[tuple[Operator, Launch, Part]] = []
        self.reads, self.writes = _Ranges(), _Ranges()

    def stops(self, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> bool:
        """Whether what follows must not come before them."""
        return self.writes.meets(reads) or self.writes.meets(writes) or self.reads.meets(writes)

    def run(self) -> list[Calls]:
        """All in one launch, which the last one is said to make."""
        *others, (last, alone, _) = self.members
        launch = together([part for *_, part in self.members]) if others else alone
        return [*((op, ()) for op, *_ in others), (last, (launch,))]


def postponed(
    steps: Iterable[Calls], buffers: Callable[[Operator], tuple[Sequence[Buffer], Sequence[Buffer]]]
) -> list[Calls]:
    """The steps with updates run together; `buffers`: what an operator reads, and what it writes."""
    result: list[Calls] = []
    waiting: dict[Any, _Group] = {}
    for op, calls in steps:
        if not calls:
            result.append((op, calls))
            continue
        reads, writes = buffers(op)
        for key in [k for k, g in waiting.items() if g.stops(reads, writes)]:
            result += waiting.pop(key).run()
        only = calls[0] if len(calls) == 1 else None
        part = only.part if isinstance(only, Launch) else None
        if part is None:
            result.append((op, calls))
            continue
        assert isinstance(only, Launch)
        group = waiting.setdefault(part.key, _Group())
        group.members.append((op, only, part))
        group.reads.add(reads)
        group.writes.add(writes)
        if len(group.members) == part.capacity:
            result += waiting.pop(part.key).run()
    for group in waiting.values():
        result += group.run()
    return result
