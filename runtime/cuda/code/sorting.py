"""Sums of rows by index without atomic additions: indices are sorted, then each run of equal indices is summed.

A counting sort of eight bits at a time, each pass stable, so that a run has its elements in their old order.  Sums go
over chunks of the sorted elements; runs that cross from one chunk to the next leave partial sums there, and a second
kernel adds these.  All orders depend on the types only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....language.types import TensorType
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from .parts import WIDE, division, divisor, pack

#: keys that a block has in shared memory, tiles at most, and threads: one for each digit
_STAGE, _MOST_TILES, _DIGITS = 1024, 256, 256
#: threads of a block that sums, rows whose loads are under way together, elements of a chunk at least and at most
_THREADS, _TOGETHER, _CHUNK, _MOST_CHUNK = 64, 8, 32, 512


# -- the sort ---------------------------------------------------------------------------------------------------------


def _tiles(count: int) -> tuple[int, int]:
    """Keys of a tile, and tiles."""
    tile = -(-max(count, 1) // (_MOST_TILES * _STAGE)) * _STAGE
    return tile, -(-count // tile)


@functools.cache
def digit_counts() -> Kernel:
    """How many keys of each tile have each digit: [tiles, 256]."""
    body = f"""    __shared__ int found[{_DIGITS}];
    found[threadIdx.x] = 0;
    __syncthreads();
    const int stop = min(count, (int)(blockIdx.x + 1) * tile);
    for (int i = blockIdx.x * tile + threadIdx.x; i < stop; i += {_DIGITS})
        atomicAdd(&found[keys[i] >> shift & {_DIGITS - 1}], 1);
    __syncthreads();
    counts[blockIdx.x * {_DIGITS} + threadIdx.x] = found[threadIdx.x];
"""
    return Kernel("digit_counts", "const int* keys, int* counts, int count, int tile, int shift", body)


_PLACED = f"""    __shared__ int sums[2][{_DIGITS}], key[{_STAGE}]MORE;
    __shared__ unsigned digits[{_STAGE} / 4];
    const int d = threadIdx.x;
    int all = 0, before = 0;
    for (int t = 0; t < gridDim.x; t++) {{
        const int n = counts[t * {_DIGITS} + d];
        all += n;
        if (t < blockIdx.x) before += n;
    }}
    int now = 0;
    sums[0][d] = all;
    __syncthreads();
    for (int step = 1; step < {_DIGITS}; step *= 2) {{
        sums[1 - now][d] = sums[now][d] + (d >= step ? sums[now][d - step] : 0);
        now = 1 - now;
        __syncthreads();
    }}
    int to = sums[now][d] - all + before;
    const int stop = min(count, (int)(blockIdx.x + 1) * tile);
    for (int start = blockIdx.x * tile; start < stop; start += {_STAGE}) {{
        __syncthreads();
        for (int j = d; j < {_STAGE}; j += {_DIGITS}) {{
            const bool there = start + j < stop;
            key[j] = there ? keys[start + j] : 0;
            LOAD
            ((unsigned char*)digits)[j] = key[j] >> shift & {_DIGITS - 1};
        }}
        __syncthreads();
        const int here = min({_STAGE}, stop - start);
        for (int i = 0; i < here; i += 4) {{
            const unsigned four = digits[i / 4];
            for (int k = 0; k < 4; k++)
                if ((four >> 8 * k & {_DIGITS - 1}) == (unsigned)d && i + k < here) {{
                    const int j = i + k;
                    sorted[to] = key[j];
                    order[to++] = OLD;
                }}
        }}
    }}
