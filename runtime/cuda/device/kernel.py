"""Kernels as CUDA C source, and their launches.

The same text is compiled by NVRTC for a GPU and, in tests, by a C++ compiler for the processor (see emulator.py): it
uses what prelude.h has, static shared memory, and no header of the toolkit.  Products are `fmaf`'s business: nothing
is contracted by the compiler, so that an element has the same bits in every kernel.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....language.types import TensorType, Typed, dtype_name
from ...shared import trouble

#: element type → its name in CUDA C; 16-bit floats and small floats are structures of their bits
C_TYPES: dict[str, str] = {
    "f16": "f16", "bf16": "bf16", "f32": "float", "f64": "double", "bool": "bool",
    "i8": "signed char", "i16": "short", "i32": "int", "i64": "long long",
    "u8": "unsigned char", "u16": "unsigned short", "u32": "unsigned", "u64": "unsigned long long",
}  # fmt: skip
#: element type → what is computed with it: 16-bit floats in float
COMPUTE: dict[str, str] = {**C_TYPES, "f16": "float", "bf16": "float"}

_SCALARS: dict[str, Any] = {
    "int": ctypes.c_int, "unsigned": ctypes.c_uint, "long long": ctypes.c_longlong,
    "unsigned long long": ctypes.c_ulonglong, "float": ctypes.c_float, "double": ctypes.c_double,
    "bool": ctypes.c_bool,
}  # fmt: skip


def quietly(done: int, count: int) -> None:
    """No progress is shown."""


@functools.cache
def prelude() -> str:
    """The source text that every kernel may use."""
    return (Path(__file__).parent / "prelude.h").read_text()


@dataclass(frozen=True)
class Kernel:
    """A kernel's text.

    `parameters`: as C declares them, "const float* x, float* y, long long n".  `before`: device functions and
    structures that it uses.  `threads`: of a block, at most.  `beside`: blocks that a multiprocessor is to have at a
    time, which bounds the registers (0: as the compiler likes).  `resident`: see `Launch.within`.
    """

    name: str
    parameters: str
    body: str
    before: str = ""
    threads: int = 256
    beside: int = 0
    resident: bool = False

    @functools.cached_property
    def types(self) -> tuple[str, ...]:
        """The C types of the parameters."""
        parts = [p.strip().removeprefix("const ") for p in self.parameters.split(",")]
        return tuple(p[: max(p.rfind(" "), p.rfind("*") + 1)].strip() for p in parts)

    @property
    def text(self) -> str:
        """The kernel and what stands before it."""
        bounds = f"{self.threads}, {self.beside}" if self.beside else f"{self.threads}"
        head = f"__global__ void __launch_bounds__({bounds}) {self.name}({self.parameters})"
        return f"{self.before.strip()}\n\n{head}\n{{\n{self.body.rstrip()}\n}}\n".lstrip()

    @functools.cached_property
    def digest(self) -> str:
        """Names the text and the prelude."""
        return hashlib.sha256((prelude() + self.text).encode()).hexdigest()[:24]

    @property
    def source(self) -> str:
        """All that NVRTC is given."""
        return f"{prelude()}\n" + self.text.replace("__global__", 'extern "C" __global__', 1)

    @property
    def meets(self) -> bool:
        """Whether its threads wait for each other."""
        return any(w in self.text for w in ("__sync", "__shfl", "warp_", "block_"))

    @functools.cached_property
    def guarded(self) -> Kernel:
        """The kernel that does nothing once one of `statuses` reports, which stand before its parameters."""
        body = f"""    for (int k = 0; k < statuses; k++)
        if (reported[k * {trouble.WORDS}]) return;
{self.body}"""
        parameters = f"const long long* reported, int statuses, {self.parameters}"
        return dataclasses.replace(self, name=f"{self.name}_guarded", parameters=parameters, body=body)

    def __call__(self, work: int, *args: Any, block: int = 0) -> Launch:
        """A launch of at least `work` threads in blocks of `block` (default: `threads`) along x."""
        block = block or self.threads
        return Launch(self, (-(-work // block), 1, 1), (block, 1, 1), args)

    def blocks(self, *grid: int, args: Sequence[Any], block: Sequence[int] = ()) -> Launch:
        """A launch of blocks."""
        b = tuple(block) or (self.threads,)
        return Launch(self, (*grid, 1, 1)[:3], (*b, 1, 1)[:3], tuple(args))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Buffer(Typed):
    """Elements in the device's memory, row-major: an address and a type."""

    address: int
    type: TensorType

    def reshape(self, *shape: int) -> Buffer:
        """The same elements in another shape; one dimension may be -1."""
        wanted = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
        if -1 in wanted:
            wanted[wanted.index(-1)] = self.size // max(-math.prod(wanted), 1)
        assert math.prod(wanted) == self.size, f"{self.type} has no shape {wanted}"
        return Buffer(self.address, self.type.with_shape(wanted))

    def view(self, kind: np.dtype) -> Buffer:
        """The same bytes as elements of another type along the last axis."""
        *outer, last = self.shape
        size, rest = divmod(last * self.type.numpy.itemsize, kind.itemsize)
        assert not rest, f"{self.type} has no whole elements of {kind}"
        return Buffer(self.address, TensorType(dtype_name(kind), (*outer, size)))

    def __getitem__(self, part: int | slice) -> Buffer:
        """A part along the first axis: one, or a run of them."""
        each = self.shape[1:]
        if isinstance(part, int):
            return self.at(part * math.prod(each), each)
        start, stop, _ = part.indices(self.shape[0])
        return self.at(start * math.prod(each), (stop - start, *each))

    def at(self, element: int, shape: Sequence[int]) -> Buffer:
        """A part of it: as many elements as `shape` has, from an element on."""
        part = self.type.with_shape(list(shape))
        assert element >= 0 and element + part.size <= self.size, f"{part} from {element} is not in {self.type}"
        return Buffer(self.address + element * self.type.numpy.itemsize, part)


