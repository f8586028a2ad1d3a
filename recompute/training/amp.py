"""Mixed precision for any optimizer: `MixedPrecision(Adam(1e-3), "bf16").minimize(loss)`.

The forward pass gets casts before it is differentiated (see passes/gradient/precision.py), parameters and the
optimizer's state stay float32, but with "bf16-pure".  With float16 the loss is scaled (training/scaling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..boundary import as_texts
from ..errors import UsageError, expect
from ..language.program import Program
from ..passes.gradient.precision import check_precision
from .protocol import AnyOptimizer, StatefulWrapper, as_optimizer, spec_of
from .recompute_optimizer import RecomputeOptimizer
from .scaling import LossScaling, state_names
from .spec import Spec

__all__ = ["LossScaling", "MixedPrecision", "decorate", "with_precision"]


class MixedPrecision(StatefulWrapper):
    """Wraps an optimizer: the forward pass computes in another precision.

    `precision`: "bf16", "bf16-pure" (parameters and the optimizer's state in bfloat16, too, rounded stochastically: 6
    bytes a parameter with Adam), "fp16" (with loss scaling), "tf32" (float32, whose products may be rounded to TF32 on
    a device that has it) or "fp32".  `full`: names or globs of values whose operators stay in float32.
    `loss_scaling`: None for the default with "fp16" and none with the others, or False for none.
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

    @property
    def spec(self) -> Spec:
        """The inner optimizer's spec, in this precision."""
        return spec_of(self.inner).with_(precision=self.precision, full=self._full, scaling=self.loss_scaling)

    def _own_state(self, program: Program) -> list[str]:
        names = state_names(program) if self.loss_scaling is not None else ()
        return [n for n in names if n in program]

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
    """The optimizer in a precision (None or "fp32": as it is)."""
    as_optimizer(optimizer)
    return optimizer if precision in (None, "fp32") else MixedPrecision(optimizer, check_precision(str(precision)))
