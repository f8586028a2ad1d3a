"""Gradients of gathers, and scatters; sums in the order of the indices, as in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import Operands, TensorType, need
from ...shared.families import SharedFamily
from ...shared.kernels.index import HOW, form_of, how, numbered, place, shapes, split, together
from ...shared.texts import kernel
from ...shared.trouble import STATUS
from ..families import enough, family, floats
from .copy import words

#: columns of a piece of work of sums: each goes through all indices
_COLUMNS = 32


@kernel
def reduce_rows(indices, dy, dx, code, status, begin, end):
    """Adds the rows of dy [outer, k, inner] to those of dx [outer, n, inner]: pieces of `_COLUMNS` of outer · inner."""
    inner = dx.shape[2]
    low, high = begin * _COLUMNS, min(end * _COLUMNS, dx.shape[0] * inner)
    for o in range(low // inner, (high + inner - 1) // inner):
        first, last = max(low - o * inner, 0), min(high - o * inner, inner)
        for i in range(indices.size):
            at = place(indices[i], dx.shape[1], status)
            if at >= 0:
                a, b = dy[o, i], dx[o, at]
                for c in range(first, last):
                    b[c] = together(b[c], a[c], code)


@kernel
def reduce_elements(indices, dy, dx, code, status, begin, end):
    """Adds dy [outer, k, inner] at its places: outer rows [begin, end)."""
    for o in range(begin, end):
        for i in range(dy.shape[1]):
            for c in range(dy.shape[2]):
                at = place(indices[o, i, c], dx.shape[1], status)
                if at >= 0:
                    dx[o, at, c] = together(dx[o, at, c], dy[o, i, c], code)


@family("GatherGrad", "GatherNDGrad", "GatherElementsGrad", "AddRows", "ScatterND", "ScatterElements")
class Scatters(SharedFamily):
    """(x, indices, updates), or (indices, dy) → x, or zeros, with rows or elements replaced or reduced.

    Every thread has its own columns, or rows of elements that lie as the indices do.
    """

    def accepts(self, op: Operator) -> bool:
        """Many elements; floats where they are reduced; for the gradients of rows, some columns to share out."""
        form, name = form_of(op), op.op.name
        if how(op) == "none" or not form.fits:
            return form.fits and need(op.outputs[0]).size >= enough()
        return floats(op) and (self._alike(op) if "Elements" in name else "ND" in name or form.columns >= 32)

    def _alike(self, op: Operator) -> bool:
        """Whether indices of elements have the output's sizes but for the axis."""
        rule: Any = op.op
        return "Elements" in rule.name and len({split(s, rule.axis)[::2] for s in shapes(op)}) == 1

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Row numbers, where the indices are no such."""
        own = self._alike(op) or op.op.name in ("GatherGrad", "AddRows")
        return () if own else (TensorType("i32", (form_of(op).count,)),)

    def works(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> Sequence[Any]:
        """A copy or zeros, then the updates."""
        rule: Any = op.op
        *before, indices, updates = ins[: 2 if rule.name.endswith("Grad") else 3]
        y, form, code = outs[0], form_of(op), HOW[how(op)]
        first = self.place.copied(y, *before) if before else self.place.filled(y, 0)
        if not updates.size or not y.size:
            return first
        dy, dx = (words(updates), words(y)) if how(op) == "none" else (updates, y)
        if self._alike(op):
            rows = split(indices.shape, rule.axis)
            operands = indices.reshape(rows), dy.reshape(rows), dx.reshape(split(y.shape, rule.axis))
            return [*first, reduce_elements(*operands, code, STATUS, work=rows[0])]
        if scratch:
            first = [*first, numbered(op, indices, scratch[0])]
        dy, dx = (v.reshape(form.outer, -1, form.inner) for v in (dy, dx))
        numbers = scratch[0] if scratch else indices.reshape(-1)
        return [*first, reduce_rows(numbers, dy, dx, code, STATUS, work=-(-form.columns // _COLUMNS))]
