"""The Pareto frontier of one problem's plans, by peak and cost."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .problem import RematerialisationProblem
from .simulate import pruned, simulate


@dataclass(frozen=True)
class Point:
    """A plan as judged: peak in bytes (what is always there included), cost, the method that found it."""

    peak: int
    cost: float
    method: str
    sequence: array


class Frontier:
    """Keeps, of all sequences offered, those for which no other has both a lower peak and a lower cost."""

    def __init__(self, problem: RematerialisationProblem) -> None:
        self.problem = problem
        self._points: list[Point] = []
        self.starts: list[Point] = []  # the same of sequences that no search has made
        self.tried = 0
        self.refined: list[int] = []  # budgets around which more was looked for
        self.joined = False  # whether blocks were joined
        self.ended_early = False  # whether a long problem's first plan was good enough
        self.first: Point | None = None  # the lowest peak that cuts have found
        self.offer(range(len(problem)), "plain")

    def __iter__(self) -> Iterator[Point]:
        """Points from the lowest peak to the lowest cost."""
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def offer(self, sequence: Sequence[int], method: str, *, searched: bool = False) -> Point:
        """Judges a sequence; it stays if it is not beaten.  `searched`: a search has made it of others."""
        sequence = pruned(self.problem, sequence)
        outcome = simulate(self.problem, sequence)
        self.tried += 1
        point = Point(outcome.peak, outcome.cost, method, array("i", sequence))
        for points in (self._points,) if searched else (self._points, self.starts):
            _insert(points, point)
        return point

    def best(self, budget: int) -> Point | None:
        """The cheapest plan within the budget."""
        at = bisect_right(self._points, budget, key=_peak)
        return self._points[at - 1] if at else None

    @property
    def lowest(self) -> Point:
        """The plan with the lowest peak."""
        return self._points[0]


def _peak(point: Point) -> int:
    return point.peak


def _insert(points: list[Point], point: Point) -> None:
    """Adds a point that no other beats, in place of those that it beats."""
    at = bisect_right(points, point.peak, key=_peak)
    if at and points[at - 1].cost <= point.cost:
        return
    first = end = bisect_left(points, point.peak, key=_peak)
    while end < len(points) and points[end].cost >= point.cost:
        end += 1
    points[first:end] = [point]
