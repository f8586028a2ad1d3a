"""The processes of a run: one, or the ranks of a mesh, which do together what is done once.

All ranks run the same loop.  What rank 0 alone does (choosing a checkpoint, callbacks, files) goes through `first`,
and what each decides for itself (a signal) through `agreed`, so that all of them go the same way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from ..communication.mesh import Mesh, as_mesh
from ..errors import RecomputeError, UsageError
from ..language.program import Program
from ..places import CPUPlace, Place, as_place
from ..runtime.communication.agreement import must_be_same
from ..runtime.communication.started import given_rank, started_together
from ..training.origin import values_to_compare
from ..training.parallel import DataParallel
from ..training.protocol import AnyOptimizer, spec_of
from ..training.stages import cuts_of

T = TypeVar("T")
#: the axis of a mesh along which ranks read other samples
DATA = "dp"
#: micro-batches of a step, at most, where nobody says how many
_MICRO = 8


class Ranks:
    """One process: everything is done here."""

    rank, size = 0, 1
    engine: Any = None

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = mesh

    @property
    def leads(self) -> bool:
        """Whether this process prints, writes files and calls callbacks."""
        return self.rank == 0

    @property
    def shares(self) -> int:
        """Into how many shares ranks divide a batch: as many as there are along the mesh's axis "dp"."""
        return 1 if self.mesh is None else dict(self.mesh.axes).get(DATA, 1)

    @property
    def share(self) -> int:
        """Which of the shares of a batch this rank reads."""
        return self.share_of(self.rank)

    def share_of(self, rank: int) -> int:
        """Which of the shares of a batch a rank reads: the same one for all that differ along other axes alone."""
        return 0 if self.mesh is None or self.shares == 1 else self.mesh.coordinate(rank, DATA)

    def is_first(self, *others: str) -> bool:
        """Whether this rank is the first one along all axes of the mesh but `others`."""
        axes = () if self.mesh is None else [name for name, _ in self.mesh.axes if name not in others]
        return self.mesh is None or not any(self.mesh.coordinate(self.rank, name) for name in axes)

    def collect(self, what: str, value: T) -> list[T]:
        """The values of all ranks, in their order; `what`: the purpose, for errors."""
        return [value]

    def gather(self, what: str, value: T) -> list[T]:
        """The values of all ranks on rank 0; nothing on others."""
        return [value]

    def must_be_same(self, what: str, facts: Mapping[str, Any], program: Program | None = None) -> None:
        """UsageError, on all ranks, that names the first of the facts, or of the program's options, weights and state,
        that is not the same on all of them."""

    def first(self, what: str, function: Callable[[], T]) -> T:
        """Calls a function on rank 0; all ranks return or raise the same."""
        return function()

    def agreed(self, reason: str) -> str:
        """The first reason of any rank; "" if none has one."""
        return reason

    def together(self, what: str, function: Callable[[], Any]) -> None:
        """Calls a function on all ranks.  If it fails on some, all raise the error of the first of them."""
        function()

    def repeats(self, error: str) -> bool:
        """Whether rank 0 ends with the same error, and says so."""
        return False


#: a process without others
ONE = Ranks()


class _Many(Ranks):
    """One of several processes, which communicate by MPI."""

    def __init__(self, mesh: Mesh) -> None:
        from ..runtime.communication.mpi import MpiEngine

        super().__init__(mesh)
        self.engine: Any = MpiEngine(mesh)
        self.rank, self.size = self.engine.rank, mesh.ranks

    def collect(self, what: str, value: T) -> list[T]:
        return list(self.engine.collect(what, value))

    def gather(self, what: str, value: T) -> list[T]:
        values = list(self.engine.collect(what, None if self.leads else value, 0))
        return [value, *values[1:]] if self.leads else []

    def must_be_same(self, what: str, facts: Mapping[str, Any], program: Program | None = None) -> None:
        mine = {} if program is None or program.origin is None else program.origin.facts
        texts = {name: str(value) for name, value in facts.items()}
        must_be_same(self.engine, what, {**texts, **mine}, {} if program is None else values_to_compare(program))

    def first(self, what: str, function: Callable[[], T]) -> T:
        result: Any = None
        if self.leads:
            try:
                result = function(), None
            except (RecomputeError, OSError) as e:
                result = None, e
        value, error = self.collect(what, result)[0]
        if error is not None:
            raise error
        return value

    def agreed(self, reason: str) -> str:
        what = "the agreement to go on"
        return next(filter(None, self.collect(what, reason)), "") if self.engine.any(what, bool(reason)) else ""

    def together(self, what: str, function: Callable[[], Any]) -> None:
        error: Exception | None = None
        try:
            function()
        except (RecomputeError, OSError) as e:
            error = e
        failure = next((e for e in self.collect(what, error) if e is not None), None)
        if failure is not None:
            raise failure

    def repeats(self, error: str) -> bool:
        return bool(self.engine.ends_like_first(error))


