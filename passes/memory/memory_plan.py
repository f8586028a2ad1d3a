"""The memory plan: an offset in one arena for every value of a step (in a second arena for host values)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...boundary import as_block
from ...errors import UsageError, expect
from ...language.ir import Block, Free, Value
from ...language.verify_addresses import aligned
from ..base import Pass
from .packing import Lifetime, height, pack
from .storage import Storage, sharings, storages


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a planned block.

    `arena`: the allocation for the values of one step; `live_peak`: the most bytes alive at once (no arena
    for this order and this sharing can be smaller); `persistent`: parameters, buffers, state and constants; `peak`:
    arena + persistent, which is all the memory a step takes; `peak_at`: index of the operator at the live peak.
    `host`, `host_live_peak`: arena and most bytes alive in host memory (offloaded values).  `stored`: parameters,
    buffers and state in host memory, which `persistent` leaves out.
    """

    arena: int
    live_peak: int
    persistent: int
    peak_at: int
    host: int = 0
    host_live_peak: int = 0
    stored: int = 0

    @property
    def peak(self) -> int:
        """All bytes that the executor allocates."""
        return self.arena + self.persistent


class MemoryPlan(Pass):
    """Give every value of a block with frees an address.

    Views share their input's storage, results may be written over inputs that nothing reads later, and the inputs of a
    contiguous Concat may be written directly into its output if that makes the arena smaller.  `exact`: seconds of
    effort with which the exact packer may improve on the heuristics.
    """

    needs = ("frees",)
    refuses = ("addresses",)
    gives = ("addresses",)

    exact: float = 0.0

    def run(self, block: Block) -> Block:
        """Adds addresses.  UsageError where frees have not been placed."""
        freed = any(isinstance(o.op, Free) for o in block.operators)
        keep = {v.name for v in block.persistent()}.union(block.outputs)
        if not freed and any(v.name not in keep for o in block.operators for v in (*o.reads(), *o.writes())):
            raise UsageError("'memory-plan' needs 'liveness' before it")
        choices = sharings(block)[::-1]  # with joins first: a tie saves a copy
        _, found, plan = min((self._both(found) for found in choices), key=lambda p: p[0])
        places = {name: plan[s.name] + offset for s in found for name, offset in s.offsets.items()}
        addresses = {name: places[name] for name in block.values() if name in places}
        planned = block.with_operators(block.operators, addresses=addresses)
        if len(choices) == 1:  # else the addresses say which it is
            planned.facts["memory report"] = _report(planned, found)
        return planned

    def _both(self, found: list[Storage]) -> tuple[int, list[Storage], dict[str, int]]:
        """The size of the device's arena, the allocations, and their offsets in the arenas of device and host."""
        device, host = ([as_lifetime(s) for s in found if s.host is there] for there in (False, True))
        plan = self._pack(device)
        return height(device, plan), found, {**plan, **self._pack(host)} if host else plan

    def _pack(self, lifetimes: list[Lifetime]) -> dict[str, int]:
        if not self.exact:
            return pack(lifetimes)
        from .packing_exact import pack_exact

        return pack_exact(lifetimes, seconds=self.exact)[0]


def as_lifetime(s: Storage) -> Lifetime:
    """An allocation for the packers: its size rounded up to the alignment."""
    return Lifetime(s.name, aligned(s.nbytes), s.start, s.end)


def collect_lifetimes(block: Block, *, host: bool = False) -> list[Lifetime]:
    """The allocations of the device's arena (or of the host's), in order of their start."""
    return sorted((as_lifetime(s) for s in _storages_of(block) if s.host is host), key=lambda x: x.start)


def _storages_of(block: Block) -> list[Storage]:
    """The sharing that a planned block's addresses show; for one without addresses, that without joins."""
    if not block.addresses:
        return storages(block)
    apart, *others = sharings(block)
    if not others:
        return apart
    (joined,) = others
    base = {s.name: block.addresses[s.name] for s in joined}
    fits = all(block.addresses[n] == base[s.name] + o for s in joined for n, o in s.offsets.items())
    return joined if fits else apart


def live_profile(block: Block, align: int = 1, *, host: bool = False) -> Iterator[tuple[int, int]]:
    """(index, live bytes while that operator runs) for a block with frees; persistent values are not counted.

    Each allocation counts once, whichever of its values are alive, scratch while its operator runs, inputs from the
    start.  Sizes are rounded up to multiples of `align` bytes.  `host`: of host memory instead of the device's.
    """
    expect("align", align, int, "a number of bytes")
    return _profile(block, _storages_of(as_block(block)), align, host)


def _profile(block: Block, found: Sequence[Storage], align: int, host: bool) -> Iterator[tuple[int, int]]:
    change: dict[int, int] = {}
    for s in found:
        if s.host is not host:
            continue
        size = -(-s.nbytes // align) * align
        change[s.start] = change.get(s.start, 0) + size
        change[s.end + 1] = change.get(s.end + 1, 0) - size
    live = change.get(-1, 0)
    for i, op in enumerate(block.operators):
        live += change.get(i, 0)
        if not isinstance(op.op, Free):
            yield i, live


def memory_report(block: Block) -> MemoryReport:
    """The figures of a planned block."""
    found = as_block(block).facts.get("memory report")
    if found is None:
        found = block.facts["memory report"] = _report(block, _storages_of(block))
    return found


def _report(block: Block, found: Sequence[Storage]) -> MemoryReport:
    profile = list(_profile(block, found, 1, False))
    peak_at, live_peak = max(profile, key=lambda p: p[1], default=(-1, sum(v.nbytes for v in block.inputs)))
    values: dict[str, Value] = block.values()
    arenas = [0, 0]
    for name, at in block.addresses.items():
        v = values[name]
        arenas[v.type.host] = max(arenas[v.type.host], at + aligned(v.nbytes))
    most = max((live for _, live in _profile(block, found, 1, True)), default=0) if arenas[True] else 0
    held = [sum(v.nbytes for v in block.persistent() if v.type.host is host) for host in (False, True)]
    return MemoryReport(arenas[0], live_peak, held[False], peak_at, arenas[1], most, held[True])
