"""The emulated device: CUDA kernels run on the CPU, thread by thread, in ordinary memory.

For tests, and for authors of kernels without a GPU: the same text that NVRTC compiles is compiled by a C++ compiler
(`$CXX`, g++ or clang++) with emulator.h in place of CUDA.  Right, and slow.  `backwards`: the last thread and the last
block first; numbers that change with it have a race.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import JobError, MissingExtraError, OutOfMemoryError
from ....language.types import TensorType, need
from ....support.cache import is_own, make_private
from ....support.files import cache_folder
from .kernel import (
    STATUS,
    Await,
    Buffer,
    Call,
    Copy,
    Fill,
    Kernel,
    Launch,
    Library,
    OnHost,
    Product,
    Transfer,
    prelude,
    quietly,
)

_FLAGS = ("-x", "c++", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-w",
          "-U_FORTIFY_SOURCE")  # fmt: skip
#: how much the compiler optimises: "-O0" compiles twice as fast what runs once
LEVEL = "-O1"
#: kernels that one call of the compiler is given
_TOGETHER = 24


@functools.cache
def compiler() -> str:
    """The C++ compiler; "" where there is none."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((path for n in names if n and (path := shutil.which(n))), "")


#: held while kernels run
_RUNNING = threading.RLock()


class EmulatedDevice:
    """This processor as a device; see the module's text.  MissingExtraError where there is no C++ compiler."""

    name = "emulated"
    #: nothing is captured here: every step is launched again
    graphs = False
    #: blocks of a resident kernel that run at the same time
    processors = 8

    def __init__(self, *, backwards: bool = False, level: str = LEVEL) -> None:
        if not compiler():
            raise MissingExtraError("the emulated CUDA device needs a C++ compiler: set CXX, or install g++")
        self.backwards, self.level = backwards, level
        self._transfers: dict[int, Callable[[], None]] = {}
        address, self._memory = self.allocate(STATUS.nbytes)
        self.status = Buffer(address, STATUS.type)

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """The address of fresh memory, and what keeps it."""
        try:
            raw = np.zeros(nbytes + 256, np.uint8)
        except (MemoryError, ValueError):
            raise OutOfMemoryError(f"the emulated device cannot allocate {nbytes:,} bytes") from None
        return -(-raw.ctypes.data // 256) * 256, raw

    def allocate_host(self, nbytes: int) -> tuple[int, Any]:
        """Memory of the host, as all memory of this device is."""
        return self.allocate(nbytes)

    def upload(self, target: Buffer, array: np.ndarray, *, staged: bool = False) -> None:
        """An array's contents into the device's memory."""
        view(target)[...] = array

    def download(self, source: Buffer) -> np.ndarray:
        """A copy on the host."""
        return view(source).copy()

    def synchronize(self) -> None:
        """Everything is done already."""

    @property
    def library_bytes(self) -> dict[str, int]:
        """No library runs here."""
        return {}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """One thread of this process at a time: the emulated threads' numbers and shared memory are static."""
        with _RUNNING:
            yield

    # -- kernels --------------------------------------------------------------------------------------------------

    def compile(self, kernels: Iterable[Kernel], progress: Callable[[int, int], None] = quietly) -> None:
        """Compiles what was not compiled before."""
        missing = list({k.digest: k for k in kernels if _known(k.digest, self.level) is None}.values())
        for i in range(0, len(missing), _TOGETHER):
            _compile(missing[i : i + _TOGETHER], self.level)
            progress(min(i + _TOGETHER, len(missing)), len(missing))

    def prepare(self, call: Call) -> Callable[[], None]:
        """A function that runs a call, any number of times."""
        if isinstance(call, Launch):
            return self._launch(call)
        if isinstance(call, Product):
            return functools.partial(_product, call)
        if isinstance(call, Copy):
            target, source = (_bytes(b) for b in (call.target, call.source))
            return lambda: np.copyto(target, source)
        if isinstance(call, (Transfer, Await)):
            return self._transfer(call)
        if isinstance(call, Fill):
            whole = _bytes(call.target)
            return lambda: whole.fill(call.byte)
        if isinstance(call, OnHost):
            return functools.partial(on_host, self, call)
        assert isinstance(call, Library)
        raise JobError(f"{call.name} runs on a GPU only")

    def _transfer(self, call: Transfer | Await) -> Callable[[], None]:
        """A transfer runs at once; `backwards`, as late as it may: when it is awaited."""
        if isinstance(call, Await):
            late = self._transfers.pop(call.target.address)
            return late if self.backwards else lambda: None
        run = functools.partial(np.copyto, _bytes(call.target), _bytes(call.source))
        self._transfers[call.target.address] = run
        return (lambda: None) if self.backwards else run

    def _launch(self, call: Launch) -> Callable[[], None]:
        self.compile([call.kernel])
        kernel = need(_known(call.kernel.digest, self.level))
        where = f"{call.kernel.name}, grid {call.grid}, block {call.block}"
        assert 0 < call.block[0] * call.block[1] * call.block[2] <= call.kernel.threads, where
        assert max(call.grid[1:]) <= 65535 and call.grid[0] < 1 << 31, where
        launches = [(c, *c.parameters(self.status)) for c in call.within(self.processors)]
        block = (ctypes.c_uint * 3)(*call.block)

        def run() -> None:
            for c, array, _ in launches if all(call.grid) else ():
                if kernel(array, (ctypes.c_uint * 3)(*c.grid), block, int(self.backwards)):
                    raise JobError(f"threads wait for others that never come, in {where}")

        return run


# -- memory as arrays -------------------------------------------------------------------------------------------------


def view(b: Buffer) -> np.ndarray:
    """A buffer of the emulated device as an array."""
    return _bytes(b).view(b.type.numpy).reshape(b.shape)


def _bytes(b: Buffer) -> np.ndarray:
    if not b.nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * b.nbytes).from_address(b.address), np.uint8)


