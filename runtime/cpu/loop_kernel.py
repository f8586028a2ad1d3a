"""LLVM IR of a loop nest: element expressions over operands that broadcast to [outer..., inner].

A nest is described by what varies where, not by sizes: those are arguments, so that kernels are shared by all shapes
of one pattern.  The inner dimension is walked in registers of several lanes and one masked rest; operands that do not
vary along it are read once a row, those that vary nowhere once a call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...element import Expr, nodes
from ..loop_plan import level
from .loop_code import Code, kind, stored, width

#: rows whose column sums are added up in the element type before they go into a double
ROWS = 64
#: columns of a panel: its sums lie on the stack
PANEL = 1024


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
        return _Kernel(self).text()


class _Writer:
    """Pieces of text that kernels are made of."""

    def __init__(self, code: Code) -> None:
        self.code = code

    def get(self, slot: str) -> str:
        """The value of a counter."""
        return self.code.emit(f"load i64, ptr %{slot}")

    def put(self, slot: str, value: str | int) -> None:
        self.code.do(f"store i64 {value}, ptr %{slot}")

    def i64(self, op: str, a: str, b: str | int) -> str:
        return self.code.emit(f"{op} i64 {a}, {b}")

    def argument(self, index: int, t: str = "i64") -> str:
        at = self.code.emit(f"getelementptr i64, ptr %args, i64 {index}")
        return self.code.emit(f"load {t}, ptr {at}")

    def smaller(self, a: str, b: str) -> str:
        less = self.code.emit(f"icmp slt i64 {a}, {b}")
        return self.code.emit(f"select i1 {less}, i64 {a}, i64 {b}")

    def repeat(self, slot: str, start: str | int, stop: str, step: str | int = 1) -> Iterator[str]:
        """A counted loop: what is written while this generator is suspended is its body."""
        head, body, done = (self.code.name(n) for n in ("head", "body", "done"))
        self.put(slot, start)
        self.code.do(f"br label %{head}")
        self.code.label(head)
        now = self.get(slot)
        more = self.code.emit(f"icmp slt i64 {now}, {stop}")
        self.code.do(f"br i1 {more}, label %{body}, label %{done}")
        self.code.label(body)
        yield now
        self.put(slot, self.i64("add", self.get(slot), step))
        self.code.do(f"br label %{head}")
        self.code.label(done)

    def spread(self, x: str, element: str) -> str:
        """A scalar in all lanes."""
        code = self.code
        if code.lanes == 1:
            return x
        t = code.of(element)
        one = code.emit(f"insertelement {t} poison, {element} {x}, i32 0")
        return code.emit(f"shufflevector {t} {one}, {t} poison, <{code.lanes} x i32> zeroinitializer")

    def mask(self, count: str) -> str:
        """Which lanes are below a number."""
        code, lanes = self.code, self.code.lanes
        t = f"<{lanes} x i32>"
        small = code.emit(f"trunc i64 {count} to i32")
        all_ = self.spread(small, "i32")
        steps = ", ".join(f"i32 {i}" for i in range(lanes))
        return code.emit(f"icmp ult {t} <{steps}>, {all_}")

    def load(self, base: str, j: str, dtype: str, mask: str | None) -> str:
        """`lanes` elements from column j on."""
        code, element, align = self.code, stored(dtype), width(dtype)
        t = code.of(element)
        at = code.emit(f"getelementptr {element}, ptr {base}, i64 {j}")
        if mask is None:
            x = code.emit(f"load {t}, ptr {at}, align {align}")
        else:
            name = f"@llvm.masked.load.{code.suffix(element)}.p0"
            m = code.of("i1")
            code.declared[name] = f"declare {t} {name}(ptr, i32, {m}, {t})"
            x = code.emit(f"call {t} {name}(ptr {at}, i32 {align}, {m} {mask}, {t} zeroinitializer)")
        return code.op("icmp ne", "i8", x, "zeroinitializer") if dtype == "bool" else x

    def store(self, base: str, j: str, dtype: str, value: str, mask: str | None) -> None:
        """Writes them."""
        code, element, align = self.code, stored(dtype), width(dtype)
        t = code.of(element)
        if dtype == "bool":
            value = code.convert("zext", value, "i1", "i8")
        at = code.emit(f"getelementptr {element}, ptr {base}, i64 {j}")
        if mask is None:
            code.do(f"store {t} {value}, ptr {at}, align {align}")
            return
        name = f"@llvm.masked.store.{code.suffix(element)}.p0"
        m = code.of("i1")
        code.declared[name] = f"declare void {name}({t}, ptr, i32, {m})"
        code.do(f"call void {name}({t} {value}, ptr {at}, i32 {align}, {m} {mask})")

    def module(self, slots: Sequence[str], others: Sequence[str] = ()) -> str:
        """The text: what is declared, then the function with its counters."""
        lines = ["define void @kernel(ptr %args, i64 %begin, i64 %end) {", "entry:"]
        lines += [f"  %{s} = alloca i64" for s in slots]
        return "\n".join([*self.code.declared.values(), *lines, *others, *self.code.lines, "}"]) + "\n"


class _Kernel(_Writer):
    """Writes one nest."""

    def __init__(self, nest: Nest) -> None:
        self.nest = nest
        super().__init__(Code(nest.lanes))
        self.roots = (*nest.outputs, *nest.sums)
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
        slots = ["work", "block", "column", "row", "stop", *(f"index{d}" for d in range(nest.outer))]
        others = [
            f"  %sum{i} = alloca [{PANEL + nest.lanes} x {kind(s.dtype)}], align 64" for i, s in enumerate(nest.sums)
        ]
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
        code.do("ret void")
        return self.module(slots, others)

    def all_strides(self) -> dict[tuple[tuple[bool, ...], bool], list[str]]:
        """For each pattern of an operand its strides along the outer dimensions, "0" where it does not vary."""
        found = {}
        full = ((True,) * self.nest.outer, True)
        for pattern in [full, *((o.outer, o.inner) for o in self.nest.inputs)]:
            if pattern in found:
                continue
            stride, strides = self.size if pattern[1] else "1", []
            for d in reversed(range(self.nest.outer)):
                strides.append(stride if pattern[0][d] else "0")
                if pattern[0][d]:
                    stride = self.i64("mul", stride, self.sizes[d])
            found[pattern] = strides[::-1]
        return found

    def hoist(self, varying: frozenset[int]) -> None:
        """Computes what varies along no other dimensions than these, as far as something else needs it."""
        wanted: list[Expr] = []
        for x in nodes(self.roots):
            for a in x.args:
                if self.level[id(a)] <= varying and not self.level[id(x)] <= varying and a.fn != "constant":
                    wanted.append(a)
        wanted += [r for r in self.roots if self.level[id(r)] <= varying and r.fn != "constant"]
        known = dict(self.known)
        for i, leaf in self.leaves.items():
            if self.level[id(leaf)] <= varying and id(leaf) not in known:
                known[id(leaf)] = self.splat(i)
        same = {id(x): known[id(self.leaves[x.value])] for x in nodes(self.roots)
                if x.fn == "input" and id(self.leaves[x.value]) in known}  # fmt: skip
        known.update(same)
        todo = [x for x in wanted if id(x) not in known]
        for x, register in zip(todo, self.code.values(todo, known), strict=True):
            known[id(x)] = register
        self.known = known

    def splat(self, i: int) -> str:
        """One element of an operand in all lanes."""
        operand = self.nest.inputs[i]
        pointer = self.at(i, self.offset((operand.outer, False))) if any(operand.outer) else self.pointers[i]
        x = self.code.emit(f"load {stored(operand.dtype)}, ptr {pointer}")
        if operand.dtype == "bool":
            x = self.code.emit(f"icmp ne i8 {x}, 0")
        return self.spread(x, kind(operand.dtype))

    def offset(self, pattern: tuple[tuple[bool, ...], bool]) -> str:
        """The element at which an operand of this pattern has its part of the current row."""
        total = "0"
        for d, stride in enumerate(self.strides[pattern]):
            if stride != "0":
                step = self.i64("mul", self.get(f"index{d}"), stride)
                total = step if total == "0" else self.i64("add", total, step)
        return total

    def at(self, i: int, offset: str) -> str:
        """The address of an element of operand i (outputs come behind the inputs)."""
        inputs = self.nest.inputs
        dtype = inputs[i].dtype if i < len(inputs) else self.nest.outputs[i - len(inputs)].dtype
        return self.code.emit(f"getelementptr {stored(dtype)}, ptr {self.pointers[i]}, i64 {offset}")

    def locate(self, row: str, last: int) -> None:
        """Sets the outer indices of a row's number."""
        for d in reversed(range(last)):
            self.put(f"index{d}", self.i64("srem", row, self.sizes[d]))
            row = self.i64("sdiv", row, self.sizes[d])

    def advance(self) -> None:
        """The outer indices of the next row."""
        code, done = self.code, self.code.name("next")
        for d in reversed(range(self.nest.outer)):
            more = self.i64("add", self.get(f"index{d}"), 1)
            over = code.emit(f"icmp eq i64 {more}, {self.sizes[d]}")
            self.put(f"index{d}", code.emit(f"select i1 {over}, i64 0, i64 {more}"))
            if d:
                carry = code.name("carry")
                code.do(f"br i1 {over}, label %{carry}, label %{done}")
                code.label(carry)
        code.do(f"br label %{done}")
        code.label(done)

    def rows(self) -> None:
        """Pieces of rows, one after the other."""
        self.put("block", self.i64("srem", "%begin", self.pieces))
        self.locate(self.i64("sdiv", "%begin", self.pieces), self.nest.outer)
        for _ in self.repeat("work", "%begin", "%end"):
            block = self.get("block")
            start = self.i64("mul", block, self.piece)
            length = self.smaller(self.piece, self.i64("sub", self.size, start))
            outside = dict(self.known)
            self.hoist(frozenset(range(self.nest.outer)))
            self.inner(start, length)
            self.known = outside
            more = self.i64("add", block, 1)
            over = self.code.emit(f"icmp eq i64 {more}, {self.pieces}")
            self.put("block", self.code.emit(f"select i1 {over}, i64 0, i64 {more}"))
            if self.nest.outer:
                carry, done = self.code.name("row"), self.code.name("piece")
                self.code.do(f"br i1 {over}, label %{carry}, label %{done}")
                self.code.label(carry)
                self.advance()
                self.code.do(f"br label %{done}")
                self.code.label(done)

    def panels(self) -> None:
        """Column sums: chunks of rows by panels of columns; `piece` is rows of a chunk, `pieces` how many chunks."""
        nest, code = self.nest, self.code
        rows = "1"
        for size in self.sizes:
            rows = size if rows == "1" else self.i64("mul", rows, size)
        for work in self.repeat("work", "%begin", "%end"):
            chunk = self.i64("srem", work, self.pieces)
            start = self.i64("mul", self.i64("sdiv", work, self.pieces), PANEL)
            length = self.smaller(str(PANEL), self.i64("sub", self.size, start))
            first = self.i64("mul", chunk, self.piece)
            last = self.smaller(self.i64("add", first, self.piece), rows)
            self.locate(first, nest.outer)
            into = []
            for s in range(len(nest.sums)):
                number = self.i64("add", self.i64("mul", chunk, len(nest.sums)), s)
                position = self.i64("add", self.i64("mul", number, self.size), start)
                into.append(code.emit(f"getelementptr double, ptr {self.partial}, i64 {position}"))
            for _ in self.fold(into, length, fresh=True):
                pass
            for block in self.repeat("block", first, last, ROWS):
                for s, x in enumerate(nest.sums):
                    self.clear(s, x.dtype)
                stop = self.smaller(self.i64("add", block, ROWS), last)
                for _ in self.repeat("row", block, stop):
                    outside = dict(self.known)
                    self.hoist(frozenset(range(nest.outer)))
                    self.inner(start, length)
                    self.known = outside
                    self.advance()
                for _ in self.fold(into, length, fresh=False):
                    pass

    def clear(self, s: int, dtype: str) -> None:
        """A panel's sums are zero."""
        nbytes = (PANEL + self.nest.lanes) * width(dtype)
        self.code.declared["@llvm.memset"] = "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)"
        self.code.do(f"call void @llvm.memset.p0.i64(ptr align 64 %sum{s}, i8 0, i64 {nbytes}, i1 false)")

    def fold(self, into: Sequence[str], length: str, *, fresh: bool) -> Iterator[None]:
        """Adds a panel's sums to the chunk's; `fresh`: sets those to zero."""
        code = self.code
        for s, x in enumerate(self.nest.sums):
            for j in self.repeat("column", 0, length):
                to = code.emit(f"getelementptr double, ptr {into[s]}, i64 {j}")
                if fresh:
                    code.do(f"store double 0.0, ptr {to}")
                    continue
                at = code.emit(f"getelementptr {kind(x.dtype)}, ptr %sum{s}, i64 {j}")
                value = code.emit(f"load {kind(x.dtype)}, ptr {at}")
                if x.dtype == "f32":
                    value = code.emit(f"fpext float {value} to double")
                before = code.emit(f"load double, ptr {to}")
                code.do(f"store double {code.emit(f'fadd double {before}, {value}')}, ptr {to}")
            yield

    def inner(self, start: str, length: str) -> None:
        """The elements of one row from column `start` on."""
        code, lanes, nest = self.code, self.nest.lanes, self.nest
        bases: dict[int, str] = {}
        offsets: dict[tuple[tuple[bool, ...], bool], str] = {}
        full = ((True,) * nest.outer, True)
        patterns = {i: (nest.inputs[i].outer, True) for i in self.leaves if nest.inputs[i].inner}
        patterns |= {len(nest.inputs) + i: full for i in range(len(nest.outputs))}
        for i, pattern in patterns.items():
            if pattern not in offsets:
                offset = self.offset(pattern)
                offsets[pattern] = start if offset == "0" else self.i64("add", offset, start)
            bases[i] = self.at(i, offsets[pattern])
        head, body, tail, masked, done = (code.name(n) for n in ("head", "body", "tail", "masked", "done"))
        self.put("column", 0)
        code.do(f"br label %{head}")
        code.label(head)
        j = self.get("column")
        after = self.i64("add", j, lanes)
        fits = code.emit(f"icmp sle i64 {after}, {length}")
        code.do(f"br i1 {fits}, label %{body}, label %{tail}")
        code.label(body)
        self.elements(bases, j, None)
        self.put("column", after)
        code.do(f"br label %{head}")
        code.label(tail)
        rest = self.i64("sub", length, j)
        some = code.emit(f"icmp sgt i64 {rest}, 0")
        code.do(f"br i1 {some}, label %{masked}, label %{done}")
        code.label(masked)
        self.elements(bases, j, self.mask(rest))
        code.do(f"br label %{done}")
        code.label(done)

    def elements(self, bases: dict[int, str], j: str, mask: str | None) -> None:
        """One register of each operand: everything is read before anything is written."""
        known = dict(self.known)
        loaded: dict[int, str] = {}
        for x in nodes(self.roots):
            if x.fn == "input" and id(x) not in known:
                if x.value not in loaded:
                    loaded[x.value] = self.load(bases[x.value], j, x.dtype, mask)
                known[id(x)] = loaded[x.value]
        found = self.code.values(self.roots, known)
        count = len(self.nest.outputs)
        for s, (x, value) in enumerate(zip(self.nest.sums, found[count:], strict=True)):
            self.accumulate(s, x.dtype, value, j, mask)
        for i, (x, value) in enumerate(zip(self.nest.outputs, found, strict=False)):
            self.store(bases[len(self.nest.inputs) + i], j, x.dtype, value, mask)

    def accumulate(self, s: int, dtype: str, value: str, j: str, mask: str | None) -> None:
        """sum += value, nothing in lanes behind the end."""
        code, t = self.code, self.code.of(kind(dtype))
        if mask is not None:
            value = code.select(mask, kind(dtype), value, code.literal(0, dtype))
        at = code.emit(f"getelementptr {kind(dtype)}, ptr %sum{s}, i64 {j}")
        before = code.emit(f"load {t}, ptr {at}, align {width(dtype)}")
        code.do(f"store {t} {code.emit(f'fadd {t} {before}, {value}')}, ptr {at}, align {width(dtype)}")


