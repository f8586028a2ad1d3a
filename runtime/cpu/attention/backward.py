"""The gradient: each tile's weights once more, then five products, while the tile is in the cache.

An item of work is a block of queries with a block of keys, of one head.  Items of one wave write to different places,
and waves follow each other, so that gradients are added up in place, in the same order by any number of threads.
"""

from __future__ import annotations

import functools
import math

from ..code.emit import module
from ..code.packing import lanes_below
from ..code.tiles import load_lanes, machine, store_lanes
from . import dropping, scores
from .code import KEYS, Code, lanes, product, whole
from .forward import COLUMNS, HEAD, PANEL, pack, run_panel, start
from .scores import Form, real, word

#: arguments behind those of `scores.WORDS`
WORDS = (*scores.WORDS, "y", "lse", "dy", "dq", "dk", "dv", "dbias", "plain", "heads", "panels", "table", "runs",
         "count", "pieces", "room")  # fmt: skip
_NUMBERS = ("count", "pieces")
#: columns of the table of items: head, panels from, to, keys from, to; whether dk and dv begin with 0, whether dq does
ITEM = 7


def room(form: Form) -> int:
    """Floats of workspace for a thread."""
    return sum(_rows(form)) * lanes()


def _rows(form: Form) -> tuple[int, ...]:
    """Rows of its parts: packed queries and results' gradients, queries' gradients, two tiles, two numbers for each
    lane, a tile of the soft cap's derivative, dropout's bits."""
    d = whole(form.size)
    return d, whole(form.values), d, KEYS, KEYS, 2, KEYS if form.cap else 0, dropping.room(form)


def _word(f: Code, name: str) -> str:
    kind = "i64" if name in _NUMBERS else "double" if name == "plain" else "ptr"
    return f.word("%args", WORDS.index(name), kind)


@functools.cache
def kernel(form: Form, biased: bool) -> str:
    """IR of the kernel over pieces of a wave: each takes every so manieth run.  `biased`: the bias has a gradient."""
    functions = _by_keys(form)
    for v in form.vectors:
        functions += [*scores.scores(form, v, slopes=form.cap), *_by_queries(form, v), *dropping.functions(form, v)]
        functions += [_weights(form, v, biased), _Panel(form, v, biased).code()]
    f = Code()
    runs, start = (_word(f, n) for n in ("runs", "room"))
    count, pieces = (_word(f, n) for n in _NUMBERS)
    with f.loop("%begin", "%end") as piece:
        work = f.at(start, f.mul(piece, room(form)))
        with f.loop(piece, count, pieces) as run:
            begin, end = (f.word(runs, f.add(f.mul(run, 2), i)) for i in range(2))
            with f.loop(begin, end) as item:
                _item(f, form, item, work)
    return module(*functions, f)


def _item(f: Code, form: Form, item: str, own: str) -> None:
    """A block of queries with a block of keys."""
    heads, panels, table = (_word(f, n) for n in ("heads", "panels", "table"))
    at = f.at(table, f.mul(item, ITEM), "i64")
    number, begin, end, low, high, fresh, first = (f.word(at, i) for i in range(ITEM))
    head = f.at(heads, f.mul(number, HEAD), "i64")
    with f.when(f.let(f"icmp ne i64 {fresh}, 0")):
        for name, size in (("dk", form.size), ("dv", form.values)):
            apart = form.apart(name)
            to = f.at(_word(f, name), f.add(f.word(head, COLUMNS.index(name)), f.mul(low, apart)))
            _clear(f, to, f.sub(high, low), size, apart)
    more = f.let(f"icmp eq i64 {first}, 0")
    with f.loop(begin, end) as panel:
        at = f.at(panels, f.mul(panel, PANEL), "i64")
        operands = (("i64", low), ("i64", high), ("i1", more), ("ptr", own))
        run_panel(f, form, at, ("ptr", head), *operands)


def _clear(f: Code, to: str, rows: str, size: int, apart: int) -> None:
    """Zeros in rows."""
    if size == apart:
        f.zero(to, f.mul(rows, size, 4))
        return
    with f.loop(0, rows) as r:
        f.zero(f.at(to, f.mul(r, apart)), size * 4)


def _by_keys(form: Form) -> list[Code]:
    """Products with a row for each key: dV += P dY, dK += dS Q."""
    values = product("add_dv", form.values, (lanes(), 1, form.apart("dy"), form.apart("dv")))
    return [*values, *product("add_dk", form.size, (lanes(), 1, form.apart("q"), form.apart("dk")))]


def _by_queries(form: Form, vectors: int) -> list[Code]:
    """Products with a lane for each query: dPᵀ = V dYᵀ, dQᵀ += Kᵀ dSᵀ."""
    columns = vectors * machine().width
    first = product(f"dweights_{vectors}", columns, (form.apart("v"), 1, lanes(), lanes()))
    return [*first, *product(f"add_dq_{vectors}", columns, (1, form.apart("k"), lanes(), lanes()))]


