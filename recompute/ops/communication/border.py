"""The border between two stages of a pipeline."""

from __future__ import annotations

from typing import Any

from ...language.factors import aligned
from ...language.op import FunctionWriter, Op
from ...language.types import Operands


class Border(Op):
    """x of the stage `source`, in the stage `target`; its gradient goes the other way.

    In one process it is a copy.  For the rank of a stage it becomes a message (passes/slicing/staged.py): so messages
    of the backward pass come by differentiation, and all that an operator reads belongs to its own stage.
    """

    crosses_stages = True
    moves_data = True
    linear = ((0,),)

    source: int = 0
    target: int = 1

    def infer(self, x):
        if self.source < 0 or self.target < 0 or self.source == self.target:
            raise self.fail("source and target are the numbers of two different stages", x)
        return (x,)

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        outs[0][...] = ins[0]

    def gradient(self, b, ins, outs, grads):
        """dy, back in the stage that x is from."""
        return [b.emit(Border(self.target, self.source), grads[0])]

    def axis_factors(self, ins, outs):
        return aligned(ins, outs)

    def export(self, g: FunctionWriter, ins: Any, outs: Any) -> bool:
        g.node("Identity", ins, outs)
        return True

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,3]"))
        yield draw.case(cls(3, 2), draw("f32[4]"))
