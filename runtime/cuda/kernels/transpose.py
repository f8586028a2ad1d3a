"""Transpose: contiguous rows are copied as vectors, others are transposed in tiles in shared memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from ....language.ir import Operator
from ....language.types import present
from ....ops.indexing.scatter import strides
from ...shared.boxes import merged
from ..code.parts import WIDE, division, divisor
from ..code.strided import THREADS, WORDS, Axis, gather_to
from ..device.kernel import Buffer, Call, Kernel
from ..families import Buffers, Moving, family

#: bytes of an element → rows and columns of a tile, and elements from one of its rows to the next: an odd number of
#: banks of shared memory, so that a column's elements are in different ones
_TILES = {1: (64, 68), 2: (64, 66), 4: (32, 33), 8: (32, 33)}
#: rows or columns fewer than these are no tiles
_NARROW = 8


def _outer(outer: int) -> str:
    """Statements that add a tile's place along the other axes to `at` and `to`."""
    lines, rest = [], "rest"
    for i in range(outer - 1, 0, -1):
        lines += [f"const Index q{i} = over({rest}, d{i});", f"const Index c{i} = {rest} - q{i} * (Index)d{i}.by;"]
        rest = f"q{i}"
    lines += [f"const Index c0 = {rest};"] if outer else []
    for i in range(outer):
        lines.append(f"at += (long long)c{i} * from{i}; to += (long long)c{i} * to{i};")
    return "\n    ".join(lines)


@functools.cache
def tiles(nbytes: int, outer: int, *, wide: bool) -> Kernel:
    """Rows are neighbours in x (columns `across` apart), columns in y (rows `down` apart); `outer` more axes."""
    size, pitch = _TILES[nbytes]
    each = size * size // THREADS
    body = f"""    typedef {WORDS[nbytes]} W;
    __shared__ W tile[{size}][{pitch}];
    const Index above = over(blockIdx.x, high), rest = over(above, broad);
    const long long r0 = (blockIdx.x - above * (Index)high.by) * {size}ll;
    const long long c0_ = (above - rest * (Index)broad.by) * {size}ll;
    long long at = 0, to = 0;
    {_outer(outer)}
    const int x0 = threadIdx.x % {size}, y0 = threadIdx.x / {size};
    W found[{each}];
    #pragma unroll
    for (int k = 0; k < {each}; k++) {{
        const long long c = c0_ + y0 + k * {THREADS // size};
        if (c < columns && r0 + x0 < rows) found[k] = x[at + r0 + x0 + c * across];
    }}
    #pragma unroll
    for (int k = 0; k < {each}; k++)
        tile[y0 + k * {THREADS // size}][x0] = found[k];
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < {each}; k++) {{
        const int j = y0 + k * {THREADS // size};
        if (r0 + j < rows && c0_ + x0 < columns) y[to + (r0 + j) * down + c0_ + x0] = tile[x0][j];
    }}
"""
    body = body.replace("c0_", "left").replace("r0", "top")
    parameters = ["const {0}* x, {0}* y, long long rows, long long columns, long long across, long long down, Divisor "
                  "high, Divisor broad".format(WORDS[nbytes])]  # fmt: skip
    for i in range(outer):
        parameters += [*([f"Divisor d{i}"] if i else []), f"long long from{i}, long long to{i}"]
    name = f"transpose_{8 * nbytes}_{outer}{'_wide' if wide else ''}"
    return Kernel(name, ", ".join(parameters), body, division(wide=wide), THREADS)


def transposing(x: Buffer, y: Buffer, perm: Sequence[int]) -> list[Call]:
    """Calls that write x, its axes in the order of `perm`, to y."""
    shape, perm = merged(x.shape, perm)
    sizes, in_x = [shape[p] for p in perm], [strides(shape)[p] for p in perm]
    in_y, n, item = strides(sizes), len(shape), x.type.numpy.itemsize
    row = perm.index(n - 1) if n else 0
    if n < 2 or row == n - 1 or min(sizes[row], sizes[-1]) < _NARROW:
        return gather_to(y, x, [Axis("copied", d, s) for d, s in zip(sizes, in_x, strict=True)])
    outer = [i for i in range(n - 1) if i != row]
    side, wide = _TILES[item][0], x.size >= WIDE
    high, broad = -(-sizes[row] // side), -(-sizes[-1] // side)
    args = [sizes[row], sizes[-1], in_x[-1], in_y[row], divisor(high, wide=wide), divisor(broad, wide=wide)]
    for j, i in enumerate(outer):
        args += [*([divisor(sizes[i], wide=wide)] if j else []), in_x[i], in_y[i]]
    count = high * broad * math.prod(sizes[i] for i in outer)
    return [tiles(item, len(outer), wide=wide).blocks(count, args=(x, y, *args))]


@family("Transpose")
class Transposition(Moving):
    """Transposes of all element types."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y = present(ins[0], outs[0])
        return transposing(x, y, op.op.perm) if y.size else []  # type: ignore[attr-defined]
