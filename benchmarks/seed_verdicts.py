"""What a row of the seeds' tables came to, and what is said about it."""

from __future__ import annotations

import math
from dataclasses import dataclass

MB = 10**6


@dataclass(frozen=True)
class Result:
    """A row's outcome, in bytes and shares; all bytes but `persistent` count what the paper counts.

    `instead`: for a miss, the extra time that the published bytes take here (None: no plan found) and its bound.
    """

    table: str
    network: str
    batch: int
    published_regular: float
    published_best: float
    published_overhead: float | None
    allowed_overhead: float
    plain: int
    default: int
    peak: int
    persistent: int
    overhead: float
    bound: int
    reruns: int
    fullest: str
    seconds: float
    instead: tuple[float | None, float] | None
    note: str

    @property
    def gap(self) -> float:
        """How far the peak is above the bound."""
        return self.peak / self.bound - 1

    @property
    def ratios(self) -> tuple[float, float]:
        """Peak over plain peak: theirs, ours."""
        return self.published_best / self.published_regular, self.peak / self.plain

    @property
    def verdict(self) -> str:
        """`MISS`: not below the published best; then what is known about the ratio."""
        theirs, ours = self.ratios
        if self.peak >= self.published_best or self.overhead > self.allowed_overhead:
            return "MISS (proven)" if self.bound >= self.published_best else "MISS"
        if ours <= theirs:
            return "below"
        return "below; ratio proven out of reach" if self.bound / self.plain > theirs else "below, ratio above"

    @property
    def remarks(self) -> list[str]:
        """Why a row misses, and what a note says."""
        said = [self.note] if self.note else []
        if self.instead is not None:
            ours, proven = self.instead
            least = "no schedule fits their bytes" if math.isinf(proven) else f"their bytes take {proven:+.1%} or more"
            more = "" if ours is None else f", ours {ours:+.1%}"
            said.append(f"missed: {least} (proven){more}")
        if self.verdict != "below":
            said.append(f"fullest at {self.fullest}")
        return said


@dataclass(frozen=True)
class BatchResult:
    """The largest batches, and bytes of ours; `bound` is at the published batch, `bound_batch` what it comes to."""

    table: str
    network: str
    memory: int
    published_regular: int
    published_best: int
    published_overhead: float | None
    allowed_overhead: float
    plain: int
    default: int
    batch: int
    peak: int
    overhead: float
    bound: int
    bound_batch: int
    fullest: str
    seconds: float
    note: str

    @property
    def verdict(self) -> str:
        """`MISS`: a smaller batch than the published one."""
        if self.batch >= self.published_best:
            return "larger" if self.batch > self.published_best else "as large"
        return "MISS (proven)" if self.bound > self.memory else "MISS"

    @property
    def remarks(self) -> list[str]:
        """Why a row misses, and what a note says."""
        said = [self.note] if self.note else []
        return said + ([f"fullest at {self.fullest}"] if self.verdict.startswith("MISS") else [])


@dataclass(frozen=True)
class ChainResult:
    """Costs relative to a plain step; `cost` is the better one's, `peak` a share of the plain peak."""

    table: str
    network: str
    published: float
    share: float
    gruslys: float
    auto: float
    cost: float
    peak: float
    bound: float
    seconds: float
    note: str

    @property
    def verdict(self) -> str:
        """`MISS`: dearer than what was published."""
        return "as good" if round(self.cost, 2) <= self.published else "MISS"

    @property
    def remarks(self) -> list[str]:
        """What a note says."""
        return [self.note] if self.note else []


@dataclass(frozen=True)
class GraphResult:
    """The largest batches on a published graph; `at_best` is the extra time at theirs, `bound` what any plan takes."""

    table: str
    network: str
    published_best: int
    published_overhead: float | None
    allowed_overhead: float
    plain: int
    batch: int
    overhead: float
    at_best: float
    bound: float
    seconds: float

    @property
    def verdict(self) -> str:
        """`MISS`: a smaller batch than the published one."""
        if self.batch >= self.published_best:
            return "larger" if self.batch > self.published_best else "as large"
        return "MISS (proven)" if self.bound > self.allowed_overhead else "MISS"

    @property
    def remarks(self) -> list[str]:
        """What their batch takes, for a miss."""
        if not self.verdict.startswith("MISS"):
            return []
        return [f"batch {self.published_best} takes {self.bound:+.1%} or more (proven), ours {self.at_best:+.1%}"]
