"""Convolutions of 16-bit types (and TF32) by im2col and cuBLAS.

Some images at a time, so that the columns stay in the device's cache: [terms, images · positions] with channels second,
[images · positions, terms] with channels last.  Terms are in the order (tap, channel), which the packed weights share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from ....language.types import TensorType
from ...shared.convolved import Convolved
from ..code.strided import Rows, copy_rows
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Fill, Kernel, Product
from . import text
from .gathered import Gather, Weigh, gradients, output, weigh
from .products import spread_bias
from .tiles import pack, wide

#: bytes of the columns of some images, and of one image at most; groups at most; rows and terms at least
_SOME, _MOST, _GROUPS, _ROWS, _TERMS = 24 << 20, 64 << 20, 4, 16, 32


def _even(n: int) -> int:
    """A multiple of 8 elements: 16 bytes."""
    return -(-n // 8) * 8


_COLUMNS = """    typedef @T T;
    @I i = (@I)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= units) return;
    @ORDER
    const int t = k / @C, c = k % @C;
    @TAP
    T* to = y + image * per_image + k * per_term + (long long)q * per_position;
    const T* from = x + (long long)image * @IMAGE + (long long)c * @CHANNEL;
@READ"""
_ONE = """    @PLACE
    T v = narrow<T>((@A)0);
    if (@WITHIN) v = from[(long long)(@FROM) * @POSITION];
    *to = v;"""
_CHANNELS = """    @PLACE
    Pack<T, @WIDTH> v;
    for (int l = 0; l < @WIDTH; l++) v.of[l] = narrow<T>((@A)0);
    if (@WITHIN) v = *(const Pack<T, @WIDTH>*)(from + (long long)(@FROM) * @POSITION);
    *(Pack<T, @WIDTH>*)to = v;"""
_POSITIONS = """    Pack<T, @WIDTH> v;
    #pragma unroll
    for (int l = 0; l < @WIDTH; l++, q++) {
        @PLACE
        v.of[l] = narrow<T>((@A)0);
        if (@WITHIN) v.of[l] = from[(long long)(@FROM) * @POSITION];
    }
    *(Pack<T, @WIDTH>*)to = v;"""


@functools.cache
def columns(g: Gather | Weigh, width: int, *, few: bool) -> Kernel:
    """(source, columns, units, strides of the columns): `width` neighbours of a thread.

    `few`: 32 bits count the units.
    """
    image, channel, position = text.strides(g.source, g.group * g.channels, g.last)
    terms, count = math.prod(g.taps) * g.channels, math.prod(g.count)
    names = ("q0", "q1", "q2")
    if g.last:
        order = [f"const int k = (int)(i % {terms // width}) * {width}; i /= {terms // width};",
                 f"int q = (int)(i % {count}); const long long image = i / {count};"]  # fmt: skip
    else:
        order = [f"int q = (int)(i % {count // width}) * {width}; i /= {count // width};",
                 f"const int k = (int)(i % {terms}); const long long image = i / {terms};"]  # fmt: skip
    place = [text.apart("q", g.count, names)]
    place += [f"const int i{a} = q{a} * {g.scale[a]} + {g.origin[a]} + t{a} * {g.delta[a]};" for a in range(3)]
    read = _ONE if width == 1 else _CHANNELS if g.last else _POSITIONS
    body = text.filled(_COLUMNS.replace("@READ", read), {
        "WIDTH": width, "T": C_TYPES[g.dtype], "A": COMPUTE[g.dtype], "I": "unsigned" if few else "long long",
        "ORDER": "\n    ".join(order), "C": g.channels, "TAP": text.apart("t", g.taps, ("t0", "t1", "t2")),
        "IMAGE": image, "CHANNEL": channel, "POSITION": position, "PLACE": "\n        ".join(place),
        "WITHIN": " && ".join(f"(unsigned)i{a} < {g.source[a]}u" for a in range(3)),
        "FROM": text.linear(g.source, ("i0", "i1", "i2")),
    })  # fmt: skip
    c = C_TYPES[g.dtype]
    parameters = (
        f"const {c}* x, {c}* y, long long units, long long per_image, long long per_term, long long per_position"
    )
    return Kernel(f"columns_{g.dtype}", parameters, body)


@functools.cache
def placing(g: Gather, source: str, bias: bool) -> Kernel:
    """(results, bias, y, size, strides of the results): results of some images where they belong."""
    image, channel, position = text.strides(g.target, g.group * g.rows, g.last)
    fast, slow = ((g.rows, "m"), (g.positions, "q")) if g.last else ((g.positions, "q"), (g.rows, "m"))
    target = [f"(q{i} * {g.step[i]} + {g.base[i]})" for i in range(3)]
    body = f"""    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const int {fast[1]} = (int)(i % {fast[0]}); i /= {fast[0]};
    const int {slow[1]} = (int)(i % {slow[0]}); i /= {slow[0]};
    {text.apart("q", g.count, ("q0", "q1", "q2"))}
    const {COMPUTE[g.dtype]} v = widen(x[(i * {g.positions} + q) * per_position + m * per_row]);
    y[i * {image} + (long long)m * {channel} + (long long)({text.linear(g.target, target)}) * {position}]
        = narrow<{C_TYPES[g.dtype]}>(v{" + widen(bias[m])" if bias else ""});"""
    c = C_TYPES[g.dtype]
    parameters = f"const {C_TYPES[source]}* x, const {c}* bias, {c}* y, long long size, long long per_position"
    return Kernel(f"place_{g.dtype}", f"{parameters}, long long per_row", body)


def _write(g: Gather | Weigh, source: Buffer, target: Buffer, images: int, strides: tuple[int, int, int]) -> Call:
    """The columns of some images; `strides`: elements from one image, term and position to the next."""
    terms, count = math.prod(g.taps) * g.channels, math.prod(g.count)
    channels = g.group * g.channels
    width = 16 // source.type.numpy.itemsize
    packs = (g.channels % width == 0 and channels % width == 0) if g.last else count % width == 0
    at = (source.address, target.address) if g.last else (target.address,)
    if not packs or any(a % 16 for a in at) or any(s % width and s != 1 for s in strides):
        width = 1
    units = images * terms * count // width
    return columns(g, width, few=units < 1 << 31)(units, source, target, units, *strides)


def _part(v: Buffer, element: int) -> Buffer:
    return v.at(element, (v.size - element,))


class ColumnsPlan:
    """A convolution's output, or its input's gradient."""

    def __init__(self, c: Convolved, dtype: str) -> None:
        self.c, self.dtype = c, dtype
        self.item = TensorType(dtype, ()).nbytes
        forward = c.kind == "output"
        kernels = (
            [output(c.geometry, dtype, last=c.last)] if forward else list(gradients(c.geometry, dtype, last=c.last))
        )
        self.nothing = any(not g.terms for g in kernels)
        self.gathers = [g for g in kernels if g.terms]
        #: results of one image and row are written where they belong by the product itself
        self.direct = [g.plain and (c.last or g.positions % 8 == 0) for g in self.gathers]
        self.between = wide(dtype) if c.bias else dtype
        results = [0 if d else self.item * g.rows * g.positions for g, d in zip(self.gathers, self.direct, strict=True)]
        most = max(self._image(g) + r for g, r in zip(self.gathers, results, strict=True))
        self.images = min(c.geometry.batch, max(_SOME // most, 1))

    def _image(self, g: Gather) -> int:
        """Bytes of the columns of one image."""
        return self.item * (_even(g.terms) * g.positions if self.c.last else g.terms * g.positions)

    @property
    def fits(self) -> bool:
        """Whether the columns of one image are not too many."""
        return max(map(self._image, self.gathers)) <= _MOST

    @property
    def scratch(self) -> tuple[TensorType, ...]:
        """Packed weights, columns, results that are not in their place."""
        packed = max(g.group * g.terms * _even(g.rows) for g in self.gathers)
        cols = [_even(g.terms) * _even(self.images * g.positions) for g in self.gathers]
        apart = [_even(self.images * g.positions) * _even(g.rows)
                 for g, direct in zip(self.gathers, self.direct, strict=True) if not direct]  # fmt: skip
        types = [TensorType(self.dtype, (packed,)), TensorType(self.dtype, (max(cols),))]
        return (*types, *([TensorType(self.between, (max(apart),))] if apart else []))

    def bind(self, x: Buffer, w: Buffer, y: Buffer, bias: Buffer | None, scratch: Sequence[Buffer]) -> list[Call]:
        """For each remainder, the images of a part, and the groups: columns, a product, results to their places."""
        source, out = (x, y) if self.c.kind == "output" else (y, x)
        calls: list[Call] = [Fill(out)] if self.nothing and bias is None else []
        if bias is not None and (self.nothing or any(self.direct)):
            calls += spread_bias(bias, out, last=self.c.last)
        for g, direct in zip(self.gathers, self.direct, strict=True):
            packed = scratch[0].at(0, (g.group * g.terms * _even(g.rows),))
            calls.append(pack(g, self.c.kind, w, packed, g.terms, _even(g.rows)))
            for first in range(0, self.c.geometry.batch, self.images):
                count = min(self.images, self.c.geometry.batch - first)
                for group in range(g.group):
                    calls += self._some(g, group, (first, count), (packed, source, out, bias), scratch, direct=direct)
        return calls

    def _some(
        self, g: Gather, group: int, images: tuple[int, int], given: tuple[Buffer, Buffer, Buffer, Buffer | None],
        scratch: Sequence[Buffer], *, direct: bool,
    ) -> list[Call]:  # fmt: skip
        """One group of some images."""
        (first, count), (packed, source, out, bias), cols = images, given, scratch[1]
        image, channel, _ = text.strides(g.source, g.group * g.channels, g.last)
        to, to_channel, _ = text.strides(g.target, g.group * g.rows, g.last)
        rows, q, k, lead = g.rows, g.positions, g.terms, _even(g.rows)
        weights = packed.at(group * k * lead, (k * lead,))
        from_ = _part(source, first * image + group * g.channels * channel)
        target = _part(out, first * to + group * rows * to_channel)
        beta = 1.0 if bias is not None and direct else 0.0
        if g.last:
            steps = (q * _even(k), 1, _even(k))
            c, ldc = (target, g.group * rows) if direct else (scratch[2], lead)
            product = Product(cols, weights, c, count * q, rows, k, _even(k), lead, ldc, beta=beta)
        elif direct:
            steps = (k * q, q, 1)
            product = Product(weights, cols, target, rows, q, k, lead, q, q, ta=True, beta=beta, batch=count,
                              strides=(0, k * q, to))  # fmt: skip
        else:
            whole = _even(count * q)
            steps = (q, whole, 1)
            product = Product(weights, cols, scratch[2], rows, count * q, k, lead, whole, whole, ta=True)
        calls: list[Call] = [_write(g, from_, cols, count, steps), product]
        if not direct:
            bias_part = None if bias is None else bias.at(group * rows, (rows,))
            size, apart = count * q * rows, (lead, 1) if g.last else (1, _even(count * q))
            kernel = placing(g, self.between, bias is not None)
            calls.append(kernel(size, scratch[2], bias_part, target, size, *apart))
        return calls


@functools.cache
def arranging(dtype: str) -> Kernel:
    """dw [rows, channels, taps] from the sums of (tap, channel), rows `lead` apart."""
    body = f"""    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    int t = (int)(i % taps);
    long long rest = i / taps;
    y[i] = narrow<{C_TYPES[dtype]}>(x[rest / channels * lead + t * channels + rest % channels]);"""
    parameters = f"const {COMPUTE[dtype]}* x, {C_TYPES[dtype]}* y, long long size, int taps, int channels, int lead"
    return Kernel(f"arrange_{dtype}", parameters, body)


class ColumnsWeighPlan:
    """A weight's gradient: float32 sums of (tap, channel), to which the images of a part are added at a time."""

    def __init__(self, c: Convolved, dtype: str) -> None:
        self.c, self.dtype, self.g = c, dtype, weigh(c.geometry, dtype, last=c.last)
        self.terms, self.positions = self.g.columns, self.g.positions
        each = TensorType(dtype, ()).nbytes * (_even(self.terms) + (0 if c.last else self.g.rows)) * self.positions
        self.fits = each <= _MOST
        self.images = min(c.geometry.batch, max(_SOME // each, 1))

    @property
    def scratch(self) -> tuple[TensorType, ...]:
        """Columns, sums; dy's images beside each other."""
        g, whole = self.g, _even(self.images * self.positions)
        types = [TensorType(self.dtype, (_even(self.terms) * whole,))]
        types.append(TensorType(wide(self.dtype), (g.group, g.rows, _even(self.terms))))
        return (*types, *([] if g.last else [TensorType(self.dtype, (g.rows * whole,))]))

    def bind(self, x: Buffer, w: Buffer, y: Buffer, bias: Buffer | None, scratch: Sequence[Buffer]) -> list[Call]:
        """Columns and a product for each part and group; then the order of the weight."""
        g, calls, batch = self.g, [], self.c.geometry.batch
        for first in range(0, batch, self.images):
            count = min(self.images, batch - first)
            for group in range(g.group):
                calls += self._some(group, first, count, x, y, scratch)
        taps, lead = math.prod(g.taps), _even(self.terms)
        calls.append(arranging(self.dtype)(w.size, scratch[1], w, w.size, taps, g.channels, lead))
        return calls

    def _some(
        self, group: int, first: int, count: int, x: Buffer, y: Buffer, scratch: Sequence[Buffer]
    ) -> list[Call]:  # fmt: skip
        g, k, q = self.g, self.terms, self.positions
        image, channel, _ = text.strides(g.source, g.group * g.channels, g.last)
        to, to_channel, _ = text.strides(g.count, g.group * g.rows, g.last)
        from_ = _part(x, first * image + group * g.channels * channel)
        dy = _part(y, first * to + group * g.rows * to_channel)
        sums, cols, lead = scratch[1].at(group * g.rows * _even(k), (g.rows, _even(k))), scratch[0], _even(k)
        beta = 1.0 if first else 0.0
        if g.last:
            write = _write(g, from_, cols, count, (q * lead, 1, lead))
            return [
                write,
                Product(dy, cols, sums, g.rows, k, count * q, g.group * g.rows, lead, lead, ta=True, beta=beta),
            ]
        whole, item = _even(count * q), dy.type.numpy.itemsize
        images = [(dy.address + i * to * item, scratch[2].address + i * q * item) for i in range(count)]
        return [
            _write(g, from_, cols, count, (q, whole, 1)),
            *copy_rows([Rows(*at, g.rows, q, q, whole) for at in images], item),
            Product(scratch[2], cols, sums, g.rows, k, count * q, whole, whole, lead, tb=True, beta=beta),
        ]


def by_columns(c: Convolved, dtype: str, *, tf32: bool) -> ColumnsPlan | ColumnsWeighPlan | None:
    """The plan for a convolution of halves (or of float32 that may be rounded to TF32) with as many rows and terms as
    pay; None otherwise."""
    geo = c.geometry
    least = min(geo.mg, geo.cg) if c.kind == "input" else geo.mg
    if dtype not in ("f16", "bf16", *(("f32",) if tf32 else ())):
        return None
    if geo.group > _GROUPS or least < _ROWS or geo.rows < _TERMS:
        return None
    plan = (ColumnsWeighPlan if c.kind == "weight" else ColumnsPlan)(c, dtype)
    return plan if plan.fits else None
