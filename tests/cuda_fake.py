"""A strict CUDA below CuPy's own modules, so that `CUDAPlace(0)` runs without a GPU; the emulator runs the kernels.

Work of a stream runs when somebody waits for it, as late as CUDA may; with `early`, streams beside the step's run as
soon as what they wait for is done.  Parameters of a launch are read at the call, with the sizes that NVRTC's machine
code declares; a pinned source is read when its copy runs.  What CUDA forbids is an AssertionError: memory beyond an
allocation, a wait or a copy of pageable memory while a stream is captured, a stream that is not joined when the capture
ends, a block larger than the kernel's bounds, arguments that cuBLAS refuses.  So is what CUDA allows and a step may not
do: an allocation while a stream is captured, and a wait of a captured stream for an event from outside.

Not in it: races between threads of a block, TF32's rounding, time, cuDNN.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import machine_code
import numpy as np
from cuda_fake_libraries import Blas, OneRank

from recompute.runtime.cuda import nccl
from recompute.runtime.cuda.device import cublas, cudnn, device, emulator, kernel, nvrtc
from recompute.runtime.cuda.device.kernel import Buffer, Kernel, Launch

NAME, MEMORY, CAPABILITY, MULTIPROCESSORS = "NVIDIA H100 80GB HBM3 (fake)", 85_520_809_984, 90, 132
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
#: bytes before and behind an allocation that nobody may write, and what is in them; what is in fresh memory
_GUARD, _GUARDED, _FRESH = 256, 0xA5, 0xCD
#: threads of a block, and blocks, along x, y and z
_THREADS, _BLOCKS = (1024, 1024, 64), ((1 << 31) - 1, 65535, 65535)

Task = Callable[[], None]


class Cuda:
    """What the device has done and holds.  `counts`: kernels, products, copies by kind, fills; graphs launched and
    nodes captured; waits of the host, and of streams for events."""

    def __init__(self, early: bool = False) -> None:
        self.early = early
        self.counts: Counter[str] = Counter()
        self.streams: dict[int, Stream] = {}
        self.functions: dict[int, tuple[Kernel, list[int]]] = {}
        #: address of an allocation → its bytes, and whether it is the host's
        self.memory: dict[int, tuple[int, bool]] = {}
        #: machine code → what it was compiled from
        self.compiled: dict[bytes, Kernel] = {}
        #: address of a launch's array of parameters → their sizes as the launch holds them
        self.held: dict[int, list[int]] = {}
        self.numbers = itertools.count(0x7000)

    def capturing(self) -> bool:
        return any(s.capture is not None for s in self.streams.values())

    def free(self) -> int:
        return MEMORY - sum(size for size, pinned in self.memory.values() if not pinned)

    def inside(self, address: int, nbytes: int, *, pinned: bool | None = None) -> bool:
        return any(at <= address and address + nbytes <= at + size
                   for at, (size, host) in list(self.memory.items()) if pinned in (None, host))  # fmt: skip

    def drain(self) -> None:
        """All that was launched is done."""
        for s in list(self.streams.values()):
            s.reach(s.put)

    # -- the runtime's and the driver's functions ---------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert all(isinstance(x, int) for x in (target, source, nbytes, kind, stream))
        on = self.streams[stream]
        pageable = False
        for address, host in ((target, kind == _TO_HOST), (source, kind == _TO_DEVICE)):
            if host and not self.inside(address, nbytes, pinned=True):
                pageable = True
            else:
                assert self.inside(address, nbytes, pinned=host), "a copy beyond an allocation"
        assert not (pageable and on.capture), "a copy of pageable memory is captured"
        held = ctypes.create_string_buffer(ctypes.string_at(source, nbytes), nbytes) if pageable else None
        if held is not None and kind == _TO_DEVICE:  # what the caller changes later is not copied
            source = ctypes.addressof(held)

        def run(held: Any = held) -> None:
            names = {_TO_DEVICE: "copies to device", _TO_HOST: "copies to host", _ON_DEVICE: "copies on device"}
            self.counts[names[kind]] += 1
            ctypes.memmove(target, source, nbytes)

        on.add(run)
        if pageable and kind == _TO_HOST:
            on.reach(on.put)

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        assert self.inside(address, nbytes, pinned=False) and 0 <= byte < 256

        def run() -> None:
            self.counts["fills"] += 1
            ctypes.memset(address, byte, nbytes)

        self.streams[stream].add(run)

    def launch_together(self, function: int, *words: int) -> None:
        """A cooperative launch: all blocks have a multiprocessor, as one of 256 threads and 255 registers wants."""
        blocks = np.prod(words[:3])
        assert self.functions[function][0].resident and blocks <= MULTIPROCESSORS, f"{blocks} blocks at a time"
        self.launch(function, *words, 0, together=True)

    def launch(self, function: int, *words: int, together: bool = False) -> None:
        """Of the driver: grid, block, dynamic shared memory, stream, parameters' addresses, more."""
        assert len(words) == 10 and all(isinstance(w, int) for w in words)
        grid, block, shared, stream, parameters, more = words[:3], words[3:6], *words[6:]
        k, sizes = self.functions[function]
        if k.resident and not together:
            ends = (ctypes.c_void_p * len(sizes)).from_address(parameters)[-2:]
            begin, end = (ctypes.c_int.from_address(at).value for at in ends)
            assert end - begin == 1, f"{k.name}: blocks that may never run at a time wait for each other"
        assert all(0 < n <= most for n, most in zip(block, _THREADS, strict=True)), f"{k.name}: block {block}"
        assert all(0 < n <= most for n, most in zip(grid, _BLOCKS, strict=True)), f"{k.name}: grid {grid}"
        assert np.prod(block) <= k.threads <= 1024 and not shared and not more, k.name
        held = self.held[parameters]
        assert held == sizes, f"{k.name}: parameters of {held} bytes, the machine code's have {sizes}"
        given = (ctypes.c_void_p * len(sizes)).from_address(parameters)
        for kind, at in zip(k.types, given, strict=True):
            address = ctypes.c_uint64.from_address(at).value if kind.endswith("*") else 0
            assert not address or self.inside(address, 1), f"{k.name}: an address of no allocation"
        copies = [ctypes.create_string_buffer(ctypes.string_at(p, n), n) for p, n in zip(given, sizes, strict=True)]
        array = (ctypes.c_void_p * len(copies))(*(ctypes.addressof(c) for c in copies))
        extents = (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block)

        def run(copies: Any = copies) -> None:
            self.counts["kernels"] += 1
            assert not emulator._known(k.digest, emulator.LEVEL)(array, *extents, 0), f"{k.name}: threads wait for ever"

        self.streams[stream].add(run)


