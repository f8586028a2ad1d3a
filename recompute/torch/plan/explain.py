"""What a plan keeps and recomputes of a module's step, beside what PyTorch's own partition takes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn import Module

from ...passes.planners.core.simulate import Outcome
from .backend import eager
from .judge import of_pytorch
from .partition import Figures, Partitioner, budget_of

#: PyTorch's budgets among which the one with the nearest peak is looked for
_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class Explanation:
    """A plan in words: `str()` is a table.

    `kept`, `recomputed`: (name, operator, bytes, reason) of values of the forward pass that the backward pass reads.
    `theirs`: (name, peak in bytes, seconds) of PyTorch's partitions.  `figures`: bytes and seconds of ours.
    """

    figures: Figures
    kept: tuple[tuple[str, str, int, str], ...]
    recomputed: tuple[tuple[str, str, int, str], ...]
    theirs: tuple[tuple[str, Outcome], ...]

    def __str__(self) -> str:
        f = self.figures
        lines = [f"{'partition':34} {'peak, bytes':>16} {'extra time':>11}"]
        rows = [("step without recomputation", f.plain), ("ours", f.outcome), *self.theirs]
        for name, outcome in rows:
            lines.append(f"{name:34} {outcome.peak:16,} {outcome.cost / f.plain.cost - 1:11.2%}")
        if f.bound:
            lines.append(
                f"no plan within {f.budget:,} bytes takes less than {f.bound / f.plain.cost - 1:.2%}: gap {f.gap:.2%}"
            )
        for title, rows_of in (("kept for the backward pass", self.kept), ("recomputed", self.recomputed)):
            lines += [f"{title}: {len(rows_of)} values, {sum(r[2] for r in rows_of):,} bytes"]
            lines += [f"  {n:32} {op:42} {size:14,}  {why}" for n, op, size, why in rows_of]
        return "\n".join(lines)


def explain(
    module: Module, example: tuple[Any, ...], *, budget: Any, cost: str | None = None, pytorch: bool = True
) -> Explanation:
    """Compiles `module` for `module(*example)` with operators one after the other, and says what its plan does.

    Runs the forward pass once.  `pytorch`: beside PyTorch's default partition at budget 1.0, and at the one of nine
    budgets whose peak is next to the plan's.  BudgetError where no plan fits, UsageError for several graphs.
    """
    from ...errors import BudgetError, UsageError

    partition = Keeping(budget_of(budget), cost)
    torch._dynamo.reset()
    try:
        torch.compile(module, backend=lambda m, i: eager(m, i, partition))(*example)
    except torch._dynamo.exc.BackendCompilerFailed as e:
        if isinstance(e.inner_exception, (BudgetError, UsageError)):
            raise e.inner_exception from None
        raise
    finally:
        torch._dynamo.reset()
    if len(partition.figures) != 1:
        raise UsageError(
            f"explain: the module became {len(partition.figures)} graphs with gradients; one can be explained"
        )
    (figures,) = partition.figures
    kept, recomputed = _values(figures)
    return Explanation(figures, kept, recomputed, _theirs(partition, figures) if pytorch else ())


class Keeping(Partitioner):
    """A partitioner that keeps a copy of the joint graph as PyTorch gave it."""

    original: tuple[GraphModule, int]

    def __call__(self, module: GraphModule, inputs: Any = (), *, num_fwd_outputs: int, **options: Any) -> Any:
        self.original = copy.deepcopy(module), num_fwd_outputs
        return super().__call__(module, inputs, num_fwd_outputs=num_fwd_outputs, **options)


def _values(figures: Figures) -> tuple[tuple, tuple]:
    """Values that the backward pass reads: those that are kept, and those that run again, with a reason."""
    joint, again = figures.joint, set()
    seen: set[int] = set()
    for i in figures.order:
        if i in seen:
            again.add(i)
        seen.add(i)
    wanted = {v for o in joint.operations if not o.forward for v in o.reads}
    kept, recomputed = [], []
    for i, o in enumerate(joint.operations):
        if not o.forward:
            continue
        for v in o.writes:
            row = (joint.names[v], str(o.node.target), joint.sizes[v])
            if i in again:
                recomputed.append((*row, "cheaper to run again than to keep"))
            elif v in wanted:
                leaves = "leaves the graph: it is there anyway" if v in joint.outputs else "dearer to run again"
                kept.append((*row, o.why or leaves))
    return tuple(kept), tuple(recomputed)


def _theirs(partition: Keeping, figures: Figures) -> tuple[tuple[str, Outcome], ...]:
    module, outputs = partition.original
    costs = {
        share: of_pytorch(module, outputs, share, partition.cost, unread=partition.unread) for share in (1.0, *_SHARES)
    }
    first = costs.pop(1.0)
    share = min(costs, key=lambda s: abs(costs[s].peak - figures.peak))
    return ("PyTorch, budget 1.0", first), (f"PyTorch, budget {share}", costs[share])
