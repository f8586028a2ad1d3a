"""Limits and progress of planning: counted work, a time limit, interrupts, progress reports.

Planners ask `current()` whether to go on and tell it what they do.  Work is counted in steps of the search, in units
of about a second of one core, so that the same call ends at the same place on any machine; a deadline is by the clock.
Outside of `watching` nothing ends early and nobody listens.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ....errors import UsageError


class OutOfTime(UsageError):
    """The time limit has passed inside of a method: what it has not finished is left out."""


#: units of work that planning takes by default, at most
WORK = 20.0
#: work of compiling a plan, and for each of its operators
_COMPILED = (0.8, 1e-3)
#: seconds between two calls of the listener while a search goes on
_TICK = 0.2


@dataclass(frozen=True)
class Progress:
    """Progress of planning: `seconds` since it began, what it is `doing`, how many `plans` were compiled.

    Of the best plan that fits so far (None: none yet): `overhead`, its extra time as a share of the plain step's, and
    `gap`, how far it can be above the optimum at most, as a share of the bound.
    """

    seconds: float
    doing: str
    plans: int
    overhead: float | None = None
    gap: float | None = None

    def __str__(self) -> str:
        best = "no plan that fits yet" if self.overhead is None else f"best {self.overhead:+.2%} time"
        gap = "" if self.gap is None else f", at most {self.gap:.2%} above the optimum"
        return f"planning, {self.seconds:.0f} s: {best}{gap} ({self.doing})"


class Watch:
    """The limits and the progress of one call of a planner.

    `effort`: 1 is what planning takes by default, `work` at most; 2 goes on for as much again.  `seconds`: it goes on
    until then instead.  Neither ends it before there is a plan that fits.  `tell` hears of progress; what it raises
    ends planning, as an interrupt does.  `judge` gives overhead and gap of a compiled plan.
    """

    def __init__(
        self,
        *,
        effort: float = 1.0,
        seconds: float | None = None,
        work: float = math.inf,
        tell: Callable[[Progress], Any] | None = None,
    ) -> None:
        self.effort, self.seconds, self.tell = effort, seconds, tell
        self.judge: Callable[[Any], tuple[float, float | None]] | None = None
        self.begun = self._told = time.monotonic()
        self.work = 0.0
        self.plans = 0
        self.found = False  # whether some plan fits
        self.interrupted = self.timed_out = False
        self._one = self._limit = math.inf if seconds is not None else work * min(1.0, effort)
        self._doing = ""
        self._best: tuple[float, float | None] | tuple[()] = ()

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.begun

    # -- how long ----------------------------------------------------------------------------------------------------

    @property
    def searches_on(self) -> bool:
        """Whether the limits exceed the default effort."""
        return self.seconds is not None or self.effort > 1

    def spend(self, units: float) -> None:
        """Counts work, in units of about a second."""
        self.work += units

    def allow_more(self) -> None:
        """Marks the end of the default planning: an effort beyond it goes on in proportion to the default's work."""
        if self.seconds is None:
            self._limit = self.work * max(1.0, self.effort)

    def begin_another(self, share: float = 1.0) -> None:
        """A search of another step begins, which may take as much work as the first one, or a share of that."""
        self._limit = self.work + share * self._one

    def grant(self, units: float) -> None:
        """Allows so much more work than by default."""
        self._limit += units

    @property
    def left(self) -> float:
        """Seconds to the deadline; infinite without one, and before there is a plan that fits."""
        if self.seconds is None or not self.found:
            return math.inf
        return self.begun + self.seconds - time.monotonic()

    @property
    def late(self) -> bool:
        """Whether the deadline has passed, also where no plan fits yet: then what is sure to fit comes first."""
        return self.seconds is not None and time.monotonic() >= self.begun + self.seconds

    @property
    def over(self) -> bool:
        """Whether planning ends with the best plan so far."""
        if self.left <= 0:
            self.timed_out = True
        return self.found and (self.timed_out or self.work >= self._limit)

    def tick(self) -> bool:
        """Whether the deadline has passed; reports progress from time to time.  For inner loops of searches."""
        now = time.monotonic()
        if self.tell is not None and now - self._told >= _TICK:
            self._say(now)
        if self.seconds is not None and self.found and now >= self.begun + self.seconds:
            self.timed_out = True
        return self.timed_out

    def check(self) -> None:
        """`tick`, for methods whose half is of no use.  OutOfTime where the deadline has passed."""
        if self.tick():
            raise OutOfTime("planning reached its time limit")

    def take_interrupt(self, found: bool) -> bool:
        """Whether an interrupt ends planning with what there is: there must be something."""
        self.interrupted = found
        return found

    # -- where it stands ---------------------------------------------------------------------------------------------

    def doing(self, what: str) -> None:
        """Says what comes next."""
        self._doing = what
        self._say(time.monotonic())

    def compiled(self, size: int, whole: bool = True) -> None:
        """A plan of so many operators has been compiled, or just far enough to see that it does not fit."""
        self.plans += 1
        self.spend((_COMPILED[0] + _COMPILED[1] * size) * (1.0 if whole else 0.4))

    def best(self, found: Any) -> None:
        """The best compiled plan so far that fits, None where none does."""
        self.found = found is not None
        if found is not None and self.judge is not None and self.tell is not None:
            self._best = self.judge(found)
        self._say(time.monotonic())

    def _say(self, now: float) -> None:
        self._told = now
        if self.tell is not None:
            self.tell(Progress(now - self.begun, self._doing, self.plans, *self._best))


_current: ContextVar[Watch | None] = ContextVar("planning", default=None)


def current() -> Watch:
    """The watch that planning is under; one without limits where there is none."""
    return _current.get() or Watch()


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[Watch]:
    """Planning within is under this watch."""
    token = _current.set(watch)
    try:
        yield watch
    finally:
        _current.reset(token)


def interruptible(solve: Callable[[], Any], stop: Callable[[], Any]) -> Any:
    """The result of `solve`; on Ctrl-C `stop` is called, and KeyboardInterrupt raised when `solve` has ended.

    A solver's own code does not see Python's signals: it runs in a thread of its own, and this one waits for it.
    """
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(solve())
        except BaseException as e:  # handed to the thread that waits
            errors.append(e)

    worker = threading.Thread(target=run, name="solver", daemon=True)
    worker.start()
    try:
        while worker.is_alive():
            worker.join(0.05)
            current().tick()
    except BaseException:
        stop()
        worker.join(2.0)
        raise
    if errors:
        raise errors[0]
    return found[0]
