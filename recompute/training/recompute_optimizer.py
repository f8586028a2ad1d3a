"""Recomputation for any optimizer: `RecomputeOptimizer(Adam(1e-3)).set_checkpoints([...]).minimize(loss)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..boundary import as_names, as_texts
from ..budgets import as_budget
from ..cost import CostModel, as_cost
from ..errors import UsageError, expect
from ..language.program import Variable
from ..passes import Target
from ..passes.approximation.base import parse_permissions
from ..passes.planners import planner
from ..passes.slicing.slicing import parse_slicing
from ..planning.request import check_limits, existing
from .protocol import RecomputeWarning, WrappedOptimizer, spec_of
from .spec import Spec

__all__ = ["RecomputeOptimizer", "RecomputeWarning"]


class RecomputeOptimizer(WrappedOptimizer):
    """Wraps an optimizer: some forward values are dropped, and recomputed for the backward pass.

    There are three ways to choose them: `set_checkpoints` names the values to keep, `set_budget` and `set_strategy`
    call a planner, `set_plan` uses an existing plan.  `set_slices` has parts of the step run in slices, alone or
    together with one of the three.  Checkpoints cut the forward pass into segments (Chen et al. 2016,
    arXiv 1604.06174; Paddle's RecomputeOptimizer): the checkpoints, other values that cross a border, and all values
    after the last checkpoint are kept.  Losses and gradients are bit-identical with and without recomputation.

    `enable_offload`: checkpoints are copied to host memory until the backward pass; with a budget, the values for which
    this is faster than recomputing.  They may have any shapes.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        #: fields of the spec, and of its request to a planner, that differ from the inner optimizer's
        self._changes: dict[str, Any] = {}
        self._planning: dict[str, Any] = {}

    def set_checkpoints(self, checkpoints: Sequence[str | Variable] | str | Variable) -> RecomputeOptimizer:
        """Sets the values to keep: names, globs or Variables, in any order.  Returns self.

        A single string is one name (Paddle treats it as a list of letters).
        """
        self._changes["checkpoints"] = tuple(as_names(checkpoints, "checkpoints"))
        return self

    _set_checkpoints = set_checkpoints

    def set_budget(
        self,
        budget: str | int,
        *,
        cost: CostModel | str | None = None,
        target: Target | None = None,
        effort: float | None = None,
        seconds: float | None = None,
        progress: Callable[[Any], Any] | None = None,
        slicing: bool = True,
    ) -> RecomputeOptimizer:
        """Recomputes as much as necessary to fit a budget, at the least cost; returns self.

        `budget`: the limit on all memory that the executor allocates: `"8GiB"`, bytes, or `"60%"` of the plain
        step's peak; or `"8GiB of process"`, on what the system counts for the whole process (then planned in a copy of
        it, which calls `progress`).  `cost`: the cost model (default: this CPU's roofline; see `rc.cost.device`).
        `target`: the place where the step will run, and its kernel providers (None: this CPU); an Executor with another
        target makes a new plan within the same budget.  `effort`: how long to search (default: 1), counted in work so
        that the same call gives the same plan; or `seconds`: the time limit of the search.  `progress`: a function
        that is called with a `passes.planners.core.watch.Progress` (default: a status line on a terminal).  Ctrl-C
        ends the search with the best plan so far, if one fits.  `slicing`: whether parts of the step may run in slices
        where that is faster than recomputation (see `set_slices`).
        """
        check_limits(effort, seconds, progress)
        limits = {"effort": effort, "seconds": seconds, "progress": progress, "slicing": slicing}
        self._planning |= {"budget": as_budget(budget), **limits}
        if cost is not None:
            self._changes["cost"] = as_cost(cost)
        if target is not None:
            self._changes["target"] = expect("target", target, Target, "an rc.Target")
        return self

    def set_slices(self, slices: Sequence[str] | str) -> RecomputeOptimizer:
        """Sets the parts of the step that run in slices, so that what is inside them never exists whole; returns self.

        Each is FIRST..LAST:AXIS:PIECES: the operators from the one that makes the value FIRST to the one that makes
        LAST, and their gradients, run in PIECES slices along AXIS of FIRST.  "all:0:4" runs the whole step in 4 slices
        of the batch: gradients are accumulated, and nothing is computed twice.  Named last, it comes after
        recomputation: checkpoints and plans are those of one slice, and all slices repeat them.  UsageError for other
        texts.
        """
        self._changes["slices"] = tuple(str(parse_slicing(s)) for s in as_texts(slices, "slices"))
        return self

    def set_approximations(self, approximations: str | Sequence[str]) -> RecomputeOptimizer:
        """Permits gradients to be approximated where that saves memory; returns self.

        `approximations`: "sketch:0.2" (weight gradients from a fifth of the rows), "bits:4" (slopes of activations in 4
        bits), "store:8" (kept values in 8 bits), or several, separated by commas (see docs/approximation.md).  With a
        budget, as few are used as it takes, and only where they are faster than recomputation; without one, all that
        save memory, also between checkpoints.  The forward pass stays exact.  UsageError for other texts.
        """
        self._changes["allowed"] = tuple(map(str, parse_permissions(approximations)))
        return self

    @property
    def spec(self) -> Spec:
        """The inner optimizer's spec, with the settings of this one."""
        inner = spec_of(self.inner)
        return inner.with_(**self._changes, planning=dataclasses.replace(inner.planning, **self._planning))

    def set_strategy(self, strategy: str, **options: Any) -> RecomputeOptimizer:
        """Sets the planner, with its options (default: "auto", the best); returns self.

        Planners that ignore budgets ("chen") need none.  UsageError for unknown names and options.
        """
        planner(strategy, **options)
        self._planning |= {"strategy": strategy, "options": tuple(options.items())}
        return self

    def set_plan(self, plan: Any) -> RecomputeOptimizer:
        """Sets the plan: the path of a saved one, or a RecomputePlan by operator numbers of the plain step.

        The plain step consists of the operators of `minimize` without dead code, with normalised values recomputed.
        Returns self.
        """
        self._planning["plan"] = None if plan is None else existing(plan)
        return self

    @property
    def enable_offload(self) -> bool:
        """Whether values may be offloaded to host memory."""
        return self.spec.offload

    @enable_offload.setter
    def enable_offload(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise UsageError(f"enable_offload must be True or False, not {value!r}")
        self._changes["offload"] = value

    def set_offload(self, value: bool = True) -> RecomputeOptimizer:
        """Sets `enable_offload`; returns self."""
        self.enable_offload = value
        return self

    def _check(self) -> None:
        spec = self.spec
        if not spec.recomputes and not spec.slices and spec.micro_batches is None:
            raise UsageError(
                "RecomputeOptimizer has no checkpoints: call set_checkpoints(['name', ...]) before minimize, or "
                "set_budget('8GiB') to use a planner; "
                "candidates are outputs of layers, `[op.outputs[0].name for op in program.operators]`"
            )
