"""Offloading: copies of forward values to host memory, and back before the backward pass reads them.

Which values: a list of names.  Parameters, buffers and state among them stay in host memory (windows.py).  When they go
and come: chosen here, for the order of operators as it is, so that this pass comes last before `liveness`.  Copies that
are in the block already are placed anew.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from ...boundary import as_block
from ...errors import UsageError, nearest
from ...language.builder import Names
from ...language.ir import Block, Free, Operator, Role, Value
from ...language.verify_addresses import ALIGNMENT, aligned
from ...ops.memory import offload as ops
from ..base import Pass
from ..memory.liveness import Liveness
from ..memory.memory_plan import live_profile
from ..recomputation.unplan import Unplan
from .transfers import LINK, Link, Seconds
from .windows import far_names, place_windows, storable, without_windows

_FORWARD = (Role.FORWARD, Role.LOSS)


class Offload(Pass):
    """Copy `values` to host memory after their last forward use, and back before the next operator that reads them.

    Parameters, buffers and state among them stay there, and are fetched for the operators that read them.

    A copy out begins right after the operator that writes the value.  Its wait is placed late enough, and the copy back
    begins early enough, for the device not to stall, subject to one rule: the bytes alive on the device never exceed
    the peak of the step with copies that take no time (or `limit`, if larger).  If the rule requires it, the device
    waits.  A value whose copy back would begin before its copy out is done stays on the device if there is room.

    `tight`: all copies are awaited immediately, for a program that will be planned (which places them again).
    `seconds`: the time of an operator (default: a roofline); `link`: the rate of copies.  Without `values`, existing
    copies are placed again.
    """

    values: tuple[str, ...] = ()
    limit: int = 0
    tight: bool = False
    seconds: Seconds | None = None
    link: Link = LINK

    def run(self, block: Block) -> Block:
        """The block with copies.  UsageError for names that are not in it; what needs no copy gets none."""
        if any(isinstance(op.op, Free) for op in block.operators):
            raise UsageError("'offload' comes before 'liveness': it adds operators, and frees must follow")
        names = self.values or offloaded(block)
        block = without_copies(block)
        rests, seconds = find_rests(block, names), self.seconds or roofline
        if rests and self.tight:
            block = _written(block, [_tight(block, r) for r in rests])
        elif rests:
            block = _Placing(block, rests, seconds, self.link, self.limit).run()
        return place_windows(block, names, seconds, self.link, self.limit, tight=self.tight)


def roofline(op: Operator) -> float:
    """Default cost model: seconds on a device of 10 TFLOP/s and 1 TB/s."""
    cost = op.op.cost(*op.types)
    return max(cost.flops / 1e13, cost.bytes / 1e12) + 4e-6


def offloaded(block: Block) -> tuple[str, ...]:
    """Names of the values that a block offloads, in order: parameters, buffers and state, then those of the step."""
    moved = (next(op.reads()).name for op in as_block(block).operators if isinstance(op.op, ops.Offload))
    return (*far_names(block), *dict.fromkeys(moved))


def without_copies(block: Block) -> Block:
    """The block without copies to the host and back."""
    block = without_windows(block)
    origin: dict[str, Value] = {}
    kept: list[Operator] = []
    for op in block.operators:
        if op.op.copies:
            source, copy = op.inputs[0], op.outputs[0]
            assert source is not None and copy is not None
            origin[copy.name] = origin.get(source.name, source)
        else:
            kept.append(op.reading(origin))
    return block if not origin else block.with_operators(kept, addresses={})


@dataclass(frozen=True)
class Rest:
    """The period from the last forward use of a value to its next reader.

    `made`: position of its operator (-1: an input); `early`: of the last operator that reads it before it rests (or
    `made`); `late`: of those that read it afterwards, in order.
    """

    value: Value
    made: int
    early: int
    late: tuple[int, ...]


def find_rests(block: Block, names: Iterable[str]) -> list[Rest]:
    """The rest periods of values by name, in order of production.

    Persistent values, outputs of the block and values that nothing reads later have none.  UsageError for unknown
    names.
    """
    values = block.values()
    producers, readers = block.producers(), block.consumers()
    always = {v.name for v in block.persistent()}.union(block.outputs)
    rests = []
    for name in dict.fromkeys(names):
        if name not in values:
            raise UsageError(f"there is no value '{name}' to offload{nearest(name, values)}")
        if name in always or not values[name].nbytes:
            continue
        here, reads = producers.get(name, -1), readers.get(name, [])
        if here >= 0 and block.operators[here].role not in _FORWARD:
            continue
        early = max((i for i in reads if block.operators[i].role in _FORWARD), default=here)
        late = tuple(i for i in reads if i > early and block.operators[i].role not in _FORWARD)
        if late:
            rests.append(Rest(values[name], here, max([early, *(i for i in reads if i < late[0])]), late))
    return sorted(rests, key=lambda r: (r.made, r.value.name))


@dataclass
class _Move:
    """A gap between readers of a value, with the slots of its copies: slot k is right before operator k.

    `readers`: those that read what is fetched.  Of the first gap `leave` is the wait for the copy out.
    """

    rest: Rest
    readers: tuple[int, ...]
    tight: int  # the first slot at which nothing keeps its buffer but the copy
    leave: int
    fetch: int  # the start of the copy back

    @property
    def bytes(self) -> int:
        return aligned(self.rest.value.nbytes)

    @property
    def due(self) -> int:
        return self.readers[0]


class _Placing:
    """Chooses slots: first without regard to memory, from the times; then within the room that there is."""

    def __init__(self, block: Block, rests: Sequence[Rest], seconds: Seconds, link: Link, limit: int) -> None:
        self.block, self.link = block, link
        self.starts = [0.0, *accumulate(seconds(op) for op in block.operators)]
        gaps = [_gaps(block, r) for r in rests]
        self.tight = _written(block, [m for ms in gaps for m in ms])
        self.live = _live(self.tight)
        self.room = max(int(self.live.max(initial=0)), limit)
        self.moves = self._joined(gaps)

    def run(self) -> Block:
        leaving, coming = self._leaving(), self._coming()
        moves: dict[str, list[_Move]] = {}
        for m, s in zip(self.moves, coming, strict=True):
            name = m.rest.value.name
            k = m.tight if name in moves else max(m.tight, leaving[name])
            if k <= s or name in moves or not self._stays(m):
                moves.setdefault(name, []).append(dataclasses.replace(m, leave=k, fetch=s))
        for ms in moves.values():
            self._leave_at(ms[0], ms[0].leave)
        last, chosen = 0, [m for ms in moves.values() for m in ms]
        for m in sorted(chosen, key=lambda m: m.due):
            last = self._fetch_at(m, max(m.fetch, last, m.leave))
        block = _written(self.block, chosen)
        return block if int(_live(block).max(initial=0)) <= self.room else self.tight

    def _joined(self, gaps: Sequence[list[_Move]]) -> list[_Move]:
        """The gaps without those between late readers for which there is room, short ones first."""
        starts, gone = self.starts, set[tuple[str, int]]()
        later = [m for ms in gaps for m in ms[1:]]
        for m in sorted(later, key=lambda m: (starts[m.due] - starts[m.tight], m.due, m.rest.value.name)):
            if self._stays(m):
                gone.add((m.rest.value.name, m.due))
        result: list[_Move] = []
        for m in (m for ms in gaps for m in ms):
            if (m.rest.value.name, m.due) in gone:
                result[-1].readers += m.readers
            else:
                result.append(m)
        return result

    def _leaving(self) -> dict[str, int]:
        """For each value the first slot at which its copy out is done."""
        free, times = 0.0, dict[str, int]()
        for r in {m.rest.value.name: m.rest for m in self.moves}.values():
            free = max(free, self.starts[r.made + 1]) + self.link.seconds(r.value.nbytes, back=False)
            times[r.value.name] = bisect_left(self.starts, free)
        return times

    def _coming(self) -> list[int]:
        """For each move the last slot at which its copy back can begin and be done in time."""
        times = [0] * len(self.moves)
        free = float("inf")
        for i in sorted(range(len(self.moves)), key=lambda i: -self.moves[i].due):
            m = self.moves[i]
            free = min(free, self.starts[m.due]) - self.link.seconds(m.rest.value.nbytes, back=True)
            times[i] = min(max(bisect_right(self.starts, free) - 1, 0), m.due)
        return times

    def _stays(self, m: _Move) -> bool:
        """Whether there is room for the value where it is; it is taken then."""
        span = self.live[m.tight : m.due]
        if (span + m.bytes > self.room).any():
            return False
        span += m.bytes
        return True

    def _leave_at(self, m: _Move, slot: int) -> None:
        """Puts the wait for a copy out at `slot`, or as near to it as there is room."""
        slot = min(slot, m.due)
        over = np.flatnonzero(self.live[m.tight : slot] + m.bytes > self.room)
        if over.size:
            slot = m.tight + int(over[0])
        m.leave = slot
        self.live[m.tight : slot] += m.bytes

    def _fetch_at(self, m: _Move, slot: int) -> int:
        """Puts the start of a copy back at `slot`, or as near to it as there is room."""
        slot = min(slot, m.due)
        over = np.flatnonzero(self.live[slot : m.due] + m.bytes > self.room)
        if over.size:
            slot += int(over[-1]) + 1
        m.fetch = slot
        self.live[slot : m.due] += m.bytes
        return slot


def _tight(block: Block, r: Rest) -> _Move:
    """A copy out awaited as soon as nothing else keeps the value, and a copy back awaited where it begins."""
    slot = r.early + 1 - (r.early > r.made and _may_take(block.operators[r.early], r.value))
    return _Move(r, r.late, slot, slot, r.late[0])


def _gaps(block: Block, r: Rest) -> list[_Move]:
    """Moves between all readers of a value from its rest on that have others between them."""
    moves = [dataclasses.replace(_tight(block, r), readers=r.late[:1])]
    for before, i in pairwise(r.late):
        if i == before + 1:
            moves[-1].readers += (i,)
        else:
            moves.append(_Move(r, (i,), before + 1, before + 1, i))
    return moves


def _may_take(op: Operator, v: Value) -> bool:
    """Whether an operator's result may be written where `v` is, which dies there then."""
    return any(op.inputs[k] == v for i in range(len(op.outputs)) for k in op.op.overwrites(i) if k < len(op.inputs))


