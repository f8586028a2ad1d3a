"""The clock of a step among ranks: communication beside computation, on channels and links.

It is the clock of copies to the host (passes/offloading/transfers.py), with a queue for each channel and for each link:
communications of one channel are done in order, and those of different channels share the rates of the links that
they use, which is priced as if one came after the other.  It is one rank's clock: the others begin each communication
at the same time, as ranks with the same program do.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...communication.links import Network
from ...communication.mesh import Mesh
from ...language.ir import Block, Operator
from ...ops.communication.base import Communication
from ..offloading.transfers import LINK, Flight, Link, Seconds, StepTimes, simulate


@dataclass(frozen=True)
class Exchange:
    """How the rank `rank` of a mesh communicates: what `simulate` asks of an operator."""

    network: Network
    mesh: Mesh
    rank: int = 0

    def __call__(self, operator: Operator) -> Flight:
        """The transfer that the operator begins."""
        op, out = operator.of(Communication), next(operator.writes())
        sent = next((v.type for v in operator.reads()), None)
        transfer = self.network.transfer(op, sent, out.type, self.mesh, self.rank)
        return Flight(out.name, sum(transfer.bytes.values()), transfer.seconds, (op.queue, *transfer.bytes))


def times(block: Block, seconds: Seconds, exchange: Exchange, link: Link = LINK) -> StepTimes:
    """The times of a step of one rank; operators by `seconds`, copies to the host by `link`."""
    return simulate(block, seconds, link, exchange)
