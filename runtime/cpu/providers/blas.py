"""Matrix products by NumPy's BLAS: single-threaded calls over tiles that are distributed over the step's threads.

The tiles follow from the shapes and the number of threads alone, so that the bits do.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.kernels import register
from ....language.types import Array, Operands, TensorType, need
from ....ops.linear.products import Gemm, MatMul
from ...shared.trouble import LIBRARY
from .. import processors
from ..code.emit import Code, module
from ..device import building, native
from ..device.native import Call

#: floating-point operations below which a product is not worth waking a second thread
_ALONE = 1 << 20
#: tiles for each thread at most, and rows or columns that each of several has at least
_TILES, _LONG = 4, 1024
#: rows or columns that a tile has at least, and is a multiple of where there are as many
_STEP = 16


@dataclass(frozen=True)
class Library:
    """Addresses of a BLAS's C functions; `threads`: (get, set) of its own threads, where it has any.

    `bits` is the width of its integers.
    """

    sgemm: int
    dgemm: int
    bits: int
    threads: tuple[int, int] | None


@dataclass(frozen=True)
class Routine:
    """A matrix product in C: `cblas_?gemm`, or, where it gives a `status`, oneDNN's `dnnl_sgemm`."""

    address: int
    bits: int = 64
    status: bool = False
    threads: tuple[int, int] | None = None


@functools.cache
def library() -> Library | str:
    """NumPy's BLAS, or why its functions cannot be called.

    Symbols are looked up in NumPy's own extension module: the loader searches what it depends on, too.
    """
    if why := native.unavailable() or building.no_libraries():
        return why
    folder = "numpy._core" if int(np.__version__.partition(".")[0]) > 1 else "numpy.core"
    core = importlib.import_module(f"{folder}._multiarray_umath")
    try:
        loaded = ctypes.CDLL(str(core.__file__))
    except OSError as e:
        return f"NumPy's extension module cannot be searched for a BLAS: {e}"

    def address(name: str) -> int:
        try:
            return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0
        except AttributeError:
            return 0

    for prefix, suffix in (("scipy_", "64_"), ("", "64_"), ("", "_64"), ("scipy_", ""), ("", "")):
        sgemm, dgemm = (address(f"{prefix}cblas_{t}gemm{suffix}") for t in "sd")
        control = [f"{prefix}openblas_{what}{suffix}" for what in ("get_num_threads", "set_num_threads")]
        config = address(f"{prefix}openblas_get_config{suffix}")
        parallel = address(f"{prefix}openblas_get_parallel{suffix}")
        if not (sgemm and dgemm and config and parallel):
            continue
        text = ctypes.CFUNCTYPE(ctypes.c_char_p)(config)() or b""
        pthreads = ctypes.CFUNCTYPE(ctypes.c_int)(parallel)() == 1  # with OpenMP a call in a parallel region has one
        get, set_ = map(address, control)
        if pthreads and not (get and set_):
            continue
        return Library(sgemm, dgemm, 64 if b"USE64BITINT" in text else 32, (get, set_) if pthreads else None)
    return "NumPy's BLAS is not OpenBLAS"


def unavailable() -> str:
    """Why this provider cannot run; "" where it can."""
    loaded = library()
    return loaded if isinstance(loaded, str) else ""


