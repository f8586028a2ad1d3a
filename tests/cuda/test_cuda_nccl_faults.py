"""Faults of ranks on CUDA devices: what is missing, what is refused, what the watch sees, what the fake refuses."""

from __future__ import annotations

import inspect
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import cuda_cases
import numpy as np
import pytest
from nccl_fake import (
    COLLECTIVE,
    Call,
    Event,
    FakeCommunicator,
    FakeDevice,
    Group,
    NcclError,
    Stream,
    World,
    engines,
    together,
)

import recompute as rc
from recompute.communication.mesh import Mesh
from recompute.errors import JobError, MissingExtraError, UsageError, VerifyError
from recompute.language.types import TensorType
from recompute.runtime.communication import watch
from recompute.runtime.communication.engine import Engine
from recompute.runtime.cuda import local_device
from recompute.runtime.cuda.device.device import CupyDevice
from recompute.runtime.cuda.device.kernel import Buffer
from recompute.runtime.cuda.local_device import Seen, check_apart, device_of
from recompute.runtime.cuda.nccl import links_of, load_nccl
from recompute.runtime.cuda.nccl_calls import BYTES, SUM, TYPES

pytestmark = cuda_cases.needs_compiler
PLACE = rc.EmulatedCUDAPlace()

ALL_GATHER = rc.parse(COLLECTIVE.format(n=2, name="AllGather", kind="f32", out="f32[4,3]", more=""))
ALL_TO_ALL = rc.parse(COLLECTIVE.format(n=2, name="AllToAll", kind="f32", out="f32[2,3]", more=""))


# -- what the fake refuses --------------------------------------------------------------------------------------------


def forked(join: bool) -> None:
    world = World(1)
    first, other = FakeDevice(world).stream, Stream(world)
    begun, done = Event(), Event()
    first.begin_capture()
    begun.record(first)
    other.wait_event(begun)
    other.add(lambda: None)
    done.record(other)
    if join:
        first.wait_event(done)
    first.end_capture()


def test_streams_must_be_joined_in_a_capture() -> None:
    forked(join=True)
    with pytest.raises(AssertionError, match="not joined"):
        forked(join=False)


def test_a_capture_waits_for_nothing_outside() -> None:
    world = World(1)
    first, event = FakeDevice(world).stream, Event()
    event.record(first)
    first.begin_capture()
    with pytest.raises(AssertionError, match="from outside"):
        first.wait_event(event)


@pytest.mark.parametrize(("counts", "captured", "message"), [
    ((4, 3), (False, False), "ranks call allGather with"),
    ((4, 4), (True, False), "captured on some ranks only"),
])  # fmt: skip
def test_calls_must_match(counts: tuple[int, int], captured: tuple[bool, bool], message: str) -> None:
    world = World(2)
    memory = np.zeros(64, np.uint8)
    at = int(memory.ctypes.data)
    for rank in range(2):
        comm = SimpleNamespace(id=0, rank=rank, ranks=2)
        world.post(Group([Call(comm, "allGather", (at, at + 32, counts[rank], 1, 0), captured[rank])]))
    with pytest.raises(AssertionError, match=message):
        world.exchange()


def test_memory_must_be_somebodys() -> None:
    world = World(2)
    made = engines(world, Mesh.of(dp=2))
    comm = made[0].nccl.NcclCommunicator(2, bytes(128), 0)
    with pytest.raises(AssertionError, match="memory of nobody"):
        comm.allGather(64, 128, 4, 1, made[0].device.stream.ptr)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_programs_that_do_not_match_are_refused_on_all_ranks() -> None:
    world = World(2)
    made = engines(world, Mesh.of(dp=2))
    told: list[str] = []

    def rank(r: int) -> None:
        block = ALL_GATHER if r else ALL_TO_ALL
        executor = rc.Executor(PLACE, engine=made[r])
        with pytest.raises(VerifyError, match="do not fit together") as e:
            executor.run(rc.Program(block), {"x": np.ones((2, 3), np.float32)}, ["y"])
        told.append(str(e.value))

    together(world, [lambda r=r: rank(r) for r in range(2)])
    assert len(told) == 2 and not world.log


@pytest.mark.parametrize(("name", "more", "kind", "message"), [
    ("AllReduce", ', order="library"', "i16", "NCCL does not add i16"),
    ("Reduce", "", "f32", "use AllReduce, whose sums are our own"),
])  # fmt: skip
def test_what_nccl_cannot_add_is_refused_when_a_program_is_bound(name: str, more: str, kind: str, message: str) -> None:
    world = World(2)
    block = rc.parse(COLLECTIVE.format(n=2, name=name, kind=kind, out=f"{kind}[2,3]", more=more))
    executor = rc.Executor(PLACE, engine=engines(world, Mesh.of(dp=2))[0])
    with pytest.raises(UsageError, match=message):
        executor.session(rc.Program(block), ["y"])


