"""A CUDA device through CuPy: memory, compiled kernels, streams, graphs, cuBLAS.

Of CuPy only the thin parts are used: its driver, runtime, NVRTC and cuBLAS bindings.  Arrays are addresses in one
allocation, and a launch's arguments are prepared once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import importlib.util
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ....errors import JobError, MissingExtraError, OutOfMemoryError, UsageError
from . import cublas, nvrtc
from .cublas import WORKSPACE, Cublas
from .emulator import on_host
from .kernel import STATUS, Await, Buffer, Call, Copy, Fill, Kernel, Launch, Library, OnHost, Product, Transfer, quietly

#: pinned memory that stays for the next arrays of their sizes, at most
_STAGED = 4 << 30
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3


def unavailable(device: int = 0) -> str:
    """Why that device cannot be used; "" where it can.  Nothing is started on the device."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'onnx-recompute[cuda12]' (CUDA 12) or '[cuda13]' (CUDA 13)"
    try:
        import cupy
        from cupy_backends.cuda.api import runtime
    except ImportError as e:
        return f"CuPy cannot be imported: {e}"
    try:
        devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as e:
        return f"CuPy {cupy.__version__} finds no CUDA device: {e}"
    return f"there is no CUDA device {device}: {devices} found" if device >= devices else ""


def count() -> int:
    """How many devices there are.  Where there are none, see `unavailable`."""
    from cupy_backends.cuda.api import runtime

    return int(runtime.getDeviceCount())


def described(device: int) -> tuple[str, int]:
    """Name and bytes of memory of a device; ("", 0) where it is not there."""
    if unavailable(device):
        return "", 0
    from cupy_backends.cuda.api import runtime

    properties = runtime.getDeviceProperties(device)
    return properties["name"].decode(), int(properties["totalGlobalMem"])


