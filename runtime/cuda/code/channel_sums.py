"""Sums over all elements of a channel, for batch normalisation and the scales of every normalisation.

An activation is [n, c, p] (`last` false: channels before positions) or [rows, c] (channels last).  A first kernel
takes chunks whose length follows from the shape alone and leaves two numbers a chunk and channel, [2, chunks, c]; a
second one, a block for each channel, puts them together in double, in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ....language.types import TensorType
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel

#: elements of a channel in a chunk, by layout
_CHUNK, _CHUNK_ROWS = 8192, 512


@dataclass(frozen=True)
class Channels:
    """An activation's form: `n` images of `p` positions, or n · p rows, of `c` channels."""

    n: int
    c: int
    p: int
    last: bool

    @property
    def count(self) -> int:
        """Elements of a channel."""
        return self.n * self.p

    @property
    def chunk(self) -> int:
        """Elements of a channel in a chunk."""
        return _CHUNK_ROWS if self.last else _CHUNK

    @property
    def chunks(self) -> int:
        """Chunks of a channel."""
        return -(-self.count // self.chunk)

    @property
    def fits(self) -> bool:
        """Whether its kernels run: fewer than 2³² elements a channel, a grid's rows for the channels."""
        return self.count < 1 << 32 and (-(-self.c // 32) if self.last else self.c) <= 65535

    def partial(self, dtype: str) -> TensorType:
        """Two numbers a chunk and channel, in what `dtype` is computed with."""
        return TensorType("f64" if dtype == "f64" else "f32", (2, self.chunks, self.c))


#: the loops over a chunk of one channel; X and DY are its elements, ROW the index of the mean that belongs to it
_FIRST = """    typedef {A} A;
    const int c = blockIdx.y, k = blockIdx.x;
    const unsigned begin = k * {chunk}u, end = min(begin + {chunk}u, count);
    {first}
"""
_LAST = """    typedef {A} A;
    __shared__ A folded[8][33];
    const int c = blockIdx.y * 32 + threadIdx.x, k = blockIdx.x;
    const unsigned begin = k * {chunk}u, end = min(begin + {chunk}u, count);
    {first}
"""


def _loop(last: bool, body: str) -> str:
    """A loop of a thread over its elements; `i` is the element's number in the channel, `at` its place in memory."""
    if last:
        return f"""    if (c < channels)
        for (unsigned i = begin + threadIdx.y; i < end; i += 8) {{
            const long long at = (long long)i * channels + c;
            {body}
        }}
"""
    return f"""    for (unsigned i = begin + threadIdx.x; i < end; i += 256) {{
        const unsigned image = i / positions;
        const long long at = ((long long)image * channels + c) * positions + (i - image * positions);
        {body}
    }}
"""


def _folded(last: bool, name: str) -> str:
    """A thread's sum to the channel's, in every thread of the channel."""
    if not last:
        return f"    {name} = block_reduce({name}, Plus());\n"
    return f"""    __syncthreads();
    folded[threadIdx.y][threadIdx.x] = {name};
    __syncthreads();
    {name} = folded[0][threadIdx.x];
    for (int w = 1; w < 8; w++) {name} += folded[w][threadIdx.x];
"""


def _store(last: bool) -> str:
    one = "threadIdx.y == 0 && c < channels" if last else "threadIdx.x == 0"
    return f"""    if ({one}) {{
        partial[(long long)k * channels + c] = s;
        partial[((long long)gridDim.x + k) * channels + c] = q;
    }}
"""


def _head(dtype: str, *, last: bool) -> str:
    chunk = _CHUNK_ROWS if last else _CHUNK
    return (_LAST if last else _FIRST).format(A=COMPUTE[dtype], chunk=chunk, first="A s = 0, q = 0;")


_SHAPE = "int channels, unsigned positions, unsigned count"


@functools.cache
def moments(dtype: str, *, last: bool) -> Kernel:
    """Mean, and sum of squares around it, of each chunk (Chan, Golub & LeVeque 1983)."""
    body = _head(dtype, last=last)
    body += _loop(last, "s += widen(x[at]);") + _folded(last, "s")
    body += "    s /= (A)(end - begin);\n"
    body += _loop(last, "const A d = widen(x[at]) - s; q = fma_of(d, d, q);") + _folded(last, "q") + _store(last)
    name = f"chunk_moments_{dtype}{'_last' if last else ''}"
    return Kernel(name, f"const {C_TYPES[dtype]}* x, {COMPUTE[dtype]}* partial, {_SHAPE}", body)


@functools.cache
def products(dtype: str, mean: str, *, last: bool, grouped: bool, scaled: bool) -> Kernel:
    """Σ dy and Σ dy · (x - mean) [· inverse] of each chunk.

    `mean`: its element type, "" for none.  `grouped`: mean and inverse are [images, groups] with `size` channels a
    group, else [channels].
    """
    image = "i" if last else "image"
    if last and grouped:
        body = "const long long m = (long long)i * groups + c / size;"
    else:
        body = f"const long long m = {f'(long long){image} * groups + c / size' if grouped else 'c'};"
    x = "widen(x[at])" + (" - (A)widen(mean[m])" if mean else "")
    factor = " * widen(inverse[m])" if scaled else ""
    body += f" const A g = widen(dy[at]); s += g; q = fma_of(g, ({x}){factor}, q);"
    text = _head(dtype, last=last) + _loop(last, body) + _folded(last, "s") + _folded(last, "q") + _store(last)
    c, kind = C_TYPES[dtype], C_TYPES[mean or "f32"]
    name = f"chunk_products_{dtype}_{mean}{'_last' if last else ''}{'_grouped' if grouped else ''}"
    parameters = f"const {c}* x, const {c}* dy, const {kind}* mean, const {COMPUTE[dtype]}* inverse"
    return Kernel(f"{name}{'_scaled' if scaled else ''}",
                  f"{parameters}, {COMPUTE[dtype]}* partial, {_SHAPE}, int groups, int size", text)  # fmt: skip


def over_chunks(k: Kernel, form: Channels, args: Sequence[object]) -> Call:
    """The launch of a kernel over chunks."""
    tail = (form.c, max(form.p, 1), form.count)
    block = (32, 8) if form.last else (256,)
    return k.blocks(form.chunks, -(-form.c // 32) if form.last else form.c, args=(*args[:-2], *tail, *args[-2:])
                    if "groups" in k.parameters else (*args, *tail), block=block)  # fmt: skip


@functools.cache
def whole_moments(dtype: str, outputs: tuple[str, ...]) -> Kernel:
    """Chunks' moments to mean and biased variance of each channel, also in other element types."""
    a = COMPUTE[dtype]
    more = "".join(f", {C_TYPES[o]}* mean{i}, {C_TYPES[o]}* var{i}" for i, o in enumerate(outputs))
    stores = "".join(
        f"""
        if (mean{i}) mean{i}[c] = narrow<{C_TYPES[o]}>((double)mean[c]);
        if (var{i}) var{i}[c] = narrow<{C_TYPES[o]}>((double)var[c]);"""
        for i, o in enumerate(outputs)
    )
    body = f"""    const int c = blockIdx.x;
    double s = 0, q = 0;
    for (int k = threadIdx.x; k < chunks; k += blockDim.x)
        s += (double)partial[(long long)k * channels + c] * min(chunk, count - k * chunk);
    const double m = count ? block_reduce(s, Plus()) / count : 0;
    for (int k = threadIdx.x; k < chunks; k += blockDim.x) {{
        const double d = (double)partial[(long long)k * channels + c] - m;
        q += (double)partial[((long long)chunks + k) * channels + c] + d * d * min(chunk, count - k * chunk);
    }}
    q = block_reduce(q, Plus());
    if (threadIdx.x == 0) {{
        mean[c] = ({a})m;
        var[c] = count ? ({a})(q / count) : 0;{stores}
    }}
"""
    parameters = (
        f"const {a}* partial, {a}* mean, {a}* var{more}, int channels, int chunks, unsigned chunk, unsigned count"
    )
    return Kernel(f"moments_{dtype}_{'_'.join(outputs)}", parameters, body, threads=128)


@functools.cache
def whole_sums(dtype: str, output: str) -> Kernel:
    """Chunks' sums to those of each channel: `second` (times the channel's factor, if any), `first`; also kept wide."""
    a, o = COMPUTE[dtype], C_TYPES[output]
    body = f"""    const int c = blockIdx.x;
    double s = 0, q = 0;
    for (int k = threadIdx.x; k < chunks; k += blockDim.x) {{
        s += (double)partial[(long long)k * channels + c];
        q += (double)partial[((long long)chunks + k) * channels + c];
    }}
    s = block_reduce(s, Plus());
    q = block_reduce(q, Plus()) * (factor ? (double)factor[c] : 1.0);
    if (threadIdx.x == 0) {{
        second[c] = narrow<{o}>(q);
        first[c] = narrow<{o}>(s);
        if (kept) {{
            kept[c] = ({a})s;
            kept[channels + c] = ({a})q;
        }}
    }}
"""
    parameters = f"const {a}* partial, const {a}* factor, {o}* second, {o}* first, {a}* kept, int channels, int chunks"
    return Kernel(f"channel_sums_{dtype}_{output}", parameters, body, threads=128)


def moments_of(
    form: Channels, x: Buffer, partial: Buffer, mean: Buffer, var: Buffer, outs: Sequence[Buffer | None]
) -> list[Call]:
    """Mean and variance of each channel in what x is computed with, and (given) in outputs' own type."""
    pairs = [outs[i : i + 2] for i in range(0, len(outs), 2)]
    kinds = tuple(next(b.dtype for b in p if b is not None) for p in pairs)
    k = whole_moments(x.dtype, kinds)
    tail = (*outs, form.c, form.chunks, form.chunk, form.count)
    first = [over_chunks(moments(x.dtype, last=form.last), form, (x, partial))] if form.chunks else []
    return [*first, k.blocks(form.c, args=(partial, mean, var, *tail), block=(128,))]
