"""The executor: runs programs on a place, and keeps the session of each."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..boundary import as_function, as_names, as_program
from ..communication.mesh import Mesh, as_mesh
from ..errors import JobError, NotFiniteError, UsageError, expect, nearest
from ..language.arrays import Arrays
from ..language.ir import Block, Value
from ..language.kernels import bits_are_portable
from ..language.program import Compiled, Program, Variable
from ..language.verify import trusted, verify
from ..passes import Target, memory_report
from ..places import CPUPlace, CUDAPlace, EmulatedCUDAPlace, Place, as_place
from ..support.memory import give_back, is_stored, own
from ..support.recent import OPERATOR_BYTES, Recent
from ..support.threads import exclusively
from .communication.agreement import must_be_same
from .communication.engine import Alone, Engine
from .communication.started import given_rank
from .compiled import block_to_run
from .cpu.disk import move_to_disk
from .cpu.session import Arena, Session
from .lowering import resolved
from .shared.binding import far_waits, need_separate


def _to_own(array: object) -> bool:
    """Whether steps cannot write into it: a view of a model's contents, or not in row-major order."""
    if not isinstance(array, (np.ndarray, np.generic)):  # `contents` raises the error
        return False
    return not (array.flags.writeable and array.flags.c_contiguous)


@dataclass(frozen=True)
class _Bound:
    """A session and what it was made for."""

    block: Block
    fetch: tuple[str, ...]
    session: Any

    def serves(self, program: Program, fetch: tuple[str, ...]) -> bool:
        """Whether the program, its arrays and the fetch list are still the same."""
        return program.block is self.block and fetch == self.fetch and self.session.holds(program)


def _program_bytes(program: Program) -> int:
    """Bytes of a program besides shared weights and the shared arena."""
    tables = sum(dict.__getitem__(program.data, name).nbytes for name in program.tables if name in program.data)
    return tables + OPERATOR_BYTES * len(program.block.operators)


_IN_USE = (
    "program '{}' is running in another thread: a program is run by one thread at a time; load the model once for each "
    "thread (docs/threads.md)"
)


