"""Coordinates, weights and gradients of resizing along an axis, as `ops/vision/resize_maps.py` has them for NumPy.

Coordinates are float32 for `nearest`, whose ties depend on it, float64 else.  Gradients are gathered: coordinates grow
with the position, so that those who read an element are neighbours.
"""

from __future__ import annotations

import numpy as np

from ....ops.vision.resize_maps import TIE
from ..texts import inline, kernel

#: rows of a device's item, which share its weights
ROWS = 4
#: the table `rule`: mode, coordinates, how the nearest is found; whether what is outside has no weight, whether weights
#: are divided by their sum, elements on both sides.  `span`: the scale, start and end of the part that is resized, the
#: cubic's factor, how much the filter is shrunk.  `like`: of coordinates' type.  `sizes`: near and inner
NEAREST, _LINEAR = 0, 1
_PIXEL, _PYTORCH, _CORNERS, _ASYMMETRIC, _SYMMETRIC, _FOR_NEAREST, CROP = range(7)
_FLOOR_TIES, _CEIL_TIES, _FLOOR, _CEIL = range(4)


@inline
def _place(position, size, out, span, like, rule):
    """Where a position of the output lies in the input."""
    t = like.dtype.type
    x, s, half = t(position), t(span[0]), t(0.5)
    mode = rule[0, 1]
    if mode == CROP:
        start, end, last = t(span[1]), t(span[2]), t(size - 1)
        middle = half * (start + end) * last
        at = start * last + x * ((end - start) * last / t(out - 1)) if out > 1 else middle
        above = at if at > t(-1) else t(-1)
        return above if above < t(size) else t(size)
    if mode == _CORNERS:
        return x * (t(size - 1) / t(out - 1)) if out > 1 else t(0)
    if mode == _ASYMMETRIC:
        return x / s
    if mode == _FOR_NEAREST:
        return (x + half) / s
    if mode == _PYTORCH and out <= 1:
        return t(0)
    if mode == _SYMMETRIC:
        return t(float(size) / 2.0) * (t(1) - t(out) / (s * t(size))) + ((x + half) / s - half)
    return (x + half) / s - half


@inline
def _lowest(position, size, out, span, like, rule):
    """The lowest element that a position reads."""
    t = like.dtype.type
    at = _place(position, size, out, span, like, rule)
    if rule[0, 0] != NEAREST:
        return int(np.floor(at))
    half = t(0.5)
    tie = np.floor(at) + half
    tied = tie if abs(at - tie) <= t(TIE) * abs(tie) else at
    found = np.floor(at)
    if rule[0, 2] == _FLOOR_TIES:
        found = np.ceil(tied - half)
    if rule[0, 2] == _CEIL_TIES:
        found = np.floor(tied + half)
    if rule[0, 2] == _CEIL:
        found = np.ceil(at)
    return min(max(int(found), 0), size - 1)


@inline
def _from_where(v, size, out, span, like, rule):
    """The first position whose lowest element is at least v."""
    first, last = 0, out
    while first < last:
        middle = (first + last) // 2
        if _lowest(middle, size, out, span, like, rule) >= v:
            last = middle
        else:
            first = middle + 1
    return first


@inline
def _away(position, size, out, span, rule):
    """Whether tf_crop_and_resize has a position outside of the input."""
    at = _place(position, size, out, span, span, rule)
    return rule[0, 1] == CROP and (at < span.dtype.type(0) or at > span.dtype.type(size - 1))


@inline
def _weight(k, r, low, size, span, rule):
    """The weight of the element k behind the lowest, r behind which the position is."""
    d, a, found = abs(float(k) - r) * span[4], span[3], 0.0
    if rule[0, 0] == _LINEAR:
        found = 1.0 - d if d < 1.0 else 0.0
    else:
        far = ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a if d < 2.0 else 0.0
        found = ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0 if d <= 1.0 else far
    return 0.0 if rule[1, 0] != 0 and (low + k < 0 or low + k >= size) else found


