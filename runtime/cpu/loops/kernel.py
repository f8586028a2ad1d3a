"""LLVM IR of a loop nest: element expressions over operands that broadcast to [outer..., inner].

A nest is described by what varies where, not by sizes: those are arguments, so that kernels are shared by all shapes
of one pattern.  The inner dimension is walked in registers of several lanes and one masked rest; operands that do not
vary along it are read once a row, those that vary nowhere once a call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ....language.element import Expr, nodes
from ...shared.loop_plan import level
from ..code.emit import module
from .expressions import Code, kind, stored, width

#: rows whose column sums are added up in the element type before they go into a double
ROWS = 64
#: columns of a panel: its sums lie on the stack
PANEL = 1024
#: a function of a register of columns: where the operands begin, the column, and which lanes there are (None: all)
Act: TypeAlias = Callable[[dict[int, str], str, "str | None"], None]


@dataclass(frozen=True)
class Operand:
    """An array: its element type, along which of the outer dimensions it varies, and whether along the inner one."""

    dtype: str
    outer: tuple[bool, ...]
    inner: bool

    @property
    def varies(self) -> frozenset[int]:
        """Numbers of the dimensions along which it varies; the inner one is -1."""
        return frozenset(i for i, v in enumerate(self.outer) if v) | (frozenset([-1]) if self.inner else frozenset())


@dataclass(frozen=True)
class Nest:
    """A loop nest.  Arguments of its kernel, 64 bits each:

    the inputs' addresses, those of the full outputs, and with `sums` that of the partial sums; the inner size;
    without sums the length of a piece of a row and how many a row has, with sums the rows of a chunk and how many
    chunks there are; the outer sizes.  Work: pieces (rows times pieces of a row), or panels times chunks.
    """

    outer: int
    inputs: tuple[Operand, ...]
    outputs: tuple[Expr, ...]
    sums: tuple[Expr, ...] = ()
    lanes: int = 16

    def kernel(self) -> str:
        """The module's text."""
        return NestKernel(self, (*self.outputs, *self.sums)).text()


class _Writer:
    """Pieces of text that kernels are made of."""

    def __init__(self, code: Code) -> None:
        self.code = code

    def argument(self, index: int, t: str = "i64") -> str:
        """A word of the kernel's arguments."""
        return self.code.word("%args", index, t)

    def spread(self, x: str, element: str) -> str:
        """A scalar in all lanes."""
        return x if self.code.lanes == 1 else self.code.spread(x, element, self.code.lanes)

    def mask(self, count: str) -> str:
        """Which lanes are below a number."""
        code, lanes = self.code, self.code.lanes
        below = self.spread(code.let(f"trunc i64 {count} to i32"), "i32")
        steps = ", ".join(f"i32 {i}" for i in range(lanes))
        return code.let(f"icmp ult <{lanes} x i32> <{steps}>, {below}")

    def load(self, base: str, j: str, dtype: str, mask: str | None) -> str:
        """`lanes` elements from column j on."""
        code, element, align = self.code, stored(dtype), width(dtype)
        t = code.of(element)
        at = code.at(base, j, element)
        if mask is None:
            x = code.let(f"load {t}, ptr {at}, align {align}")
        else:
            arguments = (("ptr", at), ("i32", align), (code.of("i1"), mask), (t, "zeroinitializer"))
            x = code.intrinsic(f"masked.load.{code.suffix(element)}.p0", t, *arguments)
        return code.op("icmp ne", "i8", x, "zeroinitializer") if dtype == "bool" else x

    def store(self, base: str, j: str, dtype: str, value: str, mask: str | None) -> None:
        """Writes them."""
        code, element, align = self.code, stored(dtype), width(dtype)
        t = code.of(element)
        if dtype == "bool":
            value = code.convert("zext", value, "i1", "i8")
        at = code.at(base, j, element)
        if mask is None:
            code.line(f"store {t} {value}, ptr {at}, align {align}")
            return
        arguments = ((t, value), ("ptr", at), ("i32", align), (code.of("i1"), mask))
        code.intrinsic(f"masked.store.{code.suffix(element)}.p0", "void", *arguments)