def ranks_of(mesh: Mesh | str | Ranks | None, place: Place | str | None = None) -> Ranks:
    """The ranks of a mesh such as "dp=4" or "dp=2,tp=2"; one process for "dp=1", and without a mesh.

    UsageError where other processes were started than the mesh has.
    """
    if isinstance(mesh, Ranks):
        return mesh
    if mesh is None:
        return Ranks()
    engine = meet(mesh)
    if not engine.axes:
        raise UsageError("the mesh has no axis: give dp=N, tp=N, pp=N, cp=N or ep=N, or several, such as dp=2,tp=2")
    if engine.ranks == 1:
        if started_together() > 1:
            raise UsageError(
                f"the mesh {engine} is one process, but {started_together()} were started: start it without mpiexec"
            )
        return Ranks(engine)
    if not isinstance(as_place(place), CPUPlace):
        raise UsageError("several ranks run on the CPU only so far: leave the place out, or the mesh")
    from ..runtime.communication.mpi import load_mpi

    started = load_mpi().COMM_WORLD.size
    if started != engine.ranks:
        raise UsageError(
            f"the mesh {engine} has {engine.ranks} ranks, but {started} process{'es were' if started > 1 else ' was'} "
            f"started: start it as `mpiexec -n {engine.ranks} recompute-train ... --mesh {engine}`, or a script by "
            f"`python -m recompute.launch --nproc {engine.ranks} SCRIPT`"
        )
    return _Many(engine)


def meet(mesh: Mesh | str | None) -> Mesh:
    """The mesh, which all processes compare that an MPI launcher has started with this one; "" and None: no ranks.

    UsageError on all of them where they have different ones.
    """
    together = _communicates()
    if together:  # from here on an error of this process ends all of them
        from ..runtime.communication.mpi import compare_meshes, watch

        watch()
    axes = Mesh() if mesh is None else as_mesh(mesh)
    if together:
        compare_meshes(str(axes))
    return axes


def _communicates() -> bool:
    """Whether others were started with this process, and it can communicate with them."""
    return started_together() > 1 and importlib.util.find_spec("mpi4py") is not None


def ends_like_first(error: str) -> bool:
    """Whether the first process that was started with this one ends with the same error, before there are ranks."""
    if not _communicates():
        number = given_rank()
        return number.isdigit() and number != "0"
    from ..runtime.communication.mpi import watch

    return bool(watch().ends_like_first(error))


def shared(
    optimizer: AnyOptimizer | None, ranks: Ranks, program: Program, zero: int, micro_batches: int | None
) -> AnyOptimizer | None:
    """The optimizer for a step of which each rank computes its part; itself without a mesh.

    `program`: the forward pass, of the batch without gradient merge.
    """
    if ranks.mesh is None:
        for name, value in (("zero", zero), ("micro_batches", micro_batches)):
            if value:
                raise UsageError(f"{name} is of ranks: give a mesh, such as mesh='dp=2' (--mesh dp=2)")
        return optimizer
    if optimizer is None:
        raise UsageError("a mesh needs an optimizer: the program is a training step of one process already")
    batch = program.block.batch
    if batch is None:
        raise UsageError("the inputs of the program have no common first dimension, which ranks could share")
    merged = spec_of(optimizer).merge
    each = 1 if merged is None else merged.k_steps
    samples = batch * each if merged is None or merged.batch is None else merged.batch
    pieces = micro_batches or _pieces(samples, ranks.shares, each)
    _check(samples, pieces, ranks.shares)
    options: dict[str, Any] = {"zero": zero, "micro_batches": pieces, "batch": samples}
    parallel = DataParallel(optimizer, ranks.mesh, ranks.rank, **options)
    pipe = None if parallel.spec.parallel is None else parallel.spec.parallel.pipe
    if pipe is None:
        return parallel
    # by name: those of smaller batches and of the evaluation are the same
    return DataParallel(optimizer, ranks.mesh, ranks.rank, **options, cuts=cuts_of(program, pipe, None))


def _pieces(samples: int, ranks: int, each: int) -> int:
    """Micro-batches of a step: `each`, and the ranks, times a power of two that divides the batch; at most 8, if these
    are not more."""
    count = np.lcm(ranks, each).item()
    while count * 2 <= _MICRO and samples % (count * 2) == 0:
        count *= 2
    return count


def _check(samples: int, pieces: int, ranks: int) -> None:
    """UsageError where ranks do not have equally many micro-batches, or others would add in another order."""
    if samples % ranks:
        raise UsageError(f"a batch of {samples} samples cannot be shared equally by {ranks} ranks: give a multiple")
    if samples % pieces or pieces % ranks:
        raise UsageError(
            f"a batch of {samples} samples cannot be cut into {pieces} equal micro-batches, as many for each of "
            f"{ranks} ranks: micro-batches must divide the batch, and be a multiple of the ranks"
        )
    each = pieces // ranks
    if each & (each - 1) and ranks > 1:
        raise UsageError(
            f"{pieces} micro-batches on {ranks} ranks are {each} on each: give a power of two for each rank, so that "
            "sums have the same bits on any number of ranks"
        )


def rows_of(feed: Mapping[str, np.ndarray], rows: slice) -> dict[str, np.ndarray]:
    """Some rows of a batch."""
    return {n: a[rows] if np.ndim(a) else a for n, a in feed.items()}
