"""LLVM IR of kernels over rows: reductions of a row, and what is made of its elements with them.

A row is the inner dimension of a loop nest, or the last outer one and the inner one together (`within`).  Reductions
that need no other one's result share a walk over the row.  Sums run in blocks of 2,048 elements in the element type,
which are added in float64; in what order follows from the row's length and the number of lanes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....language.element import Expr, nodes
from ....language.rows import LENGTH, REDUCTIONS, terms, walks
from ..code.emit import module
from .expressions import kind, stored
from .kernel import Act, Nest, NestKernel

#: functions of long chains of instructions
LONG_FUNCTIONS = ("exp", "expm1", "log", "log1p", "tanh", "erf")
#: elements of a row that are summed in their own type
BLOCK = 2048


@dataclass(frozen=True)
class RowNest(Nest):
    """A nest whose expressions have reductions along the row.

    `results`: expressions of one number a row.  `within`: how many of the outer dimensions, the last ones, are part of
    the row (0 or 1).  `few`: lanes of registers where long functions are computed; `narrow`: where less than a register
    is left of a row.  Arguments of the kernel: addresses of the inputs, the full outputs, the results; the inner size;
    the outer sizes.  Work: rows.  With `sums`, over the first dimension and, with `across`, over the inner one: see
    row_columns.py.
    """

    results: tuple[Expr, ...] = ()
    within: int = 0
    few: int = 16
    narrow: int = 16
    across: bool = False

    def kernel(self) -> str:
        """The module's text, without sums over rows."""
        return RowKernel(self).text()


