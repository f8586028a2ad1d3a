"""Norms and checks over the gradients of all stages of a pipeline.

Sums of squares are added up in float64, those of each stage first, so that a norm in float32 has, but for rare cases,
the bits of one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...language.program import Program
from ...language.types import TensorType
from ...ops.communication.base import Numbers, communicated
from ...ops.communication.collectives import AllGather
from ...ops.loss.scale import InverseIfFinite
from ...ops.optimizer.norm_updates import GlobalNorm, SquareSums
from ..base import Pass
from .schedules import Pipe


class NormsOverStages(Pass):
    """Take global norms of gradients, and checks of finite values, over all stages of the pipeline `pipe`.

    The gradient of a parameter that several stages have counts on the first of them.
    """

    pipe: Pipe

    def run(self, block: Block) -> Block:
        return norms_over_stages(block, self.pipe, ())

    def rewrite(self, program: Program) -> Block:
        """The block; a rank counts gradients of parameters whose first stage is its own."""
        stages = self.pipe.own()
        others = {g for p, g in program.gradients if program.first_stages.get(p, -1) not in stages}
        return norms_over_stages(program.block, self.pipe, others)


def norms_over_stages(block: Block, pipe: Pipe, others: Collection[str]) -> Block:
    """The block with global norms, and checks for values that are not finite, over all ranks of the pipeline.

    `others`: the gradients that do not count on this rank, as that of a parameter of several stages counts on one.
    """
    if pipe.ranks == 1:
        return block
    b, operators, numbers = Builder.on(block), list[Operator](), Numbers(block.operators)
    left = set(others)
    for o in block.operators:
        if o.role is Role.OPTIMIZE and not o.op.updates:  # what is made of a gradient, of its shape, is like it
            left.update(v.name for v in o.writes() if any(r.name in left and r.shape == v.shape for r in o.reads()))
        if not isinstance(o.op, (GlobalNorm, SquareSums, InverseIfFinite)):
            operators.append(o)
            continue
        (out,) = o.writes()
        b.operators, b.role, b.prefix = [], o.role, out.name
        if isinstance(o.op, InverseIfFinite):
            part = b.emit(o.op, *o.inputs)
            total = b.ReduceMin(_gathered(b, b.Reshape(part, shape=(1,)), pipe, numbers), axes=(0,), keepdims=0)
        else:
            parts = o.op.parts if isinstance(o.op, SquareSums) else 1
            total = _squares(b, [v for v in o.reads() if v.name not in left], parts, pipe, numbers)
            if isinstance(o.op, GlobalNorm):
                total = b.Sqrt(b.Reshape(total, shape=()))
                total = total if total.dtype == out.dtype else b.Cast(total, to=out.dtype)
        operators += [x.renamed({total.name: out.name}) for x in b.operators]
    return dataclasses.replace(block, operators=tuple(operators), constants=(*block.constants, *b.constants))


def _squares(b: Builder, local: Sequence[Value], parts: int, pipe: Pipe, numbers: Numbers) -> Value:
    """Sums of squares, f64[parts], of all stages."""
    squares = b.SquareSums(*local, parts=parts) if local else b.fill(0.0, TensorType("f64", (parts,)))
    return b.TreeSum(_gathered(b, squares, pipe, numbers), parts=pipe.ranks)


def _gathered(b: Builder, x: Value, pipe: Pipe, numbers: Numbers) -> Value:
    channel = f"{pipe.axis}.norms"
    return communicated(b, AllGather(pipe.axis, pipe.ranks, numbers.take(channel), channel), x)
