"""Depthwise convolutions: one input channel per group.  A thread computes a few neighbours along one axis.

What lies under their taps is read once a line of taps.  With channels second the neighbours are above each other, so
that threads beside each other read and write what is beside each other: the axes are `turned`, the last one stands
before the one that the neighbours lie along.  With channels last threads have channels beside each other, and
neighbours follow along the last axis.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ....language.types import TensorType
from ...shared.convolved import Convolved
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Fill, Kernel
from . import text
from .gathered import ENOUGH, PARTIAL, Gather, Three, Weigh, gradients, inside, output, weigh
from .text import filled
from .tiles import wide

G = TypeVar("G", Gather, Weigh)
#: neighbours of a thread, and taps of a weight's gradient at most
_SIDE, _TAPS = 4, 64


@dataclass(frozen=True)
class _Row:
    """What is under a line of taps of a thread's neighbours: offsets along axis 2, and what reads them.

    The line begins at (i0, i1, s2), `from` points there; it becomes r[offset][channel].
    """

    offsets: list[int]
    lines: list[str]
    scale: int
    delta: int

    def place(self, side: int, tap: int) -> int:
        """Which offset a tap of a neighbour sees."""
        return self.offsets.index(side * self.scale + tap * self.delta)


def _pitch(size: Three, turned: bool) -> Three:
    """Positions from one coordinate to the next along each axis."""
    return (size[1] * size[2], 1, size[1]) if turned else (size[1] * size[2], size[2], 1)


def _at(names: Sequence[str], pitch: Three) -> str:
    return " + ".join(f"({n}) * {p}" for n, p in zip(names, pitch, strict=True))


def turned_axes(g: G) -> G:
    """The geometry with its last two axes exchanged."""
    swapped: dict[str, Any] = {}
    for f in dataclasses.fields(g):
        v = getattr(g, f.name)
        if isinstance(v, tuple):
            swapped[f.name] = (v[0], v[2], v[1])
    return dataclasses.replace(g, **swapped)


def _turns(g: Gather | Weigh) -> bool:
    """Whether neighbours are above each other."""
    return not g.last and g.count[1] > 1


def _under(g: Gather | Weigh, channels: int, turned: bool) -> _Row:
    step = _pitch(g.source, turned)[2]
    offsets = sorted({v * g.scale[2] + t * g.delta[2] for v in range(_SIDE) for t in range(max(g.taps[2], 1))})
    checked = [i for i in (0, 1) if not inside(g.source[i], g.count[i], max(g.taps[i], 1), *_line(g, i))]
    row = " && ".join(f"(unsigned)i{i} < {g.source[i]}u" for i in checked) or "true"
    whole = -(-g.count[2] // _SIDE) * _SIDE
    guarded = not inside(g.source[2], whole, max(g.taps[2], 1), *_line(g, 2))
    lines = [f"const bool row = {row};"]
    for n, o in enumerate(offsets):
        there = f"row && (unsigned)(s2 + {o}) < {g.source[2]}u" if guarded else "row"
        if channels == 1:
            lines.append(f"r[{n}][0] = {there} ? widen(from[{o * step} * SOURCE_POSITION]) : 0;")
        else:
            read = f"*(const Pack<T, {channels}>*)(from + {o * step} * SOURCE_POSITION)"
            lines += [f"if ({there}) {{", f"    const Pack<T, {channels}> e = {read};",
                      f"    for (int l = 0; l < {channels}; l++) r[{n}][l] = widen(e.of[l]);", "} else {",
                      f"    for (int l = 0; l < {channels}; l++) r[{n}][l] = 0;", "}"]  # fmt: skip
    return _Row(offsets, lines, g.scale[2], g.delta[2])


def _axes(g: Gather | Weigh, turned: bool) -> dict[str, object]:
    """Words of the texts for each axis."""
    order = ["const int q2 = (int)(i % UNITS) * SIDE; i /= UNITS;", f"const int q1 = (int)(i % {g.count[1]}); "
             f"i /= {g.count[1]};"]  # fmt: skip
    values: dict[str, object] = {"ORDER": "\n    ".join(order[::-1] if turned else order)}
    values["FROM"] = _at(["i0", "i1", "s2"], _pitch(g.source, turned))
    for i in range(3):
        values |= {f"N{i}": g.count[i], f"S{i}": f"{g.scale[i]} + {g.origin[i]}", f"D{i}": g.delta[i]}
        values[f"T{i}"] = g.taps[i] if i < 2 or g.taps[2] else 1
    return values


def _line(g: Gather | Weigh, axis: int) -> tuple[int, int, int]:
    return g.scale[axis], g.origin[axis], g.delta[axis]


def _head(g: Gather | Weigh, channels: int, taps: int) -> str:
    rows = g.rows
    values = (
        ("SOURCE", text.strides(g.source, g.group * g.channels, g.last)),
        ("TARGET", text.strides(g.target if isinstance(g, Gather) else g.count, g.group * rows, g.last)),
    )
    head = f"    typedef {C_TYPES[g.dtype]} T;\n    typedef {COMPUTE[g.dtype]} A;\n"
    head += text.constants(SIDE=_SIDE, VC=channels, G=g.group, M=rows, C=g.channels, N=g.count[2], TAPS=taps,
                           UNITS=-(-g.count[2] // _SIDE))  # fmt: skip
    return head + "    const long long " + ", ".join(
        f"{k}_{n} = {v}" for k, vs in values for n, v in zip(("IMAGE", "CHANNEL", "POSITION"), vs, strict=True)
    ) + ";\n"  # fmt: skip


def _pad(lines: Sequence[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines)


_GATHER = """    @I i = (@I)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= units) return;
    int channel = 0;
    @LAST
    @ORDER
    const int q0 = (int)(i % @N0); i /= @N0;
    @SECOND
    const int group = channel / M;
    const int s0 = q0 * @S0, s1 = q1 * @S1, s2 = q2 * @S2;
    A sum[SIDE][VC], r[@READ][VC];
    for (int v = 0; v < SIDE; v++)
        for (int l = 0; l < VC; l++) sum[v][l] = @ADD;
    for (int c = 0; c < C; c++) {
        const T* image = x + i * SOURCE_IMAGE + (long long)(group * C + c) * SOURCE_CHANNEL;
        const T* weight = w + ((long long)channel * C + c) * TAPS;
        #pragma unroll
        for (int t0 = 0; t0 < @T0; t0++)
            #pragma unroll
            for (int t1 = 0; t1 < @T1; t1++) {
                const int i0 = s0 + t0 * @D0, i1 = s1 + t1 * @D1;
                A f[@T2][VC];
                for (int t2 = 0; t2 < @T2; t2++)
                    for (int l = 0; l < VC; l++) f[t2][l] = widen(weight[l * TAPS + @TAP]);
                const T* from = image + (long long)(@FROM) * SOURCE_POSITION;
@MULTIPLY
            }
    }
    T* to = y + i * TARGET_IMAGE + (long long)channel * TARGET_CHANNEL + (long long)(@TO) * TARGET_POSITION;
