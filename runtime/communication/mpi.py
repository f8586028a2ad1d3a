"""The engine on MPI: a thread and a communicator for each channel.

A thread of their own is what makes communications overlap with the step on every MPI: non-blocking calls do not advance
while nobody calls MPI.  Before data move, ranks meet without keeping a core busy (moves.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from typing import Any

import numpy as np

from ...communication.mesh import Mesh, as_mesh
from ...errors import JobError, MissingExtraError, UsageError, need_extra
from ...language.ir import Block, Operator
from ...ops.communication.base import Communication
from ...version import __version__
from . import moves
from .agreement import Card, agree, card, check_same
from .beginning import bounded_beginning
from .channel import Channel
from .engine import Engine, Transfer, path_of
from .watch import Watch


@functools.cache
def load_mpi() -> Any:
    """mpi4py's module.  MissingExtraError where it, or an MPI library, is missing."""
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise need_extra("mpi4py", "mpi", "communication between ranks") from None
    except (ImportError, RuntimeError) as e:
        raise MissingExtraError(
            f"mpi4py finds no MPI library ({str(e).splitlines()[0]}): pip install mpich, or load your cluster's MPI"
        ) from None
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise JobError(
            "MPI was started without support for threads, which communication beside computation needs: import "
            "recompute before mpi4py is configured otherwise, or use an MPI that gives MPI_THREAD_MULTIPLE"
        )
    return MPI


@functools.cache
def watch() -> Watch:
    """The watch over this process's ranks; there is one for all engines."""
    with bounded_beginning():
        mpi = load_mpi()
        return Watch(mpi, mpi.COMM_WORLD.Dup())


def compare_meshes(mesh: str) -> None:
    """UsageError, on all processes that MPI has started, where they are ranks of different meshes; all call it."""
    one = watch()
    with one.waiting("the comparison of all ranks' meshes", ""):
        moves.finish(one.comm.Ibarrier())
        meshes = one.comm.allgather(mesh or "none")
    check_same([({"mesh": text}, {}) for text in meshes])


