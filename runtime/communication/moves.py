"""Each communication as calls of MPI, on the buffers that were given.

Everything moves as bytes, so that every element type is moved; sums of `order="tree"` are added here or by the program
(passes/communication/tree_sums.py), and only those of `order="library"` by MPI.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UsageError
from ...ops.communication.base import Communication
from ...ops.communication.collectives import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter
from ...ops.communication.messages import Message, Recv, Send

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

#: elements that a rank receives at a time to add them
PIECE = 1 << 16
#: element types that MPI adds itself
SUMMED = {"f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"}
_READY, _DATA = 1, 2
#: seconds between two looks at what others do, at most: when nothing waits for it, and when the step does
_PATIENT, _EAGER = 1e-3, 5e-5
#: the same while data move
_BRIEF = 2e-4
#: looks before the first pause: for others to take part, and while data move
_LOOKS, _FEW = 50, 3


def refuse(op: Communication, dtype: str) -> str:
    """Why MPI cannot carry a communication of this element type; "" if it can."""
    if op.sums and op.order == "library" and dtype not in SUMMED:
        return f'MPI does not add {dtype}: use order="tree", or cast it first'
    if isinstance(op, ReduceScatter) and op.order == "tree":
        return "sums in the tree's order are made by the pass tree-sums: plan the program again"
    return ""


def move(mpi: ModuleType, comm: Comm, transfer: Any, left: Callable[[], bool]) -> None:
    """Carries one communication; `left`: whether the engine is closed meanwhile."""
    op = transfer.op
    if isinstance(op, Message):
        _message(mpi, comm, transfer, left)
        return
    _until(comm.Ibarrier().Test, transfer, left)
    if not transfer.out.size:
        return
    _COLLECTIVES[type(op)](mpi, comm, transfer)


def finish(request: Request, *, soon: bool = False) -> None:
    """Waits for a request without keeping a core busy; `soon`: it will not take long."""
    pause = 1e-6
    while not request.Test():
        time.sleep(pause)
        pause = min(pause * 1.5, _EAGER if soon else _PATIENT)


def _until(ready: Callable[[], bool], transfer: Any, left: Callable[[], bool]) -> None:
    """Waits for other ranks without keeping a core busy, as MPI's own waiting does: this rank may be computing."""
    for _ in range(_LOOKS):  # a sleep takes 50 µs or more
        if ready():
            return
        os.sched_yield()
    pause = 1e-6
    while not ready():
        if left():
            raise UsageError("the engine was closed before other ranks took part")
        time.sleep(pause)
        pause = min(pause * 1.5, _EAGER if transfer.wanted else _PATIENT)


def _finish(request: Request, transfer: Any) -> None:
    """Moves the data of a communication in which all take part.

    While the step does not wait for it, it sleeps between two looks: the step needs the core, and to change places with
    it at every look took more processor time than the data.  When it does, others have the core between two looks: with
    more processes than cores MPI's own waiting took 20 times as long.
    """
    pause, looks = 2e-5, 0
    while not request.Test():
        looks += 1
        if looks <= _FEW or transfer.wanted:
            os.sched_yield()
        else:
            time.sleep(pause)
            pause = min(pause * 1.5, _BRIEF)


def _message(mpi: ModuleType, comm: Comm, transfer: Any, left: Callable[[], bool]) -> None:
    """The receiver says that it is ready; then the data are sent."""
    peer = transfer.op.peer
    if isinstance(transfer.op, Send):
        _until(lambda: comm.Iprobe(peer, _READY), transfer, left)
        comm.Recv([None, 0, mpi.BYTE], peer, _READY)
        _finish(comm.Isend(_bytes(mpi, transfer.x), peer, _DATA), transfer)
        transfer.out[...] = 0
    else:
        assert isinstance(transfer.op, Recv)
        comm.Send([None, 0, mpi.BYTE], peer, _READY)
        _until(lambda: comm.Iprobe(peer, _DATA), transfer, left)
        _finish(comm.Irecv(_bytes(mpi, transfer.out), peer, _DATA), transfer)


def _bytes(mpi: ModuleType, array: Any) -> list[Any]:
    return [array.reshape(-1).view(np.uint8), mpi.BYTE]


def _all_reduce(mpi: ModuleType, comm: Comm, t: Any) -> None:
    if t.op.order == "library":
        comm.Allreduce(t.x, t.out, mpi.SUM)
        return
    _add_in_tree(comm, t)
    _finish(comm.Ibcast(_bytes(mpi, t.out), 0), t)


def _reduce_scatter(mpi: ModuleType, comm: Comm, t: Any) -> None:
    comm.Reduce_scatter_block(t.x, t.out, mpi.SUM)


def _reduce(mpi: ModuleType, comm: Comm, t: Any) -> None:
    root = comm.rank == t.op.root
    if t.op.order == "library":
        comm.Reduce(t.x, t.out, mpi.SUM, t.op.root)
    else:
        _add_in_tree(comm, t)
        if t.op.root and comm.rank == 0:
            _finish(comm.Isend(_bytes(mpi, t.out), t.op.root, _DATA), t)
        elif t.op.root and root:
            _finish(comm.Irecv(_bytes(mpi, t.out), 0, _DATA), t)
    if not root:
        t.out[...] = 0


def _add_in_tree(comm: Comm, t: Any) -> None:
    """Sums all ranks' x on rank 0, along the tree: of two neighbours the second one sends, the first one adds.

    What is received lies in a small buffer of its own, `PIECE` elements; `out` is used on every rank.
    """
    t.out[...] = t.x
    y = t.out.reshape(-1)
    spare = np.empty(min(PIECE, y.size), y.dtype)
    step = 1
    while step < comm.size:
        if comm.rank % (2 * step):
            for start in range(0, y.size, PIECE):
                _finish(comm.Isend(y[start : start + PIECE].view(np.uint8), comm.rank - step, _DATA), t)
            return
        if comm.rank + step < comm.size:
            for start in range(0, y.size, PIECE):
                part = y[start : start + PIECE]
                _finish(comm.Irecv(spare[: part.size].view(np.uint8), comm.rank + step, _DATA), t)
                with np.errstate(all="ignore"):
                    np.add(part, spare[: part.size], out=part)
        step *= 2


def _all_gather(mpi: ModuleType, comm: Comm, t: Any) -> None:
    _finish(comm.Iallgather(_bytes(mpi, t.x), _bytes(mpi, t.out)), t)


def _all_to_all(mpi: ModuleType, comm: Comm, t: Any) -> None:
    _finish(comm.Ialltoall(_bytes(mpi, t.x), _bytes(mpi, t.out)), t)


def _broadcast(mpi: ModuleType, comm: Comm, t: Any) -> None:
    if comm.rank == t.op.root:
        t.out[...] = t.x
    _finish(comm.Ibcast(_bytes(mpi, t.out), t.op.root), t)


_COLLECTIVES = {
    AllReduce: _all_reduce,
    ReduceScatter: _reduce_scatter,
    Reduce: _reduce,
    AllGather: _all_gather,
    AllToAll: _all_to_all,
    Broadcast: _broadcast,
}