#: stands for the address of an operator's status in its session (see runtime/shared/trouble.py), which kernels write
#: when they meet what cannot be computed
STATUS = Buffer(0, TensorType("i64", (trouble.WORDS,)))
#: the text before kernels that write it: the first report stays
REPORT = """
DEVICE void report(long long* status, long long code, long long number, long long size)
{
    if (atomicCAS((unsigned long long*)status, 0ull, (unsigned long long)code)) return;
    status[1] = number;
    status[2] = size;
}
"""


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, block (x, y, z) and arguments: buffers (None: no address), numbers, C structures.

    `part`: what it is of a launch of many, if that may run in its place (see postpone.py).
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Any, ...]
    part: Any = None

    def parameters(self, status: Buffer) -> tuple[Any, Any]:
        """The arguments as C wants them: an array of addresses, and what must live as long as it does.

        `status`: what takes the place of STATUS, where nothing has yet.
        """
        types = self.kernel.types
        assert len(types) == len(self.args), f"{self.kernel.name} takes {self.kernel.parameters}"
        held = [self._c(t, status if a is STATUS else a) for t, a in zip(types, self.args, strict=True)]
        array = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        return array, held

    def within(self, multiprocessors: int) -> list[Launch]:
        """The launches on so many multiprocessors: this one, unless its kernel is resident.

        A resident kernel goes over steps, from and up to its last two arguments; between steps its blocks wait for
        those along x.  Each of them runs on a multiprocessor of its own: as many along y as there are, which share the
        work that y would have.  Where those along x are too many, each step is a launch, and no block waits.
        """
        x, y, _ = self.grid
        if not self.kernel.resident or x * y <= multiprocessors:
            return [self]
        if x <= multiprocessors:
            return [dataclasses.replace(self, grid=(x, multiprocessors // x, 1))]
        *args, begin, end = self.args
        return [dataclasses.replace(self, args=(*args, k, k + 1)) for k in range(begin, end)]

    @property
    def reports(self) -> bool:
        """Whether it writes a status."""
        return any(a is STATUS for a in self.args)

    def guarded(self, statuses: Buffer) -> Launch:
        """The launch that does nothing once one of these statuses, [count, trouble.WORDS], reports."""
        return dataclasses.replace(self, kernel=self.kernel.guarded, args=(statuses, statuses.shape[0], *self.args))

    def reporting(self, status: Buffer) -> Launch:
        """The launch with this in the place of STATUS."""
        return dataclasses.replace(self, args=tuple(status if a is STATUS else a for a in self.args))

    def _c(self, kind: str, a: Any) -> Any:
        if kind.endswith("*"):
            assert a is None or isinstance(a, Buffer), f"{self.kernel.name}: an address is no {a!r}"
            return ctypes.c_void_p(None if a is None else a.address)
        return _SCALARS[kind](a) if kind in _SCALARS else a


@dataclass(frozen=True)
class Product:
    """c = alpha · op(a) · op(b) + beta · c, `batch` times, by cuBLAS; all row-major.

    op(a) is [m, k], op(b) [k, n], c [m, n]; `ta`: a is stored as [k, m].  `lda`, `ldb`, `ldc`: elements from one row
    as stored to the next; `strides`: elements from one product's a, b, c to the next (0: the same one).  Halves are
    multiplied exactly and added in float32; `tf32`: float32 factors may be rounded to TF32.
    """

    a: Buffer
    b: Buffer
    c: Buffer
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldc: int
    ta: bool = False
    tb: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    batch: int = 1
    strides: tuple[int, int, int] = (0, 0, 0)
    tf32: bool = False


@dataclass(frozen=True)
class Copy:
    """Bytes from one place of the device's memory to another that does not overlap it."""

    target: Buffer
    source: Buffer


@dataclass(frozen=True)
class Transfer:
    """A copy between the device's memory and the host's begins; what was launched before is done by then.

    One of both is host memory (`type.host`).  It runs on a stream of its direction, beside what is launched next.
    """

    target: Buffer
    source: Buffer


@dataclass(frozen=True)
class Await:
    """Orders later launches behind the last transfer to `target`."""

    target: Buffer


@dataclass(frozen=True)
class Begin:
    """A communication with other ranks begins; what was launched before is done by then.

    `name`: of the value that it writes.  Run by what carries it (../communication.py), beside what is launched next.
    """

    op: Any
    at: int
    x: Buffer | None
    out: Buffer
    name: str


@dataclass(frozen=True)
class Arrive:
    """Orders later launches behind the communication that writes the value `name`."""

    name: str


@dataclass(frozen=True)
class Fill:
    """All bytes of a buffer are `byte`."""

    target: Buffer
    byte: int = 0


@dataclass(frozen=True)
class OnHost:
    """An operator's own numerics on the host: inputs go there, outputs come back.  It cannot be captured in a graph."""

    op: Any
    ins: tuple[Buffer | None, ...]
    outs: tuple[Buffer | None, ...]
    scratch: tuple[TensorType, ...] = ()


@dataclass(frozen=True)
class Library:
    """A call of a library that takes a stream: `run(stream_pointer)`.  Devices only."""

    name: str
    run: Any
    held: tuple[Any, ...] = ()


Call = Launch | Product | Copy | Transfer | Await | Begin | Arrive | Fill | OnHost | Library
