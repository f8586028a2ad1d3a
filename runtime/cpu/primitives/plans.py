"""Plans of oneDNN primitives: what runs in which order on which operands, and the calls that run it.

A primitive runs in the library's threads, which wait for each other, or as parts of one thread each, which the step's
threads take as they come: a thread that the machine does not schedule holds up nobody but with its part.  A plan
depends on the product and the number of threads only, and is made once.  Packed weights and scratchpads are the
operator's workspace: nothing is allocated when a step runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....language.types import TensorType
from ...shared.trouble import LIBRARY
from ..code.emit import Code, module
from ..device import dnnl, native
from ..device.native import Call

#: what a primitive runs on: number of the argument → (layout, name of the operand or buffer, offset in bytes)
Given = Mapping[int, tuple[int, str, int]]


@dataclass(frozen=True)
class Stage:
    """One primitive on the arguments of each of its parts; `alone`: made for one thread a part."""

    primitive: int
    parts: tuple[Given, ...]
    implementation: str
    alone: bool


@dataclass(frozen=True)
class Plan:
    """Stages in order, and the bytes of the buffers "packed" and "scratchpad" where they are needed.

    Every thread has a part of the scratchpad, `apart` bytes from the next one's.
    """

    stages: tuple[Stage, ...]
    buffers: tuple[tuple[str, int], ...]
    apart: int = 0

    @property
    def good(self) -> bool:
        """Whether the library has more than its reference code, which is slower than ours."""
        return not any(s.implementation.startswith("ref") for s in self.stages)

    def scratch(self) -> tuple[TensorType, ...]:
        """Types of the buffers."""
        return tuple(TensorType("u8", (n,)) for _, n in self.buffers)

    def calls(self, operands: Mapping[str, Any], scratch: Sequence[Any]) -> list[Call]:
        """One call for each stage."""
        arrays = dict(operands) | {name: a for (name, _), a in zip(self.buffers, scratch, strict=True)}
        held = tuple(a for a in arrays.values() if a is not None)
        return [
            self._call(s, {n: a.ctypes.data for n, a in arrays.items() if a is not None}, held) for s in self.stages
        ]

    def _call(self, s: Stage, at: Mapping[str, int], held: tuple[Any, ...]) -> Call:
        lib = library()
        pad = next((layout for layout, name, _ in s.parts[0].values() if name == SCRATCHPAD), 0)
        pads = [lib.memory(pad, at[SCRATCHPAD] + i * self.apart) for i in range(native.threads())] if pad else []
        parts = [lib.arguments({k: (layout, at[name] + offset) for k, (layout, name, offset) in given.items()})
                 for given in s.parts]  # fmt: skip
        table = np.array([int(p) for p in parts], np.int64)
        kernel = native.compile_ir(_execute(threads=bool(pad) and s.alone))
        place, pad_table = parts[0].place(SCRATCHPAD_NUMBER), np.array([int(p) for p in pads] or [0], np.int64)
        words = (lib.execute, s.primitive, lib.stream, parts[0].count, table, place, pad_table, native.STATUS)
        return Call(kernel, (*words, *parts, *pads, *held), len(parts), s.alone, own_threads=not s.alone)


#: the buffer that primitives compute in, and its number among their arguments
SCRATCHPAD, SCRATCHPAD_NUMBER = "scratchpad", dnnl.SCRATCHPAD


@dataclass
class Maker:
    """A plan under construction."""

    lib: dnnl.Library
    stages: list[Stage] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)
    apart: int = 0

    def add(self, descriptor: int, arguments: Given) -> None:
        """One more primitive, in the library's threads."""
        self._add(descriptor, [arguments], alone=False)

    def add_parts(self, descriptor: int, parts: Sequence[Given]) -> None:
        """A primitive on two or more parts, each in one of the step's threads.  Make the descriptor in `alone()`."""
        with alone():
            self._add(descriptor, parts, alone=True)

    def _add(self, descriptor: int, parts: Sequence[Given], *, alone: bool) -> None:
        lib = self.lib
        layout = lib.wanted(descriptor, dnnl.SCRATCHPAD)
        needed = lib.nbytes(layout) if layout else 0
        if needed:
            parts = [{**p, SCRATCHPAD_NUMBER: (layout, SCRATCHPAD, 0)} for p in parts]
            needed = -(-needed // _LINE) * _LINE if alone else needed
            self.apart = max(self.apart, needed) if alone else self.apart
            self.buffers[SCRATCHPAD] = max(self.buffers.get(SCRATCHPAD, 0), needed)
        self.stages.append(Stage(lib.primitive(descriptor), tuple(parts), lib.implementation(descriptor), alone))

    def plan(self) -> Plan:
        """What was added."""
        if self.apart:
            self.buffers[SCRATCHPAD] = max(self.buffers[SCRATCHPAD], self.apart * native.threads())
        return Plan(tuple(self.stages), tuple(self.buffers.items()), self.apart)


#: bytes of a cache line, of which threads share none
_LINE = 64


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, primitives are made for one thread."""
    native.announce_threads(1)
    try:
        yield
    finally:
        native.announce_threads()


def parts(count: int) -> int:
    """Into how many equal parts so many images are cut: all threads have as many, or nearly.  1: they stay whole."""
    threads = native.threads()
    if threads == 1:
        return 1
    whole = [d for d in range(2, count + 1) if count % d == 0 and d % threads == 0]
    many = [d for d in range(2, count + 1) if count % d == 0 and d >= _MANY * threads]
    enough = [d for d in whole if d >= _ENOUGH * threads]
    return min(enough or many[:1] or whole[-1:] or [1])


#: parts for each thread that are enough, and from which on it does not matter that some threads have one more
_ENOUGH, _MANY = 4, 8


def unavailable() -> str:
    """Why oneDNN cannot run here; "" where it can."""
    if why := native.unavailable():
        return why
    found = dnnl.load()
    return found if isinstance(found, str) else ""


def library() -> dnnl.Library:
    """The library, where it is available."""
    found = dnnl.load()
    assert isinstance(found, dnnl.Library), found
    return found


def planned(make: Callable[[Maker], None]) -> Plan | str:
    """The plan that `make` makes, or why the library refuses it."""
    if why := unavailable():
        return why
    native.announce_threads()
    maker = Maker(library())
    try:
        make(maker)
    except dnnl.DnnlError as e:
        return str(e)
    return maker.plan()


@functools.cache
def _execute(*, threads: bool) -> str:
    """IR: (execute, primitive, stream, count, the parts' arguments, place of the scratchpad, scratchpads, status cell).

    `threads`: each thread has a scratchpad of its own, whose memory takes the place of the one among the arguments.
    """
    f = Code()
    execute, primitive, stream = (f.word("%args", i, "ptr") for i in range(3))
    count, table, place = f.word("%args", 3), f.word("%args", 4, "ptr"), f.word("%args", 5)
    pads, cell = f.word("%args", 6, "ptr"), f.word("%args", 7, "ptr")
    short = f.let(f"trunc i64 {count} to i32")
    room = f.room(f"[{_ARGUMENTS} x {{ i32, ptr }}]", align=16) if threads else ""
    with f.loop("%begin", "%end") as part:
        arguments = f.word(table, part, "ptr")
        if threads:
            f.copy(room, arguments, f.mul(count, 16))
            f.declared["@omp_get_thread_num"] = "declare i32 @omp_get_thread_num()"
            thread = f.let(f"sext i32 {f.let('call i32 @omp_get_thread_num()')} to i64")
            f.set(f.at(room, f.add(f.mul(place, 2), 1), "i64"), "i64", f.word(pads, thread))
            arguments = room
        status = f.let(f"call i32 {execute}(ptr {primitive}, ptr {stream}, i32 {short}, ptr {arguments})")
        with f.when(f.let(f"icmp ne i32 {status}, 0")):
            f.set(cell, "i64", f.add(f.let(f"sext i32 {status} to i64"), LIBRARY))
    return module(f)


#: arguments that a primitive has at most
_ARGUMENTS = 8
