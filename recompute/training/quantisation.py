"""Quantisation-aware training, for a program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..boundary import as_texts
from ..errors import UsageError, expect
from ..language.ir import Operator, Value
from ..language.program import Program
from ..passes.base import apply_passes
from ..passes.quantisation.quantize_aware import QuantizeAware
from .numbers import fraction
from .programs import must_be_untrained
from .state import contents

__all__ = ["must_have_ranges", "prepare_qat", "running_ends"]

#: the integers of activations
_INTEGERS = {"uint8": (0, 255), "int8": (-128, 127)}


def prepare_qat(
    program: Program,
    layers: str | Sequence[str] = "*",
    *,
    skip: str | Sequence[str] = (),
    skip_first: bool = False,
    skip_last: bool = False,
    activations: str = "uint8",
    reduce_range: bool = False,
    momentum: float = 0.99,
) -> Program:
    """Makes training aware that the model will run in 8-bit integers; returns the program.

    Before `minimize`.  Weights and activations of Conv, Gemm and MatMul are rounded in the forward pass as int8 weights
    with a scale for each output channel, and activations of one scale and zero point each will be; gradients pass
    through the rounding.  Ranges of activations are moving averages (`momentum`) of what training steps, and runs
    before `minimize`, saw; `evaluate` uses them as they are.  `export_trained` writes the 8-bit model.

    `layers`, `skip`: names and globs of weights or outputs of layers; `skip_first`, `skip_last`: leaves those layers in
    floats.  `activations`: "uint8" or "int8".  `reduce_range`: 7-bit weights, for x86 processors without VNNI, whose
    sums of products may saturate.  UsageError for what does not fit.
    """
    must_be_untrained(program)
    for what, flag in (("skip_first", skip_first), ("skip_last", skip_last), ("reduce_range", reduce_range)):
        expect(what, flag, bool, "True or False")
    if not isinstance(activations, str) or activations not in _INTEGERS:
        raise UsageError(f"activations must be 'uint8' or 'int8', not {activations!r}")
    low, high = _INTEGERS[activations]
    wanted, skipped = (
        tuple(program.aliases.get(n, n) for n in as_texts(p, what)) for p, what in ((layers, "layers"), (skip, "skip"))
    )
    levels = 63 if reduce_range else 127
    rewrite = QuantizeAware(wanted, skipped, skip_first, skip_last, low, high, levels, fraction("momentum", momentum))
    _rewritten(program, rewrite)
    return program


def _rewritten(program: Program, rewrite: QuantizeAware) -> None:
    """Runs the pass, also at other batches; ranges begin with 0, which has seen nothing."""
    before = {v.name for v in program.block.buffers}
    apply_passes(program, [rewrite])
    added = [v for v in program.block.buffers if v.name not in before]
    program.data.update((v.name, np.zeros(v.shape, v.type.numpy)) for v in added)
    program.edited(program.again, "quantisation", lambda made: _rewritten(made, rewrite))


def running_ends(op: Operator) -> list[Value]:
    """The end of a range that an operator follows, as a list; empty for other operators."""
    return [v for v in op.inputs[:1] if v is not None and op.op.name == "MovingRange"]


def must_have_ranges(program: Program) -> None:
    """UsageError where activations are rounded whose ranges nothing has shown yet."""
    ends = [v for op in program.forward_block.operators for v in running_ends(op)]
    if ends and not any(np.any(contents(program, v)) for v in ends):
        raise UsageError(
            f"program '{program.block.name}' rounds activations, but has seen none: run it on some batches first "
            "(training steps, or Executor().run(program, batch) before minimize)"
        )
