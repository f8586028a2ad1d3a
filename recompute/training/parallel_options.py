"""The options of `recompute.DataParallel`: what ranks share, and what they divide."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..communication.mesh import Mesh
from ..errors import UsageError
from ..language.ir import Block
from ..ops.communication.base import ORDERS
from ..passes.pipelines.schedules import Pipe
from ..passes.sharding.vocabulary import has_heads
from ..passes.sharding.zero import Sharded
from ..passes.slicing.open_means import open_means
from ..passes.slicing.ranks import Share
from .merge import Merge
from .shardings import divisions

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
    `parts`: into how many parts parameters and norms can be cut (None: `cut`).
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
        for name in ("micro_batches", "batch"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
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
        """Ranks along the axis; 1 if the mesh does not have it."""
        return dict(self.mesh.axes).get(self.axis, 1)

    @property
    def coordinate(self) -> int:
        """Where the rank is along the axis."""
        return self.mesh.coordinate(self.rank, self.axis) if self.axis in dict(self.mesh.axes) else 0

    def divides_head(self, block: Block) -> bool:
        """Whether ranks have some of the words of a language model's head each: it is several operators then."""
        how = [p.division for p in divisions(self.mesh, self.rank)]
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
        running = self.accumulate == "running"
        return Share(self.axis, self.sharing, rank, self.reduce, running, running and self.zero > 1 < self.sharing)

    def for_batch(self, samples: int, merge: Merge | None) -> Parallel:
        """The options for a step of `samples` samples, in micro-batches that are no larger than those of the full step.

        How it is cut does not depend on the ranks.  They share it where each can have as many micro-batches of the same
        size; else each computes all of it, without communication but for parts of parameters.
        """
        pieces = self.pieces(merge)
        most = samples if self.batch is None else self.batch // pieces
        size = -(-samples // -(-samples // most))
        count = -(-samples // size)
        each = count // self.ranks
        fits = samples % count == 0 and count % self.ranks == 0 and each & (each - 1) == 0
        return dataclasses.replace(self, micro_batches=count, batch=samples, alone=not fits, parts=self.cut(pieces))

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
        count = self.micro_batches
        if count is None:
            count = self.ranks * (each if merge is not None or self.pipe is None else 2 * self.pipe.ranks)
        if count % self.sharing or count % each:
            raise UsageError(f"data parallelism: {count} micro-batches cannot be {each} for each of {self.ranks} ranks")
        return count

    def merge(self, merge: Merge | None) -> Merge:
        """The micro-batches of all ranks as those of one."""
        batch = self.batch
        if batch is None and merge is not None and merge.batch is not None:
            batch = merge.batch * self.ranks
        times = (1 if merge is None or merge.avg else merge.k_steps) * (self.ranks if self.add else 1)
        return Merge(self.pieces(merge), True, batch, times, uneven=self.alone)

    def sharded(self, pieces: int) -> Sharded:
        """How parameters and norms are divided."""
        return Sharded(self.axis, self.ranks, self.coordinate, self.cut(pieces), again=self.zero == 3)

    def cut(self, pieces: int) -> int:
        """Into how many parts parameters and norms can be cut: with sums that run on no more than there are ranks, as
        last bits depend on these anyway."""
        return self.parts or (self.ranks if self.accumulate == "running" else pieces)
