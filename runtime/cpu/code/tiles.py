"""The register tile of sums of products, the inner loop of convolutions, and the choice of its size.

C[m, j] (+)= Σ_r Σ_k A[offA[r] + m · am + k · ak] · B[offB[r] + k · bk + j]  for m < rows, j < columns

All steps between elements are constants of the code.  Sums run in float32 over the (r, k) of one call; a caller adds
several calls' results into C, which keeps the error near that of a blocked product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ..device import native
from .emit import Code

#: terms that are summed in a register before they are added to memory
TERMS = 256


@dataclass(frozen=True)
class Machine:
    """Floats in a vector register, and how many registers there are for sums."""

    width: int
    sums: int

    @property
    def vector(self) -> str:
        """LLVM's type of a register's floats."""
        return f"<{self.width} x float>"


@functools.cache
def machine() -> Machine:
    """This processor's."""
    return Machine(16, 28) if native.toolchain().wide else Machine(8, 12)


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
    _, best, high = min(choices)
    return -high, best


def _cycles(rows: int, columns: int, high: int, vectors: int) -> float:
    """Cycles for one term: two multiplications and two loads in each, four from one sum to the next."""

    def one(h: int, v: int) -> float:
        return max(h * v / 2, (h + v) / 2, 4.0) + 0.1 * v if h and v else 0.0

    full, rest = divmod(rows, high)
    wide, narrow = divmod(-(-columns // machine().width), vectors)
    return sum(n * (full * one(high, v) + one(rest, v)) for n, v in ((wide, vectors), (1 if narrow else 0, narrow)))


def emit_tile(name: str, t: Tile) -> Code:
    """A function (C, A, B, offA, offB, count of r, whether C is added to)."""
    f = Code(name, "ptr noalias %c, ptr noalias %a, ptr noalias %b, ptr %oa, ptr %ob, i64 %n, i1 %more", internal=True)
    sums = new_sums(f, t)
    unroll = t.depth if t.depth < 8 else 2 - t.depth % 2
    with f.loop(0, "%n") as r:
        a, b = (f.at(p, f.word(o, r)) for p, o in (("%a", "%oa"), ("%b", "%ob")))
        with f.loop(0, t.depth, unroll) as k:
            ak, bk = f.at(a, f.mul(k, t.ak)), f.at(b, f.mul(k, t.bk))
            for u in range(unroll):
                multiply(f, t, sums, ak, bk, u)
    finish(f, t, sums, lambda m, j: f.at("%c", m * t.c + j * machine().width))
    return f


def new_sums(f: Code, t: Tile) -> list[list[str]]:
    """Variables for the sums, zeros: each row's vectors."""
    return [[f.variable(machine().vector, "zeroinitializer") for _ in range(t.vectors)] for _ in range(t.rows)]


def multiply(f: Code, t: Tile, sums: list[list[str]], a: str, b: str, u: int) -> None:
    """One term of every sum."""
    v, width = machine().vector, machine().width
    bs = [_load(f, f.at(b, u * t.bk + j * width), t, j) for j in range(t.vectors)]
    for m, row in enumerate(sums):
        one = f.spread(f.word(a, m * t.am + u * t.ak, "float"), "float", width)
        for j, s in enumerate(row):
            f.set(s, v, fma(f, one, bs[j], f.get(s, v)))


def finish(f: Code, t: Tile, sums: list[list[str]], more: Callable[[int, int], str]) -> None:
    """Adds what is at `more(row, vector)` where the function's argument `%more` says so, and writes C."""
    store_tile(f, t, sums, more, lambda m, j: f.at("%c", m * t.c + j * machine().width))


def store_tile(
    f: Code, t: Tile, sums: list[list[str]], more: Callable[[int, int], str], to: Callable[[int, int], str]
) -> None:
    """Adds what is at `more(row, vector)` where the function's argument `%more` says so, and writes to `to`."""
    v = machine().vector
    with f.when("%more"):
        for m, row in enumerate(sums):
            for j, s in enumerate(row):
                f.set(s, v, f.let(f"fadd {v} {_load(f, more(m, j), t, j)}, {f.get(s, v)}"))
    for m, row in enumerate(sums):
        for j, s in enumerate(row):
            _write(f, t, j, f.get(s, v), to(m, j))


def _lanes(t: Tile, j: int) -> str:
    """The mask of vector j's lanes that are columns: see `first_lanes`."""
    return first_lanes(t.columns - j * machine().width)


def _load(f: Code, at: str, t: Tile, j: int) -> str:
    """Vector j of a row of B or C, zeros behind its last column."""
    return load(f, at, _lanes(t, j))


def _write(f: Code, t: Tile, j: int, value: str, at: str) -> None:
    """Stores vector j of a row of C."""
    store(f, value, at, _lanes(t, j))


# -- vectors of float32 -----------------------------------------------------------------------------------------------


def fma(f: Code, a: str, b: str, c: str) -> str:
    """a · b + c, rounded once."""
    v = machine().vector
    return f.intrinsic(f"fma.v{machine().width}f32", v, (v, a), (v, b), (v, c))


def prefetched(f: Code, at: str, *, write: bool = False) -> None:
    """Asks for a line of the cache that will be read, or written; any address may be asked for."""
    f.intrinsic("prefetch.p0", "void", ("ptr", at), ("i32", int(write)), ("i32", 3), ("i32", 1))


def load(f: Code, at: str, lanes: str = "") -> str:
    """The vector at an address; `lanes`: see `load_lanes`."""
    return load_lanes(f, at, lanes) if lanes else f.let(f"load {machine().vector}, ptr {at}, align 4")


def store(f: Code, value: str, at: str, lanes: str = "") -> None:
    """Writes a vector to an address; `lanes`: see `store_lanes`."""
    if lanes:
        store_lanes(f, value, at, lanes)
    else:
        f.line(f"store {machine().vector} {value}, ptr {at}, align 4")


def first_lanes(count: int) -> str:
    """A constant that is true in so many lanes of a vector, from the first on; "" where that is all of them."""
    width = machine().width
    lanes = ", ".join(f"i1 {'true' if i < count else 'false'}" for i in range(width))
    return "" if count >= width else f"<{lanes}>"


def load_lanes(f: Code, at: str, lanes: str) -> str:
    """The elements at an address in those lanes that a vector of i1 names, zeros in the others."""
    m = machine()
    arguments = (("ptr", at), ("i32", 4), (f"<{m.width} x i1>", lanes), (m.vector, "zeroinitializer"))
    return f.intrinsic(f"masked.load.v{m.width}f32.p0", m.vector, *arguments)


def store_lanes(f: Code, value: str, at: str, lanes: str) -> None:
    """Writes those lanes that a vector of i1 names."""
    m = machine()
    arguments = ((m.vector, value), ("ptr", at), ("i32", 4), (f"<{m.width} x i1>", lanes))
    f.intrinsic(f"masked.store.v{m.width}f32.p0", "void", *arguments)
