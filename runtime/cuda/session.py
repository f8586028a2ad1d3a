"""The CUDA session: a planned block with its arena on a device, and the step as CUDA graphs.

The first run launches everything one by one; the second one captures the launches, and from then on they are replayed
as one graph.  Kernels report what they cannot compute, and kernels of updates do nothing then: parameters and state
stay as they were, until the host asks and clears the reports.  Where updates are no kernels of ours, or ranks
communicate, a step that may refuse what it was fed is two graphs, between which the host asks.  Whatever changes from
step to step (learning rate, step counter, random keys, loss scale) lies in the device's memory.  Operators that run on
the host cut the step into several graphs; `on_host` names them.  A part that a copy to host memory crosses is launched
one by one every time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import JobError, UsageError
from ...language.arrays import Arrays
from ...language.ir import Block, Free, Operator, Value
from ...language.kernels import fits, provider
from ...language.program import Program
from ...language.text import show_operator
from ...language.types import Array, TensorType
from ...ops.communication.base import Communication
from ...ops.memory.offload import CopyWait
from ...passes import ALIGNMENT, memory_report
from ...support.threads import interrupts_wait
from ..shared import trouble
from ..shared.binding import already_there, contents, far_waits, need_addresses
from . import PREFERRED, TF32
from .communication import Links
from .device.kernel import STATUS, Arrive, Await, Begin, Buffer, Call, Copy, Launch, OnHost, Transfer, quietly
from .loops.postpone import postponed


@dataclass(frozen=True)
class Step:
    """An operator with its calls, and what runs them."""

    op: Operator
    calls: tuple[Call, ...]
    runs: tuple[Callable[[], None], ...]

    @property
    def on_host(self) -> bool:
        """Whether any of it cannot be captured."""
        return any(isinstance(c, OnHost) for c in self.calls)

    def run(self) -> None:
        """Launches everything.  JobError with the operator where a launch fails."""
        try:
            for run in self.runs:
                run()
        except Exception as e:
            raise JobError(f"{type(e).__name__} in\n    {show_operator(self.op)}\n{e}") from e


class CudaSession:
    """A planned block bound to a device, ready to run many times.

    `data` gives the persistent values, which move to the device: the program's arrays are brought up to date when
    they are asked for (`Arrays.holder`), and given back before the next run, since they may have been written.
    `progress`: told how many kernels are compiled, of how many.  `links`: what carries communication with other ranks.
    """

    #: see runtime/cpu/session.py
    keeps_newest = True

    def __init__(
        self,
        block: Block,
        data: Mapping[str, np.ndarray],
        device: Any,
        progress: Callable[[int, int], None] = quietly,
        links: Links | None = None,
    ) -> None:
        self.block, self.device, self.links = block, device, links
        #: results of communications with other ranks
        self._far = far_waits(block) if links is not None else frozenset()
        need_addresses(block)
        self.report = memory_report(block)
        if self.report.stored:
            raise UsageError("parameters and state in host memory are for the CPU: plan without a disk for this device")
        #: host arrays of the persistent values; those that the host has seen since the last run
        self.hosts: dict[str, np.ndarray] = {v.name: contents(v, data) for v in _kept(block)}
        self._claimed: set[str] = set(self.hosts)
        self._newer: set[str] = set()
        self.arrays: dict[str, Buffer] = {}
        self._memory: list[Any] = []
        self._place(device)
        wanted = [(at, op) for at, op in enumerate(block.operators) if self._runs(op)]
        calls = postponed(((op, self._calls(at, op)) for at, op in wanted), self._used)
        #: whether updates ask the reports themselves
        self.guarded = not self._far and _guardable(calls)
        calls = self._reporting(calls)
        if self.guarded:
            calls = [(op, self._asking(cs) if op.op.updates else cs) for op, cs in calls]
        device.compile((c.kernel for _, cs in calls for c in cs if isinstance(c, Launch)), progress)
        self.steps = [Step(op, cs, tuple(map(self._prepared, cs))) for op, cs in calls]
        #: the calls that may fail, for which the host waits before state changes; the rest
        self._parts = ([], self.steps) if self.guarded else _parts(self.steps)
        #: whether nobody has asked for the newest run's reports
        self._unasked = False
        self._segments: list[list[Callable[[], None]]] | None = None
        self._ran = False
        self.lock = threading.Lock()
        #: whether a run is, or was when it failed, between its first and its last update
        self.updating = False
        #: weak: the arrays know this session, whose memory is to go when the program does
        self._data = weakref.ref(data) if isinstance(data, Arrays) else None
        if isinstance(data, Arrays):
            data.held_by(self)

    # -- memory -----------------------------------------------------------------------------------------------------

    def _place(self, device: Any) -> None:
        sizes = {False: self.report.arena, True: self.report.host}
        starts = {}
        for host, size in sizes.items():
            starts[host], memory = (device.allocate_host if host else device.allocate)(size)
            self._memory.append(memory)
        for name, value in self.block.values().items():
            if name in self.block.addresses:
                at, host = self.block.addresses[name], value.type.host
                if at < 0 or at + value.nbytes > sizes[host]:
                    raise JobError(f"'{name}' does not fit the {'host ' * host}arena of {sizes[host]} bytes")
                self.arrays[name] = Buffer(starts[host] + at, value.type)
        persistent = list(self.block.persistent())
        self.persistent_bytes = sum(-(-v.nbytes // ALIGNMENT) * ALIGNMENT for v in persistent)
        at, memory = device.allocate(self.persistent_bytes)
        self._memory.append(memory)
        for v in persistent:
            self.arrays[v.name] = Buffer(at, v.type)
            at += -(-v.nbytes // ALIGNMENT) * ALIGNMENT
        for c in self.block.constants:
            device.upload(self.arrays[c.value.name], c.numpy())

    @property
    def measured_peak_bytes(self) -> int:
        """Bytes of all buffers that this session holds: the arena and the persistent arrays."""
        return self.report.arena + sum(self.arrays[v.name].nbytes for v in self.block.persistent())

    @property
    def library_bytes(self) -> dict[str, int]:
        """Bytes of the device that libraries hold beside that: cuBLAS's workspace, NCCL's buffers."""
        nccl = getattr(self.links.engine, "buffer_bytes", 0) if self.links is not None else 0
        return {**self.device.library_bytes, **({"nccl": nccl} if nccl else {})}

    @property
    def measured_host_bytes(self) -> int:
        """Bytes of the arena in host memory."""
        return self.report.host

    def holds(self, program: Program) -> bool:
        """Whether a program's arrays are those that this session was made with."""
        return all(dict.get(program.data, name) is array for name, array in self.hosts.items())

    def claim(self, name: str) -> None:
        """The host looks at a persistent value, and may write it: its array is brought up to date."""
        if name in self.hosts and name not in self._claimed:
            if name in self._newer:
                self._ask()
                self.hosts[name][...] = self.device.download(self.arrays[name])
            self._claimed.add(name)

    def release(self) -> None:
        """Gives everything back to the host; the device's memory goes with the session."""
        for name in list(self._newer):
            self.claim(name)
        data = None if self._data is None else self._data()
        if data is not None:
            data.let_go(self)

    # -- one step ---------------------------------------------------------------------------------------------------

    def _runs(self, op: Operator) -> bool:
        """Whether anything is launched for an operator: for a wait it is, although its result is there."""
        if isinstance(op.op, Free):
            return False
        return op.op.copies or self._exchanges(op) or not already_there(self.block, op)

    def _exchanges(self, op: Operator) -> bool:
        """Whether it begins a communication with other ranks, or waits for one."""
        return bool(self._far) and any(v.name in self._far for v in (*op.reads(), *op.writes()) if op.op.communicates)

    def _prepared(self, call: Call) -> Callable[[], None]:
        if isinstance(call, (Begin, Arrive)):
            assert self.links is not None
            return self.links.prepare(call)
        prepared: Callable[[], None] = self.device.prepare(call)
        return prepared

    def _calls(self, at: int, op: Operator) -> tuple[Call, ...]:
        if op.kernel and not (op.kernel in (*PREFERRED, *TF32) and fits(op)):  # it would write beyond its buffers
            raise UsageError(
                f"the kernel of '{op.kernel}' cannot run here, or not in the workspace that was planned, in\n"
                f"    {show_operator(op)}\nrun the program with an Executor, which chooses kernels again"
            )
        ins, outs, scratch = ([self._buffer(v) for v in vs] for vs in (op.inputs, op.outputs, op.scratch))
        if self._exchanges(op):
            return self._exchange(at, op, ins, outs)
        if op.op.copies:  # see ops/offload.py
            return (Await(outs[0]) if isinstance(op.op, CopyWait) else Transfer(outs[0], ins[0]),)
        if op.kernel:
            return tuple(provider(op.kernel).bind(op, ins, outs, scratch))
        return (OnHost(op.op, tuple(ins), tuple(outs), tuple(v.type for v in op.scratch)),)

    def _exchange(self, at: int, op: Operator, ins: Sequence[Any], outs: Sequence[Any]) -> tuple[Call, ...]:
        """The begin of a communication, or the wait; a copy behind it where the result is wanted elsewhere."""
        assert self.links is not None
        self.links.accept(op)
        if isinstance(op.op, Communication):
            return (Begin(op.op, at, ins[0] if ins else None, outs[0], next(op.writes()).name),)
        there = already_there(self.block, op)
        return (Arrive(next(op.reads()).name), *(() if there else (Copy(outs[0], ins[0]),)))

    def _used(self, op: Operator) -> tuple[list[Buffer], list[Buffer]]:
        """The buffers that an operator reads, and those that it writes."""
        return [self.arrays[v.name] for v in op.reads()], [self.arrays[v.name] for v in (*op.writes(), *op.scratch)]

    def _buffer(self, v: Value | None) -> Any:
        return None if v is None else self.arrays[v.name]

    def feed(self, name: str, array: Array) -> None:
        """An input's contents for the next run."""
        self.device.upload(self.arrays[name], np.asarray(array), staged=True)

    def fetch(self, name: str) -> np.ndarray:
        """A copy of a value after a run.  JobError where a kernel met what cannot be computed."""
        array = self.device.download(self.arrays[name])
        self.updating = bool(self._parts[1]) and not self.guarded
        self._ask()
        self.updating = False
        return array

    def _reporting(self, calls: Sequence[tuple[Operator, tuple[Call, ...]]]) -> list[tuple[Operator, tuple[Call, ...]]]:
        """The calls, with a status of this session for each operator whose kernels report one."""
        reports = _reports(calls)
        self._reporters = [calls[i][0] for i in reports]
        at, memory = self.device.allocate(len(reports) * STATUS.nbytes)
        self._memory.append(memory)
        self._status = Buffer(at, TensorType("i64", (len(reports), *STATUS.shape)))
        self._clear()
        sequence = list(calls)
        for k, i in enumerate(reports):
            status = self._status.at(k * STATUS.size, STATUS.shape)
            op, cs = calls[i]
            sequence[i] = op, tuple(c.reporting(status) if isinstance(c, Launch) else c for c in cs)
        return sequence

    def _clear(self) -> None:
        if self._reporters:
            self.device.upload(self._status, np.zeros(self._status.shape, np.int64))

    def _asking(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        """Launches that do nothing once something is reported."""
        return tuple(c.guarded(self._status) if isinstance(c, Launch) else c for c in calls)

    def _ask(self) -> None:
        """`_check`, once a run."""
        unasked, self._unasked = self._unasked, False
        if unasked:
            self._check()

    def _check(self) -> None:
        """JobError with the first operator that has reported what it cannot compute, since the last one."""
        if not self._reporters:
            return
        for op, status in zip(self._reporters, self.device.download(self._status).tolist(), strict=True):
            if status[0]:
                self._clear()
                raise trouble.failure(status, show_operator(op))

    @property
    def on_host(self) -> list[Operator]:
        """Operators that no kernel runs: they are computed on the host, outside of the graph."""
        return [s.op for s in self.steps if s.on_host]

    def run(self) -> None:
        """Executes the instructions once; from the second time on by replaying graphs, where the device has them.

        What goes wrong before the first update leaves parameters and state as they were (`updating`).  The host is told
        by this run, or by what it asks for next: a value, an array of the program, another run.
        """
        self.updating = False
        with self._together():
            self._run()

    def _together(self) -> contextlib.AbstractContextManager[None]:
        """Around a run: that of all ranks, where they communicate."""
        return self.links.step(self.block) if self.links is not None and self._far else contextlib.nullcontext()

    def _run(self) -> None:
        self._begin()
        with _current(self.device):
            if self.device.graphs and self._ran and self._segments is None:
                self._segments = [self._captured(part) for part in self._parts]
            before, after = self._segments or [[s.run for s in part] for part in self._parts]
            for run in before:
                run()
            if before and after:
                self._check()
            if after:
                with interrupts_wait():
                    self.updating = True
                    for run in after:
                        run()
                    self._newer = set(self.hosts)
                    self.updating = False
        self._ran = True

    def _begin(self) -> None:
        """Before any run: the one before is asked about, where nobody has, and the host's arrays are given."""
        self._ask()
        self._unasked = True
        self._give()

    def _give(self) -> None:
        """Copies to the device what the host may have written; everything if another session ran in the meantime."""
        data = None if self._data is None else self._data()
        if data is not None and data.held_by(self):
            self._claimed = set(self.hosts)
        for name in self._claimed:
            self.device.upload(self.arrays[name], self.hosts[name])
        self._claimed.clear()

    def _captured(self, part: Sequence[Step]) -> list[Callable[[], None]]:
        functions: list[Callable[[], None]] = []
        for host, group in itertools.groupby(part, key=lambda s: s.on_host):
            steps = list(group)
            if host or not _joined(steps):
                functions += [s.run for s in steps]
            else:
                functions.append(self._graph(steps))
        return functions

    def _graph(self, steps: Sequence[Step]) -> Callable[[], None]:
        """Steps as one graph, with what communications begin there: a graph's streams are joined when it ends."""
        links = self.links if self._far else None

        def launch() -> None:
            for step in steps:
                step.run()
            if links is not None:
                links.join()

        graph: Callable[[], None] = self.device.capture(launch)
        if links is None:
            return graph

        def replay() -> None:
            links.join()
            graph()

        return replay

    def run_timed(self) -> list[tuple[Operator, float]]:
        """Executes the instructions once, one by one: each operator with its seconds on the device."""
        with self._together(), _current(self.device):
            self._begin()
            seconds = _events(self.device, self.steps) if self.device.graphs else _clocked(self.steps)
        self._ran, self._newer = True, set(self.hosts)
        return seconds


def _parts(steps: list[Step]) -> tuple[list[Step], list[Step]]:
    """The steps before the first update, if any of them may refuse what was fed, and the others.

    A program that moves values to the host is one part: a graph takes no copy that another one has begun.
    """
    first = next((i for i, s in enumerate(steps) if s.op.op.updates), len(steps))
    whole = any(s.op.op.copies for s in steps) or not any(s.op.checks() for s in steps[:first])
    return ([], steps) if whole and first < len(steps) else (steps[:first], steps[first:])


def _guardable(calls: Sequence[tuple[Operator, Sequence[Call]]]) -> bool:
    """Whether all updates are launches of kernels, which may ask first, and follow all that reports."""
    updates = [i for i, (op, cs) in enumerate(calls) if op.op.updates and cs]
    whole = all(isinstance(c, Launch) for i in updates for c in calls[i][1])
    return whole and -1 < max(_reports(calls), default=-1) < min(updates, default=len(calls))


def _reports(calls: Sequence[tuple[Operator, Sequence[Call]]]) -> list[int]:
    """The places of operators whose kernels may report what they cannot compute."""
    return [i for i, (_, cs) in enumerate(calls) if any(isinstance(c, Launch) and c.reports for c in cs)]


def _kept(block: Block) -> list[Value]:
    return [*block.parameters, *block.buffers, *block.state]


def _current(device: Any) -> Any:
    """This thread launches on the device's stream."""
    return device.current() if hasattr(device, "current") else contextlib.nullcontext()


def _joined(steps: Sequence[Step]) -> bool:
    """Whether all copies that begin here are awaited here, and none that began before: a graph takes no others."""
    open_: set[int] = set()
    for c in (c for s in steps for c in s.calls):
        if isinstance(c, Transfer):
            open_.add(c.target.address)
        elif isinstance(c, Await):
            if c.target.address not in open_:
                return False
            open_.remove(c.target.address)
    return not open_


def _clocked(steps: Sequence[Step]) -> list[tuple[Operator, float]]:
    seconds = []
    for step in steps:
        start = time.perf_counter()
        step.run()
        seconds.append((step.op, time.perf_counter() - start))
    return seconds


def _events(device: Any, steps: Sequence[Step]) -> list[tuple[Operator, float]]:
    marks = [device.event()]
    for step in steps:
        step.run()
        marks.append(device.event())
    return [(s.op, device.seconds_between(a, b)) for s, a, b in zip(steps, marks, marks[1:], strict=False)]
