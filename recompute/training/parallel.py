"""Data parallelism for any optimizer: `DataParallel(Adam(1e-3), Mesh.of(dp=4), rank, zero=1).minimize(loss)`."""

from __future__ import annotations

from collections.abc import Sequence

from ..boundary import as_texts
from ..communication.mesh import Mesh, as_mesh
from ..errors import UsageError, expect
from .parallel_options import PIPELINE, Parallel
from .protocol import AnyOptimizer
from .recompute_optimizer import RecomputeOptimizer

__all__ = ["PIPELINE", "DataParallel", "Parallel"]


class DataParallel(RecomputeOptimizer):
    """Wraps an optimizer: the ranks of a mesh train one model, each on its part of the batch.

    Each rank makes the same program but for its share of the micro-batches, and runs it with its own rows of the batch
    (rank 0 the first ones); losses, gradients and parameters are those of the whole batch, with the same bits for every
    number of ranks that share the same `micro_batches`.  `mesh`: one with the axis "dp" (`rc.Mesh(dp=4)` or "dp=4");
    `rank`: this process's.  `micro_batches`: how many the batch of all ranks is cut into (default: one a rank, in a
    pipeline 2·pp a replica); a power of two, for the same bits.  `batch`: samples of a step of all ranks, if the
    program was loaded with all of them (default: the program's batch for each micro-batch).

    `zero`: 1 and 2 divide parameters, optimizer state and, once they are summed, gradients among ranks; parameters are
    gathered for the whole step.  With 3 a parameter is dropped after its use in the forward pass, and gathered again.

    `reduce`: "tree" adds in a fixed order, for the same bits; "library" has MPI or NCCL add as it likes, which may be
    faster on fabrics that add themselves.

    `accumulate`: "tree" adds up a rank's micro-batches as a part of that order, and holds up to log2(micro-batches) + 1
    sums of each gradient at once; "running" adds them to a single sum, with the bits of gradient merge on one rank: for
    large networks in many micro-batches.  With `zero` 2 or 3 it sends each micro-batch's gradients, and adds up shards:
    the least memory, and the most traffic.

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
        if self.spec.parallel is not None:
            raise UsageError("the optimizer is data parallel already")
        mesh, chunks = as_mesh(mesh), expect("chunks", chunks, int, "a number of stages a rank")
        self._changes["parallel"] = Parallel(
            mesh, rank, zero, micro_batches, batch, reduce, add=add, together=sync_batch_norm, sequence=sequence,
            schedule=schedule, chunks=chunks, cuts=None if cuts is None else tuple(as_texts(cuts, "cuts")),
            accumulate=accumulate,
        )  # fmt: skip
