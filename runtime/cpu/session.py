"""The CPU session: a planned block with its arena, and operators bound to kernels or NumPy."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import JobError, NotFiniteError, OutOfMemoryError, RecomputeError, UsageError
from ...language.ir import Block, Free, Operator, Value
from ...language.kernels import bits_are_portable, fits, provider
from ...language.program import Program
from ...language.text import show_operator
from ...language.types import Array
from ...ops.communication.base import Communication
from ...ops.memory.offload import Copy, Prefetch
from ...passes import ALIGNMENT, memory_report
from ...support.threads import interrupts_wait
from ..communication.engine import Engine, Transfer
from ..shared.binding import already_there, contents, far_waits, need_addresses
from . import PREFERRED
from .device import native
from .disk import Disk


class Arena:
    """One allocation from which the buffers of a step are cut at planned addresses.

    A step that moves values to the host and back has a second one there.  OutOfMemoryError where the machine cannot
    allocate it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self._raw = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
        except (MemoryError, OverflowError, ValueError):  # NumPy's answer depends on how much too large it is
            raise OutOfMemoryError(
                f"this machine cannot allocate the arena of {nbytes:,} bytes: a smaller batch takes less, so do "
                "checkpoints (what is not kept is recomputed); --memory-budget, or rc.max_batch, says what fits"
            ) from None
        self._raw[::4096] = 0  # pages come with their first write: now, not in the first step
        self._start = -self._raw.ctypes.data % ALIGNMENT

    def bytes(self) -> Array:
        """All of it, as unsigned bytes."""
        return self._raw[self._start : self._start + self.nbytes]

    def at(self, address: int, value: Value) -> Array:
        """The buffer of `value` at `address`.  JobError where it is not all in the arena."""
        begin = self._start + address
        if address < 0 or address + value.nbytes > self.nbytes:
            raise JobError(f"'{value.name}' at {address} does not fit the arena of {self.nbytes} bytes")
        return self._raw[begin : begin + value.nbytes].view(value.type.numpy).reshape(value.shape)


@dataclass(frozen=True)
class Step:
    """An operator with its buffers bound, and the calls of its kernel (none: its own numerics run)."""

    op: Operator
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    scratch: tuple[Any, ...]
    calls: tuple[Any, ...] = ()

    def run(self) -> None:
        """The operator's own numerics.  JobError with the operator where they fail."""
        try:
            self.op.op.compute(self.ins, self.outs, self.scratch)
        except NotFiniteError as e:
            raise NotFiniteError(f"{e}, in\n    {show_operator(self.op)}") from e
        except Exception as e:
            kind = "" if isinstance(e, (IndexError, ValueError, RecomputeError)) and str(e) else f"{type(e).__name__}: "
            raise JobError(f"{kind}{e}, in\n    {show_operator(self.op)}") from e


@dataclass(frozen=True)
class DiskCopy(Step):
    """The begin of a copy to a file or from there, or the wait for one."""

    disk: Disk | None = None
    place: tuple[int, int] = (0, 0)

    def run(self) -> None:
        """Begins, or waits.  JobError where the copy failed."""
        rule, disk = self.op.op, self.disk
        assert disk is not None and isinstance(rule, Copy)
        if rule.waits:
            disk.wait(next(self.op.reads()).name)
            return
        device = self.outs[0] if isinstance(rule, Prefetch) else self.ins[-1]
        disk.begin(rule, next(self.op.writes()).name, device, self.place)


@dataclass(frozen=True)
class NativeSteps:
    """Steps in a row whose kernels are native: one call runs them all."""

    steps: tuple[Step, ...]
    table: native.Table

    def run(self) -> None:
        """JobError with the operator whose kernel reports a failure."""
        failed = self.table.run()
        if failed is not None:
            of = [step for step in self.steps for _ in step.calls]
            self.table.check(show_operator(of[failed].op))


def segments(steps: Sequence[Step]) -> list[Step | NativeSteps]:
    """Steps to run in order, native ones in tables."""
    result: list[Step | NativeSteps] = []
    for is_native, group in itertools.groupby(steps, key=lambda s: bool(s.calls)):
        together = tuple(group)
        if is_native:
            result.append(NativeSteps(together, native.Table([c for s in together for c in s.calls])))
        else:
            result += together
    return result


