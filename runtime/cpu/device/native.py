"""Native code: compilation of LLVM IR to functions in memory, and tables of calls that one native function walks.

Every kernel has one C signature, `void kernel(const int64_t *args, int64_t begin, int64_t end)`: `args` holds pointers,
integers and the bits of doubles, [begin, end) is the part of the work that this thread does.  Threads are libgomp's,
the pool that oneDNN's wheel uses too; without libgomp a step runs on one.  Object code is kept in the user's cache
folder under a key of all it was made from, so that a second process only loads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import platform
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import JobError, UsageError
from ....language.kernels import by_numpy
from ....support.threads import cores, once, set_up_lock
from ...shared import trouble
from . import building, code_cache, crew
from .toolchain import Building, Toolchain


@dataclass(frozen=True)
class Call:
    """One call of a kernel: its address, operands, and how many pieces of work there are.

    Operands: arrays (their address), integers, floats (as doubles), STATUS.  `parallel`: the work is split over the
    threads; otherwise one of them does all of it.  `own_threads`: the kernel brings threads of its own, and runs
    outside of any parallel region.  `quiet`: functions that tell and set the number of a library's threads, which has
    one meanwhile.  `least`: pieces of work that a chunk has, where there are enough for all threads.
    `parts`: the calls that it makes, where it is one of several.
    """

    address: int
    operands: tuple[Any, ...]
    work: int = 1
    parallel: bool = True
    own_threads: bool = False
    quiet: tuple[int, int] | None = None
    least: int = 1
    parts: tuple[Call, ...] = ()

    def words(self, status: np.ndarray) -> np.ndarray:
        """The operands as the kernel reads them.  `status`: the array that takes the place of STATUS."""
        return np.array([word(status if x is STATUS else x) for x in self.operands] or [0], np.int64)


#: an operand of kernels that may meet what they cannot compute
STATUS = trouble.STATUS


def word(x: Any) -> int:
    """An operand as a kernel reads it: an array's address, a number, the bits of a double."""
    if isinstance(x, np.ndarray):
        return x.ctypes.data
    if isinstance(x, (float, np.floating)):
        return struct.unpack("q", struct.pack("d", x))[0]
    return int(x.astype(np.int64)) if isinstance(x, np.uint64) else int(x)


