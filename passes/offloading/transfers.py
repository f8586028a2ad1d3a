"""The clock of a step: transfers beside the device's work, and stalls of the device that waits for them.

Transfers are copies to host memory and back, and communication with other ranks (passes/communication/clock.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from ...language.ir import Block, Free, Operator, Value
from ...ops.memory.offload import Copy

Seconds = Callable[[Operator], float]


@dataclass(frozen=True)
class Link:
    """Between device and host: bytes a second out and back, at the same time, and seconds until a copy begins."""

    out: float = 25e9
    back: float = 25e9
    latency: float = 4e-6

    def seconds(self, nbytes: int, *, back: bool) -> float:
        """Time of one copy."""
        return self.latency + nbytes / (self.back if back else self.out)


#: where nobody says another: what PCIe 4.0 x16 gives
LINK = Link()


#: queues of the copies from the device, and to it
OUT, BACK = "to host", "from host"


@dataclass(frozen=True)
class Flight:
    """The transfer that an asynchronous operator begins: its name, bytes and seconds, and the queues that it takes,
    each of which moves one thing at a time."""

    name: str
    nbytes: int
    seconds: float
    queues: tuple[str, ...]


@dataclass(frozen=True)
class Transfer:
    """One flight: the value's name, when it begins and ends (seconds of the step), and how long the step waits for it.

    `operator`: which operator begins it.
    """

    name: str
    nbytes: int
    queues: tuple[str, ...]
    begin: float
    end: float
    stall: float
    operator: int = 0

    @property
    def back(self) -> bool:
        """Whether it is a copy from the host."""
        return BACK in self.queues


@dataclass(frozen=True)
class StepTimes:
    """`seconds` of a step: those of its operators, and `stalls`, in which the device waits for `transfers`.

    `starts`: when each operator begins.
    """

    compute: float = 0.0
    stalls: float = 0.0
    transfers: tuple[Transfer, ...] = ()
    starts: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.stalls

    @property
    def transfer_seconds(self) -> float:
        """Seconds of all transfers; most of them beside the device's work."""
        return sum(t.end - t.begin for t in self.transfers)

    @property
    def moving(self) -> float:
        """Seconds in which one transfer or more is under way."""
        total = last = 0.0
        for begin, end in sorted((t.begin, t.end) for t in self.transfers):
            total += max(0.0, end - max(begin, last))
            last = max(last, end)
        return total

    @property
    def hidden(self) -> float:
        """Seconds in which something is under way while the device computes."""
        return max(0.0, self.moving - self.stalls)

    def busy(self) -> dict[str, float]:
        """Queue → seconds in which it moves something, in the order of first use."""
        seconds: dict[str, float] = {}
        for t in sorted(self.transfers, key=lambda t: t.begin):
            for queue in t.queues:
                seconds[queue] = seconds.get(queue, 0.0) + t.end - t.begin
        return seconds


#: the transfer that a communication begins
Flights = Callable[[Operator], Flight]


def simulate(block: Block, seconds: Seconds, link: Link = LINK, flight: Flights | None = None) -> StepTimes:
    """Runs a step on several clocks: the device's, and one for each queue of transfers.

    As the operators' contracts have it (ops/memory/offload.py, ops/communication/base.py): a transfer begins when the
    device comes to it and those before it, in all queues that it takes, are done; the device goes on, up to the wait.
    `flight`: what a communication begins (None: communications take no time).
    """
    now = compute = stalls = 0.0
    free: dict[str, float] = {}
    flying: dict[str, Transfer] = {}
    done: list[Transfer] = []
    starts: list[float] = []
    for i, op in enumerate(block.operators):
        starts.append(now)
        if isinstance(op.op, Free):
            continue
        moves = op.op.copies or (flight is not None and op.op.communicates)
        if not moves:
            spent = seconds(op)
            now, compute = now + spent, compute + spent
            continue
        waits = op.op.waits if isinstance(op.op, Copy) else bool(op.views())
        target = op.inputs[0] if waits else op.outputs[0]
        assert target is not None
        if waits:
            t = flying.pop(target.name)
            stall = max(0.0, t.end - now)
            now, stalls = now + stall, stalls + stall
            done.append(dataclasses.replace(t, stall=stall))
        else:
            f = _copied(op, target, link) if op.op.copies or flight is None else flight(op)
            begin = max(now, *(free.get(queue, 0.0) for queue in f.queues))
            free.update(dict.fromkeys(f.queues, begin + f.seconds))
            flying[target.name] = Transfer(f.name, f.nbytes, f.queues, begin, begin + f.seconds, 0.0, i)
    return StepTimes(compute, stalls, tuple(done), tuple(starts))


def _copied(op: Operator, target: Value, link: Link) -> Flight:
    back = not target.type.host
    nbytes = target.nbytes
    return Flight(next(op.reads()).name, nbytes, link.seconds(nbytes, back=back), (BACK if back else OUT,))
