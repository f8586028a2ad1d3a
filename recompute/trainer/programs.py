"""The programs of a run: the training step and the evaluation, each also for a smaller last batch, in one arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..communication.mesh import Mesh
from ..errors import RecomputeError, UsageError
from ..language.ir import Role, Value
from ..language.program import Program
from ..ops.communication.base import Communication
from ..passes import memory_report
from ..places import CPUPlace, Place
from ..runtime import Executor
from ..training.modes import for_test, sizes_of
from ..training.origin import CHANGING, options_of
from ..training.protocol import AnyOptimizer, spec_of
from ..training.resized import step_like, unused
from ..training.spec import Spec, StepAgain
from .ranks import ONE, Ranks
from .through_library import Library


@dataclass(frozen=True)
class Peak:
    """Bytes of a run: `values` of parameters, buffers and state, and the `arena` of intermediate values.

    `training` and `evaluation`: the arenas that these need; they share one, so that the larger counts.
    """

    values: int
    arena: int
    training: int
    evaluation: int

    @property
    def total(self) -> int:
        """Bytes of values and arena together."""
        return self.values + self.arena


class At(NamedTuple):
    """The sizes of a program: its batch, and the open dimensions of its model, by name."""

    batch: int
    dims: tuple[tuple[str, int], ...] = ()


class Programs:
    """A training step at the program's sizes, the same at others, and evaluation, which share all arrays.

    `program`: a forward pass with its loss, which `optimizer` makes a training step; or a training step (`optimizer`
    None), which can only run at its own sizes.  `outputs`: what evaluation fetches besides the loss.  `ranks`: which
    share the step, if the optimizer is data parallel.
    """

    def __init__(
        self,
        program: Program,
        loss: str,
        optimizer: AnyOptimizer | None,
        place: Place | None,
        outputs: Sequence[str],
        ranks: Ranks = ONE,
    ) -> None:
        self.loss, self.outputs = loss, tuple(dict.fromkeys([loss, *outputs]))
        self.ranks = ranks
        self.executor = Executor(place, engine=ranks.engine)
        self.executor.compares = False  # the trainer does, before it does anything else with other ranks
        #: makes the forward pass at other sizes; None where it cannot be
        self.again = program.again if optimizer is not None else None
        self._spec = None if optimizer is None else unused(spec_of(optimizer))
        #: the options that change results (`recompute.training.origin.options_of`)
        self.options = {"optimizer": ""} if self._spec is None else options_of(self._spec, CHANGING)
        self._most = program.block.batch or 1  # samples of a micro-batch, with gradient merge
        if optimizer is not None:
            optimizer.minimize(program[loss])
        elif not any(o.role is Role.OPTIMIZE for o in program.operators):
            raise UsageError("the program has no updates: give an optimizer, or call its minimize(loss) before")
        self.program = program
        self._how = None
        if self._spec is not None:
            self._how = StepAgain(self._spec, self.again, loss, (), (), self._most, program.logical)
        self.own = self.at(self.batch)
        #: takes the training steps, where it is asked for
        self.library: Library | None = None
        self._training: dict[At, Program] = {self.own: program}
        self._evaluation: dict[At, Program] = {}

    @property
    def batch(self) -> int:
        """Samples of a step of all ranks.  UsageError where the inputs have no common first dimension."""
        found = self.program.forward_block.batch if hasattr(self, "program") else None
        if found is None:
            raise UsageError("the inputs of the program have no common first dimension, so that there is no batch")
        return found

    def at(self, batch: int, dims: Mapping[str, int] = MappingProxyType({})) -> At:
        """A batch with these sizes of dimensions, and the program's own of others."""
        return At(batch, tuple(sorted({**sizes_of(self.program), **dims}.items())))

    def fed(self, batch: int, feed: Mapping[str, Any]) -> At:
        """A batch with the sizes of dimensions that arrays have."""
        return At(batch, tuple(sorted(sizes_of(self.program, feed).items())))

    def training(self, at: At) -> Program:
        """The training step at some sizes.  UsageError where the model fixes others."""
        if at not in self._training:
            self._training[at] = self._minimized(at)
        return self._training[at]

    def step(self, program: Program, feed: dict[str, np.ndarray]) -> float:
        """A training step of one of these programs; its loss."""
        if self.library is not None:
            return self.library.run(program, feed)
        (value,) = self.executor.run(program, feed, self.fetched(program, training=True))
        return float(value.reshape(()))

    def rows(self, batch: int) -> slice:
        """The rows of a batch that this rank reads."""
        own = batch if self.ranks.mesh is None else self.training(self.at(batch)).block.batch or batch
        return slice(None) if own == batch else slice(self.ranks.share * own, (self.ranks.share + 1) * own)

    @property
    def micro_batches(self) -> int | None:
        """Into how many pieces ranks cut a step; None without ranks."""
        parallel = None if self._spec is None else self._spec.parallel
        return None if parallel is None else parallel.micro_batches

    def idle_axes(self) -> list[str]:
        """Notes on axes of the mesh along which nothing can be divided."""
        used = {o.op.axis for o in self.program.operators if isinstance(o.op, Communication)}
        idle = [a for a, size in (self.ranks.mesh or Mesh()).axes if size > 1 and a not in used]
        return [f"nothing of this model is divided along {a}: the ranks along it compute the same" for a in idle]

    @property
    def evaluated(self) -> int:
        """The batch of the evaluation where nobody says it: that of a step, or of its micro-batches with ranks."""
        return self.batch // (self.micro_batches or 1)

    def bind(self, training: Sequence[At], evaluation: Sequence[At]) -> None:
        """Allocates what the first steps would."""
        for is_training, sizes in ((True, training), (False, evaluation)):
            for at in sizes:
                program = self.training(at) if is_training else self.evaluation(at)
                self.executor.session(program, self.fetched(program, training=is_training))

    def evaluation(self, at: At) -> Program:
        """The forward pass in inference mode at some sizes, with the loss."""
        if at not in self._evaluation:
            self._evaluation[at] = for_test(self.program, at.batch, self.outputs, dict(at.dims))
        return self._evaluation[at]

    def why_not(self, at: At) -> str:
        """Why there is no training step at some sizes; "" if there is one."""
        try:
            self.training(at)
        except RecomputeError as e:
            return str(e).partition("\n")[0]
        return ""

    def forward(self, at: At) -> Program:
        """The forward pass at other sizes, with arrays of its own, divided among ranks as it was asked for."""
        if self.again is None:
            raise UsageError(f"the model fixes its batch at {self.batch}")
        made = self.again(at.batch, dict(at.dims))
        made.shardings = self.program.shardings
        return made

    def _minimized(self, at: At) -> Program:
        """A training step at other sizes.  Plain where a shorter one fits the program's memory without its plan."""
        if self._spec is None:
            raise UsageError(f"the program is a training step already, made for {_shown(self.own)}: it has no others")
        spec = self._spec.for_batch(at.batch, self._most)
        plain = spec.without_plan()
        if at.dims != self.own.dims and spec.request is not None and not (spec.allowed or spec.slices):
            made = self._trained(plain, at)
            if self._arena(made, training=True) <= self._arena(self.program, training=True):
                return made
        try:
            return self._trained(spec, at)
        except UsageError:  # a plan that is for other sizes
            if spec == plain:
                raise
            return self._trained(plain, at)

    def _trained(self, spec: Spec, at: At) -> Program:
        """A training step at other sizes.  UsageError where its parameters have other parts on this rank."""
        assert self._how is not None
        return step_like(self.program, self.forward(at), spec, self._how)

    def _arena(self, program: Program, *, training: bool) -> int:
        return memory_report(self.executor.planned(program, self.fetched(program, training=training))).arena

    def inputs(self, *, training: bool) -> tuple[Value, ...]:
        """The inputs that must be fed."""
        return (self.program if training else self.evaluation(self.own)).block.inputs

    def plan(self, training: Sequence[At], evaluation: Sequence[At]) -> Peak:
        """Plans the memory of all programs of these sizes; nothing runs.

        On a CPU they share one arena and all values; on a device each has memory of its own.
        """
        arenas: dict[bool, list[int]] = {True: [], False: []}
        values: dict[Any, int] = {}
        for is_training, sizes in ((True, training), (False, evaluation)):
            for at in sizes:
                program = self.training(at) if is_training else self.evaluation(at)
                block = self.executor.planned(program, self.fetched(program, training=is_training))
                arenas[is_training].append(memory_report(block).arena)
                values |= {self._held(program, v): v.nbytes for v in block.persistent() if not v.type.host}
        count: Any = (lambda sizes: max(sizes, default=0)) if self._shares else sum
        arena = count(arenas[True] + arenas[False])
        self.executor.share_arena(arena)
        return Peak(sum(values.values()), arena, count(arenas[True]), count(arenas[False]))

    def move_to_disk(self) -> None:
        """Puts what the training step keeps on disk there, so that a checkpoint is read to there."""
        if self.executor.target.disk is not None:
            self.executor.planned(self.program, self.fetched(self.program, training=True))

    def fetched(self, program: Program, *, training: bool) -> tuple[str, ...]:
        """Names that a run of one of these programs fetches; in a stage's evaluation, the stage's outputs."""
        if training:
            return (self.loss,)
        return self.outputs if self.program.pipe is None else program.block.outputs

    @property
    def _shares(self) -> bool:
        """Whether the programs share an arena and their values."""
        return isinstance(self.executor.place, CPUPlace)

    def _held(self, program: Program, v: Value) -> Any:
        """A key that is equal for one array: parameters, buffers and state may be shared, constants are not."""
        return v.name if self._shares and v.name in program.data else (id(program), v.name)

    def measured_bytes(self) -> int:
        """Bytes that the sessions hold, each arena and each array once, and those of a library."""
        arenas: dict[int, int] = {}
        arrays: dict[Any, int] = {}
        for is_training, programs in ((True, self._training), (False, self._evaluation)):
            for program in programs.values():
                session = self.executor.bound(program, self.fetched(program, training=is_training))
                if session is None:
                    continue
                near = [v for v in session.block.persistent() if not v.type.host]
                own = {self._held(program, v): session.arrays[v.name].nbytes for v in near}
                arrays |= own
                arenas[id(getattr(session, "arena", session))] = session.measured_peak_bytes - sum(own.values())
        library = 0 if self.library is None else self.library.peak_bytes
        return sum(arenas.values()) + sum(arrays.values()) + library


def _shown(at: At) -> str:
    return ", ".join([f"a batch of {at.batch}", *(f"{name} {size}" for name, size in at.dims)])