class Executor:
    """Runs programs on a place (or the one of this name, such as "cuda:0").  `place=None` is the CPU.

    The first run of a program (with a given fetch list) plans its memory and binds its buffers; further runs only
    compute.  `schedule`: independent operators may be reordered to lower the peak; `rebuild`: normalised values that
    gradients read may be recomputed (see passes/recomputation/rebuild.py).  Results are bit-identical in either case.
    `providers`: kernel providers in order of preference (None: all on this machine; `("numpy",)`: the operators' own
    numerics).  These options do not apply to a program whose memory is already planned.

    `mesh` (a Mesh, or its text such as "dp=4"): this process is one of its ranks, and communicates with the others
    through MPI, on CUDA devices through NCCL; each rank of a machine then has a device of its own (`CUDAPlace()`).
    `kept_bytes`: how much the programs of other sizes than a program was loaded with may take (see `run`), arena and
    weights aside; those that were used longest ago are forgotten.  `engine`: through this engine
    (runtime/communication).  Without them, the first program that communicates says what
    mesh it was made for (`Program.mesh`).
    """

    def __init__(
        self,
        place: Place | str | None = None,
        *,
        schedule: bool = True,
        rebuild: bool = True,
        providers: Sequence[str] | None = None,
        mesh: Mesh | str | None = None,
        engine: Engine | None = None,
        kept_bytes: int = 256 << 20,
    ) -> None:
        self.place = as_place(place)
        self.kept_bytes = expect("kept_bytes", kept_bytes, int, "a number of bytes")
        self.engine = _engine(self.place, mesh, engine)
        self.target = resolved(Target(self.place, providers, schedule=schedule, rebuild=rebuild))
        self._open = _opener(self.place, self.engine)
        self._shared: Arena | None = None
        self._turn = threading.Lock()
        #: whether ranks compare their weights before the first step of a program
        self.compares = True
        self._alike: weakref.WeakSet[Program] = weakref.WeakSet()
        self._sessions: weakref.WeakKeyDictionary[Program, _Bound] = weakref.WeakKeyDictionary()
        #: a program → the same at other sizes; and each of them, the program included, → these
        self._others: weakref.WeakKeyDictionary[Program, Recent[Any, Program]] = weakref.WeakKeyDictionary()
        self._families: weakref.WeakKeyDictionary[Program, weakref.ref[Recent[Any, Program]]]
        self._families = weakref.WeakKeyDictionary()
        #: the last result of `_planned`: of which block, compiled before as what, for which fetches, with what on disk
        self._made: weakref.WeakKeyDictionary[
            Program, tuple[Block, Compiled | None, tuple[str, ...], frozenset[str], Block]
        ]
        self._made = weakref.WeakKeyDictionary()

    @property
    def rank(self) -> int:
        """Which rank of `mesh` this process is."""
        return 0 if self.engine is None else self.engine.rank

    @property
    def mesh(self) -> Mesh:
        """The ranks that run together."""
        return Mesh() if self.engine is None else self.engine.mesh

    def run(
        self,
        program: Program,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[str | Variable] | None = None,
    ) -> list[np.ndarray]:
        """Runs the program once and returns the fetched values, in order.

        Feeds are checked for name, shape and element type.  Any value can be fetched: it is kept alive to the end.
        What is fed may have another batch and other sizes of dimensions that the program's model leaves open: it is
        then made again at these (`Program.at`), compiled once, and kept for the next time; all share the weights, the
        state, and on a CPU one arena.  UsageError for wrong feeds or fetches.
        """
        if isinstance(feed, Mapping) and (sizes := as_program(program).at_fed(feed)) is not None:
            return self._run_at(program, sizes, feed, fetch_list)
        names = _names(program, fetch_list)
        if program.updates or program in self._families:
            with exclusively(program.lock, _IN_USE.format(program.block.name)):
                return self._run(program, self.session(program, names), feed, names)
        with program.lock:
            session = self.session(program, names)
        with exclusively(session.lock, _IN_USE.format(program.block.name)):
            return self._run(program, session, feed, names)

    def _run_at(self, program: Program, sizes: Any, feed: Any, fetch_list: Any) -> list[np.ndarray]:
        """Runs the program at other sizes: those that were used last are kept."""
        with exclusively(program.lock, _IN_USE.format(program.block.name)):
            others = self._others.setdefault(program, Recent(self.kept_bytes, _program_bytes))
            other = others.get(sizes)
            if other is None:
                with trusted():
                    other = program.at(sizes[0], dict(sizes[1]))
                verify(other.block)
                for old in others.put(sizes, other):
                    self._forget(old, others)
                self._families[other] = self._families[program] = weakref.ref(others)
            other.broken, other.averaged = program.broken, program.averaged
            names = _names(other, fetch_list)
            try:
                return self._run(other, self.session(other, names), feed, names)
            finally:
                program.broken = other.broken

    def _forget(self, resized: Program, others: Recent[Any, Program]) -> None:
        """Lets go of a program of other sizes, with the arrays that no other one has."""
        self._families.pop(resized, None)
        used = {v.name for other in others for v in other.block.persistent()}
        self._sessions.pop(resized, None)
        for name in set(resized.tables) - used:
            resized.data.pop(name, None)

    def _run(self, program: Program, session: Any, feed: Any, names: list[str]) -> list[np.ndarray]:
        if self._shared is None:
            return self._fed_and_run(program, session, feed, names)
        with self._turn:  # another program would overwrite the arena that they share
            return self._fed_and_run(program, session, feed, names)

    def _fed_and_run(self, program: Program, session: Any, feed: Any, names: list[str]) -> list[np.ndarray]:
        if program.broken:
            raise JobError(
                f"program '{program.block.name}' is partly updated: {program.broken}; load a complete state "
                "(rc.load_state) to continue"
            )
        if program.averaged and program.updates:
            raise JobError(
                f"program '{program.block.name}' cannot train: its parameters hold their averages until the end of "
                "`applied(program)`"
            )
        if self.engine is not None and self.compares and program not in self._alike:
            self._compare(program, session)
        self._feed(session, {} if feed is None else feed)
        if not session.keeps_newest and isinstance(program.data, Arrays):  # what a device has trained is copied back
            program.data.held_by(None)
        try:
            session.run()
            return [session.fetch(n) for n in names]
        except NotFiniteError as e:
            raise _explained(e, program, feed, self.engine) from None
        except BaseException as e:
            if session.updating:
                program.broken = f"a step failed after its first update ({_short(e)})"
            raise

    def _compare(self, program: Program, session: Any) -> None:
        """Compares what a program was made from, and its weights and state, with those of the other ranks.

        UsageError, on all of them, that names what is different.
        """
        engine = self.engine
        if engine is not None and engine.mesh.ranks > 1 and far_waits(session.block):
            facts = {} if program.origin is None else program.origin.facts
            values = program.digests(engine.mesh, engine.rank)
            must_be_same(engine, "the comparison of all ranks' weights", facts, values)
        self._alike.add(program)

    def session(
        self,
        program: Program,
        fetch_list: Sequence[str | Variable] = (),
        progress: Callable[[int, int], None] = lambda done, count: None,
    ) -> Any:
        """The session of a program for a fetch list; created at the first call, and again if either changes.

        `progress`: see `Session`.
        """
        wanted = tuple(sorted(set(_names(program, fetch_list))))
        as_function(progress, "progress", "how many operators are bound, and of how many")
        if bits_are_portable() and self.target.on_device:
            raise UsageError(f"portable bits are those of processors, and this executor is on {self.place}")
        bound = self._sessions.get(program)
        if bound is None or not bound.serves(program, wanted):
            if bound is not None:
                bound.session.release()
            self._sessions.pop(program, None)  # frees its arena before the next one is allocated
            bound = None
            block = self._planned(program, wanted)
            disk = self._disk(program, block)
            for name in program.data:
                if _to_own(program.data[name]):
                    own(program.data, name)
            need_separate(block, program.data)
            self._join(program, block)
            give_back()  # what planning has freed
            arena = self._arena_for(program, memory_report(block).arena)
            more = {} if disk is None else {"disk": disk}
            bound = _Bound(program.block, wanted, self._open(block, program.data, progress, arena, **more))
            self._sessions[program] = bound
        return bound.session

    def _disk(self, program: Program, block: Block) -> str | None:
        """The folder that a step was planned with (else the place's own); None: there is none, or no need of it."""
        target = program.compiled.target if program.compiled is not None else self.target
        disk = target.disk or self.target.disk
        here = isinstance(self.place, CPUPlace) and any(o.op.copies for o in block.operators)
        return disk if here else None

    def _join(self, program: Program, block: Block) -> None:
        """Makes this executor a rank of the mesh for which the program was made, if it communicates.

        UsageError where the executor is a rank of another mesh.
        """
        if program.mesh is None or not far_waits(block):
            return
        if self.engine is None:
            self.engine = _engine(self.place, program.mesh, None, shared=True)
            self._open = _opener(self.place, self.engine)
        elif self.engine.mesh != program.mesh:
            raise UsageError(
                f"program '{program.block.name}' was made for the mesh {program.mesh}, and this executor is a rank of "
                f"{self.engine.mesh}: use another executor for it"
            )

    def planned(self, program: Program, fetch_list: Sequence[str | Variable] = ()) -> Block:
        """The block that `run` would execute, with its memory planned; only files on disk are allocated."""
        return self._planned(program, tuple(sorted(set(_names(program, fetch_list)))))

    def bound(self, program: Program, fetch_list: Sequence[str | Variable] = ()) -> Any:
        """The session of a program for a fetch list, if it is there already; else None."""
        wanted = tuple(sorted(set(_names(program, fetch_list))))
        entry = self._sessions.get(program)
        return entry.session if entry is not None and entry.serves(program, wanted) else None

    def share_arena(self, nbytes: int) -> None:
        """Lets the programs of this executor that need at most `nbytes` for their intermediate values share one arena.

        For programs that take turns, such as training and evaluation: what a run leaves there, the next run of another
        program overwrites, so that results are read before (`run` returns copies).  Only on a CPU; on other places each
        program has memory of its own.
        """
        if isinstance(self.place, CPUPlace):
            self._sessions.clear()
            self._shared = None  # the one before is freed first
            self._shared = Arena(nbytes)

    def _arena_for(self, program: Program, nbytes: int) -> Arena | None:
        """The shared arena, if it is large enough; that of a program's other sizes, which grows.  None: its own."""
        if self._shared is not None and nbytes <= self._shared.nbytes:
            return self._shared
        if program not in self._families or not isinstance(self.place, CPUPlace):
            return None
        there = self._family(program)
        largest = max((self._sessions[p].session.arena for p in there), key=lambda a: a.nbytes, default=None)
        if largest is not None and largest.nbytes >= nbytes:
            return largest
        del largest  # freed before the next one is allocated
        for p in there:
            del self._sessions[p]
        return Arena(nbytes)

    def _family(self, program: Program) -> list[Program]:
        """The programs of a program's other sizes, and itself, that have sessions."""
        family = self._families.get(program)
        return [p for p, f in self._families.items() if family is not None and f() is family() and p in self._sessions]

    def _planned(self, program: Program, fetch: tuple[str, ...]) -> Block:
        """The block to run, compiled once for a program's block and the fetched names.

        What it keeps on disk goes there now; other programs with the same arrays fetch them from there.
        """
        entry = self._made.get(program)
        far = frozenset(n for n, a in dict.items(program.data) if is_stored(a))
        before = program.block, program.compiled, fetch, far
        if entry is None or entry[0] is not before[0] or entry[1] is not before[1] or entry[2:4] != before[2:]:
            others = [self._sessions[p].session.block for p in self._family(program)]
            block = block_to_run(program, self.target, fetch, others, far)
            disk, values = self._disk(program, block), [v for v in block.persistent() if v.type.host]
            if disk is not None and values:
                move_to_disk(disk, program.data, values)
                before = *before[:3], far.union(v.name for v in values)
            entry = self._made[program] = (*before, block)
        return entry[4]

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
                raise UsageError(f"input '{name}' is not an array: {e}") from None
            if tuple(array.shape) != v.shape:
                last = array.shape[1:] == v.shape[1:] and array.ndim and array.shape[0] < v.shape[0]
                hint = ": drop or fill the last batch, or load the model at this one" if last else ""
                raise UsageError(
                    f"input '{name}' has shape {list(array.shape)}, the program expects {list(v.shape)}{hint}"
                )
            if array.dtype != v.type.numpy:
                raise UsageError(
                    f"input '{name}' has element type {array.dtype}, the program expects {v.type.numpy}: "
                    f"feed x.astype('{v.type.numpy}')"
                )
            session.feed(name, array)