@dataclass(frozen=True)
class Product:
    """C = alpha · A' B' + beta · C for a batch: element offsets of each matrix of a batch, and the matrices' form.

    C is [m, n] with rows of `n`; A' is A [m, k], or its transpose where `ta`; B' is B [k, n], or its transpose.
    """

    m: int
    n: int
    k: int
    ta: bool
    tb: bool
    a: tuple[int, ...]
    b: tuple[int, ...]

    def tiles(self, threads: int) -> np.ndarray:
        """[tiles, 7]: offsets of A, B and C, rows, columns, first row, first column; as many for each thread."""
        count = len(self.a)
        parts = 1
        if 2 * count * self.m * self.n * self.k >= _ALONE and count < 4 * threads:
            parts = threads // math.gcd(count, threads) * (_more(self.m, self.n, threads) if count == 1 else 1)
        rows, columns = grid(self.m, self.n, parts)
        table = [
            (
                self.a[i] + (r0 if self.ta else r0 * self.k),
                self.b[i] + (c0 * self.k if self.tb else c0),
                i * self.m * self.n + r0 * self.n + c0,
                r1 - r0,
                c1 - c0,
                r0,
                c0,
            )
            for i in range(count)
            for r0, r1 in rows
            for c0, c1 in columns
        ]
        return np.array(table, np.int64)

    def parallel(self) -> bool:
        """Whether more than one thread is worth it."""
        return 2 * len(self.a) * self.m * self.n * self.k >= _ALONE


