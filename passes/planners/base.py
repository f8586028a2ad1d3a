"""The base class of planners, and `plan`, which calls a planner by name."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import UsageError, expect, nearest
from ...language.options import Options, option_fields
from ...support.plug_ins import import_all as import_folder
from ..recomputation.recompute import RecomputePlan
from .core.problem import RematerialisationProblem
from .core.simulate import Outcome, sequence_of, simulate

#: strategy's name → class; filled by `Planner.__init_subclass__`
PLANNERS: dict[str, type[Planner]] = {}


class Planner(Options):
    """A way to choose what is kept and what runs again; its fields are its options.  A subclass registers itself.

    `strategy` is its name, from the class's name unless given (ChenSqrt → chen-sqrt).  `reference` says where the
    method was published.  `heeds_budget` is False for methods that know no budget: their plan is what it is.
    """

    strategy: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    heeds_budget: ClassVar[bool] = True
    quick: ClassVar[Mapping[str, Any] | None] = {}

    def __init_subclass__(cls, strategy: str = "", **kw: Any) -> None:
        super().__init_subclass__(**kw)
        cls.strategy = strategy or re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()
        PLANNERS[cls.strategy] = cls

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        """A plan whose reruns number the problem's nodes.

        `budget`: bytes, what is always there included.  A planner that heeds it gives its cheapest plan within, or,
        where it finds none, the one with the lowest peak that it knows.
        """
        raise NotImplementedError

    def bound(self, problem: RematerialisationProblem, budget: int) -> float | None:
        """A cost below which no plan of the method's own model within the budget exists, where it proves one.

        `bound.lower_bound` is the one that holds for any order and any number of repeats.
        """
        return None


@dataclass(frozen=True)
class Planned:
    """A plan as judged: `fits` says whether its peak is within the budget; `overhead` is cost over the plain step - 1.

    `bound` is a proven lower bound of the cost (None: no proof), `seconds` what planning took.
    """

    strategy: str
    plan: RecomputePlan
    outcome: Outcome
    plain: Outcome
    budget: int | None
    bound: float | None
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.budget is None or self.outcome.peak <= self.budget

    @property
    def overhead(self) -> float:
        """Extra cost as a share of the plain step's."""
        return self.outcome.cost / self.plain.cost - 1 if self.plain.cost else 0.0

    @property
    def gap(self) -> float | None:
        """How far the cost can be above the optimum at most, as a share of the bound."""
        return None if self.bound is None else max(0.0, self.outcome.cost / self.bound - 1) if self.bound else 0.0


def planner(strategy: str, **options: Any) -> Planner:
    """The planner of a name.  UsageError for unknown names and options, with the nearest."""
    import_all()
    cls = PLANNERS.get(expect("strategy", strategy, str, "a name such as 'auto'"))
    if cls is None:
        raise UsageError(
            f"there is no strategy '{strategy}'{nearest(strategy, PLANNERS)}; known: {', '.join(sorted(PLANNERS))}"
        )
    fields = {f.name for f in option_fields(cls)}
    for name in options:
        if name not in fields:
            raise UsageError(f"strategy '{strategy}' has no option '{name}'{nearest(name, fields)}")
    return cls(**options)


def plan(
    problem: RematerialisationProblem, *, budget: int | None = None, strategy: str = "auto", **options: Any
) -> Planned:
    """Runs a planner and judges what it gives; `options` are the planner's fields."""
    if budget is not None and budget <= 0:
        raise UsageError(f"a budget must be more than 0 bytes, not {budget}")
    chosen = planner(strategy, **options)
    problem = problem.in_two_passes
    start = time.perf_counter()
    found = chosen.plan(problem, budget=budget)
    bound = None if budget is None else chosen.bound(problem, budget)
    seconds = time.perf_counter() - start
    outcome = simulate(problem, sequence_of(problem, found))
    return Planned(strategy, found, outcome, simulate(problem, range(len(problem))), budget, bound, seconds)


def import_all() -> None:
    """Loads every planner's file, so that all have registered."""
    import_folder(f"{__package__}.methods")
    import_folder(f"{__package__}.published")
