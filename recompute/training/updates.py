"""The passes that end a training step: updates, moving averages of the weights, the count of steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from ..language.builder import Builder
from ..language.ir import Block, Operator, Role, Value
from ..language.program import Program, Variable
from ..language.types import DTYPES
from ..ops.optimizer.average import AverageUpdate
from ..ops.optimizer.base import work_dtype
from ..ops.optimizer.norm_updates import TrustUpdate
from ..ops.optimizer.updates import Increment
from ..passes.base import Pass


class OtherRule:
    """An optimizer of another class than ours as a rule of updates: its own `apply_gradients` adds them."""

    clips = False
    parameters = None

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __copy__(self) -> OtherRule:
        return OtherRule(copy.copy(self.optimizer))

    def add_updates(
        self,
        program: Program,
        pairs: Sequence[tuple[Value, Value]],
        scale: Value | None = None,
        *,
        stochastic: bool = False,
    ) -> None:
        """Its updates.  UsageError with loss scaling and stochastic rounding, of which it knows nothing."""
        if scale is not None or stochastic:
            what = "bf16-pure" if stochastic else "loss scaling"
            raise UsageError(f"{what} needs an optimizer of recompute.optimizers, not {self.optimizer!r}")
        self.optimizer.apply_gradients([(Variable(program, p), Variable(program, g)) for p, g in pairs])

    def check(self, program: Program, names: Sequence[str]) -> None:
        """Nothing: it has no groups that are known."""

    def count_step(self, program: Program) -> None:
        """Nothing: it counts steps itself, if it does."""


class Updates(Pass):
    """Add the updates of an optimizer, `rule`, for the program's pairs of parameters and gradients.

    `scale`: the state by which gradients were multiplied; a step whose gradients are not finite is skipped.
    `stochastic`: parameters in bfloat16, and their state, are rounded stochastically.
    """

    needs = ("gradients",)
    refuses = ("updates",)
    gives = ("updates",)

    rule: Any
    scale: str = ""
    stochastic: bool = False

    def __str__(self) -> str:
        more = f",scale={self.scale}" * bool(self.scale) + ",stochastic" * self.stochastic
        return f"{self.name}{{rule={type(self.rule).__name__}{more}}}"

    def run(self, block: Block) -> Block:
        """The block itself: which values are gradients is known of a program."""
        return block

    def rewrite(self, program: Program) -> Block:
        """The block with updates and the optimizer's state; UsageError for pairs that are not of the program."""
        pairs = [(program[p].value, program[g].value) for p, g in program.gradients]
        scale = program[self.scale].value if self.scale else None
        self.rule.add_updates(program, pairs, scale, stochastic=self.stochastic)
        return program.block


class CountStep(Pass):
    """Increment the step counter of an optimizer, `rule`, at the end; a step that loss scaling skips does not count."""

    needs = ("updates",)

    rule: Any

    def __str__(self) -> str:
        return self.name

    def run(self, block: Block) -> Block:
        return block

    def rewrite(self, program: Program) -> Block:
        self.rule.count_step(program)
        return program.block


class AverageWeights(Pass):
    """Keep moving averages of the weights that train, NAME.average, updated at the end of a step.

    average ← decay · average + (1 - decay) · weight; see `recompute.ExponentialMovingAverage`.
    """

    needs = ("updates",)

    decay: float = 0.999
    thres_steps: bool = False

    def run(self, block: Block) -> Block:
        """The block itself: which parameters train is known of a program."""
        return block

    def rewrite(self, program: Program) -> Block:
        """The block with averages, before the count of steps, which they read."""
        weights = [program[p].value for p, _ in program.gradients]
        averages = program.declare_all("state", [(f"{p.name}.average", _first(program, p)) for p in weights])
        counter = next((o for o in program.operators if isinstance(o.op, Increment)), None)
        if counter is None:
            raise UsageError("moving averages of weights need an optimizer of recompute.optimizers, which counts steps")
        b = program.builder(Role.OPTIMIZE, "average")
        keep = self._keep(b, *counter.reads())
        for average, p in zip(averages, weights, strict=True):
            b.operators.append(Operator(AverageUpdate(), (average, p, keep), (average,), Role.OPTIMIZE))
        program.append(b)
        block = program.block
        return block.with_operators([*(o for o in block.operators if o is not counter), counter])

    def _keep(self, b: Builder, step: Value, unscale: Value | None = None) -> Value:
        """The share of the average that stays: 0 in the first step, 1 in a step that is skipped."""
        done = b.Cast(step, to="f32")
        keep = b.constant(self.decay, "f32")
        if self.thres_steps:
            keep = b.Min(keep, b.Div(b.Add(done, b.constant(1.0, done)), b.Add(done, b.constant(10.0, done))))
        keep = b.Where(b.Equal(step, b.constant(0, step)), b.constant(0.0, "f32"), keep)
        if unscale is not None:
            keep = b.Where(b.Equal(unscale, b.constant(0.0, unscale)), b.constant(1.0, "f32"), keep)
        return keep


def _first(program: Program, p: Value) -> np.ndarray:
    """The initial average: the weights; those of a file are not copied before they change."""
    array = np.asarray(program.data[p.name])
    wanted = DTYPES[work_dtype(p.type)]
    return array if array.dtype == wanted and not array.flags.writeable else np.array(array, wanted)


class WholeNormsOnly(Pass):
    """Refuse updates that take the norm of a whole parameter where ranks have parts; `mesh`, `zero`: as the user says.

    Nothing is rewritten.
    """

    mesh: str = ""
    zero: int = 0

    def run(self, block: Block) -> Block:
        return block

    def rewrite(self, program: Program) -> Block:
        """The block itself, or UsageError."""
        trust = next((o for o in program.operators if isinstance(o.op, TrustUpdate)), None)
        if trust is not None and (program.sharded or program.divided):
            what, instead = (f"zero={self.zero}", ", or zero=0") if program.sharded else (f"mesh {self.mesh}", "")
            raise UsageError(
                f"{what} and {type(trust.op).__name__.removesuffix('Update')} are not combined: its update takes the "
                f"norm of a whole parameter, of which a rank has a part; use Adam or AdamW{instead}"
            )
        return program.block
