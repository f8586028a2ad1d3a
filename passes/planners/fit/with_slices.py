"""A step within a budget that runs in slices, where that is faster than recomputation alone, or the only way.

Three ways are tried.  The whole step in slices of the batch, which accumulates gradients and computes nothing twice.
Regions around values that are larger than what they are made from, such as the hidden layers of a transformer's blocks.
And regions as long as they can be, which compute everything in them twice.  Of each, as few slices and regions as make
the step fit; where all of them do not, a plan recomputes values of the sliced step as of any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from ....errors import UsageError
from ...slicing.regions import Found, found_regions
from ...slicing.slicing import ALL, Slicing
from ..core.watch import current
from .problem import Fitted, Fitting

#: slices of a region that are tried, in order; a slice hides at least this many bytes
_PIECES, _LEAST = (8, 32), 1 << 16
#: slices of the batch, at most
_BATCHES = 64


class Sliced:
    """Steps in slices for a budget: the fastest that fits (`fits`), and the one with the lowest peak (`least`)."""

    def __init__(self, fitting: Fitting, budget: int) -> None:
        self.fitting, self.budget = fitting, budget
        self.fits: Fitted | None = None
        self.least: Fitted | None = None

    def quickly(self) -> None:
        """Steps in slices that recompute nothing else."""
        current().doing("slices")
        self.batches()
        for wide in (False, True):
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
        if self.fits is None or self.fitting.cost(f) < self.fitting.cost(self.fits):
            self.fits = f
        return True

    def tried(self, slicings: Sequence[Slicing]) -> bool:
        """Whether the step with these slices fits.  UsageError where there is no such step."""
        return self.take(self.fitting.of(tuple(map(str, slicings))).unrepeated)

    def batches(self) -> None:
        """The whole step in slices of the batch: as few as fit."""
        size = self.fitting.once.batch or 1
        pieces = 2
        while pieces <= min(size, _BATCHES):
            try:
                if self.tried([Slicing(ALL, ALL, 0, pieces)]):
                    return
            except UsageError:  # an operator needs the whole batch
                return
            pieces = size if pieces < size < 2 * pieces else 2 * pieces

    def regions(self, wide: bool) -> None:
        """As few regions as fit, those first that hide most for the time that they take."""
        found = found_regions(self.fitting.once, wide)
        found = sorted(found, key=lambda f: -f.hidden_bytes / (self._seconds(f) or 1e-12))
        for pieces in _PIECES:
            able = [(f.slicing, min(pieces, f.size, f.hidden_bytes // _LEAST)) for f in found]
            slicings = [dataclasses.replace(s, pieces=n) for s, n in able if n > 1]
            if slicings and self.tried(slicings):
                self._fewer(slicings)
                return

    def _fewer(self, slicings: Sequence[Slicing]) -> None:
        """As few of the first ones as fit."""
        low, high = 0, len(slicings)  # `low` do not fit, `high` do
        while high - low > 1 and not current().over:
            middle = (low + high) // 2
            if self.tried(slicings[:middle]):
                high = middle
            else:
                low = middle

    def _seconds(self, f: Found) -> float:
        """The time that the operators of a region take once."""
        return sum(map(self.fitting.prices, f.operators))