def _live(block: Block) -> np.ndarray:
    """Bytes alive on the device while each operator runs that is no copy."""
    freed = Liveness().run(block)
    bytes_alive = [live for i, live in live_profile(freed, ALIGNMENT) if not freed.operators[i].op.copies]
    return np.array(bytes_alive, np.int64)


def _written(block: Block, moves: Sequence[_Move]) -> Block:
    """The block with the copies of all moves; those of a value in order.

    In one slot: copies out that begin, waits for copies out, copies back that begin, waits for copies back.
    """
    names = Names(block.values())
    slots: dict[int, tuple[list[Operator], ...]] = {}
    read: dict[tuple[int, str], Value] = {}

    def put(slot: int, kind: int, op: ops.Copy, *ins: Value, name: str) -> Value:
        (output,) = op.infer(*(v.type for v in ins))
        out = Value(names.take(name), output)
        slots.setdefault(slot, ([], [], [], []))[kind].append(Operator(op, ins, (out,), Role.COMMUNICATE))
        return out

    hosts: dict[str, Value] = {}
    for m in sorted(moves, key=lambda m: m.rest.made):
        x = m.rest.value
        if x.name not in hosts:
            leaving = put(m.rest.made + 1, 0, ops.Offload(), x, name=f"{x.name}.leaving")
            hosts[x.name] = put(m.leave, 1, ops.CopyWait(), leaving, x, name=f"{x.name}.host")
    for m in sorted(moves, key=lambda m: m.due):
        x, host = m.rest.value, hosts[m.rest.value.name]
        coming = put(m.fetch, 2, ops.Prefetch(), host, name=f"{x.name}.coming")
        back = put(m.due, 3, ops.CopyWait(), coming, host, name=f"{x.name}.back")
        read.update(((i, x.name), back) for i in m.readers)
    reading = {i for i, _ in read}
    result: list[Operator] = []
    for i, op in enumerate(block.operators):
        for part in slots.get(i, ()):
            result += part
        if i in reading:
            inputs = tuple(None if v is None else read.get((i, v.name), v) for v in op.inputs)
            op = dataclasses.replace(op, inputs=inputs)
        result.append(op)
    return block.with_operators(result, addresses={})