class _Combine(_Writer):
    """Adds the chunks' partial sums."""

    def text(self, dtype: str) -> str:
        """The module."""
        code = self.code
        partial, out = self.argument(0, "ptr"), self.argument(1, "ptr")
        chunks, stride = self.argument(2), self.argument(3)
        factor = self.spread(self.argument(4, "double"), "double")
        t = code.of("double")
        for j in self.repeat("column", "%begin", "%end", code.lanes):
            mask = self.mask(self.smaller(self.i64("sub", "%end", j), str(code.lanes)))
            code.do(f"store {t} zeroinitializer, ptr %total")
            for k in self.repeat("row", 0, chunks):
                from_ = self.i64("add", self.i64("mul", k, stride), j)
                value = self.load(partial, from_, "f64", mask)
                before = code.emit(f"load {t}, ptr %total")
                code.do(f"store {t} {code.op('fadd', 'double', before, value)}, ptr %total")
            found = code.op("fmul", "double", code.emit(f"load {t}, ptr %total"), factor)
            if dtype == "f32":
                found = code.convert("fptrunc", found, "double", "float")
            self.store(out, j, dtype, found, mask)
        code.do("ret void")
        return self.module(["column", "row"], [f"  %total = alloca {t}"])


@functools.lru_cache(maxsize=8)
def combine(dtype: str) -> str:
    """The module's text of a kernel that adds the chunks' sums in order, and multiplies them by a factor.

    Arguments: the partial sums of the first chunk, the output [columns], the number of chunks, how many doubles lie
    from one chunk to the next, the factor (bits of a double).  Work: columns.
    """
    return _Combine(Code(8)).text(dtype)
