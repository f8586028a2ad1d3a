"""What is said about a budget that no plan fits: the least that was found to work, and what no plan can lower."""

from __future__ import annotations

from ....errors import BudgetError
from ....language.ir import Block
from ..core.simulate import plan_of
from ..methods.auto import quick_frontier_of
from .problem import Fitted, Fitting


def held_bytes(block: Block) -> int:
    """Bytes of parameters, optimizer state and buffers, which every plan of a step holds."""
    return sum(v.nbytes for v in block.persistent())


def held_text(block: Block, plain: int) -> str:
    """A sentence on what a step holds in any case, as a share of the plain step's peak in bytes."""
    kinds = {"parameters": block.parameters, "optimizer state": block.state, "buffers": block.buffers}
    sizes = {kind: sum(v.nbytes for v in values) for kind, values in kinds.items()}
    parts = " + ".join(f"{kind} {n:,}" for kind, n in sizes.items() if n)
    held = sum(sizes.values())
    return f"Every plan holds {parts or 'no state'}: {held / plain:.0%} of the plain step's {plain:,} bytes"


def lowest_quickly(fitting: Fitting) -> Fitted:
    """The step with the lowest peak that is found without a search: as it is, or with a plan from minimum cuts."""
    derived = fitting.derived
    first = quick_frontier_of(derived.problem).first
    assert first is not None
    found = fitting.carry_out(derived.for_block(plan_of(first.sequence)), False)
    return min(found, fitting.plain, key=_peak)


def refused(
    fitting: Fitting, budget: int, strategy: str, lowest: Fitted, sure: Fitted | None = None, proven: str = ""
) -> BudgetError:
    """The error for a budget that no plan fits.

    `lowest`: the step with the lowest peak that was found; `sure`: one that is found for any budget that it fits;
    `proven`: a sentence on what is proven, which counts if that is a step without slices.
    """
    slices = f" (in slices: {' '.join(lowest.plan.slices)})" if lowest.plan.slices else ""
    if proven and not slices:
        text = f"{proven}; the lowest peak that was found is {lowest.peak:,}"
    else:
        text = f"strategy '{strategy}' finds no plan that fits {budget:,} bytes: its lowest peak is {lowest.peak:,}"
        if not slices and fitting.least <= budget:
            text += f"; no plan of any strategy can need less than {fitting.least:,}"
    more = "a larger budget" if sure is None else f"a budget of {sure.peak}B or more"
    held = held_text(fitting.once, fitting.plain.peak)
    error = BudgetError(f"{text}{slices}. Give {more}, a smaller batch, or another strategy. {held}")
    error.lowest, error.sure = lowest, sure
    return error


def refuse_below_state(fitting: Fitting, budget: int, strategy: str) -> None:
    """BudgetError where a budget is below what every plan holds, in slices or not, before any plan is looked for."""
    held = held_bytes(fitting.once)
    if budget < held:
        why = (
            f"{fitting.derived.problem.name}: no schedule fits into {budget:,} bytes: at least {held:,} are needed for "
            "what every plan holds"
        )
        found = lowest_quickly(fitting)
        raise refused(fitting, budget, strategy, found, found, why)


def lower(a: Fitted | None, b: Fitted | None) -> Fitted | None:
    """The step with the lower peak, of those that there are."""
    return min((f for f in (a, b) if f is not None), key=_peak, default=None)


def _peak(f: Fitted) -> int:
    return f.peak
