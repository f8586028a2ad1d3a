"""What a block goes through before its memory is planned, so that this machine's kernels run it."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError, nearest
from ..ir import Block
from ..kernels import PROVIDERS
from ..passes import PASSES, ChannelsLast, ChooseKernels, OpenNorms, Pass
from ..passes.fold_transposes import FoldTransposes
from . import cpu

#: the operators' own numerics, as a provider's name
OWN = "numpy"


def providers() -> tuple[str, ...]:
    """The providers that this machine has, the most preferred first."""
    cpu.register_all()
    return tuple(name for name in cpu.MODULES if name in PROVIDERS)


def lowering(names: Sequence[str] | None = None) -> tuple[Pass, ...]:
    """The passes of a lowering for these providers (None: all there are; `("numpy",)` or none: no lowering).

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
        return ()
    fusion = [OpenNorms(), PASSES["fusion"]()] if "fusion" in PASSES and "loops" in wanted else []
    return (FoldTransposes(), ChannelsLast(wanted), *fusion, ChooseKernels(wanted))


def foreign(block: Block) -> bool:
    """Whether a block was lowered for kernels that this machine does not have."""
    return any(op.kernel and op.kernel not in PROVIDERS for op in block.operators)
