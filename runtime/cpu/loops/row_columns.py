"""Row kernels that also compute column sums, such as the gradients of scale and bias: sums over the first dimension.

A work item is a chunk of indices of the first dimension; its sums are float64.  For each column, the elements of 64
indices are first added in the element type, in a block of memory.  With `across` the sums also run over the inner
dimension: then each stretch (one run along it) is reduced like a row (rows.py), and its sum added to the chunk's.
`combine` (kernel.py) adds the chunks.
"""

from __future__ import annotations

from ....language.element import Expr
from ..code.emit import module
from .expressions import kind, width
from .kernel import ROWS
from .rows import BLOCK, RowKernel, RowNest

#: spare elements behind the columns of a block: the last register is loaded and stored whole, its masked lanes add 0
SPARE = 64


class SummedRows(RowKernel):
    """Writes one nest with column sums.

    Arguments of the kernel: addresses of the inputs, the element-wise outputs, the results (one number a row), the
    chunks' sums [chunks, sums, columns] in float64, the blocks [chunks, sums, columns + SPARE] in the element type; the
    inner size; the outer sizes; the length of a chunk.  It runs the chunks from `%begin` to `%end`.
    """

    def __init__(self, nest: RowNest) -> None:
        super().__init__(nest)
        #: with `across`: the sums as reductions of a stretch
        self.stretch = [Expr("sum", (x,), "f64") for x in nest.sums]

    def text(self) -> str:
        """The text of the LLVM module: the function with its loop over chunks, and declarations."""
        nest, code = self.nest, self.code
        count = len(nest.inputs) + len(nest.outputs) + len(nest.results)
        self.take_arguments(count + 2)
        self.partial, self.blocks = self.pointers[count:]
        length = self.argument(count + 3 + nest.outer)
        self.scalars(frozenset(), 0)
        self.outside = self.known, self.single
        columns = code.mul(*self.sizes[1:], "1" if nest.across else self.size)
        with code.loop("%begin", "%end") as chunk:
            first = code.mul(chunk, length)
            last = code.smaller(code.add(first, length), self.sizes[0])
            self.totals = [self.place(self.partial, "double", chunk, i, columns) for i in range(len(nest.sums))]
            self.into = [
                self.place(self.blocks, kind(x.dtype), chunk, i, code.add(columns, SPARE))
                for i, x in enumerate(nest.sums)
            ]
            for total in self.totals:
                code.zero(total, code.mul(columns, 8))
            with code.loop(first, last, ROWS) as start:
                if not nest.across:
                    for x, at in zip(nest.sums, self.into, strict=True):
                        code.zero(at, code.mul(code.add(columns, SPARE), width(x.dtype)))
                with code.loop(start, code.smaller(code.add(start, ROWS), last)) as at:
                    code.set(self.index[0], "i64", at)
                    self.groups()
                if not nest.across:
                    self.fold(self.totals, columns)
        return module(code)

    def place(self, base: str, element: str, chunk: str, i: int, columns: str) -> str:
        """Where the columns of sum `i` of a chunk begin."""
        code = self.code
        return code.at(base, code.mul(code.add(code.mul(chunk, len(self.nest.sums)), i), columns), element)

    def groups(self) -> None:
        """All rows of one index of the first dimension."""
        code, last = self.code, self.nest.outer - self.nest.within - 1
        for d in range(1, last + 1):
            code.set(self.index[d], "i64", "0")
        with code.loop(0, code.mul("1", *self.sizes[1 : last + 1])):
            values, single = self.outside
            self.known, self.single = dict(values), dict(single)
            self.whole_row()
            if last:
                self.advance(last)

    def column(self) -> str:
        """The column at which the current stretch begins: its position in the outer dimensions after the first."""
        code, offset = self.code, "0"
        for d in range(1, self.nest.outer):
            offset = code.add(code.mul(offset, self.sizes[d]), code.get(self.index[d]))
        return offset if self.nest.across else code.mul(offset, self.size)

    def last_walk(self) -> None:
        """Writes the outputs along the current stretch, and adds to the sums."""
        code, column = self.code, self.column()
        if not self.nest.across:
            sums = [code.at(at, column, kind(x.dtype)) for x, at in zip(self.nest.sums, self.into, strict=True)]
            bases = self.bases("0") | {-1 - i: at for i, at in enumerate(sums)}
            self.columns(bases, self.size, self.write)
            return
        self.registers_of_sums = [self.registers(x) for x in self.stretch]
        with code.loop(0, self.size, BLOCK) as start:
            for x, at in zip(self.stretch, self.registers_of_sums, strict=True):
                self.clear(x, at)
            self.walk(start, code.smaller(BLOCK, code.sub(self.size, start)), self.write)
            for x, at, total in zip(self.stretch, self.registers_of_sums, self.totals, strict=True):
                to = code.at(total, column, "double")
                value = self.across(x, at)
                if x.args[0].dtype == "f32":
                    value = code.let(f"fpext float {value} to double")
                code.set(to, "double", code.let(f"fadd double {code.get(to, 'double')}, {value}"))

    def add(self, number: int, value: str, bases: dict[int, str], j: str, mask: str | None) -> None:
        """Adds a register to the sum's block (with `across`: to the stretch's registers); masked lanes add 0."""
        code, x = self.code, self.nest.sums[number]
        element, t = kind(x.dtype), code.of(kind(x.dtype))
        if mask is not None:
            value = code.select(mask, element, value, code.literal(0, x.dtype))
        if self.nest.across:
            at, align = self.registers_of_sums[number][code.lanes], 64
        else:
            at, align = code.at(bases[-1 - number], j, element), width(x.dtype)
        before = code.let(f"load {t}, ptr {at}, align {align}")
        code.line(f"store {t} {code.op('fadd', element, before, value)}, ptr {at}, align {align}")
