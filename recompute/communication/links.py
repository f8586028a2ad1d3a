"""Bytes and seconds of a communication on the links between ranks.

The mathematics is the α-β model (Hockney 1994; Thakur, Rabenseifner & Gropp 2005, doi 10.1177/1094342005051521): a
latency α for each message that follows another, and bytes at a rate.  A collective of n ranks over B bytes moves
B(n-1)/n for each rank at least, twice for AllReduce, and pairwise or recursive algorithms do no more.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from ..errors import UsageError, expect, nearest
from ..language.types import TensorType
from ..ops.communication.base import Communication, Traffic, doublings
from ..ops.communication.collectives import AllToAll, Rooted
from ..ops.communication.messages import Message
from .mesh import Mesh

#: seconds before a message begins to arrive, where nobody says another: a few microseconds on NVLink and InfiniBand
LATENCY = 5e-6
#: the names of the two links: within a node, and between nodes
INSIDE, ACROSS = "nvlink", "net"
_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_FORM = "node=RANKS,nvlink=RATE,net=RATE,latency=TIME, such as node=8,nvlink=450GB/s,net=50GB/s,latency=5us"


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


@dataclass(frozen=True)
class Transfer:
    """Bytes that a rank sends in one communication, by link (`INSIDE`, `ACROSS`), and its seconds in isolation."""

    bytes: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Network:
    """Nodes of `node` consecutive ranks each: a rank sends `inside` bytes a second to those of its own node, `across`
    to those of others, both at the same time, and each message begins to arrive after `latency` seconds.

    0 for a rate: there is no such link.  `node` 0: all ranks are in one node.
    """

    node: int = 0
    inside: float = 0.0
    across: float = 0.0
    latency: float = LATENCY

    @staticmethod
    def parse(text: str) -> Network:
        """A network from `node=8,nvlink=450GB/s,net=50GB/s,latency=5us`.  UsageError for other texts."""
        fields: dict[str, str] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, equals, value = part.partition("=")
            if not equals or not value:
                raise UsageError(f"link '{text}': cannot read '{part}'; give {_FORM}")
            if name not in ("node", INSIDE, ACROSS, "latency"):
                keys = ["node", INSIDE, ACROSS, "latency"]
                raise UsageError(f"link '{text}': unknown '{name}'{nearest(name, keys)}; known: {', '.join(keys)}")
            if name in fields:
                raise UsageError(f"link '{text}': '{name}' is given twice")
            fields[name] = value
        return _network(text, fields)

    def __str__(self) -> str:
        parts = [f"node={self.node}"] if self.node > 1 else []
        rates = ((INSIDE, self.inside), (ACROSS, self.across))
        parts += [f"{name}={rate / 1e9:g}GB/s" for name, rate in rates if rate]
        return ",".join([*parts, f"latency={self.latency * 1e6:g}us"])

    def check(self, mesh: Mesh) -> None:
        """UsageError if ranks of the mesh have no link to each other."""
        if self.node and mesh.ranks > self.node and not self.across:
            raise UsageError(
                f"the mesh {mesh} has {mesh.ranks} ranks, more than the {self.node} of a node: give the rate between "
                f"nodes, too, such as {ACROSS}=50GB/s"
            )
        if not self.inside and self.node != 1:
            raise UsageError(f"nodes of {self.node} ranks need a rate within them, such as {INSIDE}=450GB/s")

    def transfer(self, op: Communication, x: TensorType | None, y: TensorType, mesh: Mesh, rank: int = 0) -> Transfer:
        """One communication of a rank (of the slowest member of its group, where they differ).

        Within a node the bytes go over one link.  In a group that spans nodes, g of its n members in a node, AllGather
        and sums are hierarchical: each rank exchanges a g-th of what other nodes have with them, and the members of a
        node exchange the rest, one after the other.  AllToAll sends each member its own part, over both links at once.
        """
        traffic = op.traffic(x, y)
        group = mesh.group(rank, op.axis)
        if isinstance(op, Message):
            far = self._node(group[op.peer]) != self._node(rank)
            moved = (traffic.bytes or y.nbytes) / (self.across if far else self.inside)  # a receipt takes as long
            sent = {ACROSS if far else INSIDE: traffic.bytes} if traffic.bytes else {}
            return Transfer(sent, self.latency * traffic.steps + moved)
        members = set(Counter(map(self._node, group)).values())
        transfers = [self._made(op, traffic, _across(op, traffic, g, len(group))) for g in members]
        return max(transfers, key=lambda t: t.seconds)

    def _node(self, rank: int) -> int:
        return rank // self.node if self.node else 0

    def _made(self, op: Communication, traffic: Traffic, across: int) -> Transfer:
        sent = {INSIDE: traffic.bytes - across, ACROSS: across}
        sent = {name: n for name, n in sent.items() if n}
        rates = {INSIDE: self.inside, ACROSS: self.across}
        each = [n / rates[name] for name, n in sent.items()]
        moved = max(each, default=0.0) if isinstance(op, AllToAll) else sum(each)
        return Transfer(sent, self.latency * traffic.steps + moved)


def _across(op: Communication, traffic: Traffic, g: int, n: int) -> int:
    """How many of the bytes that a rank sends go to other nodes, if g of the group's n members are in its own."""
    if n <= g:
        return 0
    if isinstance(op, Rooted):  # along a tree of nodes, then along one within the node
        return traffic.bytes * doublings(-(-n // g)) // doublings(n)
    return traffic.bytes * (n - g) // ((n - 1) * (1 if isinstance(op, AllToAll) else g))


def _network(text: str, fields: dict[str, str]) -> Network:
    """The network of the parts of a text."""
    node = fields.get("node")
    if node is not None and (not re.fullmatch(r"[0-9]{1,9}", node) or int(node) < 1):
        raise UsageError(f"link '{text}': node must be a whole number of at least 1 ranks, not '{node}'")
    if node is None and INSIDE in fields and ACROSS in fields:
        raise UsageError(f"link '{text}': say how many ranks a node has, such as node=8")
    if INSIDE not in fields and ACROSS not in fields:
        raise UsageError(f"link '{text}': a rate is missing; give {_FORM}")
    ranks = int(node) if node is not None else 0 if INSIDE in fields else 1
    rates = [_rate(text, name, fields[name]) if name in fields else 0.0 for name in (INSIDE, ACROSS)]
    if ranks > 1 and not rates[0]:
        raise UsageError(f"link '{text}': nodes of {ranks} ranks need a rate within them, such as {INSIDE}=450GB/s")
    if ranks == 1 and not rates[1]:
        raise UsageError(f"link '{text}': nodes of one rank need a rate between them, such as {ACROSS}=50GB/s")
    latency = fields.get("latency")
    return Network(ranks, rates[0], rates[1], LATENCY if latency is None else _seconds(text, latency))


def _rate(text: str, name: str, value: str) -> float:
    """Bytes per second: `450GB/s`, `50e9`, `400Gb/s` (a small b: bits)."""
    match = re.fullmatch(r"([0-9.eE+]+?)([kKMGT]i?)?([bB]?)(/s)?", value)
    try:
        amount = float(match[1]) if match else math.nan
    except ValueError:
        amount = math.nan
    if match is None or not 0 < amount < math.inf:
        raise UsageError(f"link '{text}': {name} must be a rate above 0, such as 450GB/s, not '{value}'")
    return amount * _RATES[(match[2] or "").lower()] / (8 if match[3] == "b" else 1)


def _seconds(text: str, value: str) -> float:
    """Seconds: `5us`, `0.1ms`."""
    match = re.fullmatch(r"([0-9.eE+-]+?)(s|ms|us|µs|ns)", value)
    try:
        amount = float(match[1]) if match else math.nan
    except ValueError:
        amount = math.nan
    if match is None or not 0 <= amount < math.inf:
        raise UsageError(f"link '{text}': latency must be a time, such as 5us, not '{value}'")
    return amount / _PER_SECOND[match[2]]


def as_network(network: Network | str) -> Network:
    """A network, or the one of a text.  UsageError for all else."""
    if isinstance(network, str):
        return Network.parse(network)
    return expect("network", network, Network, "a text such as 'node=8,nvlink=450GB/s,net=50GB/s'")