# -- memory -----------------------------------------------------------------------------------------------------------


class Memory:
    """An allocation between guard bytes; giving it back waits for the device."""

    pinned = False

    def __init__(self, cuda: Cuda, size: int, flags: int = 0) -> None:
        assert isinstance(size, int) and size > 0 and not cuda.capturing(), "an allocation while a stream is captured"
        if size > (cuda.free() if not self.pinned else MEMORY):
            from cupy_backends.cuda.api import runtime

            raise runtime.CUDARuntimeError(2)
        self.cuda, self.size = cuda, size
        self.raw = np.full(size + 3 * _GUARD, _GUARDED, np.uint8)
        self.ptr = -(-self.raw.ctypes.data // _GUARD) * _GUARD + _GUARD
        at = self.ptr - self.raw.ctypes.data
        self.raw[at : at + size] = _FRESH
        cuda.memory[self.ptr] = size, self.pinned
        cuda.counts["allocations"] += 1

    def whole(self) -> bool:
        """Whether nothing was written beside it."""
        at = self.ptr - self.raw.ctypes.data
        return bool((self.raw[:at] == _GUARDED).all() and (self.raw[at + self.size :] == _GUARDED).all())

    def __del__(self) -> None:
        if hasattr(self, "ptr") and not sys.is_finalizing():
            self.cuda.drain()
            self.cuda.memory.pop(self.ptr, None)
            self.cuda.counts["written beside allocations"] += not self.whole()


class Pinned(Memory):
    pinned = True


# -- streams, events and graphs ---------------------------------------------------------------------------------------


@dataclass
class Capture:
    """Work that is recorded: (stream, "task", "record" or "wait", argument).  `known`: for each stream, the last node
    of every other stream that is sure to run before its next."""

    origin: Stream
    nodes: list[tuple[Stream, str, Any]] = field(default_factory=list)
    known: dict[Stream, dict[Stream, int]] = field(default_factory=dict)
    open: bool = True

    def add(self, stream: Stream, what: str, argument: Any) -> None:
        self.nodes.append((stream, what, argument))
        self.known.setdefault(stream, {})[stream] = len(self.nodes) - 1


class Stream:
    """`put` and `done` count what was added and what has run."""

    def __init__(self, cuda: Cuda, null: bool = False, non_blocking: bool = False) -> None:
        assert non_blocking and not null, "the default stream waits for all others"
        self.cuda, self.ptr = cuda, next(cuda.numbers)
        self.first = not cuda.streams
        self.tasks: deque[Task] = deque()
        self.put = self.done = 0
        self.capture: Capture | None = None
        cuda.streams[self.ptr] = self

    def add(self, task: Task) -> None:
        if self.capture is not None:
            self.capture.add(self, "task", task)
            return
        self.tasks.append(task)
        self.put += 1
        if self.cuda.early and not self.first:
            self.reach(self.put)

    def reach(self, place: int) -> None:
        """Runs what was added up to there."""
        while self.done < place:
            task = self.tasks.popleft()
            task()
            self.done += 1

    def synchronize(self) -> None:
        assert self.capture is None, "the host waits for a stream that is captured"
        self.cuda.counts["waits of the host"] += 1
        self.reach(self.put)

    def wait_event(self, event: Event) -> None:
        if event.captured is not None and event.captured[0].open:
            capture, known, node = event.captured
            assert self.capture in (None, capture), "a wait for an event of another capture"
            self.capture = capture
            capture.add(self, "wait", node)
            own = capture.known[self]
            for stream, place in known.items():
                own[stream] = max(place, own.get(stream, -1))
            return
        assert event.captured is None, "a wait for an event that was recorded in a capture that has ended"
        assert self.capture is None, "a capture waits for an event from outside of it"
        self.cuda.counts["waits of streams"] += 1
        if event.at is not None:
            source, place = event.at
            self.add(lambda: source.reach(place))

    def begin_capture(self, mode: Any = None) -> None:
        assert not self.cuda.capturing()
        self.capture = Capture(self)

    def end_capture(self) -> Graph:
        capture = self.capture
        assert capture is not None and capture.origin is self
        capture.open = False
        own = capture.known.get(self, {})
        for stream, known in capture.known.items():
            stream.capture = None
            assert own.get(stream, -1) >= known[stream], "work of a captured stream is not joined"
        self.capture = None
        self.cuda.counts["nodes captured"] += sum(what == "task" for _, what, _ in capture.nodes)
        return Graph(self.cuda, capture)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """`at`: the stream and the place it was recorded at; `captured`: the capture, `Capture.known` of the stream then,
    and the event's node."""

    def __init__(self, cuda: Cuda, block: bool = False, disable_timing: bool = False) -> None:
        self.cuda, self.timing = cuda, not disable_timing
        self.at: tuple[Stream, int] | None = None
        self.captured: tuple[Capture, dict[Stream, int], int] | None = None

    def record(self, stream: Stream) -> None:
        if stream.capture is None:
            self.at, self.captured = (stream, stream.put), None
            return
        capture = stream.capture
        capture.add(stream, "record", None)
        self.captured = capture, dict(capture.known[stream]), len(capture.nodes) - 1

    def synchronize(self) -> None:
        assert self.captured is None or not self.captured[0].open, "the host waits for an event that is captured"
        self.cuda.counts["waits of the host"] += 1
        if self.at is not None:
            self.at[0].reach(self.at[1])


def elapsed(start: Event, end: Event) -> float:
    """Milliseconds: there is no time here."""
    for event in (start, end):
        assert event.timing and event.at is not None and event.at[0].done >= event.at[1], "an event without a time"
    return 1.0


class Graph:
    """Runs as one task of the stream that launches it."""

    def __init__(self, cuda: Cuda, capture: Capture) -> None:
        self.cuda, self.capture = cuda, capture

    def launch(self, stream: Stream) -> None:
        self.cuda.counts["graphs"] += 1
        stream.add(self._run)

    def _run(self) -> None:
        """Each captured stream's nodes in order; those beside the first as late, or as early, as they may."""
        nodes, origin = self.capture.nodes, self.capture.origin
        left: dict[Stream, deque[int]] = {}
        for i, (stream, _, _) in enumerate(nodes):
            left.setdefault(stream, deque()).append(i)
        done: set[int] = set()

        def step(stream: Stream) -> None:
            i = left[stream].popleft()
            _, what, argument = nodes[i]
            while what == "wait" and argument not in done:
                step(nodes[argument][0])
            if what == "task":
                argument()
            done.add(i)

        def ready(stream: Stream) -> bool:
            if not left[stream]:
                return False
            _, what, argument = nodes[left[stream][0]]
            return what != "wait" or argument in done

        while left.get(origin):
            step(origin)
            beside = [s for s in left if s is not origin] if self.cuda.early else []
            while any(ready(s) and (step(s) or True) for s in beside):
                pass
        assert not any(left.values())


# -- modules ----------------------------------------------------------------------------------------------------------


class Module:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def load(self, code: bytes) -> None:
        assert isinstance(code, bytes) and code[:4] == b"\x7fELF"
        self.kernel, self.entries = self.cuda.compiled[code], machine_code.entries(code)

    def get_function(self, name: str) -> Any:
        number = next(self.cuda.numbers)
        self.cuda.functions[number] = self.kernel, self.entries[name].sizes
        return SimpleNamespace(ptr=number, module=self)


# -- below CuPy -------------------------------------------------------------------------------------------------------


def install(put: Callable[[Any, str, Any], None] = setattr, *, early: bool = False) -> Cuda:
    """Puts the fake below CuPy's modules, by `put` (pytest's `monkeypatch.setattr` takes it away again)."""
    import cupy
    from cupy_backends.cuda.api import driver, runtime

    fake = Cuda(early)
    blas = Blas(fake).functions()
    properties = {
        "name": NAME.encode(),
        "totalGlobalMem": MEMORY,
        "multiProcessorCount": MULTIPROCESSORS,
        "uuid": b"fake",
    }
    for name, what in {
        "getDeviceCount": lambda: 1, "getDevice": lambda: 0, "getDeviceProperties": lambda number: properties,
        "memGetInfo": lambda: (fake.free(), MEMORY), "memcpyAsync": fake.copy, "memsetAsync": fake.fill,
        "deviceGetPCIBusId": lambda number: "0000:00:00.0", "driverGetVersion": lambda: 13000,
    }.items():  # fmt: skip
        put(runtime, name, what)
    put(driver, "launchKernel", fake.launch)
    put(driver, "launchCooperativeKernel", fake.launch_together)
    for name, what in {
        "Device": lambda number=0: SimpleNamespace(id=number, compute_capability=str(CAPABILITY), use=lambda: None),
        "Memory": lambda size: Memory(fake, size), "PinnedMemory": lambda *words: Pinned(fake, *words),
        "Stream": lambda **how: Stream(fake, **how), "Event": lambda **how: Event(fake, **how),
        "Module": lambda: Module(fake), "get_elapsed_time": elapsed,
    }.items():  # fmt: skip
        put(cupy.cuda, name, what)
    pool = SimpleNamespace(free_all_blocks=lambda: None, total_bytes=lambda: 0)
    put(cupy, "get_default_memory_pool", lambda: pool)
    put(cublas, "library", lambda: blas)
    put(cudnn, "unavailable", lambda: "the fake device has no cuDNN")
    one = SimpleNamespace(get_version=lambda: 22800, get_unique_id=lambda: b"\0" * 128, groupStart=lambda: None,
                          groupEnd=lambda: None, NcclCommunicator=lambda *words: OneRank(fake, *words))  # fmt: skip
    put(nccl, "load_nccl", lambda: one)
    compiled, compile_all, parameters = nvrtc.compiled, device.CupyDevice.compile, Launch.parameters

    def noted(k: Kernel, target: str) -> bytes:
        code = compiled(k, target)
        fake.compiled[code] = k
        if path := os.environ.get("LAUNCHED_KERNELS"):  # see benchmarks/gpu/staged
            with open(path, "a") as f:
                f.write(f"{k.digest}\n")
        return code

    def together(self: Any, kernels: Iterable[Kernel], progress: Any = kernel.quietly) -> None:
        kernels = list(kernels)
        emulator.EmulatedDevice().compile(kernels)
        compile_all(self, kernels, progress)

    def sized(self: Launch, status: Buffer) -> tuple[Any, Any]:
        array, held = parameters(self, status)
        fake.held[ctypes.addressof(array)] = [ctypes.sizeof(h) for h in held]
        return array, held

    put(nvrtc, "compiled", noted)
    put(device.CupyDevice, "compile", together)
    put(Launch, "parameters", sized)
    return fake


def missing() -> str:
    """Why the fake cannot be installed; "" where it can."""
    try:
        import cupy  # noqa: F401

        nvrtc.library()
    except Exception as e:  # whatever a missing library does
        return f"the fake CUDA device needs CuPy and NVRTC (extra 'dev', on Linux): {e}"
    return "" if emulator.compiler() else "the fake CUDA device needs a C++ compiler (or $CXX)"