"""


@functools.cache
def placed_by_digit(*, first: bool) -> Kernel:
    """Keys and their numbers in the order of a digit, equal ones in their old order; thread d has digit d.

    `first`: the numbers are 0, 1, 2, ...
    """
    more, load, old, numbers = f", number[{_STAGE}]", "number[j] = there ? numbers[start + j] : 0;", "number[j]", ""
    if first:
        more, load, old = "", "", "start + j"
    else:
        numbers = "const int* numbers, "
    body = _PLACED.replace("MORE", more).replace("LOAD", load).replace("OLD", old)
    parameters = f"const int* keys, {numbers}const int* counts, int* sorted, int* order, int count, int tile, int shift"
    return Kernel(f"placed_by_digit{'_first' if first else ''}", parameters, body)


def sort_scratch(count: int) -> tuple[TensorType, ...]:
    """Keys, keys again, their numbers twice, counts of digits."""
    row = TensorType("i32", (count,))
    return row, row, row, row, TensorType("i32", (_tiles(count)[1], _DIGITS))


def sort(scratch: Sequence[Buffer], size: int) -> tuple[list[Call], Buffer, Buffer]:
    """Calls that sort the keys in scratch[0], all below `size`; where sorted keys and their old numbers are then.

    Negative keys belong to no row; one whose lower 24 bits are ones comes behind those that do, as the digits of
    `size` itself are sorted by: 255 and such a key differ only in the second of them.
    """
    keys, spare, numbers, others, counts = scratch
    tile, tiles = _tiles(keys.size)
    calls: list[Call] = []
    for shift in range(0, max(size.bit_length(), 1), 8):
        calls.append(digit_counts().blocks(tiles, args=(keys, counts, keys.size, tile, shift)))
        arguments = (keys, counts) if not shift else (keys, numbers, counts)
        k = placed_by_digit(first=not shift)
        calls.append(k.blocks(tiles, args=(*arguments, spare, others, keys.size, tile, shift)))
        keys, spare, numbers, others = spare, keys, others, numbers
    return calls, keys, numbers


# -- sums of runs -----------------------------------------------------------------------------------------------------


def chunk_of(count: int) -> int:
    """Elements of a chunk: about as many as there are partial sums of the longest run, but for a factor."""
    wanted = int(max(count, 1) ** 0.5) // 4
    return min(max(_CHUNK, 1 << (wanted - 1).bit_length() if wanted else 1), _MOST_CHUNK)


def sums_scratch(count: int, columns: int, dtype: str) -> tuple[TensorType, ...]:
    """Two partial sums a chunk: of a run that comes from the last chunk, and of one that goes on into the next."""
    chunks = -(-count // chunk_of(count))
    return (TensorType("f64" if dtype == "f64" else "f32", (chunks if chunks > 1 else 0, 2, columns)),)


_CHUNK_SUMS = f"""    __shared__ int key[{_MOST_CHUNK} + 1], row[{_MOST_CHUNK}];
    const int part = blockIdx.x / across;
    const int base = part * chunk, here = min(chunk, count - base);
    for (int j = threadIdx.x; j <= here; j += {_THREADS}) {{
        if (base + j < count) key[j] = keys[base + j];
        if (j < here) row[j] = order[base + j];
    }}
    __syncthreads();
    const Index q = (Index)(blockIdx.x % across) * {_THREADS} + threadIdx.x;
    if (q >= columns) return;
    const Index o = over(q, inner), c = q - o * (Index)inner.by;
    bool open = base && keys[base - 1] == key[0];
    A s[LANES] = {{}};
    for (int i = 0; i < here; i += {_TOGETHER}) {{
        Vector x[{_TOGETHER}];
        #pragma unroll
        for (int k = 0; k < {_TOGETHER}; k++)
            if (i + k < here) x[k] = dy[((long long)o * count + row[i + k]) * inner.by + c];
        #pragma unroll
        for (int k = 0; k < {_TOGETHER}; k++) {{
            const int j = i + k;
            if (j >= here) break;
            for (int l = 0; l < LANES; l++) s[l] += widen(x[k].of[l]);
            if (j + 1 < here && key[j + 1] == key[j]) continue;
            const bool on = j + 1 == here && base + here < count && key[here] == key[j];
            if (open || on) {{
                A* to = partial + ((part * 2ll + !open) * columns + q) * LANES;
                for (int l = 0; l < LANES; l++) to[l] = s[l];
            }} else if (key[j] >= 0) {{
                Vector found;
                for (int l = 0; l < LANES; l++) found.of[l] = narrow<T>(s[l]);
                dx[((long long)o * size + key[j]) * inner.by + c] = found;
            }}
            for (int l = 0; l < LANES; l++) s[l] = 0;
            open = false;
        }}
    }}