class NestKernel(_Writer):
    """Writes one nest; `roots`: all of its expressions."""

    def __init__(self, nest: Nest, roots: tuple[Expr, ...]) -> None:
        self.nest = nest
        super().__init__(Code(nest.lanes))
        self.roots = roots
        #: lanes of the registers for what is left of a row
        self.narrow = nest.lanes
        leaves: dict[int, Expr] = {}
        for x in nodes(self.roots):
            if x.fn == "input":
                leaves.setdefault(x.value, x)
        self.leaves = leaves
        self.level = level(self.roots, [o.varies for o in nest.inputs])
        #: node → register, of what does not change in the innermost loop
        self.known: dict[int, str] = {}

    # -- the kernel -----------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Entry, loops, and what is declared."""
        nest, code = self.nest, self.code
        self.index = [code.room("i64") for _ in range(nest.outer)]
        self.into = [code.room(f"[{PANEL + nest.lanes} x {kind(s.dtype)}]", align=64) for s in nest.sums]
        count = len(nest.inputs) + len(nest.outputs)
        self.pointers = [self.argument(i, "ptr") for i in range(count)]
        at = count
        if nest.sums:
            self.partial = self.argument(at, "ptr")
            at += 1
        self.size, self.piece, self.pieces = (self.argument(at + i) for i in range(3))
        self.sizes = [self.argument(at + 3 + d) for d in range(nest.outer)]
        self.strides = self.all_strides()
        self.hoist(frozenset())
        self.panels() if nest.sums else self.rows()
        return module(code)

    def all_strides(self, *more: tuple[tuple[bool, ...], bool]) -> dict[tuple[tuple[bool, ...], bool], list[str]]:
        """For each pattern of an operand its strides along the outer dimensions, "0" where it does not vary."""
        result = {}
        full = ((True,) * self.nest.outer, True)
        for pattern in [full, *more, *((o.outer, o.inner) for o in self.nest.inputs)]:
            if pattern in result:
                continue
            stride, strides = self.size if pattern[1] else "1", []
            for d in reversed(range(self.nest.outer)):
                strides.append(stride if pattern[0][d] else "0")
                if pattern[0][d]:
                    stride = self.code.mul(stride, self.sizes[d])
            result[pattern] = strides[::-1]
        return result

    def hoist(self, varying: frozenset[int]) -> None:
        """Computes what varies along no other dimensions than these, as far as something else needs it."""
        wanted: list[Expr] = []
        for x in nodes(self.roots):
            for a in x.args:
                if self.level[id(a)] <= varying and not self.level[id(x)] <= varying and a.fn != "constant":
                    wanted.append(a)
        wanted += [r for r in self.roots if self.level[id(r)] <= varying and r.fn != "constant"]
        values = dict(self.known)
        for i, leaf in self.leaves.items():
            if self.level[id(leaf)] <= varying and id(leaf) not in values:
                values[id(leaf)] = self.splat(i)
        same = {id(x): values[id(self.leaves[x.value])] for x in nodes(self.roots)
                if x.fn == "input" and id(self.leaves[x.value]) in values}  # fmt: skip
        values.update(same)
        todo = [x for x in wanted if id(x) not in values]
        for x, register in zip(todo, self.code.values(todo, values), strict=True):
            values[id(x)] = register
        self.known = values

    def splat(self, i: int) -> str:
        """One element of an operand in all lanes."""
        operand = self.nest.inputs[i]
        pointer = self.at(i, self.offset((operand.outer, False))) if any(operand.outer) else self.pointers[i]
        x = self.code.get(pointer, stored(operand.dtype))
        if operand.dtype == "bool":
            x = self.code.let(f"icmp ne i8 {x}, 0")
        return self.spread(x, kind(operand.dtype))

    def offset(self, pattern: tuple[tuple[bool, ...], bool]) -> str:
        """The element at which an operand of this pattern has its part of the current row."""
        total = "0"
        for d, stride in enumerate(self.strides[pattern]):
            if stride != "0":
                step = self.code.mul(self.code.get(self.index[d]), stride)
                total = step if total == "0" else self.code.add(total, step)
        return total

    def at(self, i: int, offset: str) -> str:
        """The address of an element of operand i (outputs come behind the inputs)."""
        inputs = self.nest.inputs
        dtype = inputs[i].dtype if i < len(inputs) else self.nest.outputs[i - len(inputs)].dtype
        return self.code.at(self.pointers[i], offset, stored(dtype))

    def locate(self, row: str, last: int) -> None:
        """Sets the outer indices of a row's number."""
        for d in reversed(range(last)):
            self.code.set(self.index[d], "i64", self.code.rem(row, self.sizes[d]))
            row = self.code.div(row, self.sizes[d])

    def advance(self, last: int) -> None:
        """The outer indices of the next row, `last` and those before it."""
        over = self.wrapped(self.index[last], self.sizes[last])
        if last:
            with self.code.when(over):
                self.advance(last - 1)

    def wrapped(self, variable: str, size: str) -> str:
        """Counts a variable on, from `size` back to 0; whether it is 0 again."""
        code = self.code
        more = code.add(code.get(variable), 1)
        over = code.let(f"icmp eq i64 {more}, {size}")
        code.set(variable, "i64", code.let(f"select i1 {over}, i64 0, i64 {more}"))
        return over

    def rows(self) -> None:
        """Pieces of rows, one after the other."""
        code = self.code
        with code.when(code.let("icmp slt i64 %begin, %end")):  # where there are none, sizes may be 0
            block = code.variable("i64", code.rem("%begin", self.pieces))
            self.locate(code.div("%begin", self.pieces), self.nest.outer)
            with code.loop("%begin", "%end"):
                start = code.mul(code.get(block), self.piece)
                self.row(start, code.smaller(self.piece, code.sub(self.size, start)))
                over = self.wrapped(block, self.pieces)
                if self.nest.outer:
                    with code.when(over):
                        self.advance(self.nest.outer - 1)

    def row(self, start: str, length: str) -> None:
        """The elements of the current row from column `start` on."""
        outside = dict(self.known)
        self.hoist(frozenset(range(self.nest.outer)))
        self.inner(start, length)
        self.known = outside

    def panels(self) -> None:
        """Column sums: chunks of rows by panels of columns; `piece` is rows of a chunk, `pieces` how many chunks."""
        nest, code = self.nest, self.code
        rows = code.mul(*self.sizes)
        with code.loop("%begin", "%end") as work:
            chunk = code.rem(work, self.pieces)
            start = code.mul(code.div(work, self.pieces), PANEL)
            length = code.smaller(PANEL, code.sub(self.size, start))
            first = code.mul(chunk, self.piece)
            last = code.smaller(code.add(first, self.piece), rows)
            self.locate(first, nest.outer)
            totals = []
            for s in range(len(nest.sums)):
                number = code.add(code.mul(chunk, len(nest.sums)), s)
                totals.append(code.at(self.partial, code.add(code.mul(number, self.size), start), "double"))
            for total in totals:
                with code.loop(0, length) as j:
                    code.set(code.at(total, j, "double"), "double", "0.0")
            with code.loop(first, last, ROWS) as block:
                for s, x in enumerate(nest.sums):
                    code.zero(self.into[s], (PANEL + nest.lanes) * width(x.dtype))
                with code.loop(block, code.smaller(code.add(block, ROWS), last)):
                    self.row(start, length)
                    self.advance(nest.outer - 1)
                self.fold(totals, length)

    def fold(self, totals: Sequence[str], length: str) -> None:
        """Adds a panel's sums to the chunk's."""
        code = self.code
        for s, x in enumerate(self.nest.sums):
            with code.loop(0, length) as j:
                to = code.at(totals[s], j, "double")
                value = code.word(self.into[s], j, kind(x.dtype))
                if x.dtype == "f32":
                    value = code.let(f"fpext float {value} to double")
                code.set(to, "double", code.let(f"fadd double {code.get(to, 'double')}, {value}"))

    def inner(self, start: str, length: str) -> None:
        """The elements of one row from column `start` on."""
        self.columns(self.bases(start), length, self.elements)

    def bases(self, start: str) -> dict[int, str]:
        """Where each operand that varies along the inner dimension has column `start` of the current row."""
        nest, bases = self.nest, {}
        offsets: dict[tuple[tuple[bool, ...], bool], str] = {}
        full = ((True,) * nest.outer, True)
        patterns = {i: (nest.inputs[i].outer, True) for i in self.leaves if nest.inputs[i].inner}
        patterns |= {len(nest.inputs) + i: full for i in range(len(nest.outputs))}
        for i, pattern in patterns.items():
            if pattern not in offsets:
                offset = self.offset(pattern)
                offsets[pattern] = start if offset == "0" else self.code.add(offset, start)
            bases[i] = self.at(i, offsets[pattern])
        return bases

    def columns(self, bases: dict[int, str], length: str, act: Act) -> None:
        """`act(bases, column, mask)` for every register of a row, narrower ones behind them, and the masked rest."""
        code = self.code
        column = code.variable("i64", "0")
        for lanes in dict.fromkeys((code.lanes, self.narrow)):
            with self.lanes(lanes):
                self.registers_of(bases, length, column, act)
        j = code.get(column)
        rest = code.sub(length, j)
        with self.lanes(self.narrow), code.when(code.let(f"icmp sgt i64 {rest}, 0")):
            act(bases, j, self.mask(rest))

    def registers_of(self, bases: dict[int, str], length: str, column: str, act: Act) -> None:
        """`act` while a whole register is left."""
        code = self.code
        head, body, tail = (code.fresh(n) for n in ("head", "body", "tail"))
        code.line(f"br label %{head}")
        code.label(head)
        j = code.get(column)
        after = code.add(j, code.lanes)
        fits = code.let(f"icmp sle i64 {after}, {length}")
        code.line(f"br i1 {fits}, label %{body}, label %{tail}")
        code.label(body)
        act(bases, j, None)
        code.set(column, "i64", after)
        code.line(f"br label %{head}")
        code.label(tail)

    @contextlib.contextmanager
    def lanes(self, count: int) -> Iterator[None]:
        """Registers of `count` lanes: what is known is the same in all lanes, so that its first ones do."""
        code, lanes, values = self.code, self.code.lanes, self.known
        if count != lanes:
            kinds = {id(x): kind(x.dtype) for x in nodes(self.roots)}
            self.known = {i: code.part(x, kinds[i], 0, count) for i, x in values.items()}
        code.lanes = count
        yield
        code.lanes, self.known = lanes, values

    def elements(self, bases: dict[int, str], j: str, mask: str | None) -> None:
        """One register of each operand: everything is read before anything is written."""
        values = dict(self.known)
        loaded: dict[int, str] = {}
        for x in nodes(self.roots):
            if x.fn == "input" and id(x) not in values:
                if x.value not in loaded:
                    loaded[x.value] = self.load(bases[x.value], j, x.dtype, mask)
                values[id(x)] = loaded[x.value]
        results = self.code.values(self.roots, values)
        count = len(self.nest.outputs)
        for s, (x, value) in enumerate(zip(self.nest.sums, results[count:], strict=True)):
            self.accumulate(s, x.dtype, value, j, mask)
        for i, (x, value) in enumerate(zip(self.nest.outputs, results, strict=False)):
            self.store(bases[len(self.nest.inputs) + i], j, x.dtype, value, mask)

    def accumulate(self, s: int, dtype: str, value: str, j: str, mask: str | None) -> None:
        """sum += value, nothing in lanes behind the end."""
        code, t = self.code, self.code.of(kind(dtype))
        if mask is not None:
            value = code.select(mask, kind(dtype), value, code.literal(0, dtype))
        at = code.at(self.into[s], j, kind(dtype))
        before = code.let(f"load {t}, ptr {at}, align {width(dtype)}")
        code.line(f"store {t} {code.let(f'fadd {t} {before}, {value}')}, ptr {at}, align {width(dtype)}")