class CupyDevice:
    """CUDA device number `number`.  MissingExtraError where CuPy or the device is missing."""

    graphs = True

    def __init__(self, number: int = 0) -> None:
        if why := unavailable(number):
            raise MissingExtraError(f"CUDAPlace({number}): {why}; rc.CPUPlace() runs the same programs on the CPU")
        import cupy
        from cupy_backends.cuda.api import driver, runtime

        self.cupy, self.driver, self.runtime = cupy, driver, runtime
        self.number = number
        self.device = cupy.cuda.Device(number)
        self.device.use()
        cublas.library()
        self.target = nvrtc.target(int(self.device.compute_capability))
        properties = runtime.getDeviceProperties(number)
        self.name = properties["name"].decode()
        self.processors: int = properties["multiProcessorCount"]
        self.stream = cupy.cuda.Stream(non_blocking=True)
        #: kind of copy → its stream; address of a copy's target → the event behind it, until it is awaited
        self._copies: dict[int, Any] = {}
        self._transfers: dict[int, Any] = {}
        self._staging: dict[int, list[Any]] = {}
        address, self._memory = self.allocate(STATUS.nbytes)
        self.status = Buffer(address, STATUS.type)
        self.upload(self.status, np.zeros(self.status.shape, np.int64))
        self._functions: dict[str, Any] = {}
        self._cublas: Any = None

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """The address of fresh memory, and what keeps it.  OutOfMemoryError where the device has not so much."""
        self.device.use()  # the current device is a thread's
        try:
            memory = self._malloc(max(nbytes, 1))
        except self.runtime.CUDARuntimeError as e:
            free, total = self.runtime.memGetInfo()
            raise OutOfMemoryError(
                f"{self.name} cannot allocate {nbytes:,} bytes: {free:,} of {total:,} are free ({e}); a smaller batch "
                "takes less, so do checkpoints; --memory-budget, or rc.max_batch, says what fits"
            ) from None
        return memory.ptr, memory

    def _malloc(self, nbytes: int) -> Any:
        """A cudaMalloc of its own: no pool rounds it up."""
        try:
            return self.cupy.cuda.Memory(nbytes)
        except self.runtime.CUDARuntimeError:
            gc.collect()  # sessions that nobody has any more
            self.cupy.get_default_memory_pool().free_all_blocks()
            return self.cupy.cuda.Memory(nbytes)

    def allocate_host(self, nbytes: int) -> tuple[int, Any]:
        """The address of fresh pinned memory, and what keeps it; nothing for 0.  OutOfMemoryError."""
        if not nbytes:
            return 0, None
        try:
            memory = self.cupy.cuda.PinnedMemory(nbytes)
        except (self.runtime.CUDARuntimeError, MemoryError) as e:
            raise OutOfMemoryError(f"the host cannot pin {nbytes:,} bytes for offloaded values: {e}") from None
        return memory.ptr, memory

    def upload(self, target: Buffer, array: np.ndarray, *, staged: bool = False) -> None:
        """An array's contents into the device's memory, in order with what was launched; the caller's array may change
        at once.  `staged`: through pinned memory that is kept for the next array of this size, without waiting."""
        array = np.ascontiguousarray(array)
        if not array.nbytes:
            return
        if not staged:
            with self._failures():
                self.runtime.memcpyAsync(target.address, array.ctypes.data, array.nbytes, _TO_DEVICE, self.stream.ptr)
                self.stream.synchronize()
            return
        pinned, event = self._pinned(array.nbytes)
        ctypes.memmove(pinned.ptr, array.ctypes.data, array.nbytes)
        self.runtime.memcpyAsync(target.address, pinned.ptr, array.nbytes, _TO_DEVICE, self.stream.ptr)
        event.record(self.stream)

    def _pinned(self, nbytes: int) -> tuple[Any, Any]:
        """Pinned memory that no copy is reading, and the event to record behind the next copy: two of each size."""
        if nbytes not in self._staging and sum(n * len(p) for n, p in self._staging.items()) + 2 * nbytes > _STAGED:
            self.synchronize()
            self._staging.clear()
        pair = self._staging.setdefault(nbytes, [])
        if len(pair) < 2:  # a pool would round up to a power of two
            pair.append((self.cupy.cuda.PinnedMemory(nbytes), self.cupy.cuda.Event(disable_timing=True)))
        else:
            pair.reverse()
            pair[-1][1].synchronize()
        return pair[-1]

    def download(self, source: Buffer) -> np.ndarray:
        """A copy on the host, when all that was launched before is done."""
        array = np.empty(source.shape, source.type.numpy)
        with self._failures():
            if source.nbytes:
                self.runtime.memcpyAsync(array.ctypes.data, source.address, source.nbytes, _TO_HOST, self.stream.ptr)
            self.stream.synchronize()
        return array

    def synchronize(self) -> None:
        """Waits for all that was launched.  JobError where a kernel failed."""
        with self._failures():
            self.stream.synchronize()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Raises kernel errors, which surface at synchronisation, as JobError."""
        try:
            yield
        except self.runtime.CUDARuntimeError as e:
            raise JobError(f"{self.name}: {e}; this process can no longer use the device") from None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """This thread launches on the device's stream."""
        self.device.use()
        with self.stream:
            yield

    # -- kernels --------------------------------------------------------------------------------------------------

    def compile(self, kernels: Iterable[Kernel], progress: Callable[[int, int], None] = quietly) -> None:
        """Compiles what was not compiled before, several at a time; a cache on disk knows the rest."""
        missing = list({k.digest: k for k in kernels if k.digest not in self._functions}.values())
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for i, (digest, binary) in enumerate(pool.map(self._compiled, missing)):
                self._functions[digest] = binary
                progress(i + 1, len(missing))

    def _compiled(self, k: Kernel) -> tuple[str, Any]:
        self.device.use()  # the current device is a thread's
        module = self.cupy.cuda.Module()
        module.load(nvrtc.compiled(k, self.target))
        return k.digest, module.get_function(k.name)  # which keeps the module

    def prepare(self, call: Call) -> Callable[[], None]:
        """A function that runs a call on the device's stream, any number of times."""
        r, stream = self.runtime, self.stream.ptr
        if isinstance(call, Launch):
            return self._launch(call)
        if isinstance(call, Product):
            return self.cublas().prepare(call)
        if isinstance(call, Copy):
            target, source, n = call.target.address, call.source.address, call.source.nbytes
            return lambda: r.memcpyAsync(target, source, n, _ON_DEVICE, stream) if n else None
        if isinstance(call, (Transfer, Await)):
            return self._transfer(call)
        if isinstance(call, Fill):
            target, n, byte = call.target.address, call.target.nbytes, call.byte
            return lambda: r.memsetAsync(target, byte, n, stream) if n else None
        if isinstance(call, OnHost):
            return functools.partial(on_host, self, call)
        assert isinstance(call, Library)
        return functools.partial(call.run, stream)

    def _transfer(self, call: Transfer | Await) -> Callable[[], None]:
        """Events between the step's stream and the copies': a copy begins behind what was launched before it."""
        event = functools.partial(self.cupy.cuda.Event, disable_timing=True)
        if isinstance(call, Await):
            return functools.partial(self.stream.wait_event, self._transfers.pop(call.target.address))
        kind = _TO_HOST if call.target.type.host else _TO_DEVICE
        if kind not in self._copies:
            self._copies[kind] = self.cupy.cuda.Stream(non_blocking=True)
        copies = self._copies[kind]
        begun, done = event(), event()
        self._transfers[call.target.address] = done
        words = (call.target.address, call.source.address, call.source.nbytes, kind, copies.ptr)

        def run() -> None:
            begun.record(self.stream)
            copies.wait_event(begun)
            self.runtime.memcpyAsync(*words)
            done.record(copies)

        return run

    def _launch(self, call: Launch) -> Callable[[], None]:
        self.compile([call.kernel])
        runs = [self._launched(c) for c in call.within(self.processors)]

        def run() -> None:
            for one in runs:
                one()

        return run

    def _launched(self, call: Launch) -> Callable[[], None]:
        function = self._functions[call.kernel.digest]
        array, held = call.parameters(self.status)
        words = [function.ptr, *call.grid, *call.block, 0, self.stream.ptr, ctypes.addressof(array)]
        launch = self.driver.launchKernel
        if call.kernel.resident and math.prod(call.grid) <= self.processors:  # all blocks at a time, or an error
            launch = self.driver.launchCooperativeKernel
        else:
            words.append(0)

        def run() -> None:
            launch(*words)

        run.held = (array, held, function)  # type: ignore[attr-defined]
        return run if all(call.grid) else lambda: None

    @property
    def library_bytes(self) -> dict[str, int]:
        """Bytes that libraries hold on the device for all programs, by library."""
        return {"cublas": WORKSPACE} if self._cublas is not None else {}

    # -- cuBLAS ---------------------------------------------------------------------------------------------------

    def cublas(self) -> Cublas:
        """cuBLAS on the stream, with a workspace of its own: its own choice would allocate within a captured graph."""
        if self._cublas is None:
            memory = self.cupy.cuda.Memory(WORKSPACE)
            self._cublas = Cublas(self.stream.ptr, memory.ptr), memory
        return self._cublas[0]

    # -- other ranks ----------------------------------------------------------------------------------------------

    def use(self) -> None:
        """This thread calls the device from here on."""
        self.device.use()

    def new_stream(self) -> Any:
        """A stream beside the step's."""
        return self.cupy.cuda.Stream(non_blocking=True)

    def mark(self) -> Any:
        """An event that orders streams, not recorded yet."""
        return self.cupy.cuda.Event(disable_timing=True)

    def clear(self, target: Buffer, stream: Any) -> None:
        """Zeros, on a stream."""
        if target.nbytes:
            self.runtime.memsetAsync(target.address, 0, target.nbytes, stream.ptr)

    def free_bytes(self) -> int:
        """Free bytes on the device at the moment."""
        return int(self.runtime.memGetInfo()[0])

    def process_bytes(self) -> int:
        """This process's memory on the device in bytes, from nvidia-smi; all processes' where it does not list it."""
        if (tool := shutil.which("nvidia-smi")) is not None:
            query = [tool, f"--id={self.runtime.deviceGetPCIBusId(self.number)}",
                     "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]  # fmt: skip
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
                for line in done.stdout.splitlines():
                    pid, _, used = (word.strip() for word in line.partition(","))
                    if pid == str(os.getpid()) and used.isdecimal():
                        return int(used) << 20
        free, total = self.runtime.memGetInfo()
        return int(total - free)

    @property
    def identity(self) -> str:
        """Names the device itself, whatever its number is in this process."""
        uuid = self.runtime.getDeviceProperties(self.number).get("uuid", "")
        return f"{self.runtime.deviceGetPCIBusId(self.number)} {uuid!r}"

    # -- graphs and time ------------------------------------------------------------------------------------------

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """The launches of `run` as one CUDA graph; calling it replays the graph."""
        with self.current():
            self.stream.begin_capture()
            try:
                run()
            except BaseException:
                with contextlib.suppress(self.runtime.CUDARuntimeError):  # the capture is invalid: say why, not that
                    self.stream.end_capture()
                raise
            graph = self.stream.end_capture()
        return functools.partial(graph.launch, self.stream)

    def event(self) -> Any:
        """A point in the stream, recorded now; `seconds_between` reads two of them."""
        handle = self.cupy.cuda.Event()
        handle.record(self.stream)
        return handle

    def seconds_between(self, start: Any, end: Any) -> float:
        """When both have been reached."""
        end.synchronize()
        return self.cupy.cuda.get_elapsed_time(start, end) * 1e-3


def open_device(number: int) -> CupyDevice:
    """The device, once a process.  Errors: see `CupyDevice`; UsageError for a negative number."""
    if number < 0:
        raise UsageError(f"CUDAPlace({number}): devices are numbered from 0")
    return _opened(number)


@functools.cache
def _opened(number: int) -> CupyDevice:
    return CupyDevice(number)
