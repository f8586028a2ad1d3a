"""Recomputation: drops forward values, and recomputes them before the backward operators that need them.

A plan is data: which forward operators run again, and before which operator.  A planner makes one
(`plan_from_checkpoints` is the user's own choice), `apply` carries it out, and nothing else knows about it: a
recomputed value is an ordinary value with a name of its own, so verifier, liveness, memory plan and executor need no
special case.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...boundary import as_block, as_texts
from ...errors import UsageError, expect, nearest
from ...language.ir import Block, Operator, Role, Value
from ...language.program import Program
from ...ops.shape.reshape import Transpose
from ..base import Pass
from ..cleanup.dead_code import drop_unused_outputs
from ..cleanup.eager_updates import EagerUpdates

_FORWARD = (Role.FORWARD, Role.LOSS)


@dataclass(frozen=True)
class Rerun:
    """Run operator number `operator` again right before operator number `before` (both of the plain block)."""

    operator: int
    before: int


@dataclass(frozen=True)
class RecomputePlan:
    """Reruns in order of execution; `checkpoints` in order of production; `notes` for the user.

    `offloads`: values that wait in host memory (see passes/offloading/offload.py), by what they are called after the
    reruns.  `slices`: regions that run in slices (see passes/slicing); reruns number the operators of the sliced step.
    `approximations`: values that need not wait, and what waits in their place (see passes/approximation), by what they
    are called after all else; a plan that has nothing but these leaves normalised values to the pass "rebuild".
    `before`: approximations that come before recomputation, so that reruns number the operators of the step with them.
    """

    reruns: tuple[Rerun, ...] = ()
    checkpoints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    offloads: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    approximations: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    @property
    def only_approximates(self) -> bool:
        """Whether it recomputes nothing, and lets values go by approximations alone."""
        return bool(self.approximations) and not (self.reruns or self.before)


class Recompute(Pass):
    """Apply a plan, or make one from `checkpoints` first.

    `loss`: serves the notes about checkpoints that save nothing; `named`: the forward pass in which they were named, of
    which attention, normalisations and a head have become one operator each since.
    """

    checkpoints: tuple[str, ...] = ()
    plan: RecomputePlan | None = None
    loss: str = ""
    named: Block | None = field(default=None, compare=False, repr=False)

    def run(self, block: Block) -> Block:
        """Clones of forward operators before the backward operators that need them."""
        return apply(block, self.plan or plan_from_checkpoints(block, self.checkpoints))

    def rewrite(self, program: Program) -> Block:
        """The block with recomputation; `program.plan` is the plan, whose notes tell which checkpoints save nothing."""
        block, plan = program.block, self.plan
        if plan is None:
            names = list(self.checkpoints)
            if self.named is not None and program.forward is not None:
                names = _remaining(self.named, program.forward, names)
            values = block.values()
            gone = [n for n in names if n not in values]
            plan = plan_from_checkpoints(block, [n for n in names if n in values], self.loss or None)
            inside = [f"checkpoint '{n}' saves nothing: it is inside the head, which is one operator" for n in gone]
            plan = replace(plan, notes=(*plan.notes, *inside))
        program.plan = plan
        return apply(block, plan)


def _remaining(before: Block, after: Block, names: Sequence[str]) -> list[str]:
    """The checkpoints after attention became one operator: in place of what is inside of it, its result."""
    values, consumers = after.values(), before.consumers()
    found: dict[str, None] = {}
    for name in names:
        while name not in values and consumers.get(name):
            name = next(before.operators[consumers[name][-1]].writes()).name
        if name in values:
            found[name] = None
    return list(found)


def apply(block: Block, plan: RecomputePlan) -> Block:
    """Inserts the clones of a plan.  Reads after a clone see its value, so that the original value is freed earlier."""
    reruns: dict[int, list[int]] = {}
    for r in plan.reruns:
        if not 0 <= r.operator < r.before < len(block.operators):
            raise UsageError(f"the plan recomputes operator {r.operator} before operator {r.before}: out of order")
        reruns.setdefault(r.before, []).append(r.operator)
    latest: dict[str, Value] = {}
    count: dict[str, int] = {}
    taken = set(block.values())
    result: list[Operator] = []
    for i, op in enumerate(block.operators):
        for again in reruns.get(i, ()):
            result.append(_clone(block.operators[again], latest, count, taken))
        result.append(op.reading(latest))
    # optional outputs go where the reruns have taken their readers; one that had none (a gradient) is there to stay
    read = {v.name for o in block.operators for v in o.reads()}
    needed = {v.name for o in block.operators for v in o.writes() if v.name not in read}
    needed.update(block.outputs, (v.name for o in result for v in o.reads()))
    return _updates_wait(block.with_operators(drop_unused_outputs(o, needed) for o in result))


def _updates_wait(block: Block) -> Block:
    """A rerun must not see a parameter that is already updated: where one would, updates move behind it."""
    updated: set[str] = set()
    for op in block.operators:
        if op.role is Role.RECOMPUTE and any(v.name in updated for v in op.reads()):
            return EagerUpdates().run(block)
        if op.role is Role.OPTIMIZE and op.op.updates:
            updated.update(v.name for v in op.writes())
    return block


def _clone(op: Operator, latest: dict[str, Value], count: dict[str, int], taken: set[str]) -> Operator:
    """A copy of a forward operator, or of a view or Transpose of its result, that writes NAME@1 (later NAME@2, ...)."""
    if op.op.once or (op.role not in _FORWARD and not op.views() and not isinstance(op.op, Transpose)):
        together = op.op.communicates or op.op.crosses_stages
        kind = "communicates with other ranks" if together else "changes state or is not a forward operator"
        why = f"{kind}: it cannot be recomputed"
        raise UsageError(f"{op.op.name} ({op.role.value}) {why}")
    copy = op.reading(latest)
    outputs: list[Value | None] = []
    for v in op.outputs:
        if v is not None:
            n = count.get(v.name, 0) + 1
            while f"{v.name}@{n}" in taken:
                n += 1
            count[v.name] = n
            latest[v.name] = v.renamed(f"{v.name}@{n}")
            v = latest[v.name]
            taken.add(v.name)
        outputs.append(v)
    return dataclasses.replace(copy, outputs=tuple(outputs), role=Role.RECOMPUTE)


def plan_from_checkpoints(block: Block, checkpoints: Sequence[str], loss: str | None = None) -> RecomputePlan:
    """The plan of Paddle's RecomputeOptimizer (Chen et al. 2016, arXiv 1604.06174), without its dead recompute.

    Checkpoints cut the forward list into segments at their producers, in order of production.  Kept are the
    checkpoints, values that cross a segment's border, declared values, outputs of the block, and everything after
    the last checkpoint.  Whatever else a backward operator reads is run again right before the first one that
    needs it, together with just those operators of its segment that it depends on.

    `loss` serves the note about checkpoints that the loss does not depend on.  UsageError for unknown names.
    """
    values = as_block(block).values()
    checkpoints = as_texts(checkpoints, "checkpoints")
    expect("loss", loss, (str, type(None)), "the name of a value")
    for name in checkpoints:
        if name not in values:
            raise UsageError(f"there is no value '{name}' to checkpoint{nearest(name, values)}")
    producers = forward_producers(block)
    names = sorted(dict.fromkeys(checkpoints), key=lambda n: producers.get(n, -1))
    borders = sorted({producers[n] for n in names if n in producers})
    kept = _kept(block, producers, borders, names)
    reruns = _demand(block, producers, kept)
    on_path = None if loss is None or loss not in producers else _ancestors(block, producers, loss)
    busy = {bisect_left(borders, r.operator) for r in reruns}
    useful = {n for n in names if n in producers and bisect_left(borders, producers[n]) in busy}
    notes = _notes(names, producers, useful, on_path, loss)
    return RecomputePlan(tuple(reruns), tuple(names), tuple(notes))


def forward_producers(block: Block) -> dict[str, int]:
    """Forward value → index of its operator (the last one, for names that are checkpoints)."""
    declared = {v.name for v in block.declared()}
    return {
        v.name: i
        for i, op in enumerate(block.operators)
        if op.role in _FORWARD
        for v in op.writes()
        if v.name not in declared
    }


def _kept(block: Block, producers: dict[str, int], borders: list[int], names: Iterable[str]) -> set[str]:
    """Forward values that stay: checkpoints, outputs, border crossers, and all after the last border.

    What is made of state that the forward pass updates stays too: a second run would see it changed.  So does what
    comes from other ranks, and small outputs: no normalisation runs again for its statistics alone.
    """
    kept = set(names).union(block.outputs)
    kept.update(v.name for op in block.operators for i, v in enumerate(op.outputs) if v and i in op.op.small_outputs)
    forward = [op for op in block.operators if op.role in _FORWARD]
    changed = {v.name for op in forward if op.op.updates for v in op.writes()}
    once = [o for o in forward if o.op.communicates or o.op.crosses_stages or any(r.name in changed for r in o.reads())]
    kept.update(v.name for op in once for v in op.writes())
    last = borders[-1] if borders else -1
    kept.update(n for n, i in producers.items() if i > last)
    segment = {n: bisect_left(borders, i) for n, i in producers.items()}
    for i, op in enumerate(block.operators):
        if op.role in _FORWARD:
            here = bisect_left(borders, i)
            kept.update(v.name for v in op.reads() if segment.get(v.name, here) != here)
    return kept


def _demand(block: Block, producers: dict[str, int], kept: set[str]) -> list[Rerun]:
    """Reruns by demand: each dropped value once, right before the first backward operator that needs it."""
    there: set[int] = set()
    reruns: list[Rerun] = []
    for i, op in enumerate(block.operators):
        if op.role in _FORWARD:
            continue
        for v in op.reads():
            if v.name in producers and v.name not in kept:
                reruns += [Rerun(j, i) for j in _missing(block, producers[v.name], producers, kept, there)]
    return reruns


def _missing(block: Block, want: int, producers: dict[str, int], kept: set[str], there: set[int]) -> list[int]:
    """Operators that must run again for operator `want`'s outputs, in order of execution; marks them as there."""
    positions: list[int] = []
    stack = [want]
    while stack:
        j = stack.pop()
        if j in there:
            continue
        there.add(j)
        positions.append(j)
        stack += [producers[v.name] for v in block.operators[j].reads() if v.name in producers and v.name not in kept]
    return sorted(positions)


def _notes(
    names: list[str], producers: Mapping[str, int], useful: set[str], on_path: set[int] | None, loss: str | None
) -> list[str]:
    """Notes for the user on checkpoints that save nothing: off the loss path, or of no use."""
    notes = []
    for name in names:
        if name not in producers:
            notes.append(f"checkpoint '{name}' is an input or parameter: it is always kept and saves nothing")
        elif on_path is not None and producers[name] not in on_path:
            notes.append(f"checkpoint '{name}' is off the path to the loss '{loss}': it saves nothing")
        elif name not in useful:
            notes.append(f"checkpoint '{name}' saves nothing: no gradient needs a value of the segment before it")
    return notes


def _ancestors(block: Block, producers: dict[str, int], name: str) -> set[int]:
    """Indices of the forward operators that `name` depends on."""
    seen: set[int] = set()
    stack = [producers[name]]
    while stack:
        i = stack.pop()
        if i not in seen:
            seen.add(i)
            stack += [producers[v.name] for v in block.operators[i].reads() if v.name in producers]
    return seen
