"""Pooling over windows in both layouts, and the gradients; those over all positions are reductions (reduce.py)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import present
from ....ops.window import full
from ..code.parts import WIDE, divisor
from ..code.pooling import Form, max_gather, max_gradient, max_pool, mean_gradient, mean_of_large, mean_pool
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel, Launch
from ..families import Buffers, Family, family

#: planes of a thread where there is enough work, and how much that is
_PLANES, _MUCH = 4, 1 << 20
#: taps from which on a window is a warp's
_LARGE = 64


def is_last(op: Operator) -> bool:
    """Whether the activations are channels-last."""
    return op.op.name.startswith("ChannelsLast")


def _plain(op: Operator) -> Any:
    return op.op.plain if is_last(op) else op.op  # type: ignore[attr-defined]


def _spatial(op: Operator, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[1:-1] if is_last(op) else shape[2:])


def form_of(op: Operator, near: Buffer, far: Buffer, buffers: Sequence[Buffer | None], *, back: bool) -> Form:
    """The kernel's constants; `back`: the near side is the input's."""
    rule = _plain(op)
    small, large = (far, near) if back else (near, far)
    w = rule.window(_spatial(op, large.shape), _spatial(op, small.shape))
    n, last = len(w.kernel), is_last(op)
    lanes = _PLANES if near.size >= _MUCH else 1
    if last:
        there = [b for b in buffers if b is not None]
        lanes = 16 // max(b.type.numpy.itemsize for b in there)
        sizes = [b.type.numpy.itemsize * lanes for b in there]
        if near.shape[-1] % lanes or any(b.address % s for b, s in zip(there, sizes, strict=True)):
            lanes = 1
    wide = max(near.size, far.size) >= WIDE
    end = full(rule.pads, 2 * n, 0)[n:]
    return Form(w.kernel, w.strides, w.dilations, w.begin, end, last, lanes, wide)


def over_places(
    k: Kernel, op: Operator, form: Form, near: Buffer, far: Buffer, operands: Sequence[Any]
) -> list[Launch]:
    """The launch of a kernel of `pooling_text` for all places of the near side."""
    here, there = _spatial(op, near.shape), _spatial(op, far.shape)
    area, wide = math.prod(here), form.wide
    if form.last:
        groups = near.shape[-1] // form.lanes
        work, whole = near.size // form.lanes, divisor(groups, wide=wide)
    else:
        planes = near.shape[0] * near.shape[1]
        work, whole = -(-planes // form.lanes) * area, planes
    sizes = [divisor(d, wide=wide) for d in here[1:]]
    return [k(work, *operands, work, whole, divisor(area, wide=wide), *sizes, *there, here[0])]


class Windows(Family):
    """The base of poolings over windows."""

    def accepts(self, op: Operator) -> bool:
        kinds = {v.dtype for v in (*op.reads(), *op.writes())}
        return kinds <= set(C_TYPES) - {"bool"}


@family("MaxPool", "ChannelsLastMaxPool")
class MaxPool(Windows):
    """Values, indices, window numbers."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y, indices, numbers = ins[0], *outs[:3]
        assert x is not None and y is not None
        if not y.size:
            return []
        form = form_of(op, y, x, (x, y, numbers), back=False)
        k = max_pool(form, x.dtype, "" if numbers is None else numbers.dtype, indices=indices is not None)
        return over_places(k, op, form, y, x, [b for b in (x, y, indices, numbers) if b is not None])


@family("MaxPoolGrad", "ChannelsLastMaxPoolGrad")
class MaxPoolGrad(Windows):
    """Gathered, so that threads do not meet."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        numbers, dy, dx = present(ins[0], ins[1], outs[0])
        if not dx.size:
            return []
        form = form_of(op, dx, dy, (numbers, dy, dx), back=True)
        return over_places(max_gradient(form, dx.dtype, numbers.dtype), op, form, dx, dy, (numbers, dy, dx))


@family("MaxPoolGather", "ChannelsLastMaxPoolGather")
class MaxPoolGather(Windows):
    """Elements at window numbers."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        numbers, x, y = present(ins[0], ins[1], outs[0])
        if not y.size:
            return []
        form = form_of(op, y, x, (numbers, x, y), back=False)
        return over_places(max_gather(form, x.dtype, numbers.dtype), op, form, y, x, (numbers, x, y))


@family("AveragePool", "AveragePoolGrad", "ChannelsLastAveragePool", "ChannelsLastAveragePoolGrad")
class AveragePool(Windows):
    """Both directions."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        x, y = present(ins[0], outs[0])
        if not y.size:
            return []
        back, include = op.op.name.endswith("Grad"), bool(_plain(op).count_include_pad)
        form = form_of(op, y, x, (x, y), back=back)
        if not (back or form.last) and math.prod(form.kernel) >= _LARGE:
            form = dataclasses.replace(form, lanes=1)
            launch = over_places(mean_of_large(form, y.dtype, include=include), op, form, y, x, (x, y))
            return [dataclasses.replace(launch[0], grid=(-(-y.size // (launch[0].block[0] // 32)), 1, 1))]
        k = (mean_gradient if back else mean_pool)(form, y.dtype, include=include)
        return over_places(k, op, form, y, x, (x, y))


# -- over all positions -----------------------------------------------------------------------------------------------


@functools.cache
def at_largest(dtype: str, *, last: bool) -> Kernel:
    """dy at the flat indices (channels first), zeros elsewhere."""
    c = C_TYPES[dtype]
    where = ("i / (n * channels) * channels + i % channels, place = i / channels % n" if last
             else "i / n, place = i % n")  # fmt: skip
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const long long row = {where};
    dx[i] = indices[row] == row * n + place ? dy[row] : narrow<{c}>(({COMPUTE[dtype]})0);
"""
    parameters = f"const long long* indices, const {c}* dy, {c}* dx, long long size, long long n, long long channels"
    return Kernel(f"at_largest_{dtype}{'_last' if last else ''}", parameters, body)


@family("GlobalMaxPoolGrad", "ChannelsLastGlobalMaxPoolGrad")
class GlobalMaxPoolGrad(Windows):
    """dy at the indices."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        indices, dy, dx = present(ins[0], ins[1], outs[0])
        n, channels = math.prod(_spatial(op, dx.shape)), dx.shape[-1] if is_last(op) else dx.shape[1]
        k = at_largest(dx.dtype, last=is_last(op))
        return [k(dx.size, indices, dy, dx, dx.size, n, channels)] if dx.size else []
