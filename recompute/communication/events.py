"""The communication trace of a program: its communications and waits, in order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import VerifyError
from ..language.ir import Block
from ..ops.communication.base import Communication
from .mesh import Mesh


@dataclass(frozen=True)
class Event:
    """The begin of a communication (`op`, with the types of its input and output), or the wait for one.

    `at`: the operator's place; `waits`: the place, among the events, of what a wait waits for.
    """

    at: int
    op: Communication | None = None
    types: tuple[str, str] = ("", "")
    waits: int = -1

    def text(self) -> str:
        """Everything but the operator's place, which may differ between ranks."""
        return f"wait {self.waits}" if self.op is None else f"{self.op!r} {self.types}"


def events(block: Block) -> tuple[Event, ...]:
    """The communications and waits of a verified block."""
    result: list[Event] = []
    begun: dict[str, int] = {}
    for at, o in enumerate(block.operators):
        if not o.op.communicates:
            continue
        if isinstance(o.op, Communication):
            out = next(o.writes())
            begun[out.name] = len(result)
            source = next((str(v.type) for v in o.reads()), "")
            result.append(Event(at, o.op, (source, str(out.type))))
        else:
            result.append(Event(at, waits=begun[next(o.reads()).name]))
    return tuple(result)


def digest(found: Sequence[Event]) -> str:
    """A name for what other ranks see of a program: the same for the same events."""
    return hashlib.sha256("\n".join(e.text() for e in found).encode()).hexdigest()


def check_mesh(found: Sequence[Event], mesh: Mesh, rank: int) -> None:
    """VerifyError for communication along an axis that the mesh lacks, or that has another number of ranks there."""
    sizes = dict(mesh.axes)
    for e in found:
        if e.op is not None and sizes.get(e.op.axis) != e.op.ranks:
            there = f"has {sizes[e.op.axis]} ranks along it" if e.op.axis in sizes else "has no such axis"
            raise VerifyError(
                f"rank {rank}: {e.op.name} number {e.op.number} on channel '{e.op.queue}' (operator {e.at}) is for "
                f"{e.op.ranks} ranks of axis '{e.op.axis}', but the mesh {mesh} {there}"
            )
