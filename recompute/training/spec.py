"""What the user asks of a training step beside its model: `Spec`, which optimizers and their wrappers describe.

`pipeline` (training/pipeline.py) makes the list of passes of it, which is what runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..cost import CostModel
from ..errors import UsageError
from ..language.ir import Block
from ..language.program import Again, Variable
from ..passes import Target
from ..passes.approximation.base import parse_permissions
from ..passes.inserting import Insertion
from ..passes.slicing.slicing import whole_last
from ..planning.request import Request
from .merge import Merge
from .parallel_options import Parallel
from .scaling import LossScaling

#: why checkpoints and a planner exclude each other
_BOTH = (
    "checkpoints and a budget, strategy or plan both define what is recomputed: give one of them (to check "
    "whether checkpoints fit a budget, use `--memory-budget` on the command line, or rc.estimate)"
)


_NOTHING = Request()
#: the fields of a spec that change memory and time, and no result but for approximations and slices
_PLAN = frozenset({"checkpoints", "planning", "offload", "slices", "allowed", "target", "cost"})


@dataclass(frozen=True)
class Average:
    """Moving averages of the weights: see `recompute.ExponentialMovingAverage`."""

    decay: float
    thres_steps: bool = False


@dataclass(frozen=True)
class Spec:
    """The description of a training step.

    `rule`: the optimizer that updates.  `precision`: of the forward pass, with the values `full` in float32, and
    `scaling` of the loss.  `average`: moving averages of the weights.  `checkpoints`: what is kept, or `planning`: what
    a planner is asked for (see `request`); `offload`: checkpoints go to host memory.  `slices`: parts of the step, or
    the whole, that run in slices.  `allowed`: approximations.  `merge`: micro-batches; `parallel`: the mesh, and this
    rank.  `target` and `cost`: what plans are made for.  `later`: a planner puts the step into the slices of the whole.
    `inserted`: passes that wrappers add to those that make the step.
    """

    rule: Any
    precision: str | None = None
    full: tuple[str, ...] = ()
    scaling: LossScaling | None = None
    average: Average | None = None
    checkpoints: tuple[str | Variable, ...] = ()
    planning: Request = _NOTHING
    offload: bool = False
    slices: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    merge: Merge | None = None
    parallel: Parallel | None = None
    target: Target | None = None
    cost: CostModel | None = None
    later: bool = False
    inserted: tuple[Insertion, ...] = ()

    def with_(self, **changes: Any) -> Spec:
        """A copy with changes."""
        return dataclasses.replace(self, **changes)

    @property
    def whole(self) -> tuple[str, ...]:
        """The slices of the whole step, after recomputation: of ranks, of micro-batches, or those that are named."""
        merge, parallel = self.merge, self.parallel
        if parallel is not None and (parallel.pieces(merge) > 1 or parallel.pipe is not None):
            return (parallel.slices(merge),)
        if merge is not None and merge.k_steps > 1:
            return (f"micro:0:{merge.k_steps}",)
        return whole_last(self.slices)[1]

    @property
    def regions(self) -> tuple[str, ...]:
        """The parts of the step that run in slices, before recomputation."""
        return whole_last(self.slices)[0]

    @property
    def micro_batches(self) -> Merge | None:
        """The micro-batches of all ranks together."""
        return self.merge if self.parallel is None else self.parallel.merge(self.merge)

    @property
    def request(self) -> Request | None:
        """The request to a planner: `planning`, with the offloading, approximations and slices of the step.

        None without one.  UsageError for options that are invalid or exclude each other.
        """
        allowed = () if self.checkpoints or not self.allowed else parse_permissions(self.allowed)
        planning = dataclasses.replace(self.planning, offload=self.offload, approximations=allowed).checked()
        return None if planning is None else dataclasses.replace(planning, slices=self.whole)

    @property
    def recomputes(self) -> bool:
        """Whether checkpoints, a budget, a strategy or a plan are set."""
        return bool(self.checkpoints) or self.request is not None

    def without_plan(self) -> Spec:
        """The spec of the step with nothing recomputed, approximated or in slices: the same numbers."""
        plain: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(self) if f.name in _PLAN}
        return self.with_(**plain)

    def for_batch(self, samples: int, most: int) -> Spec:
        """The spec for steps of `samples` samples, with gradient merge in micro-batches of at most `most` samples."""
        if self.parallel is not None:
            merge = None if self.merge is None else Merge(1, self.merge.avg)
            return self.with_(parallel=self.parallel.for_batch(samples, self.merge), merge=merge)
        return self if self.merge is None else self.with_(merge=self.merge.for_batch(samples, most))

    def only_slices(self) -> Spec:
        """The spec with its slices only: nothing recomputed or approximated."""
        return self.without_plan().with_(slices=self.slices)

    def before_slices(self) -> Spec:
        """`only_slices`, before the step is put into the slices of the whole."""
        return self.only_slices().with_(later=True)

    def at_whole_batch(self, batch: int) -> tuple[Spec, int]:
        """The spec for a program at the batch of all micro-batches of `batch`, and the number of these.

        Of ranks, `batch` is that of all of them.
        """
        if self.parallel is not None:
            return self.with_(parallel=dataclasses.replace(self.parallel, batch=batch)), 1
        if self.merge is None:
            return self, 1
        merge = dataclasses.replace(self.merge, batch=batch * self.merge.k_steps)
        return self.with_(merge=merge), merge.k_steps

    def check(self) -> None:
        """UsageError for options that are not combined."""
        if self.checkpoints and self.planning.plans:
            raise UsageError(_BOTH)
        for (a, b), why in _EXCLUDED.items():
            if _ON[a](self) and _ON[b](self):
                raise UsageError(why(self) if callable(why) else why)


@dataclass(frozen=True)
class StepAgain:
    """How a forward pass became a training step: what makes it again, and the `block` that this made.

    `most`: the samples of the forward pass, which with gradient merge are those of a micro-batch.
    """

    spec: Spec
    forward: Again | None
    loss: str
    parameters: Sequence[str]
    no_grad: Sequence[str]
    most: int
    block: Block


def _several(spec: Spec) -> bool:
    """Whether a rank runs several slices of the whole step."""
    parallel = spec.parallel
    return bool(spec.whole) and (parallel is None or parallel.pieces(spec.merge) != parallel.sharing)


#: facts of a spec
_ON: dict[str, Any] = {
    "offload": lambda s: s.offload,
    "allowed": lambda s: s.allowed,
    "several": _several,
    "micro-batches": lambda s: s.micro_batches is not None,
    "slices of the whole": lambda s: whole_last(s.slices)[1],
    "pipeline": lambda s: s.parallel is not None and s.parallel.pipe is not None,
    "request": lambda s: s.request is not None,
}
#: facts that are not combined → why
_EXCLUDED: dict[tuple[str, str], Any] = {
    ("offload", "several"): lambda s: (
        "values in host memory are not combined with slices of the whole step: leave one of them out"
        if s.parallel is None
        else "values in host memory are not combined with several micro-batches on a rank: give as many "
        "micro_batches as there are ranks, or leave enable_offload out"
    ),
    ("offload", "allowed"): "values in host memory are not combined with approximations: leave one of them out",
    ("micro-batches", "slices of the whole"): lambda s: (
        f"{'gradient merge' if s.parallel is None else 'data parallelism'} and slices of the whole step are the same: "
        "give one of them"
    ),
    ("pipeline", "request"): lambda s: (
        f"a pipeline (mesh {s.parallel.mesh}) and a budget, strategy or plan are not combined yet: name checkpoints"
    ),
}
