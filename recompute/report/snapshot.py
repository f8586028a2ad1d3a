"""`--snapshot`: the step as a memory snapshot in the form of torch.cuda.memory._snapshot(), which PyTorch's
memory_viz page opens.

It consists of dictionaries, lists, integers and strings, and has two segments: persistent values, and the arena.  A
frame is the line of an operator in the program's text (`--dump-ir`), so that the page's stack shows which operator
allocated the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..language.ir import Operator, Value
from ..language.text import show_operator
from ..language.verify_addresses import ALIGNMENT, aligned
from .timeline import ROLES, Timeline, persistent_roles, running_sum

#: start of the first segment; addresses are artificial, their differences are those of the memory plan
BASE = 1 << 40
#: alignment of segments
_PAGE = 2 << 20


def snapshot(line: Timeline, seconds: Sequence[float] | None = None, file: str = "step.rir") -> dict[str, Any]:
    """The snapshot of one step.  `seconds`: of each operator (estimates where there are none)."""
    return _Snapshot(line, seconds or line.seconds, file).build()


class _Snapshot:
    """Builds the events in order of time, and the blocks alive at the end."""

    def __init__(self, line: Timeline, seconds: Sequence[float], file: str) -> None:
        self.line = line
        self.file = file
        self.micros = [round(t * 1e6) for t in running_sum([*seconds, 0.0])]
        block = line.block
        self.first_line = 2 + sum(1 for _ in block.declared())  # of the first operator in the text; line 1 is the head
        self.events: list[dict[str, Any]] = []

    def build(self) -> dict[str, Any]:
        """Segments first, then every allocation and free of the step."""
        persistent, at = self.persistent_blocks()
        arena = -(-at // _PAGE) * _PAGE
        size = max((a.address + a.size for a in self.line.allocations), default=0)
        # the page requires a category 'unknown' if there are categories
        self.event("segment_alloc", BASE, at - BASE, [], 0, "unknown")
        for x in persistent:
            self.event("alloc", x["address"], x["size"], x["frames"], 0, x["category"])
        segments = [_segment(BASE, at - BASE, persistent)]
        if size:
            self.event("segment_alloc", arena, size, [], 0, "unknown")
            segments.append(_segment(arena, size, self.step(arena)))
        return {"segments": segments, "device_traces": [self.events], "allocator_settings": {}}

    def event(self, action: str, addr: int, size: int, frames: list, time: int, category: str) -> None:
        self.events.append(
            {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time, "frames": frames,
             "category": category}
        )  # fmt: skip

    def persistent_blocks(self) -> tuple[list[dict[str, Any]], int]:
        """Parameters, state and statistics one after the other, and where they end."""
        at, blocks = BASE, []
        roles = persistent_roles(self.line.block)
        for i, v in enumerate(self.line.block.persistent()):
            size = 0 if v.type.host else aligned(v.nbytes)
            frames = [self.frame(f"%{v.name}: {v.type}", 2 + len(self.line.block.inputs) + i)]
            if size:
                blocks.append(_block(at, size, v.nbytes, frames, ROLES[roles[v.name]]))
            at += size
        return blocks, max(at, BASE + ALIGNMENT)

    def step(self, arena: int) -> list[dict[str, Any]]:
        """Allocations and frees in order; gives the blocks that are alive at the end."""
        n = len(self.line.operators)
        starts: dict[int, list[dict[str, Any]]] = {}
        ends: dict[int, list[dict[str, Any]]] = {}
        for a in self.line.allocations:
            if a.size:
                frames = self.frames(a.values, a.start)
                x = _block(arena + a.address, a.size, a.values[0].nbytes, frames, ROLES[a.role])
                starts.setdefault(a.start, []).append(x)
                ends.setdefault(a.end, []).append(x)
        for i in range(n):
            for x in starts.get(i, ()):
                self.event("alloc", x["address"], x["size"], x["frames"], self.micros[i], x["category"])
            for x in ends.get(i, ()) if i < n - 1 else ():
                for action in ("free_requested", "free_completed"):
                    self.event(action, x["address"], x["size"], x["frames"], self.micros[i + 1], x["category"])
        return ends.get(n - 1, [])

    def frames(self, values: tuple[Value, ...], index: int) -> list[dict[str, Any]]:
        """The stack that the page shows: the values, the operator that writes the first one, its role."""
        op: Operator = self.line.operators[index]
        names = ", ".join(f"%{v.name}: {v.type}" for v in values)
        line = self.first_line + self.line.positions[index]
        return [self.frame(names, line), self.frame(show_operator(op), line), self.frame(op.role.value, line)]

    def frame(self, name: str, line: int) -> dict[str, Any]:
        return {"filename": self.file, "line": line, "name": name}


def _block(address: int, size: int, wanted: int, frames: list, category: str) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": min(wanted, size),
        "state": "active_allocated",
        "frames": frames,
        "category": category,
    }


def _segment(address: int, size: int, alive: list[dict[str, Any]]) -> dict[str, Any]:
    """A segment whose blocks cover it without holes, as the page expects."""
    blocks: list[dict[str, Any]] = []
    at = address
    for x in sorted(alive, key=lambda x: x["address"]):
        if x["address"] > at:
            blocks.append(_hole(at, x["address"] - at))
        blocks.append(x)
        at = x["address"] + x["size"]
    if at < address + size:
        blocks.append(_hole(at, address + size - at))
    active = sum(x["size"] for x in alive)
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": active,
        "active_size": active,
        "requested_size": sum(x["requested_size"] for x in alive),
        "stream": 0,
        "segment_type": "large",
        "frames": [],
        "blocks": blocks,
    }


def _hole(address: int, size: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