def test_a_step_that_fails_while_it_communicates_is_the_last_one() -> None:
    """The communication of one rank fails when it is enqueued; the rank says why, and goes no further."""
    world = World(2)
    made = engines(world, Mesh.of(dp=2))
    block = ALL_TO_ALL
    executor, program = rc.Executor(PLACE, engine=made[0]), rc.Program(block)
    links = executor.session(program, ["y"]).links
    links._compared, executor.compares = True, False  # the other rank is not there
    links.flying["s"] = Event()
    with pytest.raises(JobError, match="start all ranks again"):
        executor.run(program, {"x": np.ones((2, 3), np.float32)}, ["y"])
    links.flying.clear()
    with pytest.raises(JobError, match="AllToAll"):  # no channel is open
        executor.run(program, {"x": np.ones((2, 3), np.float32)}, ["y"])
    assert "AllToAll" in made[0].control.why or "KeyError" in made[0].control.why
    assert not made[0].current()  # the watch does not wait for it


def fake_cupy(monkeypatch: pytest.MonkeyPatch, **module: Any) -> None:
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.cuda = cuda  # type: ignore[attr-defined]
    if module:
        cuda.nccl = SimpleNamespace(**module)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


def test_nccl_that_is_missing_or_too_old_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch)
    with pytest.raises(MissingExtraError, match="pip install nvidia-nccl-cu12"):
        load_nccl()
    fake_cupy(monkeypatch, available=False)
    with pytest.raises(MissingExtraError, match="finds no libnccl"):
        load_nccl()
    fake_cupy(monkeypatch, available=True, get_version=lambda: 2708)
    with pytest.raises(JobError, match="2708"):
        load_nccl()
    fake_cupy(monkeypatch, available=True, get_version=lambda: 22707)
    assert load_nccl().get_version() == 22707


def test_nccl_that_cannot_connect_is_said() -> None:
    world = World(2)
    made = engines(world, Mesh.of(dp=2))
    made[0].nccl.get_unique_id = refuse
    with pytest.raises(JobError, match="NCCL cannot connect the ranks: no network"):
        made[0]._open({"dp": "dp"})


def refuse(*_: Any) -> Any:
    raise NcclError("no network")


def test_a_device_for_each_rank() -> None:
    a, b = [Seen("a", 4)] * 4, [Seen("b", 2)] * 2
    assert [device_of(r, a + b) for r in range(6)] == [0, 1, 2, 3, 0, 1]
    assert [device_of(r, [Seen("a", 1)] * 2) for r in range(2)] == [0, 0]  # each may be shown another one
    assert device_of(0, a, 3) == 3
    with pytest.raises(UsageError, match="4 CUDA devices for 5 ranks"):
        device_of(0, [*a, Seen("a", 4)])
    with pytest.raises(MissingExtraError, match="rank 1 has no device: no driver"):
        device_of(0, [Seen("a", 1), Seen("a", 0, "no driver")])
    check_apart(["a 0", "a 1", "b 0"])
    with pytest.raises(UsageError, match="ranks 0 and 2 have the same CUDA device"):
        check_apart(["a 0", "a 1", "a 0"])


def test_what_is_asked_of_a_device() -> None:
    """Streams and events beside the step's, zeros on one of them, memory, and who it is: calls of CuPy's runtime."""
    calls: list[Any] = []
    device = CupyDevice.__new__(CupyDevice)
    device.number, device._cublas = 1, None
    cuda = SimpleNamespace(Stream=lambda **how: ("stream", how), Event=lambda **how: ("event", how))
    device.cupy = SimpleNamespace(cuda=cuda)
    device.device = SimpleNamespace(use=lambda: calls.append("use"))
    device.runtime = SimpleNamespace(
        memsetAsync=lambda *words: calls.append(words), memGetInfo=lambda: (5, 9),
        deviceGetPCIBusId=lambda n: f"0000:0{n}:00.0", getDeviceProperties=lambda n: {"uuid": b"\x07\x00"},
    )  # fmt: skip
    device.use()
    device.clear(Buffer(640, TensorType("f32", (3,))), SimpleNamespace(ptr=7))
    device.clear(Buffer(640, TensorType("f32", (0,))), SimpleNamespace(ptr=7))
    assert calls == ["use", (640, 0, 12, 7)]
    assert device.new_stream() == ("stream", {"non_blocking": True})
    assert device.mark() == ("event", {"disable_timing": True})
    assert device.free_bytes() == 5 and device.library_bytes == {}
    device._cublas = object()
    assert device.library_bytes == {"cublas": 32 << 20}
    assert device.identity == "0000:01:00.0 b'\\x07\\x00'"


def test_a_machine_without_cupy_is_seen() -> None:
    if local_device.seen(0).devices:
        pytest.skip("there is a device")
    assert local_device.seen(0).why


def test_an_engine_for_the_hosts_memory_does_not_run_on_a_device() -> None:
    engine = Engine()
    engine.mesh, engine.rank = Mesh.of(dp=2), 0
    with pytest.raises(UsageError, match="through NCCL"):
        links_of(engine, object())


# -- the watch --------------------------------------------------------------------------------------------------------


def opened() -> tuple[World, list[Any]]:
    world = World(2)
    made = engines(world, Mesh.of(dp=2))
    together(world, [lambda r=r: made[r]._open({"a": "dp", "b": "dp"}) for r in range(2)])
    return world, made


