"""Kernels over windows of up to three spatial axes: pooling, its gradients, windows as columns.

All operands are [lead, planes, rows, positions, channels].  An item is a row of positions for a processor, whose loops
run over channels inside; on a device it is one place of the side that is written, for a vector of channels or (channels
first: planes are images, and have one channel) for some planes.  Gradients are gathered: each place looks for the
windows that it is in, so that threads do not meet.  Sums go in the order of the taps, as the operators' numerics do,
and have the same bits but for AveragePool's gradient, which multiplies where those divide.
"""

from __future__ import annotations

import numpy as np

from ..texts import inline, kernel, on_processor, piece, steps

#: rows of the table `form`: the windows; how many elements before and behind the input count; of an item: planes,
#: channels or planes, results besides the largest (1: numbers, 2: indices); taps of columns (0: there are none), and
#: what every sum is divided by (0: differs).  The table `sizes`: those of what is written, and blocks of channels
_SIZE, _STRIDE, _STEP, _BEGIN, _BEFORE, _BEHIND, _ITEM, _SUMS = range(8)


@inline(c="lowest")
def _lowest(x):
    """The least of a type."""
    return x.dtype.type(-np.inf)


@inline(c="inside")
def _inside(i, n):
    """Whether i is one of [0, n)."""
    return (i >= 0) & (i < n)


@inline
def _positions(item, form, sizes):
    """The row of an item, its first position and the one behind its last, its first channel."""
    if on_processor():
        return item, 0, sizes[2], 0
    else:
        place = item // sizes[3]
        return place // sizes[2], place % sizes[2], 1, item % sizes[3] * form[_ITEM, 1]


@inline
def _row(row, form, sizes):
    """Where a row is: lead, plane, row."""
    return row // sizes[1] // sizes[0] * form[_ITEM, 0], row // sizes[1] % sizes[0], row % sizes[1]


@inline
def _read(at, tap, form, axis):
    """Where along an axis a tap of the window at a position reads."""
    return at * form[_STRIDE, axis] + tap * form[_STEP, axis] - form[_BEGIN, axis]


@inline
def _tap(d, h, w, form):
    """The number of a tap."""
    return (d * form[_SIZE, 1] + h) * form[_SIZE, 2] + w


@inline
def _of_tap(tap, form):
    """The tap of a number."""
    return tap // form[_SIZE, 2] // form[_SIZE, 1], tap // form[_SIZE, 2] % form[_SIZE, 1], tap % form[_SIZE, 2]


@inline
def _windows(at, count, form, axis):
    """The first and the last window that has a position along an axis."""
    place, stride = at + form[_BEGIN, axis], form[_STRIDE, axis]
    before = max(place - (form[_SIZE, axis] - 1) * form[_STEP, axis], 0)
    return (before + stride - 1) // stride, min(place // stride, count - 1)


@inline
def _as_tap(at, window, form, axis):
    """Which of a window's taps reads a position along an axis, and whether one does."""
    place, step = at + form[_BEGIN, axis] - window * form[_STRIDE, axis], form[_STEP, axis]
    return place // step, step == 1 or place % step == 0


