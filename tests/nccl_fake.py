"""NCCL and CUDA's streams, events and graphs as the documentation describes them, for ranks that are threads.

Ranks run their kernels on the emulated device, one at a time.  What a stream is given runs in order; data of a
communication move as late as they may (when a rank waits for them), with `late=False` as soon as all ranks are there.
Whatever the documentation forbids is an AssertionError: calls that do not match, a group that is not ended, memory that
nobody allocated, a stream that is not forked into a capture, or not joined when it ends, a wait for an event of another
capture, a communication that one rank captures and another one does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from streams_fake import Call, Event, Group, Stream

from recompute.communication.mesh import Mesh
from recompute.runtime.communication.agreement import Card, agree
from recompute.runtime.cuda.device import emulator
from recompute.runtime.cuda.nccl import NcclEngine

SECONDS = 60.0
#: a program of every rank: an addition before and behind the communication, and one beside it, all of whose buffers
#: the plan may share
COLLECTIVE = """program p {{
  input %x: {kind}[{n},3]
  %a: {kind}[{n},3] = Add(%x, %x)
  communicate %s: {out} = {name}(%a) {{axis="dp", ranks={n}, number=0{more}}}
  %b: {kind}[{n},3] = Mul(%x, %x)
  communicate %t: {out} = CommWait(%s, %a)
  %y: {out} = Add(%t, %t)
  output %y, %b
}}"""
_NUMPY = {0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 6: "f2", 7: "f4", 8: "f8", 9: ml_dtypes.bfloat16}
_MESSAGES = ("send", "recv")


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


# -- NCCL -------------------------------------------------------------------------------------------------------------


class World:
    """All ranks.  `log`: (rank, name, arguments without addresses and stream) of every call, as it was made."""

    def __init__(self, ranks: int, late: bool = True) -> None:
        self.ranks, self.late = ranks, late
        self.changed = threading.Condition(emulator._RUNNING)
        self.streams: dict[int, Stream] = {}
        self.devices: list[FakeDevice] = []
        self.waiting: dict[Any, deque[Call]] = {}
        self.log: list[tuple[int, str, tuple[int, ...]]] = []
        self.made: dict[bytes, dict[int, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.failed: BaseException | None = None
        self._slots: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def is_first(self, stream: Stream) -> bool:
        return any(d.stream is stream for d in self.devices)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait(SECONDS)
        found = list(self._slots)
        self._barrier.wait(SECONDS)
        return found

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Lets others run until it is so."""
        with self.changed:
            while not ready():
                if self.failed is not None:
                    raise RuntimeError("another rank has failed")
                if self.exchange():
                    continue
                assert self.changed.wait(SECONDS), f"nothing happens any more: {what}"

    def post(self, group: Group) -> None:
        for call in group.calls:
            if not call.posted:
                call.posted = True
                self.waiting.setdefault(self._queue(call), deque()).append(call)
        with self.changed:
            self.changed.notify_all()
        if not self.late:
            self.exchange()

    def _queue(self, call: Call) -> Any:
        if call.name in _MESSAGES:
            peer = call.words[3]
            ends = (call.comm.rank, peer) if call.name == "send" else (peer, call.comm.rank)
            return (call.comm.id, call.name, *ends)
        return (call.comm.id, call.comm.rank)

    def exchange(self) -> bool:
        """Moves the data of all calls whose members are there; whether there were any."""
        found = False
        for key in list(self.waiting):
            calls = self._matching(key)
            while calls:
                found = True
                for c in calls:
                    self.waiting[self._queue(c)].popleft()
                move(calls)
                for c in calls:
                    c.done = True
                calls = self._matching(key)
        if found:
            for stream in list(self.streams.values()):
                stream.advance()
            with self.changed:
                self.changed.notify_all()
        return found

    def _matching(self, key: Any) -> list[Call]:
        first = self.waiting[key][0] if self.waiting[key] else None
        if first is None:
            return []
        if first.name in _MESSAGES:
            ident, name, *ends = key
            others = self.waiting.get((ident, "recv" if name == "send" else "send", *ends))
            members = [first, others[0]] if others else []
            members.sort(key=lambda c: c.name, reverse=True)
        else:
            queues = [self.waiting.get((first.comm.id, r)) for r in range(first.comm.ranks)]
            members = [q[0] for q in queues if q] if all(queues) else []
        assert len({c.captured for c in members}) <= 1, "a communication is captured on some ranks only"
        return members


