"""What a block goes through before its memory is planned, so that this machine's kernels run it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..errors import UsageError, nearest
from ..ir import Block, Operator
from ..kernels import PROVIDERS, accepting, fits, provider
from ..passes import ChannelsLast, ChooseKernels, FoldTransposes, Fusion, Lowering, OpenNorms, Pass
from ..passes.layouts import turned, turned_operator
from ..types import TensorType
from . import cpu

#: the operators' own numerics, as a provider's name
OWN = "numpy"


def providers() -> tuple[str, ...]:
    """The providers that this machine has, the most preferred first."""
    cpu.register_all()
    return tuple(name for name in cpu.MODULES if name in PROVIDERS)


def lowering(names: Sequence[str] | None = None) -> Lowering:
    """The lowering for these providers (None: all there are; `("numpy",)` or none: no lowering).

    UsageError for a provider that is not here.
    """
    if isinstance(names, str):
        names = names.split(",")
    here = providers()
    wanted = here if names is None else tuple(n for n in names if n != OWN)
    for name in wanted:
        if name not in here:
            raise UsageError(f"no provider '{name}'{nearest(name, here)}; here are: {', '.join((*here, OWN))}")
    if not wanted:
        return Lowering()
    fusion: tuple[Pass, ...] = (OpenNorms(), Fusion()) if "loops" in wanted else ()
    passes = (FoldTransposes(), ChannelsLast(wanted), *fusion, ChooseKernels(wanted))
    return Lowering(passes, functools.partial(_workspace, wanted))


def _workspace(names: tuple[str, ...], op: Operator) -> tuple[TensorType, ...]:
    """What the kernel will need that runs an operator; its own numerics' where there is none."""
    form = turned(op)
    if form is not None and form.always:
        last = turned_operator(op, form)
        if taken := accepting(names, last):
            return provider(taken).scratch(last)
    taken = accepting(names, op)
    return provider(taken).scratch(op) if taken else op.workspace()


def foreign(block: Block) -> bool:
    """Whether a block was lowered for kernels that are not here, or need other workspaces here."""
    return any(op.kernel and not fits(op) for op in block.operators)
