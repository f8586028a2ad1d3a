"""Parameters, buffers and optimizer state in host memory: a step fetches what it reads, and stores what it updates.

A value is on the device in windows, from the first to the last of some operators that read it.  Between two windows its
buffer is free, and it is fetched again for the second one.  The last window of a value that is updated ends with the
copy back; what reads it after its update is in that window, too.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from ...language.builder import Names
from ...language.ir import Block, Operator, Role, Value
from ...language.types import need
from ...language.verify_addresses import ALIGNMENT, aligned
from ...ops.memory import offload as ops
from ..memory.liveness import Liveness
from ..memory.memory_plan import live_profile
from .transfers import Link, Seconds


@dataclass
class Window:
    """Operators `first` to `last` read `value` in one buffer; `updated`: one of them updates it.

    Slots, each right before the operator of this number: at `fetch` the copy from host memory begins, at `leave` the
    wait for the copy back is (without one: `last` + 1).
    """

    value: Value
    first: int
    last: int
    updated: bool
    fetch: int
    leave: int

    @property
    def bytes(self) -> int:
        """Bytes of its buffer in the arena."""
        return aligned(self.value.nbytes)


def far_names(block: Block) -> tuple[str, ...]:
    """Names of the parameters, buffers and state in host memory, in order."""
    return tuple(v.name for v in block.persistent() if v.type.host)


def storable(block: Block) -> dict[str, Value]:
    """Parameters, buffers and state that can be in host memory: not constants, outputs of the step, or empty ones."""
    kept = set(block.outputs)
    values = (*block.parameters, *block.buffers, *block.state)
    return {v.name: v for v in values if v.name not in kept and v.nbytes}


def place_windows(
    block: Block, names: Iterable[str], seconds: Seconds, link: Link, limit: int = 0, *, tight: bool = False
) -> Block:
    """The block with these parameters, buffers and state in host memory.

    Bytes alive never exceed those with windows of one operator each (or `limit`, if larger); within that, copies begin
    early, and values stay between two readers.  `tight`: nothing but windows of one operator each.
    """
    stored = storable(block)
    chosen = [stored[n] for n in names if n in stored]
    windows = list(_windows(block, chosen))
    if not tight and windows:
        windows = _Placing(block, windows, seconds, link, limit).run()
    return _written(block, chosen, windows)


def _windows(block: Block, chosen: Sequence[Value]) -> Iterator[Window]:
    """A window for each operator that reads one of the values; one for all from the first update on."""
    readers = block.consumers()
    updates = [{v.name for v in op.writes()} if op.op.updates else frozenset() for op in block.operators]
    for v in chosen:
        uses = readers.get(v.name, [])
        update = next((i for i in uses if v.name in updates[i]), None)
        for i in uses:
            if update is None or i < update:
                yield Window(v, i, i, False, i, i + 1)
        if update is not None:
            yield Window(v, update, uses[-1], True, update, uses[-1] + 1)


class _Placing:
    """Joins windows and moves their copies, in the room that there is."""

    def __init__(self, block: Block, windows: list[Window], seconds: Seconds, link: Link, limit: int) -> None:
        self.link = link
        self.starts = [0.0, *accumulate(seconds(op) for op in block.operators)]
        self.live = np.array([live for _, live in live_profile(Liveness().run(block), ALIGNMENT)], np.int64)
        self.of: dict[str, list[Window]] = {}
        for w in windows:
            self.live[w.first : w.leave] += w.bytes
            self.of.setdefault(w.value.name, []).append(w)
        self.room = max(int(self.live.max(initial=0)), limit)

    def run(self) -> list[Window]:
        self._join(short=True)
        windows = sorted((w for ws in self.of.values() for w in ws), key=lambda w: (w.first, w.value.name))
        self._fetch_early(windows)
        self._store_late(windows)
        self._join(short=False)
        return [w for ws in self.of.values() for w in ws]

    def _join(self, *, short: bool) -> None:
        """Joins two windows of a value between which there is room; `short`: those too near for a copy between them."""
        pairs = [pair for ws in self.of.values() for pair in pairwise(ws)]
        gaps = [(self.starts[b.first] - self.starts[a.last + 1], a, b) for a, b in pairs]
        joined: dict[int, Window] = {}
        for gap, a, b in sorted(gaps, key=lambda g: (g[0], g[1].last, g[1].value.name)):
            if short and gap > self.link.seconds(a.value.nbytes, back=True):
                continue
            while id(b) in joined:
                b = joined[id(b)]
            between = self.live[a.leave : b.fetch]
            if (between + a.bytes > self.room).any():
                continue
            between += a.bytes
            b.first, b.fetch = a.first, a.fetch
            joined[id(a)] = b
        for name, ws in self.of.items():
            self.of[name] = [w for w in ws if id(w) not in joined]

    def _fetch_early(self, windows: list[Window]) -> None:
        """Begins each copy at the last slot from which it is done in time, or as near to it as there is room."""
        wanted, free = [0] * len(windows), float("inf")
        for i in range(len(windows) - 1, -1, -1):
            w = windows[i]
            free = min(free, self.starts[w.first]) - self.link.seconds(w.value.nbytes, back=True)
            wanted[i] = max(bisect_right(self.starts, free) - 1, 0)
        before: dict[str, int] = {}
        last = 0
        for w, slot in zip(windows, wanted, strict=True):
            slot = min(max(slot, last, before.get(w.value.name, 0)), w.first)
            over = np.flatnonzero(self.live[slot : w.first] + w.bytes > self.room)
            slot += int(over[-1]) + 1 if over.size else 0
            self.live[slot : w.first] += w.bytes
            w.fetch = last = slot
            before[w.value.name] = w.leave

    def _store_late(self, windows: list[Window]) -> None:
        """Awaits each copy back where it is done, or earlier where there is no room."""
        free = 0.0
        for w in sorted((w for w in windows if w.updated), key=lambda w: w.last):
            free = max(free, self.starts[w.leave]) + self.link.seconds(w.value.nbytes, back=False)
            slot = min(bisect_left(self.starts, free), len(self.starts) - 1)
            over = np.flatnonzero(self.live[w.leave : slot] + w.bytes > self.room)
            slot = w.leave + int(over[0]) if over.size else max(slot, w.leave)
            self.live[w.leave : slot] += w.bytes
            w.leave = slot


def _written(block: Block, chosen: Sequence[Value], windows: Sequence[Window]) -> Block:
    """The block with the copies of all windows.

    In one slot: copies back that begin, waits for copies back, copies from the host that begin, waits for these.
    """
    names = Names(block.values())
    far = {v.name: Value(v.name, v.type.placed(host=True)) for v in chosen}
    slots: dict[int, tuple[list[Window], ...]] = {}
    for w in sorted(windows, key=lambda w: (w.first, w.value.name)):
        for kind, slot in enumerate((w.last + 1, w.leave, w.fetch, w.first)):
            if kind > 1 or w.updated:
                slots.setdefault(slot, ([], [], [], []))[kind].append(w)
    here: dict[str, Value] = {}
    coming: dict[str, Value] = {}
    result: list[Operator] = []

    def put(op: ops.Copy, *ins: Value, name: str = "") -> Value:
        (output,) = op.infer(*(v.type for v in ins))
        out = ins[0] if op.updates else Value(names.take(name), output)
        result.append(Operator(op, ins, (out,), Role.COMMUNICATE))
        return out

    for i, op in enumerate((*block.operators, None)):
        back, done, start, due = slots.get(i, ((), (), (), ()))
        for w in back:
            put(ops.Store(), far[w.value.name], here[w.value.name])
        for w in done:
            put(ops.StoreWait(), far[w.value.name], here[w.value.name])
        for w in start:
            coming[w.value.name] = put(ops.Prefetch(), far[w.value.name], name=f"{w.value.name}.coming")
        for w in due:
            n = w.value.name
            here[n] = put(ops.CopyWait(), coming[n], far[n], name=f"{n}.here")
        if op is not None:
            result.append(_with_copies(op, far, here, names))

    return _declaring(block, result, far)


def _declaring(block: Block, operators: Sequence[Operator], places: Mapping[str, Value]) -> Block:
    """The block with other operators, and with parameters, buffers and state declared where they are now."""

    def placed(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(places.get(v.name, v) for v in values)

    held = {kind: placed(getattr(block, kind)) for kind in ("parameters", "buffers", "state")}
    return block.with_operators(operators, addresses={}, **held)


def _with_copies(op: Operator, far: dict[str, Value], here: dict[str, Value], names: Names) -> Operator:
    """The operator reading what was fetched; what it updates of that gets a new name."""
    if not any(v.name in far for v in op.reads()):
        return op
    inputs = tuple(here[v.name] if v is not None and v.name in far else v for v in op.inputs)
    outputs = list(op.outputs)
    for i, v in enumerate(op.outputs):
        if v is not None and v.name in far:
            outputs[i] = here[v.name] = Value(names.take(f"{v.name}.new"), v.type)
    return dataclasses.replace(op, inputs=inputs, outputs=tuple(outputs))


def without_windows(block: Block) -> Block:
    """The block with all parameters, buffers and state on the device."""
    near = {v.name: Value(v.name, v.type.placed(host=False)) for v in block.persistent() if v.type.host}
    if not near:
        return block
    origin: dict[str, Value] = {}
    kept: list[Operator] = []
    for op in block.operators:
        if isinstance(op.op, ops.Store):
            continue
        source = op.inputs[0].name if op.inputs and op.inputs[0] is not None else ""
        if op.op.copies and (source in near or source in origin):
            origin[need(op.outputs[0]).name] = near.get(source) or origin[source]
            continue
        outputs = list(op.outputs)
        for i, k in enumerate(op.op.updates[: len(outputs)]):
            x = op.inputs[k] if k < len(op.inputs) else None
            if x is not None and outputs[i] is not None and x.name in origin:
                origin[need(outputs[i]).name] = origin[x.name]  # what reads the update reads what it updates
                outputs[i] = origin[x.name]
        kept.append(dataclasses.replace(op.reading(origin), outputs=tuple(outputs)))

    return _declaring(block, kept, near)
