"""Resize and its gradient: one launch for each resized axis; weights are computed in the kernel.

The arithmetic of coordinates is that of `ops/resize_maps`: float32 for `nearest`, whose ties depend on it, float64
else.  Gradients are gathered: coordinates grow with the position, so that those who read an element are neighbours.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ....language.ir import Operator
from ....language.types import TensorType, present
from ....ops.vision.resize import Interpolation
from ....ops.vision.resize_maps import TIE, Span
from ..code.parts import WIDE, division, divisor
from ..code.strided import copy
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Fill, Kernel
from ..families import Buffers, Family, family

#: rows of a thread, which share its weights
_ROWS = 4
#: where a position lies in the input; s: the scale, from, to, last: of the part that is resized; K: coordinates' type
_COORDINATES = {
    "half_pixel": "(x + K(0.5)) / s - K(0.5)",
    "pytorch_half_pixel": "out > 1 ? (x + K(0.5)) / s - K(0.5) : K(0)",
    "align_corners": "out > 1 ? x * (K(size - 1) / K(out - 1)) : K(0)",
    "asymmetric": "x / s",
    "half_pixel_symmetric": "K(size / 2.0) * (1 - K(out) / (s * K(size))) + ((x + K(0.5)) / s - K(0.5))",
    "tf_half_pixel_for_nn": "(x + K(0.5)) / s",
    "tf_crop_and_resize": "fmin(fmax(out > 1 ? from * last + x * ((to - from) * last / K(out - 1))"
    " : K(0.5) * (from + to) * last, K(-1)), K(size))",
}
_NEAREST = {
    "round_prefer_floor": "ceilf(tied(at) - 0.5f)",
    "round_prefer_ceil": "floorf(tied(at) + 0.5f)",
    "floor": "floorf(at)",
    "ceil": "ceilf(at)",
}
_CUBIC = "d <= 1 ? ((a + 2) * d - (a + 3)) * d * d + 1 : d < 2 ? ((a * d - 5 * a) * d + 8 * a) * d - 4 * a : 0.0"


@dataclass(frozen=True)
class Rule:
    """The parameters of the text; `scaled`: weights are divided by their sum."""

    mode: str
    coordinates: str
    nearest: str
    exclude: bool
    scaled: bool

    @property
    def before(self) -> str:
        """Coordinates, weights, and the first position whose lowest element is at least `v`."""
        kind, nearest = ("float", True) if self.mode == "nearest" else ("double", False)
        low = f"min(max((int){_NEAREST[self.nearest]}, 0), size - 1)" if nearest else "(int)floor(at)"
        crop = self.coordinates == "tf_crop_and_resize"
        named = ", from = (K)span.start, to = (K)span.end, last = K(size - 1)" if crop else ", s = (K)span.scale"
        return f"""
typedef {kind} Kind;
struct Span {{ double scale, start, end; }};
template <class K> DEVICE K place(int position, int size, int out, Span span)
{{
    const K x = (K)position{named};
    return {_COORDINATES[self.coordinates]};
}}
DEVICE float tied(float at)
{{
    const float tie = floorf(at) + 0.5f;
    return fabsf(at - tie) <= {TIE}f * fabsf(tie) ? tie : at;
}}
DEVICE int lowest(int position, int size, int out, Span span)
{{
    const Kind at = place<Kind>(position, size, out, span);
    return {low};
}}
DEVICE int from_where(int v, int size, int out, Span span)
{{
    int first = 0, last = out;
    while (first < last) {{
        const int middle = (first + last) / 2;
        if (lowest(middle, size, out, span) >= v) last = middle;
        else first = middle + 1;
    }}
    return first;
}}
// whether tf_crop_and_resize has a position outside of the input
DEVICE bool away(int position, int size, int out, Span span)
{{
    const double at = place<double>(position, size, out, span);
    return {"at < 0 || at > size - 1" if crop else "false"};
}}
{"" if nearest else self.weight}"""

    @property
    def weight(self) -> str:
        """The weight of one element."""
        weight = "d < 1 ? 1 - d : 0.0" if self.mode == "linear" else _CUBIC
        inside = "    if (low + t < 0 || low + t >= size) return 0;\n" if self.exclude else ""
        return f"""
