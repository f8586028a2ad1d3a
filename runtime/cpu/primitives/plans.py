"""Plans of oneDNN primitives: what runs in which order on which operands, and the calls that run it.

A plan depends on the product and the number of threads only, and is made once.  Packed weights and scratchpads are the
operator's workspace: nothing is allocated when a step runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....language.types import TensorType
from ...shared.trouble import LIBRARY
from ..code.emit import Code, module
from ..device import dnnl, native
from ..device.native import Call


@dataclass(frozen=True)
class Stage:
    """One primitive and its arguments: number → (layout, name of the operand or buffer)."""

    primitive: int
    arguments: tuple[tuple[int, tuple[int, str]], ...]
    implementation: str


@dataclass(frozen=True)
class Plan:
    """Primitives in order, and the bytes of the buffers "packed" and "scratchpad" where they are needed."""

    stages: tuple[Stage, ...]
    buffers: tuple[tuple[str, int], ...]

    @property
    def good(self) -> bool:
        """Whether the library has more than its reference code, which is slower than ours."""
        return not any(s.implementation.startswith("ref") for s in self.stages)

    def scratch(self) -> tuple[TensorType, ...]:
        """Types of the buffers."""
        return tuple(TensorType("u8", (n,)) for _, n in self.buffers)

    def calls(self, operands: Mapping[str, Any], scratch: Sequence[Any]) -> list[Call]:
        """One call for each primitive, in the library's threads, which are those of the step."""
        lib = library()
        arrays = dict(operands) | {name: a for (name, _), a in zip(self.buffers, scratch, strict=True)}
        kernel = native.compile_ir(_execute())
        calls = []
        for s in self.stages:
            given = {which: (layout, arrays[name].ctypes.data) for which, (layout, name) in s.arguments}
            arguments = lib.arguments(given)
            words = (lib.execute, s.primitive, lib.stream, arguments.count, arguments, native.STATUS)
            calls.append(Call(kernel, (*words, *(a for a in arrays.values() if a is not None)), own_threads=True))
        return calls


@dataclass
class Maker:
    """A plan under construction."""

    lib: dnnl.Library
    stages: list[Stage] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)

    def add(self, descriptor: int, arguments: dict[int, tuple[int, str]]) -> None:
        """One more primitive, with its scratchpad."""
        lib = self.lib
        layout = lib.wanted(descriptor, dnnl.SCRATCHPAD)
        needed = lib.nbytes(layout) if layout else 0
        if needed:
            arguments = {**arguments, dnnl.SCRATCHPAD: (layout, "scratchpad")}
            self.buffers["scratchpad"] = max(self.buffers.get("scratchpad", 0), needed)
        name = lib.implementation(descriptor)
        self.stages.append(Stage(lib.primitive(descriptor), tuple(arguments.items()), name))

    def plan(self) -> Plan:
        """What was added."""
        return Plan(tuple(self.stages), tuple(self.buffers.items()))


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
def _execute() -> str:
    """IR: (execute, primitive, stream, count, arguments, status cell)."""
    f = Code()
    execute, primitive, stream = (f.word("%args", i, "ptr") for i in range(3))
    count = f.let(f"trunc i64 {f.word('%args', 3)} to i32")
    arguments, cell = (f.word("%args", i, "ptr") for i in (4, 5))
    status = f.let(f"call i32 {execute}(ptr {primitive}, ptr {stream}, i32 {count}, ptr {arguments})")
    with f.when(f.let(f"icmp ne i32 {status}, 0")):
        f.set(cell, "i64", f.add(f.let(f"sext i32 {status} to i64"), LIBRARY))
    return module(f)
