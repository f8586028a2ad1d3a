"""Measured costs: each distinct operator is timed on this machine once, and its time is stored in a file."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from .cost import CostModel, is_view, this_cpu
from .errors import JobError, UsageError
from .language.ir import Free, Operator, Value
from .language.text import show_attribute
from .language.types import TensorType, Types
from .runtime.cpu.session import ALIGNMENT, Arena
from .support.cache import is_own, make_private
from .support.files import apart, cache_folder, machine, regular, replacing

__all__ = ["Profile", "default_path", "measured_seconds", "signature"]

#: time limit and number limit of the timed runs of an operator
_BUDGET, _MOST_RUNS = 0.1, 25
#: an operator that takes longer than this is timed once
_LONG = 1.0
#: seconds of measuring after which the file is written, in case the process is killed
_SAVE_EVERY = 10.0
#: beginning of the file; a file with another beginning is not treated as a damaged profile, and never replaced
_MARK = '{"profile": 1,'
_LARGEST_FILE = 1 << 26
#: number of random elements; larger arrays repeat them
_DRAWN = 1 << 16


class Profile:
    """A cost model that measures each operator on this machine when it is first needed.

    Operators with the same signature (class, attributes without the seed, types) take the same time.  `path`: the file
    of times (None: in the user's cache folder, by machine).  Operators with more than `limit` bytes of operands and
    scratch (default 2 GiB, at most half the memory), or that cannot run in isolation, are not measured: they get the
    time of `fallback` (this CPU's roofline), scaled by the ratio of measured to fallback time of operators of that
    class.  `skipped`: the reasons, by signature.  `progress` is called with a line before each measurement, `warn` with
    warnings.

    Times are written by `save`, by `measure` (which compiling a step calls), and at the end of a `with` block.
    UsageError if `path` is another kind of file, or has times of another machine.
    """

    name = "measured on this CPU"

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        fallback: CostModel | None = None,
        limit: int | None = None,
        progress: Callable[[str], None] = lambda text: None,
        warn: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=3),
    ) -> None:
        self.path = default_path() if path is None else Path(path)
        self.fallback = fallback or this_cpu()
        self.limit = min(2 << 30, this_cpu().memory // 2 or 2 << 30) if limit is None else limit
        self.progress, self.warn = progress, warn
        self.skipped: dict[str, str] = {}
        self.measured = 0
        self._known: dict[str, tuple[float, float]] = {}  # signature → seconds measured, seconds by the fallback
        self._scaled: dict[str, float] = {}
        self._unsaved, self._since_saved = False, 0.0
        self._in_cache = path is None
        self._load()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.save()

    def seconds(self, operator: Operator) -> float:
        """Measured time of one operator; frees, views, copies to the host and back and communication take none."""
        if _free(operator):
            return 0.0
        key = signature(operator)
        if key not in self._known and key not in self.skipped:
            self._measure(key, operator)
        if key in self._known:
            return self._known[key][0]
        if key not in self._scaled:
            self._scaled[key] = self.fallback.seconds(operator) * self._ratio(operator.op.name)
        return self._scaled[key]

    def measure(self, operators: Iterable[Operator]) -> None:
        """Measures all unknown operators, and saves; after this, times do not depend on the order of requests."""
        real = (op for op in operators if not _free(op))
        distinct = {signature(op): op for op in real}
        for key, operator in distinct.items():
            if key not in self._known and key not in self.skipped:
                self._measure(key, operator)
        self.save()

    def _measure(self, key: str, operator: Operator) -> None:
        self.measured += 1
        self.progress(f"measuring operator {self.measured}: {key if len(key) < 50 else key[:49] + '…'}")
        start = time.perf_counter()
        try:
            seconds = measured_seconds(operator, self.limit)
        except JobError as e:
            self.skipped[key] = str(e)
        else:
            self._known[key] = _rounded(seconds), _rounded(self.fallback.seconds(operator))
            self._unsaved = True
        self._since_saved += time.perf_counter() - start
        if self._since_saved > _SAVE_EVERY:
            self.save()

    def _ratio(self, kind: str) -> float:
        """Ratio of measured to fallback time for a class of operators, or for all; 1 if nothing was measured."""
        off = {key: s / f for key, (s, f) in self._known.items() if f}
        same = [r for key, r in off.items() if key.partition("(")[0] == kind]
        return statistics.median(same or off.values() or [1.0])

    # -- the file -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes the times, merged with those that other processes have written since.  A failure is a warning."""
        if self.path is None or not self._unsaved:
            return
        self._unsaved, self._since_saved = False, 0.0
        try:
            with contextlib.suppress(FileNotFoundError, ValueError):  # damaged files are replaced
                self._known = {**_read(self.path)[1], **self._known}
            if self._in_cache:
                make_private(self.path.parent)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with apart(), replacing(self.path) as temporary:
                rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(self._known.items()))
                head = f'{_MARK} "machine": {json.dumps(machine()[0])}, "seconds": {{'
                temporary.write_text(f"{head}\n{rows}\n}}}}\n")
        except OSError as e:
            self.warn(f"measured times are not kept: cannot write '{self.path}': {e}")

    def _load(self) -> None:
        if self.path is None or not self.path.exists():
            return
        try:
            made_on, self._known = _read(self.path)
        except _NoProfile:
            if not self._in_cache:
                raise UsageError(f"'{self.path}' is not a profile: give another file, or remove it") from None
            self.warn(f"'{self.path}' is no profile: operators are measured again")
        except (OSError, ValueError) as e:
            self.warn(f"the profile '{self.path}' is damaged ({e}): operators are measured again")
        else:
            if made_on != machine()[0]:
                raise UsageError(
                    f"'{self.path}' has times of another machine ({made_on}; this is {machine()[0]}): give another file"
                )


class _NoProfile(ValueError):
    """The file is not a profile."""


def default_path() -> Path | None:
    """The file of this machine in the user's cache folder; None if there is none, or if others can write to it."""
    folder = cache_folder()
    path = None if folder is None else folder / f"profile-{machine()[1]}.json"
    return path if path is not None and is_own(path) else None


def _read(path: Path) -> tuple[str, dict[str, tuple[float, float]]]:
    """The machine and the times of a file.  ValueError with what is wrong in it."""
    with open(regular(path), "rb") as f:
        raw = f.read(_LARGEST_FILE + 1)
    if raw and not raw.startswith(_MARK.encode()):
        raise _NoProfile("it begins otherwise")
    if len(raw) > _LARGEST_FILE:
        raise ValueError("it is too large")
    content: Any = json.loads(raw)
    if not isinstance(content.get("machine"), str) or not isinstance(content.get("seconds"), dict):
        raise ValueError("parts are missing")
    return content["machine"], {key: _pair(key, x) for key, x in content["seconds"].items()}


def _pair(key: str, x: Any) -> tuple[float, float]:
    if isinstance(x, list) and len(x) == 2 and all(type(n) in (int, float) and 0 < n < math.inf for n in x):
        return float(x[0]), float(x[1])
    raise ValueError(f"no times of {key!r}")


def _rounded(x: float) -> float:
    return float(f"{max(x, 1e-9):.3g}")


# -- measuring --------------------------------------------------------------------------------------------------------


def _free(operator: Operator) -> bool:
    """Whether an operator takes no time of the device."""
    op = operator.op
    return isinstance(op, Free) or op.copies or bool(op.communicates) or is_view(operator)


def signature(operator: Operator) -> str:
    """The signature of an operator, on which its time depends: class, types of operands, attributes."""
    attributes = operator.op.attributes()
    if operator.op.random:
        attributes.pop("seed", None)
    ins, outs = (", ".join("_" if v is None else str(v.type) for v in vs) for vs in (operator.inputs, operator.outputs))
    options = ", ".join(f"{k}={show_attribute(v)}" for k, v in attributes.items())
    return f"{operator.op.name}({ins}) -> {outs}" + (f" {{{options}}}" if options else "")


def measured_seconds(operator: Operator, limit: int) -> float:
    """Median time of an operator.  JobError if it takes more than `limit` bytes or cannot run in isolation.

    Floats are between 0.5 and 1.  Integers may be indices: they are as large as the numerics accept, found by trial,
    and one number everywhere where some below it are refused.
    """
    ins, outs, scratch = _bind(operator, limit)
    draw = np.random.default_rng(0)
    for v, array in zip(operator.inputs, ins, strict=True):
        if v is not None and v.type.is_float:
            _repeat(array, draw.uniform(0.5, 1.0, _DRAWN))
        elif v is not None and v.dtype == "bool":
            _repeat(array, draw.random(_DRAWN) < 0.5)
    whole = [a for v, a in zip(operator.inputs, ins, strict=True) if v is not None and v.dtype[0] in "iu"]

    def run() -> float:
        start = time.perf_counter()
        operator.op.compute(ins, outs, scratch)
        return time.perf_counter() - start

    error: Exception | None = None
    bounds = list(_bounds(operator)) if whole else [1]
    with np.errstate(all="ignore"):
        for bound, alike in [*((b, False) for b in bounds), *((b, True) for b in bounds)]:
            for array in whole:
                top = min(bound, int(ml_dtypes.iinfo(array.dtype).max))
                drawn = draw.integers(top - 1 if alike else 0, top, _DRAWN)
                drawn[0] = top - 1
                _repeat(array, drawn)
            try:
                first = run()
            except Exception as e:
                error = e
                continue
            if first > _LONG:
                return first
            return statistics.median(run() for _ in range(max(3, min(_MOST_RUNS, int(_BUDGET / max(first, 1e-9))))))
    raise JobError(f"it cannot run in isolation: {type(error).__name__}: {error}")


def _bounds(operator: Operator) -> Iterator[int]:
    """Possible upper bounds of an index, the largest first: sizes of operands, of trailing dimensions, of axes; 1."""
    bounds = {1}
    for v in (*operator.reads(), *operator.writes()):
        bounds.update(v.shape)
        bounds.update(math.prod(v.shape[i:]) for i in range(v.ndim))
    return iter(sorted(bounds - {0}, reverse=True))


def _repeat(array: np.ndarray, drawn: np.ndarray) -> None:
    """Fills an array by repeating the random numbers."""
    flat, some = array.reshape(-1), drawn.astype(array.dtype)
    whole = flat.size // some.size * some.size
    flat[:whole].reshape(-1, some.size)[...] = some
    flat[whole:] = some[: flat.size - whole]


def _bind(operator: Operator, limit: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Inputs, outputs and scratch in one arena of zeros, as the executor binds them; updated state is its input."""
    types = operator.types
    needed: list[list[TensorType | None]] = [*map(list, types), [*operator.op.scratch(*types)]]
    for i in range(min(len(operator.op.updates), len(operator.outputs))):
        needed[1][i] = None  # has no buffer of its own
    total = sum(_aligned(t) for ts in needed for t in ts)
    if total > limit:
        raise JobError(f"it takes {total:,} bytes, more than {limit:,}")
    try:
        arena = Arena(total)
        arena.bytes()[...] = 0  # the caches are as warm for the first run as for later ones
    except MemoryError:
        raise JobError(f"not enough memory for its {total:,} bytes") from None
    at, bound = 0, []
    for ts in needed:
        bound.append([None if t is None else arena.at(at_t, Value("", t)) for t, at_t in _places(ts, at)])
        at += sum(map(_aligned, ts))
    ins, outs, scratch = bound
    for i, source in enumerate(operator.op.updates[: len(outs)]):
        outs[i] = ins[source] if operator.outputs[i] is not None else None
    return ins, outs, scratch


def _places(types: Types, at: int) -> Iterator[tuple[TensorType | None, int]]:
    for t in types:
        yield t, at
        at += _aligned(t)


def _aligned(t: TensorType | None) -> int:
    return 0 if t is None else -(-t.nbytes // ALIGNMENT) * ALIGNMENT
