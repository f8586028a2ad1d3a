"""Errors for a budget that no plan fits: the least one that works, and the bytes that no plan can save."""

from __future__ import annotations

from ....budgets import Budget
from ....errors import BudgetError
from ....language.ir import Block, Role
from ..core.simulate import plan_of
from ..methods.auto import deepest_of, quick_frontier_of
from .problem import Fitted, Fitting

#: means to lower the bytes that every plan holds
_LOWER = (
    "What lowers that: an optimizer with less state (SGD has none, Adam with moments='8-bit' a quarter), "
    "precision='bf16-pure', frozen parameters, LoRA (rc.lora)"
)


def held_bytes(block: Block) -> int:
    """Bytes of parameters, optimizer state and buffers, which every plan of a step holds."""
    return sum(v.nbytes for v in block.persistent())


def held_text(block: Block, plain: int) -> str:
    """A sentence on what a step holds in any case, as a share of the plain step's peak in bytes."""
    kinds = {"parameters": block.parameters, "optimizer state": block.state, "buffers": block.buffers}
    sizes = {kind: sum(v.nbytes for v in values) for kind, values in kinds.items()}
    parts = " + ".join(f"{kind} {n:,}" for kind, n in sizes.items() if n)
    held = sum(sizes.values())
    lower = f". {_LOWER}" if 2 * held > plain else ""
    return f"Every plan holds {parts or 'no state'}: {held / plain:.0%} of the plain step's {plain:,} bytes{lower}"


def lowest_quickly(fitting: Fitting, budget: int) -> Fitted:
    """The step with the lowest peak that is found without a search, as it is or with a plan.

    A plan from minimum cuts where that fits the budget; else also one that repeats as much as it takes.
    """
    derived = fitting.derived
    first = quick_frontier_of(derived.problem).first
    assert first is not None
    found = min(fitting.carry_out(derived.for_block(plan_of(first.sequence)), False), fitting.plain, key=_peak)
    deepest = deepest_of(derived.problem) if found.peak > budget else first
    if deepest.peak < first.peak:
        found = min(fitting.carry_out(derived.for_block(plan_of(deepest.sequence)), False), found, key=_peak)
    return found


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
    more = "a larger budget" if sure is None else f"a budget of {sure.peak}B or more (it is sure to do, and less may)"
    held = held_text(fitting.once, fitting.plain.peak)
    error = BudgetError(f"{text}{slices}. Give {more}, a smaller batch, or another strategy. {held}")
    error.lowest, error.sure = lowest, sure
    return error


def refuse_below_state(fitting: Fitting, budget: int, strategy: str) -> None:
    """BudgetError where a budget is below what every plan needs, in slices or not, before any plan is looked for.

    That is what every plan holds, and the gradients that one operator of the optimizer reads: those exist whole.
    """
    held = held_bytes(fitting.once)
    what, least = "what every plan holds", held
    if budget >= held:
        name, gradients = _largest_update(fitting)
        what, least = f"{what} and the gradients that the update '{name}' reads", held + gradients
    if budget < least:
        text = f"{fitting.derived.problem.name}: no schedule fits into {budget:,} bytes: at least {least:,} are needed"
        found = lowest_quickly(fitting, budget)
        error = refused(fitting, budget, strategy, found, found, f"{text} for {what}")
        raise extended(error, _share_text(found.peak, fitting.plain.peak, held))


def extended(error: BudgetError, more: str) -> BudgetError:
    """The error with more text behind its own."""
    longer = BudgetError(f"{error}{more}")
    longer.lowest, longer.sure = error.lowest, error.sure
    return longer


def _share_text(peak: int, plain: int, held: int) -> str:
    """The share of activations that a peak takes, as a budget; "" where it takes all."""
    if plain <= held or (share := -(-100 * (peak - held) // (plain - held))) >= 100:
        return ""
    of = Budget("", share=share / 100, of_activations=True).within(plain, held)
    return f"; the rest are activations, of which a budget can be a share: '{share}% of activations' is {of:,}"


def _largest_update(fitting: Fitting) -> tuple[str, int]:
    """The operator of the optimizer that reads the most bytes of other operators' results, and these bytes."""
    derived = fitting.derived
    problem, operators = derived.problem, derived.block.operators
    updates = [operators[own[0]].role is Role.OPTIMIZE for own in derived.operators]
    shared, found = set(problem.shared), ("", 0)
    for node, update in zip(problem.nodes, updates, strict=True):
        if update:
            made = [v for v in node.reads if v not in shared and (p := problem.producer[v]) >= 0 and not updates[p]]
            found = max(found, (node.name, sum(problem.sizes[v] for v in made)), key=lambda f: f[1])
    return found


def lower(a: Fitted | None, b: Fitted | None) -> Fitted | None:
    """The step with the lower peak, of those that there are."""
    return min((f for f in (a, b) if f is not None), key=_peak, default=None)


def _peak(f: Fitted) -> int:
    return f.peak