def on_host(device: Any, call: OnHost) -> None:
    """Runs an operator's own numerics on copies; updated inputs are copied back as outputs."""
    ins = [None if b is None else device.download(b) for b in call.ins]
    outs = [None if b is None else np.empty(b.shape, b.type.numpy) for b in call.outs]
    for o, i in enumerate(call.op.updates[: len(outs)]):
        outs[o] = ins[i]
    with np.errstate(all="ignore"):
        call.op.compute(ins, outs, [np.empty(t.shape, t.numpy) for t in call.scratch])
    for b, a in zip(call.outs, outs, strict=True):
        if b is not None:
            device.upload(b, a)


def _product(p: Product) -> None:
    wide: Any = np.float64 if p.a.dtype == "f64" else np.float32

    def matrices(b: Buffer, rows: int, columns: int, lead: int, stride: int) -> np.ndarray:
        item = b.type.numpy.itemsize
        span = max((p.batch - 1) * stride + (rows - 1) * lead + columns, 0) if rows and columns else 0
        assert span <= b.size, f"a product reads {span} elements of {b.type}"
        flat = view(Buffer(b.address, TensorType(b.dtype, (span,))))
        return np.lib.stride_tricks.as_strided(flat, (p.batch, rows, columns), (stride * item, lead * item, item))

    if not p.m or not p.n or not p.batch:
        return
    c = matrices(p.c, p.m, p.n, p.ldc, p.strides[2])
    total = np.zeros(c.shape, wide)
    if p.k:
        a = matrices(p.a, *((p.k, p.m) if p.ta else (p.m, p.k)), p.lda, p.strides[0]).astype(wide)
        b = matrices(p.b, *((p.n, p.k) if p.tb else (p.k, p.n)), p.ldb, p.strides[1]).astype(wide)
        total = wide(p.alpha) * np.matmul(a.swapaxes(1, 2) if p.ta else a, b.swapaxes(1, 2) if p.tb else b)
    if p.beta:
        total = total + wide(p.beta) * c.astype(wide)
    c[...] = total.astype(c.dtype)


# -- compiled kernels -------------------------------------------------------------------------------------------------

_FUNCTIONS: dict[tuple[str, str], Any] = {}


@functools.cache
def _folder(level: str) -> Path:
    folder = cache_folder()
    text = prelude() + (Path(__file__).parent / "emulator.h").read_text()
    key = hashlib.sha256(" ".join((text, compiler(), level, *_FLAGS)).encode()).hexdigest()[:12]
    path = None if folder is None else folder / f"emulated-{key}"
    if path is not None and is_own(path):  # libraries are loaded from there
        with contextlib.suppress(OSError):
            make_private(path)
            return path
    temporary = Path(tempfile.mkdtemp(prefix="recompute-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def _known(digest: str, level: str) -> Any:
    """The compiled kernel; None where it is not compiled yet."""
    if (digest, level) not in _FUNCTIONS:
        link = _folder(level) / f"{digest}.so"
        if not link.exists():
            return None
        function = getattr(ctypes.CDLL(str(link.resolve())), f"run_{digest}")
        function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int]
        _FUNCTIONS[digest, level] = function
    return _FUNCTIONS[digest, level]


def _compile(kernels: Sequence[Kernel], level: str) -> None:
    """One library of several kernels, and a link to it for each."""
    text = "".join(_translated(k) for k in kernels)
    text = (Path(__file__).parent / "emulator.h").read_text() + prelude() + text
    folder = _folder(level)
    target = folder / f"lib-{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "made.so"
        command = [compiler(), *level.split(), *_FLAGS, "-o", str(path), "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            names = ", ".join(k.name for k in kernels)
            raise JobError(f"the emulator's compiler does not take {names}:\n{done.stderr[:3000]}")
        path.replace(target)
        for k in kernels:
            link = Path(scratch) / k.digest
            link.symlink_to(target.name)
            link.replace(folder / f"{k.digest}.so")


def _translated(k: Kernel) -> str:
    """A kernel in a namespace of its own, and a function that launches it."""
    values = ", ".join(f"*({t}*)a[{i}]" for i, t in enumerate(k.types))
    return (
        f"\nnamespace k_{k.digest} {{\n{k.text}\nstatic void call(void** a) {{ {k.name}({values}); }}\n}}\n"
        f'extern "C" int run_{k.digest}(void** a, const unsigned* grid, const unsigned* block, int backwards)\n'
        f"{{ return emulator::run(k_{k.digest}::call, a, grid, block, {int(k.meets) + k.resident}, backwards); }}\n"
    )
