"""Ways to train on many ranks, and which of them can be at all."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...communication.mesh import Mesh
from ...errors import UsageError

RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class Candidate:
    """One way: ranks along dp, pp, ep, cp and tp (neighbours are along tp), and what a step does with them.

    `micro_batch`: samples of one micro-batch on one dp rank; `chunks`: pieces of the network on each stage (1: the
    schedule is not interleaved); `cp`: parts of the sequence; `ep`: parts of the experts.  UsageError for a
    recomputation, schedule or stage of ZeRO that there is not.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batch: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "micro_batch", "chunks", "cp", "ep"):
            if getattr(self, name) < 1:
                raise UsageError(f"candidate: {name} must be at least 1, not {getattr(self, name)}")
        if self.recompute not in RECOMPUTE or self.schedule not in SCHEDULES or self.zero not in range(4):
            raise UsageError(
                f"candidate: recompute is one of {', '.join(RECOMPUTE)}, schedule one of {', '.join(SCHEDULES)}, zero "
                f"0 to 3; not '{self.recompute}', '{self.schedule}', {self.zero}"
            )
        if (self.schedule == "interleaved") != (self.chunks > 1):
            raise UsageError(
                f"candidate: a schedule is interleaved if it has several chunks, not '{self.schedule}' with "
                f"{self.chunks}"
            )

    @property
    def mesh(self) -> Mesh:
        """The mesh, for programs that are compiled."""
        more = {name: size for name, size in (("ep", self.ep), ("cp", self.cp)) if size > 1}
        return Mesh.of(dp=self.dp, pp=self.pp, **more, tp=self.tp)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.dp * self.tp * self.pp * self.cp * self.ep


def candidates(
    ranks: int,
    batch: int,
    *,
    layers: int,
    heads: int = 0,
    vocab: int = 0,
    node: int = 8,
    even: bool = True,
    seq: int = 1,
    experts: int = 1,
) -> Iterator[Candidate]:
    """All ways for so many ranks and a batch of all of them that divide heads and vocabulary (0: not known), the batch,
    the sequence (cp) and the experts (ep); `even`: the layers, too.

    tp stays within a node.  UsageError for less than one rank or sample.
    """
    if ranks < 1 or batch < 1:
        raise UsageError(f"candidates need at least one rank and one sample, not {ranks} and {batch}")
    for tp in _divisors(ranks):
        if tp > node or heads % tp or vocab % tp:
            continue
        for pp, cp, ep in itertools.product(_divisors(ranks // tp), repeat=3):
            dp, left = divmod(ranks, tp * pp * cp * ep)
            if left or seq % cp or experts % ep or batch % dp or (layers % pp if even else pp > layers):
                continue
            chunks = _divisors(layers // pp) if even else range(2, layers // pp + 1)
            for c in _steps(dp, tp, pp, batch, [v for v in chunks if 1 < v <= 8]):
                yield dataclasses.replace(c, cp=cp, ep=ep) if cp * ep > 1 else c


def _steps(dp: int, tp: int, pp: int, batch: int, several: Sequence[int]) -> Iterator[Candidate]:
    forms = [("1f1b", 1)]
    if pp > 1:
        forms += [("zero-bubble", 1)]
    for micro_batch in (n for n in _divisors(batch // dp) if n <= 16):
        # Interleaved stages take micro-batches in rounds of pp.
        rounds = pp > 1 and batch // dp // micro_batch % pp == 0
        chunks = [("interleaved", v) for v in several] if rounds else []
        for schedule, v in forms + chunks:
            for zero in range(4) if dp > 1 else (0,):
                for sequence_parallel in (False, True) if tp > 1 else (False,):
                    for recompute in RECOMPUTE:
                        yield Candidate(dp, tp, pp, micro_batch, zero, schedule, v, sequence_parallel, recompute)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
