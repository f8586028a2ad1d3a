"""The memory of a planned step, operator by operator: the data of all pictures.

An allocation is a range of the arena over a range of operators.  It has one role, so that the bytes of all roles add up
to the live bytes (aligned, as in `live_profile(block, ALIGNMENT)`) at every operator.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..cost import CostModel, link_of, this_cpu
from ..language.ir import Block, Free, Operator, Role, Value
from ..language.verify_addresses import aligned
from ..passes import memory_report
from ..passes.communication.clock import Exchange, times
from ..passes.memory.memory_plan import Lifetime, collect_lifetimes
from ..passes.offloading.transfers import Transfer

#: role → label, in the order in which pictures stack them (from the bottom)
ROLES: dict[str, str] = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "statistics": "statistics, constants",
    "inputs": "inputs",
    "kept": "activations kept for the backward pass",
    "activations": "other activations",
    "recomputed": "recomputed values",
    "approximate": "approximate forms of what waits",
    "gradients": "gradients",
    "communication": "communication buffers",
    "scratch": "scratch",
}
_PERSISTENT = ("parameters", "optimizer", "statistics")
#: colours that are distinguishable with any colour vision, on light and dark backgrounds
COLOURS: dict[str, str] = {
    "parameters": "#6b7683",
    "optimizer": "#97a1ad",
    "statistics": "#bcc3cb",
    "inputs": "#0f9d76",
    "kept": "#1f6fb5",
    "activations": "#66b5ea",
    "recomputed": "#e0651b",
    "approximate": "#7d9a1c",
    "gradients": "#a05fb4",
    "communication": "#c2406b",
    "scratch": "#d9b632",
}
_FORWARD = (Role.FORWARD, Role.LOSS)


@dataclass(frozen=True)
class Allocation:
    """`size` bytes at `address` of the arena while operators `start` to `end` run (inclusive, frees not counted).

    `values` are the values that it holds, the first one first (several if views or in-place results share it).
    """

    values: tuple[Value, ...]
    role: str
    size: int
    start: int
    end: int
    address: int


@dataclass(frozen=True)
class Timeline:
    """The operators and allocations of a planned block.

    `operators`: without frees; `positions`: index of each in `block.operators`; `persistent`: bytes of persistent
    values by role; `seconds`: estimated time of each operator (of a wait for other ranks, that of waiting);
    `transfers`: communication beside the operators, where a network is known.
    """

    block: Block
    operators: tuple[Operator, ...]
    positions: tuple[int, ...]
    persistent: dict[str, int]
    allocations: tuple[Allocation, ...]
    seconds: tuple[float, ...]
    transfers: tuple[Transfer, ...] = ()

    def totals(self) -> dict[str, list[int]]:
        """Role → bytes while each operator runs, persistent roles included."""
        n = len(self.operators)
        bytes_of = {role: [self.persistent.get(role, 0)] * n for role in ROLES}
        change = {role: [0] * (n + 1) for role in ROLES}
        for a in self.allocations:
            change[a.role][a.start] += a.size
            change[a.role][a.end + 1] -= a.size
        for role, steps in change.items():
            level = 0
            for i in range(n):
                level += steps[i]
                bytes_of[role][i] += level
        return bytes_of

    def live(self, index: int) -> list[Allocation]:
        """The allocations alive while operator `index` runs, the largest first."""
        return sorted((a for a in self.allocations if a.start <= index <= a.end), key=lambda a: (-a.size, a.address))

    def lanes(self) -> dict[str, list[Transfer]]:
        """Channel or link → what it moves, in order."""
        result: dict[str, list[Transfer]] = {}
        for t in sorted(self.transfers, key=lambda t: t.begin):
            for queue in t.queues:
                result.setdefault(queue, []).append(t)
        return result

    def starts(self) -> list[float]:
        """Estimated seconds from the beginning of the step to the start of each operator."""
        return running_sum(self.seconds)


def columns(levels: Sequence[int], most: int) -> list[tuple[range, int]]:
    """Positions in at most `most` parts of about one length, each with the position of its highest level."""
    count = min(len(levels), most)
    parts = [range(i * len(levels) // count, (i + 1) * len(levels) // count) for i in range(count)]
    return [(part, max(part, key=levels.__getitem__)) for part in parts]


def running_sum(seconds: Iterable[float]) -> list[float]:
    """For each number, the sum of all before it."""
    total, sums = 0.0, []
    for s in seconds:
        sums.append(total)
        total += s
    return sums


def timeline(block: Block, cost: CostModel | None = None, exchange: Exchange | None = None) -> Timeline:
    """The timeline of a block with planned memory; times by `cost` (default: this CPU's roofline).

    `exchange`: how the rank that runs it communicates with others.
    """
    cost = cost or this_cpu()
    positions = tuple(i for i, op in enumerate(block.operators) if not isinstance(op.op, Free))
    operators = tuple(block.operators[i] for i in positions)
    sizes = {"parameters": block.parameters, "optimizer": block.state}
    persistent = {role: sum(v.nbytes for v in values if not v.type.host) for role, values in sizes.items()}
    persistent["statistics"] = memory_report(block).persistent - sum(persistent.values())
    seconds = tuple(cost.seconds(op) for op in operators)
    transfers: tuple[Transfer, ...] = ()
    if exchange is not None:
        clock = times(block, cost.seconds, exchange, link_of(cost))
        starts, transfers = (*clock.starts, clock.seconds), clock.transfers
        seconds = tuple(starts[i + 1] - starts[i] for i in positions)
    return Timeline(block, operators, positions, persistent, tuple(_allocations(block)), seconds, transfers)


def _allocations(block: Block) -> list[Allocation]:
    """Lifetimes with their values, in order of their start, without those during which no operator runs."""
    before = [0]  # real operators before each position
    for op in block.operators:
        before.append(before[-1] + (not isinstance(op.op, Free)))
    lifetimes = collect_lifetimes(block)
    held = _held(block, lifetimes)
    producers, makers, kept = block.producers(), _makers(block), _read_after_forward(block)
    allocations = []
    for x in lifetimes:
        address = block.addresses.get(x.name, 0)
        stages = _stages(block, held[x.name], x, producers, makers)
        ends = [born - 1 for born, _, _ in stages[1:]] + [x.end]
        for (born, maker, values), last in zip(stages, ends, strict=True):
            start, end = before[max(born, 0)], before[min(last, len(block.operators) - 1) + 1] - 1
            if end >= start:
                waits = maker == "activations" and any(v.name in kept for v in values)
                allocations.append(Allocation(tuple(values), "kept" if waits else maker, x.size, start, end, address))
    return allocations


def _held(block: Block, lifetimes: list[Lifetime]) -> dict[str, list[Value]]:
    """Allocation → its values, in order of birth.

    A value without its own lifetime (a view, an in-place result) lies inside the lifetime that is alive when it is
    written; lifetimes that are alive together do not overlap, so that there is at most one.
    """
    values, producers = block.values(), block.producers()
    persistent = {v.name for v in block.persistent()}
    held = {x.name: [values[x.name]] for x in lifetimes}
    inside = (n for n, v in values.items() if n in block.addresses and not v.type.host)
    guests = [n for n in inside if n not in held and n not in persistent]
    alive: list[tuple[int, int]] = []  # (address, index), sorted
    ends: list[tuple[int, int]] = []  # heap of (end, index)
    i = 0
    for name in sorted(guests, key=lambda n: producers.get(n, -1)):
        born = producers.get(name, -1)
        while i < len(lifetimes) and lifetimes[i].start <= born:
            if lifetimes[i].size:
                bisect.insort(alive, (block.addresses.get(lifetimes[i].name, 0), i))
                heapq.heappush(ends, (lifetimes[i].end, i))
            i += 1
        while ends and ends[0][0] < born:
            _, j = heapq.heappop(ends)
            alive.remove((block.addresses.get(lifetimes[j].name, 0), j))
        at = bisect.bisect(alive, (block.addresses[name], len(lifetimes))) - 1
        if at >= 0:
            host = lifetimes[alive[at][1]]
            if block.addresses[name] + values[name].nbytes <= alive[at][0] + host.size:
                held[host.name].append(values[name])
    return held


def _stages(
    block: Block, values: list[Value], x: Lifetime, producers: dict[str, int], makers: dict[str, str]
) -> list[tuple[int, str, list[Value]]]:
    """(start, role, values) of the stages of an allocation: an in-place result may change its role."""
    stages = [(x.start, makers.get(values[0].name, "scratch"), [values[0]])]
    for v in values[1:]:
        born = producers.get(v.name, -1)
        view = born >= 0 and block.operators[born].op.moves_data
        if view or makers[v.name] == stages[-1][1] or aligned(v.nbytes) < x.size:
            stages[-1][2].append(v)
        else:
            stages.append((born, makers[v.name], [v]))
    return stages


def _makers(block: Block) -> dict[str, str]:
    """Value → role of its bytes by the operator that writes it; values that no operator writes are scratch."""
    makers = {v.name: "inputs" for v in block.inputs}
    for op in block.operators:
        received = op.op.communicates or (
            op.op.moves_data and op.views() and makers.get(next(v.name for v in op.reads())) == "communication"
        )
        for v in op.writes():
            if received:
                makers.setdefault(v.name, "communication")
            elif op.op.approximates:
                makers.setdefault(v.name, "approximate")
            elif op.role in _FORWARD or op.op.copies:
                makers.setdefault(v.name, "activations")
            else:
                makers.setdefault(v.name, "recomputed" if op.role is Role.RECOMPUTE else "gradients")
    return makers


def _read_after_forward(block: Block) -> set[str]:
    """Names that an operator after the forward pass reads."""
    return {
        v.name
        for op in block.operators
        if op.role not in _FORWARD and not (isinstance(op.op, Free) or op.op.copies)
        for v in op.reads()
    }


def persistent_roles(block: Block) -> dict[str, str]:
    """Parameter, buffer, state or constant → its role."""
    roles = {v.name: "statistics" for v in block.persistent()}
    roles.update((v.name, "parameters") for v in block.parameters)
    roles.update((v.name, "optimizer") for v in block.state)
    return roles
