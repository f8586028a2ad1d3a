"""Training steps of one model at any batch: compiled without the model's weights, and not run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..boundary import as_loss, as_program, as_texts
from ..cost import CostModel
from ..errors import UsageError, expect, nearest
from ..language.ir import Block, Role
from ..language.program import Compiled, Program, Variable
from ..language.verify import trusted
from ..passes import RecomputePlan, Target
from ..passes.planners.fit.problem import Fitting
from ..passes.slicing.slicing import parse_slicing
from ..planning.step import lower, target_of
from ..training import losses
from ..training.finite import stop_on_nan
from ..training.optimizers import Adam
from ..training.parallel_options import Parallel
from ..training.protocol import AnyOptimizer, spec_of
from ..training.spec import Spec
from .compiler import CompiledStep, StepFigures, compile_step, figures, plain_fitting, resolve_checkpoints
from .sources import Loading, Model, source_of

#: the values that a step saves: checkpoints, or the values that a plan does not recompute; None: everything
Kept = Sequence[str] | RecomputePlan | None
Loss = str | Variable | Callable[[Program], Variable] | None


class Steps:
    """The training steps of a model, by batch and checkpoints.

    `model`: a path, a ModelProto, a name of the zoo, or a Program (one with updates is already a training step).
    `loss`: the name of a scalar value, one of `losses.NAMES`, a function from Program to Variable, or None to choose by
    the model's output.  `checkpoints`: names or globs of values to keep.  `input_shapes` fixes dimensions besides the
    batch; `trainable` or `loading`: how it is loaded else.  `target`: what the steps are compiled for (None: this CPU);
    `offload`: checkpoints are offloaded; `stop_on_nan`: see `rc.stop_on_nan`.
    UsageError if a dimension other than the batch is dynamic.
    """

    def __init__(
        self,
        model: Model,
        *,
        loss: Loss = None,
        optimizer: AnyOptimizer | Spec | None = None,
        checkpoints: Sequence[Any] | None = None,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        options: Mapping[str, Any] | None = None,
        trainable: Sequence[str] | None = None,
        loading: Loading | None = None,
        target: Target | None = None,
        offload: bool = False,
        stop_on_nan: bool = False,
    ) -> None:
        spec = spec_of(Adam() if optimizer is None else optimizer)
        checkpoints = (spec.checkpoints or None) if checkpoints is None else checkpoints
        offload = offload or spec.offload
        self.asked = None if checkpoints is None else tuple(as_texts(checkpoints, "checkpoints"))
        if self.asked == ():
            raise UsageError("checkpoints is empty: give names or globs, or None to keep everything")
        self.spec = spec.only_slices()
        self._loss = loss.name if isinstance(loss, Variable) else loss
        self.target, self._offload = target_of(target), offload
        assert self.target.cost is not None
        self.cost: CostModel = self.target.cost
        expect("input_shapes", {} if input_shapes is None else input_shapes, Mapping, "shapes by input")
        expect("options", {} if options is None else options, Mapping, "the network's options by name")
        self._source = source_of(model, input_shapes or {}, options or {}, loading or Loading(trainable=trainable))
        self._stop_on_nan = stop_on_nan
        if self.target.precision is not None and self.is_step:
            raise UsageError("the program is already a training step, and minimize() fixed its precision: leave it out")
        self._programs: dict[int, tuple[Program, str]] = {}
        self._numbered: dict[RecomputePlan, int] = {}
        self._figures: dict[tuple[int, tuple[str, ...] | RecomputePlan | None], tuple[StepFigures, float]] = {}

    @property
    def name(self) -> str:
        """The name of the model in messages."""
        return self._source.name

    @property
    def open_batch(self) -> bool:
        """Whether the batch can be chosen."""
        return self._source.fixed is None

    def open(self) -> None:
        """Opens a batch that the model fixes.  UsageError where it cannot be."""
        if self._source.fixed is not None:
            self._source.open(self._source.fixed + 1)

    @property
    def default_batch(self) -> int:
        """The default batch: of all ranks, if there are several."""
        return self._source.default * (self.micro_batches if self.open_batch else 1)

    @property
    def parallel(self) -> Parallel | None:
        """The options of data parallelism of the optimizer, if it has some."""
        return self.spec.parallel

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all ranks, of which a batch is a multiple; 1 without data parallelism."""
        return 1 if self.spec.parallel is None else self.spec.parallel.pieces(self.spec.merge)

    @property
    def each(self) -> int:
        """The number whose multiples are tried as batches: micro-batches, or slices that cut the batch."""
        slices = map(parse_slicing, self.spec.slices)
        return math.lcm(self.micro_batches, *(s.pieces for s in slices if s.axis == 0))

    def for_ranks(self, parallel: Parallel) -> Steps:
        """The same steps with other options of data parallelism."""
        steps = copy.copy(self)
        steps.spec = self.spec.with_(parallel=parallel)
        steps._figures, steps._numbered = {}, {}
        return steps

    def batch(self, wanted: int | None) -> int:
        """The batch to compile for; one that a file fixes is opened.  UsageError for less than 1, or if it cannot."""
        if wanted is None:
            return self.default_batch
        if isinstance(wanted, bool) or not isinstance(wanted, (int, np.integer)) or wanted < 1:
            raise UsageError(f"batch must be a whole number of at least 1, not {wanted!r}")
        if self._source.fixed not in (None, wanted):
            self._source.open(int(wanted))
        if wanted % self.micro_batches:
            assert self.parallel is not None
            raise UsageError(
                f"a batch of {wanted} cannot be cut into {self.micro_batches} equal micro-batches, shared by "
                f"{self.parallel.ranks} ranks: the batch is that of all ranks; give a multiple of {self.micro_batches}"
            )
        return int(wanted)

    def program(self, batch: int) -> tuple[Program, str]:
        """The forward pass with its loss at a batch, and the loss's name."""
        if batch not in self._programs:
            self._programs.clear()  # only the last program is kept: of other batches, figures suffice
            program = self._source.at(self.batch(batch))
            self._programs[batch] = program, attach_loss(program, self._loss, self._stop_on_nan)[0]
        return self._programs[batch]

    @property
    def is_step(self) -> bool:
        """Whether the model is a Program that has its updates already."""
        return self._source.is_step

    def resolved(self, checkpoints: Sequence[str] | None, batch: int | None = None) -> tuple[str, ...] | None:
        """Value names that names and globs match, in order of production."""
        if checkpoints is None or self.is_step:
            return None
        return tuple(resolve_checkpoints(self.program(batch or self.default_batch)[0], checkpoints))

    def compile(self, batch: int, checkpoints: Sequence[str] | None = None) -> CompiledStep:
        """The compiled step; nothing is allocated."""
        if self.is_step:
            if checkpoints is not None:
                raise UsageError("the program is already a training step: give the checkpoints to its optimizer")
            whole = self._source.at(self.batch(batch))
            earlier = whole.compiled if whole.compiled and whole.compiled.logical is whole.logical else None
            if earlier is not None and earlier.target.makes_the_same_as(self.target):
                whole.lower_to(earlier)  # as a planner has made it
            elif earlier is not None and earlier.refit is not None:
                whole.lower_to(earlier.refit(self.target))
            elif not whole.block.addresses:
                lower(whole, self.target)
            step = CompiledStep(whole, whole.plan, figures(whole.block, self.cost, whole.logical), self.cost)
        else:
            step = self._compiled(*self._made(batch), self.resolved(checkpoints, batch))
        self._remember(batch, None if checkpoints is None else tuple(checkpoints), step.program.logical, step.figures)
        return step

    def compile_program(self, program: Program, loss: str, checkpoints: Sequence[str] | None) -> CompiledStep:
        """The compiled step of another program, such as a part of the model; checkpoints that it lacks are left out."""
        names = None if checkpoints is None else tuple(n for n in checkpoints if n in program)
        return self._compiled(program, loss, self.spec, names)

    def _compiled(self, program: Program, loss: str, spec: Spec, names: tuple[str, ...] | None) -> CompiledStep:
        offload = bool(names) and self._offload
        return compile_step(program, loss, spec, checkpoints=names, offload=offload, target=self.target)

    def compiled(self, batch: int, kept: Kept = None) -> CompiledStep:
        """The compiled step with checkpoints or with a plan (of `fitting`)."""
        if not isinstance(kept, RecomputePlan):
            return self.compile(batch, kept)
        step = self.compile(batch)
        fitted = self._sliced(batch, kept).carry_out(kept, False)
        step.program.lower_to(Compiled(fitted.compiled, fitted.block, self.target))
        return dataclasses.replace(step, plan=fitted.plan, figures=figures(fitted.compiled, self.cost, fitted.block))

    def fitting(self, batch: int) -> Fitting:
        """The step without recomputation, as input of planners.  UsageError if the model is already a training step."""
        if self.is_step:
            raise UsageError("the program is already a training step: it cannot be planned")
        return plain_fitting(*self._made(batch), self.target)

    def _made(self, batch: int) -> tuple[Program, str, Spec]:
        """The forward pass at a batch, or at that of all micro-batches; its loss; the spec."""
        spec, pieces = self.spec.at_whole_batch(batch)
        return *self.program(batch * pieces), spec

    def _sliced(self, batch: int, plan: RecomputePlan) -> Fitting:
        """The step, in the plan's slices.  UsageError where its operators are not those of the plan.

        A network may have other operators at batch 1, which the plan's numbers would miss.
        """
        fitting = self.fitting(batch).of(plan.slices)
        if not plan.reruns:
            return fitting
        digest = hash(tuple(o.op.name for o in fitting.block.operators))
        if self._numbered.setdefault(plan, digest) != digest:
            raise UsageError(f"at batch {batch}, {self.name} has other operators than the plan")
        return fitting

    def _remember(
        self, batch: int, kept: tuple[str, ...] | RecomputePlan | None, block: Block, found: StepFigures
    ) -> None:
        repeated = [op for op in block.operators if op.role is Role.RECOMPUTE]
        self._figures[batch, kept] = found, sum(self.cost.seconds(op) for op in repeated)

    def _known(self, batch: int, kept: Kept) -> tuple[StepFigures, float]:
        key = kept if kept is None or isinstance(kept, RecomputePlan) else tuple(kept)
        if (batch, key) not in self._figures:
            again = any(cached == key for _, cached in self._figures)
            with trusted() if again else contextlib.nullcontext():
                if isinstance(key, RecomputePlan):
                    fitted = self._sliced(batch, key).carry_out(key, False)
                    self._remember(batch, key, fitted.block, figures(fitted.compiled, self.cost, fitted.block))
                else:
                    self.compile(batch, key)
        return self._figures[batch, key]

    def figures(self, batch: int, kept: Kept = None) -> StepFigures:
        """The figures of a step with checkpoints or a plan (of `fitting`); it is compiled once.

        The verifier runs only at the first batch for the same checkpoints or plan.
        """
        return self._known(batch, kept)[0]

    def repeat_seconds(self, batch: int, kept: Kept = None) -> float:
        """Estimated seconds of the recomputed operators of a step: its extra time over the plain step."""
        return self._known(batch, kept)[1]

    def peak(self, batch: int, kept: Kept = None) -> int:
        """The predicted peak: all bytes that the executor would allocate."""
        return self.figures(batch, kept).peak_bytes


