"""What a block goes through before its memory is planned, so that this machine's kernels run it."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError, nearest
from ..ir import Block, Operator
from ..kernels import PROVIDERS
from ..passes import ChooseKernels, Pass

#: the operators' own numerics, as a provider's name
OWN = "numpy"


def providers() -> tuple[str, ...]:
    """The providers that this machine has, in order of preference."""
    return tuple(PROVIDERS)


def lowering(names: Sequence[str] | None = None) -> tuple[Pass, ...]:
    """The passes of a lowering for these providers (None: all there are; `("numpy",)` or none: no lowering).

    UsageError for a provider that is not here.
    """
    if isinstance(names, str):
        names = names.split(",")
    wanted = providers() if names is None else tuple(n for n in names if n != OWN)
    for name in wanted:
        if name not in PROVIDERS:
            raise UsageError(
                f"no provider '{name}'{nearest(name, PROVIDERS)}; here are: {', '.join((*PROVIDERS, OWN))}"
            )
    return (ChooseKernels(wanted),) if wanted else ()


def is_here(op: Operator) -> bool:
    """Whether this machine has the operator's kernel."""
    return not op.kernel or op.kernel in PROVIDERS


def foreign(block: Block) -> bool:
    """Whether a block was lowered for kernels that this machine does not have."""
    return not all(map(is_here, block.operators))
