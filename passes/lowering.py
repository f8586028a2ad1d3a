"""A lowering: what a step goes through before its memory is planned, and what planners should know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir import Block, Operator
from ..types import TensorType
from .base import Pass, run_passes
from .transfers import LINK, Link, Seconds


@dataclass(frozen=True)
class Lowering:
    """The passes that fit a step to a machine; none by default.

    `workspace`: the temporary buffers that an operator of the step will need when it is lowered.  `providers`: whose
    kernels run it, the most preferred first.  `seconds`, `link`: times by which copies to host memory and back are
    placed (see `Offload`).
    """

    passes: tuple[Pass, ...] = ()
    workspace: Callable[[Operator], tuple[TensorType, ...]] = Operator.workspace
    providers: tuple[str, ...] = ()
    seconds: Seconds | None = None
    link: Link = LINK

    def run(self, block: Block) -> Block:
        """The block as the machine runs it, before `schedule`."""
        return run_passes(block, self.passes)
