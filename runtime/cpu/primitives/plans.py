"""Plans of oneDNN primitives: what runs in which order on which operands, and the calls that run it.

A primitive runs in the library's threads, which wait for each other, or as parts of one thread each, which the step's
threads take as they come: a descheduled thread delays its current part only.  A plan
depends on the product and the number of threads only, and is made once.  Packed weights and scratchpads are the
operator's workspace: nothing is allocated when a step runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....language.types import Operands, TensorType
from ....passes.memory.memory_plan import aligned
from ...shared.trouble import LIBRARY
from ..code.emit import Code, module, thread
from ..device import building, dnnl, native
from ..device.native import Call

#: the arguments of a primitive: number of the argument → (layout, name of the operand or buffer, offset in bytes)
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
    """Stages in order, and the bytes of the buffers "packed", "parts" and "scratchpad" where they are needed.

    Every thread has a part of the scratchpad, `apart` bytes from the next one's.
    """

    stages: tuple[Stage, ...]
    buffers: tuple[tuple[str, int], ...]
    apart: int = 0

    @property
    def good(self) -> bool:
        """Whether the library has more than its reference code, which is slower than ours."""
        return not any(s.implementation.startswith("ref") for s in self.stages)

    @property
    def waits(self) -> bool:
        """Whether the first primitive runs in the library's threads, which wait for each other."""
        return not self.stages[0].alone

    def scratch(self) -> tuple[TensorType, ...]:
        """Types of the buffers."""
        return tuple(TensorType("u8", (n,)) for _, n in self.buffers)

    def calls(self, operands: Mapping[str, Any], scratch: Operands) -> list[Call]:
        """One call for each stage."""
        buffers_of = dict(operands) | {name: a for (name, _), a in zip(self.buffers, scratch, strict=True)}
        arrays = {name: a for name, a in buffers_of.items() if a is not None}
        at = {name: a.ctypes.data for name, a in arrays.items()}
        return [self._call(s, at, tuple(arrays.values())) for s in self.stages]

    def _call(self, s: Stage, at: Mapping[str, int], held: tuple[Any, ...]) -> Call:
        lib = library()
        pad, name, _ = s.parts[0].get(dnnl.SCRATCHPAD, (0, "", 0))
        pads = [lib.memory(pad, at[name] + i * self.apart) for i in range(native.threads())] if pad else []
        parts = [lib.arguments({k: (layout, at[name] + offset) for k, (layout, name, offset) in operands.items()})
                 for operands in s.parts]  # fmt: skip
        table = np.array([int(p) for p in parts], np.int64)
        kernel = native.compile_ir(_execute(threads=bool(pad) and s.alone))
        place, pad_table = parts[0].place(dnnl.SCRATCHPAD), np.array([int(p) for p in pads] or [0], np.int64)
        words = (lib.execute, s.primitive, lib.stream, parts[0].count, table, place, pad_table, native.STATUS)
        return Call(kernel, (*words, *parts, *pads, *held), len(parts), s.alone, own_threads=not s.alone)


@dataclass
class Maker:
    """A plan under construction."""

    lib: dnnl.Library
    stages: list[Stage] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)
    apart: int = 0

    def add(self, descriptor: int, *parts: Given) -> None:
        """One more primitive, in the library's threads; on several parts, each in one of the step's threads: then make
        the descriptor in `alone()`."""
        lib, several = self.lib, len(parts) > 1
        layout = lib.wanted(descriptor, dnnl.SCRATCHPAD)
        needed = lib.nbytes(layout) if layout else 0
        if needed:
            parts = tuple({**p, dnnl.SCRATCHPAD: (layout, "scratchpad", 0)} for p in parts)
            if several:
                self.apart = max(self.apart, aligned(needed))
            self.buffers["scratchpad"] = max(self.buffers.get("scratchpad", 0), needed)
        with alone(several):
            primitive = lib.primitive(descriptor)
        self.stages.append(Stage(primitive, parts, lib.implementation(descriptor), several))

    def plan(self) -> Plan:
        """The plan of the stages that were added."""
        if self.apart:
            self.buffers["scratchpad"] = max(self.buffers["scratchpad"], self.apart * native.threads())
        return Plan(tuple(self.stages), tuple(self.buffers.items()), self.apart)


@contextlib.contextmanager
def alone(one: bool = True) -> Iterator[None]:
    """Inside, primitives are made for one thread; where it is not so, for those of a step."""
    native.announce_threads(1 if one else None)
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
    if why := native.unavailable() or building.no_libraries():
        return why
    loaded = dnnl.load()
    return loaded if isinstance(loaded, str) else ""


def library() -> dnnl.Library:
    """The library, where it is available."""
    loaded = dnnl.load()
    assert isinstance(loaded, dnnl.Library), loaded
    return loaded


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
            f.set(f.at(room, f.add(f.mul(place, 2), 1), "i64"), "i64", f.word(pads, thread(f)))
            arguments = room
        status = f.let(f"call i32 {execute}(ptr {primitive}, ptr {stream}, i32 {short}, ptr {arguments})")
        with f.when(f.let(f"icmp ne i32 {status}, 0")):
            f.set(cell, "i64", f.add(f.let(f"sext i32 {status} to i64"), LIBRARY))
    return module(f)


#: arguments that a primitive has at most
_ARGUMENTS = 8