// of the element t behind the lowest, r behind which the position is
DEVICE double weight(int t, double r, int low, int size, double shrink, double a)
{{
{inside}    const double d = fabs(t - r) * shrink;
    return {weight};
}}
"""

    @property
    def total(self) -> str:
        """The sum of a position's weights."""
        if not (self.exclude or self.scaled):
            return "const double total = 1;"
        return "double total = 0; for (int t = 1 - reach; t <= reach; t++) total += weight(t, r, low, size, shrink, a);"


_ADD = """#pragma unroll
            for (int l = 0; l < ROWS; l++)
                if (l < here) s[l] += w * (A)widen(x[((top + l) * (long long)far + {0}) * inner.by + c]);"""


def _forward(rule: Rule) -> str:
    if rule.mode == "nearest":
        return """    const int from = lowest(p, size, out, span);
    #pragma unroll
    for (int l = 0; l < ROWS; l++)
        if (l < here) y[at + l * step] = x[((top + l) * (long long)far + from) * inner.by + c];
"""
    return f"""    const double z = place<double>(p, size, out, span), r = z - floor(z);
    const int low = (int)floor(z);
    {rule.total}
    A s[ROWS] = {{}};
    for (int t = 1 - reach; t <= reach; t++) {{
            const A w = (A)(weight(t, r, low, size, shrink, a) / total);
            const int from = min(max(low + t, 0), size - 1);
            {_ADD.format("from")}
    }}
"""


def _backward(rule: Rule) -> str:
    if rule.mode == "nearest":
        return f"""    const int first = from_where(p, size, out, span), stop = from_where(p + 1, size, out, span);
    A s[ROWS] = {{}};
    const A w = 1;
    for (int o = first; o < stop; o++) {{
            if (away(o, size, out, span)) continue;
            {_ADD.format("o")}
    }}
"""
    return f"""    const int first = p == 0 ? 0 : from_where(p - reach, size, out, span);
    const int stop = p == size - 1 ? out : from_where(p + reach, size, out, span);
    A s[ROWS] = {{}};
    for (int o = first; o < stop; o++) {{
            if (away(o, size, out, span)) continue;
            const double z = place<double>(o, size, out, span), r = z - floor(z);
            const int low = (int)floor(z);
            {rule.total}
            double mine = 0;
            for (int t = 1 - reach; t <= reach; t++)
                if (min(max(low + t, 0), size - 1) == p) mine += weight(t, r, low, size, shrink, a);
            const A w = (A)(mine / total);
            {_ADD.format("o")}
    }}
"""


@functools.cache
def along(rule: Rule, source: str, target: str, *, back: bool, wide: bool) -> Kernel:
    """One axis of [rows, far, inner] resized to [rows, near, inner]; `back`: the gradient of that."""
    size, out = ("(int)near.by", "far") if back else ("far", "(int)near.by")
    moves = rule.mode == "nearest" and not back
    body = f"""    {"" if moves else f"typedef {COMPUTE[target]} A;"}
    enum {{ ROWS = {_ROWS} }};
    const long long me = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (me >= work) return;
    const Index e = (Index)me, q = over(e, inner), c = e - q * (Index)inner.by, group = over(q, near);
    const int p = (int)(q - group * (Index)near.by), size = {size}, out = {out};
    const long long top = (long long)group * ROWS, step = (long long)near.by * inner.by;
    const long long at = top * step + p * (long long)inner.by + c;
    const int here = (int)min((long long)ROWS, rows - top);
"""
    body += _backward(rule) if back else _forward(rule)
    if not moves:
        body += f"""    #pragma unroll
    for (int l = 0; l < ROWS; l++)
        if (l < here) y[at + l * step] = narrow<{C_TYPES[target]}>(s[l]);
"""
    parameters = (
        f"const {C_TYPES[source]}* x, {C_TYPES[target]}* y, long long work, long long rows, Divisor inner, "
        "Divisor near, int far, Span span, int reach, double shrink, double a"
    )
    name = f"resize_{rule.mode}{'_back' if back else ''}_{source}_{target}{'_wide' if wide else ''}"
    return Kernel(name, parameters, body, division(wide=wide) + rule.before)


