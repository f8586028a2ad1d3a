"""Tables of which each rank has some rows: what is taken elsewhere counts as zero, and ranks add up what they took.

So an embedding whose vocabulary is divided gives partial sums (Shoeybi et al. 2019, arXiv 1909.08053), and its gradient
is that of the rank's own rows.  It holds for any axis that indices count along: the labels' scores of a head, too.
"""

from __future__ import annotations

from collections.abc import Callable

from ...language.axes import Cut, Partial
from ...language.builder import Builder
from ...language.factors import SUM
from ...language.ir import Operator, Value
from ...language.types import Values, need, present
from ...ops.indexing.gather import Gather, GatherGrad
from ...ops.indexing.scatter import GatherElements, GatherElementsGrad
from .reshard import State

_TAKES, _ADDS = (Gather, GatherElements), (GatherGrad, GatherElementsGrad)
#: states of the inputs and the outputs
Way = tuple[tuple[State, ...], tuple[State, ...]]


def row_way(o: Operator, state: Callable[[str], State], wanted: Callable[[str], State]) -> Way | None:
    """How an operator that takes rows by number runs on a table that is cut along them; None where it is not.

    `state`: what a rank has of a value; `wanted`: what it is to have.
    """
    if isinstance(o.op, _TAKES):
        x = need(o.inputs[0])
        cut = state(x.name)
        fits = x.type.is_float and _along(cut, o.op.axis, x.ndim)
        return ((cut, None), (Partial(SUM),)) if fits else None
    if isinstance(o.op, _ADDS):
        y = next(o.writes())
        cut = wanted(y.name)
        return ((None, None), (cut,)) if _along(cut, o.op.axis, y.ndim) else None
    return None


def _along(cut: State, axis: int, ndim: int) -> bool:
    return isinstance(cut, Cut) and cut.place.axis == axis % ndim and cut.place.outer == 1


def rows_of_part(b: Builder, o: Operator, cut: Cut, rank: int, operands: Values) -> Operator:
    """Emits what the `rank`-th rank runs of an operator that takes rows by number, and returns the last operator of it.

    `operands`: the operator's inputs, of which the table is the rank's part.
    """
    size = cut.place.inner
    op = o.op
    if isinstance(op, _TAKES):
        x, indices = present(*operands)
        local, inside = _local(b, indices, rank * size, size, size * cut.size)
        taken = b.emit(op, x, local)
        mask = inside if isinstance(op, GatherElements) else _beside(b, inside, op.axis % x.ndim, taken)
        rows = b.Where(mask, taken, b.constant(0, taken))
    else:
        assert isinstance(op, _ADDS)
        indices, dy = present(*operands)
        axis = op.axis % len(op.shape)
        local, inside = _local(b, indices, rank * size, size, size * cut.size)
        mask = inside if isinstance(op, GatherElementsGrad) else _beside(b, inside, axis, dy)
        masked = b.Where(mask, dy, b.constant(0, dy))
        shape = (*op.shape[:axis], size, *op.shape[axis + 1 :])
        rows = b.emit(type(op)(shape=shape, axis=op.axis), local, masked)
    last = b.operators.pop()
    return last.renamed({rows.name: next(o.writes()).name})


def _local(b: Builder, indices: Value, start: int, size: int, whole: int) -> tuple[Value, Value]:
    """Indices into a part of `size` rows from `start` on (0 for rows elsewhere), and which ones are in it.

    Those outside of the whole table stay as they are, so that they are reported.
    """
    zero = b.constant(0, indices)
    count = b.constant(whole, indices)
    row = b.Where(b.Less(indices, zero), b.Add(indices, count), indices)
    wrong = b.Or(b.Less(row, zero), b.GreaterOrEqual(row, count))
    moved = b.Sub(row, b.constant(start, indices)) if start else row
    inside = b.And(b.GreaterOrEqual(moved, zero), b.Less(moved, b.constant(size, indices)))
    return b.Where(wrong, indices, b.Where(inside, moved, zero)), inside


def _beside(b: Builder, inside: Value, axis: int, rows: Value) -> Value:
    """A mask of indices, along the axes behind them."""
    more = rows.ndim - axis - inside.ndim
    return b.Reshape(inside, shape=(*inside.shape, *[1] * more)) if more else inside
