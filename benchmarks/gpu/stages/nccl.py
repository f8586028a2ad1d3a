"""NCCL with one rank: our calls, launched and in a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from common import case

from recompute.language.types import TensorType
from recompute.ops.communication.collectives import AllGather, AllToAll
from recompute.runtime.cuda import nccl as ours
from recompute.runtime.cuda.device.device import open_device
from recompute.runtime.cuda.device.kernel import Begin, Buffer
from recompute.runtime.cuda.nccl_calls import carry

with case("nccl", "one rank") as found:
    device, nccl = open_device(0), ours.load_nccl()
    found["version"] = nccl.get_version()
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    stream, begun, done = device.new_stream(), device.mark(), device.mark()
    t = TensorType("f32", (1 << 16,))
    (at, _x), (bt, _y) = device.allocate(t.nbytes), device.allocate(t.nbytes)
    x, y, numbers = Buffer(at, t), Buffer(bt, t), np.arange(1 << 16, dtype=np.float32)

    def run(kind: Any) -> None:
        """As the engine does: fork, communicate, join."""
        begun.record(device.stream)
        stream.wait_event(begun)
        carry(nccl, comm, Begin(kind("q", 1, 0), 0, x, y, "y"), device, stream)
        done.record(stream)
        device.stream.wait_event(done)

    for kind in (AllGather, AllToAll):
        device.upload(x, numbers)
        device.upload(y, 0 * numbers)
        run(kind)
        found[kind.__name__] = bool((device.download(y) == numbers).all())
        device.upload(y, 0 * numbers)
        replay = device.capture(lambda kind=kind: run(kind))
        replay()
        replay()
        found[f"{kind.__name__} in a graph"] = bool((device.download(y) == numbers).all())
    device.upload(y, 0 * numbers)
    comm.allReduce(x.address, y.address, x.size, 7, 0, stream.ptr)
    stream.synchronize()
    found["allReduce"] = bool((device.download(y) == numbers).all())
    found["ok"] = all(v for v in found.values() if isinstance(v, bool))
