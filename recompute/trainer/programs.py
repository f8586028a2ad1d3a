"""The programs of a run: the training step and the evaluation, each also for a smaller last batch, in one arena."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..communication.mesh import Mesh
from ..errors import RecomputeError, UsageError
from ..language.ir import Role, Value
from ..language.program import Program
from ..ops.communication.base import Communication
from ..passes import memory_report
from ..places import CPUPlace, Place
from ..runtime import Executor
from ..training.modes import for_test, share_arrays
from ..training.origin import CHANGING, options_of
from ..training.protocol import AnyOptimizer, Described, spec_of
from ..training.spec import Spec
from .ranks import ONE, Ranks


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
        """All of it."""
        return self.values + self.arena


class Programs:
    """A training step at the program's batch, the same at other batches, and evaluation, which share all arrays.

    `program`: a forward pass with its loss, which `optimizer` makes a training step; or a training step (`optimizer`
    None), which can only run at its own batch.  `outputs`: what evaluation fetches besides the loss.  `ranks`: which
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
        self._again = program.again if optimizer is not None else None
        self._spec = None if optimizer is None else _unused(spec_of(optimizer))
        #: the options that change results (`recompute.training.origin.options_of`)
        self.options = {"optimizer": ""} if self._spec is None else options_of(self._spec, CHANGING)
        self._most = program.block.batch or 1  # samples of a micro-batch, with gradient merge
        if optimizer is not None:
            optimizer.minimize(program[loss])
        elif not any(o.role is Role.OPTIMIZE for o in program.operators):
            raise UsageError("the program has no updates: give an optimizer, or call its minimize(loss) before")
        self.program = program
        self._training: dict[int, Program] = {self.batch: program}
        self._evaluation: dict[int, Program] = {}

    @property
    def batch(self) -> int:
        """Samples of a step of all ranks.  UsageError where the inputs have no common first dimension."""
        found = self.program.forward_block.batch if hasattr(self, "program") else None
        if found is None:
            raise UsageError("the inputs of the program have no common first dimension, so that there is no batch")
        return found

    def training(self, batch: int) -> Program:
        """The training step at a batch.  UsageError where the model fixes another one."""
        if batch not in self._training:
            self._training[batch] = self._minimized(batch)
        return self._training[batch]

    def rows(self, batch: int) -> slice:
        """The rows of a batch that this rank reads."""
        own = self.training(batch).block.batch or batch
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

    def bind(self, training: Sequence[int], evaluation: Sequence[int]) -> None:
        """Allocates what the first steps would."""
        for is_training, batches in ((True, training), (False, evaluation)):
            for batch in batches:
                program = self.training(batch) if is_training else self.evaluation(batch)
                self.executor.session(program, self.fetched(program, training=is_training))

    def evaluation(self, batch: int) -> Program:
        """The forward pass in inference mode at a batch, with the loss."""
        if batch not in self._evaluation:
            self._evaluation[batch] = for_test(self.program, batch, self.outputs)
        return self._evaluation[batch]

    def why_not(self, batch: int) -> str:
        """Why there is no training step at a batch; "" if there is one."""
        try:
            self.training(batch)
        except RecomputeError as e:
            return str(e).partition("\n")[0]
        return ""

    def _forward(self, batch: int) -> Program:
        """The forward pass at another batch, divided among ranks as it was asked for."""
        if self._again is None:
            raise UsageError(f"the model fixes its batch at {self.batch}")
        made = self._again(batch)
        made.shardings = self.program.shardings
        return made

    def _minimized(self, batch: int) -> Program:
        assert self._spec is not None
        spec = self._spec.for_batch(batch, self._most)
        try:
            made = self._trained(spec, batch)
        except UsageError:  # a plan that is for the other batch
            if spec == spec.without_plan():
                raise
            made = self._trained(spec.without_plan(), batch)
        if dict(_shapes(made)) != dict(_shapes(self.program)):
            raise UsageError(f"at a batch of {batch} ranks would have other parts of parameters than at {self.batch}")
        share_arrays(made, self.program)
        return made

    def _trained(self, spec: Spec, batch: int) -> Program:
        """A training step at another batch, whose optimizer is a copy: the user's own has the state of this batch."""
        made = self._forward(batch)
        Described(_unused(spec)).minimize(made[self.loss])
        return made

    def inputs(self, *, training: bool) -> tuple[Value, ...]:
        """The inputs that must be fed."""
        return (self.program if training else self.evaluation(self.batch)).block.inputs

    def plan(self, training: Sequence[int], evaluation: Sequence[int]) -> Peak:
        """Plans the memory of all programs of these batches; nothing runs.

        On a CPU they share one arena and all values; on a device each has memory of its own.
        """
        arenas: dict[bool, list[int]] = {True: [], False: []}
        values: dict[Any, int] = {}
        for is_training, batches in ((True, training), (False, evaluation)):
            for batch in batches:
                program = self.training(batch) if is_training else self.evaluation(batch)
                block = self.executor.planned(program, self.fetched(program, training=is_training))
                arenas[is_training].append(memory_report(block).arena)
                values |= {self._held(program, v): v.nbytes for v in block.persistent()}
        count: Any = (lambda sizes: max(sizes, default=0)) if self._shares else sum
        arena = count(arenas[True] + arenas[False])
        self.executor.share_arena(arena)
        return Peak(sum(values.values()), arena, count(arenas[True]), count(arenas[False]))

    def fetched(self, program: Program, *, training: bool) -> tuple[str, ...]:
        """What a run of one of these programs returns; of a stage's evaluation, what the stage makes."""
        if training:
            return (self.loss,)
        return self.outputs if self.program.pipe is None else program.block.outputs

    @property
    def _shares(self) -> bool:
        """Whether the programs share an arena and their values."""
        return isinstance(self.executor.place, CPUPlace)

    def _held(self, program: Program, v: Value) -> Any:
        """What tells arrays apart: parameters, buffers and state may be shared, constants are not."""
        return v.name if self._shares and v.name in program.data else (id(program), v.name)

    def measured_bytes(self) -> int:
        """Bytes that the sessions hold: each arena and each array once."""
        arenas: dict[int, int] = {}
        arrays: dict[Any, int] = {}
        for is_training, programs in ((True, self._training), (False, self._evaluation)):
            for program in programs.values():
                session = self.executor.bound(program, self.fetched(program, training=is_training))
                if session is None:
                    continue
                own = {self._held(program, v): session.arrays[v.name].nbytes for v in session.block.persistent()}
                arrays |= own
                arenas[id(getattr(session, "arena", session))] = session.measured_peak_bytes - sum(own.values())
        return sum(arenas.values()) + sum(arrays.values())


def _shapes(program: Program) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((v.name, v.shape) for v in program.block.parameters)


def _unused(spec: Spec) -> Spec:
    """The spec with a copy of its rule of updates, which has the state of one program."""
    return spec.with_(rule=copy.copy(spec.rule))