def _weights(form: Form, vectors: int, biased: bool) -> Code:
    """(scores, dP, rows, state, slopes, dropout's bits): weights in place of scores, and dS = P (dP - Σ dy · y) in
    place of dP, with dropout on the weights that are written and on dP; dS is times the slopes, but where the bias has
    a gradient, to which they do not belong."""
    arguments = "ptr %args, ptr %s, ptr %d, i64 %n, ptr %state, ptr %slopes, ptr %bits"
    f, w = Code(f"weights_{vectors}", arguments), machine().width
    factor = real(f, "kept") if form.drops else ""
    lse, delta = ([f.load(f.at("%state", i * lanes() + j * w)) for j in range(vectors)] for i in range(2))
    with f.loop(0, "%n") as r:
        row, drow, slopes = (f.at(x, f.mul(r, lanes())) for x in ("%s", "%d", "%slopes"))
        kept = dropping.kept(f, "%bits", r, vectors) if form.drops else []
        for j in range(vectors):
            at, dat = f.at(row, j * w), f.at(drow, j * w)
            x = f.op("fsub", "float", f.load(at), lse[j])
            above = f.op("fcmp ogt", "float", x, f.f32(80))  # rounding makes some a little larger than 0
            weight = scores.weight(f, form, f.select(above, "float", f.f32(80), x))
            weights, dweight = weight, f.load(dat)
            if kept:
                times = f.select(kept[j], "float", factor, f.f32(0))
                weights, dweight = (f.op("fmul", "float", a, times) for a in (weight, dweight))
            f.store(weights, at)
            ds = f.op("fmul", "float", weight, f.op("fsub", "float", dweight, delta[j]))
            if form.cap and not biased:
                ds = f.op("fmul", "float", ds, f.load(f.at(slopes, j * w)))
            f.store(ds, dat)
    return f


