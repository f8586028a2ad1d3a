"""GridSample and its gradients (recompute/ops/vision/grid_sample.py): taps and weights are made where they are used.

A thread has a place of the grid, or for the gradient of x, where places meet, a channel of an image: it adds in the
order of the places.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import FLOATS, present
from ....ops.vision.grid_sample import taps
from ..code.expressions import literal
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Fill, Kernel
from ..families import Buffers, Family, family

#: threads of a block, each with its taps in shared memory
_THREADS = 128
#: how indices outside of [0, n) come inside, by (padding, whether corners are aligned); else they are clipped
_INSIDE = {
    ("zeros", 0): "if (q < 0 || q >= n) w[j * THREADS] = v[j * THREADS] = 0;",
    ("reflection", 0): "q = ((q % (2 * n) + 2 * n) % (2 * n)) * 2 - (2 * n - 1);\n"
    "        q = (2 * n - 1 - (q < 0 ? -q : q)) / 2;",
    ("reflection", 1): "if (n > 1) { q -= n - 1; q = (q % (2 * n - 2) + 2 * n - 2) % (2 * n - 2) - (n - 1); }\n"
    "        q = q < 0 ? -q : q;",
}  # fmt: skip
_REFLECT = """    const A span = high - low;
    if (span == 0) p = slope = 0;
    else {
        p -= low;
        if (p < 0) slope = -slope;
        p = fabs(p);
        const A rest = fmod(p, span), times = rint((p - rest) / span);
        p = rest;
        if (fmod(times, (A)2) != 0) { slope = -slope; p = span - p; }
        p += low;
    }
"""


def _polynomial(coefficients: Sequence[float], dtype: str, order: int) -> str:
    """Horner's rule in t, times slope ^ order."""
    text = literal(coefficients[0], dtype)
    for c in coefficients[1:]:
        text = f"({text} * t + {literal(c, dtype)})"
    return text + " * slope" * order


def _axis(dtype: str, mode: str, padding: str, align: int, order: int, number: int) -> str:
    """The device function of an axis: indices of its taps, weights, and weights with one more derivative."""
    cubic = mode == "cubic"
    wide = "f32" if COMPUTE[dtype] == "float" else "f64"
    lines = "" if padding != "reflection" or cubic else _REFLECT
    lines += "    if (!(fabs(p) < (A)2147483648.0)) p = -100;\n"
    if padding != "zeros" and not cubic:
        lines += "    if (p <= 0 || p >= n - 1) slope = 0;\n    p = p < 0 ? 0 : p > n - 1 ? (A)(n - 1) : p;\n"
    lines += f"    const A whole = {'rint' if mode == 'nearest' else 'floor'}(p);\n"
    lines += f"    const A t = {'0' if mode == 'nearest' else 'p - whole'};\n"
    more = taps(mode, order + 1)
    for j, (offset, weight) in enumerate(taps(mode, order)):
        lines += f"    at[{j} * THREADS] = (long long)whole + {offset};\n"
        lines += f"    w[{j} * THREADS] = {_polynomial(weight, wide, order)};\n"
        lines += f"    v[{j} * THREADS] = {_polynomial(more[j][1], wide, order + 1)};\n"
    key = padding, align if padding == "reflection" else 0
    inside = "" if padding == "reflection" and not cubic else _INSIDE.get(key, "")
    low, high = ("0", "n - 1") if align else ("(A)-0.5", "n - (A)0.5")
    return f"""
DEVICE void axis_{number}(A g, long long n, long long* at, A* w, A* v)
{{
    const A low = {low}, high = {high}, scale = (high - low) / 2;
    A p = (g + 1) * scale + low, slope = scale;
{lines}    for (int j = 0; j < TAPS; j++) {{
        long long q = at[j * THREADS];
        {inside}
        at[j * THREADS] = q < 0 ? 0 : q < n ? q : n - 1;
    }}
}}
"""


