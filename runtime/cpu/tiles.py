"""A register tile of sums of products, the inner part of convolutions, and what size of it suits.

C[m, j] (+)= Σ_r Σ_k A[offA[r] + m · am + k · ak] · B[offB[r] + k · bk + j]  for m < rows, j < columns

All steps between elements are constants of the code.  Sums run in float32 over the (r, k) of one call; a caller adds
several calls' results into C, which keeps the error near that of a blocked product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from . import native
from .emit import Code, mask, vector

#: terms that are summed in a register before they are added to memory
TERMS = 256


@dataclass(frozen=True)
class Machine:
    """Floats in a vector register, and how many registers there are for sums."""

    width: int
    sums: int


@functools.cache
def machine() -> Machine:
    """This processor's."""
    features = native.toolchain().features
    return Machine(16, 28) if "+avx512f" in features else Machine(8, 12)


@dataclass(frozen=True)
class Tile:
    """A tile's size and its constants (see the module); `columns` may end within a vector."""

    rows: int
    columns: int
    am: int
    ak: int
    bk: int
    c: int
    depth: int

    @property
    def vectors(self) -> int:
        """Vectors in a row."""
        return -(-self.columns // machine().width)


def sizes(rows: int, columns: int, vectors: int = 0) -> tuple[int, int]:
    """Rows and vectors of the tile that takes the fewest cycles for [rows, columns]; a smaller one takes the rest.

    `vectors`: this many and no others.
    """
    m = machine()
    choices = []
    for v in (vectors,) if vectors else range(1, 5):
        for high in range(1, min(rows, m.sums // v) + 1):
            choices.append((_cycles(rows, columns, high, v), v, -high))
    _, found, high = min(choices)
    return -high, found


def _cycles(rows: int, columns: int, high: int, vectors: int) -> float:
    """Cycles for one term: two multiplications and two loads in each, four from one sum to the next."""

    def one(h: int, v: int) -> float:
        return max(h * v / 2, (h + v) / 2, 4.0) + 0.1 * v if h and v else 0.0

    full, rest = divmod(rows, high)
    wide, narrow = divmod(-(-columns // machine().width), vectors)
    return sum(n * (full * one(high, v) + one(rest, v)) for n, v in ((wide, vectors), (1 if narrow else 0, narrow)))


def emit_tile(name: str, t: Tile) -> str:
    """A function (C, A, B, offA, offB, count of r, whether C is added to)."""
    width = machine().width
    v = vector(width)
    f = Code(name, "ptr noalias %c, ptr noalias %a, ptr noalias %b, ptr %oa, ptr %ob, i64 %n, i1 %more", internal=True)
    sums = [[f.variable(v, "zeroinitializer") for _ in range(t.vectors)] for _ in range(t.rows)]
    unroll = t.depth if t.depth < 8 else 2 - t.depth % 2
    with f.loop(0, "%n") as r:
        a, b = (f.at(p, f.word(o, r)) for p, o in (("%a", "%oa"), ("%b", "%ob")))
        with f.loop(0, t.depth, unroll) as k:
            ak, bk = f.at(a, f.mul(k, t.ak)), f.at(b, f.mul(k, t.bk))
            for u in range(unroll):
                multiply(f, t, sums, ak, bk, u)
    with f.when("%more"):
        for m, row in enumerate(sums):
            for j, s in enumerate(row):
                f.set(s, v, f.let(f"fadd {v} {_read(f, t, m, j)}, {f.get(s, v)}"))
    for m, row in enumerate(sums):
        for j, s in enumerate(row):
            write(f, t, m, j, f.get(s, v))
    return f.text()


def multiply(f: Code, t: Tile, sums: list[list[str]], a: str, b: str, u: int) -> None:
    """One term of every sum."""
    width = machine().width
    v = vector(width)
    bs = [load(f, f.at(b, u * t.bk + j * width), t, j) for j in range(t.vectors)]
    for m, row in enumerate(sums):
        one = f.word(a, m * t.am + u * t.ak, "float")
        first = f.let(f"insertelement {v} poison, float {one}, i64 0")
        all_ = f.let(f"shufflevector {v} {first}, {v} poison, <{width} x i32> zeroinitializer")
        for j, s in enumerate(row):
            f.set(s, v, f.let(f"call {v} @llvm.fma({v} {all_}, {v} {bs[j]}, {v} {f.get(s, v)})"))


def _lanes(t: Tile, j: int) -> int:
    return min(machine().width, t.columns - j * machine().width)


def load(f: Code, at: str, t: Tile, j: int) -> str:
    """Vector j of a row of B or C, zeros behind its last column."""
    width, v = machine().width, vector(machine().width)
    if _lanes(t, j) == width:
        return f.let(f"load {v}, ptr {at}, align 4")
    lanes = f"<{width} x i1> {mask(width, _lanes(t, j))}"
    return f.let(f"call {v} @llvm.masked.load(ptr {at}, i32 4, {lanes}, {v} zeroinitializer)")


def _read(f: Code, t: Tile, m: int, j: int) -> str:
    return load(f, f.at("%c", m * t.c + j * machine().width), t, j)


def write(f: Code, t: Tile, m: int, j: int, value: str) -> None:
    """Stores vector j of row m of C."""
    width, v = machine().width, vector(machine().width)
    at = f.at("%c", m * t.c + j * width)
    if _lanes(t, j) == width:
        f.line(f"store {v} {value}, ptr {at}, align 4")
    else:
        lanes = f"<{width} x i1> {mask(width, _lanes(t, j))}"
        f.line(f"call void @llvm.masked.store({v} {value}, ptr {at}, i32 4, {lanes})")


def declarations() -> str:
    """What the tiles call; the names carry their types, as LLVM wants them."""
    w = machine().width
    v = vector(w)
    return (
        f"declare {v} @llvm.fma.v{w}f32({v}, {v}, {v})\n"
        f"declare {v} @llvm.masked.load.v{w}f32.p0(ptr, i32, <{w} x i1>, {v})\n"
        f"declare void @llvm.masked.store.v{w}f32.p0({v}, ptr, i32, <{w} x i1>)\n"
    )


def named(ir: str) -> str:
    """IR with the vector functions' full names."""
    w = machine().width
    return (
        ir.replace("@llvm.fma(", f"@llvm.fma.v{w}f32(")
        .replace("@llvm.masked.load(", f"@llvm.masked.load.v{w}f32.p0(")
        .replace("@llvm.masked.store(", f"@llvm.masked.store.v{w}f32.p0(")
    )
