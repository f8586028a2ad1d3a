"""Scaling of the loss, so that small gradients in float16 do not vanish (Micikevicius et al. 2018, arXiv 1710.03740).

The scale is state of the program, and operators of the program adapt it to the gradients as PyTorch's GradScaler does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import UsageError
from ..language.ir import Block, Operator, Role
from ..language.program import Program
from ..language.types import TensorType
from ..ops.loss.scale import InverseIfFinite, LossScaleUpdate
from ..ops.shape.reshape import Cast
from ..passes.base import Pass
from .numbers import number

#: names of the state, where the model has none of these names
SCALE, STEPS = "loss_scale", "good_steps"


@dataclass(frozen=True)
class LossScaling:
    """Options of loss scaling; the defaults are PyTorch's.

    `initial`: the first scale.  A step with a gradient that is not finite is skipped, and the scale multiplied by
    `backoff`; after `interval` consecutive other steps it is multiplied by `growth`.  `dynamic=False`: the scale is
    constant; steps are skipped all the same.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    dynamic: bool = True

    def __post_init__(self) -> None:
        for name in ("initial", "growth", "backoff"):
            if number(f"loss scaling's {name}", getattr(self, name)) == 0:
                raise UsageError(f"loss scaling's {name} must be above 0")
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 1:
            raise UsageError(f"loss scaling's interval must be a number of steps, not {self.interval!r}")


def state_names(program: Program) -> tuple[str, str]:
    """The names of the scale and of the count of good steps in a program, whether they are declared yet or not."""
    types = TensorType.of(np.zeros((), np.float32)), TensorType.of(np.zeros((), np.int64))
    return program.state_name(SCALE, types[0]), program.state_name(STEPS, types[1])


class ScaleLoss(Pass):
    """Declare the scale of the loss, with which its gradient begins (`autodiff{scale=...}`)."""

    initial: float = 2.0**16

    def run(self, block: Block) -> Block:
        program = Program(block)
        return self.rewrite(program)

    def rewrite(self, program: Program) -> Block:
        first = np.array(self.initial, np.float32), np.zeros((), np.int64)
        program.declare_all("state", list(zip(state_names(program), first, strict=True)))
        return program.block


class UpdateScale(Pass):
    """Adapt the scale of the loss at the end of a step: the fields are those of `LossScaling`."""

    needs = ("updates",)

    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def run(self, block: Block) -> Block:
        """The block with LossScaleUpdate behind the check of the gradients."""
        program = Program(block)
        return self.rewrite(program)

    def rewrite(self, program: Program) -> Block:
        scale, good = (program[n].value for n in state_names(program))
        inverse = next(o for o in program.operators if isinstance(o.op, InverseIfFinite) and o.inputs[0] == scale)
        b = program.builder(Role.OPTIMIZE)
        b.emit(LossScaleUpdate(self.growth, self.backoff, self.interval), scale, good, *inverse.writes(), want=2)
        program.append(b)
        return program.block


class UncastGradients(Pass):
    """Have updates read the operands of gradients that are casts from a lower precision: they compute in float32."""

    needs = ("gradients",)
    refuses = ("updates",)

    def run(self, block: Block) -> Block:
        """The block itself: which values are gradients is known of a program."""
        return block

    def rewrite(self, program: Program) -> Block:
        writers = {v.name: o for o in program.operators for v in o.writes()}
        program.gradients = [(p, _before_cast(writers.get(g), g)) for p, g in program.gradients]
        return program.block


def _before_cast(operator: Operator | None, gradient: str) -> str:
    """The operand of the cast to float32 that made a gradient; the gradient itself if there is none."""
    if operator is None or not isinstance(operator.op, Cast) or operator.op.to != "f32":
        return gradient
    (source,) = operator.inputs
    assert source is not None
    return source.name if source.dtype in ("f16", "bf16") else gradient