class RowKernel(NestKernel):
    """Writes one nest."""

    nest: RowNest

    def __init__(self, nest: RowNest) -> None:
        super().__init__(nest, (*nest.outputs, *nest.results, *nest.sums))
        #: dimensions of a row's number
        self.rows_of = frozenset(range(nest.outer - nest.within))
        #: node → the scalar register of what does not vary along the inner dimension
        self.single: dict[int, str] = {}
        #: node → how many walks over the row must be done before it can be known
        self.depth = walks(self.roots)
        self.reductions = [x for x in nodes(self.roots) if x.fn in REDUCTIONS]
        self.walks = max((self.depth[id(x)] for x in self.reductions), default=0)
        self.kept = self.kept_in_output()
        self.narrow = min(nest.lanes, nest.narrow)

    def text(self) -> str:
        """Entry, the loop over rows, and what is declared."""
        nest, code = self.nest, self.code
        self.take_arguments(len(nest.inputs) + len(nest.outputs) + len(nest.results))
        last = nest.outer - nest.within - 1
        with code.when(code.let("icmp slt i64 %begin, %end")):
            self.scalars(frozenset(), 0)
            values, single = self.known, self.single
            if last >= 0:
                self.locate("%begin", last + 1)
            with code.loop("%begin", "%end"):
                self.known, self.single = dict(values), dict(single)
                self.whole_row()
                if last >= 0:
                    self.advance(last)
        return module(code)

    def take_arguments(self, count: int) -> None:
        """`count` addresses, then sizes."""
        nest, code = self.nest, self.code
        self.index = [code.room("i64") for _ in range(nest.outer)]
        self.pointers = [self.argument(i, "ptr") for i in range(count)]
        self.size = self.argument(count)
        self.sizes = [self.argument(count + 1 + d) for d in range(nest.outer)]
        self.strides = self.all_strides(self.row_pattern)

    def whole_row(self) -> None:
        """The walks that reduce the row, then the one that writes it."""
        self.scalars(self.rows_of, 0)
        for walk in range(1, self.walks + 1):
            self.reduce(walk)
            self.scalars(self.rows_of, walk)
        for i, x in enumerate(self.nest.results):
            pointer = self.pointers[len(self.nest.inputs) + len(self.nest.outputs) + i]
            at = self.code.at(pointer, self.offset(self.row_pattern), stored(x.dtype))
            self.code.line(f"store {kind(x.dtype)} {self.single[id(x)]}, ptr {at}")
        last = (*self.nest.outputs, *self.nest.sums)
        if last:
            lanes = min(self.lanes_for(last), self.nest.few) if self.nest.across else self.lanes_for(last)
            with self.lanes(lanes), self.stretches(self.walks):
                self.last_walk()

    def last_walk(self) -> None:
        """Writes the outputs along the current stretch."""
        self.walk("0", self.size, self.write)

    @property
    def row_pattern(self) -> tuple[tuple[bool, ...], bool]:
        """How a result varies."""
        return tuple(d in self.rows_of for d in range(self.nest.outer)), False

    # -- what is known ----------------------------------------------------------------------------------------------

    def scalars(self, dims: frozenset[int], walk: int) -> None:
        """Computes what varies along these dimensions only and needs no more walks, one number each."""
        code, lanes = self.code, self.code.lanes
        code.lanes = 1
        for x in nodes(self.roots):
            if id(x) in self.single or not self.ready(x, dims, walk):
                continue
            if x.fn == "input":
                self.single[id(x)] = self.scalar(x.value)
            elif x.fn == LENGTH:
                length = code.mul(self.size, *self.sizes[len(self.rows_of) :])
                self.single[id(x)] = code.let(f"sitofp i64 {length} to double")
            else:
                args = [self.single[id(a)] if a.fn != "constant" else code.literal(a.value, a.dtype) for a in x.args]
                self.single[id(x)] = code.node(x, args)
        code.lanes = lanes
        for x in nodes(self.roots):
            for a in x.args:
                if id(a) in self.single and id(a) not in self.known and -1 in self.level[id(x)] | self.summed(x):
                    self.known[id(a)] = self.spread(self.single[id(a)], kind(a.dtype))

    def ready(self, x: Expr, dims: frozenset[int], walk: int) -> bool:
        """Whether `scalars` computes a node."""
        return x.fn not in ("constant", *REDUCTIONS) and self.level[id(x)] <= dims and self.depth[id(x)] <= walk

    def summed(self, x: Expr) -> frozenset[int]:
        """The dimensions that a node reduces."""
        return x.value if x.fn in REDUCTIONS else frozenset()

    def scalar(self, i: int) -> str:
        """The element of an operand that is one for the whole stretch."""
        operand = self.nest.inputs[i]
        x = self.code.get(self.at(i, self.offset((operand.outer, False))), stored(operand.dtype))
        return self.code.let(f"icmp ne i8 {x}, 0") if operand.dtype == "bool" else x

    @contextlib.contextmanager
    def stretches(self, walk: int) -> Iterator[None]:
        """The parts of a row along the inner dimension, one after the other."""
        if not self.nest.within:
            yield
            return
        last = self.nest.outer - 1
        values, single = self.known, self.single
        self.known, self.single = dict(values), dict(single)
        with self.code.loop(0, self.sizes[last]) as at:
            self.code.set(self.index[last], "i64", at)
            self.scalars(frozenset(range(self.nest.outer)), walk)
            yield
        self.known, self.single = values, single

    # -- reductions -------------------------------------------------------------------------------------------------

    def reduce(self, walk: int) -> None:
        """All reductions that `walk` - 1 walks have made possible."""
        todo = [x for x in self.reductions if self.depth[id(x)] == walk]
        with self.lanes(self.lanes_for([x.args[0] for x in todo])):
            self.reduced(todo, walk)

    def reduced(self, todo: Sequence[Expr], walk: int) -> None:
        """One walk."""
        code = self.code
        into = [self.registers(x) for x in todo]
        totals = [code.room("double") for _ in todo]
        for x, at, total in zip(todo, into, totals, strict=True):
            if x.fn == "sum":
                code.set(total, "double", "0.0")
            else:
                self.clear(x, at)
        with self.stretches(walk - 1), code.loop(0, self.size, BLOCK) as start:
            for x, at in zip(todo, into, strict=True):
                if x.fn == "sum":
                    self.clear(x, at)
            self.walk(start, code.smaller(BLOCK, code.sub(self.size, start)), self.accumulating(todo, into))
            for x, at, total in zip(todo, into, totals, strict=True):
                if x.fn == "sum":
                    value = self.across(x, at)
                    if x.args[0].dtype == "f32":
                        value = code.let(f"fpext float {value} to double")
                    code.set(total, "double", code.let(f"fadd double {code.get(total, 'double')}, {value}"))
        for x, at, total in zip(todo, into, totals, strict=True):
            self.single[id(x)] = code.get(total, "double") if x.fn == "sum" else self.across(x, at)

    def neutral(self, x: Expr) -> str:
        """The neutral element of a reduction, in all lanes."""
        return self.code.literal(0.0 if x.fn == "sum" else float("-inf"), x.args[0].dtype)

    def registers(self, x: Expr) -> dict[int, str]:
        """Partial results: those of whole registers of columns, and of the narrow ones behind them."""
        totals = {}
        for lanes in {self.code.lanes, self.narrow}:
            with self.lanes(lanes):
                totals[lanes] = self.code.room(self.code.of(kind(x.args[0].dtype)), align=64)
        return totals

    def clear(self, x: Expr, at: dict[int, str]) -> None:
        """Begins a reduction."""
        for lanes, place in at.items():
            with self.lanes(lanes):
                t = self.code.of(kind(x.args[0].dtype))
                self.code.line(f"store {t} {self.neutral(x)}, ptr {place}, align 64")

    def accumulating(self, todo: Sequence[Expr], into: Sequence[dict[int, str]]) -> Act:
        """The function with which `walk` adds a register of each operand."""

        def act(bases: dict[int, str], j: str, mask: str | None) -> None:
            bodies = [a for x in todo for a in terms(x)]
            results = iter(self.code.values(bodies, self.loaded(bodies, self.known, bases, j, mask)))
            for x, at in zip(todo, into, strict=True):
                element, place = kind(x.args[0].dtype), at[self.code.lanes]
                values = [next(results) for _ in terms(x)]
                if x is self.kept_for:
                    self.store(bases[len(self.nest.inputs)], j, x.args[0].dtype, values[0], mask)
                t = self.code.of(element)
                before = self.code.let(f"load {t}, ptr {place}, align 64")
                after = self.joined(x, before, *values)
                if mask is not None:
                    after = self.code.select(mask, element, after, before)
                self.code.line(f"store {t} {after}, ptr {place}, align 64")

        return act

    def joined(self, x: Expr, a: str, b: str, factor: str = "") -> str:
        """Two partial results as one; with a factor, a + b · factor."""
        dtype = x.args[0].dtype
        if factor:
            return self.code.call("fma", kind(dtype), b, factor, a)
        if x.fn == "sum":
            return self.code.op("fadd", kind(dtype), a, b)
        return self.code.extreme(Expr("max", (x.args[0], x.args[0]), dtype), a, b)

    def across(self, x: Expr, at: dict[int, str]) -> str:
        """One number of all lanes: halves are joined to halves."""
        code, lanes, element = self.code, self.code.lanes, kind(x.args[0].dtype)
        value = code.let(f"load {code.of(element)}, ptr {at[lanes]}, align 64")
        while code.lanes > 1:
            if code.lanes == self.narrow < lanes:
                rest = code.let(f"load {code.of(element)}, ptr {at[self.narrow]}, align 64")
                value = self.joined(x, value, rest)
            halves = [code.part(value, element, first, code.lanes // 2) for first in (0, code.lanes // 2)]
            code.lanes //= 2
            value = self.joined(x, *halves)
        code.lanes = lanes
        return value

    def lanes_for(self, roots: Sequence[Expr]) -> int:
        """Lanes of a walk's registers: fewer where long functions need many registers."""
        left = nodes(roots, lambda x: () if id(x) in self.known or x is self.kept else x.args)
        return self.nest.few if any(x.fn in LONG_FUNCTIONS and x is not self.kept for x in left) else self.nest.lanes

    # -- walks ------------------------------------------------------------------------------------------------------

    def walk(self, start: str, length: str, act: Act) -> None:
        """`act` on every register of the current stretch from column `start` on, and on the masked rest."""
        self.columns(self.bases(start), length, act)

    def loaded(
        self, roots: Sequence[Expr], known: dict[int, str], bases: dict[int, str], j: str, mask: str | None
    ) -> dict[int, str]:
        """`known` with the registers of the operands that these expressions read in the innermost loop."""
        known = dict(known)
        again: dict[int, str] = {}
        for x in nodes(roots, lambda x: () if id(x) in known else x.args):
            if x.fn == "input" and id(x) not in known:
                if x.value not in again:
                    again[x.value] = self.load(bases[x.value], j, x.dtype, mask)
                known[id(x)] = again[x.value]
        return known

    def write(self, bases: dict[int, str], j: str, mask: str | None) -> None:
        """The outputs: everything is read before anything is written."""
        count = len(self.nest.inputs)
        values = dict(self.known)
        if self.kept is not None:
            values[id(self.kept)] = self.load(bases[count], j, self.kept.dtype, mask)
        roots = (*self.nest.outputs, *self.nest.sums)
        results = self.code.values(roots, self.loaded(roots, values, bases, j, mask))
        for i, (x, value) in enumerate(zip(self.nest.outputs, results, strict=False)):
            self.store(bases[count + i], j, x.dtype, value, mask)
        for i, value in enumerate(results[len(self.nest.outputs) :]):
            self.add(i, value, bases, j, mask)

    def add(self, number: int, value: str, bases: dict[int, str], j: str, mask: str | None) -> None:
        """Adds to a sum over rows: see row_columns.py."""
        raise NotImplementedError

    # -- elements that wait in the output ---------------------------------------------------------------------------

    def kept_in_output(self) -> Expr | None:
        """The summand of the last walk, if the output depends on it and on numbers only: it waits in the output."""
        self.kept_for: Expr | None = None
        if len(self.nest.outputs) != 1 or self.nest.sums or not self.reductions:
            return None
        out = self.nest.outputs[0]
        last = [x for x in self.reductions if self.depth[id(x)] == self.walks]
        body = last[0].args[0]
        if len(last) > 1 or last[0].fn != "sum" or body.dtype != out.dtype or body.fn in ("input", "mul"):
            return None
        rest = nodes([out], lambda y: () if y is body or y.fn in REDUCTIONS else y.args)
        if any(y is not body and y.fn == "input" and -1 in self.level[id(y)] for y in rest):
            return None
        self.kept_for = last[0]
        return body
