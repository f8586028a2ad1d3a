"""The executor: a planned block bound to an arena, run instruction by instruction."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import JobError, OutOfMemoryError, RecomputeError, UsageError, nearest
from ..language.ir import Block, Free, Operator, Value
from ..language.kernels import fits, provider
from ..language.program import Compiled, Program, Variable
from ..language.text import show_operator
from ..passes import ALIGNMENT, Target, memory_report, without_gc
from ..passes.sequence import cleaned, planned
from ..places import CPUPlace, EmulatedCUDAPlace, Place
from ..support.threads import exclusively, interrupts_wait
from .binding import already_there, contents, need_addresses
from .cpu import MODULES, native
from .lowering import foreign, resolved


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

    def bytes(self) -> Any:
        """All of it, as unsigned bytes."""
        return self._raw[self._start : self._start + self.nbytes]

    def at(self, address: int, value: Value) -> Any:
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
            self.op.op.compute(np, self.ins, self.outs, self.scratch)
        except Exception as e:
            kind = "" if isinstance(e, (IndexError, ValueError, RecomputeError)) and str(e) else f"{type(e).__name__}: "
            raise JobError(f"{kind}{e}, in\n    {show_operator(self.op)}") from e


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
    found: list[Step | NativeSteps] = []
    for is_native, group in itertools.groupby(steps, key=lambda s: bool(s.calls)):
        together = tuple(group)
        if is_native:
            found.append(NativeSteps(together, native.Table([c for s in together for c in s.calls])))
        else:
            found += together
    return found


class Session:
    """A planned block, ready to run many times: every operator's buffers are bound once.

    `arrays` gives the persistent values (parameters, buffers, state); they are updated in place.  `progress` is told
    how many operators are bound, of how many: kernels are compiled where no earlier process has done it.
    """

    def __init__(
        self,
        block: Block,
        arrays: Mapping[str, np.ndarray],
        progress: Callable[[int, int], None] = lambda done, count: None,
    ) -> None:
        self.block = block
        need_addresses(block)
        self.report = memory_report(block)
        self.arena = Arena(self.report.arena)
        self.host = Arena(self.report.host) if self.report.host else None
        self.arrays: dict[str, Any] = {}
        self._bind_persistent(arrays)
        for name, value in block.values().items():
            if name in block.addresses:
                self.arrays[name] = self.arena_of(value).at(block.addresses[name], value)
        wanted = [op for op in block.operators if not isinstance(op.op, Free) and not already_there(block, op)]
        self.steps = []
        for op in wanted:
            self.steps.append(self._step(op))
            progress(len(self.steps), len(wanted))
        first = next((i for i, s in enumerate(self.steps) if s.op.op.updates), len(self.steps))
        #: what changes no state, then the rest
        self._before, self._after = segments(self.steps[:first]), segments(self.steps[first:])
        self.lock = threading.Lock()
        #: whether a run is, or was when it failed, between its first and its last update
        self.updating = False

    def _step(self, op: Operator) -> Step:
        if op.kernel and not (op.kernel in MODULES and fits(op)):  # it would write beyond its buffers
            raise UsageError(
                f"the kernel of '{op.kernel}' cannot run here, or not in the workspace that was planned, in\n"
                f"    {show_operator(op)}\nrun the program with an Executor, which chooses kernels again"
            )
        ins, outs, scratch = (tuple(map(self._array, vs)) for vs in (op.inputs, op.outputs, op.scratch))
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

    def _array(self, v: Value | None) -> Any:
        return None if v is None else self.arrays[v.name]

    @property
    def measured_peak_bytes(self) -> int:
        """Bytes of all buffers that this session holds: the arena and the persistent arrays."""
        names = {v.name for v in self.block.persistent()}
        return self.arena.nbytes + sum(self.arrays[n].nbytes for n in names)

    @property
    def measured_host_bytes(self) -> int:
        """Bytes of the host's arena."""
        return 0 if self.host is None else self.host.nbytes

    #: operators that run elsewhere than the step does: none
    on_host: tuple[Operator, ...] = ()

    def holds(self, program: Program) -> bool:
        """Whether a program's arrays are those that are bound here."""
        persistent = (*self.block.parameters, *self.block.buffers, *self.block.state)
        return all(program.data.get(v.name) is self.arrays[v.name] for v in persistent)

    def release(self) -> None:
        """Nothing to give back: the program's own arrays are updated."""

    def feed(self, name: str, array: Any) -> None:
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
        found = []
        with np.errstate(all="ignore"):
            for step in self.steps:
                (segment,) = segments([step])
                start = time.perf_counter()
                segment.run()
                found.append((step.op, time.perf_counter() - start))
        return found


