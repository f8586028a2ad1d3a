"""The fast transform of sketches: signed columns of a matrix, a vector's width at a time, and some of its coefficients.

A block of columns lies in workspace as complex rows, a vector of real and one of imaginary parts each.  Passes of
radix 4 go over all of it until a part fits the first cache; each part is then finished by itself.  See
ops/approximation/transforms.py for what is transformed.
"""

from __future__ import annotations

import functools

from .emit import Code, module

#: complex rows of a part that stays in the first cache
_PART = 128


def lanes(dtype: str) -> int:
    """Columns of a block: 64 bytes."""
    return 16 if dtype == "f32" else 8


class _Vectors:
    """Arithmetic on vectors of one type."""

    def __init__(self, f: Code, dtype: str) -> None:
        self.f, self.width = f, lanes(dtype)
        self.real, self.size = ("float", 4) if dtype == "f32" else ("double", 8)
        self.kind = f"<{self.width} x {self.real}>"
        self.suffix = f"v{self.width}{dtype}"

    def load(self, at: str) -> str:
        return self.f.let(f"load {self.kind}, ptr {at}, align {self.size}")

    def store(self, value: str, at: str) -> None:
        self.f.line(f"store {self.kind} {value}, ptr {at}, align {self.size}")

    def row(self, z: str, number: str) -> tuple[str, str]:
        """Addresses of a complex row's parts."""
        at = self.f.at(z, self.f.mul(number, 2 * self.width), self.real)
        return at, self.f.at(at, self.width, self.real)

    def complex(self, z: str, number: str) -> tuple[str, str]:
        re, im = self.row(z, number)
        return self.load(re), self.load(im)

    def scalar(self, base: str, index: str) -> str:
        """An element in all lanes."""
        return self.f.spread(self.f.word(base, index, self.real), self.real, self.width)

    def do(self, what: str, a: str, b: str) -> str:
        return self.f.let(f"{what} {self.kind} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        v = self.kind
        return self.f.intrinsic(f"fma.{self.suffix}", v, (v, a), (v, b), (v, c))

    def both(self, what: str, a: tuple[str, str], b: tuple[str, str]) -> tuple[str, str]:
        return self.do(what, a[0], b[0]), self.do(what, a[1], b[1])

    def turned(self, z: tuple[str, str], w: tuple[str, str]) -> tuple[str, str]:
        """(re + i im) · (cos - i sin)."""
        (re, im), (cos, sin) = z, w
        minus = self.f.let(f"fneg {self.kind} {sin}")
        return self.fma(re, cos, self.do("fmul", im, sin)), self.fma(im, cos, self.do("fmul", re, minus))

    def lanes_of(self, count: str) -> str:
        """Which lanes' numbers are below a count."""
        w = self.width
        numbers = "<" + ", ".join(f"i64 {i}" for i in range(w)) + ">"
        return self.f.let(f"icmp slt <{w} x i64> {numbers}, {self.f.spread(count, 'i64', w)}")

    def load_some(self, at: str, some: str) -> str:
        arguments = (("ptr", at), ("i32", self.size), (f"<{self.width} x i1>", some), (self.kind, "zeroinitializer"))
        return self.f.intrinsic(f"masked.load.{self.suffix}.p0", self.kind, *arguments)

    def store_some(self, value: str, at: str, some: str) -> None:
        arguments = ((self.kind, value), ("ptr", at), ("i32", self.size), (f"<{self.width} x i1>", some))
        self.f.intrinsic(f"masked.store.{self.suffix}.p0", "void", *arguments)


def _pass_of_four(dtype: str) -> Code:
    """Two steps of the transform over complex rows [from, to), in runs of `run` rows; `count`: M; twiddles: [2, M]."""
    f = Code("four", "ptr %z, i64 %from, i64 %to, i64 %run, i64 %count, ptr %table", internal=True)
    v = _Vectors(f, dtype)
    quarter, step = f.div("%run", 4), f.div("%count", "%run")
    sines = f.at("%table", "%count", v.real)
    with f.loop(0, quarter) as j:
        turn = [f.mul(j, step, times) for times in (1, 2, 3)]
        w = [(v.scalar("%table", t), v.scalar(sines, t)) for t in turn]
        with f.loop(f.add("%from", j), "%to", "%run") as first:
            rows = [first, *(f.add(first, f.mul(quarter, i)) for i in (1, 2, 3))]
            a0, a1, a2, a3 = (v.complex("%z", r) for r in rows)
            s02, d02, s13, d13 = (
                v.both("fadd", a0, a2),
                v.both("fsub", a0, a2),
                v.both("fadd", a1, a3),
                v.both("fsub", a1, a3),
            )
            lines = [
                v.both("fadd", s02, s13),
                v.turned(v.both("fsub", s02, s13), w[1]),
                v.turned((v.do("fadd", d02[0], d13[1]), v.do("fsub", d02[1], d13[0])), w[0]),
                v.turned((v.do("fsub", d02[0], d13[1]), v.do("fadd", d02[1], d13[0])), w[2]),
            ]
            for row, (re, im) in zip(rows, lines, strict=True):
                at = v.row("%z", row)
                v.store(re, at[0])
                v.store(im, at[1])
    return f


def _pass_of_two(dtype: str) -> Code:
    """The last step where a step is left: pairs of complex rows [from, to)."""
    f = Code("two", "ptr %z, i64 %from, i64 %to", internal=True)
    v = _Vectors(f, dtype)
    with f.loop("%from", "%to", 2) as first:
        second = f.add(first, 1)
        a, b = v.complex("%z", first), v.complex("%z", second)
        for row, what in ((first, "fadd"), (second, "fsub")):
            re, im = v.both(what, a, b)
            at = v.row("%z", row)
            v.store(re, at[0])
            v.store(im, at[1])
    return f


def _passes(f: Code, z: str, bounds: tuple[str, str], runs: tuple[str, str | int], count: str, table: str) -> str:
    """Passes of four over rows within `bounds` while a run is at least `runs[1]`; the run that is left."""
    run = f.variable("i64", runs[0])
    name = f.fresh("passes")
    f.line(f"br label %{name}.test")
    f.label(f"{name}.test")
    now = f.get(run)
    more = f.let(f"icmp sge i64 {now}, {runs[1]}")
    f.line(f"br i1 {more}, label %{name}.body, label %{name}.end")
    f.label(f"{name}.body")
    f.line(f"call void @four(ptr {z}, i64 {bounds[0]}, i64 {bounds[1]}, i64 {now}, i64 {count}, ptr {table})")
    f.set(run, "i64", f.div(now, 4))
    f.line(f"br label %{name}.test")
    f.label(f"{name}.end")
    return now


def _load(f: Code, v: _Vectors, z: str, source: tuple[str, str, str, str], columns: tuple[str, str]) -> None:
    """Signed rows in the order of the transform: (x, n, rows of slots or -1, signs of rows), (first column, lanes)."""
    x, n, slots, signs = source
    at, some = columns
    with f.loop(0, f.word("%args", 9)) as s:
        row = f.word(slots, s)
        there = f.let(f"icmp sge i64 {row}, 0")
        real = f.let(f"select i1 {there}, i64 {row}, i64 0")
        taken = f.let(f"select i1 {there}, <{v.width} x i1> {some}, <{v.width} x i1> zeroinitializer")
        value = v.load_some(f.at(x, f.add(f.mul(real, n), at), v.real), taken)
        v.store(v.do("fmul", value, v.scalar(signs, real)), f.at(z, f.mul(s, v.width), v.real))


def _save(f: Code, v: _Vectors, z: str, target: tuple[str, str, str, str, str], columns: tuple[str, str]) -> None:
    """The wanted coefficients: (y, n, how many, places [k, 2], factors [k, 4])."""
    y, n, count, places, factors = target
    at, some = columns
    with f.loop(0, count) as j:
        base = f.mul(j, 4)
        (a, b), (c, d) = (v.complex(z, f.word(places, f.add(f.mul(j, 2), i))) for i in (0, 1))
        k = [v.scalar(factors, f.add(base, i)) for i in range(4)]
        total = v.fma(c, k[2], v.do("fmul", d, k[3]))
        total = v.fma(a, k[0], v.fma(b, k[1], total))
        v.store_some(total, f.at(y, f.add(f.mul(j, n), at), v.real), some)


@functools.cache
def transform(dtype: str) -> str:
    """IR: (x, y, rows of the 2M slots, signs, twiddles [2, M], places, factors, workspace, n, 2M, k, pieces).

    Each piece of work is as many blocks of columns, in its own part of the workspace [pieces, 2M, lanes].
    """
    f = Code()
    v = _Vectors(f, dtype)
    x, y, slots, signs, table, places, factors, room = (f.word("%args", i, "ptr") for i in range(8))
    n, size, wanted, pieces = (f.word("%args", i) for i in range(8, 12))
    count = f.div(size, 2)
    blocks = f.div(f.add(n, v.width - 1), v.width)
    with f.loop("%begin", "%end") as piece:
        z = f.at(room, f.mul(piece, size, v.width), v.real)
        first, last = (f.div(f.mul(blocks, p), pieces) for p in (piece, f.add(piece, 1)))
        with f.loop(first, last) as block:
            at = f.mul(block, v.width)
            columns = at, v.lanes_of(f.sub(n, at))
            _load(f, v, z, (x, n, slots, signs), columns)
            part = _passes(f, z, ("0", count), (count, 4 * _PART), count, table)
            with f.loop(0, count, part) as begin:
                end = f.add(begin, part)
                left = _passes(f, z, (begin, end), (part, 4), count, table)
                with f.when(f.let(f"icmp eq i64 {left}, 2")):
                    f.line(f"call void @two(ptr {z}, i64 {begin}, i64 {end})")
            _save(f, v, z, (y, n, wanted, places, factors), columns)
    return module(_pass_of_four(dtype), _pass_of_two(dtype), f)
