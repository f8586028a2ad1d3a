"""The compiled program of an executor: the block of a program, compiled for a place and what is fetched."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..errors import UsageError, nearest
from ..language.ir import Block
from ..language.program import Compiled, Program
from ..passes import Target, memory_report, without_gc
from ..passes.offloading.offload import Offload, offloaded, staying, without_copies
from ..passes.recomputation.unplan import Unplan
from ..passes.sequence import cleaned, planned
from .lowering import foreign


def block_to_run(
    program: Program,
    target: Target,
    fetch: Sequence[str],
    others: Sequence[Block] = (),
    far: Collection[str] = frozenset(),
) -> Block:
    """The block with kernels, frees and addresses, which keeps fetched values; itself if it can run as it is.

    `target`: a resolved one.  A budget of the program also holds on its place: if the program's plan is for another
    target, a new plan is made.  `others`: the same at other sizes, whose order of operators it takes where it can.
    `far`: parameters and state that are on disk; without a plan, the block fetches them from there.
    """
    compiled = program.compiled if program.compiled and program.compiled.logical is program.logical else None
    for block in (program.block, *([compiled.block] if compiled is not None else ())):
        outputs = tuple(dict.fromkeys([*block.outputs, *fetch]))
        if block.addresses and outputs == block.outputs and _suits(block, compiled, target):
            return block
    with without_gc():
        if compiled is not None and compiled.refit is not None and not compiled.target.makes_the_same_as(target):
            compiled = compiled.refit(target)
            if set(fetch) <= set(compiled.block.outputs):
                return compiled.block
        block = _fetching(compiled.logical if compiled is not None else program.logical, fetch)
        by_planner = program.planned is not None  # which defines what is recomputed
        block = cleaned(block, target, planned=by_planner)
        if here := [v.name for v in block.persistent() if v.name in far and not v.type.host]:
            block = Offload((*offloaded(block), *here), tight=True).run(block)
        result = planned(block, target, others)
    for note in staying(block, result):
        warnings.warn(note, stacklevel=6)
    if compiled is not None and compiled.budget is not None and (peak := memory_report(result).peak) > compiled.budget:
        warnings.warn(
            f"the step takes {peak:,} bytes, its budget is {compiled.budget:,}: fetched values stay to the end of "
            "the step; fetch less, or plan with these values as outputs (compile_step(fetch=...))",
            stacklevel=6,
        )
    return result


def _suits(block: Block, compiled: Compiled | None, target: Target) -> bool:
    """Whether a block with addresses can run on a target as it is."""
    if foreign(block, target):
        return False
    if compiled is None or compiled.budget is None or compiled.block is not block:
        return True
    return compiled.target.makes_the_same_as(target)


def _fetching(block: Block, fetch: Sequence[str]) -> Block:
    """A logical block with fetched values among its outputs.  UsageError for values that it does not have."""
    values = block.values()  # of the logical block, as lowering may merge values that are fetched
    for name in fetch:
        if name not in values:
            raise UsageError(f"there is no value '{name}' to fetch{nearest(name, values)}")
    outputs = tuple(dict.fromkeys([*block.outputs, *fetch]))
    if any(values[name].type.host for name in fetch):  # what is fetched is in memory
        far = tuple(n for n in offloaded(block) if n not in fetch)
        block = replace(without_copies(Unplan().run(block)), outputs=outputs)
        return Offload(far, tight=True).run(block) if far else block
    return block.with_operators(block.operators, outputs=outputs)
