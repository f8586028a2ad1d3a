"""The gradient of edge, reflect and wrap padding: each element sums the gradients of all of its copies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....language.types import present
from ....ops.indexing.scatter import strides
from ....ops.shape.pad import PadGrad
from ..code.parts import WIDE, Coordinates, division, divisor, indented
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from ..families import Buffers, Family, family

if TYPE_CHECKING:
    from ....language.ir import Operator

#: the next place behind p (or the first, where p is -1) that shows element s of `size`
_NEXT = {
    "wrap": "return p < 0 ? (before + s) % size : p + size;",
    "edge": """if (p < 0) return s == 0 ? 0 : before + s;
    return p == before + s && s < size - 1 ? 1 << 30 : p + 1;""",
    "reflect": """const int period = max(2 * (size - 1), 1);
    const int a = (before + s) % period, b = ((before - s) % period + period) % period;
    if (p < 0) return min(a, b);
    return a != b && p % period == min(a, b) ? p + max(a, b) - min(a, b) : p + period - (max(a, b) - min(a, b));""",
}


@functools.cache
def folded(mode: str, axes: tuple[bool, ...], dtype: str, *, wide: bool) -> Kernel:
    """x from the padded y; `axes`: which are padded.  Borders are added from the last axis to the first, in order."""
    c, lines = C_TYPES[dtype], []
    moved = [i for i, padded in enumerate(axes) if padded]
    fixed = " + ".join(["0ll", *(f"c{i} * s{i}" for i, padded in enumerate(axes) if not padded)])
    for depth, i in enumerate(moved):
        pad = "    " * depth
        lines += [
            f"{pad}const int own{i} = before{i} + (int)c{i};",
            f"{pad}A a{i} = 0;",
            f"{pad}for (int p{i} = own{i}, q{i} = -1; p{i} < total{i}; p{i} = q{i}) {{",
        ]
    pad = "    " * len(moved)
    at = " + ".join(f"p{i} * s{i}" for i in moved)
    lines.append(f"{pad}const A value = widen(y[{fixed} + {at}]);")
    for depth, i in reversed(list(enumerate(moved))):
        pad = "    " * (depth + 1)
        inner = "value" if depth + 1 == len(moved) else f"a{moved[depth + 1]}"
        lines += [
            f"{pad}a{i} = q{i} < 0 ? {inner} : a{i} + {inner};",
            f"{pad}do q{i} = next(q{i}, (int)c{i}, size{i}, before{i}); while (q{i} == own{i});",
            "    " * depth + "}",
        ]
    places = Coordinates(len(axes))
    body = f"""    typedef {COMPUTE[dtype]} A;
    const long long e = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= n) return;
{indented(places.lines("e", [range(len(axes))]))}{indented(lines)}    x[e] = narrow<{c}>(a{moved[0]});
"""
    before = f"""{division(wide=wide)}
DEVICE int next(int p, int s, int size, int before)
{{
    {_NEXT[mode]}
}}
"""
    sizes = [f"long long s{i}" for i in range(len(axes))]
    sizes += [f"int size{i}, int before{i}, int total{i}" for i in moved]
    parameters = ", ".join([f"const {c}* y, {c}* x, long long n", *places.parameters, *sizes])
    return Kernel(f"unpadded_{mode}_{dtype}_{''.join('01'[a] for a in axes)}", parameters, body, before)


@family("PadGrad")
class Folding(Family):
    """Gathered, so that threads do not meet."""

    def accepts(self, op: Operator) -> bool:
        return {v.dtype for v in (*op.reads(), *op.writes())} <= {"f16", "bf16", "f32", "f64"}

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """One launch."""
        rule = op.of(PadGrad)
        y, x = present(ins[0], outs[0])
        if not x.size:
            return []
        n, wide = len(x.shape), max(x.size, y.size) >= WIDE
        axes = tuple(i == 0 or bool(rule.pads[i] or rule.pads[n + i]) for i in range(n))
        sizes = [k for i in range(n) if axes[i] for k in (x.shape[i], rule.pads[i], y.shape[i])]
        divisors = [divisor(d, wide=wide) for d in x.shape[1:]]
        k = folded(rule.mode, axes, x.dtype, wide=wide)
        return [k(x.size, y, x, x.size, *divisors, *strides(y.shape), *sizes)]
