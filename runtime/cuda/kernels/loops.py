"""Element-wise operators, Loop, column sums and optimizers' updates, as generated kernels of any size.

Dimensions that all operands treat alike are merged (see loop_plan.py).  Without sums one kernel runs all (see
loop_elements.py); sums over all axes but the last take a second one behind it (see loop_columns.py), and workspace.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....language.element import Expr
from ....language.ir import Operator
from ....language.op import Op
from ....language.types import TensorType, need
from ....ops.fused.loop import iteration, loops
from ....ops.tiles import wide
from ...shared.loop_plan import Formula, Sum, Types, compact, formula_roots, merged, outputs
from ..code.parts import MOST_LANES, WIDE, aligned, divisor, lanes
from ..device.kernel import Buffer, Call, Kernel, Launch
from ..families import FAMILIES, Buffers, Family, family
from ..loops.columns import Columns, across, chunks_of, together
from ..loops.elements import Elements, Operand
from ..loops.many import Part, many

#: elements from which on a thread that reads little has two vectors; operands that are little
_TWICE, _FEW = 1 << 20, 2
#: operands of a formula up to which a thread reads whole vectors of each
_MOST_VECTORS = 8
#: vectors of a thread one after another, where its block waits for scalars; elements from which on that is worth it
_TURNS, _WORTH_TURNS = 4, 1 << 15
#: elements from which on an update is a launch of its own, right behind what makes the gradient
_LARGE = 1 << 19


@dataclass(frozen=True, eq=False)
class Plan:
    """How one operator runs: `reads` are the inputs that its kernel is given, `full` the outputs that are no sums.

    `roots`: the expressions of the full outputs, then what is summed.
    """

    sizes: tuple[int, ...]
    operands: tuple[Operand, ...]
    reads: tuple[int, ...]
    roots: tuple[Expr, ...]
    full: tuple[int, ...]
    sums: tuple[Sum, ...]
    results: tuple[str, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    @property
    def rows(self) -> int:
        """Rows, where there are sums."""
        return math.prod(self.sizes[:-1])

    @property
    def columns(self) -> int:
        """The innermost dimension."""
        return self.sizes[-1]

    @property
    def chunks(self) -> tuple[int, int]:
        """Rows of a chunk, and chunks."""
        return chunks_of(self.rows, self.columns)

    @property
    def wide(self) -> bool:
        """Whether indices take 64 bits."""
        return self.size >= WIDE

    def scratch(self) -> tuple[TensorType, ...]:
        """The chunks' sums."""
        count = self.chunks[1]
        return (TensorType("f64", (count, len(self.sums), self.columns)),) if self.sums and count > 1 else ()

    def lanes(self, *, vectors: bool) -> int:
        """Elements of a vector; 1 where none can be read."""
        moved = [*(o.dtype for o in self.operands if o.full), *(x.dtype for x in self.roots[: len(self.full)])]
        count = lanes(moved) if vectors else 1
        if self.sums:
            count = min(count, MOST_LANES // 2)
            while self.columns % count:
                count //= 2
        elif len(self.sizes) > 1 and count > 4 and self.columns % count and self.columns % 4 == 0:
            count = 4  # vectors of half the length that stay within the innermost dimension
        return count

    def divisors(self) -> list[Any]:
        """Divisors of all dimensions but the outermost; of rows, where there are sums."""
        return [divisor(s, wide=self.wide) for s in (self.sizes[1:-1] if self.sums else self.sizes[1:])]


@functools.lru_cache(maxsize=1 << 13)
def plan(op: Op, ins: Types, outs: Types) -> Plan:
    """The plan for an operator that `loops` accepts."""
    exprs, sums = outputs(op, ins, outs)
    sizes, patterns = merged(iteration(op, ins, outs), [None if t is None else t.shape for t in ins], last=bool(sums))
    whole = {d for d, size in enumerate(sizes) if size != 1}
    full = tuple(i for i, x in enumerate(exprs) if x is not None and all(s.output != i for s in sums))
    roots, reads = compact([x for i in (*full, *(s.output for s in sums)) if (x := exprs[i]) is not None])
    operands = [
        Operand(t.dtype, tuple(sorted(patterns[r])), whole <= patterns[r]) for r in reads if (t := ins[r]) is not None
    ]
    results = tuple(t.dtype for s in sums if (t := outs[s.output]) is not None)
    return Plan(sizes, tuple(operands), reads, tuple(roots), full, tuple(sums), results)


@functools.lru_cache(maxsize=1 << 13)
def _elements(p: Plan, *, vectors: bool) -> Elements:
    width = p.lanes(vectors=vectors)
    inside = len(p.sizes) == 1 or p.columns % width == 0
    kernel = Elements(len(p.sizes), p.operands, p.roots, width, inside, wide=p.wide)
    if kernel.slow:
        return dataclasses.replace(kernel, turns=_TURNS if p.size >= _WORTH_TURNS else 1)
    few = sum(o.full for o in p.operands) <= _FEW and p.size >= _TWICE
    return dataclasses.replace(kernel, ahead=2 if few else 1)


@functools.lru_cache(maxsize=1 << 13)
def _kernel(made: Elements) -> Kernel:
    return made.kernel()


@functools.lru_cache(maxsize=1 << 12)
def _many(p: Plan, aliases: tuple[int, ...]) -> tuple[Kernel, int]:
    """The kernel of many such updates, and the elements of a block."""
    kernel = Elements(1, p.operands, p.roots, p.lanes(vectors=True), True)
    kernel = dataclasses.replace(kernel, turns=_TURNS if kernel.slow else 1)
    return many(kernel, aliases), kernel.per_block


@functools.lru_cache(maxsize=1 << 12)
def _columns(p: Plan, *, vectors: bool) -> Kernel:
    count, width = len(p.full), p.lanes(vectors=vectors)
    direct = () if p.chunks[1] > 1 else p.results
    return Columns(
        len(p.sizes), p.operands, p.roots[:count], p.roots[count:], p.columns, width, direct, p.wide
    ).kernel()


def plan_of(op: Operator) -> Plan:
    """The plan of an applied operator."""
    return plan(op.op, *op.types)


@family("*")
class Loops(Family):
    """All that `loops` says a GPU's loops run."""

    def accepts(self, op: Operator) -> bool:
        """Any operator with an element for its types, and column sums."""
        return loops(op, device=True)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        return plan_of(op).scratch()

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """One launch, and one for sums of several chunks."""
        p = plan_of(op)
        sources = [b for r in p.reads if (b := ins[r]) is not None]
        full = [b for i in p.full if (b := outs[i]) is not None]
        vectors = aligned(b.address for b in (*sources, *full))
        if p.sums:
            sums = [b for s in p.sums if (b := outs[s.output])]
            return _bind_sums(p, [*sources, *full], sums, scratch, vectors=vectors)
        if not p.size:
            return []
        launch = _launch(p, sources, full, vectors=vectors)
        part = _part(op, p, sources, full) if vectors and op.op.updates and p.size < _LARGE else None
        return [launch if part is None else dataclasses.replace(launch, part=part)]


def _launch(p: Plan, given: Sequence[Buffer], full: Sequence[Buffer], *, vectors: bool) -> Launch:
    elements = _elements(p, vectors=vectors)
    return _kernel(elements).blocks(-(-p.size // elements.per_block), args=(*given, *full, p.size, *p.divisors()))


@functools.lru_cache(maxsize=1 << 12)
def _formula_plan(formula: Formula, numbers: tuple[float, ...], kind: str, *types: Types) -> Plan:
    sizes, patterns, roots = formula_roots(formula, numbers, kind, *types)
    whole = {d for d, size in enumerate(sizes) if size != 1}
    operands = [Operand(need(t).dtype, tuple(sorted(d)), whole <= d) for t, d in zip(types[0], patterns, strict=True)]
    return Plan(sizes, tuple(operands), (), roots, tuple(range(len(roots))), (), ())


def computed(
    formula: Formula, kind: str, ins: Sequence[Buffer], outs: Sequence[Buffer], numbers: tuple[float, ...] = ()
) -> list[Call]:
    """The launch that works out an element's formula: of the elements of `ins`, as element type `kind`, and `numbers`,
    the elements of `outs`, to whose shape all inputs broadcast."""
    p = _formula_plan(formula, numbers, kind, *(tuple(b.type for b in buffers) for buffers in (ins, outs)))
    vectors = len(ins) <= _MOST_VECTORS and aligned(b.address for b in (*ins, *outs))
    return [_launch(p, ins, outs, vectors=vectors)] if p.size else []


FAMILIES.computed = computed


def converted(x: Buffer, y: Buffer) -> list[Call]:
    """The launch that copies elements to those of another type."""
    return computed(_same, wide(x.dtype), [x], [y])


def _same(x: Expr) -> tuple[Expr, ...]:
    return (x,)


def added(x: Expr, y: Expr) -> tuple[Expr, ...]:
    """Their sum, as the formula of an element."""
    return (x + y,)


def _part(op: Operator, p: Plan, sources: list[Buffer], full: list[Buffer]) -> Part | None:
    """The update as one of many, where each output is in the buffer of an operand that is read."""
    aliases = [next((j for j, r in enumerate(p.reads) if r == i), -1) for i in op.op.updates[: len(full)]]
    if len(p.sizes) > 1 or any(j < 0 or sources[j].address != b.address for j, b in zip(aliases, full, strict=True)):
        return None
    scalars = tuple(b for b, o in zip(sources, p.operands, strict=True) if o.scalar)
    arrays = tuple(b for b, o in zip(sources, p.operands, strict=True) if o.full)
    kernel, per_block = _many(p, tuple(aliases))
    return Part(kernel, scalars, arrays, per_block)


def _bind_sums(
    p: Plan, operands: list[Buffer], sums: list[Buffer], scratch: Sequence[Buffer], *, vectors: bool
) -> list[Call]:
    if not p.columns:
        return []
    chunk, count = p.chunks
    kernel, width = _columns(p, vectors=vectors), p.lanes(vectors=vectors)
    by = [float(p.rows if s.mean else 1) for s in p.sums]
    grid = (-(-p.columns // (width * across(p.columns, width))), count)
    sizes = (p.rows, p.columns, chunk)
    if count == 1:
        return [kernel.blocks(*grid, args=(*operands, *sums, *sizes, *by, *p.divisors()))]
    last, wide = together(p.results, count, p.columns)
    return [
        kernel.blocks(*grid, args=(*operands, scratch[0], *sizes, *p.divisors())),
        last.blocks(-(-p.columns // wide), len(sums), args=(scratch[0], *sums, count, p.columns, *by)),
    ]
