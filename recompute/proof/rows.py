"""Tables of which ranks have some rows each: what is taken elsewhere counts as zero, and all that is taken adds up.

Whether indices count rows from where a part begins, and a mask says which rows are in it, is tried: both are functions
of one whole number, computed for every one that comes into question.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..language.types import Array, TensorType, Types, need
from ..ops.common import Elementwise
from ..ops.elementwise.choose import Where
from ..ops.indexing.gather import Gather, GatherGrad
from ..ops.indexing.scatter import GatherElements, GatherElementsGrad
from .numbers import Numbers, rule
from .rules import Given, elementwise
from .table import Partial
from .views import View

#: the largest number that is tried, and most places of a constant
MOST, MANY = 1 << 22, 9


@rule(Where)
def masked(n: Numbers, op: Where, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """Rows of a part of a table, zero where the mask is false: their part of what is taken of the whole table."""
    views = elementwise(n, op, given, ins, outs)
    view = views[0] if views else None
    taken = view and _taken(n, view.base)
    part = taken and view and taken.part(view)
    return [part] if part else views


@rule(GatherGrad, GatherElementsGrad)
def added(n: Numbers, op: Any, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """By its own account of its axes, not its expansion's; of masked rows and a part of a table: the whole's rows."""
    at, dy = given
    axis, size = op.axis % len(op.shape), op.shape[op.axis]
    pair = _masked(n, dy.base) if dy is not None else None
    if at is not None and dy is not None and pair is not None:
        mask, rows = (v.part(dy) for v in pair)
        source = _source(n, mask, at, op, dy.shape, size) if mask is not None else None
        if source is not None and rows is not None:
            index, start, extent = source
            shape = (*op.shape[:axis], extent, *op.shape[axis + 1 :])
            t = need(outs[0]).with_shape(shape)
            whole = n.apply(dataclasses.replace(op, shape=shape), [index, rows], ins, (t,))[0]
            part = whole and whole.sliced(axis, start, size)
            if part is not None:
                return [part]
    return n.opaque(op, given, ins, outs)


def _masked(n: Numbers, base: int) -> tuple[View, View] | None:
    """The mask and the values, in the order of `base`, of an expression that is these or zero; None for another."""
    name, *rest = n.nodes[base].key
    if not isinstance(name, tuple) or name[0] != "Where" or n.scalar(rest[0][2][0]) != 0:
        return None
    return n.operand(base, 0), n.operand(base, 1)


def _taken(n: Numbers, base: int) -> View | None:
    """The contribution of masked rows of a table's part to those of the whole table, in the order of `base`."""
    pair = _masked(n, base)
    taken = n.nodes[pair[1].base] if pair else None
    if pair is None or taken is None or not isinstance(op := taken.key[0], (Gather, GatherElements)):
        return None
    (table, at), shape = taken.operands, taken.shape
    axis = op.axis % len(table.shape)
    source = _source(n, pair[0], at, op, shape, table.shape[axis], pair[1])
    cuts = [n.slice_of([v], [(0, axis)]) for v in (table, table.plain())] if source else ()
    cut = next((c for c in cuts if c and source and (c[0], c[2]) == source[1:]), None)
    if source is None or cut is None:
        return None
    start, size, extent, (whole,) = cut
    dtype = n.nodes[base].key[0][2][1]
    types = (TensorType(dtype, need(whole).shape), TensorType("i64", at.shape))
    total = n.apply(op, [whole, source[0]], types, (TensorType(dtype, shape),))[0]
    part = total and n.partial(Partial(total.bare(), ("rows", axis), ((start, start + size),), extent, total))
    return part and part.part(pair[1])


def _source(
    n: Numbers, mask: View, at: View, op: Any, shape: tuple[int, ...], size: int, order: View | None = None
) -> tuple[View, int, int] | None:
    """For indices into a part of `size` rows: those into the whole table, where the part begins, and the whole's rows.

    None unless `mask`, for rows of `shape` in this order, is true just where indices are in the part.
    """
    beside = len(shape) - op.axis % len(shape) - len(at.shape) if isinstance(op, (Gather, GatherGrad)) else 0
    if not n.complete(at) or n.sizes[mask.base] != n.sizes[at.base]:
        return None
    wanted = View.whole(mask.base, (*at.shape, *[1] * beside)).expanded(shape)
    wanted = wanted and (wanted.part(order) if order else wanted)
    if wanted is None or wanted.bare() != mask.bare():
        return None
    key = (mask.base, at.base, size)
    if key not in n.parts:
        n.parts[key] = next(_parts(n, *key), None)
    part = n.parts[key]
    return part and (View.whole(part[0], at.shape), *part[1:])


