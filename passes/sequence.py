"""The list of passes that compile a training step, in order, defined only here.

    for p in step_passes(target): print(p)

Each phase is a function of its own, because planners stop between them: they compare many plans for one step.  The
passes that make the step are those of `recompute.training.pipeline`.  `recompute-compile --print-passes` prints both
lists, `--dump-ir` writes the program after each pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..boundary import as_block, as_texts
from ..errors import UsageError, expect
from ..language.ir import Block, Operator
from ..language.kernels import accepting, provider
from ..language.types import TensorType
from ..language.verify import trusted
from .approximation.approximate import Approximate
from .base import Pass, run_passes
from .cleanup.commit_updates import CommitUpdates
from .cleanup.dead_code import DeadCode
from .communication.buckets import Buckets
from .communication.overlap import Overlap
from .communication.regather import Regather
from .communication.tree_sums import TreeSums
from .inserting import with_inserted
from .lowering.channels_last import ChannelsLast
from .lowering.choose_kernels import ChooseKernels
from .lowering.fold_transposes import FoldTransposes
from .lowering.fusion import Fusion
from .lowering.heads_last import HeadsLast
from .lowering.layouts import turned, turned_operator
from .lowering.scatter_gradients import ScatterGradients
from .memory.liveness import Liveness
from .memory.memory_plan import MemoryPlan, memory_report
from .offloading.offload import Offload, lowered_names, offloaded, without_copies
from .recomputation.rebuild import Rebuild
from .recomputation.recompute import Recompute, RecomputePlan
from .recomputation.split_norms import FuseNorms, OpenNorms, SplitNorms
from .recomputation.temporary_weights import TemporaryWeights
from .recomputation.unplan import Unplan
from .scheduling.schedule import InBestOrder, Schedule, in_order_of
from .slicing.open_means import OpenMeans
from .slicing.slicing import Slice, whole_last
from .target import Target


def step_passes(
    target: Target, plan: RecomputePlan | None = None, *, scheduled: bool = False, moved: Sequence[str] | None = None
) -> list[Pass]:
    """The passes that compile a training step, in order.

    `target`: a resolved target.  `plan`: a planner's plan (None: no planning), for the operators of the step before the
    pass "recompute"; `scheduled`: the plan is for the order made by `schedule`.  `moved`: what is offloaded, as the
    lowered step calls it (`lowered_without_copies`).  UsageError for a plan that offloads without these names.  The
    passes that make the step come before (`recompute.training.pipeline`).
    """
    if plan is not None:
        expect("plan", plan, RecomputePlan, "a RecomputePlan")
    if moved is None and plan is not None and plan.offloads:
        raise UsageError(
            f"the plan offloads {', '.join(plan.offloads)}: `moved` must say what the lowered step calls these "
            "(lowered_without_copies of the step with the plan)"
        )
    return [
        *cleanup_passes(target, planned=plan is not None and not plan.only_approximates),
        *(plan_passes(target, plan, scheduled=scheduled) if plan is not None else ()),
        *lowering_passes(target),
        *memory_passes(target, as_texts(moved or (), "moved")),
    ]


def cleanup_passes(target: Target, *, planned: bool = False) -> list[Pass]:
    """The first passes of any step.  `planned`: a plan will define which normalised values are recomputed."""
    rebuild = expect("target", target, Target, "an rc.Target").rebuild and not planned
    weights = [TemporaryWeights()] if target.rebuild else []
    passes = [Unplan(), DeadCode(), *weights, *([Rebuild()] if rebuild else ()), CommitUpdates()]
    return with_inserted(passes, target.insertions)


def numbered_passes(target: Target, *, scheduled: bool = False) -> list[Pass]:
    """The passes before the step whose operators plans number: normalisations are split into two parts.

    They are split after operators were reordered (`scheduled`), so that both parts stay together.
    """
    return [*([Schedule()] if scheduled else ()), *([SplitNorms()] if target.rebuild else ())]


def plan_passes(target: Target, plan: RecomputePlan, *, scheduled: bool = False) -> list[Pass]:
    """The passes that apply a plan, except its copies to host memory, which are placed at the end."""
    if plan.only_approximates:
        return [*([Slice(plan.slices)] if plan.slices else ()), Approximate(plan.approximations)]
    regions, whole = whole_last(plan.slices)
    return [
        *([Slice(regions)] if regions else ()),
        *([Approximate(plan.before)] if plan.before else ()),
        *([OpenMeans()] if whole else ()),
        *numbered_passes(target, scheduled=scheduled),
        *recomputing_passes(plan),
    ]


def recomputing_passes(plan: RecomputePlan) -> list[Pass]:
    """The passes that insert the recomputation of a plan into the step whose operators it numbers.

    Slices of the whole step follow: each recomputes as the plan says.  Approximations come last.
    """
    _, whole = whole_last(plan.slices)
    slices: list[Pass] = [Slice(whole), CommitUpdates()] if whole else []
    last = [Approximate(plan.approximations)] if plan.approximations else []
    return [Recompute(plan=plan), DeadCode(), FuseNorms(), *slices, *last]


def lowering_passes(target: Target) -> list[Pass]:
    """The passes that lower a step for the kernels of a place; without kernel providers, communication only."""
    names = target.kernels
    if not names:
        return with_inserted(_communication(), target.insertions)
    fusion: list[Pass] = [OpenNorms(), Fusion(device=target.on_device)] if fuses(target) else []
    gradients = [FoldTransposes(), HeadsLast(names), ScatterGradients(names)]
    passes = [*_communication(), *gradients, ChannelsLast(names), *fusion, ChooseKernels(names)]
    return with_inserted(passes, target.insertions)


def fuses(target: Target) -> bool:
    """Whether a target's steps have generated loops, which `open-norms` and `fusion` prepare."""
    return not {"loops", "cuda"}.isdisjoint(target.kernels)


