"""Data parallelism for any optimizer: `DataParallel(Adam(1e-3), Mesh.of(dp=4), rank, zero=1).minimize(loss)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..boundary import as_texts
from ..communication.mesh import Mesh, as_mesh
from ..errors import UsageError
from ..language.ir import Block
from ..language.program import Program
from ..language.verify import verify
from ..ops.communication.base import ORDERS
from ..ops.communication.shard import padded_size
from ..ops.optimizer.norm_updates import TrustUpdate
from ..passes.pipelines.schedules import Pipe
from ..passes.sharding.norms import norms_over_ranks
from ..passes.sharding.norms_over_parts import norms_over_parts
from ..passes.sharding.vocabulary import has_heads
from ..passes.sharding.zero import Sharded, shard_parameters
from ..passes.slicing.open_means import open_means
from ..passes.slicing.ranks import Share
from .merge import Merge
from .pipeline import begin_stages, first_stages, over_stages
from .protocol import AnyOptimizer, ParamsGrads
from .recompute_optimizer import RecomputeOptimizer
from .shardings import axes_of, divide_program, divisions

__all__ = ["DataParallel"]

#: the axis of a mesh along which ranks have different layers
PIPELINE = "pp"
#: how a rank adds up gradients of its micro-batches
ACCUMULATE = ("tree", "running")


@dataclass(frozen=True)
class Parallel:
    """Options of data parallelism, of the rank `rank` of `mesh`, along its axis `axis`.

    `micro_batches`: of all ranks together (None: one a rank, times the k_steps of gradient merge).  `zero`: the stage.
    `batch`: samples of a step of all ranks (None: the program's for each micro-batch).  `add`: gradients of ranks are
    added up, which makes them `ranks` times those of the whole batch.  `reduce`: how ranks add up.  `accumulate`: how a
    rank adds up its micro-batches.  `alone`: each rank computes the whole step, which cannot be shared equally.
    `parts`: into how many parts parameters and norms can be cut (None: as many as there are micro-batches).
    `together`: batch statistics are those of all ranks.
    `sequence`: with tensor parallelism, values between pairs of products are cut along the sequence.  `schedule`,
    `chunks`, `cuts`: of the pipeline along the mesh's axis "pp", if it has one (passes/pipelines); None: cut where
    stages take about the same time.
    """

    mesh: Mesh
    rank: int = 0
    zero: int = 0
    micro_batches: int | None = None
    batch: int | None = None
    reduce: str = "tree"
    axis: str = "dp"
    add: bool = False
    alone: bool = False
    parts: int | None = None
    together: bool = False
    sequence: bool = True
    schedule: str = "1f1b"
    chunks: int = 1
    cuts: tuple[str, ...] | None = None
    accumulate: str = "tree"

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 0 <= self.rank < self.mesh.ranks:
            raise UsageError(f"the mesh {self.mesh} has no rank {self.rank!r}: it has 0 to {self.mesh.ranks - 1}")
        if self.zero not in (0, 1, 2, 3) or isinstance(self.zero, bool):
            raise UsageError(f"zero must be 0 (nothing is divided), 1, 2 or 3, not {self.zero!r}")
        if self.reduce not in ORDERS:
            raise UsageError(f"reduce must be one of {', '.join(ORDERS)}, not {self.reduce!r}")
        if self.accumulate not in ACCUMULATE:
            raise UsageError(f"accumulate must be one of {', '.join(ACCUMULATE)}, not {self.accumulate!r}")
        for name in ("micro_batches", "batch", "chunks"):
            value = getattr(self, name)
            none = value is None and name != "chunks"
            if not none and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"data parallelism: {name} must be a whole number of at least 1, not {value!r}")
        if self.micro_batches is not None and self.micro_batches % self.sharing:
            raise UsageError(
                f"{self.micro_batches} micro-batches cannot be shared equally among {self.ranks} ranks: give a multiple"
            )

        if self.pipe is not None and self.together:
            raise UsageError(f"sync_batch_norm and a pipeline (mesh {self.mesh}) are not combined: leave one out")

    @property
    def divides(self) -> bool:
        """Whether ranks have parts of parameters, or some of them."""
        return self.mesh.ranks > 1 and (bool(self.zero) or self.mesh.ranks > self.ranks)

    @property
    def ranks(self) -> int:
        """How many there are along the axis; one where the mesh does not have it."""
        return dict(self.mesh.axes).get(self.axis, 1)

    @property
    def coordinate(self) -> int:
        """Where the rank is along the axis."""
        return self.mesh.coordinate(self.rank, self.axis) if self.axis in dict(self.mesh.axes) else 0

    def divide(self, program: Program, pairs: ParamsGrads) -> ParamsGrads:
        """Divides operators along the mesh's other axes (tensor, sequence, expert and context parallelism)."""
        how = divisions(self.mesh, self.rank, self.reduce)
        return divide_program(program, how, pairs, self.rank, self.sequence) if how else pairs

    def divides_head(self, block: Block) -> bool:
        """Whether ranks have some of the words of a language model's head each: it is several operators then."""
        how = divisions(self.mesh, self.rank)
        return any(d.axis == "tp" and has_heads(open_means(block), d) for d in how)

    @property
    def pipe(self) -> Pipe | None:
        """This rank's place in the pipeline; None without one."""
        ranks = dict(self.mesh.axes).get(PIPELINE, 1)
        if ranks * self.chunks == 1:
            return None
        return Pipe(PIPELINE, ranks, self.mesh.coordinate(self.rank, PIPELINE), self.schedule, self.chunks)

    @property
    def sharing(self) -> int:
        """How many share the step."""
        return 1 if self.alone else self.ranks

    @property
    def share(self) -> Share:
        """This rank's share of the micro-batches."""
        rank = 0 if self.alone else self.coordinate
        return Share(self.axis, self.sharing, rank, self.reduce, self.accumulate == "running")

    def for_batch(self, samples: int, merge: Merge | None) -> Parallel:
        """The same for a step of `samples` samples, in micro-batches that are no larger than those of the full step.

        How it is cut does not depend on the ranks.  They share it where each can have as many micro-batches of the same
        size; else each computes all of it, without communication but for parts of parameters.
        """
        pieces = self.pieces(merge)
        most = samples if self.batch is None else self.batch // pieces
        size = -(-samples // -(-samples // most))
        count = -(-samples // size)
        each = count // self.ranks
        fits = samples % count == 0 and count % self.ranks == 0 and each & (each - 1) == 0
        return dataclasses.replace(self, micro_batches=count, batch=samples, alone=not fits, parts=self.parts or pieces)

    def slices(self, merge: Merge | None) -> str:
        """How the step is cut (passes/slicing).  UsageError for several micro-batches that would need each other."""
        pieces = self.pieces(merge)
        if self.together and pieces != self.sharing:
            raise UsageError(
                f"sync_batch_norm and {pieces} micro-batches on {self.sharing} ranks are not combined: statistics of "
                "all ranks need one micro-batch a rank; leave gradient merge out, or give as many micro_batches"
            )
        pipe = "" if self.pipe is None else f"+{self.pipe}"
        return f"{'ranks' if self.together else 'micro'}:0:{pieces}@{self.share}{pipe}"

    def pieces(self, merge: Merge | None) -> int:
        """Micro-batches of a step, of all ranks together."""
        each = 1 if merge is None else merge.k_steps
        found = self.micro_batches
        if found is None:
            found = self.ranks * (each if merge is not None or self.pipe is None else 2 * self.pipe.ranks)
        if found % self.sharing or found % each:
            raise UsageError(f"data parallelism: {found} micro-batches cannot be {each} for each of {self.ranks} ranks")
        return found

    def merge(self, merge: Merge | None) -> Merge:
        """The micro-batches of all ranks as those of one."""
        batch = self.batch
        if batch is None and merge is not None and merge.batch is not None:
            batch = merge.batch * self.ranks
        times = (1 if merge is None or merge.avg else merge.k_steps) * (self.ranks if self.add else 1)
        return Merge(self.pieces(merge), True, batch, times, uneven=self.alone)

    def sharded(self, pieces: int) -> Sharded:
        """How parameters and norms are divided."""
        return Sharded(self.axis, self.ranks, self.coordinate, self.parts or pieces, again=self.zero == 3)

    def shard(self, program: Program, pairs: ParamsGrads, pieces: int) -> ParamsGrads:
        """Makes the program's parameters shards (ZeRO), with contents; the pairs of shards."""
        if not self.zero or self.ranks == 1:
            return pairs
        how = self.sharded(pieces)
        names = [(p.name, g.name) for p, g in pairs]
        whole = {v.name: v.type for v in program.block.parameters if v.name in dict(names)}
        block, shards, made = shard_parameters(program.block, names, how)
        for name, v in shards.items():
            program.data[name] = _share(np.asarray(program.data[name]), how, v.size)
        program.block, program.gradients = verify(block), made
        program.sharded, program.division = whole, how
        return [(program[p], program[g]) for p, g in made]

    def begin_stages(self, program: Program, *, planned: bool) -> Pipe | None:
        """Cuts the program into the stages of the pipeline, if there is one."""
        pipe = self.pipe
        if pipe is None:
            return None
        if planned:
            raise UsageError(
                f"a pipeline (mesh {self.mesh}) and a budget, strategy or plan are not combined yet: name checkpoints"
            )
        begin_stages(program, pipe, self.cuts)
        program.first_stages = first_stages(program)
        return pipe

    def over_ranks(self, program: Program, pieces: int) -> None:
        """Makes norms and checks of gradients those of all ranks."""
        divided = bool(program.sharded)
        trust = next((o for o in program.operators if isinstance(o.op, TrustUpdate)), None)
        if trust is not None and divided:
            raise UsageError(
                f"zero={self.zero} and {type(trust.op).__name__.removesuffix('Update')} are not combined: its update "
                "takes the norm of a whole parameter, of which a rank has a part; use Adam or AdamW, or zero=0"
            )
        if trust is not None and program.divided:
            raise UsageError(
                f"mesh {self.mesh} and {type(trust.op).__name__.removesuffix('Update')} are not combined: its update "
                "takes the norm of a whole parameter, of which a rank has a part; use Adam or AdamW"
            )
        if program.divided:
            axes = {p: frozenset(d.axis for d, _ in v.cuts) for p, v in program.divided.items()}
            gradients = {g: axes[p] for p, g in program.gradients if p in axes}
            groups = {frozenset[str](), *axes.values()} if self.pipe is not None else ()
            program.block = verify(norms_over_parts(program.block, gradients, dict(axes_of(self.mesh)), groups))
        program.block = verify(norms_over_ranks(program.block, self.sharded(pieces), sharded=divided))
        if self.pipe is not None:
            over_stages(program, self.pipe)


def _share(array: np.ndarray, how: Sharded, size: int) -> np.ndarray:
    """A rank's share of `size` of an array's elements; of one number everywhere, which takes no memory, one like it."""
    if array.size and not any(array.strides):
        first = array[(0,) * array.ndim]
        if not first or (how.rank + 1) * size <= array.size:  # what follows an array are zeros
            return np.broadcast_to(first, (size,))
    flat = np.zeros(padded_size(array.size, how.parts), array.dtype)
    flat[: array.size] = array.reshape(-1)
    return flat[how.rank * size : (how.rank + 1) * size].copy()


class DataParallel(RecomputeOptimizer):
    """Wraps an optimizer: the ranks of a mesh train one model, each on its part of the batch.

    Each rank makes the same program but for its share of the micro-batches, and runs it with its own rows of the batch
    (rank 0 the first ones); losses, gradients and parameters are those of the whole batch, with the same bits for every
    number of ranks that share the same `micro_batches`.  `mesh`: one with the axis "dp" (`rc.Mesh(dp=4)` or "dp=4");
    `rank`: this process's.  `micro_batches`: how many the batch of all ranks is cut into (default: one a rank); a power
    of two, for the same bits.  `batch`: samples of a step of all ranks, if the program was loaded with all of them
    (default: the program's batch for each micro-batch).

    `zero`: 1 divides optimizer state and parameters among ranks, and parameters are gathered for the whole step; 2
    divides gradients, too; with 3 a parameter is dropped after its use in the forward pass, and gathered again.

    `reduce`: "tree" adds in a fixed order, for the same bits; "library" has MPI or NCCL add as it likes, which may be
    faster on fabrics that add themselves.

    `accumulate`: "tree" adds up a rank's micro-batches as a part of that order, and holds up to log2(micro-batches) + 1
    sums of each gradient at once; "running" adds them to a single sum, with the bits of gradient merge on one rank: for
    large networks in many micro-batches.

    `add`: the gradient is the sum of those of the ranks' own batches, not their mean.

    `sync_batch_norm`: batch statistics are those of the whole batch; each rank has one micro-batch, and the last bits
    depend on their number.

    A mesh with an axis "pp" is a pipeline: each rank has some of the layers, and runs `micro_batches` through them in
    the order of `schedule`: "gpipe", "1f1b", "interleaved" (with `chunks` stages a rank) or "zb" (weight gradients in
    the pauses).  `cuts`: the values behind which a stage ends, one less than stages (default: such that stages take
    about the same time).

    Gradient merge, mixed precision, checkpoints, budgets and clipping may be set on the optimizer inside.
    """

    def __init__(
        self,
        optimizer: AnyOptimizer,
        mesh: Mesh | str,
        rank: int = 0,
        *,
        zero: int = 0,
        micro_batches: int | None = None,
        batch: int | None = None,
        reduce: str = "tree",
        add: bool = False,
        sync_batch_norm: bool = False,
        sequence: bool = True,
        schedule: str = "1f1b",
        chunks: int = 1,
        cuts: Sequence[str] | None = None,
        accumulate: str = "tree",
    ) -> None:
        super().__init__(optimizer)
        if isinstance(optimizer, RecomputeOptimizer):
            self.__dict__.update(optimizer.__dict__)
        if self._parallel is not None:
            raise UsageError("the optimizer is data parallel already")
        mesh = as_mesh(mesh)
        self._parallel = Parallel(
            mesh, rank, zero, micro_batches, batch, reduce, add=add, together=sync_batch_norm, sequence=sequence,
            schedule=schedule, chunks=chunks, cuts=None if cuts is None else tuple(as_texts(cuts, "cuts")),
            accumulate=accumulate,
        )  # fmt: skip

    def at_rank(self, rank: int) -> Any:
        """The same for another rank."""
        found = self.around(self.inner)
        assert self._parallel is not None
        found._parallel = dataclasses.replace(self._parallel, rank=rank)
        return found
