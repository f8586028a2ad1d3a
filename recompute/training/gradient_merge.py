"""Gradient merge for any optimizer: `GradientMergeOptimizer(Adam(1e-3), k_steps=4).minimize(loss)`."""

from __future__ import annotations

from .merge import Merge
from .protocol import AnyOptimizer
from .recompute_optimizer import RecomputeOptimizer

__all__ = ["GradientMerge", "GradientMergeOptimizer"]


class GradientMergeOptimizer(RecomputeOptimizer):
    """Wraps an optimizer: a step runs `k_steps` micro-batches one after the other, and then updates once.

    A program loaded at batch b becomes a step that takes k_steps · b samples, of which b are in memory at a time:
    gradients are added up in the order of the micro-batches.  Clipping, loss scaling and schedules see the merged
    gradient and count one step.  It is the gradient of the program's loss over all samples, the same as of one large
    batch but for rounding; a mean over labels that count is one over the labels of all micro-batches.  `avg=False`:
    k_steps times that.  `batch`: the samples of a step, if the program was loaded with all of them (default: k_steps
    times the program's).

    Checkpoints, a budget or a plan may be set on it, or on a RecomputeOptimizer inside or around it: each micro-batch
    recomputes alike.  Names and arguments are Paddle's.
    """

    def __init__(
        self, inner_optimizer: AnyOptimizer, k_steps: int = 1, avg: bool = True, *, batch: int | None = None
    ) -> None:
        super().__init__(inner_optimizer)
        self._changes["merge"] = Merge(k_steps, avg, batch)

    @property
    def k_steps(self) -> int:
        """Micro-batches of a step."""
        return int(self._changes["merge"].k_steps)


#: the short name
GradientMerge = GradientMergeOptimizer
