"""Kernels run with every operand between two pages that nobody may touch, in a child process that a fault ends.

A fault is the name of the operator that made it, and the run goes on behind it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import functools
import mmap
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recompute.errors import RecomputeError
from recompute.language.ir import Operator, Value
from recompute.language.op import Op
from recompute.language.types import TensorType
from recompute.testing import Case

PAGE = mmap.PAGESIZE
#: bytes that an operand may take
ROOM = 512 * PAGE
#: seconds that one case may take
PATIENCE = 20
#: what whole numbers in attributes become
NUMBERS = (-1, 0, 1, 2, 3, 7, -(1 << 31), 1 << 40)
#: indices that no axis of a sample has
OUTSIDE = (0, -1, 1 << 62, -(1 << 62), -(1 << 63), (1 << 31) - 1, 10**6, -(10**6), 7, -8)


class Slot:
    """Memory between two guard pages."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._whole = mmap.mmap(-1, ROOM + 2 * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._whole))
        self.begin, self.end = start + PAGE, start + PAGE + ROOM
        for guard in (start, self.end):
            if libc.mprotect(guard, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, nbytes: int, at_end: bool, align: int = 1) -> int:
        """The address of an operand that ends at the guard page behind (but for what `align` leaves free), or begins
        at the one before."""
        return (self.end - nbytes) // align * align if at_end else self.begin


def array_at(address: int, t: TensorType) -> np.ndarray:
    """An array over memory that is somewhere else's."""
    raw = (ctypes.c_uint8 * t.nbytes).from_address(address)
    return np.ndarray(t.shape, t.numpy, raw)


@dataclass(frozen=True)
class Run:
    """An operator on operands.  `shared`: output → the input whose place it takes; `what`: said in failures."""

    op: Operator
    arrays: tuple[np.ndarray | None, ...]
    what: str
    shared: tuple[tuple[int, int], ...] = ()

    @property
    def whole(self) -> tuple[Any, ...]:
        """All that it is but its name."""
        arrays = (None if a is None else (a.dtype.str, a.shape, a.tobytes()) for a in self.arrays)
        return self.op, self.shared, *arrays

    @property
    def nbytes(self) -> int:
        """Bytes of the largest operand."""
        return max((v.nbytes for v in (*self.op.reads(), *self.op.writes())), default=0)


def applied(op: Op, arrays: Sequence[np.ndarray | None], want: int | None = None) -> Operator | None:
    """The operator over values of the arrays' types; None where its type rule refuses them, or they are large."""
    ins = tuple(None if a is None else Value(f"x{i}", TensorType.of(a)) for i, a in enumerate(arrays))
    try:
        types = op.infer(*(None if v is None else v.type for v in ins))
    except Exception:  # the verifier makes one error of it
        return None
    if any(t is None or t.impossible() or t.nbytes > ROOM for t in types):
        return None
    outs: list[Value | None] = [Value(f"y{i}", t) for i, t in enumerate(types[:want])]
    for i, j in enumerate(op.updates[: len(outs)]):
        outs[i] = ins[j]
    return Operator(op, ins, tuple(outs))


def in_types(case: Case, dtype: str) -> tuple[Op, tuple[np.ndarray | None, ...]]:
    """The case with its double floats as others."""
    t = TensorType(dtype).numpy
    arrays = tuple(a.astype(t) if a is not None and a.dtype == np.float64 else a for a in case.inputs)
    names = [f.name for f in dataclasses.fields(case.op) if getattr(case.op, f.name) == "f64"]
    return dataclasses.replace(case.op, **dict.fromkeys(names, dtype)), arrays


def runs_of(op: Op, arrays: Sequence[np.ndarray | None], want: int | None, kinds: Sequence[Any]) -> Iterator[Run]:
    """A sample as it is, with outputs in the places of inputs, and mutated in these ways."""
    given = tuple(arrays)
    found = applied(op, given, want)
    if found is None:
        return
    yield Run(found, given, "as it is")
    for i, v in enumerate(found.outputs):
        for j in op.overwrites(i) if v is not None and not op.updates else ():
            x = found.inputs[j] if j < len(found.inputs) else None
            if x is not None and v is not None and x.type == v.type:
                yield Run(found, given, f"output {i} in place of input {j}", ((i, j),))
    for mutated in kinds:
        yield from mutated(op, given, want)


