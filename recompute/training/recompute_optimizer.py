"""Recomputation around any optimizer: `RecomputeOptimizer(Adam(1e-3)).set_checkpoints([...]).minimize(loss)`."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..budgets import Budget, parse_budget
from ..cost import CostModel
from ..errors import UsageError, nearest
from ..language.ir import Block, Operator, Role
from ..language.program import Program, Variable
from ..language.verify import verify
from ..passes import Target
from ..passes.offloading.offload import Offload, offloaded
from ..passes.planners import planner
from ..passes.recomputation.recompute import RecomputePlan, apply, plan_from_checkpoints
from ..planning.figures import interruption
from ..planning.request import Request, check_limits, request
from ..planning.step import plan_step, target_of
from .base import names_of, program_of
from .protocol import ParamsGrads, WrappedOptimizer


class RecomputeWarning(UserWarning):
    """A checkpoint that does not do what its user may expect."""


class RecomputeOptimizer(WrappedOptimizer):
    """Any optimizer, with recomputation: some forward values are dropped and computed again for the backward pass.

    Three ways to say which: `set_checkpoints` names what is kept, `set_budget` and `set_strategy` let a planner find
    it, `set_plan` takes what a planner has found before.  Checkpoints cut the forward pass into segments (Chen et al.
    2016, arXiv 1604.06174; Paddle's RecomputeOptimizer): kept are the checkpoints, what crosses a border, and
    everything after the last one.  Losses and gradients are the same bits with and without.

    `enable_offload`: checkpoints wait for the backward pass in host memory; with a budget, as many values as make the
    step faster than recomputing alone would.  They may be of any shapes.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._checkpoints: list[str | Variable] | None = None
        self._budget: Budget | None = None
        self._strategy: str | None = None
        self._options: dict[str, Any] = {}
        self._plan: Any = None
        self._cost: CostModel | None = None
        self._target: Target | None = None
        self._offload = False
        self._limits: dict[str, Any] = {}

    def around(self, optimizer: Any) -> RecomputeOptimizer:
        """The same recomputation around another optimizer."""
        other = copy.copy(self)
        other.inner = optimizer
        return other

    def set_checkpoints(self, checkpoints: Sequence[str | Variable] | str | Variable) -> RecomputeOptimizer:
        """Sets what is kept: names, globs or Variables, in any order.  Returns self.

        A single string is one name (Paddle takes it for a list of letters).
        """
        if isinstance(checkpoints, (str, Variable)):
            checkpoints = [checkpoints]
        if not isinstance(checkpoints, Iterable):
            raise UsageError(f"checkpoints must be a list of names or Variables, not {checkpoints!r}")
        found = list(checkpoints)
        for c in found:
            if not isinstance(c, (str, Variable)):
                raise UsageError(f"a checkpoint must be a name or a Variable, not {c!r}")
        self._checkpoints = found
        return self

    _set_checkpoints = set_checkpoints

    def set_budget(
        self,
        budget: str | int,
        *,
        cost: CostModel | None = None,
        target: Target | None = None,
        effort: float | None = None,
        seconds: float | None = None,
        progress: Callable[[Any], Any] | None = None,
    ) -> RecomputeOptimizer:
        """Recomputes as much as it takes for the step to fit, at the least cost; returns self.

        `budget`: all that the executor allocates, `"8GiB"`, bytes, or `"60%"` of what the plain step takes.  `cost`:
        what operators are priced by (this CPU's roofline; see `rc.cost.device`).  `target`: where the step will run,
        and whose kernels will run it (None: this machine's processor); an Executor elsewhere plans again within the
        same budget.  `effort`: how long planning searches
        beside its default, 1, counted so that the same call gives the same plan; or `seconds`: it ends when they have
        passed and a plan fits.  `progress`: a function that hears of it (`passes.planners.watch.Progress`); without
        one a terminal shows a line.  Ctrl-C takes the best plan so far, where one fits.
        """
        check_limits(effort, seconds, progress)
        self._budget, self._cost, self._target = parse_budget(budget), cost or self._cost, target or self._target
        self._limits = {"effort": effort, "seconds": seconds, "progress": progress}
        return self

    def set_strategy(self, strategy: str, **options: Any) -> RecomputeOptimizer:
        """The planner that finds what runs again, with its options (default: "auto", the best); returns self.

        Those that know no budget ("chen") need none.  UsageError for names and options that do not exist.
        """
        planner(strategy, **options)
        self._strategy, self._options = strategy, options
        return self

    def set_plan(self, plan: Any) -> RecomputeOptimizer:
        """The path of a plan that was saved, or a RecomputePlan that numbers the plain step's operators; returns self.

        Such a step's operators: those of `minimize` without dead code, with normalised values made again.
        """
        self._plan = request(plan=plan).plan  # type: ignore[union-attr]
        return self

    @property
    def enable_offload(self) -> bool:
        """Whether values may wait in host memory."""
        return self._offload

    @enable_offload.setter
    def enable_offload(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise UsageError(f"enable_offload must be True or False, not {value!r}")
        self._offload = value

    def set_offload(self, value: bool = True) -> RecomputeOptimizer:
        """Sets `enable_offload`; returns self."""
        self.enable_offload = value
        return self

    @property
    def request(self) -> Request | None:
        """What a planner is asked for; None where checkpoints say it.  UsageError where several say it."""
        found = request(self._budget, self._strategy, self._options, self._plan, offload=self._offload, **self._limits)
        if found is not None and self._checkpoints:
            raise UsageError(
                "checkpoints say what is kept, and a budget, strategy or plan says it too: give one of them (with "
                "set_checkpoints alone, `--memory-budget` on the command line or rc.estimate says whether it fits)"
            )
        return found

    def _backward(self, loss: Variable, *options: Any) -> ParamsGrads:
        """The inner optimizer's backward pass, then the recomputation of what is dropped.

        `program.plan` is the plan that was applied; what a user should know about the checkpoints is warned about
        (RecomputeWarning).  UsageError without checkpoints, or for names that are not in the program.  A planner works
        on the whole step: with a budget, strategy or plan the recomputation comes with `apply_gradients`.
        """
        if self.request is not None:
            return self.inner.backward(loss, *options)
        if not self._checkpoints:
            raise UsageError(
                "RecomputeOptimizer has no checkpoints: call set_checkpoints(['name', ...]) before minimize, or "
                "set_budget('8GiB') to have them found; "
                "candidates are outputs of layers, `[op.outputs[0].name for op in program.operators]`"
            )
        program = program_of(loss)
        names = _checkpoint_names(program, self._checkpoints)
        params_grads = self.inner.backward(loss, *options)
        plan = plan_from_checkpoints(program.block, names, loss.name)
        block = apply(program.block, plan)
        if self._offload:
            block, plan = _offload_checkpoints(block, plan)
        program.block, program.plan = verify(block), plan
        for note in plan.notes:
            warnings.warn(note, RecomputeWarning, stacklevel=3)
        return params_grads

    def apply_gradients(self, params_grads: Sequence[tuple[Variable, Variable]]) -> list[Operator]:
        """The inner optimizer's; then, with a budget, strategy or plan, the recomputation of what is dropped.

        `program.plan` is the plan that was applied, `program.planned` has its figures (`PlanFigures`).
        """
        pairs = list(params_grads)
        found = self.inner.apply_gradients(pairs)
        return self._planned(pairs[0][0].program) or found

    def apply_optimize(
        self, loss: Variable, startup_program: Program | None, params_grads: Sequence[tuple[Variable, Variable]]
    ) -> list[Operator]:
        """`apply_gradients`, with Paddle's arguments."""
        found = self.inner.apply_optimize(loss, startup_program, params_grads)
        return self._planned(loss.program) or found

    def _planned(self, program: Program) -> list[Operator]:
        """Carries out what a planner is asked for; gives the optimizer's operators then."""
        wanted = self.request
        if wanted is None:
            return []
        target = self._target or Target()
        if self._cost is not None:
            target = dataclasses.replace(target, cost=self._cost)
        plan_step(program, wanted, target_of(target), apart=True)
        verify(program.block)
        if program.planned.interrupted:
            warnings.warn(interruption(program.planned), RecomputeWarning, stacklevel=4)
        return [o for o in program.operators if o.role is Role.OPTIMIZE]


def _offload_checkpoints(block: Block, plan: RecomputePlan) -> tuple[Block, RecomputePlan]:
    """Has the checkpoints of a plan wait in host memory; those that nothing needs later stay, and the notes say so."""
    block = Offload(plan.checkpoints, tight=True).run(block)
    moved = offloaded(block)
    notes = [
        f"checkpoint '{n}' is not moved to the host: nothing needs it after the forward pass, or it is there to stay"
        for n in plan.checkpoints
        if n not in moved
    ]
    useless = {f"checkpoint '{n}' saves nothing" for n in moved}  # moved, it does
    kept = [note for note in plan.notes if note.partition(":")[0] not in useless]
    return block, dataclasses.replace(plan, offloads=moved, notes=(*kept, *notes))


def _checkpoint_names(program: Program, checkpoints: Sequence[str | Variable]) -> list[str]:
    """The values that names, globs (among forward values and aliases) and Variables stand for."""
    values = program.block.values()
    forward = [v.name for o in program.operators if o.role in (Role.FORWARD, Role.LOSS) for v in o.writes()]
    found: list[str] = []
    for name in names_of(program, checkpoints, "checkpoints"):
        matches = [name] if name in values else fnmatch.filter(forward, name)
        if not matches:
            matches = [program.aliases[a] for a in fnmatch.filter(program.aliases, name)]
        if not matches:
            raise UsageError(f"there is no value '{name}' to checkpoint{nearest(name, [*forward, *program.aliases])}")
        found += matches
    return list(dict.fromkeys(found))