@inline
def _total(r, low, size, span, rule):
    """The sum of a position's weights, where that is not 1 of itself."""
    total = 1.0
    if rule[1, 0] != 0 or rule[1, 1] != 0:
        total = 0.0
        for k in range(1 - rule[1, 2], rule[1, 2] + 1):
            total += _weight(k, r, low, size, span, rule)
    return total


@kernel
def nearest_along(x, y, span, like, rule, sizes, begin, end):
    """One axis of [rows, far, inner] to [rows, near, inner]."""
    for item in range(begin, end):
        c, p, top = item % sizes[1], item // sizes[1] % sizes[0], item // sizes[1] // sizes[0] * ROWS
        at = _lowest(p, x.shape[1], y.shape[1], span, like, rule)
        for i in range(ROWS):
            if top + i < x.shape[0]:
                y[top + i, p, c] = x[top + i, at, c]


@inline
def _add(x, s, w, top, at, c):
    t = s.dtype.type
    for i in range(ROWS):
        if top + i < x.shape[0]:
            s[i] += t(w) * t(x[top + i, at, c])


@inline
def _store(s, y, top, p, c):
    for i in range(ROWS):
        if top + i < y.shape[0]:
            y[top + i, p, c] = s[i]


@kernel(heavy=True)
def along(x, y, sums, span, like, rule, sizes, begin, end):
    """The same by interpolation; `sums`: Scratch."""
    for item in range(begin, end):
        c, p, top = item % sizes[1], item // sizes[1] % sizes[0], item // sizes[1] // sizes[0] * ROWS
        size, reach, s = x.shape[1], rule[1, 2], sums[item]
        z = _place(p, size, y.shape[1], span, like, rule)
        r, low = z - np.floor(z), int(np.floor(z))
        total = _total(r, low, size, span, rule)
        for i in range(ROWS):
            s[i] = 0
        for k in range(1 - reach, reach + 1):
            w = _weight(k, r, low, size, span, rule) / total
            _add(x, s, w, top, min(max(low + k, 0), size - 1), c)
        _store(s, y, top, p, c)


@kernel(heavy=True)
def back_along(x, y, sums, span, like, rule, sizes, begin, end):
    """The gradient of both."""
    for item in range(begin, end):
        c, p, top = item % sizes[1], item // sizes[1] % sizes[0], item // sizes[1] // sizes[0] * ROWS
        size, out, reach, s = y.shape[1], x.shape[1], rule[1, 2], sums[item]
        first, stop = 0, out
        if rule[0, 0] == NEAREST or p > 0:
            first = _from_where(p - reach, size, out, span, like, rule)
        if rule[0, 0] == NEAREST:
            stop = _from_where(p + 1, size, out, span, like, rule)
        elif p < size - 1:
            stop = _from_where(p + reach, size, out, span, like, rule)
        for i in range(ROWS):
            s[i] = 0
        for o in range(first, stop):
            if _away(o, size, out, span, rule):
                continue
            w = 1.0
            if rule[0, 0] != NEAREST:
                z = _place(o, size, out, span, span, rule)
                r, low, mine = z - np.floor(z), int(np.floor(z)), 0.0
                for k in range(1 - reach, reach + 1):
                    if min(max(low + k, 0), size - 1) == p:
                        mine += _weight(k, r, low, size, span, rule)
                w = mine / _total(r, low, size, span, rule)
            _add(x, s, w, top, o, c)
        _store(s, y, top, p, c)


@kernel
def outside(y, value, span, rule, sizes, size, begin, end):
    """The same value in all of y [rows, near, inner] that is outside of the input along one axis; elements."""
    for i in range(begin, end):
        p = i // sizes[1] % sizes[0]
        if _away(p, size, y.shape[1], span, rule):
            y[i // sizes[1] // sizes[0], p, i % sizes[1]] = y.dtype.type(value)


@kernel
def unchanged(x, y, begin, end):
    """x, and zeros where it has none."""
    for i in range(begin, end):
        y[i] = x[i] if i < x.size else x.dtype.type(0)