class Table:
    """Calls in a row, bound once: `run()` makes all of them without Python in between.

    A table has a status of its own, so that two of them, run in two threads, tell their own errors only.
    """

    def __init__(self, calls: Sequence[Call], team: int = 0) -> None:
        """`team`: how many threads; 0: those of a step."""
        self._threads = team or threads()
        self.status = np.zeros(trouble.WORDS, np.int64)
        self._keep = [(c.operands, c.words(self.status)) for c in calls]
        self._rows = np.zeros((len(calls), crew.WORDS), np.int64)
        self._counters = np.zeros((len(calls), self._threads + 1), np.int64)
        for i, (row, c, (_, words)) in enumerate(zip(self._rows, calls, self._keep, strict=True)):
            row[:4] = c.address, words.ctypes.data, c.work, self._chunks(c)
            row[6] = self._counters.ctypes.data + i * self._counters.strides[0]
        for begin, end in _regions(calls):
            self._rows[begin, 4:6] = end, (self._rows[begin:end, 3] > 1).any()
        self._run, self._others = _driver(), any(c.own_threads for c in calls)
        self._quiet = [_quieted(functions) for functions in sorted({c.quiet for c in calls if c.quiet is not None})]
        self._arguments = (self._rows.ctypes.data, len(calls), self._threads, self.status.ctypes.data)

    def _chunks(self, c: Call) -> int:
        """How many chunks its work is cut into."""
        if not c.parallel:
            return 1
        return max(1, min(c.work, self._threads * crew.CHUNKS, max(self._threads, c.work // c.least)))

    def run(self) -> int | None:
        """All calls, in order.  Where one of them fails, its number, and those behind it are not made.

        UsageError where the code is a library's for another machine.
        """
        if not toolchain().runs:
            raise UsageError("this process builds a library for another machine, and cannot run its code")
        failed = _by_worker(self._made) if _forked else self._made()
        return None if failed < 0 else failed

    def _made(self) -> int:
        """All calls, in this thread: libraries with threads of their own have as many as when their code was made."""
        if self._others:
            announce_threads()
        with contextlib.ExitStack() as stack:
            for library in self._quiet:
                stack.enter_context(library)
            return self._run(*self._arguments)

    def check(self, where: str = "") -> None:
        """JobError where a kernel failed in the last run, NotFiniteError where a loss is not finite.  `where`: the
        operator that it ran."""
        if self.status[0]:
            raise trouble.failure(self.status.tolist(), where)


class _Quieted:
    """A library with one thread while any table runs that asks for it."""

    def __init__(self, get: int, set_: int) -> None:
        self._get, self._set = ctypes.CFUNCTYPE(ctypes.c_int)(get), ctypes.CFUNCTYPE(None, ctypes.c_int)(set_)
        self.forget()

    def forget(self) -> None:
        """Nobody uses it: so it is in a fork, whose other threads are gone."""
        self._lock, self._users, self._before = threading.Lock(), 0, 1

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = self._get()
                self._set(1)
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._set(self._before)


#: by their functions
_libraries: dict[tuple[int, int], _Quieted] = {}


def _quieted(functions: tuple[int, int]) -> _Quieted:
    with set_up_lock():
        if functions not in _libraries:
            _libraries[functions] = _Quieted(*functions)
        return _libraries[functions]


def _regions(calls: Sequence[Call]) -> Iterator[tuple[int, int]]:
    """Ranges of calls that one parallel region makes."""
    for private, group in itertools.groupby(range(len(calls)), key=lambda i: calls[i].own_threads):
        indices = list(group)
        if not private:
            yield indices[0], indices[-1] + 1


#: whether this process is a fork of another, whose OpenMP threads it does not have
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True
    _worker.cache_clear()
    for library in _libraries.values():
        library.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@once
def _worker() -> ThreadPoolExecutor:
    """The thread that runs tables in a fork: libgomp would wait forever for threads that the process lacks, but a new
    thread gets new ones."""
    return ThreadPoolExecutor(1)


def _by_worker(run: Callable[[], int]) -> int:
    """What `_worker` returns; an interrupt is raised when it has ended, as it works in the caller's buffers."""
    future = _worker().submit(run)
    try:
        return future.result()
    finally:
        while not future.done():
            with contextlib.suppress(KeyboardInterrupt):
                wait([future])


def together(calls: Sequence[Call]) -> Call:
    """One call of several over the same work: a part of it goes through all of them before it meets another thread's.

    Only for calls in which a piece of work reads of the others' results what the same piece has made, and which report
    no status.
    """
    work = {c.work for c in calls}
    if len(work) != 1:
        raise ValueError(f"calls over different work, {sorted(work)}, do not go together")
    if any(x is STATUS for c in calls for x in c.operands):
        raise ValueError("a call that reports a status does not go together with others")
    words = [c.words(np.empty(0, np.int64)) for c in calls]
    rows = np.array([(c.address, w.ctypes.data) for c, w in zip(calls, words, strict=True)], np.int64)
    kept = {id(x): x for c in calls for x in c.operands if isinstance(x, np.ndarray)}
    quiet = next((c.quiet for c in calls if c.quiet is not None), None)
    operands = (rows, len(calls), *words, *kept.values())
    least = max(c.least for c in calls)
    return Call(compile_ir(_TOGETHER), operands, work.pop(), quiet=quiet, least=least, parts=tuple(calls))


_TOGETHER = r"""
define void @kernel(ptr %args, i64 %begin, i64 %end) {
entry:
  %rows = load ptr, ptr %args
  %count.at = getelementptr i64, ptr %args, i64 1
  %count = load i64, ptr %count.at
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %step]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %step, label %done
step:
  %twice = mul i64 %i, 2
  %row = getelementptr i64, ptr %rows, i64 %twice
  %function = load ptr, ptr %row
  %given.at = getelementptr i64, ptr %row, i64 1
  %given = load ptr, ptr %given.at
  call void %function(ptr %given, i64 %begin, i64 %end)
  %i1 = add i64 %i, 1
  br label %loop
done:
  ret void
}
"""


@functools.cache
def unavailable() -> str:
    """Why nothing native can run here; "" where it can."""
    try:
        import llvmlite.binding  # noqa: F401
    except ImportError:
        return "llvmlite is not installed (extra 'cpu')"
    return "addresses have fewer than 64 bits" if np.dtype(np.intp).itemsize != 8 else ""


@functools.cache
def converts_bfloat16() -> bool:
    """Whether the processor rounds float32 to bfloat16, and multiplies it, by instructions of its own, which take
    subnormal numbers for zero."""
    return not unavailable() and "+avx512bf16" in toolchain().features and not toolchain().portable


@functools.cache
def converts_float16() -> bool:
    """Whether this processor converts between float16 and float32 by instructions of its own."""
    if unavailable():
        return False
    target = building.machine()
    processor = platform.machine() if target is None or not target.library else target.name
    return "+f16c" in toolchain().features or processor in ("aarch64", "arm64")


def takes_float16() -> bool:
    """Whether kernels may read and write float16: where there is no NumPy they convert it by integers, too."""
    return converts_float16() or building.machine() is not None


@once
def threads() -> int:
    """Threads of a step: the processors this process may use, or OMP_NUM_THREADS if that is less.

    OpenMP's other settings count: no more than OMP_THREAD_LIMIT, and one where teams may have any size (OMP_DYNAMIC) or
    have one thread (OMP_MAX_ACTIVE_LEVELS=0).  A library has one.
    """
    if building.makes_library():
        return 1
    most = cores()
    with contextlib.suppress(ValueError):
        most = min(most, max(1, int(os.environ.get("OMP_NUM_THREADS", most))))
    gomp = _libgomp()
    if gomp is None or gomp.omp_get_dynamic() or gomp.omp_get_max_active_levels() < 1:
        return 1
    return min(most, max(1, gomp.omp_get_thread_limit()))


def announce_threads(count: int | None = None) -> None:
    """Tells libraries that use OpenMP, in this thread, how many threads they have (None: those of a step)."""
    if (gomp := _libgomp()) is not None:
        gomp.omp_set_num_threads(threads() if count is None else count)


def openmp() -> bool:
    """Whether there is an OpenMP runtime; without one a step is one thread, and none of its functions can be called."""
    return not building.makes_library() and _libgomp() is not None


@once
def _libgomp() -> Any:
    """The OpenMP runtime of GCC; None where there is none.

    Its threads spin a while when they have nothing to do.  Where NumPy's BLAS has threads of its own, spinning for long
    takes their processors away, so that it is cut short before the library is loaded.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for name in ("libgomp.so.1", "libgomp.so"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


@once
def here() -> Toolchain:
    """LLVM for this process.  JobError where llvmlite is missing."""
    if why := unavailable():
        raise JobError(f"no native code: {why}")
    return Toolchain(_libgomp())


@once
def toolchain() -> Toolchain:
    """LLVM for steps: this process's, or a library's (see building.py).  JobError where llvmlite is missing."""
    machine = building.machine()
    if machine is None:
        return here()
    return Building(here(), machine) if machine.library else Toolchain(_libgomp(), portable=True)


def build_for(target: str = "x86_64", cpu: str | None = None, *, portable: bool = False) -> None:
    """From here on, native code of steps is made for a library (see building.py).

    `target`: "x86_64", "aarch64" or "wasm32"; `cpu`: one of its processors (None: the most common one; "native": this
    machine's); `portable`: with the same bits on each of them (see portable.py).  UsageError for others, and where this
    process has made code for something else already.
    """
    _begin(dataclasses.replace(building.named(target, cpu), portable=portable), f"a library for {target}", "build_for")


def make_portable() -> None:
    """From here on, steps of this process have bits that every machine gives (see portable.py).  UsageError where it
    has made other code already."""
    here()  # JobError where llvmlite is missing
    _begin(building.PORTABLE_HERE, "a step with portable bits", "portable_bits")


def _begin(wanted: building.Machine, what: str, call: str) -> None:
    before = building.machine()
    if before != wanted and (before is not None or toolchain.known):
        made = "itself" if before is None else f"{before.name}{' with portable bits' * before.portable}"
        raise UsageError(
            f"this process has made native code for {made} already: {what} is made in a process of its own, in which "
            f"{call} comes before anything is compiled"
        )
    if wanted.portable and before is None and (what := by_numpy()):
        raise UsageError(
            f"NumPy has computed {what}, with this machine's bits: {call} comes before a model is loaded, in a "
            "process of its own"
        )
    building.choose(wanted)


def loaded(key: str, make: Callable[[], Any], *, in_vectors: bool = False, tools: Toolchain | None = None) -> int:
    """The address of the function that the key names: made earlier, in this process or another, or now.

    `make`: gives the module whose function `kernel` it is; `in_vectors`: see `Toolchain.optimised`; `tools`: those
    that the key is of (None: those of steps).
    """
    tools = tools or toolchain()
    if key not in tools.addresses:
        with set_up_lock():  # LLVM's engine and numba's compiler are one for all threads
            if key not in tools.addresses:
                tools.addresses[key] = tools.address(key, make, in_vectors=in_vectors)
    return tools.addresses[key]


def kept(key: str) -> bool:
    """Whether the function that the key names, of this process, was made earlier, here or in another."""
    return key in here().addresses or code_cache.kept(key, here().has) is not None


def compile_ir(ir: str, tools: Toolchain | None = None) -> int:
    """The address of the function `kernel` of a module given as LLVM IR, its loops in vectors.  `tools`: see
    `loaded`."""
    tools = tools or toolchain()
    ir = tools.adapted(ir)
    return loaded(tools.key(ir), lambda: tools.llvm.parse_assembly(ir), in_vectors=True, tools=tools)


@once
def _driver() -> Any:
    """`run(rows, count, threads, status)`: makes the calls of a table; the number of one that failed, or -1."""
    ir = crew.driver(threads=openmp(), flush=building.machine() is None)  # a library does not change how others round
    return ctypes.CFUNCTYPE(*(ctypes.c_int64,) * 5)(compile_ir(ir, here()))
