"""A step within a budget that runs in slices, where that is faster than recomputation alone, or the only way.

Three ways are tried.  The whole step in slices of the batch, which accumulates gradients and computes nothing twice.
Regions around values that are larger than what they are made from, such as the hidden layers of a transformer's blocks.
And regions as long as they can be, which compute everything in them twice.  Of each, as few slices and regions as make
the step fit; where all of them do not, a plan recomputes values of the sliced step as of any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from ....errors import UsageError
from ...slicing.regions import Found, region_candidates
from ...slicing.slicing import ALL, Slicing
from ..core.watch import current
from ..methods.auto import SOLVED_IN_PARTS, frontier_of, quick_frontier_of
from .problem import Fitted, Fitting

#: slices of a region that are tried, in order; a slice hides at least this many bytes
_PIECES, _LEAST = (8, 32), 1 << 16
#: slices of the batch, at most
_BATCHES = 64
#: estimates of seconds and bytes are trusted to this share; those of regions, which are priced slice by slice, wholly
_TRUSTED, _EXACT = 1.03, 1.0
#: a plan that leaves this share of the budget to the arena's holes is sure to fit
_SURE = 0.95


class Sliced:
    """Steps in slices for a budget: the fastest that fits (`fits`), and the one with the lowest peak (`least`).

    Steps that take longer than `limit` are not compiled, as far as estimates tell: at first the cost of a plan from
    minimum cuts or blocks that is sure to fit.
    """

    def __init__(self, fitting: Fitting, budget: int) -> None:
        self.fitting, self.budget = fitting, budget
        self.fits: Fitted | None = None
        self.least: Fitted | None = None
        self.limit = math.inf
        self.left_out = False  # whether the limit has left something out
        self.missed: dict[tuple[str, ...], int] = {}  # slices of those that do not fit, and bytes alive
        self.ones: dict[int, tuple[float, Callable[[float], bool]]] = {}  # by the number of slices of the batch
        self.doubtful: dict[Slicing, None] = {}  # slices of the batch that may fit, if hardly anything else does
        self.dear: dict[object, float] = {}  # the extra seconds of regions of a kind, in so many slices

    @cached_property
    def long(self) -> bool:
        """Whether a step in slices is so long that only what is expected to be the answer is built."""
        return len(self.fitting.derived.problem) > SOLVED_IN_PARTS

    @cached_property
    def goal(self) -> int:
        """Live bytes whose arena is sure to fit."""
        fixed = self.fitting.derived.problem.fixed
        return fixed + int(_SURE * (self.budget - fixed))

    def quickly(self) -> None:
        """Steps in slices that recompute nothing else, before any plan is compiled.

        Where it is not known what a plan will cost, only those that no plan can beat: `beyond` looks at the others.
        """
        current().doing("slices")
        problem = self.fitting.derived.problem
        if self.fitting.bound(self.budget) < math.inf:
            sure = quick_frontier_of(problem).best(self.goal)
            quick = len(problem) <= SOLVED_IN_PARTS and not _ended()
            if sure is None and current().seconds is not None and quick:  # plans take all the time that there is
                sure = frontier_of(problem).best(self.goal)
            self.limit = self.fitting.bound(self.budget) if sure is None else sure.cost
        if self.long and self.limit < math.inf:  # a plan is found sooner than regions are built
            self.batches()
            self.left_out = True
        else:
            self._all_ways()

    def beyond(self, limit: float = math.inf) -> None:
        """Tries the ways that were left out and that estimates place within `limit` seconds, if there is time."""
        if self.left_out and not _ended():
            self.limit, self.left_out = limit, False
            self._all_ways()

    def _all_ways(self) -> None:
        self.batches()
        for wide in (False, True)[: 1 if self.long and self.limit < math.inf else 2]:
            if not _ended():
                self.regions(wide)

    def searched(self, search: Callable[[Fitting], Iterator[Fitted]]) -> None:
        """Plans for the step in slices that needs least: `search` compiles them."""
        if self.least is None or not self.least.plan.slices:
            return
        with contextlib.suppress(UsageError):
            for f in search(self.fitting.of(self.least.plan.slices)):
                self.take(f)

    def take(self, f: Fitted) -> bool:
        """Whether a step fits; it is kept if it is the best so far."""
        if self.least is None or f.peak < self.least.peak:
            self.least = f
        if f.peak > self.budget:
            return False
        cost = self.fitting.cost(f)
        if self.fits is None or cost < self.fitting.cost(self.fits):
            self.fits = f
            self.limit = min(self.limit, cost)
        return True

    def tried(self, slicings: Sequence[Slicing]) -> bool:
        """Whether the step with these slices fits.  UsageError where there is no such step."""
        slices = tuple(map(str, slicings))
        if slices in self.missed:
            return False
        found, peak = self.fitting.of(slices).unrepeated_quickly(self.budget)
        if found is None:
            self.missed[slices] = peak
            return False
        return self.take(found)

    def compile_lowest(self) -> None:
        """Compiles the one of those that do not fit that needs least, by the order that was found for it quickly."""
        if self.missed:
            least = min((peak, slices) for slices, peak in self.missed.items())
            self.take(self.fitting.of(least[1]).unrepeated)
            self.missed = {}

    def too_dear(self, seconds: float, trusted: float = _TRUSTED) -> bool:
        """Whether a step that takes so long, as estimated, is not worth compiling."""
        if seconds <= self.limit * trusted:
            return False
        self.left_out = True
        return True

    def batches(self) -> None:
        """The whole step in slices of the batch: as few as fit."""
        size = self.fitting.once.batch or 1
        pieces = 2
        while pieces <= min(size, _BATCHES) and not _ended():
            slicing = Slicing(ALL, ALL, 0, pieces)
            try:
                seconds, fits = self._one_slice(slicing)
                if self.too_dear(seconds):  # more of them take longer
                    return
                if fits(self.goal if self.long else self.budget * _TRUSTED):
                    if self.tried([slicing]):
                        return
                elif self.long:
                    self.doubtful[slicing] = None
            except UsageError:  # an operator needs the whole batch
                return
            pieces = size if pieces < size < 2 * pieces else 2 * pieces

    def in_doubt(self) -> None:
        """Tries slices of the batch of a long step of which it was not sure that they fit: where nothing else does."""
        with contextlib.suppress(UsageError):
            for slicing in self.doubtful:
                if _ended() or (self._one_slice(slicing)[1](self.budget * _TRUSTED) and self.tried([slicing])):
                    return

    def _one_slice(self, slicing: Slicing) -> tuple[float, Callable[[float], bool]]:
        """Seconds of the step in slices of the batch, and whether it is likely to fit so many bytes, as one slice
        tells; 0 and true where nothing but all slices can be planned."""
        if slicing.pieces not in self.ones:
            one = self.fitting.one_slice(str(slicing))
            fits = functools.cache(lambda within: one is None or one.fits(within))
            self.ones[slicing.pieces] = (0.0 if one is None else one.seconds), fits
        return self.ones[slicing.pieces]

    def regions(self, wide: bool) -> None:
        """Tries as few regions as fit, in the order of bytes saved for each second."""
        found = region_candidates(self.fitting.once, wide)
        found = sorted(found, key=lambda f: -f.hidden_bytes / (self._seconds(f) or 1e-12))
        if not self._affordable(found, _PIECES[0]):
            return
        found = [f for f in found if f.possible]
        for pieces in _PIECES:
            slicings = self._in_pieces(self._affordable(found, pieces), pieces)
            if slicings and not _ended() and self.tried(slicings):
                self._fewer(slicings)
                return

    def _extra_seconds(self, f: Found, pieces: int) -> float:
        """Extra seconds of so many slices of a region, the same for all regions of its kind."""
        n = self._pieces(f, pieces)
        if n < 2:
            return 0.0
        key = f.kind, n
        if key not in self.dear:
            self.dear[key] = f.extra_seconds(n, self.fitting.seconds)
        return self.dear[key]

    def _pieces(self, f: Found, pieces: int) -> int:
        return min(pieces, f.size, f.hidden_bytes // _LEAST)

    def _in_pieces(self, found: Sequence[Found], pieces: int) -> list[Slicing]:
        able = [(f.slicing, self._pieces(f, pieces)) for f in found]
        return [dataclasses.replace(s, pieces=n) for s, n in able if n > 1]

    def _affordable(self, found: Sequence[Found], pieces: int) -> Sequence[Found]:
        """The first regions that are worth their time; none if these cannot save what the step lacks."""
        if self.limit == math.inf:
            return found
        fitting = self.fitting
        seconds = sum(map(fitting.seconds, fitting.once.operators))
        lacking = fitting.peak_before - self.budget
        lacking -= 2 * max((f.hidden_bytes for f in found), default=0)  # gradients of what one region hides
        for n, f in enumerate(found):
            seconds += self._extra_seconds(f, pieces)
            if self.too_dear(seconds, _EXACT):
                return found[:n] if lacking <= 0 else ()
            lacking -= f.waiting_bytes
        return found if lacking <= 0 else ()

    def _fewer(self, slicings: Sequence[Slicing]) -> None:
        """Tries as few of the first slicings as fit."""
        low, high = 0, len(slicings)  # `low` do not fit, `high` do
        while high - low > 1 and not _ended():
            middle = (low + high) // 2
            if self.tried(slicings[:middle]):
                high = middle
            else:
                low = middle

    def _seconds(self, f: Found) -> float:
        """The time that the operators of a region take once."""
        return sum(map(self.fitting.prices, f.operators))


def _ended() -> bool:
    return current().interrupted or current().late
