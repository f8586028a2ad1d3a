"""Copies between the device's memory and the host's, begun by one operator and awaited by another.

    %h: host f32[64,128] = Offload(%x)              the copy out of x begins
    ...                                             x may be read, not freed: CopyWait reads it
    %x.host: host f32[64,128] = CopyWait(%h, %x)    the copy is done: x may be freed
    free %x, %h
    ...
    %p: f32[64,128] = Prefetch(%x.host)             the copy back begins
    ...                                             p is not to be read yet
    %x.back: f32[64,128] = CopyWait(%p, %x.host)    the copy is done: x.back, which is p's buffer, has x's bits
    free %x.host, %p

A type that begins with `host` says that a value lies in host memory, which has an arena of its own: addresses,
peak and frees as on the device.  Only these operators read and write such values.  A wait reads both ends of its
copy, so that liveness keeps both buffers until then, to the byte, and nobody has to know what runs at what time.

On a device with streams each direction has a copy stream of its own:

* `Offload` and `Prefetch`: the copy stream of their direction waits for an event of the compute stream, recorded
  here, and copies; an event of the copy stream is recorded behind that.  The compute stream goes on at once.
* `CopyWait`: the compute stream waits for that event.  It moves nothing; its result is its first input's buffer.

Parameters, buffers and state can be declared in host memory as well.  A step fetches them as it fetches other host
values, updates what it has fetched, in place, and stores the result:

    param %w: host f32[64,128]
    %w.coming: f32[64,128] = Prefetch(%w)
    %w.here: f32[64,128] = CopyWait(%w.coming, %w)
    %w.new: f32[64,128] = SGDUpdate(%w.here, %g, ...)    in w.here's buffer
    %w: host f32[64,128] = Store(%w, %w.new)             the copy begins
    %w: host f32[64,128] = StoreWait(%w, %w.new)         the copy is done: w.new may be freed

Every copy thus begins behind what the compute stream has done so far, and whatever comes after a wait runs behind the
copy: a buffer that the plan gives away after the wait can be written at once, on both sides.  Each copy is awaited,
so that the copy streams have joined the compute stream when the step ends (as a captured graph needs it).  The host's
arena is to be pinned memory.  An executor without streams copies where the copy begins, and has nothing to wait for.
On a CPU with a folder for it (`CPUPlace(disk=...)`), host memory is a file there, and threads copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ...language.op import Cost, FunctionWriter, Op
from ...language.types import Operands, Types


class Copy(Op, abstract=True):
    """Begins a copy, or waits for one: takes no time of the device's own, as far as prices go
    (passes/offloading/transfers.py)."""

    copies = True
    moves_data = True
    #: whether it waits for a copy that an earlier operator begins
    waits: ClassVar[bool] = False

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        outs[0][...] = ins[0]

    def cost(self, ins: Types, outs: Types) -> Cost:
        """Nothing: what a copy takes is a matter of the link and of what runs beside it."""
        return Cost(0, 0)

    def export(self, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
        """ONNX has one memory: the first input."""
        g.node("Identity", ins[:1], outs)
        return True


class Offload(Copy):
    """Begins to copy x, on the device, to host memory.  `CopyWait(result, x)` must follow before anything reads it."""

    def infer(self, x):
        """The same elements in host memory."""
        if x.host:
            raise self.fail("it copies from the device to the host", x)
        return (x.placed(host=True),)


class Prefetch(Copy):
    """Begins to copy x, in host memory, to the device.  `CopyWait(result, x)` must follow before anything reads it."""

    def infer(self, x):
        """The same elements on the device."""
        if not x.host:
            raise self.fail("it copies from the host to the device", x)
        return (x.placed(host=False),)


class CopyWait(Copy):
    """Waits for the copy that writes its first input and reads its second one; gives the first, ready to be read."""

    waits = True

    def infer(self, target, source):
        if target.host == source.host or target != source.placed(host=target.host):
            raise self.fail("the two ends of a copy are the same elements, one of them in host memory", target, source)
        return (target,)

    def views(self, ins, outs):
        return (0,)


class Store(Copy):
    """Begins to copy x, on the device, to a parameter, buffer or state w in host memory, which it updates.

    `StoreWait(w, x)` must follow.
    """

    updates = (0,)

    def infer(self, w, x):
        """w's type."""
        if not w.host or x != w.placed(host=False):
            raise self.fail("it copies from the device to the same elements in host memory", w, x)
        return (w,)

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        outs[0][...] = ins[1]

    def export(self, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
        """Identity of the stored value."""
        g.node("Identity", ins[1:], outs)
        return True


class StoreWait(Store):
    """Waits for the `Store` with the same inputs."""

    waits = True

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        pass
