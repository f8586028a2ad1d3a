"""The orders in which a rank of a pipeline runs its micro-batches.

A slot is the forward pass (F) or the backward pass (B) of one micro-batch in one chunk of the rank's layers; schedules
that run weight gradients apart have slots W for them.  Rank r of p holds the stages r, p + r, 2p + r, ...: its chunks.

* `gpipe`: all forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965).
* `1f1b`: after p - 1 - r forward passes, one forward and one backward pass in turn (PipeDream-Flush, Narayanan et al.
  2021, arXiv 2006.09503): at most p - r micro-batches are alive on rank r.
* `interleaved`: the same over several chunks a rank (Narayanan et al. 2021, arXiv 2104.04473).
* `zb`: 1f1b with weight gradients run r micro-batches later (ZB-H1, Qi et al. 2023, arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...errors import UsageError, nearest

#: kinds of slots
FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"


@dataclass(frozen=True)
class Slot:
    """A pass of one micro-batch through one chunk of a rank's stages."""

    kind: str
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Pipe:
    """A rank's place in a pipeline: the `rank`-th of `ranks` along the mesh's axis `axis`, with `chunks` stages."""

    axis: str
    ranks: int
    rank: int
    schedule: str = "1f1b"
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            raise UsageError(f"there is no rank {self.rank} among {self.ranks} ranks of axis '{self.axis}'")
        if self.schedule not in SCHEDULES:
            raise UsageError(
                f"there is no pipeline schedule '{self.schedule}'{nearest(self.schedule, SCHEDULES)}: give one of "
                f"{', '.join(SCHEDULES)}"
            )
        if self.chunks < 1 or (self.chunks > 1 and self.schedule != "interleaved"):
            raise UsageError(
                f"the pipeline schedule '{self.schedule}' with {self.chunks} chunks a rank: chunks are a whole number "
                "of at least 1, and more than 1 only with the schedule 'interleaved'"
            )

    def __str__(self) -> str:
        return f"{self.axis}={self.rank}/{self.ranks},{self.schedule},{self.chunks}"

    @property
    def stages(self) -> int:
        """The number of stages, on all ranks."""
        return self.ranks * self.chunks

    def own(self) -> range:
        """The stages of this rank, in order."""
        return range(self.rank, self.stages, self.ranks)

    def at(self, rank: int) -> Pipe:
        """Another rank's place."""
        return Pipe(self.axis, self.ranks, rank, self.schedule, self.chunks)

    def slots(self, micro_batches: int) -> list[Slot]:
        """The rank's passes over so many micro-batches, in order."""
        return SCHEDULES[self.schedule](self, micro_batches)


def gpipe(pipe: Pipe, micro_batches: int) -> list[Slot]:
    """All forward passes, then all backward passes."""
    every = range(micro_batches)
    return [*(Slot(FORWARD, 0, m) for m in every), *(Slot(BACKWARD, 0, m) for m in every)]


def one_forward_one_backward(pipe: Pipe, micro_batches: int) -> list[Slot]:
    """Few forward passes ahead, then one of each in turn."""
    forward = [Slot(FORWARD, 0, m) for m in range(micro_batches)]
    backward = [Slot(BACKWARD, 0, m) for m in range(micro_batches)]
    return _in_turn(forward, backward, pipe.ranks - 1 - pipe.rank)


def interleaved(pipe: Pipe, micro_batches: int) -> list[Slot]:
    """Chunks in turn, `ranks` micro-batches at a time in each.

    UsageError for several chunks if the micro-batches are no multiple of the ranks.
    """
    p, v = pipe.ranks, pipe.chunks
    if v == 1:
        return one_forward_one_backward(pipe, micro_batches)
    if micro_batches % p:
        raise UsageError(
            f"the pipeline schedule 'interleaved' with {v} chunks a rank runs {p} micro-batches at a time in each, and "
            f"{micro_batches} is no multiple of {p}: give a multiple, or another schedule"
        )
    order = [(k % (p * v) // p, k // (p * v) * p + k % p) for k in range(micro_batches * v)]
    forward = [Slot(FORWARD, chunk, m) for chunk, m in order]
    backward = [Slot(BACKWARD, v - 1 - chunk, m) for chunk, m in order]
    return _in_turn(forward, backward, (p - 1 - pipe.rank) * 2 + (v - 1) * p)


def zero_bubble(pipe: Pipe, micro_batches: int) -> list[Slot]:
    """1f1b with the weight gradients of a micro-batch `rank` backward passes later, so that as many micro-batches are
    alive on each rank as on the first; what is left of them fills the end."""
    slots: list[Slot] = []
    for slot in one_forward_one_backward(pipe, micro_batches):
        slots.append(slot)
        late = slot.micro_batch - pipe.rank
        if slot.kind == BACKWARD and late >= 0:
            slots.append(Slot(WEIGHTS, 0, late))
    first = max(micro_batches - pipe.rank, 0)
    return [*slots, *(Slot(WEIGHTS, 0, m) for m in range(first, micro_batches))]


def _in_turn(forward: list[Slot], backward: list[Slot], ahead: int) -> list[Slot]:
    """`ahead` forward passes, then one of each in turn."""
    ahead = min(ahead, len(forward))
    pairs = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *(s for pair in pairs for s in pair), *backward[len(forward) - ahead :]]


#: by name: the order of a rank's passes
SCHEDULES: dict[str, Callable[[Pipe, int], list[Slot]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb": zero_bubble,
}
