"""Codes of slopes and gradients from them: a thread packs eight elements, or scales one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import present
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from ..families import Buffers, Family, family


def _numbers(values: Sequence[float], dtype: str) -> tuple[str, ...]:
    """Numbers in C, each rounded to the computing type: 0.0 and -0.0 are two."""
    return tuple(f"({COMPUTE[dtype]}){value!r}" for value in values)


@functools.lru_cache(maxsize=256)
def codes(dtype: str, bounds: tuple[str, ...], bits: int, *, even: bool) -> Kernel:
    """The number of bounds that each element is above."""
    a = COMPUTE[dtype]
    body = f"""    const long long group = (long long)blockIdx.x * blockDim.x + threadIdx.x, first = group * 8;
    if (first >= n) return;
    const {a} bounds[{len(bounds)}] = {{{", ".join(bounds)}}};
    unsigned word = 0;
    for (int i = 0; i < 8 && first + i < n; i++) {{
        const {a} given = widen(x[first + i]), v = {"given < 0 ? -given : given" if even else "given"};
        unsigned code = 0;
        for (int k = 0; k < {len(bounds)}; k++) code += v > bounds[k];
        word |= code << ({bits} * i);
    }}
    for (int j = 0; j < {bits} && group * {bits} + j < bytes; j++) y[group * {bits} + j] = word >> (8 * j) & 255;
"""
    parameters = f"const {C_TYPES[dtype]}* x, unsigned char* y, long long n, long long bytes"
    return Kernel(f"slope_codes_{dtype}", parameters, body)


@functools.lru_cache(maxsize=256)
def scaled(dtype: str, table: tuple[str, ...], bits: int) -> Kernel:
    """dx = dy · table[code]."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    static const {a} table[{len(table)}] = {{{", ".join(table)}}};
    const long long at = i * {bits} >> 3;
    const int shift = (int)(i * {bits} & 7);
    unsigned word = codes[at];
    if (shift + {bits} > 8) word |= (unsigned)codes[at + 1] << 8;
    dx[i] = narrow<{c}>(widen(dy[i]) * table[word >> shift & {len(table) - 1}]);
"""
    parameters = f"const {c}* dy, const unsigned char* codes, {c}* dx, long long n"
    return Kernel(f"slope_grad_{dtype}", parameters, body)


@family("SlopeCodes", "SlopeGrad")
class Slopes(Family):
    """(x) → codes; (dy, codes) → dx."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule: Any = op.op
        x, y = present(ins[0], outs[0])
        if not x.size:
            return []
        if rule.name == "SlopeCodes":
            kernel = codes(x.dtype, _numbers(rule.bounds, x.dtype), rule.bits, even=bool(rule.even))
            return [kernel(-(-x.size // 8), x, y, x.size, y.size)]
        return [scaled(x.dtype, _numbers(rule.table(), x.dtype), rule.bits)(x.size, x, ins[1], y, x.size)]
