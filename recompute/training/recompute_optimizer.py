"""Recomputation for any optimizer: `RecomputeOptimizer(Adam(1e-3)).set_checkpoints([...]).minimize(loss)`."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ..boundary import as_names, as_texts
from ..budgets import Budget, as_budget
from ..cost import CostModel, as_cost
from ..errors import UsageError, expect, nearest
from ..language.ir import Block, Operator, Role
from ..language.program import Program, Variable
from ..language.verify import verify
from ..passes import Target
from ..passes.approximation.approximate import Approximate, permitted_choices
from ..passes.approximation.base import parse_permissions
from ..passes.offloading.offload import Offload, offloaded
from ..passes.planners import planner
from ..passes.recomputation.recompute import RecomputePlan, apply, plan_from_checkpoints
from ..passes.sequence import cleaned
from ..passes.slicing.open_means import open_means
from ..passes.slicing.slicing import Slice, parse_slicing, whole_last
from ..planning.figures import interruption
from ..planning.request import Request, check_limits, request
from ..planning.step import plan_step, target_of
from .base import begin_training, names_of, program_of
from .merge import Merge
from .origin import held, origin_of
from .pipeline import own_pairs
from .protocol import ParamsGrads, WrappedOptimizer


class RecomputeWarning(UserWarning):
    """A checkpoint may not have the expected effect."""


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
        self._checkpoints: list[str | Variable] | None = None
        self._budget: Budget | None = None
        self._strategy: str | None = None
        self._options: dict[str, Any] = {}
        self._plan: Any = None
        self._cost: CostModel | None = None
        self._target: Target | None = None
        self._offload = False
        self._limits: dict[str, Any] = {}
        self._slices: tuple[str, ...] = ()
        self._allowed: tuple[str, ...] = ()
        self._merge: Merge | None = None
        self._parallel: Any = None
        self._later = False
        if isinstance(optimizer, RecomputeOptimizer) and not optimizer.recomputes:  # slices come after recomputation
            self.__dict__.update(optimizer.__dict__)

    def around(self, optimizer: Any) -> RecomputeOptimizer:
        """The same recomputation for another optimizer."""
        other = copy.copy(self)
        other.inner = optimizer
        return other

    def set_checkpoints(self, checkpoints: Sequence[str | Variable] | str | Variable) -> RecomputeOptimizer:
        """Sets the values to keep: names, globs or Variables, in any order.  Returns self.

        A single string is one name (Paddle treats it as a list of letters).
        """
        self._checkpoints = as_names(checkpoints, "checkpoints")
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
        step's peak.  `cost`: the cost model (default: this CPU's roofline; see `rc.cost.device`).  `target`: the place
        where the step will run, and its kernel providers (None: this CPU); an Executor with another target makes a
        new plan within the same budget.  `effort`: how long to search (default: 1), counted in work so that the same
        call gives the same plan; or `seconds`: the time limit of the search.  `progress`: a function that is called
        with a `passes.planners.core.watch.Progress` (default: a status line on a terminal).  Ctrl-C ends the search
        with the best plan so far, if one fits.  `slicing`: whether parts of the step may run in slices where that is
        faster than recomputation (see `set_slices`).
        """
        check_limits(effort, seconds, progress)
        self._budget = as_budget(budget)
        self._cost = self._cost if cost is None else as_cost(cost)
        self._target = self._target if target is None else expect("target", target, Target, "an rc.Target")
        self._limits = {"effort": effort, "seconds": seconds, "progress": progress, "slicing": slicing}
        return self

    def set_slices(self, slices: Sequence[str] | str) -> RecomputeOptimizer:
        """Sets the parts of the step that run in slices, so that what is inside them never exists whole; returns self.

        Each is FIRST..LAST:AXIS:PIECES: the operators from the one that makes the value FIRST to the one that makes
        LAST, and their gradients, run in PIECES slices along AXIS of FIRST.  "all:0:4" runs the whole step in 4 slices
        of the batch: gradients are accumulated, and nothing is computed twice.  Named last, it comes after
        recomputation: checkpoints and plans are those of one slice, and all slices repeat them.  UsageError for other
        texts.
        """
        self._slices = tuple(str(parse_slicing(s)) for s in as_texts(slices, "slices"))
        return self

    def set_approximations(self, approximations: str | Sequence[str]) -> RecomputeOptimizer:
        """Permits gradients to be approximated where that saves memory; returns self.

        `approximations`: "sketch:0.2" (weight gradients from a fifth of the rows), "bits:4" (slopes of activations in 4
        bits), "store:8" (kept values in 8 bits), or several, separated by commas (see docs/approximation.md).  With a
        budget, as few are used as it takes, and only where they are faster than recomputation; without one, all that
        save memory, also between checkpoints.  The forward pass stays exact.  UsageError for other texts.
        """
        self._allowed = tuple(map(str, parse_permissions(approximations)))
        return self

    @property
    def recomputes(self) -> bool:
        """Whether checkpoints, a budget, a strategy or a plan are set."""
        return bool(self._checkpoints) or self.request is not None

    @property
    def whole(self) -> tuple[str, ...]:
        """The slices of the whole step, which come after recomputation, if there are some."""
        if self._parallel is not None and (self._parallel.pieces(self._merge) > 1 or self._parallel.pipe is not None):
            return (self._parallel.slices(self._merge),)
        if self._merge is not None and self._merge.k_steps > 1:
            return (f"micro:0:{self._merge.k_steps}",)
        return whole_last(self._slices)[1]

    @property
    def _one_slice(self) -> bool:
        """Whether a rank runs the step as a whole."""
        return not self.whole or (
            self._parallel is not None and self._parallel.pieces(self._merge) == self._parallel.sharing
        )

    def only_slices(self) -> Any:
        """The inner optimizer, with the slices of this one, if it has some."""
        if not self._slices and self._merge is None and self._parallel is None:
            return self.inner
        found = RecomputeOptimizer(self.inner)
        found._slices, found._merge, found._parallel = self._slices, self._merge, self._parallel
        return found

    def without_growing(self, batch: int) -> tuple[RecomputeOptimizer, int]:
        """The same for a program that was made at the batch of all micro-batches of `batch`; how many these are.

        Of ranks, `batch` is that of all of them.
        """
        if self._parallel is not None:
            found = copy.copy(self)
            found._parallel = dataclasses.replace(self._parallel, batch=batch)
            return found, 1
        if self._merge is None:
            return self, 1
        found = copy.copy(self)
        found._merge = dataclasses.replace(self._merge, batch=batch * self._merge.k_steps)
        return found, self._merge.k_steps

    def for_batch(self, samples: int, most: int) -> RecomputeOptimizer:
        """The same for steps of `samples` samples, with gradient merge in micro-batches of at most `most` samples."""
        found = copy.copy(self)
        if self._parallel is not None:
            found._parallel = self._parallel.for_batch(samples, self._merge)
            found._merge = None if self._merge is None else Merge(1, self._merge.avg)
            return found
        found._merge = None if self._merge is None else self._merge.for_batch(samples, most)
        return found

    def without_plan(self) -> Any:
        """The inner optimizer, with the gradient merge of this one, if it has some: plain steps of the same numbers."""
        if self._merge is None and self._parallel is None:
            return self.inner
        found = RecomputeOptimizer(self.inner)
        found._merge, found._parallel = self._merge, self._parallel
        return found

    def before_slices(self) -> Any:
        """The inner optimizer, which makes the step that will run in the slices `whole` but does not yet."""
        found = self.only_slices()
        if isinstance(found, RecomputeOptimizer) and found is not self.inner:
            found._later = True
        return found

    def set_strategy(self, strategy: str, **options: Any) -> RecomputeOptimizer:
        """Sets the planner, with its options (default: "auto", the best); returns self.

        Planners that ignore budgets ("chen") need none.  UsageError for unknown names and options.
        """
        planner(strategy, **options)
        self._strategy, self._options = strategy, options
        return self

    def set_plan(self, plan: Any) -> RecomputeOptimizer:
        """Sets the plan: the path of a saved one, or a RecomputePlan by operator numbers of the plain step.

        The plain step consists of the operators of `minimize` without dead code, with normalised values recomputed.
        Returns self.
        """
        wanted = request(plan=plan)
        self._plan = None if wanted is None else wanted.plan
        return self

    @property
    def enable_offload(self) -> bool:
        """Whether values may be offloaded to host memory."""
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
        """The request to a planner; None with checkpoints.  UsageError if both are set."""
        found = request(
            self._budget, self._strategy, self._options, self._plan, offload=self._offload,
            approximations=() if self._checkpoints else self._allowed, **self._limits,
        )  # fmt: skip
        if found is not None and self._checkpoints:
            raise UsageError(
                "checkpoints and a budget, strategy or plan both define what is recomputed: give one of them (to check "
                "whether checkpoints fit a budget, use `--memory-budget` on the command line, or rc.estimate)"
            )
        return found and dataclasses.replace(found, slices=self.whole)

    def _backward(self, loss: Variable, *options: Any) -> ParamsGrads:
        """The inner optimizer's backward pass, then the recomputation of dropped values.

        `program.plan` is the applied plan; a RecomputeWarning is given for checkpoints without effect and the like.
        UsageError without checkpoints, or for names that are not in the program.  A planner needs the whole step:
        with a budget, strategy or plan, `apply_gradients` adds the recomputation.
        """
        program = program_of(loss)
        if self._target is not None:
            program.fuse_attention &= self._target.fuse_attention
            program.fuse_head &= self._target.fuse_head
        if self._offload and not self._one_slice:
            raise UsageError(
                "values in host memory are not combined with slices of the whole step: leave one of them out"
                if self._parallel is None
                else "values in host memory are not combined with several micro-batches on a rank: give as many "
                "micro_batches as there are ranks, or leave enable_offload out"
            )
        if self._offload and self._allowed:
            raise UsageError("values in host memory are not combined with approximations: leave one of them out")
        from ..runtime.communication.started import started_together

        if self._parallel is not None and started_together() > 1:
            program.origin = origin_of(program, self, divides=self._parallel.divides)
        merge = self._merge if self._parallel is None else self._parallel.merge(self._merge)
        if merge is not None:
            if whole_last(self._slices)[1]:
                what = "gradient merge" if self._parallel is None else "data parallelism"
                raise UsageError(f"{what} and slices of the whole step are the same: give one of them")
            merge.begin(program)
        program.slices = self.whole
        program.mesh = None if self._parallel is None else self._parallel.mesh
        program.fuse_head &= self._parallel is None or not self._parallel.divides_head(program.block)
        pipe = (
            None if self._parallel is None else self._parallel.begin_stages(program, planned=self.request is not None)
        )
        pairs = self._differentiate(program, program[loss.name], options)
        if self._parallel is not None:
            pairs = self._parallel.shard(program, pairs, merge.k_steps)  # type: ignore[union-attr]
        if self.whole and self.request is None and not self._later:
            program.block = verify(Slice(self.whole).run(program.block))
            pairs = pairs if pipe is None else own_pairs(program, pairs)
        if self._offload and self.request is None:
            block, program.plan = _offload_checkpoints(program.block, program.plan)
            program.block = verify(block)
        for note in program.plan.notes if self.request is None and program.plan is not None else ():
            warnings.warn(note, RecomputeWarning, stacklevel=3)
        found = [(program[p.name], program[g.name]) for p, g in pairs]
        return found if merge is None else merge.summed(program, found)

    def _differentiate(self, program: Program, loss: Variable, options: Sequence[Any]) -> ParamsGrads:
        """The backward pass, regions in slices, and with checkpoints the recomputation."""
        regions = whole_last(self._slices)[0]
        if self.request is not None or ((self._slices or self._merge or self._parallel) and not self._checkpoints):
            params_grads = self._backward_divided(program, loss, options)
            program.block = verify(Slice(regions).run(program.block))
            return params_grads
        if not self._checkpoints:
            raise UsageError(
                "RecomputeOptimizer has no checkpoints: call set_checkpoints(['name', ...]) before minimize, or "
                "set_budget('8GiB') to use a planner; "
                "candidates are outputs of layers, `[op.outputs[0].name for op in program.operators]`"
            )
        names = _checkpoint_names(program, self._checkpoints)
        before = program.block
        begin_training(program, loss.name)
        names = _remaining(before, program.block, names)
        params_grads = self.inner.backward(loss, *options)
        program.block = verify(Slice(regions).run(program.block))
        if self.whole:
            program.block = open_means(program.block)
        made = program.block.values()
        plan = plan_from_checkpoints(program.block, [n for n in names if n in made], loss.name)
        gone = [n for n in names if n not in made]
        inside = [f"checkpoint '{n}' saves nothing: it is inside the head, which is one operator" for n in gone]
        plan = dataclasses.replace(plan, notes=(*plan.notes, *inside))
        block = apply(program.block, plan)
        program.block, program.plan = verify(block), plan
        # divided last: what is gathered among ranks is gathered again for the recomputation, not kept for it
        return params_grads if self._parallel is None else self._parallel.divide(program, params_grads)

    def _backward_divided(self, program: Program, loss: Variable, options: Sequence[Any]) -> ParamsGrads:
        """The backward pass; then the part of both passes that this rank has along the mesh's axes but dp."""
        pairs = self.inner.backward(loss, *options)
        return pairs if self._parallel is None else self._parallel.divide(program, pairs)

    def apply_gradients(self, params_grads: Sequence[tuple[Variable, Variable]]) -> list[Operator]:
        """The inner optimizer's updates; then, with a budget, strategy or plan, the recomputation of dropped values.

        `program.plan` is the applied plan, `program.planned` has its figures (`PlanFigures`).
        """
        pairs = list(params_grads)
        found = self.inner.apply_gradients(pairs)
        return self._finished(pairs[0][0].program) or found

    def apply_optimize(
        self, loss: Variable, startup_program: Program | None, params_grads: Sequence[tuple[Variable, Variable]]
    ) -> list[Operator]:
        """`apply_gradients`, with Paddle's arguments."""
        found = self.inner.apply_optimize(loss, startup_program, params_grads)
        return self._finished(loss.program) or found

    def _finished(self, program: Program) -> list[Operator]:
        """What ranks do together in the updates; then the plan."""
        if self._parallel is not None:
            self._parallel.over_ranks(program, self._parallel.pieces(self._merge))
        found = self._planned(program)
        if program.origin is not None and program.origin.whole:
            program.origin.held = held(program)
        return found

    def _planned(self, program: Program) -> list[Operator]:
        """Plans the step, applies the plan, and returns the optimizer's operators."""
        wanted = self.request
        if wanted is None:
            if self._allowed:
                _approximate(program, self._allowed, self._target or Target())
            return []
        target = self._target or Target()
        if self._cost is not None:
            target = dataclasses.replace(target, cost=self._cost)
        plan_step(program, wanted, target_of(target), apart=True)
        verify(program.block)
        if program.planned.interrupted:
            warnings.warn(interruption(program.planned), RecomputeWarning, stacklevel=4)
        return [o for o in program.operators if o.role is Role.OPTIMIZE]


def _approximate(program: Program, allowed: Sequence[str], target: Target) -> None:
    """Approximations wherever they save memory, between checkpoints too."""
    block = cleaned(program.block, target_of(target))
    choices = permitted_choices(block, parse_permissions(allowed))
    program.block = verify(Approximate(choices).run(block))
    program.plan = dataclasses.replace(program.plan or RecomputePlan(), approximations=choices)


def _offload_checkpoints(block: Block, plan: RecomputePlan) -> tuple[Block, RecomputePlan]:
    """Offloads the checkpoints of a plan; those that nothing needs later stay, and a note states this."""
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


def _remaining(before: Block, after: Block, names: Sequence[str]) -> list[str]:
    """The checkpoints after attention became one operator: in place of what is inside of it, its result."""
    values, consumers = after.values(), before.consumers()
    found: dict[str, None] = {}
    for name in names:
        while name not in values and consumers.get(name):
            name = next(before.operators[consumers[name][-1]].writes()).name
        if name in values:
            found[name] = None
    return list(found)


def _checkpoint_names(program: Program, checkpoints: Sequence[str | Variable]) -> list[str]:
    """The names of values given as names, globs (among forward values and aliases) or Variables."""
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