def _communication() -> list[Pass]:
    """The passes for communication between ranks; they leave other steps as they are."""
    return [Regather(), Buckets(), TreeSums()]


def memory_passes(target: Target, moved: Sequence[str] = (), limit: int = 0) -> list[Pass]:
    """The passes for order, copies, frees and addresses.

    `moved`: the offloaded values, by their names in the lowered step; `limit`: see `Offload`.
    """
    seconds = None if target.cost is None else target.cost.seconds
    offload = Offload(tuple(moved), limit, seconds=seconds, link=target.rates)
    copies: list[Pass] = [offload] if moved else []
    then = (*copies, *last_passes())
    return [InBestOrder(then)] if target.schedule else list(then)


def last_passes() -> tuple[Pass, ...]:
    """The passes that follow the order of operators."""
    return Overlap(), Liveness(), MemoryPlan()


# -- running them -----------------------------------------------------------------------------------------------------


def cleaned(block: Block, target: Target, *, planned: bool = False) -> Block:
    """A block after `cleanup_passes`.

    Without outputs, dead code is undefined: the block is returned unchanged.
    """
    passes = cleanup_passes(target, planned=planned)
    return run_passes(block, passes if as_block(block).outputs else passes[:1])


def lowered(block: Block, target: Target) -> Block:
    """A block after `lowering_passes`."""
    return run_passes(block, lowering_passes(target))


def lowered_without_copies(block: Block, target: Target) -> tuple[Block, tuple[str, ...]]:
    """A cleaned block after `lowering_passes`, without its copies, and what it offloads by its names there."""
    names, bare = offloaded(block), without_copies(block)
    result = lowered(bare, target)
    there = lowered_names(names, bare, result) if names else {}
    return result, tuple(dict.fromkeys(name for others in there.values() for name in others))


def planned(block: Block, target: Target, others: Sequence[Block] = (), limit: int = 0) -> Block:
    """A cleaned block after lowering, in the best order found, with frees and addresses, and with its copies placed for
    this order.

    `others`: the same step at other sizes, planned: the order of one is taken where the arena becomes no larger than
    the largest of theirs.  `limit`: bytes of the arena that copies of offloaded values may use (see `Offload`).
    """
    with trusted() if others else contextlib.nullcontext():  # what will run is verified
        block, moved = lowered_without_copies(block, target)
    if target.schedule and (ordered := in_order_of(others, block)) is not None:
        result = run_passes(ordered, memory_passes(replace(target, schedule=False), moved))
        if memory_report(result).arena <= max(memory_report(other).arena for other in others):
            return result
    return run_passes(block, memory_passes(target, moved, limit))


def plan_memory(block: Block, target: Target) -> Block:
    """The block that will run: cleaned, lowered, in the best order found, with frees and addresses."""
    return planned(cleaned(block, target), target)


def workspace(target: Target) -> Callable[[Operator], tuple[TensorType, ...]]:
    """The temporary buffers that an operator will need after lowering, for planners."""
    return functools.partial(_workspace, target.kernels) if target.kernels else Operator.workspace


def _workspace(names: tuple[str, ...], op: Operator) -> tuple[TensorType, ...]:
    """The workspace of the kernel that will run an operator; without one, of its own numerics."""
    form = turned(op)
    if form is not None and form.always:
        last = turned_operator(op, form)
        if taken := accepting(names, last):
            return provider(taken).scratch(last)
    taken = accepting(names, op)
    return provider(taken).scratch(op) if taken else op.workspace()
