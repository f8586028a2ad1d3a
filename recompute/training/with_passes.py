"""Passes of one's own in every step that an optimizer makes."""

from __future__ import annotations

from collections.abc import Sequence

from ..passes.inserting import Insertion, insertion
from .protocol import AnyOptimizer, WrappedOptimizer, spec_of
from .spec import Spec


class WithPasses(WrappedOptimizer):
    """Wraps an optimizer: its steps also have these passes, such as "after:autodiff=my-pass" (`--insert-pass`).

    They are among the passes that make the step (`recompute.training.pipeline`), before it is compiled: in `minimize`,
    `compile_step` and the trainer.  UsageError for other texts, and for a place that the step does not have.
    """

    def __init__(self, inner: AnyOptimizer, inserted: Sequence[str | Insertion]) -> None:
        super().__init__(inner)
        self._inserted = tuple(map(insertion, inserted))

    @property
    def spec(self) -> Spec:
        """The inner optimizer's, with the passes."""
        before = spec_of(self.inner)
        return before.with_(inserted=(*before.inserted, *self._inserted))