def move(calls: list[Call]) -> None:
    """The data of one communication, on all its members."""
    name = calls[0].name
    words = [c.words for c in calls]
    if name == "send":
        (x, n, kind, _, _), (y, m, other, _, _) = words
        assert (n, kind) == (m, other), f"{n} of type {kind} are sent, {m} of type {other} received"
        bytes_at(y, m)[...] = bytes_at(x, n)
        return
    assert {c.name for c in calls} == {name}, f"ranks call {sorted({c.name for c in calls})}"
    assert len({w[2:-1] for w in words}) == 1, f"ranks call {name} with {[w[2:-1] for w in words]}"
    n, kind = words[0][2], np.dtype(_NUMPY[words[0][3]])
    size, ranks = n * kind.itemsize, len(calls)
    if name == "allGather":
        parts = [bytes_at(x, size).copy() for x, *_ in words]
        for _, y, *_ in words:
            bytes_at(y, size * ranks)[...] = np.concatenate(parts)
    elif name == "broadcast":
        root = bytes_at(words[words[0][4]][0], size).copy()
        for _, y, *_ in words:
            bytes_at(y, size)[...] = root
    else:
        scattered = name == "reduceScatter"
        total = functools.reduce(
            np.add, [bytes_at(x, size * (ranks if scattered else 1)).view(kind) for x, *_ in words]
        )
        for i, (_, y, *_) in enumerate(words):
            if name == "reduce" and i != words[0][5]:
                continue
            bytes_at(y, size).view(kind)[...] = total[i * n : (i + 1) * n] if scattered else total


class NcclError(RuntimeError):
    pass


class FakeNccl:
    """A rank's `cupy.cuda.nccl`."""

    NcclError = NcclError
    available = True

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.group: list[tuple[Call, int]] | None = None
        self.NcclCommunicator = functools.partial(FakeCommunicator, self)

    def get_version(self) -> int:
        return 22703

    def get_unique_id(self) -> bytes:
        self.world.counts["ids"] += 1
        return self.world.counts["ids"].to_bytes(128, "little")

    def groupStart(self) -> None:
        assert self.group is None, "a group within a group"
        self.group = []

    def groupEnd(self) -> None:
        assert self.group is not None, "a group ends that has not begun"
        calls, self.group = self.group, None
        streams = {s for _, s in calls}
        assert len(streams) == 1, "a group on several streams"
        self.world.streams[streams.pop()].add(Group([c for c, _ in calls]))


class FakeCommunicator:
    def __init__(self, nccl: FakeNccl, ranks: int, ident: bytes, rank: int) -> None:
        assert isinstance(ident, bytes) and len(ident) == 128 and 0 <= rank < ranks
        self.nccl, self.ranks, self.id, self.rank = nccl, ranks, ident, rank
        self.error: BaseException | None = None
        self.state = "open"
        members = nccl.world.made.setdefault(ident, {})
        assert rank not in members, "two ranks have one number"
        members[rank] = self

    def _call(self, name: str, *words: int, spans: Sequence[tuple[int, int]]) -> None:
        assert all(isinstance(w, int) for w in words) and self.state == "open"
        world, own = self.nccl.world, self.nccl.rank
        for address, nbytes in spans:
            held = world.devices[own].spans
            assert any(a <= address and address + nbytes <= b for a, b in held), f"{name}: memory of nobody"
        plain = words[1:-1] if name in _MESSAGES else words[2:-1]
        world.log.append((own, name, plain))
        call = Call(self, name, words)
        if self.nccl.group is not None:
            self.nccl.group.append((call, words[-1]))
            return
        assert name not in _MESSAGES or words[3] != self.rank, "a rank sends to itself outside of a group"
        world.streams[words[-1]].add(Group([call]))

    def allReduce(self, x: int, y: int, n: int, kind: int, op: int, stream: int) -> None:
        size = n * np.dtype(_NUMPY[kind]).itemsize
        assert op == 0
        self._call("allReduce", x, y, n, kind, op, stream, spans=[(x, size), (y, size)])

    def reduce(self, x: int, y: int, n: int, kind: int, op: int, root: int, stream: int) -> None:
        size = n * np.dtype(_NUMPY[kind]).itemsize
        assert op == 0 and 0 <= root < self.ranks
        self._call("reduce", x, y, n, kind, op, root, stream, spans=[(x, size), (y, size)])

    def reduceScatter(self, x: int, y: int, n: int, kind: int, op: int, stream: int) -> None:
        size = n * np.dtype(_NUMPY[kind]).itemsize
        assert op == 0
        self._call("reduceScatter", x, y, n, kind, op, stream, spans=[(x, size * self.ranks), (y, size)])

    def allGather(self, x: int, y: int, n: int, kind: int, stream: int) -> None:
        size = n * np.dtype(_NUMPY[kind]).itemsize
        self._call("allGather", x, y, n, kind, stream, spans=[(x, size), (y, size * self.ranks)])

    def broadcast(self, x: int, y: int, n: int, kind: int, root: int, stream: int) -> None:
        size = n * np.dtype(_NUMPY[kind]).itemsize
        assert 0 <= root < self.ranks
        self._call("broadcast", x, y, n, kind, root, stream, spans=[(x, size), (y, size)])

    def send(self, x: int, n: int, kind: int, peer: int, stream: int) -> None:
        self._call("send", x, n, kind, peer, stream, spans=[(x, n * np.dtype(_NUMPY[kind]).itemsize)])

    def recv(self, y: int, n: int, kind: int, peer: int, stream: int) -> None:
        self._call("recv", y, n, kind, peer, stream, spans=[(y, n * np.dtype(_NUMPY[kind]).itemsize)])

    def rank_id(self) -> int:
        return self.rank

    def check_async_error(self) -> None:
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self.state = "aborted"

    def destroy(self) -> None:
        assert self.state == "open"
        self.state = "destroyed"


