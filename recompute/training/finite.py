"""Ending a training run at the first loss that is not finite."""

from __future__ import annotations

from ..errors import UsageError
from ..language.program import Program, Variable
from ..ops.loss.finite import CheckFinite
from ..passes.base import apply_passes
from ..passes.gradient.stop_on_nan import StopOnNan
from .programs import must_be_untrained, program_of

__all__ = ["stop_on_nan"]


def stop_on_nan(loss: Variable) -> Variable:
    """Makes training steps end with a NotFiniteError if the loss is infinite or NaN; returns the loss, for `minimize`.

    The check is an operator of the program (CheckFinite), before all updates: a step that fails changes nothing, so
    that the parameters of the last good step can be saved.  The error names the value that first became NaN or
    infinite.  (Keras calls this TerminateOnNaN; PyTorch's detect_anomaly looks for the operator.)

    UsageError for what is not one floating-point number, and where `minimize` was called already.
    """
    program = program_of(loss)
    must_be_untrained(program)
    if not loss.value.type.is_float or loss.value.size != 1:
        raise UsageError(f"stop_on_nan takes a loss, one floating-point number, but '{loss.name}' is {loss.value.type}")
    apply_passes(program, [StopOnNan(loss.name)])
    return program[loss.name]


def unchecked_name(program: Program, name: str) -> str | None:
    """The name of the value that `stop_on_nan` checks to make the loss `name`; None if it is not checked."""
    at = program.block.producers().get(name)
    check = None if at is None else program.operators[at]
    if check is None or not isinstance(check.op, CheckFinite):
        return None
    return next(check.reads()).name
