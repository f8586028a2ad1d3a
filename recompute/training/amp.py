"""Mixed precision for any optimizer: `MixedPrecision(Adam(1e-3), "bf16").minimize(loss)`.

The forward pass gets casts before it is differentiated (see passes/gradient/precision.py), parameters and the
optimizer's state stay float32.  With float16 the loss is scaled so that small gradients do not vanish (Micikevicius et
al. 2018, arXiv 1710.03740): the scale is state of the program, and operators of the program adapt it to the gradients
as PyTorch's GradScaler does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..boundary import as_texts
from ..errors import UsageError, expect
from ..language.builder import Builder
from ..language.ir import Operator, Role, Value
from ..language.program import Program, Variable
from ..language.types import TensorType
from ..language.verify import verify
from ..ops.loss.linear_cross_entropy import LinearLoss
from ..ops.loss.scale import InverseIfFinite, LossScaleUpdate
from ..ops.shape.reshape import Cast
from ..passes.gradient.precision import PRECISIONS, Precision, check_precision
from .base import begin_training, number, program_of
from .finite import unchecked_name
from .protocol import AnyOptimizer, ParamsGrads, StatefulWrapper, as_optimizer
from .recompute_optimizer import RecomputeOptimizer

__all__ = [
    "LossScaling",
    "MixedPrecision",
    "decorate",
    "with_precision",
]


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


class MixedPrecision(StatefulWrapper):
    """Wraps an optimizer: the forward pass computes in another precision.

    `precision`: "bf16", "fp16" (with loss scaling), "tf32" (float32, whose products may be rounded to TF32 on a device
    that has it) or "fp32".  `full`: names or globs of values whose operators stay in float32.  `loss_scaling`: None for
    the default with "fp16" and none with the others, or False for none.
    """

    def __init__(
        self,
        optimizer: AnyOptimizer,
        precision: str = "bf16",
        *,
        full: Sequence[str] = (),
        loss_scaling: LossScaling | bool | None = None,
    ) -> None:
        if isinstance(optimizer, (RecomputeOptimizer, MixedPrecision)):
            raise UsageError(
                "MixedPrecision wraps a plain optimizer: write RecomputeOptimizer(MixedPrecision(Adam(), 'bf16'))"
            )
        super().__init__(optimizer)
        self.precision = check_precision(precision)
        self._full = tuple(as_texts(full, "full"))
        expect("loss_scaling", loss_scaling, (LossScaling, bool, type(None)), "rc.amp.LossScaling(...), True or False")
        if not isinstance(loss_scaling, LossScaling):
            wanted = precision == "fp16" if loss_scaling is None else loss_scaling
            loss_scaling = LossScaling() if wanted else None
        self.loss_scaling: LossScaling | None = loss_scaling

    def _backward(self, loss: Variable, *options: Any) -> ParamsGrads:
        """Inserts casts, then the inner optimizer's backward pass, of the scaled loss if there is loss scaling.

        The gradients are then those of the scaled loss; `apply_gradients` unscales them.
        """
        program = self._program = program_of(loss)
        kept = [n for n in (loss.name, unchecked_name(program, loss.name)) if n is not None and _writes(program, n)]
        full = tuple(dict.fromkeys([*self._full, *kept]))
        begin_training(program, loss.name, full)
        if PRECISIONS[self.precision] is not None or self.precision == "tf32":
            program.fuse_head = False  # of products in halves and TF32 a device's libraries are faster
            program.block = verify(Precision(self.precision, full).run(program.block))
        if self.loss_scaling is None:
            return self.inner.backward(program[loss.name], *options)
        scaled = self._scaled(program, program[loss.name].value)
        self.inner.backward(program[scaled.name], *options)
        block = program.block  # nothing reads the scaled loss itself
        outputs = dict.fromkeys(loss.name if n == scaled.name else n for n in block.outputs)
        operators = [o for o in block.operators if scaled not in o.outputs]
        program.block = verify(block.with_operators(operators, outputs=tuple(outputs)))
        return [(program[p], program[g]) for p, g in program.gradients]

    def _scaled(self, program: Program, loss: Value) -> Value:
        """The loss times the scale; declares the scale."""
        assert self.loss_scaling is not None
        first: dict[str, np.ndarray] = {
            "loss_scale": np.array(self.loss_scaling.initial, np.float32),
            "good_steps": np.zeros((), np.int64),
        }
        self._state = []
        for wish, array in first.items():
            self._state.append(program.state_name(wish, TensorType.of(array)))
            program.declare("state", self._state[-1], array)
        scale = program[self._state[0]].value
        b = program.builder(Role.LOSS, f"{loss.name}.scaled")
        found = b.Mul(loss, scale if loss.dtype == scale.dtype else b.Cast(scale, to=loss.dtype))
        again = program.again
        program.append(b)
        program.again = again  # the scaled loss is part of training: the forward pass is as it was at other batches
        return found

    def apply_gradients(self, params_grads: Sequence[tuple[Variable, Variable]]) -> list[Operator]:
        """The inner optimizer's updates; with loss scaling they are skipped if a gradient is not finite.

        If a gradient is a cast from the low type, its update reads the operand of the cast, as it computes in float32;
        gradients that are sums over slices are summed in float32.
        """
        pairs = list(params_grads)
        if not pairs:
            return self.inner.apply_gradients(pairs)
        program = program_of(pairs[0][0])
        if getattr(self.inner, "_clip", None) is None and not program.slices:
            writers = {v.name: o for o in program.operators for v in o.writes()}
            pairs = [(p, _before_cast(program, writers.get(g.name), g)) for p, g in pairs]
        if self.loss_scaling is None:
            return self.inner.apply_gradients(pairs)
        scale, good = (program[n].value for n in self._state)
        made_once: list[Value] = []

        def unscale(b: Builder, gradients: Sequence[Value]) -> Value:
            made_once.append(b.emit(InverseIfFinite(), scale, *gradients, name="unscale"))
            return made_once[0]

        self.inner.apply_gradients(pairs, unscale=unscale)
        if self.loss_scaling.dynamic:
            b = program.builder(Role.OPTIMIZE)
            options = self.loss_scaling
            b.emit(LossScaleUpdate(options.growth, options.backoff, options.interval), scale, good, *made_once, want=2)
            program.append(b)
        verify(program.block)
        return [o for o in program.operators if o.role is Role.OPTIMIZE]

    def get_loss_scaling(self) -> float:
        """The scale of the next step's loss; 1 without loss scaling."""
        if self.loss_scaling is None:
            return 1.0
        if self._program is None or not self._state:
            return self.loss_scaling.initial
        return float(self._program.data[self._state[0]])


