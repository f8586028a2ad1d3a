"""Operators with a formula over rows (recompute/language/rows.py): softmax, norms, and whatever has one."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from ....language.ir import Operator
from ....language.rows import RowFormula, formula_over_rows
from ....language.types import need
from ...shared.families import EVERY
from ..code.rows import by_warp, over_rows
from ..device.kernel import Buffer, Call, Kernel
from ..families import Buffers, Family, family
from ..loops.rows import Rows

Kinds = tuple["str | None", ...]


@functools.lru_cache(maxsize=1 << 10)
def _kernel(formula: RowFormula, ins: Kinds, outs: Kinds, pack: int, *, warp: bool, aligned: bool) -> Kernel:
    return Rows(formula, ins, outs, warp, pack, aligned).kernel()


def _pack(n: int, op: Operator) -> int:
    """Elements that a thread takes together: 16 bytes of the smallest input, where the row has as many for every thread
    of a warp.

    The order of sums follows from it, which may not depend on addresses, or on which outputs are wanted.
    """
    most = 16 // min((v.type.numpy.itemsize for v in op.reads()), default=16)
    return next((p for p in (8, 4, 2) if p <= most and n % p == 0 and n >= 32 * p), 1)


def _formula(op: Operator) -> RowFormula | None:
    """Where nothing is reduced (rows of one element), a row is the last dimension."""
    formula = formula_over_rows(op.op, *op.types)
    return formula if formula is None or formula.row else replace(formula, row=frozenset({len(formula.sizes) - 1}))


def along_rows(op: Operator) -> bool:
    """Whether an operator has a formula whose rows are fewer than 2³¹ elements along neighbouring dimensions, and whose
    outputs have each element, or each row, once (but for sums over rows): threads may not write what others read."""
    formula = _formula(op)
    if formula is None:
        return False
    row, dims = sorted(formula.row), tuple(range(len(formula.sizes)))
    once = dims, tuple(d for d in dims if d not in formula.row)
    if any(d not in once for i, d in enumerate(formula.results) if d is not None and i not in formula.columns):
        return False
    return len(row) <= 2 and row[-1] - row[0] < 2 and math.prod(formula.sizes[d] for d in row) < 1 << 31


def launch(op: Operator, ins: Buffers, outs: Buffers) -> Call:
    """The launch that writes these outputs of an operator, the first ones: a warp or a block for each row."""
    formula = need(_formula(op))
    n = math.prod(formula.sizes[d] for d in formula.row)
    rows, warp = math.prod(formula.sizes) // n, by_warp(n)
    kinds = [tuple(None if b is None else b.dtype for b in buffers) for buffers in (ins[: len(op.inputs)], outs)]
    there = [b for b in (*ins[: len(op.inputs)], *outs) if b is not None]
    pack = _pack(n, op)
    aligned = all(b.address % (pack * b.type.numpy.itemsize) == 0 for b in there)
    k = _kernel(formula, *kinds, pack, warp=warp, aligned=aligned)
    return over_rows(k, rows, (*there, rows, n, *formula.sizes[1:]), warp=warp)


@family(EVERY)
class AlongRows(Family):
    """One launch."""

    def accepts(self, op: Operator) -> bool:
        """Where no output is a sum over rows."""
        return along_rows(op) and not need(_formula(op)).columns

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The launch."""
        return [launch(op, ins, outs[: len(op.outputs)])]