"""


@functools.cache
def gathering(g: Gather, *, bias: bool, channels: int, pack: bool, few: bool, turned: bool = False) -> Kernel:
    """(source, weights, bias, result, units): `channels` of a thread; `pack`: neighbours are written at once.

    `few`: 32 bits count the units.
    """
    read = _under(g, channels, turned)
    area, pitch = _pitch(g.kernel, turned), _pitch(g.target, turned)
    taps = zip(g.first, g.every, area, strict=True)
    multiply = [
        f"for (int l = 0; l < VC; l++) sum[{v}][l] = fma_of(r[{read.place(v, t)}][l], f[{t}][l], sum[{v}][l]);"
        for t in range(g.taps[2])
        for v in range(_SIDE)
    ]
    order = "channel = (int)(i % (G * M / VC)) * VC; i /= G * M / VC;"
    body = _head(g, channels, math.prod(g.kernel)) + filled(_GATHER, {
        "MULTIPLY": _pad([*read.lines, *multiply], 16), "LAST": order if g.last else "",
        "SECOND": "" if g.last else order, "I": "unsigned" if few else "long long", **_axes(g, turned),
        "READ": len(read.offsets), "ADD": "(A)widen(bias[channel + l])" if bias else "0",
        "TAP": " + ".join(f"({f} + t{a} * {e}) * {k}" for a, (f, e, k) in enumerate(taps)),
        "TO": _at([f"q{i} * {g.step[i]} + {g.base[i]}" for i in range(3)], pitch),
    })  # fmt: skip
    body += _WRITES["channels" if channels > 1 else "pack" if pack else "single"].replace(
        "@STEP", str(g.step[2] * pitch[2])
    )
    c = C_TYPES[g.dtype]
    return Kernel(f"depthwise_{g.dtype}", f"const {c}* x, const {c}* w, const {c}* bias, {c}* y, long long units", body)


_WRITES = {
    "channels": """    for (int v = 0; v < SIDE && q2 + v < N; v++) {
        Pack<T, VC> o;
        for (int l = 0; l < VC; l++) o.of[l] = narrow<T>(sum[v][l]);
        *(Pack<T, VC>*)(to + v * @STEP * TARGET_POSITION) = o;
    }""",
    "pack": """    Pack<T, SIDE> o;
    for (int v = 0; v < SIDE; v++) o.of[v] = narrow<T>(sum[v][0]);
    *(Pack<T, SIDE>*)to = o;""",
    "single": """    #pragma unroll
    for (int v = 0; v < SIDE; v++)
        if (q2 + v < N) to[v * @STEP * TARGET_POSITION] = narrow<T>(sum[v][0]);""",
}


class DepthwisePlan:
    """A depthwise convolution's output, or its input's gradient."""

    def __init__(self, c: Convolved, dtype: str) -> None:
        self.c, self.dtype = c, dtype
        forward = c.kind == "output"
        kernels = (
            [output(c.geometry, dtype, last=c.last)] if forward else list(gradients(c.geometry, dtype, last=c.last))
        )
        # one input channel a group: of the output's rows, or of the gradient's channels, there is one
        self.nothing = any(not g.terms for g in kernels)
        self.gathers = [g for g in kernels if g.terms or c.bias]

    scratch: tuple[TensorType, ...] = ()

    def bind(self, x: Buffer, w: Buffer, y: Buffer, bias: Buffer | None, scratch: Sequence[Buffer]) -> list[Call]:
        """A launch for each."""
        source, out = (x, y) if self.c.kind == "output" else (y, x)
        calls: list[Call] = [Fill(out)] if self.nothing and bias is None else []
        item = out.type.numpy.itemsize
        for each in self.gathers:
            turned = _turns(each)
            g = turned_axes(each) if turned else each
            even = all(b.address % (4 * item) == 0 for b in (source, out))
            channels = 4 if g.last and g.rows == g.channels == 1 and g.group % 4 == 0 and even else 1
            pack = not g.last and not turned and g.plain and even and g.count[2] % _SIDE == 0
            units = self.c.geometry.batch * math.prod(g.count[:2]) * -(-g.count[2] // _SIDE) * g.group * g.rows
            few = units < 1 << 31
            kernel = gathering(g, bias=bias is not None, channels=channels, pack=pack, few=few, turned=turned)
            calls.append(kernel(units // channels, source, w, bias, out, units // channels))
        return calls


# -- the weight's gradient --------------------------------------------------------------------------------------------


_WEIGH = """    const int channel = @CHANNEL, group = channel / M;
    A sum[@T0 * @T1][@T2], r[@READ][1], d[SIDE];
    for (int t = 0; t < @T0 * @T1; t++)
        for (int l = 0; l < @T2; l++) sum[t][l] = 0;
    const long long begin = units * blockIdx.y / gridDim.y, end = units * (blockIdx.y + 1) / gridDim.y;
    for (long long u = begin + (@FIRST); u < end; u += @BY) {
        if (channel >= G * M) break;
        @I i = (@I)u;
        @ORDER
        const int q0 = (int)(i % @N0); i /= @N0;
        const int s0 = q0 * @S0, s1 = q1 * @S1, s2 = q2 * @S2;
        const T* dys = dy + i * TARGET_IMAGE + (long long)channel * TARGET_CHANNEL
                     + (long long)(@TO) * TARGET_POSITION;
        #pragma unroll
        for (int v = 0; v < SIDE; v++) d[v] = q2 + v < N ? widen(dys[v * @STEP * TARGET_POSITION]) : 0;
        const T* image = x + i * SOURCE_IMAGE + (long long)group * SOURCE_CHANNEL;
        #pragma unroll
        for (int t = 0; t < @T0 * @T1; t++) {
            const int i0 = s0 + t / @T1 * @D0, i1 = s1 + t % @T1 * @D1;
            const T* from = image + (long long)(@FROM) * SOURCE_POSITION;
@MULTIPLY
        }
    }
    @O* to = dw + ((long long)blockIdx.y * G * M + channel) * TAPS;