def lowered_names(names: Iterable[str], block: Block, lowered: Block) -> dict[str, tuple[str, ...]]:
    """For each of some values of a block, the values of the lowered block that wait in its place: none, or several.

    Both blocks are without copies.  Lowering turns values to another layout (x.last) and folds transposes: kernels read
    what a value was made of, or write what is made of it.  Where a value has fewer late readers than before, what has
    its elements and did not wait before waits in its place.
    """
    stored, there = storable(lowered), block.values()
    origin, before = _origins(block, lowered), {r.value.name: r for r in find_rests(block, there)}
    same: dict[str, list[Rest]] = {}
    for r in find_rests(lowered, lowered.values()):
        name = _unturned(r.value.name, there)
        same.setdefault(name if name in before else f"like {origin.get(name, name)}", []).append(r)
    result: dict[str, tuple[str, ...]] = {}
    for name in names:
        rests = same.get(name, [])
        if name in before and sum(len(r.late) for r in rests) < len(before[name].late):
            rests = [*rests, *same.get(f"like {origin.get(name, name)}", ())]
        result[name] = (name,) if name in stored else tuple(r.value.name for r in rests)
    return result


def _unturned(name: str, there: Container[str]) -> str:
    """The name among those before lowering of a value of the lowered block, which may have another layout."""
    return name if name in there else re.sub(r"\.last(_\d+)?$", "", name)


def _origins(block: Block, lowered: Block) -> dict[str, str]:
    """Value name → name of the value whose elements it has, if in another order or shape."""
    origins, there = dict[str, str](), block.values()
    for op in (*block.operators, *lowered.operators):
        read = list(op.reads())
        for y in op.writes():
            moved = op.op.moves_data and not op.op.communicates and len(read) == 1 and read[0].nbytes == y.nbytes
            source = read[0].name if moved else _unturned(y.name, there)
            origins.setdefault(y.name, origins.get(source, source))
    return origins


def staying(block: Block, compiled: Block) -> tuple[str, ...]:
    """Notes on the values that a block offloads and that stay on the device when it is compiled, with the reasons."""
    wanted, moved = offloaded(block), set(offloaded(compiled))
    if not wanted:
        return ()
    there = lowered_names(wanted, without_copies(block), without_copies(Unplan().run(compiled)))
    short = "there is room for it, and its copies take longer than it waits"
    why = {n: short if rests else "the compiled step needs it no more" for n, rests in there.items()}
    return tuple(f"'{n}' is not offloaded: {why[n]}" for n, rests in there.items() if moved.isdisjoint(rests))
