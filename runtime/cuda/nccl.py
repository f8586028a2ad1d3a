"""The engine on NCCL, through CuPy: a communicator and a stream for each channel, beside the step's stream.

    begin   an event is recorded on the step's stream, the channel's stream waits for it; then come the communication
            and a second event
    wait    the step's stream waits for the second event

Streams fork and join by events alone, so that a step's graph takes all of it.  Whether a communication is captured, and
the launch of a graph with communication in it, are the same on all ranks: they run the same steps in the same order.
Before each session's first run all ranks meet, over MPI, which also carries NCCL's identifiers.

Data move as bytes, so that every element type is moved; only sums of `order="library"` are NCCL's.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...communication.mesh import Mesh
from ...errors import JobError, MissingExtraError, UsageError
from ...language.ir import Block, Operator
from ...language.types import TensorType
from ...ops.communication.base import Communication
from ...ops.communication.collectives import AllGather, AllToAll
from ...version import __version__
from ..communication.agreement import card
from ..communication.engine import Engine, now
from .communication import HostLinks, Links
from .device.emulator import EmulatedDevice
from .device.kernel import Arrive, Begin, Buffer
from .nccl_calls import carry, refuse

#: the oldest version with graphs and bfloat16
_OLDEST = 21000
#: meanings of NCCL's status that CuPy's table lacks; None: nothing has happened
_STATUS = {6: "another rank's process has gone, or the network has failed", 7: None}
#: seconds for NCCL to give up, before this process ends
_GIVE_UP = 1.0
#: the path under which steps are counted
_STEPS = ("steps", -1)


def load_nccl() -> Any:
    """CuPy's module.  MissingExtraError where it, or NCCL, is missing; JobError for one that is too old."""
    try:
        from cupy.cuda import nccl
    except ImportError as e:
        raise _missing(str(e)) from None
    if not getattr(nccl, "available", False):
        raise _missing("CuPy finds no libnccl.so.2")
    if nccl.get_version() < _OLDEST:
        raise JobError(f"NCCL has version {nccl.get_version()}, but 2.10 or newer is needed: upgrade nvidia-nccl")
    return nccl


def _missing(why: str) -> MissingExtraError:
    return MissingExtraError(
        f"communication between CUDA devices needs NCCL ({why}): pip install nvidia-nccl-cu12 beside "
        "'onnx-recompute[cuda12]', or nvidia-nccl-cu13 beside '[cuda13]'"
    )


class _Step:
    """A step that was launched and may not be done; looks like a transfer to the watch."""

    def __init__(self, index: int, what: str) -> None:
        self.index, self.what, self.since = index, what, now()
        #: recorded behind it, when all is launched
        self.event: Any = None

    def __str__(self) -> str:
        return f"step {self.index + 1} on the device ({self.what})"


