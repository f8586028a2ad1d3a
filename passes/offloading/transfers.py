"""Simulated times of a step with offloading: durations of copies, and stalls of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...language.ir import Block, Free, Operator

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


@dataclass(frozen=True)
class Transfer:
    """One copy: the value's name, when it begins and ends (seconds of the step), and how long the step waits for it."""

    name: str
    nbytes: int
    back: bool
    begin: float
    end: float
    stall: float


@dataclass(frozen=True)
class StepTimes:
    """`seconds` of a step: those of its operators, and `stalls`, in which the device waits for `transfers`."""

    compute: float = 0.0
    stalls: float = 0.0
    transfers: tuple[Transfer, ...] = ()

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.stalls

    @property
    def transfer_seconds(self) -> float:
        """Seconds of all copies; most of them beside the device's work."""
        return sum(t.end - t.begin for t in self.transfers)


def simulate(block: Block, seconds: Seconds, link: Link = LINK) -> StepTimes:
    """Runs a step on three clocks: the device's, and one for the copies of each direction.

    As the operators' contract has it (ops/offload.py): a copy begins when the device comes to it and the copy before
    it, in its direction, is done; the device goes on, up to the wait.
    """
    now = compute = stalls = 0.0
    free = [0.0, 0.0]
    flying: dict[str, Transfer] = {}
    done: list[Transfer] = []
    for op in block.operators:
        if isinstance(op.op, Free):
            continue
        if not op.op.copies:
            spent = seconds(op)
            now, compute = now + spent, compute + spent
            continue
        target = op.inputs[0] if op.views() else op.outputs[0]
        assert target is not None
        if op.views():
            t = flying.pop(target.name)
            stall = max(0.0, t.end - now)
            now, stalls = now + stall, stalls + stall
            done.append(Transfer(t.name, t.nbytes, t.back, t.begin, t.end, stall))
        else:
            back = not target.type.host
            begin = max(now, free[back])
            free[back] = begin + link.seconds(target.nbytes, back=back)
            flying[target.name] = Transfer(next(op.reads()).name, target.nbytes, back, begin, free[back], 0.0)
    return StepTimes(compute, stalls, tuple(done))