def decorate(
    optimizer: AnyOptimizer,
    *,
    init_loss_scaling: float = 2.0**16,
    incr_every_n_steps: int = 2000,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    use_dynamic_loss_scaling: bool = True,
    custom_black_varnames: Sequence[str] = (),
    dtype: str = "float16",
) -> MixedPrecision:
    """`MixedPrecision` by Paddle's names (`paddle.static.amp.decorate`); `dtype`: "float16" or "bfloat16".

    `custom_black_varnames`: names or globs of values whose operators stay in float32.

    The defaults are those of `LossScaling`.  The scale falls after every step that is not finite.
    """
    names = {"float16": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
    if not isinstance(dtype, str) or dtype not in names:
        raise UsageError(f"amp: dtype must be 'float16' or 'bfloat16', not {dtype!r}")
    scaling = LossScaling(init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps, use_dynamic_loss_scaling)
    scaled = scaling if names[dtype] == "fp16" else None
    return MixedPrecision(optimizer, names[dtype], full=custom_black_varnames, loss_scaling=scaled)


def with_precision(optimizer: AnyOptimizer, precision: str | None) -> Any:
    """The optimizer wrapped for a precision (None: as it is); a RecomputeOptimizer stays the outermost.

    UsageError if it has a precision already, or is not an optimizer.
    """
    as_optimizer(optimizer)
    if precision is None:
        return optimizer
    check_precision(precision)
    inner = optimizer.inner if isinstance(optimizer, RecomputeOptimizer) else optimizer
    if isinstance(inner, MixedPrecision):
        raise UsageError("the optimizer and the arguments both set the precision: give one of them")
    if precision == "fp32":
        return optimizer
    if isinstance(optimizer, RecomputeOptimizer):
        return optimizer.around(MixedPrecision(inner, precision))
    return MixedPrecision(inner, precision)


def _writes(program: Program, name: str) -> bool:
    """Whether an operator writes a value, and would otherwise compute all of it in the low type: a head's loss is
    float32 in any case, and its product is not."""
    made = program.block.producers().get(name)
    return made is not None and not isinstance(program.operators[made].op, LinearLoss)


def _before_cast(program: Program, made: Operator | None, g: Variable) -> Variable:
    """The operand of the cast that made a gradient; the gradient itself if it is not a cast to float32."""
    if made is None or not isinstance(made.op, Cast) or g.dtype != "f32":
        return g
    (source,) = made.inputs
    assert source is not None
    return Variable(program, source) if source.dtype in ("f16", "bf16") else g