class NcclEngine(Engine):
    """Rank `control.rank` of a mesh, on one device.

    `control`: the ranks' engine on MPI, over which they meet; `nccl`: CuPy's module (None: it is loaded).
    """

    def __init__(self, control: Any, device: Any, nccl: Any = None) -> None:
        self.control, self.device = control, device
        self.mesh: Mesh = control.mesh
        self.rank: int = control.rank
        self.nccl = load_nccl() if nccl is None else nccl
        self.versions = {"onnx-recompute": __version__, "numpy": np.__version__, "NCCL": str(self.nccl.get_version())}
        #: bytes of the device that communicators took when they were made and connected
        self.buffer_bytes = 0
        self._channels: dict[str, tuple[Any, Any]] = {}
        self._steps: deque[_Step] = deque()
        self._count = 0
        self._closed = False
        control.watch_over(self)

    def accept(self, op: Operator) -> None:
        """UsageError for what NCCL cannot add, and for sums that were not lowered."""
        v = next((v for v in (*op.reads(), *op.writes())), None)
        rule = op.op
        if isinstance(rule, Communication) and v is not None and (why := refuse(rule, v.dtype)):
            raise UsageError(f"{rule.name} number {rule.number} on channel '{rule.queue}': {why}")

    def compare(self, block: Block) -> None:
        """Programs and versions of all ranks, each time; then new channels are opened, on all of them."""
        self._open(self.control.agreed(card(block, self.versions, self.mesh, self.rank), block.name))

    def collect(self, what: str, value: Any, root: int | None = None) -> list[Any]:
        values: list[Any] = self.control.collect(what, value, root)
        return values

    def _open(self, channels: dict[str, str]) -> None:
        """A communicator and a stream for each new channel, in the same order on all ranks."""
        new = [n for n in sorted(channels) if n not in self._channels and self.mesh.size(channels[n]) > 1]
        if not new:
            return
        places = {n: self.mesh.coordinate(self.rank, channels[n]) for n in new}
        with self._connecting():
            identifiers = {n: self.nccl.get_unique_id() for n in new if not places[n]}
        ids = self.control.gather("the exchange of NCCL's identifiers", identifiers)
        self.device.use()
        before = self.device.free_bytes()
        with self.control.meeting("the making of NCCL's communicators"), self._connecting():
            for name in new:
                group = self.mesh.group(self.rank, channels[name])
                comm = self.nccl.NcclCommunicator(len(group), ids[group[0]][name], places[name])
                self._channels[name] = comm, self.device.new_stream()
                self._connect(name, len(group))
        self.buffer_bytes += max(before - self.device.free_bytes(), 0)

    @contextlib.contextmanager
    def _connecting(self) -> Iterator[None]:
        """JobError for what NCCL says inside."""
        try:
            yield
        except self.nccl.NcclError as e:
            raise JobError(f"NCCL cannot connect the ranks: {_told(e)} (NCCL_DEBUG=WARN says more)") from None

    def _connect(self, name: str, ranks: int) -> None:
        """A byte between all ranks of a channel, since NCCL connects them, and allocates, when they first communicate:
        here they all take part, one channel after another, whatever their programs begin with."""
        comm, stream = self._channels[name]
        at, memory = self.device.allocate(2 * ranks)
        x, out = (Buffer(at + i * ranks, TensorType("u8", (ranks,))) for i in (0, 1))
        with self.device.current():
            for kind, source in ((AllToAll, x), (AllGather, x.at(0, (1,)))):
                carry(self.nccl, comm, Begin(kind(name, ranks, 0), 0, source, out, name), self.device, stream)
            stream.synchronize()
        del memory

    def channel(self, name: str) -> tuple[Any, Any]:
        """The communicator and the stream of a channel.  UsageError when the engine is closed."""
        if self._closed:
            raise UsageError(f"channel '{name}': the engine is closed")
        return self._channels[name]

    @contextlib.contextmanager
    def launching(self, what: str) -> Iterator[None]:
        """Inside, a step is launched, which the watch looks after until it is done."""
        step = _Step(self._count, what)
        self._count += 1
        self._steps.append(step)
        try:
            yield
        except BaseException:
            with contextlib.suppress(ValueError):
                self._steps.remove(step)
            raise
        step.event = self.device.mark()
        step.event.record(self.device.stream)

    def failed(self, why: str) -> None:
        """Kept for what this rank says when it leaves."""
        self.control.failed(why)

    # -- for the watch, in its thread -----------------------------------------------------------------------------

    def current(self) -> list[_Step]:
        """The step that the device is at."""
        if self._steps and not self._closed:
            self.device.use()
        while self._steps and (step := self._steps[0]).event is not None and step.event.done:
            self.control.expect(now() - step.since)
            self._steps.popleft()
            if self._steps:
                self._steps[0].since = now()
        return list(self._steps)[:1]

    def begun(self) -> dict[tuple[str, int], int]:
        """How many steps were launched."""
        return {_STEPS: self._count}

    def members(self, transfer: Any) -> dict[int, tuple[str, int]]:
        """All other ranks."""
        return {r: _STEPS for r in range(self.mesh.ranks) if r != self.rank}

    def trouble(self) -> str:
        """NCCL's asynchronous error; "" for none."""
        for name, (comm, _) in () if self._closed else list(self._channels.items()):
            try:
                comm.check_async_error()
            except Exception as e:
                if why := _told(e):
                    return f"NCCL has failed on channel '{name}': {why}"
        return ""

    def abort(self) -> None:
        """Ends what is under way on the device, as far as NCCL manages in a second: kernels that wait for others."""
        self._closed = True
        comms = [comm for comm, _ in list(self._channels.values())]
        ending = threading.Thread(target=lambda: [c.abort() for c in comms], daemon=True)
        ending.start()
        ending.join(_GIVE_UP)

    def close(self) -> None:
        """Gives the communicators back, in the same order on all ranks."""
        if self._closed:
            return
        self._closed = True
        for name in sorted(self._channels):
            self._channels[name][0].destroy()
        self._channels.clear()


class NcclLinks(Links):
    """A session's communications on the engine's channels.  `flying`: the event behind each."""

    engine: NcclEngine

    def prepare(self, call: Begin | Arrive) -> Callable[[], None]:
        """Events between the step's stream and the channel's, and the communication between them."""
        engine, device = self.engine, self.engine.device
        if isinstance(call, Arrive):
            return lambda: self._wait(self.flying.pop(call.name, None))
        begun, done = device.mark(), device.mark()

        def begin() -> None:
            comm, stream = engine.channel(call.op.queue)
            begun.record(device.stream)
            stream.wait_event(begun)
            carry(engine.nccl, comm, call, device, stream)
            done.record(stream)
            self.flying[call.name] = done

        return begin

    def _wait(self, event: Any) -> None:
        """None: it was joined before, where a graph began or ended."""
        if event is not None:
            self.engine.device.stream.wait_event(event)

    def join(self) -> None:
        """The step's stream waits for all that is open."""
        for event in self.flying.values():
            self._wait(event)
        self.flying.clear()

    @contextlib.contextmanager
    def step(self, block: Block) -> Iterator[None]:
        """`Links.step`; the device may still be at work afterwards."""
        with super().step(block), self.engine.launching(f"'{block.name}'"):
            yield


def links_of(engine: Engine | None, device: Any) -> Links | None:
    """For a session on a device.  UsageError for an engine that does not reach the device's memory."""
    if engine is None:
        return None
    if isinstance(engine, NcclEngine):
        return NcclLinks(engine)
    if engine.mesh.ranks > 1 and not isinstance(device, EmulatedDevice):
        raise UsageError(
            f"{type(engine).__name__} moves data in the host's memory: on CUDA devices ranks communicate through NCCL "
            "(Executor(rc.CUDAPlace(), mesh=...))"
        )
    return HostLinks(engine)


def _told(e: BaseException) -> str | None:
    """An error of NCCL in words; None for a status that is none.  CuPy's table of names does not have all of them."""
    if isinstance(e, KeyError) and e.args and e.args[0] in _STATUS:
        return _STATUS[e.args[0]]
    return str(e) or type(e).__name__