@functools.cache
def outside(rule: Rule, dtype: str) -> Kernel:
    """The same value in all of y [rows, out, inner] that is outside of the input along one axis."""
    c = C_TYPES[dtype]
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < work && away((int)(i / inner % out), size, out, span)) y[i] = narrow<{c}>(({COMPUTE[dtype]})value);
"""
    parameters = f"{c}* y, long long work, long long inner, int out, int size, Span span, double value"
    return Kernel(f"resize_outside_{dtype}", parameters, body, division(wide=False) + rule.before)


@family("Resize", "ResizeGrad")
class Resizing(Family):
    """Axis by axis."""

    def accepts(self, op: Operator) -> bool:
        """All types for `nearest`, else floats; gradients of parts that are not turned round."""
        rule = op.of(Interpolation)
        kinds = {v.dtype for v in (*op.reads(), *op.writes())}
        forward = rule.mode == "nearest" and rule.name == "Resize"
        there = kinds <= (set(C_TYPES) if forward else {"f16", "bf16", "f32", "f64"})
        n = len(rule.roi) // 2
        turned = rule.name == "ResizeGrad" and any(a > b for a, b in zip(rule.roi[:n], rule.roi[n:], strict=True))
        return there and not turned and min(rule.scales, default=1) > 0

    def _steps(self, op: Operator) -> Iterator[tuple[int, Span, tuple[int, ...], tuple[int, ...]]]:
        """(axis, what is done along it, shape before, shape after), in order."""
        rule = op.of(Interpolation)
        (x,), (y,) = ([v.shape for v in vs if v is not None] for vs in (op.inputs, op.outputs))
        back = rule.name == "ResizeGrad"
        maps = rule.maps(*((y, x) if back else (x, y)))
        now = tuple(x)
        for axis, span in reversed(maps) if back else maps:
            after = (*now[:axis], y[axis], *now[axis + 1 :])
            yield axis, span, now, after
            now = after

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Results between the axes; 16-bit floats as float32."""
        rule = op.of(Interpolation)
        t = next(iter(op.reads())).type
        wide = t.dtype in ("f16", "bf16") and (rule.mode != "nearest" or rule.name == "ResizeGrad")
        return tuple(TensorType("f32" if wide else t.dtype, s[3]) for s in list(self._steps(op))[:-1])

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y = present(ins[0], outs[0])
        steps = list(self._steps(op))
        if not steps or not x.size or not y.size:
            return copy(y, x) if x.size else [Fill(y)] if y.size else []
        stages = [x, *scratch, y]
        calls = [self._along(op.op, *s, a, b) for s, a, b in zip(steps, stages, stages[1:], strict=False)]
        if op.op.name == "Resize" and op.of(Interpolation).coordinate_transformation_mode == "tf_crop_and_resize":
            calls += [self._outside(op.op, axis, span, x.shape, y) for axis, span, _, _ in steps]
        return calls

    def _outside(self, op: Any, axis: int, span: Span, shape: Sequence[int], y: Buffer) -> Call:
        rule = Rule(op.mode, op.coordinate_transformation_mode, op.nearest_mode, exclude=False, scaled=False)
        sizes = math.prod(y.shape[axis + 1 :]), y.shape[axis], shape[axis]
        return outside(rule, y.dtype)(y.size, y, y.size, *sizes, (ctypes.c_double * 3)(*span), op.extrapolation_value)

    def _along(
        self, op: Any, axis: int, span: Span, before: Sequence[int], after: Sequence[int], x: Buffer, y: Buffer
    ) -> Call:
        shrink = min(span[0], 1.0) if op.antialias and op.mode != "nearest" else 1.0
        reach = math.ceil({"nearest": 0, "linear": 1, "cubic": 2}[op.mode] / shrink)
        rule = Rule(op.mode, op.coordinate_transformation_mode, op.nearest_mode, bool(op.exclude_outside), shrink < 1.0)
        rows, inner = math.prod(before[:axis]), math.prod(before[axis + 1 :])
        work = -(-rows // _ROWS) * after[axis] * inner
        wide = max(work, 1) >= WIDE
        k = along(rule, x.dtype, y.dtype, back=op.name == "ResizeGrad", wide=wide)
        sizes = (divisor(inner, wide=wide), divisor(after[axis], wide=wide), before[axis])
        return k(work, x, y, work, rows, *sizes, (ctypes.c_double * 3)(*span), reach, shrink, op.cubic_coeff_a)
