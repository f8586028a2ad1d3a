"""A plan for eager PyTorch: which operators of each repeated block a selective checkpoint keeps, within a budget.

A checkpointed block keeps its inputs and what its policy saves; before its backward pass all of it but the saved
operators runs again.  So the time that saving an operator wins is its own, whatever else is saved, and the choice is a
knapsack over all blocks, filled by seconds per byte (Dantzig 1957).  The peak of a choice is counted by running the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module

from ...boundary import as_texts
from ...errors import UsageError
from .costs import machine_of
from .eager_step import Copied, blocks_of, loss_of
from .partition import budget_of
from .selective import Region, Search, contexts, wrap


@dataclass
class Policy:
    """Checkpoints of a module's blocks within a budget; `apply(module)` wraps them, `str()` is a table.

    `regions`: the blocks in the order in which they run.  `peak`, `plain_peak`, `least`: bytes of the step with the
    policy, without it, and with every block checkpointed and nothing saved.  `seconds`: of the step without
    checkpoints, by the cost model.  Called without arguments, it returns the contexts of the block whose turn it is:
    `context_fn=policy` of `torch.utils.checkpoint`, for each block once and in order, as Transformers calls it.
    """

    regions: tuple[Region, ...]
    budget: int
    peak: int
    plain_peak: int
    least: int
    seconds: float
    _turn: int = field(default=0, repr=False)
    _warned: set[str] = field(default_factory=set, repr=False)

    @property
    def overhead(self) -> float:
        """Seconds of what runs again, as a share of the step without checkpoints."""
        return sum(r.again for r in self.regions) / self.seconds if self.seconds else 0.0

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the modules that are checkpointed."""
        return tuple(r.name for r in self.regions if r.wrapped)

    def __call__(self) -> tuple[Any, Any]:
        """The contexts of the next block's checkpoint.  UsageError where some block is to be left as it is."""
        if len(self.blocks) != len(self.regions):
            raise UsageError(
                "policy: it leaves some blocks as they are: use apply(module), or plan with every_block=True"
            )
        region = self.regions[self._turn % len(self.regions)]
        self._turn += 1
        return contexts(region, self._warned)

    def apply(self, module: Module) -> Module:
        """Wraps the blocks of `module` in PyTorch's checkpoint wrapper, in place; returns the module.

        Names in its state stay as they are.
        """
        for region in self.regions:
            if region.wrapped:
                wrap(module, region.name, lambda r=region: contexts(r, self._warned))
        return module

    def __str__(self) -> str:
        lines = [
            f"peak {self.peak:,} bytes of {self.budget:,} (plain {self.plain_peak:,}, least {self.least:,}), "
            f"extra time {self.overhead:.2%}"
        ]
        for r in self.regions:
            names = [r.operators[i].name for i in sorted(r.saved)]
            kept = f"saves {len(names)}: {', '.join(names)}" if r.wrapped else "not checkpointed"
            lines.append(f"  {r.name:32} {len(r.operators):4} operators, {kept}")
        return "\n".join(lines)


def policy(
    module: Module,
    example: tuple | dict[str, Any],
    *,
    budget: Any,
    loss: Callable[[Any], Any] | None = None,
    blocks: Sequence[str] | None = None,
    every_block: bool = False,
    cost: str | None = None,
    fake: bool = False,
) -> Policy:
    """A selective-checkpoint policy for `module(*example)` (or `**example`), so that a step's peak is at most `budget`.

    `budget`: bytes, or a share of the step without checkpoints, of parameters, buffers, inputs and all that is alive
    during forward and backward pass.  `loss`: of what the module returns (default: that itself, or its `.loss`).
    `blocks`: names of modules to checkpoint (default: the repeated ones).  `every_block`: none is left as it is, which
    Transformers' `gradient_checkpointing_enable` needs.  `cost`: the device whose rates price operators.
    `fake`: steps run on tensors without contents, for a plain step that does not fit; Transformers' masks differ then.
    BudgetError where nothing fits; UsageError for blocks that cannot run twice, by name.
    """
    from torch.utils.checkpoint import SelectiveCheckpointContext

    if not hasattr(SelectiveCheckpointContext(is_recompute=False), "op_output"):
        raise UsageError(f"policy: PyTorch {torch.__version__} does not show results to policies: 2.12 or later does")
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        raise UsageError(
            "policy: called within torch.autocast, whose casts stay: put autocast into the module's forward"
        )
    args, kwargs = ((), dict(example)) if isinstance(example, dict) else (tuple(example), {})
    names = None if blocks is None else as_texts(blocks, "blocks")
    found = blocks_of(module, names)
    kinds = {p.device.type for p in module.parameters()}
    on = kinds.pop() if len(kinds) == 1 else "cpu"
    copied = Copied.of(module, args, kwargs, machine_of(cost, on), fake)
    search = Search(copied, loss or loss_of, tuple(found), measure=on == "cpu")
    plain = search.plain()
    plain_peak = max(plain.peaks(search.measure).values())
    limit = budget_of(budget).within(plain_peak, plain.held)
    regions, empty = search.read()
    least = max(empty.peaks(search.measure).values())
    if plain_peak <= limit and not every_block:
        chosen, peak = tuple(Region(r.name, r.operators, wrapped=False) for r in regions), plain_peak
    else:
        chosen, peak = search.within(regions, empty, limit, every_block)
    return Policy(chosen, limit, peak, plain_peak, least, plain.seconds)