@dataclass(frozen=True)
class _Bound:
    """A session and what it was made for."""

    block: Block
    fetch: tuple[str, ...]
    session: Any

    def serves(self, program: Program, fetch: tuple[str, ...]) -> bool:
        """Whether the program, its arrays and the fetch list are still the same."""
        return program.block is self.block and fetch == self.fetch and self.session.holds(program)


_IN_USE = (
    "program '{}' is running in another thread: a program is run by one thread at a time; load the model once for each "
    "thread (docs/threads.md)"
)


class Executor:
    """Runs programs on a place.  `place=None` is the CPU.

    The first run of a program (with a given fetch list) plans its memory and binds its buffers; further runs only
    compute.  `schedule`: independent operators may change places where that lowers the peak; `rebuild`: normalised
    values that gradients read may be made again (see passes/rebuild.py).  The numbers stay the same bits; False runs
    what is given.  `providers`: whose kernels run it, in order of preference (None: all that this machine has;
    `("numpy",)`: the operators' own numerics).  A program whose memory is planned has its kernels chosen.
    """

    def __init__(
        self,
        place: Place | None = None,
        *,
        schedule: bool = True,
        rebuild: bool = True,
        providers: Sequence[str] | None = None,
    ) -> None:
        self.place = place or CPUPlace()
        self.target = resolved(Target(self.place, providers, schedule=schedule, rebuild=rebuild))
        self._open = _opener(self.place)
        self._sessions: weakref.WeakKeyDictionary[Program, _Bound] = weakref.WeakKeyDictionary()

    def run(
        self,
        program: Program,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[str | Variable] | None = None,
    ) -> list[np.ndarray]:
        """Runs the program once and returns the fetched values, in order.

        Feeds are checked for name, shape and element type.  Any value can be fetched: it is kept alive to the end.
        UsageError for wrong feeds or fetches.
        """
        names = _names(program, fetch_list)
        if program.updates:
            with exclusively(program.lock, _IN_USE.format(program.block.name)):
                return self._run(program, self.session(program, names), feed, names)
        with program.lock:
            session = self.session(program, names)
        with exclusively(session.lock, _IN_USE.format(program.block.name)):
            return self._run(program, session, feed, names)

    def _run(self, program: Program, session: Any, feed: Any, names: list[str]) -> list[np.ndarray]:
        if program.broken:
            raise JobError(
                f"program '{program.block.name}' is half updated: {program.broken}; load a whole state "
                "(rc.load_state) to go on"
            )
        self._feed(session, {} if feed is None else feed)
        try:
            session.run()
            return [session.fetch(n) for n in names]
        except BaseException as e:
            if session.updating:
                program.broken = f"a step failed after its first update ({_short(e)})"
            raise

    def session(
        self,
        program: Program,
        fetch: Sequence[str] = (),
        progress: Callable[[int, int], None] = lambda done, count: None,
    ) -> Any:
        """The bound session of a program for a fetch list; made at the first call, and again when either changes.

        `progress`: see `Session`.
        """
        wanted = tuple(sorted(set(fetch)))
        bound = self._sessions.get(program)
        if bound is None or not bound.serves(program, wanted):
            if bound is not None:
                bound.session.release()
            self._sessions.pop(program, None)  # its arena goes before the next one comes: one arena a program
            bound = None
            for name, array in program.data.items():
                held = isinstance(array, (np.ndarray, np.generic))  # else `contents` says what is wrong
                if held and not (array.flags.writeable and array.flags.c_contiguous):  # a view of the model's file, say
                    program.data[name] = np.array(array, order="C")
            block = self._planned(program, wanted)
            bound = _Bound(program.block, wanted, self._open(block, program.data, progress))
            self._sessions[program] = bound
        return bound.session

    def _planned(self, program: Program, fetch: Sequence[str]) -> Block:
        """The block with kernels, frees and addresses; fetched values survive.  One that suits is taken as it is.

        A budget that the program was planned for holds on this place too: where the plan is for another one, it is
        planned again.
        """
        made = program.compiled if program.compiled and program.compiled.logical is program.logical else None
        for block in (program.block, *([made.block] if made is not None else ())):
            outputs = tuple(dict.fromkeys([*block.outputs, *fetch]))
            if block.addresses and outputs == block.outputs and self._suits(block, made):
                return block
        with without_gc():
            if made is not None and made.refit is not None and not made.target.makes_the_same_as(self.target):
                made = made.refit(self.target)
                if set(fetch) <= set(made.block.outputs):
                    return made.block
            return self._planned_for(made.logical if made is not None else program.logical, program, fetch, made)

    def _suits(self, block: Block, made: Compiled | None) -> bool:
        """Whether a block with addresses can run here as it is."""
        if foreign(block, self.target):
            return False
        bound = made is not None and made.budget is not None and made.block is block
        return not bound or made is None or made.target.makes_the_same_as(self.target)

    def _planned_for(self, block: Block, program: Program, fetch: Sequence[str], made: Compiled | None) -> Block:
        """A logical block compiled, with what is fetched among its outputs."""
        values = block.values()  # of the logical block, where a lowering has not merged what is to be fetched
        for name in fetch:
            if name not in values:
                raise UsageError(f"there is no value '{name}' to fetch{nearest(name, values)}")
        outputs = tuple(dict.fromkeys([*block.outputs, *fetch]))
        block = block.with_operators(block.operators, outputs=outputs)
        by_planner = program.planned is not None  # which has chosen what is recomputed
        found = planned(cleaned(block, self.target, planned=by_planner), self.target)
        if made is not None and made.budget is not None and (peak := memory_report(found).peak) > made.budget:
            warnings.warn(
                f"the step takes {peak:,} bytes, its budget is {made.budget:,}: what is fetched stays to the end of "
                "the step; fetch less, or plan with these values as outputs (compile_step(fetch=...))",
                stacklevel=5,
            )
        return found

    def _feed(self, session: Any, feed: Mapping[str, Any]) -> None:
        inputs = {v.name: v for v in session.block.inputs}
        if not isinstance(feed, Mapping):
            raise UsageError(f"feed must be a dictionary of arrays by input, not {type(feed).__name__}")
        for name in feed:
            if name not in inputs:
                raise UsageError(f"the program has no input '{name}'{nearest(name, inputs)}; inputs: {_list(inputs)}")
        missing = [n for n in inputs if n not in feed]
        if missing:
            raise UsageError(f"input{'s' * (len(missing) > 1)} not fed: {_list({n: inputs[n] for n in missing})}")
        for name, v in inputs.items():
            array = feed[name]
            try:
                array = np.asarray(array)
            except (TypeError, ValueError) as e:  # another library's array on a device; lists of unequal lengths
                raise UsageError(f"input '{name}' is no array: {e}") from None
            if tuple(array.shape) != v.shape:
                raise UsageError(f"input '{name}' has shape {list(array.shape)}, the program wants {list(v.shape)}")
            if array.dtype != v.type.numpy:
                raise UsageError(
                    f"input '{name}' has element type {array.dtype}, the program wants {v.type.numpy}: "
                    f"feed x.astype('{v.type.numpy}')"
                )
            session.feed(name, array)


