"""Pooling of channels-last activations: windows of up to three spatial axes.

All loops run over channels inside; a thread does whole rows of positions.  Sums over windows go tap by tap, as in the
operators' own numerics, and have the same bits but for AveragePool's gradient, which multiplies where those divide.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import Array, Operands, TensorType
from ...shared.texts import inline
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, family, floats

#: spatial axes that the kernels count with
_AXES = 3


def _taps(op: Operator, small: Array, large: Array) -> np.ndarray:
    """Strides, then where each tap of the window at 0 reads, for [n, positions..., c] pooled from [n, sizes..., c]."""
    w = op.op.plain.window(large.shape[1:-1], small.shape[1:-1])  # type: ignore[attr-defined]
    more = _AXES - len(w.kernel)
    axes = [np.arange(k) * d - b for k, d, b in zip(w.kernel, w.dilations, w.begin, strict=True)]
    places = np.meshgrid(*[np.zeros(1, np.int64)] * more, *axes, indexing="ij")
    return np.array([[1] * more + list(w.strides), *np.stack(places, -1).reshape(-1, _AXES)], np.int64)


def _five(a: Array) -> Array:
    """[n, d, h, w, c]."""
    return a.reshape(a.shape[0], *(1,) * (_AXES + 2 - a.ndim), *a.shape[1:])


def _counts(op: Operator, small: Array, large: Array) -> list[np.ndarray]:
    """The divisors of windows' sums: a factor for each position along each axis."""
    plain: Any = op.op.plain  # type: ignore[attr-defined]
    w = plain.window(large.shape[1:-1], small.shape[1:-1])
    counts = plain.counts(w)
    if all(len(set(c)) <= 1 for c in counts):  # one division, as in the operator's numerics
        total = math.prod(c[0] for c in counts if c)
        counts = [[total if i == 0 else 1] * len(c) for i, c in enumerate(counts)]
    counts = [[1]] * (_AXES - len(counts)) + counts
    return [np.array(c, small.dtype) for c in counts]


def _rows(a: Array) -> int:
    """Rows of positions of [n, d, h, w, c]."""
    return math.prod(a.shape[:3])


def _fits(op: Operator) -> bool:
    """At most three spatial axes, nothing empty, enough work."""
    return floats(op) and all(v.ndim <= _AXES + 2 and v.size for v in (*op.reads(), *op.writes()))


@inline
def _place(row, a):
    """Image, plane and row of a row of positions of [n, d, h, w, c]."""
    return row // a.shape[2] // a.shape[1], row // a.shape[2] % a.shape[1], row % a.shape[2]


@inline
def _zero(taps, od, oh, ow):
    """The position from which the taps of a window count."""
    return od * taps[0, 0], oh * taps[0, 1], ow * taps[0, 2]


@inline
def _read(taps, tap, zero, x):
    """The position that a tap reads, and whether it is one of x."""
    d, h, w = zero[0] + taps[tap, 0], zero[1] + taps[tap, 1], zero[2] + taps[tap, 2]
    inside = (d >= 0) & (d < x.shape[1]) & (h >= 0) & (h < x.shape[2]) & (w >= 0) & (w < x.shape[3])
    return d, h, w, inside


@inline
def _readers(taps, tap, d, h, dy):
    """Plane and row of the windows whose tap reads plane d and row h, and whether dy has them."""
    from_d, from_h = d - taps[tap, 0], h - taps[tap, 1]
    od, oh = from_d // taps[0, 0], from_h // taps[0, 1]
    exact = od * taps[0, 0] == from_d and oh * taps[0, 1] == from_h
    return od, oh, exact and 0 <= od < dy.shape[1] and 0 <= oh < dy.shape[2]


@inline
def _clear(a):
    """Zeros in [w, c]."""
    for w in range(a.shape[0]):
        for c in range(a.shape[1]):
            a[w, c] = 0


@kernel
def max_values(x, y, taps, begin, end):
    """The largest of each window; rows of y."""
    for row in range(begin, end):
        n, od, oh = _place(row, y)
        for ow in range(y.shape[3]):
            to = y[n, od, oh, ow]
            empty_so_far = False
            zero = _zero(taps, od, oh, ow)
            for tap in range(1, taps.shape[0]):
                d, h, w, inside = _read(taps, tap, zero, x)
                if not inside:
                    continue
                at = x[n, d, h, w]
                if empty_so_far:
                    for c in range(x.shape[4]):
                        to[c] = to[c] if to[c] >= at[c] or to[c] != to[c] else at[c]
                else:
                    for c in range(x.shape[4]):
                        to[c] = at[c]
                empty_so_far = True
            if not empty_so_far:
                for c in range(x.shape[4]):
                    to[c] = -np.inf