def out_of_range(op: Op, arrays: tuple[np.ndarray | None, ...], want: int | None) -> Iterator[Run]:
    """Integers that no axis has; floats that are no place."""
    for i, a in enumerate(arrays):
        if a is None or not a.size or a.dtype == np.bool_:
            continue
        floats = a.dtype.kind == "f"
        rng = np.random.default_rng(i)
        if not floats and a.dtype.kind not in "iu":
            continue
        if floats:
            with np.errstate(all="ignore"):
                wild = rng.choice(np.array([np.nan, np.inf, -np.inf, 1e30, -1e30]).astype(a.dtype), a.shape)
        else:
            wild = rng.choice(np.array(OUTSIDE).astype(a.dtype), a.shape)
        op_ = applied(op, arrays, want)
        if op_ is not None and not (i in op.updates and floats):
            yield Run(op_, (*arrays[:i], wild, *arrays[i + 1 :]), f"input {i} out of range")


def absent(op: Op, arrays: tuple[np.ndarray | None, ...], want: int | None) -> Iterator[Run]:
    """Each input left out, where the type rule allows it; fewer outputs."""
    for i, a in enumerate(arrays):
        if a is None or i in op.updates:
            continue
        for without in ((*arrays[:i], None, *arrays[i + 1 :]), arrays[:i] if i == len(arrays) - 1 else ()):
            found = applied(op, without, want) if without else None
            if found is not None:
                yield Run(found, without, f"without input {i}")
    whole = applied(op, arrays)
    if whole is not None:
        for count in range(op.required_outputs, len(whole.outputs) + 1):
            if count != want:
                found = applied(op, arrays, count)
                assert found is not None
                yield Run(found, arrays, f"{count} outputs")


def empty(op: Op, arrays: tuple[np.ndarray | None, ...], want: int | None) -> Iterator[Run]:
    """Each size that a dimension has becomes 0: everywhere, and in one operand only."""
    present = [i for i, a in enumerate(arrays) if a is not None]
    sizes = sorted({d for i in present for d in arrays[i].shape if d})  # type: ignore[union-attr]
    for size in sizes:
        for which in (present, *([i] for i in present)):
            cut = tuple(
                a if a is None or i not in which else a[tuple(slice(0, 0 if d == size else d) for d in a.shape)].copy()
                for i, a in enumerate(arrays)
            )
            for rule in (op, _resized(op, size)):
                found = None if rule is None else applied(rule, cut, want)
                if found is not None:
                    yield Run(found, cut, f"size {size} of {which} as 0")


def attributes(op: Op, arrays: tuple[np.ndarray | None, ...], want: int | None) -> Iterator[Run]:
    """Each whole number of an attribute becomes others."""
    for f in dataclasses.fields(op):
        old = getattr(op, f.name)
        changed: list[Any] = []
        if type(old) is int:
            changed = [n for n in NUMBERS if n != old]
        elif isinstance(old, tuple) and all(type(x) is int for x in old):
            changed = [(*old[:i], n, *old[i + 1 :]) for i in range(len(old)) for n in NUMBERS if n != old[i]]
            changed += [old[:-1], (*old, 1)] if old else [(-1,), (2, 1)]
        for new in changed:
            try:
                rule = dataclasses.replace(op, **{f.name: new})
                found = applied(rule, arrays, want)
            except Exception:  # a class that checks its attributes itself
                continue
            if found is not None:
                yield Run(found, arrays, f"{f.name}={new}")


def same_memory(op: Op, arrays: tuple[np.ndarray | None, ...], want: int | None) -> Iterator[Run]:
    """The first two inputs of one type are one buffer."""
    for j, b in enumerate(arrays):
        for i, a in enumerate(arrays[:j]):
            if a is None or b is None or i in op.updates or j in op.updates or TensorType.of(a) != TensorType.of(b):
                continue
            found = applied(op, (*arrays[:j], a, *arrays[j + 1 :]), want)
            if found is not None:
                ins = (*found.inputs[:j], found.inputs[i], *found.inputs[j + 1 :])
                yield Run(dataclasses.replace(found, inputs=ins), (*arrays[:j], a, *arrays[j + 1 :]), f"{i} is {j}")
            return


def _resized(op: Op, size: int) -> Op | None:
    """The operator whose attribute `shape` has 0 in the place of a size."""
    shape = getattr(op, "shape", None)
    if not isinstance(shape, tuple) or size not in shape:
        return None
    return dataclasses.replace(op, shape=tuple(0 if d == size else d for d in shape))


