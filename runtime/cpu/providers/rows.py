"""Provider "rows": operators with a formula over rows (recompute/language/rows.py), as generated code."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ....language.element import Expr, nodes
from ....language.ir import Operator
from ....language.kernels import register
from ....language.op import Op
from ....language.rows import REDUCTIONS, RowFormula, formula_over_rows, unrounded
from ....language.types import Operands, TensorType, Types, dtype_name, need
from ...shared.loop_plan import compact
from .. import families
from ..device import native
from ..device.native import Call
from ..loops.kernel import ROWS, Operand, combine
from ..loops.row_columns import SPARE, SummedRows
from ..loops.rows import RowNest
from .loops import ALONE, CHUNKS


@dataclass(frozen=True)
class Plan:
    """How one operator runs: the inputs that its kernel reads, its full outputs, its results of one number a row."""

    nest: RowNest
    sizes: tuple[int, ...]
    reads: tuple[int, ...]
    full: tuple[int, ...]
    results: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def chunk(self) -> int:
        """Indices of the first dimension that are one piece of work, where columns are summed."""
        return ROWS * max(-(-self.sizes[0] // (ROWS * CHUNKS)), 1)

    def scratch(self) -> tuple[TensorType, ...]:
        """The chunks' sums, and blocks in which some rows are added."""
        if not self.columns:
            return ()
        count = math.prod(self.sizes[1 : len(self.sizes) - self.nest.across])
        sums = TensorType("f64", (-(-self.sizes[0] // self.chunk), len(self.columns), count))
        return sums, TensorType(self.nest.sums[0].dtype, (*sums.shape[:2], count + SPARE))


@functools.lru_cache(maxsize=1 << 13)
def plan(op: Op, ins: Types, outs: Types) -> Plan | None:
    """The plan of an operator; None where it has no formula, or its rows do not lie together."""
    formula = formula_over_rows(op, ins, outs)
    if formula is None or not formula.row:
        return None
    last = len(formula.sizes) - 1
    if last not in formula.row or len(formula.row) > 2 or min(formula.row) < last - 1:
        return None
    dims = tuple(range(last + 1))
    outer = tuple(d for d in dims if d not in formula.row)
    full = tuple(i for i, d in enumerate(formula.results) if d == dims)
    single = tuple(i for i, d in enumerate(formula.results) if d == outer and i not in formula.columns)
    if formula.columns and (0 in formula.row or not _over_first(formula)):
        return None
    if len(full) + len(single) + len(formula.columns) < sum(d is not None for d in formula.results):
        return None
    return _made(formula, ins, full, single)


def _over_first(formula: RowFormula) -> bool:
    """Whether all sums over rows are of what varies along the first dimension, or all along it and the inner one."""
    dims = tuple(range(len(formula.sizes)))
    kinds = {(formula.results[i], unrounded(need(formula.outputs[i])).value) for i in formula.columns}
    return kinds in ({(dims[1:], frozenset({0}))}, {(dims[1:-1], frozenset({0, dims[-1]}))})


def _made(formula: RowFormula, ins: Types, full: tuple[int, ...], single: tuple[int, ...]) -> Plan:
    last = len(formula.sizes) - 1
    there = (*full, *single, *formula.columns)
    roots: list[Expr] = [x for i in there if (x := formula.outputs[i]) is not None]
    roots, reads = compact(_numbered(roots, last))
    sums = tuple(unrounded(x).args[0] for x in roots[len(full) + len(single) :])
    operands = []
    for r in reads:
        dims, t = formula.operands[r], ins[r]
        assert dims is not None and t is not None
        operands.append(Operand(t.dtype, tuple(d in dims for d in range(last)), last in dims))
    wide = native.toolchain().wide
    double = 2 if any(o.dtype == "f64" for o in operands) else 1
    nest = RowNest(
        outer=last,
        inputs=tuple(operands),
        outputs=tuple(roots[: len(full)]),
        sums=sums,
        lanes=32 // double,
        results=tuple(roots[len(full) : len(full) + len(single)]),
        within=len(formula.row) - 1,
        few=(32 if wide else 16) // double,
        narrow=(16 if wide else 8) // double,
        across=any(last not in (formula.results[i] or ()) for i in formula.columns),
    )
    return Plan(nest, formula.sizes, reads, full, single, formula.columns)


def _numbered(roots: list[Expr], last: int) -> list[Expr]:
    """The expressions with the inner dimension as -1 in what they reduce."""
    done: dict[int, Expr] = {}
    for x in nodes(roots):
        value = frozenset(-1 if d == last else d for d in x.value) if x.fn in REDUCTIONS else x.value
        done[id(x)] = Expr(x.fn, tuple(done[id(a)] for a in x.args), x.dtype, value)
    return [done[id(r)] for r in roots]


@functools.lru_cache(maxsize=1 << 10)
def _text(nest: RowNest) -> str:
    return SummedRows(nest).text() if nest.sums else nest.kernel()


def plan_of(op: Operator) -> Plan | None:
    """The plan of an applied operator."""
    return plan(op.op, *op.types)


class RowProvider:
    """The provider; see the module's text."""

    name = "rows"

    def accepts(self, op: Operator) -> bool:
        """Depends on the operator and its types only."""
        values = (*op.reads(), *op.writes())
        if native.unavailable() or max((v.size for v in values), default=0) < families.enough():
            return False
        if any(v.dtype == "f16" for v in values) and not native.takes_float16():
            return False
        return plan_of(op) is not None

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Buffers for sums over rows."""
        return need(plan_of(op)).scratch()

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """One call over the rows, and one for each sum of the chunks."""
        p = need(plan_of(op))
        outer, kernel = p.sizes[:-1], native.compile_ir(_text(p.nest))
        arrays = (*(ins[r] for r in p.reads), *(outs[i] for i in (*p.full, *p.results)), *scratch)
        large = math.prod(p.sizes) >= ALONE
        if not p.columns:
            rows = math.prod(outer[: len(outer) - p.nest.within])
            return [Call(kernel, (*arrays, p.sizes[-1], *outer), rows, parallel=large)]
        partial = scratch[0]
        chunks, count, columns = partial.shape
        calls = [Call(kernel, (*arrays, p.sizes[-1], *outer, p.chunk), chunks, parallel=large)]
        for i, number in enumerate(p.columns):
            total = native.compile_ir(combine(dtype_name(outs[number].dtype)))
            words = (partial[:, i], outs[number], chunks, count * columns, 1.0)
            calls.append(Call(total, words, columns, parallel=partial.size >= 8 * ALONE))
        return calls


if not native.unavailable():
    register(RowProvider())