def _more(m: int, n: int, threads: int) -> int:
    """Tiles for each thread: a long matrix has several, so that one that is late is waited for less."""
    return max(1, min(_TILES, max(m, n) // (threads * _LONG)))


def grid(m: int, n: int, parts: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Ranges of rows and of columns, `parts` pairs at most: those whose tiles read least of both operands."""
    choices = []
    for r in range(1, parts + 1):
        if parts % r == 0:
            rows, columns = _cut(m, r), _cut(n, parts // r)
            choices.append((-len(rows) * len(columns), -(-m // r) + -(-n // (parts // r)), rows, columns))
    return min(choices, key=lambda c: c[:2])[2:]


def _cut(size: int, parts: int) -> list[tuple[int, int]]:
    """[0, size) in at most `parts` ranges of whole steps."""
    steps = -(-size // _STEP)
    parts = min(parts, steps)
    marks = [min(size, steps * i // parts * _STEP) for i in range(parts + 1)]
    return list(itertools.pairwise(marks))


def product(op: Operator) -> Product | None:
    """The batch of products that a MatMul or Gemm is; None where it is none of this provider's."""
    if not isinstance(op.op, (MatMul, Gemm)):
        return None
    a, b, out = (v.type for v in (op.inputs[0], op.inputs[1], op.outputs[0]) if v is not None)
    if out.dtype not in ("f32", "f64") or not a.size or not b.size:
        return None
    ta, tb = bool(op.op.transA) and a.ndim > 1, bool(op.op.transB) and b.ndim > 1
    left = (1, *a.shape) if a.ndim == 1 else a.shape
    right = (*b.shape, 1) if b.ndim == 1 else b.shape
    k, m = left[-2:] if ta else left[-2:][::-1]
    n = right[-2] if tb else right[-1]
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    if len(right) == 2 and not ta and len(left) > 2:  # one matrix for all of the batch: its rows are one matrix
        return Product(math.prod(left[:-1]), n, k, ta, tb, (0,), (0,))
    return Product(m, n, k, ta, tb, _offsets(left, batch), _offsets(right, batch))


def _offsets(shape: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    """Element offset of the matrix that each entry of a broadcast batch reads."""
    lead, size = shape[:-2], math.prod(shape[-2:])
    at = np.arange(math.prod(lead), dtype=np.int64).reshape(lead) * size
    return tuple(int(i) for i in np.broadcast_to(at, batch).reshape(-1))


class BlasProvider:
    """MatMul and Gemm in float32 and float64."""

    name = "blas"

    def accepts(self, op: Operator) -> bool:
        """Non-empty products, where the library is there."""
        return not unavailable() and product(op) is not None

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """None: the library packs into memory of its own."""
        return ()

    def yields_to(self, op: Operator) -> str:
        """Our own kernels, where they were measured and are faster."""
        p = product(op)
        if p is None or len(p.a) > 1 or op.outputs[0] is None or op.outputs[0].dtype != "f32":
            return ""
        return processors.multiplier((p.m, p.n, p.k, p.ta, p.tb), (self.name, "products"))

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """One call over all tiles; the library's own threads are off meanwhile."""
        return product_calls(op, ins, outs)


def product_calls(op: Operator, ins: Operands, outs: Operands, by: Routine | None = None) -> list[Call]:
    """The calls of a MatMul or Gemm."""
    form = need(product(op))
    if not isinstance(op.op, Gemm):
        return calls(form, ins[0], ins[1], outs[0], by=by)
    bias = ins[2] if len(ins) > 2 and op.op.beta != 0.0 else None
    return calls(form, ins[0], ins[1], outs[0], alpha=op.op.alpha, beta=op.op.beta, bias=bias, by=by)


def routine(dtype: Any) -> Routine:
    """The library's, for float32 or float64."""
    lib = library()
    assert isinstance(lib, Library)
    return Routine(lib.sgemm if dtype == np.float32 else lib.dgemm, lib.bits, threads=lib.threads)


def calls(
    p: Product,
    a: Array,
    b: Array,
    c: Array,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    bias: Array | None = None,
    by: Routine | None = None,
) -> list[Call]:
    """c = alpha · A' B' (+ beta · bias, which broadcasts to [m, n]), as native calls over arrays.

    `by`: another Routine than the library's.
    """
    by = by or routine(c.dtype)
    tiles = p.tiles(native.threads())
    row = column = 0
    if bias is not None:
        shape = (1,) * (2 - bias.ndim) + bias.shape
        row, column = (0 if shape[0] == 1 else shape[1]), (0 if shape[1] == 1 else 1)
    plain, turned = (ord("N"), ord("T")) if by.status else (111, 112)
    flags = tuple(turned if t else plain for t in (p.ta, p.tb))
    words = (by.address, a, b, c, tiles, p.k, p.n, p.m if p.ta else p.k, p.k if p.tb else p.n, *flags)
    words += (float(alpha), float(beta), 0 if bias is None else bias, row, column, native.STATUS)
    kernel = native.compile_ir(_tiles_ir(c.dtype == np.float32, by.bits, by.status))
    several = p.parallel() and len(tiles) > 1 and native.threads() > 1
    private = by.threads is None and not several  # such a library has threads of its own outside of parallel regions
    return [Call(kernel, words, len(tiles), parallel=several, own_threads=private, quiet=by.threads)]


def turned(matrix: Array) -> bool:
    """Whether a matrix lies transposed: its columns lie together."""
    across, along = (s // matrix.itemsize for s in matrix.strides)
    return across == 1 != along


def strided(
    a: Array, b: Array, c: Array, *, more: Array | None = None, by: Routine | None = None, parts: int = 0
) -> list[Call]:
    """c = a b (+ `more`: a row for all rows, or as many as c has; c itself, say), for matrices of which one side lies
    together: parts of others, or transposed.

    `by`: another Routine than the library's.  `parts`: into how many tiles c is cut, for bits that no number of threads
    changes (0: as many as there are threads).
    """
    (m, n), k = c.shape, a.shape[1]
    steps = [[s // x.itemsize for s in x.strides] for x in (a, b, c)]
    lies = turned(a), turned(b)
    chosen = by or routine(c.dtype)
    leads = [max(s[t], x.shape[1 - t]) for x, s, t in zip((a, b, c), steps, (*lies, False), strict=True)]
    row = more.strides[0] // more.itemsize if more is not None and more.ndim > 1 else 0
    threads = native.threads()
    parts = (parts or threads * _more(m, n, threads)) if 2 * m * n * k >= _ALONE else 1
    rows, columns = grid(m, n, parts)
    tiles = [
        (r0 * steps[0][0], c0 * steps[1][1], r0 * steps[2][0] + c0, r1 - r0, c1 - c0, r0, c0)
        for r0, r1 in rows
        for c0, c1 in columns
    ]
    flags = [(ord("T") if t else ord("N")) if chosen.status else (112 if t else 111) for t in lies]
    words = (chosen.address, a, b, c, np.array(tiles, np.int64), k, leads[2], *leads[:2], *flags)
    words += (1.0, 1.0, 0 if more is None else more, row, 1, native.STATUS)
    kernel = native.compile_ir(_tiles_ir(c.dtype == np.float32, chosen.bits, chosen.status))
    several = len(tiles) > 1
    private = chosen.threads is None and not several
    return [Call(kernel, words, len(tiles), parallel=several, own_threads=private, quiet=chosen.threads)]


@functools.cache
def _tiles_ir(single: bool, bits: int, status: bool) -> str:
    """IR of a kernel over tiles: each is filled with the bias, if there is one, and multiplied into; a bias that is C
    itself is there already.

    (gemm, A, B, C, tiles, k, n, elements from row to row of A and of B, flags of A and B, alpha, beta, bias, steps of
    its rows and columns, cell for a status); `single`: float32; `bits` and `status`: see Routine.
    """
    f, real = Code(), "float" if single else "double"
    gemm, a, b, c, tiles = (f.word("%args", i, "ptr") for i in range(5))
    k, n, lda, ldb, ta, tb = (f.word("%args", i) for i in range(5, 11))
    alpha, beta = (f.word("%args", i, "double") for i in (11, 12))
    if single:
        alpha, beta = (f.let(f"fptrunc double {x} to float") for x in (alpha, beta))
    bias = f.word("%args", 13, "ptr")
    steps = f.word("%args", 14), f.word("%args", 15)
    cell = f.word("%args", 16, "ptr")
    biased = f.let(f"icmp ne ptr {bias}, null")
    other = f.let(f"and i1 {biased}, {f.let(f'icmp ne ptr {bias}, {c}')}")
    factor = f.let(f"select i1 {biased}, {real} {beta}, {real} 0.0")

    def integer(x: str, kind: str) -> str:
        """A word as `kind`, with its type."""
        return f"{kind} {x}" if kind == "i64" else f"{kind} {f.let(f'trunc i64 {x} to {kind.split()[0]}')}"

    with f.loop("%begin", "%end") as t:
        a0, b0, c0, rows, columns, r0, q0 = (f.word(tiles, f.add(f.mul(t, 7), i)) for i in range(7))
        to = f.at(c, c0, real)
        with f.when(other):
            _fill(f, real, (to, n, rows, columns), (bias, r0, q0, *steps))
        m_, n_, k_, lda_, ldb_, ldc = (integer(x, f"i{bits}") for x in (rows, columns, k, lda, ldb, n))
        flags = [integer(x, "i8 signext" if status else "i32") for x in (ta, tb)]
        matrices = f"{real} {alpha}, ptr {f.at(a, a0, real)}, {lda_}, ptr {f.at(b, b0, real)}, {ldb_}"
        operands = f"{', '.join(flags)}, {m_}, {n_}, {k_}, {matrices}, {real} {factor}, ptr {to}, {ldc}"
        if status:
            result = f.let(f"call i32 {gemm}({operands})")
            with f.when(f.let(f"icmp ne i32 {result}, 0")):
                f.set(cell, "i64", f.add(f.let(f"sext i32 {result} to i64"), LIBRARY))
        else:
            f.line(f"call void {gemm}(i32 101, {operands})")
    return module(f)


def _fill(f: Code, real: str, tile: tuple[str, ...], bias: tuple[str, ...]) -> None:
    """Fills a tile (where, step of its rows, rows, columns) with a bias (where, the tile's first row and column, steps
    of rows and columns)."""
    to, n, rows, columns = tile
    source, r0, q0, row, column = bias
    with f.loop(0, rows) as i:
        line = f.mul(f.add(r0, i), row)
        with f.loop(0, columns) as j:
            value = f.word(source, f.add(line, f.mul(f.add(q0, j), column)), real)
            f.set(f.at(to, f.add(f.mul(i, n), j), real), real, value)


if not unavailable():
    register(BlasProvider())