@inline
def _counted_along(at, size, form, axis):
    start, step = at * form[_STRIDE, axis] - form[_BEGIN, axis], form[_STEP, axis]
    low, high = -form[_BEFORE, axis] - start, size + form[_BEHIND, axis] - start
    if step > 1:
        low, high = -(-low // step), -(-high // step)
    return max(min(high, form[_SIZE, axis]) - max(low, 0), 1)


@inline
def _counted(x, form, d, h, w):
    """By what the sum of a window over x is divided: a factor an axis."""
    return (
        _counted_along(d, x.shape[1], form, 0),
        _counted_along(h, x.shape[2], form, 1),
        _counted_along(w, x.shape[3], form, 2),
    )


@inline
def _count(x, form, d, h, w):
    count = form[_SUMS, 1]
    if count == 0:
        p, q, r = _counted(x, form, d, h, w)
        count = p * q * r
    return count


@inline(
    c="""template <class X, class N> DEVICE auto _share(X& to, N count)
{
    typedef typename X::element T;
    if constexpr (T(0.5) != T(0)) return T(1) / as<T>(count);
    else return load(T(1));
}
"""
)
def _share(to, count):
    """The share of each of so many."""
    return to.dtype.type(1) / to.dtype.type(count)


@inline
def _largest(x, to, which, lead, d, h, w, c, form):
    block, wanted, fresh, step, start = form[_ITEM, 1], form[_ITEM, 2], False, form[_STEP, 2], _read(w, 0, form, 2)
    if on_processor():  # copies the first that it finds
        fresh = wanted == 0
    for i in range(0 if fresh else block):
        to[i] = _lowest(to)
    if wanted:
        for i in range(block):
            which[i] = 0
    for kd in steps(form[_SIZE, 0]):
        from_d = _read(d, kd, form, 0)
        if not _inside(from_d, x.shape[1]):
            continue
        for kh in steps(form[_SIZE, 1]):
            from_h, tap = _read(h, kh, form, 1), _tap(kd, kh, 0, form)
            if not _inside(from_h, x.shape[2]):
                continue
            for kw in steps(form[_SIZE, 2]):
                from_w = start + kw * step
                if not _inside(from_w, x.shape[3]):
                    continue
                at, k = piece(x[lead, from_d, from_h, from_w], c, block), np.int32(tap + kw)
                if wanted:
                    for i in range(block):
                        v, most = at[i], to[i]
                        which[i] = k if v > most else which[i]
                        to[i] = most if most >= v or most != most else v
                elif fresh:
                    for i in range(block):
                        to[i] = at[i]
                    fresh = False
                else:
                    for i in range(block):
                        to[i] = to[i] if to[i] >= at[i] or to[i] != to[i] else at[i]
    for i in range(block if fresh else 0):
        to[i] = _lowest(to)


@inline
def _stored(which, to, block):
    for i in range(block):
        to[i] = which[i]


@inline
def _flat(which, to, x, lead, d, h, w, c, form):
    """Where the numbered taps are, in x channels first."""
    for i in range(form[_ITEM, 1]):
        kd, kh, kw = _of_tap(which[i], form)
        plane = lead * x.shape[4] + c + i
        at = _read(w, kw, form, 2) + x.shape[3] * (_read(h, kh, form, 1) + x.shape[2] * _read(d, kd, form, 0))
        to[i] = at + plane * x.shape[1] * x.shape[2] * x.shape[3]


@kernel(heavy=True)
def max_pool(x, y, number, indices, scratch, form, sizes, begin, end):
    """The largest of each window, the number of its first place there, and that one's index, as far as wanted.

    `scratch`: numbers as wide as float32, a row for each of y's: only then LLVM compares and chooses in vectors.
    """
    block = form[_ITEM, 1]
    for item in range(begin, end):
        row, first, count, c = _positions(item, form, sizes)
        lead, d, h = _row(row, form, sizes)
        for i in range(count):
            w = first + i
            which = scratch[row]
            _largest(x, piece(y[lead, d, h, w], c, block), which, lead, d, h, w, c, form)
            if form[_ITEM, 2] % 2:
                _stored(which, piece(number[lead, d, h, w], c, block), block)
            if form[_ITEM, 2] > 1:
                _flat(which, piece(indices[lead, d, h, w], c, block), x, lead, d, h, w, c, form)


@inline
def _gathered(number, x, to, lead, d, h, w, c, form):
    block, along = form[_ITEM, 1], min(form[_ITEM, 0] - 1, 1)
    which = piece(number[lead, d, h, w], c, block)
    for i in range(block):
        kd, kh, kw = _of_tap(which[i], form)
        from_d, from_h, from_w = _read(d, kd, form, 0), _read(h, kh, form, 1), _read(w, kw, form, 2)
        image, channel = lead + i * along, c + i * (1 - along)
        there = _inside(from_d, x.shape[1]) and _inside(from_h, x.shape[2]) and _inside(from_w, x.shape[3])
        if there and kd < form[_SIZE, 0] and image < x.shape[0]:
            to[i] = x[image, from_d, from_h, from_w, channel]
        else:
            to[i] = x.dtype.type(0)


@kernel(heavy=True)
def max_gather(number, x, y, form, sizes, begin, end):
    """The elements at the numbered places of their windows."""
    block = form[_ITEM, 1]
    for item in range(begin, end):
        row, first, count, c = _positions(item, form, sizes)
        lead, d, h = _row(row, form, sizes)
        for i in range(count):
            w = first + i
            _gathered(number, x, piece(y[lead, d, h, w], c, block), lead, d, h, w, c, form)


@inline
def _mean(x, to, lead, d, h, w, c, form):
    t = to.dtype.type
    block, total = form[_ITEM, 1], form[_SUMS, 1]
    for i in range(block):
        to[i] = t(0)
    for kd in steps(form[_SIZE, 0]):
        from_d = _read(d, kd, form, 0)
        if not _inside(from_d, x.shape[1]):
            continue
        for kh in steps(form[_SIZE, 1]):
            from_h = _read(h, kh, form, 1)
            if not _inside(from_h, x.shape[2]):
                continue
            for kw in steps(form[_SIZE, 2]):
                from_w = _read(w, kw, form, 2)
                if _inside(from_w, x.shape[3]):
                    at = piece(x[lead, from_d, from_h, from_w], c, block)
                    for i in range(block):
                        to[i] += at[i]
    if total > 0:
        for i in range(block):
            to[i] = to[i] / t(total)
    else:
        p, q, r = _counted(x, form, d, h, w)
        if on_processor():  # as the operator's numerics do
            for i in range(block):
                to[i] = to[i] / t(p) / t(q) / t(r)
        else:
            for i in range(block):
                to[i] = to[i] / t(p * q * r)


@kernel(heavy=True)
def mean_pool(x, y, form, sizes, begin, end):
    """The mean of each window."""
    block = form[_ITEM, 1]
    for item in range(begin, end):
        row, first, count, c = _positions(item, form, sizes)
        lead, d, h = _row(row, form, sizes)
        for i in range(count):
            w = first + i
            _mean(x, piece(y[lead, d, h, w], c, block), lead, d, h, w, c, form)


@inline(
    c="""template <class X, class L, class D, class H, class W, class F> DEVICE auto _sum_of_large(
    X&& x, L lead, D d, H h, W w, F&& form)
{
    Element<X> s = 0;
    const auto rows = at_(form, 0_n, 1_n), columns = at_(form, 0_n, 2_n), taps = at_(form, 0_n, 0_n) * rows * columns;
#pragma unroll 8
    for (unsigned t = threadIdx.x % LANES; t < taps.v; t += LANES) {
        const Size tap(t), i = floor_of(floor_of(tap, columns), rows), j = rest_of(floor_of(tap, columns), rows);
        const auto from_d = d * at_(form, 1_n, 0_n) + i * at_(form, 2_n, 0_n) - at_(form, 3_n, 0_n);
        const auto from_h = h * at_(form, 1_n, 1_n) + j * at_(form, 2_n, 1_n) - at_(form, 3_n, 1_n);
        const auto from_w = w * at_(form, 1_n, 2_n) + rest_of(tap, columns) * at_(form, 2_n, 2_n) - at_(form, 3_n, 2_n);
        if (inside(from_d, x.shape[1]) && inside(from_h, x.shape[2]) && inside(from_w, x.shape[3]))
            s += at_(x, lead, from_d, from_h, from_w, 0_n);
    }
    return reduced_(s, Plus());
}
"""
)
def _sum_of_large(x, lead, d, h, w, form):
    """A window's sum, which the threads of an item divide; channels first, and so on devices only."""
    return x[lead, d, h, w, 0]


@kernel
def mean_of_large(x, y, form, sizes, begin, end):
    """`mean_pool` of large windows."""
    for item in range(begin, end):
        row, w, _, _ = _positions(item, form, sizes)
        lead, d, h = _row(row, form, sizes)
        y[lead, d, h, w, 0] = _sum_of_large(x, lead, d, h, w, form) / y.dtype.type(_count(x, form, d, h, w))


@inline
def _added(number, count, dy, to, tap, wanted, block):
    if wanted > 0:
        k = number.dtype.type(tap)
        for i in range(block):
            to[i] += dy[i] if number[i] == k else to.dtype.type(0)
    else:
        share = _share(to, count)
        for i in range(block):
            to[i] += dy[i] * share


@inline
def _row_from_windows(number, dy, dx, lead, d, h, form):
    """A processor's: tap by tap, for all windows along a row, so that no position is divided."""
    row, wanted, total, stride = dx[lead, d, h], form[_ITEM, 2], form[_SUMS, 1], form[_STRIDE, 2]
    for w in range(dx.shape[3]):
        for i in range(dx.shape[4]):
            row[w, i] = 0
    first_d, last_d = _windows(d, dy.shape[1], form, 0)
    first_h, last_h = _windows(h, dy.shape[2], form, 1)
    for od in range(last_d, first_d - 1, -1):
        kd, some_d = _as_tap(d, od, form, 0)
        for oh in range(last_h, first_h - 1, -1):
            kh, some_h = _as_tap(h, oh, form, 1)
            which, at, count = number[lead, od, oh], dy[lead, od, oh], total
            if count == 0:
                count = _counted_along(od, dx.shape[1], form, 0) * _counted_along(oh, dx.shape[2], form, 1)
            for kw in range(form[_SIZE, 2] if some_d and some_h else 0):
                tap, w = _tap(kd, kh, kw, form), _read(0, kw, form, 2)
                for ow in range(dy.shape[3]):
                    if _inside(w, dx.shape[3]):
                        each = 1 if total > 0 else _counted_along(ow, dx.shape[3], form, 2)
                        _added(which[ow], count * each, at[ow], row[w], tap, wanted, dx.shape[4])
                    w += stride


@inline
def _from_windows(number, dy, dx, to, lead, d, h, w, c, form):
    block, columns = form[_ITEM, 1], form[_SUMS, 0]
    for i in range(block):
        to[i] = to.dtype.type(0)
    deep = dy.shape[1] // max(columns, 1)
    first_d, last_d = _windows(d, deep, form, 0)
    first_h, last_h = _windows(h, dy.shape[2], form, 1)
    first_w, last_w = _windows(w, dy.shape[3], form, 2)
    for od in range(last_d, first_d - 1, -1):
        kd, some_d = _as_tap(d, od, form, 0)
        for oh in range(last_h, first_h - 1, -1):
            kh, some_h = _as_tap(h, oh, form, 1)
            for ow in range(last_w, first_w - 1, -1):
                kw, some_w = _as_tap(w, ow, form, 2)
                if not (some_d and some_h and some_w):
                    continue
                tap = _tap(kd, kh, kw, form)
                at = piece(dy[lead, od + min(columns, 1) * tap * deep, oh, ow], c, block)
                which, count = piece(number[lead, od, oh, ow], c, block), _count(dx, form, od, oh, ow)
                _added(which, count, at, to, tap, form[_ITEM, 2], block)


@kernel(heavy=True)
def from_windows(number, dy, dx, form, sizes, begin, end):
    """Each element's dy from all windows that it is in: from those whose largest it was, if that is wanted, else its
    share.  dy may be [lead, taps · planes, ...], columns."""
    block = form[_ITEM, 1]
    for item in range(begin, end):
        row, w, _, c = _positions(item, form, sizes)
        lead, d, h = _row(row, form, sizes)
        if on_processor():
            _row_from_windows(number, dy, dx, lead, d, h, form)
        else:
            _from_windows(number, dy, dx, piece(dx[lead, d, h, w], c, block), lead, d, h, w, c, form)


@inline
def _copied(x, to, there, lead, d, h, w, c, block):
    if there:
        at = piece(x[lead, d, h, w], c, block)
        for i in range(block):
            to[i] = at[i]
    else:
        for i in range(block):
            to[i] = to.dtype.type(0)


@kernel(heavy=True)
def window_columns(x, y, form, sizes, begin, end):
    """[planes, taps · depth, height, width]: the elements of each window, 0 outside."""
    block = form[_ITEM, 1]
    for item in range(begin, end):
        row, first, count, c = _positions(item, form, sizes)
        lead, d, h = _row(row, form, sizes)
        for i in range(count):
            w = first + i
            for tap in range(form[_SUMS, 0]):
                kd, kh, kw = _of_tap(tap, form)
                from_d, from_h, from_w = _read(d, kd, form, 0), _read(h, kh, form, 1), _read(w, kw, form, 2)
                there = _inside(from_d, x.shape[1]) and _inside(from_h, x.shape[2]) and _inside(from_w, x.shape[3])
                to = y[lead, tap * sizes[0] + d, h, w]
                _copied(x, piece(to, c, block), there, lead, from_d, from_h, from_w, c, block)