class Child:
    """Runs cases one after the other in a child process; a fault is noted, and another child goes on behind it."""

    def __init__(self, run: Callable[[Run, bool], None]) -> None:
        self.run = run
        self.faults: list[str] = []
        self.at = np.frombuffer(mmap.mmap(-1, PAGE), np.int64)  # shared with the child: cases begun
        self.done = 0

    def all(self, runs: Sequence[Run]) -> list[str]:
        """What went wrong, with the operator."""
        self.at[:] = 0
        while self.at[0] < len(runs):
            begun = int(self.at[0])
            status, told = self._fork(runs, begun)
            self.faults += told
            if os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                self.faults.append(f"{name} in {describe(runs[int(self.at[0]) - 1])}")
            elif self.at[0] < len(runs) or os.WEXITSTATUS(status):
                self.faults.append(f"the child ended with {os.WEXITSTATUS(status)} after {self.at[0]} of {len(runs)}")
                break
        self.done += len(runs)
        return self.faults

    def _fork(self, runs: Sequence[Run], begin: int) -> tuple[int, list[str]]:
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.close(reader)
                faulthandler.disable()  # the parent tells what happened
                with os.fdopen(writer, "w") as out:
                    self._work(runs, begin, out)
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader) as told:
            lines = told.read().splitlines()
        return os.waitpid(pid, 0)[1], lines

    def _work(self, runs: Sequence[Run], begin: int, out: Any) -> None:
        for i in range(begin, len(runs)):
            self.at[0] = i + 1
            signal.alarm(PATIENCE)
            for at_end in (True, False):
                try:
                    self.run(runs[i], at_end)
                except Exception as e:
                    if isinstance(e, RecomputeError) and "compiler does not take" not in str(e):
                        continue  # said in one sentence
                    last = traceback.extract_tb(e.__traceback__)[-1]
                    why = f"{type(e).__name__}: {str(e)[:120]!r} at {os.path.basename(last.filename)}:{last.lineno}"
                    out.write(f"{why} in {describe(runs[i])}\n")
                    out.flush()
                    break


def describe(run: Run) -> str:
    """An operator with its types, on one line."""
    ins = ", ".join("_" if v is None else str(v.type) for v in run.op.inputs)
    outs = ", ".join("_" if v is None else str(v.type) for v in run.op.outputs)
    return f"{run.op.op} using {run.op.kernel}: ({ins}) -> ({outs}), {run.what}"


#: the types of workspace, and the calls of an operator on operands at their places; None where no kernel takes it
Bound = tuple[Sequence[TensorType], list[Any]] | None


def once_for_types(bind: Callable[..., Bound]) -> Callable[..., Bound]:
    """`bind(run, at_end, ...)` once for runs that differ in contents only: kernels are bound before there are any."""
    known: dict[tuple[Any, ...], Bound] = {}

    @functools.wraps(bind)
    def bound(run: Run, *rest: Any) -> Bound:
        key = run.op, run.shared, *rest
        if key not in known:
            known[key] = bind(run, *rest)
        return known[key]

    return bound


class Operands:
    """The buffers of one run, each in a slot of its own."""

    def __init__(self, count: int = 96, align: int = 1) -> None:
        self.slots, self.align = [Slot() for _ in range(count)], align

    def placed(self, run: Run, scratch: Sequence[TensorType], at_end: bool) -> tuple[list, list, list]:
        """Types and addresses of inputs, outputs and scratch; inputs have their contents, the others rubbish."""
        free = iter(self.slots)

        def put(t: TensorType | None) -> tuple[int, TensorType] | None:
            return None if t is None else (next(free).place(t.nbytes, at_end, self.align), t)

        types = [None if v is None else v.type for v in run.op.inputs]
        ins = [put(t) for t in types]
        for j, v in enumerate(run.op.inputs):
            if v is not None:
                ins[j] = ins[run.op.inputs.index(v)]
        shared, updates = dict(run.shared), run.op.op.updates
        outs = [
            ins[shared[i]]
            if i in shared
            else ins[updates[i]]
            if i < len(updates)
            else put(None if v is None else v.type)
            for i, v in enumerate(run.op.outputs)
        ]
        spare = [put(t) for t in scratch]
        for place in (*outs, *spare):
            if place is not None:
                ctypes.memset(place[0], 0x01 if place[1].dtype == "bool" else 0x7F, place[1].nbytes)
        for place, a in zip(ins, run.arrays, strict=True):
            if place is not None and a is not None:
                array_at(*place)[...] = a
        return ins, outs, spare

    def bound(
        self, run: Run, scratch: Sequence[TensorType], at_end: bool, op: Operator, by: Any, handed: Callable[..., Any]
    ) -> Bound:
        """What `by` makes of the operator on these buffers (`handed(address, type)`); None where they are too large."""
        if max(run.nbytes, *(t.nbytes for t in scratch), 0) > ROOM:
            return None
        placed = self.placed(run, scratch, at_end)
        return scratch, list(by.bind(op, *([None if p is None else handed(*p) for p in part] for part in placed)))
