"""Each communication as calls of NCCL, on a channel's stream."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...ops.communication.base import Communication
from ...ops.communication.collectives import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter
from ...ops.communication.messages import Message, Recv, Send
from .device.kernel import Begin

#: element type → ncclDataType_t: what NCCL adds
TYPES = {"i8": 0, "u8": 1, "i32": 2, "u32": 3, "i64": 4, "u64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}
#: ncclUint8, as which everything is moved that is not added; ncclSum
BYTES, SUM = 1, 0


def refuse(op: Communication, dtype: str) -> str:
    """Why NCCL cannot carry a communication of this element type; "" if it can."""
    if op.sums and op.order == "library" and dtype not in TYPES:
        return f'NCCL does not add {dtype}: use order="tree", or cast it first'
    if isinstance(op, Reduce) and op.order == "tree":
        return 'NCCL does not add in the tree\'s order: use AllReduce, whose sums are our own, or order="library"'
    if op.sums and op.order == "tree":
        return "sums in the tree's order are made by the pass tree-sums: plan the program again"
    return ""


def carry(nccl: ModuleType, comm: Any, call: Begin, device: Any, stream: Any) -> None:
    """Enqueues one communication."""
    if isinstance(call.op, Message):
        _message(comm, call, device, stream)
    elif call.out.size:
        _COLLECTIVES[type(call.op)](nccl, comm, call, device, stream)


def _message(comm: Any, call: Begin, device: Any, stream: Any) -> None:
    """Messages of a channel are in order on both sides, so that each is a group of its own."""
    if isinstance(call.op, Send):
        assert call.x is not None
        if call.x.size:
            comm.send(call.x.address, call.x.nbytes, BYTES, call.op.peer, stream.ptr)
        device.clear(call.out, stream)
    else:
        assert isinstance(call.op, Recv)
        if call.out.size:
            comm.recv(call.out.address, call.out.nbytes, BYTES, call.op.peer, stream.ptr)


def _all_reduce(nccl: ModuleType, comm: Any, call: Begin, device: Any, stream: Any) -> None:
    x, out = call.x, call.out
    assert x is not None
    comm.allReduce(x.address, out.address, out.size, TYPES[out.dtype], SUM, stream.ptr)


def _reduce_scatter(nccl: ModuleType, comm: Any, call: Begin, device: Any, stream: Any) -> None:
    x, out = call.x, call.out
    assert x is not None
    comm.reduceScatter(x.address, out.address, out.size, TYPES[out.dtype], SUM, stream.ptr)


def _reduce(nccl: ModuleType, comm: Any, call: Begin, device: Any, stream: Any) -> None:
    """Zeros where the root is not."""
    x, out = call.x, call.out
    assert x is not None
    comm.reduce(x.address, out.address, out.size, TYPES[out.dtype], SUM, call.op.root, stream.ptr)
    if comm.rank_id() != call.op.root:
        device.clear(out, stream)


def _all_gather(nccl: ModuleType, comm: Any, call: Begin, device: Any, stream: Any) -> None:
    x = call.x
    assert x is not None
    comm.allGather(x.address, call.out.address, x.nbytes, BYTES, stream.ptr)


def _all_to_all(nccl: ModuleType, comm: Any, call: Begin, device: Any, stream: Any) -> None:
    """A part to each rank and one from each, all at once."""
    x, out, ranks = call.x, call.out, call.op.ranks
    assert x is not None
    each = out.nbytes // ranks
    nccl.groupStart()
    try:
        for peer in range(ranks):
            comm.send(x.address + peer * each, each, BYTES, peer, stream.ptr)
            comm.recv(out.address + peer * each, each, BYTES, peer, stream.ptr)
    finally:
        nccl.groupEnd()


def _broadcast(nccl: ModuleType, comm: Any, call: Begin, device: Any, stream: Any) -> None:
    x, out = call.x, call.out
    assert x is not None
    comm.broadcast(x.address, out.address, out.nbytes, BYTES, call.op.root, stream.ptr)


_COLLECTIVES = {
    AllReduce: _all_reduce,
    ReduceScatter: _reduce_scatter,
    Reduce: _reduce,
    AllGather: _all_gather,
    AllToAll: _all_to_all,
    Broadcast: _broadcast,
}