class _Panel:
    """The function `panel_N` (args, head, first query, queries, keys from, to, whether dq is added to, workspace).

    The scale of dS = scale · P (dP - Σ dy · y) is part of the packed dy, so that it costs nothing; where the bias has a
    gradient, dS is scaled once that is made.  So are the slopes of the soft cap.
    """

    def __init__(self, form: Form, vectors: int, biased: bool) -> None:
        self.form, self.vectors, self.biased = form, vectors, biased
        arguments = "ptr %args, ptr %head, i64 %row, i64 %there, i64 %from, i64 %to, i1 %more, ptr %room"
        f = self.f = Code(f"panel_{vectors}", arguments)
        bias = start(f, "bias")
        self.q, self.dq, self.y, self.dy = (
            f.at(_word(f, n), f.add(start(f, n), f.mul("%row", form.apart(n)))) for n in ("q", "dq", "y", "dy")
        )
        self.k, self.dk, self.v, self.dv, self.dbias = (
            f.at(_word(f, n), start(f, n)) for n in ("k", "dk", "v", "dv", "dbias")
        )
        self.bias = f.at(word(f, "bias"), bias)
        self.lse = f.at(_word(f, "lse"), f.add(start(f, "lse"), "%row"))
        self.scale = f.let(f"fptrunc double {_word(f, 'plain')} to float")
        places, at = [], "%room"
        for rows in _rows(form):
            places.append(at)
            at = f.at(at, rows * lanes())
        self.packed_q, self.packed_dy, self.turned_dq, self.s, self.ds, self.state, self.slopes, self.bits = places

    def code(self) -> Code:
        """The function."""
        f, d, e = self.f, self.form.size, self.form.values
        low, high = scores.seen(f, "%row", "%there", "%from", "%to")
        some = f.let(f"icmp slt i64 {low}, {high}")
        untouched = f.let(f"or i1 {some}, %more")
        with f.unless(untouched):
            _clear(f, self.dq, "%there", d, self.form.apart("dq"))
        with f.when(some):
            pack(f, self.q, self.form.apart("q"), d, self.packed_q, real(f, "scale"))
            pack(f, self.dy, self.form.apart("dy"), e, self.packed_dy, f.f32(1) if self.biased else f.splat(self.scale))
            self.sums()
            with f.loop(low, high, KEYS) as key:
                self.tile(key, f.smaller(f.sub(high, key), KEYS), f.let(f"icmp sgt i64 {key}, {low}"))
            f.turn_out(self.turned_dq, self.dq, self.form.apart("dq"), "%there", d, lambda first, column, x: x, "%more")
        return f

    def sums(self) -> None:
        """For each lane the log-sum-exp over the scores' unit (0 where there is none), and Σ dy · y."""
        f, w, v, e = self.f, machine().width, machine().vector, self.form.values
        for i in range(0, lanes(), w):
            x = load_lanes(f, f.at(self.lse, i), lanes_below(f, f.sub("%there", i)))
            nothing = f.op("fcmp oeq", "float", x, f.f32(-math.inf))
            scaled = f.op("fmul", "float", x, f.f32(1 / self.form.unit))
            f.store(f.select(nothing, "float", f.f32(0), scaled), f.at(self.state, i))
            f.store(f.f32(0), f.at(self.state, lanes() + i))
        with f.loop(0, "%there") as r:
            rows = [f.at(x, f.mul(r, self.form.apart(n))) for x, n in ((self.y, "y"), (self.dy, "dy"))]
            total = f.variable(v, "zeroinitializer")
            with f.loop(0, e, w) as column:
                some = lanes_below(f, f.sub(e, column))
                x, y = (load_lanes(f, f.at(p, column), some) for p in rows)
                f.set(total, v, f.fma(x, y, f.get(total, v)))
            total_value = f.sum(f.get(total, v))
            if not self.biased:
                total_value = f.let(f"fmul float {total_value}, {self.scale}")
            f.set(f.at(self.state, f.add(lanes(), r)), "float", total_value)

    def tile(self, key: str, n: str, more: str) -> None:
        """`n` keys from `key` on; `more`: dq has been begun."""
        f, d, e, v = self.f, self.form.size, self.form.values, self.vectors
        count, there = ("i64", n), ("i64", "%there")
        keys, dkeys, values, dvalues = (
            ("ptr", f.at(x, f.mul(key, self.form.apart(n))))
            for x, n in ((self.k, "k"), (self.dk, "dk"), (self.v, "v"), (self.dv, "dv"))
        )
        s, ds = ("ptr", self.s), ("ptr", self.ds)
        place = (("i64", "%row"), there, ("i64", key), count)
        args, slopes, bits = ("ptr", "%args"), ("ptr", self.slopes), ("ptr", self.bits)
        more_to_write = [slopes] if self.form.cap else []
        f.run(f"scores_{v}", args, s, ("ptr", self.packed_q), keys, ("ptr", self.bias), *place, *more_to_write)
        if self.form.drops:
            dropping.call(f, v, self.bits, "%head", key, n)
        f.run(f"dweights_{v}", ds, values, ("ptr", self.packed_dy), count, ("i64", e), ("i1", "false"))
        f.run(f"weights_{v}", args, s, ds, count, ("ptr", self.state), slopes, bits)
        if self.biased:
            self.add_to_bias(key, n)
            self.scale_tile(n)
        f.run("add_dv", dvalues, s, ("ptr", self.dy), count, there, ("i1", "true"))
        f.run("add_dk", dkeys, ds, ("ptr", self.q), count, there, ("i1", "true"))
        f.run(f"add_dq_{v}", ("ptr", self.turned_dq), keys, ds, ("i64", d), count, ("i1", more))

    def scale_tile(self, n: str) -> None:
        """dS, scaled, and times the slopes."""
        f, factor = self.f, self.f.splat(self.scale)
        with f.loop(0, n) as r:
            for j in range(self.vectors):
                place = f.add(f.mul(r, lanes()), j * machine().width)
                at = f.at(self.ds, place)
                x = f.op("fmul", "float", f.load(at), factor)
                f.store(f.op("fmul", "float", x, f.load(f.at(self.slopes, place))) if self.form.cap else x, at)

    def add_to_bias(self, key: str, n: str) -> None:
        """dS, or its sums over keys or queries."""
        f, v, w = self.f, machine().vector, machine().width
        if self.form.bias == "both":
            apart = word(f, "bias_row")
            to = f.at(self.dbias, f.add(f.mul("%row", apart), key))
            f.turn_out(self.ds, to, apart, "%there", n, lambda first, column, x: x, "true")
            return
        rows = [f.at(self.ds, j * w) for j in range(self.vectors)]
        inside = [lanes_below(f, f.sub("%there", j * w)) for j in range(self.vectors)]
        if self.form.bias == "keys":
            step = word(f, "bias_column")
            with f.loop(0, n) as r:
                total = f.f32(0)
                for row, lane in zip(rows, inside, strict=True):
                    x = f.let(f"select <{w} x i1> {lane}, {v} {f.load(f.at(row, f.mul(r, lanes())))}, {v} {f.f32(0)}")
                    total = f.op("fadd", "float", total, x)
                to = f.at(self.dbias, f.mul(f.add(key, r), step))
                f.set(to, "float", f.let(f"fadd float {f.get(to, 'float')}, {f.sum(total)}"))
            return
        for j, (row, lane) in enumerate(zip(rows, inside, strict=True)):
            to = f.at(self.dbias, f.add("%row", j * w))
            total = f.variable(v, load_lanes(f, to, lane))
            with f.loop(0, n) as r:
                f.set(total, v, f.op("fadd", "float", f.get(total, v), f.load(f.at(row, f.mul(r, lanes())))))
            store_lanes(f, f.get(total, v), to, lane)