@kernel
def max_numbers(x, y, number, numbers, taps, begin, end):
    """The largest of each window, and the number of its first place there; rows of y.

    `numbers`: as wide as float32, a row for each of y's: only then LLVM compares and chooses in vectors.
    """
    for row in range(begin, end):
        n, od, oh = _place(row, y)
        which = numbers[row]
        for ow in range(y.shape[3]):
            to, position = y[n, od, oh, ow], number[n, od, oh, ow]
            for c in range(x.shape[4]):
                to[c] = -np.inf
            for c in range(x.shape[4]):
                which[c] = 0
            zero = _zero(taps, od, oh, ow)
            for tap in range(1, taps.shape[0]):
                d, h, w, inside = _read(taps, tap, zero, x)
                if not inside:
                    continue
                at = x[n, d, h, w]
                k = np.int32(tap - 1)
                for c in range(x.shape[4]):
                    v = at[c]
                    most = to[c]
                    which[c] = k if v > most else which[c]
                    to[c] = most if most >= v or most != most else v
            for c in range(x.shape[4]):
                position[c] = which[c]


@kernel
def max_grad(number, dy, dx, taps, begin, end):
    """Each element's dy from the windows whose largest it was; rows of dx."""
    for row in range(begin, end):
        n, d, h = _place(row, dx)
        whole = dx[n, d, h]
        _clear(whole)
        for tap in range(1, taps.shape[0]):
            od, oh, some = _readers(taps, tap, d, h, dy)
            if not some:
                continue
            k = number.dtype.type(tap - 1)
            for ow in range(dy.shape[3]):
                w = ow * taps[0, 2] + taps[tap, 2]
                if w < 0 or w >= dx.shape[3]:
                    continue
                to, at, which = whole[w], dy[n, od, oh, ow], number[n, od, oh, ow]
                for c in range(dx.shape[4]):
                    to[c] += at[c] if which[c] == k else dy.dtype.type(0)


@kernel
def mean_values(x, y, cd, ch, cw, taps, begin, end):
    """The mean of each window; rows of y."""
    for row in range(begin, end):
        n, od, oh = _place(row, y)
        for ow in range(y.shape[3]):
            to = y[n, od, oh, ow]
            for c in range(x.shape[4]):
                to[c] = 0
            zero = _zero(taps, od, oh, ow)
            for tap in range(1, taps.shape[0]):
                d, h, w, inside = _read(taps, tap, zero, x)
                if inside:
                    at = x[n, d, h, w]
                    for c in range(x.shape[4]):
                        to[c] += at[c]
            a, b, e = cd[od], ch[oh], cw[ow]
            for c in range(x.shape[4]):
                to[c] = to[c] / a / b / e


@kernel
def mean_grad(dy, dx, cd, ch, cw, taps, begin, end):
    """Each element's share of dy from all windows it is in; rows of dx."""
    for row in range(begin, end):
        n, d, h = _place(row, dx)
        whole = dx[n, d, h]
        _clear(whole)
        for tap in range(1, taps.shape[0]):
            od, oh, some = _readers(taps, tap, d, h, dy)
            if not some:
                continue
            for ow in range(dy.shape[3]):
                w = ow * taps[0, 2] + taps[tap, 2]
                if w < 0 or w >= dx.shape[3]:
                    continue
                to, at = whole[w], dy[n, od, oh, ow]
                share = dy.dtype.type(1) / (cd[od] * ch[oh] * cw[ow])
                for c in range(dx.shape[4]):
                    to[c] += at[c] * share


@family("ChannelsLastMaxPool")
class MaxPool(Family):
    """Values and window numbers; flat indices are left to the operator itself."""

    def accepts(self, op: Operator) -> bool:
        return _fits(op) and not (len(op.outputs) > 1 and op.outputs[1] is not None)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Numbers of a row's windows, where they are wanted."""
        if len(op.outputs) < 3 or op.outputs[2] is None:
            return ()
        return (TensorType("i32", (math.prod(op.outputs[2].shape[:-2]), op.outputs[2].shape[-1])),)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        x, y, taps = _five(ins[0]), _five(outs[0]), _taps(op, outs[0], ins[0])
        if not scratch:
            return [max_values.call(x, y, taps, work=_rows(y))]
        return [max_numbers.call(x, y, _five(outs[2]), scratch[0], taps, work=_rows(y))]


@family("ChannelsLastMaxPoolGrad")
class MaxPoolGrad(Family):
    """Gathered, so that threads do not meet."""

    def accepts(self, op: Operator) -> bool:
        return _fits(op)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        taps, dx = _taps(op, ins[1], outs[0]), _five(outs[0])
        return [max_grad.call(_five(ins[0]), _five(ins[1]), dx, taps, work=_rows(dx))]


@family("ChannelsLastAveragePool", "ChannelsLastAveragePoolGrad")
class AveragePool(Family):
    """Both directions."""

    def accepts(self, op: Operator) -> bool:
        return _fits(op)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        back = op.op.name.endswith("Grad")
        small, large = (ins[0], outs[0]) if back else (outs[0], ins[0])
        run = mean_grad if back else mean_values
        to = _five(outs[0])
        operands = (_five(ins[0]), to, *_counts(op, small, large), _taps(op, small, large))
        return [run.call(*operands, work=_rows(to))]