def attach_loss(program: Program, wanted: Loss, stop: bool = False) -> tuple[str, str]:
    """(name of the loss, why it was chosen); the loss is appended to the program if the model has none.

    `stop`: a step ends where the loss is not finite (`rc.stop_on_nan`)."""
    name = _attached(program, wanted)
    if stop:
        stop_on_nan(program[name[0]])
    return name


def _attached(program: Program, wanted: Loss) -> tuple[str, str]:
    as_program(program)
    if isinstance(wanted, Variable):
        wanted = wanted.name
    if callable(wanted):
        variable = expect("loss", wanted(program), Variable, "a function that returns a Variable of the program")
        return as_loss(program, variable).name, "as asked"
    if wanted is not None:
        expect("loss", wanted, str, "a Variable, the name of a value or of a loss, or a function of the program")
    if wanted is not None and wanted in program and program[wanted].value.size == 1:
        return program[wanted].name, "as asked"
    if wanted is not None:
        kind, _, of = wanted.partition(":")
        if of and kind in losses.NAMES:
            return getattr(losses, kind)(program[of], **_loss_names(program)).name, f"{kind} of '{of}', as asked"
        if wanted not in losses.NAMES:
            names = ", ".join(losses.NAMES)
            raise UsageError(f"unknown loss '{wanted}'{nearest(wanted, losses.NAMES)}; known: {names}")
        return getattr(losses, wanted)(program, **_loss_names(program)).name, f"{wanted}, as asked"
    kind, reason = losses.natural_loss(program)
    if kind in program and program[kind].value.size == 1:
        return program[kind].name, reason
    return getattr(losses, kind)(program, **_loss_names(program)).name, reason


def _loss_names(program: Program) -> dict[str, str]:
    """Names of the loss and the label: `loss` and `label`, numbered if the model has values of these names."""

    def free(wish: str) -> str:
        return next(n for n in itertools.chain([wish], (f"{wish}_{i}" for i in itertools.count(1))) if n not in program)

    return {"name": free("loss"), "label_name": free("label")}