@dataclass(frozen=True)
class Exchange(Step):
    """The begin of a communication with other ranks, or the wait for one.

    `flying`: the transfers of the session that were begun and not awaited, by the name of the value they write.
    `copies`: what was awaited is wanted elsewhere.
    """

    engine: Engine | None = None
    flying: dict[str, Transfer] = field(default_factory=dict)
    at: int = 0
    copies: bool = False

    def run(self) -> None:
        """Begins, or waits.  JobError where the communication failed."""
        engine, rule = self.engine, self.op.op
        assert engine is not None
        if isinstance(rule, Communication):
            x = self.ins[0] if self.ins else None
            self.flying[next(self.op.writes()).name] = engine.begin(rule, self.at, x, self.outs[0])
            return
        engine.wait(self.flying.pop(next(self.op.reads()).name))
        if self.copies:
            super().run()


class Session:
    """A planned block, ready to run many times: every operator's buffers are bound once.

    `arrays` gives the persistent values (parameters, buffers, state); they are updated in place.  `progress` is told
    how many operators are bound, of how many: kernels are compiled where no earlier process has done it.  `arena`: one
    that is large enough, shared with sessions that never run at the same time (None: one of its own).  `engine`: what
    carries communication with other ranks.  `disk`: the folder for a file that takes the part of host memory.
    """

    #: whether the newest contents of persistent values are in memory of its own, and not in the program's arrays
    keeps_newest = False

    def __init__(
        self,
        block: Block,
        arrays: Mapping[str, np.ndarray],
        progress: Callable[[int, int], None] = lambda done, count: None,
        arena: Arena | None = None,
        engine: Engine | None = None,
        disk: str | None = None,
    ) -> None:
        self.block = block
        self.engine = engine
        self._far = far_waits(block) if engine is not None else frozenset()
        self._flying: dict[str, Transfer] = {}
        self._compared = False
        need_addresses(block)
        self.report = memory_report(block)
        self.arena = Arena(self.report.arena) if arena is None else arena
        far = disk is not None and any(op.op.copies for op in block.operators)
        self.disk = Disk(disk, self.report.host) if far and disk is not None else None
        self.host = Arena(self.report.host) if self.report.host and self.disk is None else None
        self.arrays: dict[str, Any] = {}
        self._bind_persistent(arrays)
        for name, value in block.values().items():
            if name in block.addresses and not (self.disk is not None and value.type.host):
                self.arrays[name] = self.arena_of(value).at(block.addresses[name], value)
        wanted = [(at, op) for at, op in enumerate(block.operators) if self._runs(op)]
        self.steps: list[Step] = []
        for at, op in wanted:
            self.steps.append(self._step(at, op))
            progress(len(self.steps), len(wanted))
        first = next((i for i, s in enumerate(self.steps) if s.op.op.updates), len(self.steps))
        #: what changes no state, then the rest
        self._before, self._after = segments(self.steps[:first]), segments(self.steps[first:])
        self.lock = threading.Lock()
        #: whether a run is, or was when it failed, between its first and its last update
        self.updating = False

    def _runs(self, op: Operator) -> bool:
        """Whether there is something to do: not for frees and views, but for every wait for other ranks."""
        if isinstance(op.op, Free):
            return False
        moved = self.disk is not None and op.op.copies
        return moved or self._exchanges(op) or not already_there(self.block, op)

    def _exchanges(self, op: Operator) -> bool:
        """Whether it begins a communication with other ranks, or waits for one."""
        return bool(self._far) and any(v.name in self._far for v in (*op.reads(), *op.writes()) if op.op.communicates)

    def _step(self, at: int, op: Operator) -> Step:
        if op.kernel and not (op.kernel in PREFERRED and fits(op)):  # it would write beyond its buffers
            raise UsageError(
                f"the kernel of '{op.kernel}' cannot run here, or not in the workspace that was planned, in\n"
                f"    {show_operator(op)}\nrun the program with an Executor, which chooses kernels again"
            )
        ins, outs, scratch = (tuple(map(self._array, vs)) for vs in (op.inputs, op.outputs, op.scratch))
        if self.disk is not None and op.op.copies:
            far = next(v for v in (*op.reads(), *op.writes()) if v.type.host)
            place = self.disk.place(far, self.arrays, self.block.addresses.get(far.name))
            return DiskCopy(op, ins, outs, scratch, (), self.disk, place)
        if self._exchanges(op):
            assert self.engine is not None
            self.engine.accept(op)
            copies = not already_there(self.block, op)
            return Exchange(op, ins, outs, scratch, (), self.engine, self._flying, at, copies)
        if not op.kernel and bits_are_portable() and not (op.op.copies or op.op.communicates):
            raise UsageError(
                f"portable bits need kernels of ours for all operators, and one has none: NumPy's bits differ between "
                f"processors, in\n    {show_operator(op)}"
            )
        calls = provider(op.kernel).bind(op, ins, outs, scratch) if op.kernel else ()
        return Step(op, ins, outs, scratch, tuple(calls))

    def _bind_persistent(self, arrays: Mapping[str, np.ndarray]) -> None:
        for v in (*self.block.parameters, *self.block.buffers, *self.block.state):
            self.arrays[v.name] = contents(v, arrays)
        for c in self.block.constants:
            self.arrays[c.value.name] = c.numpy()

    def arena_of(self, v: Value) -> Arena:
        """Where a value of the step lies: on the device, or in host memory."""
        if not v.type.host:
            return self.arena
        assert self.host is not None
        return self.host

    def _array(self, v: Value | None) -> Array | None:
        return None if v is None else self.arrays.get(v.name)  # None: a value on disk

    def _held(self, *, host: bool) -> int:
        return sum(self.arrays[v.name].nbytes for v in self.block.persistent() if v.type.host is host)

    @property
    def measured_peak_bytes(self) -> int:
        """Bytes of all buffers that this session holds: the arena and the persistent arrays."""
        return self.arena.nbytes + self._held(host=False)

    @property
    def measured_host_bytes(self) -> int:
        """Bytes of the host's arena (or of the file that stands for it), and of parameters and state there."""
        arena = self.disk if self.disk is not None else self.host
        return self._held(host=True) + (0 if arena is None else arena.nbytes)

    #: operators that run elsewhere than the step does: none
    on_host: tuple[Operator, ...] = ()

    def holds(self, program: Program) -> bool:
        """Whether a program's arrays are those that are bound here."""
        persistent = (*self.block.parameters, *self.block.buffers, *self.block.state)
        return all(program.data.get(v.name) is self.arrays[v.name] for v in persistent)

    def release(self) -> None:
        """Nothing to give back: the program's own arrays are updated."""

    def feed(self, name: str, array: Array) -> None:
        """An input's contents for the next run."""
        self.arrays[name][...] = array

    def fetch(self, name: str) -> np.ndarray:
        """A copy of a value after a run."""
        return np.array(self.arrays[name])

    def run(self) -> None:
        """Executes the instructions once.  JobError with the operator where its numerics fail.

        What fails before the first update leaves parameters and state as they were; `updating` says so.  From there on
        a first Ctrl-C waits for the end of the step.
        """
        if self._far:
            self._run_with_others()
        else:
            self._run()

    def _run_with_others(self) -> None:
        """The first run compares the programs of all ranks.  A step that fails may have left others waiting."""
        assert self.engine is not None
        if self._flying:
            raise JobError("a step failed while it communicated with other ranks: start all ranks again")
        if not self._compared:
            self.engine.compare(self.block)
            self._compared = True
        start = time.perf_counter()
        try:
            self._run()
        except BaseException as e:
            self.engine.failed(str(e).partition("\n")[0])
            raise
        self.engine.expect(time.perf_counter() - start)

    def _run(self) -> None:
        with nullcontext() if self.disk is None else self.disk.settled():
            self._run_segments()

    def _run_segments(self) -> None:
        self.updating = False
        with np.errstate(all="ignore"):
            for segment in self._before:
                segment.run()
            if not self._after:
                return
            with interrupts_wait():
                self.updating = True
                for segment in self._after:
                    segment.run()
                self.updating = False

    def run_timed(self) -> list[tuple[Operator, float]]:
        """Executes the instructions once, one by one: each operator with its seconds."""
        seconds = []
        if self._far and not self._compared and self.engine is not None:
            self.engine.compare(self.block)
            self._compared = True
        with np.errstate(all="ignore"), nullcontext() if self.disk is None else self.disk.settled():
            for step in self.steps:
                (segment,) = segments([step])
                start = time.perf_counter()
                segment.run()
                seconds.append((step.op, time.perf_counter() - start))
        return seconds