class MpiEngine(Engine):
    """Rank `rank` of `mesh`, on MPI's processes (started by `python -m recompute.launch`, mpiexec or srun).

    `mesh`: a Mesh, or its text (None: one axis, "dp", of all processes).  `deadline`: seconds after which a rank that
    waits takes all ranks down if another one gives no sign of life; None: 60, or 100 times a step if that is more.
    All processes create their engines in the same order.
    """

    def __init__(self, mesh: Mesh | str | None = None, deadline: float | None = None) -> None:
        self._watch = watch()
        self._mpi = load_mpi()
        size, self.rank = self._watch.size, self._watch.rank
        self.mesh = Mesh.of(dp=size) if mesh is None else as_mesh(mesh)
        compare_meshes(str(self.mesh))
        if self.mesh.ranks != size:
            raise UsageError(
                f"the mesh {self.mesh} has {self.mesh.ranks} ranks, but {size} started: start as many as the "
                f"mesh has (python -m recompute.launch --nproc {self.mesh.ranks} SCRIPT)"
            )
        self._watch.set_deadline(deadline)
        self._comm = self._watch.comm.Dup()
        self._channels: dict[str, Channel] = {}
        self._comms: dict[str, Any] = {}
        self._agreed: set[str] = set()
        self._begun: Counter[tuple[str, int]] = Counter()
        self._closed = False
        self._name = self._watch.add(self)

    def accept(self, op: Operator) -> None:
        """UsageError for what MPI cannot add, and for sums that were not lowered."""
        v = next((v for v in (*op.reads(), *op.writes())), None)
        rule = op.op
        if isinstance(rule, Communication) and v is not None and (why := moves.refuse(rule, v.dtype)):
            raise UsageError(f"{rule.name} number {rule.number} on channel '{rule.queue}': {why}")

    def compare(self, block: Block) -> None:
        """Programs and versions of all ranks; then the channels are opened, on all of them."""
        versions = {"onnx-recompute": __version__, "numpy": np.__version__}
        mine = card(block, versions, self.mesh, self.rank)
        if mine.digest in self._agreed:
            return
        channels = self.agreed(mine, block.name)
        with self.meeting("the opening of channels"):
            self._open(channels)
        self._agreed.add(mine.digest)

    def agreed(self, own: Card, name: str) -> dict[str, str]:
        """All channels, with their axes, when the ranks' cards fit together; every rank calls it, with its own."""
        with self.meeting(f"the comparison of all ranks' programs ('{name}')"):
            brief = self._comm.allgather((own.digest, own.versions))
            if len({d for d, _ in brief}) == 1:
                cards = [Card(own.digest, own.events, versions) for _, versions in brief]
            else:
                cards = self._comm.allgather(own)
            return agree(cards, self.mesh)

    def meeting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Inside, this rank's main thread waits for all others, which the watch looks after."""
        return self._watch.waiting(what, self._name)

    def gather(self, what: str, value: Any) -> list[Any]:
        """A value of each rank, by rank; every rank calls it."""
        with self.meeting(what):
            values: list[Any] = self._comm.allgather(value)
            return values

    def watch_over(self, engine: Engine) -> None:
        """Another engine of the same ranks, which this one's watch looks after, too."""
        self._watch.add(engine)

    def _open(self, channels: dict[str, str]) -> None:
        """Splits a communicator for each new channel, in the same order on all ranks."""
        for name in sorted(channels):
            if name in self._comms:
                continue
            group = self.mesh.group(self.rank, channels[name])
            self._comms[name] = self._comm.Split(group[0], self.mesh.coordinate(self.rank, channels[name]))

    def collect(self, what: str, value: Any, root: int | None = None) -> list[Any]:
        with self._watch.waiting(what, self._name):
            moves.finish(self._comm.Ibarrier())
            if root is None:
                return list(self._comm.allgather(value))
            return list(self._comm.gather(value, root) or ())

    def any(self, what: str, said: bool) -> bool:
        mine, result = np.array([said], np.int32), np.empty(1, np.int32)
        with self._watch.waiting(what, self._name):
            moves.finish(self._comm.Iallreduce(mine, result, self._mpi.MAX), soon=True)
        return bool(result[0])

    def begin(self, op: Communication, at: int, x: Any, out: Any) -> Transfer:
        """Hands a communication to its channel's thread."""
        if self._closed:
            raise UsageError(f"{op.name} number {op.number} on channel '{op.queue}': the engine is closed")
        path = path_of(op)
        transfer = Transfer(op, at, x, out, self._begun[path])
        self._begun[path] += 1
        if op.queue not in self._channels:
            comm = self._comms[op.queue]
            self._channels[op.queue] = Channel(op.queue, lambda t: moves.move(self._mpi, comm, t, lambda: self._closed))
        self._channels[op.queue].put(transfer)
        return transfer

    def ends_like_first(self, error: str) -> bool:
        """Whether rank 0 ends with the same error as this one, so that it need not be said twice."""
        return self._watch.ends_like_first(error)

    def failed(self, why: str) -> None:
        """Kept for what this rank says when it leaves."""
        self._watch.failure = why

    def expect(self, seconds: float) -> None:
        """Deadlines are 100 steps, or a minute if that is more."""
        self._watch.expect(seconds)

    # -- for the watch --------------------------------------------------------------------------------------------

    def current(self) -> list[Transfer]:
        """The transfers in flight on its channels."""
        return [t for c in list(self._channels.values()) if (t := c.current) is not None and t.since]

    def begun(self) -> dict[tuple[str, int], int]:
        """How many communications were begun on each path."""
        return dict(self._begun)

    def members(self, transfer: Transfer) -> dict[int, tuple[str, int]]:
        """The ranks that take part in a transfer, and the path under which they count it."""
        group = self.mesh.group(self.rank, transfer.op.axis)
        channel, peer = transfer.path
        if peer >= 0:
            return {group[peer]: (channel, self.mesh.coordinate(self.rank, transfer.op.axis))}
        return {r: transfer.path for r in group if r != self.rank}

    def close(self) -> None:
        """Ends the threads and gives the communicators back; what is not done fails."""
        if self._closed:
            return
        self._closed = True
        for channel in self._channels.values():
            channel.close()


@functools.cache
def engine_of(mesh: Mesh) -> MpiEngine:
    """The engine of this process for a mesh, which all programs share that name no other; made at the first call, which
    all ranks make."""
    return MpiEngine(mesh)