def _explained(e: NotFiniteError, program: Program, feed: Any, engine: Engine | None) -> NotFiniteError:
    """The error with the value that first became NaN or infinite."""
    from .first_not_finite import first_not_finite

    return NotFiniteError(f"{_short(e)}: nothing was updated in this step\n  {first_not_finite(program, feed, engine)}")


def _short(e: BaseException) -> str:
    """The first line of an error's text; its class name if it has none."""
    return str(e).partition("\n")[0][:200].removesuffix(", in") or type(e).__name__


def _names(program: Program, fetch_list: Sequence[str | Variable] | None) -> list[str]:
    """Names of the values to fetch, aliases resolved."""
    as_program(program)
    fetches = () if fetch_list is None else as_names(fetch_list, "fetch_list")
    names = (f.name if isinstance(f, Variable) else f for f in fetches)
    return [program[name].name if name in program.aliases else name for name in names]


def _list(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{n}: {v.type}" for n, v in values.items()) or "none"


def _engine(place: Place, mesh: Mesh | str | None, engine: Engine | None, shared: bool = False) -> Engine | None:
    """The communication engine (MPI, NCCL); None without other ranks.  `shared`: the engine of the process."""
    if mesh is None and engine is None:
        return None
    if engine is not None:
        return engine
    assert mesh is not None
    axes = as_mesh(mesh)
    if axes.ranks == 1 and not given_rank():
        return Alone(axes)
    if isinstance(place, CUDAPlace) and not isinstance(place, EmulatedCUDAPlace):
        from .cuda.local_device import engine_on, open_engine

        opened: Engine = (engine_on if shared else open_engine)(axes, place.device)
        return opened
    from .communication.mpi import MpiEngine, engine_of

    return engine_of(axes) if shared else MpiEngine(axes)


def _opener(place: Place, engine: Engine | None) -> Callable[..., Any]:
    """The session class and device of a place.  MissingExtraError if the device is unavailable."""
    if isinstance(place, CPUPlace):
        return functools.partial(Session, engine=engine)
    from .cuda.nccl import NcclEngine, links_of
    from .cuda.session import CudaSession

    if isinstance(engine, NcclEngine):
        device: Any = engine.device
    elif isinstance(place, EmulatedCUDAPlace):
        from .cuda.device.emulator import EmulatedDevice

        device = EmulatedDevice(backwards=place.backwards)
    else:
        from .cuda.device.device import open_device

        device = open_device(place.device)
    return lambda block, data, progress, arena: CudaSession(block, data, device, progress, links_of(engine, device))