"""


@functools.cache
def chunk_sums(dtype: str, lanes: int, *, wide: bool) -> Kernel:
    """Sums of the runs of one chunk of `chunk` sorted keys, for vectors of columns of [outer, inner], a chunk's in
    `across` blocks."""
    a, c = COMPUTE[dtype], C_TYPES[dtype]
    types = f"enum {{ LANES = {lanes} }};\ntypedef {c} T;\ntypedef {a} A;\ntypedef {pack(dtype, lanes)} Vector;\n"
    parameters = (
        f"const int* keys, const int* order, const Vector* dy, Vector* dx, {a}* partial, int count, int chunk, "
        "unsigned across, long long columns, long long size, Divisor inner"
    )
    name = f"chunk_sums_{dtype}_{lanes}{'_wide' if wide else ''}"
    return Kernel(name, parameters, _CHUNK_SUMS, division(wide=wide) + types, _THREADS)


@functools.cache
def joined_sums(dtype: str, *, wide: bool) -> Kernel:
    """Sums of the runs that begin in one chunk and end in another, for columns, in `across` blocks."""
    body = f"""    typedef {COMPUTE[dtype]} A;
    const int part = blockIdx.x / across, base = part * chunk;
    const int stop = base > count - chunk ? count : base + chunk;
    const int mine = stop < count ? keys[stop - 1] : -1;
    if (mine < 0 || keys[stop] != mine) return;
    if (base && keys[base] == mine && keys[base - 1] == mine) return;
    const Index q = (Index)(blockIdx.x % across) * blockDim.x + threadIdx.x;
    if (q >= columns) return;
    int last = part + 1, high = (count - 1) / chunk;  // the last chunk that begins with this run
    while (last < high) {{
        const int middle = (last + high + 1) / 2;
        if (keys[middle * chunk] == mine) last = middle;
        else high = middle - 1;
    }}
    A s = partial[(part * 2ll + 1) * columns + q];
    #pragma unroll 8
    for (int i = part + 1; i <= last; i++)
        s += partial[i * 2ll * columns + q];
    const Index o = over(q, inner), c = q - o * (Index)inner.by;
    dx[((long long)o * size + mine) * inner.by + c] = narrow<{C_TYPES[dtype]}>(s);
"""
    parameters = (
        f"const int* keys, const {COMPUTE[dtype]}* partial, {C_TYPES[dtype]}* dx, int count, int chunk, "
        "unsigned across, long long columns, long long size, Divisor inner"
    )
    name = f"joined_sums_{dtype}{'_wide' if wide else ''}"
    return Kernel(name, parameters, body, division(wide=wide), 128)


def sums(
    keys: Buffer, order: Buffer, dy: Buffer, dx: Buffer, partial: Buffer, form: tuple[int, int, int]
) -> list[Call]:
    """Calls that add the rows of dy [outer, count, inner] up in dx [outer, size, inner]; `form`: outer, size, inner.

    Only rows that something is added to are written.
    """
    outer, size, inner = form
    count, chunk, item = keys.size, chunk_of(keys.size), dx.type.numpy.itemsize
    columns, wide = outer * inner, outer * inner >= WIDE
    lanes = 16 // item
    if inner % lanes or (dy.address | dx.address) % 16:
        lanes = 1
    chunks = -(-count // chunk)
    k = chunk_sums(dx.dtype, lanes, wide=wide)
    across = -(-columns // (lanes * _THREADS))
    args = (count, chunk, across, columns // lanes, size, divisor(inner // lanes, wide=wide))
    calls: list[Call] = [k.blocks(across * chunks, args=(keys, order, dy, dx, partial, *args))]
    if chunks > 1:
        k = joined_sums(dx.dtype, wide=wide)
        across = -(-columns // 128)
        rest = (count, chunk, across, columns, size, divisor(inner, wide=wide))
        calls.append(k.blocks(across * chunks, args=(keys, partial, dx, *rest)))
    return calls
