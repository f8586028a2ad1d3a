"""Attention's kernels: their text, and the tiles they work in.

A block of four warps has 64 rows (a strip), sixteen a warp, and goes over the other side in tiles of COLS; of both it
has DC columns at a time in shared memory, where `scores` multiplies them and `gather` weights a tile's rows.  Nothing
is added up by two blocks, so that results are the same bits in every run.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from ..device.kernel import C_TYPES, Kernel
from .attention_text import COMMON, DELTA, HEADS, KERNELS
from .philox import PHILOX
from .warp_products import WAYS, warp_products

#: rows and threads of a block; axes before the matrices, at most
ROWS, THREADS, AXES = 64, 128, 6
#: bytes of shared memory that any device has for a block
SHARED = 48 << 10


#: operands of which the matrices may lie beside each other, of both passes
MATRICES = ("q", "k", "v", "y", "dy", "dq", "dk", "dv")


class Axes(ctypes.Structure):
    """A number's digits, the last of them fastest, and what each digit counts."""

    _fields_ = (("count", ctypes.c_int), ("size", ctypes.c_int * AXES), ("step", ctypes.c_longlong * AXES))


class Problem(ctypes.Structure):
    """Sizes, window, and where matrices are.

    `q` to `dv`: how many of an operand's matrices lie beside each other; `keys`, `biases`: of a matrix of queries;
    `own`, `sharing`: matrices of queries of one of keys, or of one of biases.  Dropout: the number of a matrix's first
    weight is `start` and what `numbers` counts; weights whose number's bits are below `threshold` are 0, the others
    times `kept`.
    """

    _fields_ = (
        *((n, ctypes.c_int) for n in ("t", "s", "d", "e", "first", "last")),
        *((n, ctypes.c_int) for n in MATRICES),
        *((n, ctypes.c_longlong) for n in ("bias_row", "bias_column")),
        *((n, ctypes.c_double) for n in ("scale", "cap", "kept")),
        *((n, ctypes.c_ulonglong) for n in ("seed", "start")),
        ("threshold", ctypes.c_uint),
        *((n, Axes) for n in ("keys", "biases", "own", "sharing", "numbers")),
    )


@dataclass(frozen=True)
class Tiles:
    """A kernel's variant: the way of multiplying, chunks of EC result columns a block has in registers (`chunks`),
    elements read at once (`pack`), the bias's type ("": none), soft cap and dropout."""

    way: str
    chunks: int
    pack: int
    bias: str = ""
    caps: bool = False
    drops: bool = False

    @property
    def columns(self) -> int:
        """Rows of the K/V tile (of the Q tile in the gradient of keys)."""
        return 64 if WAYS[self.way].step == 16 else 32

    @property
    def terms(self) -> int:
        """Terms of a score that are in shared memory at a time."""
        return {"f64": 32, "f16": 128, "bf16": 128}.get(self.way, 64)

    @property
    def numbers(self) -> dict[str, int]:
        """The text's constants; rows in shared memory are padded so that lanes meet different banks."""
        padding = 8 if WAYS[self.way].step == 16 else 4
        wide, columns = chunk(self.way), self.columns
        values = {"COLS": columns, "BLOCKS": columns // 8, "DC": self.terms, "LX": self.terms + padding}
        values |= {"LW": columns + padding, "EC": wide, "LE": wide + 8, "EB": wide // 8}
        values |= {"CHUNKS": self.chunks, "PACK": self.pack, "ROWS": ROWS, "THREADS": THREADS}
        values |= {"BIASED": int(bool(self.bias)), "CAPS": int(self.caps), "DROPS": int(self.drops)}
        values |= {"MOST": max(ROWS * (columns // 8 + 1), columns * 9)}
        return values | {"TILE": columns * max(values["LX"], values["LE"])}

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        n = self.numbers
        item = {"double": 8, "float": 4}.get(WAYS[self.way].stored, 2)
        rows = 2 * self.columns * max(item, 4)  # two numbers a query, of keys' gradients
        return (ROWS * n["LX"] + n["TILE"] + ROWS * n["LW"]) * item + (n["MOST"] if self.drops else 1) + rows


def chunk(way: str) -> int:
    """Columns of a result that are added up together."""
    return 32 if way == "f64" else 64


@functools.cache
def kernel(name: str, tiles: Tiles) -> Kernel:
    """A kernel: "forward", "by_query" (dq), "by_key" (dk, dv) or "by_bias"."""
    parameters, body = KERNELS[name]
    numbers = ", ".join(f"{n} = {x}" for n, x in tiles.numbers.items())
    before = f"{warp_products(tiles.way)}typedef {C_TYPES[tiles.bias] if tiles.bias else 'S'} B;\n"
    before += f"enum {{ {numbers}, ROUNDED = {int(tiles.way == 'tf32')} }};{PHILOX}{HEADS}{COMMON}"
    words = (tiles.way, str(tiles.chunks), str(tiles.pack), tiles.bias, "cap" * tiles.caps, "drop" * tiles.drops)
    title = "_".join(["attention", name, *(w for w in words if w)])
    return Kernel(title, f"{parameters}, Problem p", body, before, threads=THREADS)


@functools.cache
def delta(dtype: str) -> Kernel:
    """The sum of y · dy over each row of n elements, of matrices of t rows, a warp a row."""
    way = WAYS[dtype]
    before = f"typedef {way.stored} S;\ntypedef {way.added} A;\n{HEADS}"
    parameters = "const S* y, const S* dy, A* delta, long long rows, int t, int n, int of_y, int of_dy"
    return Kernel(f"attention_delta_{dtype}", parameters, DELTA, before)
