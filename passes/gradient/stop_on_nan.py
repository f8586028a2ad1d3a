"""A check of the loss, before anything is updated."""

from __future__ import annotations

import itertools

from ...errors import UsageError
from ...language.ir import Block, Operator, Value
from ...ops.loss.finite import CheckFinite
from ..base import Pass


class StopOnNan(Pass):
    """Make the step fail, before it updates anything, if the value called `loss` is infinite or NaN.

    The loss keeps its name: its operator writes NAME.unchecked, from which CheckFinite makes NAME.
    """

    loss: str = "loss"

    def run(self, block: Block) -> Block:
        """The block itself where the loss is checked already.  UsageError where no operator writes the loss."""
        at = block.producers().get(self.loss)
        if at is None:
            raise UsageError(f"stop-on-nan: no operator of '{block.name}' computes '{self.loss}'")
        source = block.operators[at]
        if isinstance(source.op, CheckFinite):
            return block
        values = block.values()
        names = itertools.chain([f"{self.loss}.unchecked"], (f"{self.loss}.unchecked_{i}" for i in itertools.count(1)))
        loss = values[self.loss]
        unchecked = Value(next(n for n in names if n not in values), loss.type)
        CheckFinite().infer(loss.type)
        checked = Operator(CheckFinite(), (unchecked,), (loss,), source.role)
        source = source.renamed({self.loss: unchecked.name})
        return block.with_operators([*block.operators[:at], source, checked, *block.operators[at + 1 :]])