"""


@functools.cache
def weighing(g: Weigh, result: str, *, few: bool, turned: bool = False) -> Kernel:
    """(x, dy, dw or parts, units): sums of all taps of one output channel over a part of the images and rows.

    A block has one channel; channels last, 32 of them, a warp every fourth unit.
    """
    read, taps, pitch = _under(g, 1, turned), math.prod(g.taps), _pitch(g.count, turned)
    _, a, b = g.taps
    place = f"sum[t / {a * b} * {a} + t % {a}][t / {a} % {b}]" if turned else f"sum[t / {b}][t % {b}]"
    multiply = [
        f"sum[t][{t}] = fma_of(r[{read.place(v, t)}][0], d[{v}], sum[t][{t}]);"
        for t in range(g.taps[2])
        for v in range(_SIDE)
    ]
    last = ("blockIdx.x * 32 + (threadIdx.x & 31)", "threadIdx.x >> 5", "blockDim.x >> 5")
    channel, first, by = last if g.last else ("blockIdx.x", "threadIdx.x", "blockDim.x")
    body = filled(_WEIGH + (_TOGETHER_LAST if g.last else _TOGETHER), {
        "MULTIPLY": _pad([*read.lines, *multiply], 12), "CHANNEL": channel, "FIRST": first, "BY": by,
        "READ": len(read.offsets), **_axes(g, turned), "TO": _at(["q0", "q1", "q2"], pitch), "STEP": pitch[2],
        "SUM": place, "I": "unsigned" if few else "long long",
        "O": C_TYPES[result],
    })  # fmt: skip
    c = C_TYPES[g.dtype]
    return Kernel(f"depthwise_weight_{g.dtype}", f"const {c}* x, const {c}* dy, {C_TYPES[result]}* dw, long long units",
                  _head(g, 1, taps) + body, threads=_THREADS)  # fmt: skip


_THREADS = 128
_TOGETHER = """    #pragma unroll
    for (int t = 0; t < TAPS; t++) {
        A total = block_reduce(@SUM, Plus());
        if (threadIdx.x == 0) to[t] = narrow<@O>(total);
    }"""
_TOGETHER_LAST = """    __shared__ A parts[4][32];
    #pragma unroll
    for (int t = 0; t < TAPS; t++) {
        __syncthreads();
        parts[threadIdx.x >> 5][threadIdx.x & 31] = @SUM;
        __syncthreads();
        if (threadIdx.x < 32 && channel < G * M)
            to[t] = narrow<@O>(parts[0][threadIdx.x] + parts[1][threadIdx.x]
                               + (parts[2][threadIdx.x] + parts[3][threadIdx.x]));
    }"""


class DepthwiseWeighPlan:
    """A depthwise weight's gradient: parts, then their sum."""

    def __init__(self, c: Convolved, dtype: str) -> None:
        kernel = weigh(c.geometry, dtype, last=c.last)
        self.dtype, self.turned = dtype, _turns(kernel)
        self.g = turned_axes(kernel) if self.turned else kernel
        self.size = math.prod(c.w)
        self.units = c.geometry.batch * math.prod(self.g.count[:2]) * -(-self.g.count[2] // _SIDE)
        channels = self.g.group * self.g.rows
        self.blocks = -(-channels // 32) if c.last else channels
        each = _THREADS // 32 if c.last else _THREADS
        nbytes = TensorType(wide(dtype), (self.size,)).nbytes
        most = max(self.units // (4 * each), 1), max(PARTIAL // nbytes, 1), 65535
        self.parts = min(max(-(-2 * ENOUGH // self.blocks), self.units // (512 * each), 1), *most)

    @property
    def scratch(self) -> tuple[TensorType, ...]:
        """The parts."""
        return (TensorType(wide(self.dtype), (self.parts, self.size)),) if self.parts > 1 else ()

    def bind(self, x: Buffer, w: Buffer, y: Buffer, bias: Buffer | None, scratch: Sequence[Buffer]) -> list[Call]:
        """One launch, and one that adds up."""
        target = scratch[0] if self.parts > 1 else w
        calls: list[Call] = [
            weighing(self.g, target.dtype, few=self.units < 1 << 31, turned=self.turned).blocks(
                self.blocks, self.parts, args=(x, y, target, self.units)
            )
        ]
        if self.parts > 1:
            calls.append(text.adding(self.dtype, False)(self.size, target, w, self.size, self.parts))
        return calls


def depthwise(c: Convolved, dtype: str) -> DepthwisePlan | DepthwiseWeighPlan | None:
    """The plan of a depthwise convolution; None where it is none."""
    if c.geometry.cg != 1 or c.geometry.group == 1:
        return None
    if c.kind != "weight":
        return DepthwisePlan(c, dtype)
    return DepthwiseWeighPlan(c, dtype) if c.geometry.window.taps <= _TAPS else None
