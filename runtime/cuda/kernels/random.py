"""Random operators: the Philox stream of ops/random, bit-identical; a thread computes one block of eight numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..code.philox import PHILOX
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from ..families import Buffers, Family, family

if TYPE_CHECKING:
    from ....language.ir import Operator

_HEAD = """    const long long block = (long long)blockIdx.x * blockDim.x + threadIdx.x, first = block * 8;
    if (first >= {numbers}) return;
    unsigned u[8];
    philox(block, seed, *step, u);
"""
_STEP = "const unsigned long long* step, unsigned long long seed"
_UNIFORM = "(float)u[i] * 5.9604644775390625e-8f"


@functools.cache
def dropout(dtype: str, mask: bool) -> Kernel:
    """y = x · scale where the number is at least the threshold, else 0 · x."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    body = (
        _HEAD.format(numbers="n")
        + f"""    for (int i = 0; i < 8 && first + i < n; i++) {{
        const bool keep = u[i] >= threshold;
        const {c} scaled = narrow<{c}>(widen(x[first + i]) * ({a})scale);
        y[first + i] = narrow<{c}>(widen(scaled) * ({a})keep);{
            '''
        mask[first + i] = keep;'''
            if mask
            else ""
        }
    }}
"""
    )
    outputs = f"{c}* y{', bool* mask' if mask else ''}"
    parameters = f"const {c}* x, {_STEP}, {outputs}, unsigned threshold, double scale, long long n"
    return Kernel(f"dropout_{dtype}", parameters, body, PHILOX)


@functools.cache
def uniform(dtype: str) -> Kernel:
    """low + span · u, in float32."""
    c = C_TYPES[dtype]
    body = (
        _HEAD.format(numbers="n")
        + f"""    for (int i = 0; i < 8 && first + i < n; i++) {{
        const float scaled = {_UNIFORM} * span;
        y[first + i] = narrow<{c}>(scaled + low);
    }}
"""
    )
    return Kernel(f"uniform_{dtype}", f"{_STEP}, {c}* y, float span, float low, long long n", body, PHILOX)


@functools.cache
def normal(dtype: str) -> Kernel:
    """mean + scale · √(-2 ln(1 - u)) · cos(2π v), in float32; four elements of a block's eight numbers."""
    c = C_TYPES[dtype]
    body = (
        _HEAD.format(numbers="2 * n")
        + f"""    for (int k = 0; k < 4 && 4 * block + k < n; k++) {{
        const float a = (float)u[2 * k] * 5.9604644775390625e-8f, b = (float)u[2 * k + 1] * 5.9604644775390625e-8f;
        const float z = sqrtf(logf(1 - a) * -2) * cosf(b * turn);
        const float scaled = z * scale;
        y[4 * block + k] = narrow<{c}>(scaled + mean);
    }}
"""
    )
    return Kernel(f"normal_{dtype}", f"{_STEP}, {c}* y, float turn, float scale, float mean, long long n", body, PHILOX)


@functools.cache
def bernoulli(p: str, dtype: str) -> Kernel:
    """Whether u < p."""
    c, a = C_TYPES[dtype], COMPUTE[p]
    body = (
        _HEAD.format(numbers="n")
        + f"""    for (int i = 0; i < 8 && first + i < n; i++)
        y[first + i] = narrow<{c}>((float)(({a}){_UNIFORM} < widen(p[first + i])));
"""
    )
    return Kernel(f"bernoulli_{p}_{dtype}", f"const {C_TYPES[p]}* p, {_STEP}, {c}* y, long long n", body, PHILOX)


def _seed(op: Operator) -> int:
    rule: Any = op.op
    return int(np.array(rule.seed, np.uint64))


@family("Dropout", "RandomUniform", "RandomNormal", "Bernoulli")
class Draws(Family):
    """(x, step) → y, mask?; (step) → y; (p, step) → y."""

    def accepts(self, op: Operator) -> bool:
        """Types that are computed with; a slice draws by array operations."""
        rule: Any = op.op
        return rule.first == 0 and all(v.dtype in C_TYPES for v in (*op.reads(), *op.writes()))

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """One launch."""
        rule: Any = op.op
        y = outs[0]
        assert y is not None and ins[0] is not None
        if not y.size:
            return []
        work, seed = -(-y.size // 8), _seed(op)
        if op.op.name == "Dropout":
            threshold = math.ceil(float(np.float32(rule.ratio)) * 2**24)
            scale = float(y.type.numpy.type(1 / (1 - rule.ratio)))
            mask = [outs[1]] if outs[1] is not None else []
            k = dropout(y.dtype, bool(mask))
            return [k(work, ins[0], ins[1], seed, y, *mask, threshold, scale, y.size)]
        if op.op.name == "Bernoulli":
            return [bernoulli(ins[0].dtype, y.dtype)(work, ins[0], ins[1], seed, y, y.size)]
        if op.op.name == "RandomUniform":
            return [uniform(y.dtype)(work, ins[0], seed, y, rule.high - rule.low, rule.low, y.size)]
        work = -(-y.size // 4)
        return [normal(y.dtype)(work, ins[0], seed, y, 2 * math.pi, rule.scale, rule.mean, y.size)]