def _short(e: BaseException) -> str:
    """The first line of an error's text; its name where it has none."""
    return str(e).partition("\n")[0][:200].removesuffix(", in") or type(e).__name__


def _names(program: Program, fetch_list: Any) -> list[str]:
    """Names of the values to fetch, aliases resolved."""
    if not isinstance(program, Program):
        raise UsageError(f"a Program is needed, not {type(program).__name__}")
    wanted = [fetch_list] if isinstance(fetch_list, (str, Variable)) else fetch_list or ()
    names = []
    for f in wanted:
        if not isinstance(f, (str, Variable)):
            raise UsageError(f"fetch_list takes names and Variables, not {f!r}")
        name = f.name if isinstance(f, Variable) else f
        names.append(program[name].name if name in program.aliases else name)
    return names


def _list(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{n}: {v.type}" for n, v in values.items()) or "none"


def _opener(place: Place) -> Callable[..., Any]:
    """What binds a planned block on a place.  MissingExtraError where the place is not to be had."""
    if isinstance(place, CPUPlace):
        return Session
    from .cuda.session import CudaSession

    if isinstance(place, EmulatedCUDAPlace):
        from .cuda.emulator import EmulatedDevice

        device: Any = EmulatedDevice(backwards=place.backwards)
    else:
        from .cuda.device import open_device

        device = open_device(place.device)
    return lambda block, data, progress: CudaSession(block, data, device, progress)
