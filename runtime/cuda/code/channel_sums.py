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
        """Whether its kernels run: chunks of a channel end below 2³², a grid's rows for the channels."""
        return self.count <= (1 << 32) - _CHUNK and (-(-self.c // 32) if self.last else self.c) <= 65535

    def pack(self, dtype: str) -> int:
        """Channels that a thread takes together: 16 bytes of them where channels are last and as many, or 1.

        Not by what begins where: the order of sums follows from the shape.
        """
        most = 16 // TensorType(dtype, ()).nbytes
        return most if self.last and self.c % most == 0 else 1

    def lanes(self, pack: int) -> int:
        """Threads of a block beside each other, each for `pack` channels; a power of two, 32 at most."""
        return 32 if pack == 1 else min(32, 1 << (self.c // pack - 1).bit_length())

    def partial(self, dtype: str) -> TensorType:
        """Two numbers a chunk and channel, in what `dtype` is computed with."""
        return TensorType("f64" if dtype == "f64" else "f32", (2, self.chunks, self.c))


@dataclass(frozen=True)
class _Loops:
    """Loops of a thread over a chunk: of one channel, or with channels last of `pack` channels, `lanes` beside it.

    In their bodies `s` and `q` are a channel's sums, `c` the channel, `i` the element's number in it, and NAME_ the
    element of each of the arrays `names` of `dtype`.  `aligned`: the arrays begin at multiples of 16 bytes.
    """

    dtype: str
    last: bool
    names: tuple[str, ...]
    pack: int = 1
    lanes: int = 32
    aligned: bool = True

    @classmethod
    def over(cls, form: Channels, names: tuple[str, ...], *arrays: Buffer) -> _Loops:
        """The loops of a form over these arrays."""
        dtype = arrays[0].dtype
        pack = form.pack(dtype)
        aligned = pack == 1 or all(b.address % 16 == 0 for b in arrays)
        return cls(dtype, form.last, names, pack, form.lanes(pack), aligned)

    @property
    def rows(self) -> int:
        """Threads of a block behind each other."""
        return 256 // self.lanes

    @property
    def name(self) -> str:
        """The suffix of the names of kernels with these loops."""
        packed = f"_{self.pack}x{self.lanes}{'' if self.aligned else '_odd'}" if self.pack > 1 else ""
        return f"{'_last' if self.last else ''}{packed}"

    def head(self) -> str:
        """The chunk and the sums."""
        kind, chunk = COMPUTE[self.dtype], _CHUNK_ROWS if self.last else _CHUNK
        where = f"""const int k = blockIdx.x;
    const unsigned begin = k * {chunk}u, end = min(begin + {chunk}u, count);"""
        if not self.last:
            return f"    typedef {kind} A;\n    const int c = blockIdx.y;\n    {where}\n    A s = 0, q = 0;\n"
        return f"""    typedef {kind} A;
    __shared__ A folded[{self.rows}][{self.lanes * self.pack + 1}];
    const int first = (blockIdx.y * {self.lanes} + threadIdx.x) * {self.pack};
    {where}
    A sums[{self.pack}] = {{}}, others[{self.pack}] = {{}};
"""

    def loop(self, body: str) -> str:
        """A loop over the chunk."""
        kind = C_TYPES[self.dtype]
        if not self.last:
            loads = " ".join(f"const {kind} {n}_ = {n}[at];" for n in self.names)
            return f"""    for (unsigned i = begin + threadIdx.x; i < end; i += 256) {{
        const unsigned image = i / positions;
        const long long at = ((long long)image * channels + c) * positions + (i - image * positions);
        {loads}
        {body}
    }}
"""
        packed = f"Pack<{kind}, {self.pack}>"
        one_by_one = "for (int j = 0; j < {p}; j++) {n}_all.of[j] = {n}[at + j];"
        how = "{n}_all = *(const {t}*)({n} + at);" if self.aligned else one_by_one
        loads = " ".join(f"{packed} {n}_all; " + how.format(n=n, t=packed, p=self.pack) for n in self.names)
        each = " ".join(f"const {kind} {n}_ = {n}_all.of[j];" for n in self.names)
        return f"""    if (first < channels)
        for (unsigned i = begin + threadIdx.y; i < end; i += {self.rows}) {{
            const long long at = (long long)i * channels + first;
            {loads}
            for (int j = 0; j < {self.pack}; j++) {{
                const int c = first + j;
                A &s = sums[j], &q = others[j];
                {each}
                {body}
            }}
        }}
"""

    def folded(self, name: str) -> str:
        """The sums `s` or `q` of a thread to the channel's, in every thread of the channel."""
        if not self.last:
            return f"    {name} = block_reduce({name}, Plus());\n"
        mine, wide = {"s": "sums", "q": "others"}[name], self.lanes * self.pack
        return f"""    {{
        const int t = threadIdx.y * {self.lanes} + threadIdx.x;
        __syncthreads();
        for (int j = 0; j < {self.pack}; j++) folded[threadIdx.y][threadIdx.x * {self.pack} + j] = {mine}[j];
        __syncthreads();
        if (t < {wide})
            for (int w = 1; w < {self.rows}; w++) folded[0][t] += folded[w][t];
        __syncthreads();
        for (int j = 0; j < {self.pack}; j++) {mine}[j] = folded[0][threadIdx.x * {self.pack} + j];
    }}
"""

    def divided(self) -> str:
        """The first sums to means."""
        if not self.last:
            return "    s /= (A)(end - begin);\n"
        return f"    for (int j = 0; j < {self.pack}; j++) sums[j] /= (A)(end - begin);\n"

    def stored(self) -> str:
        """Both sums of the chunk and channel."""
        if not self.last:
            return """    if (threadIdx.x == 0) {
        partial[(long long)k * channels + c] = s;
        partial[((long long)gridDim.x + k) * channels + c] = q;
    }
"""
        return f"""    if (threadIdx.y == 0 && first < channels)
        for (int j = 0; j < {self.pack}; j++) {{
            partial[(long long)k * channels + first + j] = sums[j];
            partial[((long long)gridDim.x + k) * channels + first + j] = others[j];
        }}
"""


_SHAPE = "int channels, unsigned positions, unsigned count"


@functools.cache
def _moments(loops: _Loops) -> Kernel:
    """Mean, and sum of squares around it, of each chunk (Chan, Golub & LeVeque 1983)."""
    body = loops.head() + loops.loop("s += widen(x_);") + loops.folded("s") + loops.divided()
    body += loops.loop("const A d = widen(x_) - s; q = fma_of(d, d, q);") + loops.folded("q") + loops.stored()
    parameters = f"const {C_TYPES[loops.dtype]}* x, {COMPUTE[loops.dtype]}* partial, {_SHAPE}"
    return Kernel(f"chunk_moments_{loops.dtype}{loops.name}", parameters, body)


@functools.cache
def _products(loops: _Loops, mean: str, *, grouped: bool, scaled: bool) -> Kernel:
    """See `products`."""
    image = "i" if loops.last else "image"
    body = f"const long long m = {f'(long long){image} * groups + c / size' if grouped else 'c'};"
    x = "widen(x_)" + (" - (A)widen(mean[m])" if mean else "")
    factor = " * widen(inverse[m])" if scaled else ""
    body += f" const A g = widen(dy_); s += g; q = fma_of(g, ({x}){factor}, q);"
    text = loops.head() + loops.loop(body) + loops.folded("s") + loops.folded("q") + loops.stored()
    c, a = C_TYPES[loops.dtype], COMPUTE[loops.dtype]
    name = f"chunk_products_{loops.dtype}_{mean}{loops.name}{'_grouped' * grouped}{'_scaled' * scaled}"
    parameters = f"const {c}* x, const {c}* dy, const {C_TYPES[mean or 'f32']}* mean, const {a}* inverse, {a}* partial"
    return Kernel(name, f"{parameters}, {_SHAPE}, int groups, int size", text)


def _over_chunks(k: Kernel, loops: _Loops, form: Channels, args: Sequence[object], tail: Sequence[object]) -> Call:
    shape = (form.c, max(form.p, 1), form.count)
    columns = -(-form.c // (loops.lanes * loops.pack)) if form.last else form.c
    block = (loops.lanes, loops.rows) if form.last else (256,)
    return k.blocks(form.chunks, columns, args=(*args, *shape, *tail), block=block)


def products(
    form: Channels,
    x: Buffer,
    dy: Buffer,
    mean: Buffer | None,
    inverse: Buffer | None,
    partial: Buffer,
    groups: tuple[int, int] | None = None,
) -> Call:
    """Σ dy and Σ dy · (x - mean) [· inverse] of each chunk to `partial`.

    `groups`: mean and inverse are [images, groups] with so many channels a group, else [channels].
    """
    loops = _Loops.over(form, ("x", "dy"), x, dy)
    k = _products(loops, "" if mean is None else mean.dtype, grouped=groups is not None, scaled=inverse is not None)
    return _over_chunks(k, loops, form, (x, dy, mean, inverse, partial), groups or (1, 1))


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
    """Chunks' sums to those of each channel: `second` (times the channel's factor, if any), `first`; their means over
    `count` elements are kept wide, too."""
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
            kept[c] = ({a})(s / count);
            kept[channels + c] = ({a})(q / count);
        }}
    }}
"""
    parameters = f"const {a}* partial, const {a}* factor, {o}* second, {o}* first, {a}* kept, int channels, int chunks"
    return Kernel(f"channel_sums_{dtype}_{output}", f"{parameters}, double count", body, threads=128)


def moments_of(
    form: Channels, x: Buffer, partial: Buffer, mean: Buffer, var: Buffer, outs: Sequence[Buffer | None]
) -> list[Call]:
    """Mean and variance of each channel in what x is computed with, and (given) in outputs' own type."""
    pairs = [outs[i : i + 2] for i in range(0, len(outs), 2)]
    kinds = tuple(next(b.dtype for b in p if b is not None) for p in pairs)
    k = whole_moments(x.dtype, kinds)
    tail = (*outs, form.c, form.chunks, form.chunk, form.count)
    loops = _Loops.over(form, ("x",), x)
    first = [_over_chunks(_moments(loops), loops, form, (x, partial), ())] if form.chunks else []
    return [*first, k.blocks(form.c, args=(partial, mean, var, *tail), block=(128,))]
