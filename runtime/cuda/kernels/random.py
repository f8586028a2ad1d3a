"""Random operators: the Philox stream of ops/random, bit-identical; a thread computes one block of eight numbers.

Elements are drawn in runs: the first of run r is number `from` + r · `skip` of the stream.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ..code.philox import PHILOX
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from ..families import Buffers, Family, family

#: then: {each} numbers make an element; number i of the block is of element `e` if it is of one
_HEAD = """    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x, r = thread / blocks;
    const long long begin = from + r * skip, block = begin / 8 + thread % blocks;
    if (r * run >= n) return;
    unsigned u[8];
    philox(block, seed, *step, u);
    for (int i = 0; i < 8; i += {each}) {{
        const long long at = (block * 8 - begin + i) / {each}, e = r * run + at;
        if (block * 8 + i < begin || at >= run) continue;
"""
_STEP = "const unsigned long long* step, unsigned long long seed"
_RUNS = "long long from, long long run, long long skip, long long blocks, long long n"
_UNIFORM = "(float)u[i] * 5.9604644775390625e-8f"


@functools.cache
def dropout(dtype: str, mask: bool, packed: bool) -> Kernel:
    """y = x · scale where the number is at least the threshold, else 0 · x.

    `packed`: a block of eight numbers is of eight elements that are read at once.
    """
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    place, loop, source, target, kept = "", _HEAD.format(each=1), "x[e]", "y[e]", "mask[e]"
    if packed:
        loop = (
            _HEAD.format(each=1).partition("    for")[0]
            + f"""    const long long e = r * run + block * 8 - begin;
    Pack<{c}, 8> v = *(const Pack<{c}, 8>*)(x + e);
    Pack<bool, 8> kept;
#pragma unroll
    for (int i = 0; i < 8; i++) {{
"""
        )
        source, target, kept = "v.of[i]", "v.of[i]", "kept.of[i]"
        place = f"    *(Pack<{c}, 8>*)(y + e) = v;\n" + "    *(Pack<bool, 8>*)(mask + e) = kept;\n" * mask
    body = f"""{loop}        const bool keep = u[i] >= threshold;
        const {c} scaled = narrow<{c}>(widen({source}) * ({a})scale);
        {target} = narrow<{c}>(widen(scaled) * ({a})keep);
{f"        {kept} = keep;" * mask}
    }}
{place}"""
    outputs = f"{c}* y{', bool* mask' if mask else ''}"
    parameters = f"const {c}* x, {_STEP}, {outputs}, unsigned threshold, double scale, {_RUNS}"
    return Kernel(f"dropout_{dtype}{'_packed' * packed}", parameters, body, PHILOX)


@functools.cache
def uniform(dtype: str) -> Kernel:
    """low + span · u, in float32."""
    c = C_TYPES[dtype]
    body = (
        _HEAD.format(each=1)
        + f"""        const float scaled = {_UNIFORM} * span;
        y[e] = narrow<{c}>(scaled + low);
    }}
"""
    )
    return Kernel(f"uniform_{dtype}", f"{_STEP}, {c}* y, float span, float low, {_RUNS}", body, PHILOX)


@functools.cache
def normal(dtype: str) -> Kernel:
    """mean + scale · √(-2 ln(1 - u)) · cos(2π v), in float32; four elements of a block's eight numbers."""
    c = C_TYPES[dtype]
    body = (
        _HEAD.format(each=2)
        + f"""        const float a = {_UNIFORM}, b = (float)u[i + 1] * 5.9604644775390625e-8f;
        const float z = sqrtf(logf(1 - a) * -2) * cosf(b * turn);
        const float scaled = z * scale;
        y[e] = narrow<{c}>(scaled + mean);
    }}
"""
    )
    parameters = f"{_STEP}, {c}* y, float turn, float scale, float mean, {_RUNS}"
    return Kernel(f"normal_{dtype}", parameters, body, PHILOX)


@functools.cache
def bernoulli(p: str, dtype: str) -> Kernel:
    """Whether u < p."""
    c, a = C_TYPES[dtype], COMPUTE[p]
    body = (
        _HEAD.format(each=1)
        + f"""        y[e] = narrow<{c}>((float)(({a}){_UNIFORM} < widen(p[e])));
    }}
"""
    )
    return Kernel(f"bernoulli_{p}_{dtype}", f"const {C_TYPES[p]}* p, {_STEP}, {c}* y, {_RUNS}", body, PHILOX)


def _seed(op: Operator) -> int:
    rule: Any = op.op
    return int(np.array(rule.seed, np.uint64))


@family("Dropout", "DropoutPart", "RandomUniform", "RandomNormal", "Bernoulli")
class Draws(Family):
    """(x, step) → y, mask?; (step) → y; (p, step) → y."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule: Any = op.op
        y = outs[0]
        assert y is not None and ins[0] is not None
        if not y.size:
            return []
        seed, each = _seed(op), 2 if rule.name == "RandomNormal" else 1
        run, skip, begin = getattr(rule, "run", y.size), getattr(rule, "skip", 0), each * rule.first
        blocks = -(-each * run // 8) + bool(begin % 8 or skip % 8)
        work, runs = y.size // run * blocks, (begin, run, skip, blocks, y.size)
        if rule.name.startswith("Dropout"):
            threshold = math.ceil(float(np.float32(rule.ratio)) * 2**24)
            scale = float(y.type.numpy.type(1 / (1 - rule.ratio)))
            mask = [outs[1]] if outs[1] is not None else []
            even = not any(n % 8 for n in (begin, skip, run))
            packed = even and not any(b.address % (8 * b.type.numpy.itemsize) for b in (ins[0], y, *mask))
            k = dropout(y.dtype, bool(mask), packed)
            return [k(work, ins[0], ins[1], seed, y, *mask, threshold, scale, *runs)]
        if op.op.name == "Bernoulli":
            return [bernoulli(ins[0].dtype, y.dtype)(work, ins[0], ins[1], seed, y, *runs)]
        if op.op.name == "RandomUniform":
            return [uniform(y.dtype)(work, ins[0], seed, y, rule.high - rule.low, rule.low, *runs)]
        return [normal(y.dtype)(work, ins[0], seed, y, 2 * math.pi, rule.scale, rule.mean, *runs)]