# -- a rank -----------------------------------------------------------------------------------------------------------


class FakeDevice(emulator.EmulatedDevice):
    """The emulated device with a stream and with graphs."""

    graphs = True

    def __init__(self, world: World) -> None:
        self.spans: list[tuple[int, int]] = []
        super().__init__()
        self.world, self.stream = world, Stream(world)
        self.captured = 0
        world.devices.append(self)

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        at, memory = super().allocate(nbytes)
        self.spans.append((at, at + nbytes))
        return at, memory

    def prepare(self, call: Any) -> Callable[[], None]:
        run = super().prepare(call)
        return lambda: self.stream.add(run)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        self.stream.begin_capture()
        run()
        return self.stream.end_capture().launch

    def use(self) -> None: ...

    def new_stream(self) -> Stream:
        return Stream(self.world)

    def mark(self) -> Event:
        return Event()

    def clear(self, target: Any, stream: Stream) -> None:
        stream.add(lambda: emulator._bytes(target).fill(0))

    def free_bytes(self) -> int:
        return (1 << 34) - (len(self.world.made) << 20)

    def event(self) -> float:
        return 0.0

    def seconds_between(self, start: float, end: float) -> float:
        return end - start


class Control:
    """What an engine asks of MPI."""

    def __init__(self, world: World, mesh: Mesh, rank: int) -> None:
        self.world, self.mesh, self.rank = world, mesh, rank
        self.watched: list[Any] = []
        self.why = ""

    def gather(self, what: str, value: Any) -> list[Any]:
        return self.world.gather(self.rank, value)

    def collect(self, what: str, value: Any, root: int | None = None) -> list[Any]:
        found = self.gather(what, value)
        return found if root in (None, self.rank) else []

    def agreed(self, own: Card, name: str) -> dict[str, str]:
        return agree(self.gather(name, own), self.mesh)

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        yield

    def watch_over(self, engine: Any) -> None:
        self.watched.append(engine)

    def failed(self, why: str) -> None:
        self.why = why

    def expect(self, seconds: float) -> None: ...


def engines(world: World, mesh: Mesh) -> list[NcclEngine]:
    """An engine for each rank, each on a device of its own."""
    return [NcclEngine(Control(world, mesh, r), FakeDevice(world), FakeNccl(world, r)) for r in range(mesh.ranks)]


def together(world: World, ranks: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the ranks return, each in a thread; the first error of one ends all."""
    results: list[Any] = [None] * len(ranks)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = ranks[rank]()
        except BaseException as e:
            errors.append(e)
            world.failed = world.failed or e
            world._barrier.abort()
            with world.changed:
                world.changed.notify_all()

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(len(ranks))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(SECONDS)
    if world.failed is not None:
        raise world.failed
    assert not any(t.is_alive() for t in threads), "ranks hang"
    return results
