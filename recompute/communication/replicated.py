"""What the ranks of a program that was written by hand must begin with alike.

Nothing says which of its values are replicas: ranks may have parts of weights, or programs of their own.  But what
every rank updates in the same way, by sums or gathers of what it was fed and by what it had, stays the same only if it
was the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..language.ir import Block, Value
from ..ops.communication.base import Communication
from ..ops.communication.collectives import AllGather, AllReduce, Broadcast

Axes = frozenset[str]
_NONE: Axes = frozenset()
#: in a name that ranks compare, what follows it is not shown
HIDDEN = "\0"


@dataclass(frozen=True)
class Replica:
    """The mesh's axes along which a value must be the same; `how`: a digest of how a step updates it.

    Ranks with another `how` have a value of their own under the same name.
    """

    axes: Axes
    how: str = ""


def replicated(block: Block) -> dict[str, Replica]:
    """Parameters, buffers and state that stay the same along axes only if ranks begin with the same, by name.

    With them the single numbers that their updates read and no step changes, such as a learning rate, constants too.
    What ranks are fed, and larger values that no step changes, are taken for different.  Linear in the block, a few
    times.
    """
    every: Axes = frozenset(o.op.axis for o in block.operators if isinstance(o.op, Communication))
    updated = dict.fromkeys(v.name for o in block.operators if o.op.updates for v in o.writes())
    constants = {c.value.name for c in block.constants}
    fixed = {v.name: every for v in block.declared() if v.name in constants or _number(v)}
    kept = dict.fromkeys(updated, every)
    fed = _fed(block)
    before: dict[str, Axes] = {}
    while kept != before:
        before, after = kept, _after(block, {**fixed, **kept}, every, fed)
        kept = {n: axes & after[n] for n, axes in before.items()}
    how = _structure(block) if any(kept.values()) else {}
    replicas = {n: Replica(axes, how[n]) for n, axes in kept.items() if axes}
    for o in block.operators:
        axes_of_writes = [replicas[v.name].axes for v in o.writes() if v.name in replicas] if o.op.updates else []
        for v in o.reads() if axes_of_writes else ():
            if v.name in fixed and v.name not in updated and _number(v):
                replicas[v.name] = Replica(axes_of_writes[0] & replicas.get(v.name, Replica(every)).axes)
    return replicas


def _number(v: Value) -> bool:
    """Whether it may be an option, such as a rate; integers may be a rank's place."""
    return v.size == 1 and v.type.is_float


def _fed(block: Block) -> set[str]:
    """Names of the inputs and of all values computed from them.  (Other communication makes weights alike.)"""
    names = {v.name for v in block.inputs}
    for o in block.operators:
        if any(v.name in names for v in o.reads()):
            names.update(v.name for v in o.writes())
    return names


def _after(block: Block, before: Mapping[str, Axes], every: Axes, fed: set[str]) -> dict[str, Axes]:
    """The axes along which values are the same after a step, from those along which declared ones were before."""
    state = dict(before)
    for o in block.operators:
        reads = [state.get(v.name, _NONE) for v in o.reads()]
        same = every
        if o.op.communicates:
            same = reads[0] if reads else _NONE  # a wait reads what was sent too
        elif reads:
            same = frozenset.intersection(*reads)
        if isinstance(o.op, Communication):
            axis, gives_all = {o.op.axis}, isinstance(o.op, (AllReduce, AllGather, Broadcast))
            same = same | axis if gives_all and any(v.name in fed for v in o.reads()) else same - axis
        state.update((v.name, same) for v in o.writes())
    return state


def _structure(block: Block) -> dict[str, str]:
    """Digests of how values are computed of declared ones and of what is communicated."""
    names = {v.name: v.name for v in block.declared()}
    names |= {c.value.name: repr(c) for c in block.constants if not _number(c.value)}
    for o in block.operators:
        reads = [] if isinstance(o.op, Communication) else [names[v.name] if v else "" for v in o.inputs]
        digest = hashlib.sha256(repr((o.op, reads[:1] if o.op.communicates else reads)).encode()).hexdigest()
        names.update((v.name, f"{digest[:16]}.{i}") for i, v in enumerate(o.writes()))
    return names