class _Combine(_Writer):
    """Adds the chunks' partial sums."""

    def text(self, dtype: str) -> str:
        """The module."""
        code = self.code
        partial, out = self.argument(0, "ptr"), self.argument(1, "ptr")
        chunks, stride = self.argument(2), self.argument(3)
        factor = self.spread(self.argument(4, "double"), "double")
        t = code.of("double")
        total = code.room(t)
        with code.loop("%begin", "%end", code.lanes) as j:
            mask = self.mask(code.smaller(code.sub("%end", j), code.lanes))
            code.set(total, t, "zeroinitializer")
            with code.loop(0, chunks) as k:
                value = self.load(partial, code.add(code.mul(k, stride), j), "f64", mask)
                code.set(total, t, code.op("fadd", "double", code.get(total, t), value))
            result = code.op("fmul", "double", code.get(total, t), factor)
            if dtype != "f64":
                result = code.cast(result, "f64", dtype)
            self.store(out, j, dtype, result, mask)
        return module(code)


@functools.lru_cache(maxsize=8)
def combine(dtype: str) -> str:
    """The module's text of a kernel that adds the chunks' sums in order, and multiplies them by a factor.

    Arguments: the partial sums of the first chunk, the output [columns], the number of chunks, how many doubles lie
    from one chunk to the next, the factor (bits of a double).  Work: columns.
    """
    return _Combine(Code(8)).text(dtype)
