"""Numerics of normalisation over the rest of each group: layer, group, instance and RMS normalisation.

A tensor is seen as [a, g, s, p]: normalised over (s, p) for each (a, g), scaled by a vector over (g, s).  Blocks of
the first two axes are small enough for the cache, in which the several passes then find them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...language.types import Array, NumPy, Operands, TensorType
from ..window import BLOCK

View = tuple[int, int, int, int]


def wide(t: TensorType) -> TensorType:
    """The type in which elements of type `t` are summed: at least float32."""
    return t.with_dtype("f32") if t.dtype in ("f16", "bf16") else t


def row_dots(xp: NumPy, a: Array, b: Array, out: Array) -> None:
    """out = Σ a · b over the last axis, by BLAS."""
    xp.matmul(a[..., None, :], b[..., None], out=out[..., None, None])


def _step(view: View) -> tuple[int, int]:
    """Extents of a block along the first two axes; the second is whole unless the first is 1."""
    a, g, s, p = view
    groups = max(BLOCK // (4 * max(s * p, 1)), 1)
    if groups >= g:
        return min(max(groups // max(g, 1), 1), max(a, 1)), max(g, 1)
    return 1, groups


def blocks(view: View) -> Iterator[tuple[slice, slice]]:
    """Slices of the first two axes."""
    rows, groups = _step(view)
    for i in range(0, view[0], rows):
        for j in range(0, view[1], groups):
            yield slice(i, min(i + rows, view[0])), slice(j, min(j + groups, view[1]))


def forward_scratch(t: TensorType, view: View) -> tuple[TensorType, ...]:
    """Statistics of all groups; for halves a block in float32."""
    found = [wide(t).with_shape((2, view[0], view[1]))]
    if wide(t) != t:
        rows, groups = _step(view)
        found.append(wide(t).with_shape((rows * groups * view[2] * view[3],)))
    return tuple(found)


def _start(buffer: Array, shape: tuple[int, ...]) -> Array:
    return buffer.reshape(-1)[: math.prod(shape)].reshape(shape)


def forward(
    xp: NumPy,
    view: View,
    x: Array,
    scale: Array,
    bias: Array | None,
    y: Array,
    epsilon: float,
    scratch: Operands,
    *,
    centre: bool,
) -> tuple[Array, Array]:
    """y = (x - mean) / √(var + epsilon) · scale + bias; without `centre`, mean is 0 and var the mean square.

    Returns mean and 1 / √(var + epsilon) as [a, g] (parts of the scratch).
    """
    x, y = x.reshape(view), y.reshape(view)
    scale = scale.reshape(view[1], view[2], 1)
    bias = None if bias is None else bias.reshape(view[1], view[2], 1)
    mean, inverse = scratch[0]
    count = max(view[2] * view[3], 1)
    for block in blocks(view):
        source, target = x[block], y[block]
        m, inv = mean[block], inverse[block]
        work = target if len(scratch) < 2 else _start(scratch[1], target.shape)
        flat = work.reshape(*m.shape, -1)
        if centre:
            xp.sum(source.reshape(flat.shape), axis=2, dtype=m.dtype, out=m)
            xp.multiply(m, m.dtype.type(1.0 / count), out=m)
            xp.subtract(source, m[:, :, None, None], out=work)
        else:
            work[...] = source
        row_dots(xp, flat, flat, inv)
        xp.multiply(inv, inv.dtype.type(1.0 / count), out=inv)
        xp.add(inv, inv.dtype.type(epsilon), out=inv)
        xp.sqrt(inv, out=inv)
        xp.divide(inv.dtype.type(1), inv, out=inv)
        xp.multiply(work, inv[:, :, None, None], out=work)
        xp.multiply(work, scale[block[1]], out=work if bias is not None else target)
        if bias is not None:
            xp.add(work, bias[block[1]], out=target)
    return mean, inverse


def grad_scratch(t: TensorType, view: View) -> tuple[TensorType, ...]:
    """A block, sums over the groups' elements, sums for scale and bias; for halves two more blocks."""
    rows, groups = _step(view)
    block = wide(t).with_shape((rows * groups * view[2] * view[3],))
    sums = wide(t).with_shape((rows * groups,))
    found = [block, sums, wide(t).with_shape((2, view[1], view[2])), wide(t).with_shape((view[1], view[2]))]
    return tuple(found + ([block, block] if wide(t) != t else []))


def grad(
    xp: NumPy,
    view: View,
    x: Array,
    scale: Array,
    mean: Array | None,
    inverse: Array,
    dy: Array,
    dx: Array,
    scratch: Operands,
) -> tuple[Array, Array]:
    """With x̂ = (x - mean) · inverse and g = dy · scale: dx = inverse · (g - mean(g) - x̂ · mean(g · x̂)).

    `mean` None: x is not centred, and mean(g) falls away.  Returns Σ dy · x̂ and Σ dy as [g, s] (parts of the
    scratch).
    """
    x, dy, dx = x.reshape(view), dy.reshape(view), dx.reshape(view)
    scale = scale.reshape(view[1], view[2], 1)
    mean = None if mean is None else mean.reshape(view[:2])
    inverse = inverse.reshape(view[:2])
    total, against = scratch[2]
    scratch[2].fill(0)
    count = max(view[2] * view[3], 1)
    for block in blocks(view):
        inv = inverse[block]
        given, target = dy[block], dx[block]
        work, product = target, _start(scratch[0], given.shape)
        if len(scratch) > 4:
            work = _start(scratch[4], given.shape)
            work[...] = given
            given, work = work, _start(scratch[5], given.shape)
        if mean is not None:
            xp.subtract(x[block], mean[block][:, :, None, None], out=work)
            xp.multiply(work, inv[:, :, None, None], out=work)
        else:
            xp.multiply(x[block], inv[:, :, None, None], out=work)
        part = scratch[3][: given.shape[1]]
        xp.sum(given, axis=(0, 3), out=part)
        total[block[1]] += part
        xp.multiply(given, work, out=product)
        xp.sum(product, axis=(0, 3), out=part)
        against[block[1]] += part
        xp.multiply(given, scale[block[1]], out=product)
        _finish(xp, product, work, _start(scratch[1], inv.shape), inv, count, target, centre=mean is not None)
    return against, total


def _finish(
    xp: NumPy, g: Array, normal: Array, sums: Array, inverse: Array, count: int, out: Array, *, centre: bool
) -> None:
    """out = inverse · (g - mean(g) - normal · mean(g · normal)); g and normal are overwritten."""
    flat = (*sums.shape, -1)
    factor = sums.dtype.type(1.0 / count)
    row_dots(xp, g.reshape(flat), normal.reshape(flat), sums)
    xp.multiply(sums, factor, out=sums)
    xp.multiply(normal, sums[:, :, None, None], out=normal)
    if centre:
        xp.sum(g.reshape(flat), axis=2, out=sums)
        xp.multiply(sums, factor, out=sums)
        xp.subtract(g, sums[:, :, None, None], out=g)
    xp.subtract(g, normal, out=g)
    xp.multiply(g, inverse[:, :, None, None], out=out)