def test_what_nccl_meets_later_ends_the_job() -> None:
    _, (engine, _) = opened()
    assert engine.control.watched == [engine] and engine.trouble() == ""
    comm, _ = engine.channel("b")
    comm.error = NcclError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")
    assert engine.trouble() == "NCCL has failed on channel 'b': NCCL_ERROR_SYSTEM_ERROR: unhandled system error"
    comm.error = KeyError(6)  # CuPy has no name for it
    assert "another rank's process has gone" in engine.trouble()
    comm.error = KeyError(7)  # in progress
    assert engine.trouble() == ""
    engine.abort()
    assert {c.state for c, _ in engine._channels.values()} == {"aborted"}
    with pytest.raises(UsageError, match="closed"):
        engine.channel("a")
    engine.close()  # nothing more


class Aborted(Exception):
    pass


def test_the_watch_asks_nccl_and_aborts_it_before_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (engine, _) = opened()
    watch_ = watch.Watch.__new__(watch.Watch)  # made without MPI
    order: list[str] = []

    def leave(code: int) -> None:
        order.append(f"exit {code}")
        raise Aborted

    class Comm:
        def Iprobe(self, *_: Any) -> bool:
            return False

        def isend(self, message: tuple[str, Any], rank: int, tag: int) -> object:
            order.append(f"{message[0]} to {rank}")
            return object()

        def Abort(self, code: int) -> None:
            order.append(f"{engine.channel_states()} Abort {code}")

    watch_.rank, watch_._ended, watch_._engines = 1, threading.Lock(), {"1": engine}
    watch_._waits, watch_.left, watch_.comm, watch_.size = [], {}, Comm(), 2
    watch_._ending, watch_.announce, watch_._peers, watch_._sent = False, -1, {}, []
    watch_._mpi = SimpleNamespace(Status=object, ANY_SOURCE=-1)
    engine.channel_states = lambda: {c.state for c, _ in engine._channels.values()}
    monkeypatch.setattr(watch.os, "_exit", leave)
    written: list[str] = []
    monkeypatch.setattr(watch, "_write", written.append)
    watch_._look()
    assert not order
    engine.channel("a")[0].error = KeyError(6)
    with pytest.raises(Aborted):
        watch_._look()
    assert order == ["end to 0", "{'aborted'} Abort 1", "exit 1"]
    assert written == ["recompute: rank 1: NCCL has failed on channel 'a': another rank's process has gone, or the "
                       "network has failed; all ranks end\n"]  # fmt: skip


def test_communicators_are_given_back() -> None:
    world, made = opened()
    assert all(len(members) == 2 for members in world.made.values())
    for engine in made:
        comms = [c for c, _ in engine._channels.values()]
        engine.close()
        assert {c.state for c in comms} == {"destroyed"}


def test_the_watch_sees_the_step_that_the_device_is_at() -> None:
    world, (engine, _) = opened()
    stream = engine.device.stream
    with engine.launching("'p'"):
        (at,) = engine.current()
        assert str(at) == "step 1 on the device ('p')" and at.index == 0 and at.since
    blocker = Group([Call(SimpleNamespace(id=9, rank=0, ranks=2), "allGather", (0, 0, 0, 1, 0))])
    assert engine.current() == []  # done
    stream.add(blocker)
    with engine.launching("'p'"):
        pass
    assert [s.index for s in engine.current()] == [1]  # what others are waited for
    assert engine.begun() == {("steps", -1): 2} and engine.members(None) == {1: ("steps", -1)}
    stream.tasks.clear()
    stream.run = stream.put
    assert engine.current() == []
    assert world.failed is None


def test_the_fake_is_like_cupys_module() -> None:
    """Names, numbers of element types, and the parameters of every call; an identifier can be had without a device."""
    nccl = pytest.importorskip("cupy.cuda.nccl")
    if not getattr(nccl, "available", False):
        pytest.skip("CuPy finds no NCCL")
    assert load_nccl() is nccl
    assert {callable(getattr(nccl, n)) for n in ("get_unique_id", "groupStart", "groupEnd", "NcclError")} == {True}
    names = ("allReduce", "reduce", "reduceScatter", "allGather", "broadcast", "send", "recv", "rank_id", "abort",
             "check_async_error", "destroy")  # fmt: skip
    for name in names:
        text = getattr(nccl.NcclCommunicator, name).__doc__ or f"{name}(self)"
        count = len(inspect.signature(getattr(FakeCommunicator, name)).parameters)
        assert text.partition(")")[0].count(",") + 1 == count, text
    kinds = {"i8": "INT8", "u8": "UINT8", "i32": "INT32", "u32": "UINT32", "i64": "INT64", "u64": "UINT64",
             "f16": "FLOAT16", "f32": "FLOAT32", "f64": "FLOAT64", "bf16": "BFLOAT16"}  # fmt: skip
    assert {k: getattr(nccl, f"NCCL_{n}") for k, n in kinds.items()} == TYPES
    assert (nccl.NCCL_UINT8, nccl.NCCL_SUM) == (BYTES, SUM)
    ident = nccl.get_unique_id()
    assert isinstance(ident, bytes) and len(ident) == 128
