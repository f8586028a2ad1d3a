"""The calls of sessions as tables in which addresses are relative: to the step's memory, or to a library's constants.

A word of a call's arguments is a number, a place in memory, a place among the constants, or the status of the run.
Memory is the arena of the step (and of its evaluation, which takes turns with it), then parameters, buffers and state.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import JobError, UsageError
from ...language.ir import Block, Free, Value
from ...language.text import show_operator
from ...passes import ALIGNMENT, memory_report
from ...runtime.cpu.device.native import STATUS, word
from ...runtime.cpu.session import Session
from ...runtime.shared.binding import already_there

#: bases of words
NUMBER, MEMORY, CONSTANT, RUN = range(4)


@dataclass(frozen=True)
class Entry:
    """A call: its kernel's address, where its words are in the table, and how many; pieces of work; its operator."""

    kernel: int
    first: int
    words: int
    work: int
    where: str


@dataclass
class Tables:
    """Words with their kinds, and constants."""

    words: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    constants: bytearray = field(default_factory=bytearray)
    _seen: dict[int, tuple[Any, int]] = field(default_factory=dict)
    _alike: dict[bytes, int] = field(default_factory=dict)

    def constant(self, x: np.ndarray) -> int:
        """Where an array's first element is among the constants; all that it is a part of is put there."""
        owner = x
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if id(owner) not in self._seen:
            if not owner.flags.c_contiguous:
                raise JobError(f"a table of shape {owner.shape} does not lie together")
            contents = owner.tobytes()
            at = self._alike.get(contents)
            if at is None:
                self.constants += bytes(-len(self.constants) % ALIGNMENT)
                at = self._alike[contents] = len(self.constants)
                self.constants += contents
            self._seen[id(owner)] = owner, at
        return self._seen[id(owner)][1] + x.ctypes.data - owner.ctypes.data


class Memory:
    """Where everything is: the larger arena first, then persistent values, each aligned to its elements.

    Those whose sizes are multiples of a cache line come first, and keep all of them aligned to lines without gaps.
    `constants` of the step are among them, as they are in the predicted peak: the library puts them there.
    """

    def __init__(self, step: Block, evaluation: Block) -> None:
        blocks = step, evaluation
        self.constants = {c.value.name: c.numpy() for c in step.constants}
        values = {v.name: v for b in blocks for v in (*b.parameters, *b.buffers, *b.state)}
        values |= {c.value.name: c.value for c in step.constants}
        order = sorted(values.values(), key=lambda v: (v.nbytes % ALIGNMENT != 0, -v.type.numpy.itemsize))
        self.arena = max(memory_report(b).arena for b in blocks)
        self.places: dict[str, int] = {}
        self.size = self.arena
        for v in order:
            self.places[v.name] = self.size
            self.size += v.nbytes
        self.weights: dict[str, Value] = {n: values[n] for n in self.places if n not in self.constants}

    def beside(self, values: Iterable[tuple[Value, int]]) -> int:
        """A place of 8 bytes in the arena where none of these values (with places) lies, or at the end of memory."""
        at = 0
        for v, place in sorted(values, key=lambda x: x[1]):
            if place >= at + 8:
                break
            at = max(at, -(-(place + v.nbytes) // 8) * 8)
        if at + 8 > self.arena:
            at = -(-self.size // 8) * 8
            self.size = at + 8
        return at

    def address(self, block: Block, v: Value) -> int:
        """Where a value of a block is."""
        return self.places[v.name] if v.name in self.places else block.addresses[v.name]


def need_kernels(blocks: Sequence[Block]) -> None:
    """UsageError that names all that a library cannot do: operators without kernels, values in the host's memory."""
    found: dict[str, str] = {}
    for block in blocks:
        if (report := memory_report(block)).host or report.stored:
            raise UsageError(
                "a library has one memory, and this step keeps values in the host's or on a disk: compile it without "
                "offloading"
            )
        for op in block.operators:
            if op.op.communicates:
                raise UsageError(f"a library is one process, and this step communicates: {show_operator(op)}")
            if not op.kernel and not isinstance(op.op, Free) and not already_there(block, op):
                types = [str(v.type) for v in op.reads()]
                shown = ", ".join(types[:4] + ["..."] * (len(types) > 4))
                found.setdefault(f"{op.op.name} of {shown}", next(v.name for v in op.writes()))
    if found:
        names = "".join(f"\n    {kind} ('{name}')" for kind, name in found.items())
        raise UsageError(f"a library needs kernels of ours for all operators, and these have none:{names}")


class _Places:
    """Where the arrays of a session are in the library's memory."""

    def __init__(self, session: Session, memory: Memory) -> None:
        arena = session.arena.bytes()
        found = [(*_extent(arena), 0)]
        found += [
            (*_extent(session.arrays[n]), at) for n, at in memory.places.items() if self._same(n, session, memory)
        ]
        self._found = sorted(p for p in found if p[0] < p[1])
        self._starts = [low for low, _, _ in self._found]

    @staticmethod
    def _same(name: str, session: Session, memory: Memory) -> bool:
        """Whether a session has the value of that name: a constant of an evaluation may be another one."""
        mine, there = session.arrays.get(name), memory.constants.get(name)
        return mine is not None and (there is None or mine.tobytes() == there.tobytes())

    def place(self, x: np.ndarray) -> int | None:
        """The place of an array's first element; None for an array elsewhere.  JobError where it lies there in part."""
        low, high = _extent(x)
        i = bisect.bisect_right(self._starts, low) - 1
        start, end, at = self._found[i] if i >= 0 else (0, 0, 0)
        if high <= end:
            return at + int(x.ctypes.data) - start
        after = self._starts[i + 1] if i + 1 < len(self._starts) else high
        if low < end or high > after:
            raise JobError("an operand of a kernel does not end where its buffer does: this is a bug in the compiler")
        return None


def _extent(x: np.ndarray) -> tuple[int, int]:
    """The addresses of an array's first byte, and of the one behind its last."""
    steps = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    at = int(x.ctypes.data)
    return at + sum(s for s in steps if s < 0), at + sum(s for s in steps if s > 0) + (x.itemsize if x.size else 0)


def entries(session: Session, memory: Memory, tables: Tables) -> list[Entry]:
    """The calls of a session, in order, whose words are added to the tables.  JobError for operands elsewhere."""
    found, places = [], _Places(session, memory)
    for step in session.steps:
        where = f"{step.op.op.name} '{next(step.op.writes()).name}'"
        if not step.calls and any(v.nbytes for v in step.op.writes()):  # here NumPy would compute it: not so there
            raise JobError(f"the kernel of {where} makes no call for these sizes: this is a bug in the compiler")
        for call in (part for c in step.calls for part in c.parts or (c,)):
            first = len(tables.words)
            for x in call.operands:
                kind, value = _word(x, places, tables)
                tables.kinds.append(kind)
                tables.words.append(value)
            reports = any(x is STATUS for x in call.operands)
            found.append(Entry(call.address, first, len(call.operands), call.work, where if reports else ""))
    return found


def _word(x: Any, places: _Places, tables: Tables) -> tuple[int, int]:
    if x is STATUS:
        return RUN, 0
    if not isinstance(x, np.ndarray):
        return NUMBER, word(x)
    if not x.size:
        return NUMBER, 0
    at = places.place(x)
    return (CONSTANT, tables.constant(x)) if at is None else (MEMORY, at)


def kernels(found: Sequence[Entry]) -> list[int]:
    """Their addresses, each once."""
    return list(dict.fromkeys(e.kernel for e in found))