def _parts(n: Numbers, mask: int, local: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The value of which both are functions that take rows of a part, where it begins, and rows of the whole table.

    Of a constant, which may be another number as well, the index may be some of the places where it is read.
    """
    below = [local, mask]
    for at in below:
        below += [b for b, _ in _operands(n, at) if b not in below]
    largest = max((abs(float(c)) for at in below if (c := n.scalar(at)) is not None), default=MOST)
    domain = np.arange(-2 * int(largest) - 2, 2 * int(largest) + 3) if largest < MOST else np.arange(0)
    for at in below[2:]:
        if n.sizes[at] != n.sizes[local]:
            continue
        places = [(b, k) for b in below for k, (x, t) in enumerate(_operands(n, b)) if x == at and t[0] in "iu"]
        fewest = len(places) if n.scalar(at) is None or len(places) > MANY else 1
        for some in (x for count in range(fewest, len(places) + 1) for x in itertools.combinations(places, count)):
            values: dict[Any, Array | None] = dict.fromkeys(some, domain)
            part = _rows(domain, _values(n, mask, values), _values(n, local, values), size)
            if part is not None:
                yield at, *part


def _rows(domain: Array, inside: Array | None, rows: Array | None, size: int) -> tuple[int, int] | None:
    """Where a part of `size` rows begins, and the whole's rows, if for the indices of the domain these are what is in
    the part, and rows of it; None where not all of that is so."""
    if inside is None or rows is None or not inside.shape == rows.shape == domain.shape or inside.dtype != bool:
        return None
    if not (inside & (domain >= 0)).any():
        return None
    start = int(domain[inside & (domain >= 0)].min())
    extent = start - int(domain[inside].min())
    row = np.where(domain < 0, domain + extent, domain)
    legal, within = (row >= 0) & (row < extent), (rows >= -size) & (rows < size)
    meant = legal & (row >= start) & (row < start + size)
    fits = (inside[legal] == meant[legal]).all() and (within == legal).all() and start + size <= extent <= domain[-1]
    return (start, extent) if fits and (rows[meant] % size == row[meant] - start).all() else None


def vanishes(n: Numbers, base: int) -> bool:
    """Whether all elements of an expression are 0 if the others in it are finite, as is what is updated by no gradient.

    Of sums, products and quotients it is told by what they are linear in, of other functions by their value.
    """
    if base not in n.zeros:
        node = n.nodes[base]
        name = node.key[0] if isinstance(node.key[0], tuple) else ()
        is_elementwise = len(name) == 4 and isinstance(name[1], Elementwise)
        zero = {k for k, v in enumerate(node.operands) if vanishes(n, v.base)} if is_elementwise else set()
        if zero and name[1].linear:
            undefined = name[0] == "Div" and 1 in zero
            n.zeros[base] = any(map(zero.issuperset, name[1].linear)) and not undefined
        else:
            value = _values(n, base, {node.operands[k].base: np.zeros(1) for k in zero})
            n.zeros[base] = value is not None and not value.any()
    return n.zeros[base]


def _operands(n: Numbers, base: int) -> list[tuple[int, str]]:
    """Operands, and their dtypes, of an element-wise expression whose elements are those at the same places of these,
    which may be constants; nothing for others."""
    name, *rest = n.nodes[base].key
    if not isinstance(name, tuple) or len(name) != 4 or not isinstance(name[1], Elementwise) or name[3]:
        return []
    bases = [b for b, _ in rest[0]]
    size = n.sizes[base]
    steps = tuple(1 if n.sizes[b] == size else 0 for b in bases)
    plain = rest[1] == (((size, steps),) if size > 1 else ()) and all(n.sizes[b] in (1, size) for b in bases)
    return list(zip(bases, name[2], strict=True)) if plain and not any(start for _, start in rest[0]) else []


def _values(n: Numbers, base: int, values: dict[Any, Array | None]) -> Array | None:
    """The value of an expression if some operators' operands are as in `values`; None if that does not decide it."""
    if base not in values:
        operands, constant = _operands(n, base), n.scalar(base)
        arrays = [
            values[at] if (at := (base, k)) in values else _values(n, b, values) for k, (b, _) in enumerate(operands)
        ]
        values[base] = None if constant is None else np.array(constant)
        if operands and all(a is not None for a in arrays):
            op = n.nodes[base].key[0][1]
            like = max((a.shape for a in arrays if a is not None), key=len)
            types = [TensorType(t, like) for _, t in operands]
            ins = [np.broadcast_to(np.asarray(a).astype(t.numpy), like) for a, t in zip(arrays, types, strict=True)]
            outs = op.infer(*types)
            out = np.zeros(like, outs[0].numpy)
            op.compute(ins, [out], [np.zeros(t.shape, t.numpy) for t in op.scratch(types, outs)])
            values[base] = out
    return values[base]
