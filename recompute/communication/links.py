"""What a communication takes on a link: a latency for each message that follows another, and bytes at a rate."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..language.ir import Block
from ..ops.communication.base import Communication, Traffic


@dataclass(frozen=True)
class Link:
    """How fast a rank sends along an axis: bytes per second, and seconds before a message begins to arrive."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise UsageError(
                f"a link needs a bandwidth above 0 bytes/s and a latency of 0 s or more, not {self.bandwidth} and "
                f"{self.latency}"
            )

    def seconds(self, traffic: Traffic) -> float:
        """The time that a communication takes alone."""
        return self.latency * traffic.steps + traffic.bytes / self.bandwidth


def traffic_of(block: Block) -> dict[str, Traffic]:
    """What a rank sends along each axis in one step: bytes, and messages that follow one another."""
    found: dict[str, Traffic] = {}
    for o in block.operators:
        if not isinstance(o.op, Communication):
            continue
        one = o.op.traffic(next((v.type for v in o.reads()), None), next(o.writes()).type)
        so_far = found.get(o.op.axis, Traffic(0, 0))
        found[o.op.axis] = Traffic(so_far.bytes + one.bytes, so_far.steps + one.steps)
    return found