#: a thread's work at a position of the grid: its taps (`flat` and the weight of each combination) go through `EACH`
_PLACE = """    const int me = threadIdx.x;
    const T* g = grid + (image * places + place) * RANK;
    AXES
    for (int pick = 0; pick < COMBINED; pick++) {
        long long flat = 0, rest = pick, number[RANK];
        A weight = 1;
        for (int d = RANK - 1; d >= 0; d--) { number[d] = rest % TAPS; rest /= TAPS; }
        for (int d = 0; d < RANK; d++) {
            flat = flat * size[d] + at[d][number[d]][me];
            weight *= w[d][number[d]][me];
        }
        EACH
    }
"""
_FORWARD = """for (long long c = 0; c < channels; c++) {
            T& to = out[(image * channels + c) * places + place];
            const A part = widen(x[(image * channels + c) * pixels + flat]) * weight;
            to = narrow<T>(pick ? widen(to) + part : part);
        }"""
_BY_GRID = """A sum = 0;
        for (long long c = image * channels; c < (image + 1) * channels; c++)
            sum += widen(x[c * pixels + flat]) * widen(dy[c * places + place]);
        for (int axis = 0; axis < RANK; axis++) {
            A part = 1;
            for (int d = 0; d < RANK; d++) part *= d == axis ? v[d][number[d]][me] : w[d][number[d]][me];
            T& to = out[(image * places + place) * RANK + RANK - 1 - axis];
            to = narrow<T>(pick ? widen(to) + part * sum : part * sum);
        }"""
_BY_INPUT = """T& to = out[thread * pixels + flat];
        to = narrow<T>(widen(to) + widen(dy[thread * places + place]) * weight);"""


@functools.cache
def sampling(name: str, dtype: str, mode: str, padding: str, align: int, order: tuple[int, ...]) -> Kernel:
    """One of the three operators for an element type and its attributes, `order` for each axis."""
    rank, count = len(order), len(taps(mode, 0))
    before = f"typedef {C_TYPES[dtype]} T;\ntypedef {COMPUTE[dtype]} A;\n"
    before += f"enum {{ RANK = {rank}, TAPS = {count}, COMBINED = {count**rank}, THREADS = {_THREADS} }};\n"
    before += "".join(_axis(dtype, mode, padding, align, o, d) for d, o in enumerate(order))
    axes = ""
    for d in range(rank):
        rooms = ", ".join(f"&{room}[{d}][0][me]" for room in ("at", "w", "v"))
        axes += f"axis_{d}(widen(g[{rank - 1 - d}]), size[{d}], {rooms});\n    "
    each = {"GridSample": _FORWARD, "GridSampleGradGrid": _BY_GRID, "GridSampleGradInput": _BY_INPUT}[name]
    place = _PLACE.replace("AXES", axes.strip()).replace("EACH", each)
    sizes = ", ".join(f"size{d}" for d in range(rank))
    body = "    __shared__ long long at[RANK][TAPS][THREADS];\n"
    body += "    __shared__ A w[RANK][TAPS][THREADS], v[RANK][TAPS][THREADS];\n"
    body += "    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
    body += f"    if (thread >= threads) return;\n    const long long size[RANK] = {{{sizes}}};\n"
    if name == "GridSampleGradInput":
        body += "    const long long image = thread / channels;\n"
        body += f"    for (long long place = 0; place < places; place++) {{\n{place}    }}\n"
    else:
        body += f"    const long long image = thread / places, place = thread % places;\n{place}"
    parameters = "const T* x, const T* grid, const T* dy, T* out, long long threads, long long channels, "
    parameters += "long long places, long long pixels, " + ", ".join(f"long long size{d}" for d in range(rank))
    title = f"{name}_{dtype}_{mode}_{padding}_{align}_{'_'.join(map(str, order))}"
    return Kernel(title, parameters, body, before, _THREADS)


@family("GridSample", "GridSampleGradGrid", "GridSampleGradInput")
class Samplings(Family):
    """One launch."""

    takes = FLOATS

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule: Any = op.op
        (out,), name = present(outs[0]), rule.name
        x, grid, dy = (None, *ins[:2]) if name == "GridSampleGradInput" else ins[:3]
        assert grid is not None
        images, *places, rank = grid.shape
        shape = out.shape if x is None else x.shape
        count, channels = math.prod(places), shape[1]
        calls: list[Call] = [Fill(out)] if out.size and (x is None or not channels) else []
        threads = images * (channels if x is None else count)
        if not threads or not out.size or not count or not channels:
            return calls
        k = sampling(name, out.dtype, rule.mode, rule.padding_mode, rule.align_corners, rule.order or (0,) * rank)
        sizes = threads, channels, count, math.prod(shape[2:]), *shape[2:]
        return [*calls, k(threads, x, grid, dy, out, *sizes)]
