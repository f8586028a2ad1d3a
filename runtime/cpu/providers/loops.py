"""Provider "loops": Loop and single element-wise operators, column sums and optimizers' updates, as generated code.

Dimensions that all operands treat alike are merged, so that nearly everything becomes [rows, columns] with operands
that are full, one a row, one a column, or one.  What depends on columns only is computed once, into a vector, by a
first kernel.  A column sum is kept in the element type for 64 rows, then in double for a chunk of rows; a last kernel
adds the chunks in order.  Rows of a chunk follow from the shape alone, so that the bits do not depend on threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....language.element import HALVES, Expr, cast, nodes
from ....language.ir import Operator
from ....language.kernels import register
from ....language.op import Op
from ....language.types import Array, Operands, TensorType, dtype_name, need
from ....ops.fused.loop import iteration, loops
from ...shared.loop_plan import Formula, Sum, Types, compact, formula_roots, hoisted, merged, outputs
from ..device import native
from ..device.native import Call
from ..families import FAMILIES
from ..loops.kernel import PANEL, ROWS, Nest, Operand, combine
from ..loops.rows import LONG_FUNCTIONS

#: elements of a row that are one piece of work
PIECE = 4096
#: chunks of rows that a column sum has at most
CHUNKS = 32
#: elements below which a second thread is not worth waking
ALONE = 1 << 15


@dataclass(frozen=True)
class Plan:
    """How one operator runs.

    `reads`: for each operand of the nest the operator's input, or after those, counted from `inputs`, a hoisted vector.
    """

    nest: Nest
    sizes: tuple[int, ...]
    inputs: int
    reads: tuple[int, ...]
    full: tuple[int, ...]
    sums: tuple[Sum, ...]
    first: Nest | None
    first_reads: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the nest."""
        return math.prod(self.sizes[:-1])

    @property
    def chunk(self) -> int:
        """Rows of a chunk."""
        return ROWS * max(-(-self.rows // (ROWS * CHUNKS)), 1)

    def scratch(self) -> tuple[TensorType, ...]:
        """Hoisted vectors, then the chunks' sums."""
        types = [TensorType(x.dtype, (self.sizes[-1],)) for x in (self.first.outputs if self.first else ())]
        if self.sums:
            types.append(TensorType("f64", (-(-self.rows // self.chunk), len(self.sums), self.sizes[-1])))
        return tuple(types)


@functools.lru_cache(maxsize=1 << 13)
def plan(op: Op, ins: Types, outs: Types) -> Plan:
    """The plan for an operator that `loops` accepts."""
    shape = iteration(op, ins, outs)
    exprs, sums = outputs(op, ins, outs)
    sizes, patterns = merged(shape, [None if t is None else t.shape for t in ins], last=bool(sums))
    outer = len(sizes) - 1
    varies = [frozenset(d - len(sizes) if d == outer else d for d in p) for p in patterns]
    full = tuple(i for i, x in enumerate(exprs) if x is not None and all(s.output != i for s in sums))
    roots = [*(_there(exprs[i]) for i in full), *(_summand(_there(exprs[s.output])) for s in sums)]
    roots, vectors = hoisted(roots, varies, len(ins), frozenset([-1])) if outer else (roots, [])
    operands = [Operand(t.dtype if t else "f32", *_pattern(v, outer)) for t, v in zip(ins, varies, strict=True)]
    operands += [Operand(x.dtype, (False,) * outer, True) for x in vectors]
    roots, reads = compact(roots)
    sources = tuple(operands[r] for r in reads)
    nest = Nest(outer, sources, tuple(roots[: len(full)]), tuple(roots[len(full) :]), _lanes(roots))
    first: Nest | None = None
    first_reads: tuple[int, ...] = ()
    if vectors:
        vectors, first_reads = compact(vectors)
        first = Nest(0, tuple(Operand(operands[r].dtype, (), operands[r].inner) for r in first_reads), tuple(vectors))
    return Plan(nest, sizes, len(ins), reads, full, tuple(sums), first, first_reads)


def _lanes(roots: Sequence[Expr]) -> int:
    """Elements worked on at a time, more of them where long functions wait for each other; bits do not depend on it."""
    wide = native.toolchain().wide
    return 32 if wide and any(x.fn in LONG_FUNCTIONS and x.dtype == "f32" for x in nodes(roots)) else 16


def _summand(x: Expr) -> Expr:
    """The summand: elements of 16 bits as float32."""
    return cast(x, "f32") if x.dtype in HALVES else x


def _there(x: Expr | None) -> Expr:
    assert x is not None
    return x


def _pattern(varies: frozenset[int], outer: int) -> tuple[tuple[bool, ...], bool]:
    return tuple(d in varies for d in range(outer)), -1 in varies


@functools.lru_cache(maxsize=1 << 12)
def _text(nest: Nest) -> str:
    return nest.kernel()


def plan_of(op: Operator) -> Plan:
    """The plan of an applied operator."""
    return plan(op.op, *op.types)


def row_call(nest: Nest, sizes: Sequence[int], arrays: Operands) -> Call:
    """The call of a nest without sums."""
    inner = max(sizes[-1], 1)
    piece = min(inner, PIECE)
    pieces = -(-inner // piece)
    work = math.prod(sizes[:-1]) * pieces if math.prod(sizes) else 0
    words = (*arrays, sizes[-1], piece, pieces, *sizes[:-1])
    return Call(native.compile_ir(_text(nest)), words, work, parallel=math.prod(sizes) >= ALONE)


@functools.lru_cache(maxsize=1 << 12)
def _formula_nest(formula: Formula, numbers: tuple[float, ...], kind: str, *types: Types) -> tuple[Nest, Any]:
    sizes, patterns, roots = formula_roots(formula, numbers, kind, *types)
    outer = len(sizes) - 1
    varies = [frozenset(-1 if d == outer else d for d in p) for p in patterns]
    operands = tuple(Operand(need(t).dtype, *_pattern(v, outer)) for t, v in zip(types[0], varies, strict=True))
    return Nest(outer, operands, roots, (), _lanes(roots)), sizes


def computed(formula: Formula, kind: str, ins: Operands, outs: Operands, numbers: tuple[float, ...] = ()) -> Call:
    """The call that works out an element's formula: of the elements of `ins`, as element type `kind`, and `numbers`,
    the elements of `outs`, to whose shape all inputs broadcast."""
    nest, sizes = _formula_nest(formula, numbers, kind, *(tuple(map(TensorType.of, arrays)) for arrays in (ins, outs)))
    return row_call(nest, sizes, [*ins, *outs])


FAMILIES.computed = lambda *given: [computed(*given)]


def _same(x: Expr) -> tuple[Expr, ...]:
    return (x,)


def converted(x: Array, y: Array) -> Call:
    """The call that copies floats to those of another type, of which one is float32."""
    return computed(_same, "f32", [x], [y])


class LoopProvider:
    """Loop, and what `loops` says would be in one."""

    name = "loops"

    def accepts(self, op: Operator) -> bool:
        """Depends on the operator and its types only."""
        if native.unavailable() or not loops(op):
            return False
        return native.takes_float16() or all(v.dtype != "f16" for v in (*op.reads(), *op.writes()))

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Vectors of what depends on columns only, and the sums of chunks."""
        return plan_of(op).scratch()

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Vectors, the loop, the chunks' total."""
        p = plan_of(op)
        calls, vectors = [], list(scratch[: len(p.first.outputs)] if p.first else ())
        sources: list[Any] = [*ins, *[None] * (p.inputs - len(ins)), *vectors]
        if p.first is not None:
            calls.append(row_call(p.first, p.sizes[-1:], [*(sources[r] for r in p.first_reads), *vectors]))
        arrays = [*(sources[r] for r in p.reads), *(outs[i] for i in p.full)]
        if not p.sums:
            return [*calls, row_call(p.nest, p.sizes, arrays)]
        partial = scratch[-1]
        chunks, panels = partial.shape[0], -(-p.sizes[-1] // PANEL)
        words = (*arrays, partial, p.sizes[-1], p.chunk, chunks, *p.sizes[:-1])
        large = math.prod(p.sizes) >= ALONE
        calls.append(Call(native.compile_ir(_text(p.nest)), words, chunks * panels, parallel=large))
        for i, s in enumerate(p.sums):
            out = outs[s.output]
            total = native.compile_ir(combine(dtype_name(out.dtype)))
            words = (partial[:, i], out, chunks, len(p.sums) * p.sizes[-1], s.factor)
            calls.append(Call(total, words, p.sizes[-1], parallel=partial.size >= 8 * ALONE))
        return calls


if not native.unavailable():
    register(LoopProvider())
