"""The gradient: each tile's weights once more, then five products, while the tile is in the cache.

An item of work is a block of queries with a block of keys, of one head.  Items of one wave write to different places, and
waves follow each other, so that gradients are added up in the same order by any number of threads, in place.
"""

from __future__ import annotations

import functools

from ..code.emit import module
from ..code.packing import lanes_below
from ..code.tiles import load_lanes, machine, store_lanes
from . import scores
from .code import KEYS, LOG2E, Code, lanes, product, whole
from .forward import HEAD, PANEL, pack
from .scores import Form, real, seen, word

#: arguments behind those of `scores.WORDS`
WORDS = (*scores.WORDS, "y", "lse", "dy", "dq", "dk", "dv", "dbias", "plain", "heads", "panels", "table", "items",
         "pieces", "room")  # fmt: skip
_NUMBERS = ("items", "pieces")
#: columns of the table of items: head, panels from, to, keys from, to; whether dk and dv begin with 0, and whether dq does
ITEM = 7


def room(form: Form) -> int:
    """Floats of workspace for a thread: packed queries and results' gradients, queries' gradients, two tiles, two
    numbers for each lane."""
    return (2 * whole(form.size) + whole(form.values) + 2 * KEYS + 2) * lanes()


def _word(f: Code, name: str) -> str:
    kind = "i64" if name in _NUMBERS else "double" if name == "plain" else "ptr"
    return f.word("%args", WORDS.index(name), kind)


@functools.cache
def kernel(form: Form, biased: bool) -> str:
    """IR of the kernel over pieces of a wave: each takes every so manieth item.  `biased`: the bias has a gradient."""
    functions = _by_keys(form)
    for v in form.vectors:
        functions += [*scores.scores(form, v), *_by_queries(form, v), _weights(v), _panel(form, v, biased)]
    f = Code()
    heads, panels, table, start = (_word(f, n) for n in ("heads", "panels", "table", "room"))
    items, pieces = (_word(f, n) for n in _NUMBERS)
    with f.loop("%begin", "%end") as piece:
        own = f.at(start, f.mul(piece, room(form)))
        with f.loop(piece, items, pieces) as item:
            at = f.at(table, f.mul(item, ITEM), "i64")
            number, begin, end, low, high, fresh, first = (f.word(at, i) for i in range(ITEM))
            head = f.at(heads, f.mul(number, HEAD), "i64")
            with f.when(f.let(f"icmp ne i64 {fresh}, 0")):
                for name, column, size in (("dk", 1, form.size), ("dv", 2, form.values)):
                    to = f.at(_word(f, name), f.add(f.word(head, column), f.mul(low, size)))
                    f.zero(to, f.mul(f.sub(high, low), size, 4))
            more = f.let(f"icmp eq i64 {first}, 0")
            with f.loop(begin, end) as panel:
                at = f.at(panels, f.mul(panel, PANEL), "i64")
                row, there, variant = (f.word(at, i) for i in range(PANEL))
                for i, v in enumerate(form.vectors):
                    with f.when(f.let(f"icmp eq i64 {variant}, {i}")):
                        given = (("ptr", "%args"), ("ptr", head), ("i64", row), ("i64", there), ("i64", low))
                        f.run(f"panel_{v}", *given, ("i64", high), ("i1", more), ("ptr", own))
    return module(*functions, f)


def _by_keys(form: Form) -> list[Code]:
    """Products with a row for each key: dV += P dY, dK += dS Q."""
    d, e = form.size, form.values
    return [*product("add_dv", e, (lanes(), 1, e, e)), *product("add_dk", d, (lanes(), 1, d, d))]


def _by_queries(form: Form, vectors: int) -> list[Code]:
    """Products with a lane for each query: dPᵀ = V dYᵀ, dQᵀ += Kᵀ dSᵀ."""
    columns = vectors * machine().width
    first = product(f"dweights_{vectors}", columns, (form.values, 1, lanes(), lanes()))
    return [*first, *product(f"add_dq_{vectors}", columns, (1, form.size, lanes(), lanes()))]


def _panel(form: Form, vectors: int, biased: bool) -> Code:
    """One panel of a head with its keys between two."""
    arguments = "ptr %args, ptr %head, i64 %row, i64 %there, i64 %from, i64 %to, i1 %more, ptr %room"
    f = Code(f"panel_{vectors}", arguments)
    d, e = form.size, form.values
    offsets = [f.word("%head", i) for i in range(HEAD)]
    low, high = seen(f, "%row", "%there", "%from", "%to")
    dq_at = f.at(_word(f, "dq"), f.add(offsets[0], f.mul("%row", d)))
    some = f.let(f"icmp slt i64 {low}, {high}")
    nothing = f.let(f"xor i1 {some}, true")
    with f.when(f.let(f"and i1 {nothing}, {f.let('xor i1 %more, true')}")):
        f.zero(dq_at, f.mul("%there", 4 * d))
    with f.when(some):
        places, at = [], "%room"
        for rows in (whole(d), whole(e), whole(d), KEYS, KEYS, 2):
            places.append(at)
            at = f.at(at, rows * lanes())
        queries = f.at(word(f, "q"), f.add(offsets[0], f.mul("%row", d)))
        dys = f.at(_word(f, "dy"), f.add(offsets[4], f.mul("%row", e)))
        pack(f, queries, d, d, places[0], real(f, "scale"))
        pack(f, dys, e, e, places[1], f.f32(1) if biased else f.splat(_plain(f)))
        _state(f, form, offsets, dys, places[5], biased)
        _tiles(f, form, vectors, biased, (low, high), offsets, places, queries, dys)
        f.turn_out(places[2], dq_at, d, "%there", d, lambda first, column, x: x, "%more")
    return f


def _plain(f: Code) -> str:
    """The scale."""
    return f.let(f"fptrunc double {_word(f, 'plain')} to float")


def _state(f: Code, form: Form, offsets: list[str], dys: str, state: str, biased: bool) -> None:
    """For each lane the log-sum-exp in powers of two (0 where there is none), and Σ dy · y, times the scale."""
    w, e = machine().width, form.values
    lse = f.at(_word(f, "lse"), f.add(offsets[5], "%row"))
    for i in range(0, lanes(), w):
        some = lanes_below(f, f.sub("%there", i))
        x = load_lanes(f, f.at(lse, i), some)
        nothing = f.op("fcmp oeq", "float", x, f.literal(float("-inf"), "f32"))
        scaled = f.op("fmul", "float", x, f.f32(LOG2E))
        f.store(f.select(nothing, "float", f.f32(0), scaled), f.at(state, i))
        f.store(f.f32(0), f.at(state, lanes() + i))
    results = f.at(_word(f, "y"), f.add(offsets[4], f.mul("%row", e)))
    factor = "1.0" if biased else _plain(f)
    v = machine().vector
    with f.loop(0, "%there") as r:
        a, b = (f.at(x, f.mul(r, e)) for x in (results, dys))
        total = f.variable(v, "zeroinitializer")
        with f.loop(0, e, w) as column:
            some = lanes_below(f, f.sub(e, column))
            x, y = (load_lanes(f, f.at(p, column), some) for p in (a, b))
            f.set(total, v, f.fma(x, y, f.get(total, v)))
        found = _sum(f, f.get(total, v))
        f.line(f"store float {f.let(f'fmul float {found}, {factor}')}, ptr {f.at(state, f.add(lanes(), r))}")


def _sum(f: Code, x: str) -> str:
    """Of the lanes: halves are added up, in this order."""
    w, v = machine().width, machine().vector
    size = w // 2
    while size:
        order = ", ".join(f"i32 {(i + size) % w}" for i in range(w))
        other = f.let(f"shufflevector {v} {x}, {v} {x}, <{w} x i32> <{order}>")
        x = f.op("fadd", "float", x, other)
        size //= 2
    return f.let(f"extractelement {v} {x}, i64 0")


def _tiles(
    f: Code,
    form: Form,
    vectors: int,
    biased: bool,
    seen: tuple[str, str],
    offsets: list[str],
    places: list[str],
    queries: str,
    dys: str,
) -> None:
    """All tiles of a panel."""
    d, e = form.size, form.values
    packed, dpacked, dq, s, ds, state = places
    keys, values = f.at(word(f, "k"), offsets[1]), f.at(word(f, "v"), offsets[2])
    dk, dv = f.at(_word(f, "dk"), offsets[1]), f.at(_word(f, "dv"), offsets[2])
    biases = f.at(word(f, "bias"), offsets[3])
    rows, there = ("i64", "%row"), ("i64", "%there")
    with f.loop(*seen, KEYS) as at:
        n = f.smaller(f.sub(seen[1], at), KEYS)
        count = ("i64", n)
        key = ("ptr", f.at(keys, f.mul(at, d)))
        value = ("ptr", f.at(values, f.mul(at, e)))
        given = (("ptr", "%args"), ("ptr", s), ("ptr", packed), key, ("ptr", biases), rows, there, ("i64", at), count)
        f.run(f"scores_{vectors}", *given)
        f.run(f"dweights_{vectors}", ("ptr", ds), value, ("ptr", dpacked), count, ("i64", e), ("i1", "false"))
        f.run(f"weights_{vectors}", ("ptr", s), ("ptr", ds), count, ("ptr", state))
        if biased:
            _add_to_bias(f, form, vectors, ds, offsets[6], at, n)
        target = ("ptr", f.at(dv, f.mul(at, e)))
        f.run("add_dv", target, ("ptr", s), ("ptr", dys), count, there, ("i1", "true"))
        target = ("ptr", f.at(dk, f.mul(at, d)))
        f.run("add_dk", target, ("ptr", ds), ("ptr", queries), count, there, ("i1", "true"))
        more = f.let(f"icmp sgt i64 {at}, {seen[0]}")
        f.run(f"add_dq_{vectors}", ("ptr", dq), key, ("ptr", ds), ("i64", d), count, ("i1", more))


def _weights(vectors: int) -> Code:
    """(scores, dP, rows, state): weights in place of scores, and dS = P (dP - Σ dy · y) in place of dP."""
    f, w = Code(f"weights_{vectors}", "ptr %s, ptr %d, i64 %n, ptr %state"), machine().width
    lse, delta = ([f.load(f.at("%state", i * lanes() + j * w)) for j in range(vectors)] for i in range(2))
    with f.loop(0, "%n") as r:
        row, drow = (f.at(x, f.mul(r, lanes())) for x in ("%s", "%d"))
        for j in range(vectors):
            at, dat = f.at(row, j * w), f.at(drow, j * w)
            x = f.op("fsub", "float", f.load(at), lse[j])
            above = f.op("fcmp ogt", "float", x, f.f32(127))
            weight = f.power(f.select(above, "float", f.f32(127), x))
            f.store(weight, at)
            f.store(f.op("fmul", "float", weight, f.op("fsub", "float", f.load(dat), delta[j])), dat)
    return f


def _add_to_bias(f: Code, form: Form, vectors: int, ds: str, offset: str, at: str, n: str) -> None:
    """Adds dS to the bias's gradient, and scales it."""
    target = f.at(_word(f, "dbias"), offset)
    w, v = machine().width, machine().vector
    if form.bias == "both":
        apart = word(f, "bias_row")
        target = f.at(target, f.add(f.mul("%row", apart), at))
        f.turn_out(ds, target, apart, "%there", n, lambda first, column, x: x, "true")
    inside = [lanes_below(f, f.sub("%there", j * w)) for j in range(vectors)]
    sums = [f.variable(v, "zeroinitializer") for _ in range(vectors)]
    scale, step = f.splat(_plain(f)), word(f, "bias_column")
    with f.loop(0, n) as r:
        row = f.at(ds, f.mul(r, lanes()))
        found = []
        for j in range(vectors):
            here = f.at(row, j * w)
            x = f.load(here)
            found.append(f.let(f"select <{w} x i1> {inside[j]}, {v} {x}, {v} zeroinitializer"))
            f.store(f.op("fmul", "float", x, scale), here)
        if form.bias == "queries":
            for s, x in zip(sums, found, strict=True):
                f.set(s, v, f.op("fadd", "float", f.get(s, v), x))
        elif form.bias == "keys":
            total = found[0]
            for x in found[1:]:
                total = f.op("fadd", "float", total, x)
            to = f.at(target, f.mul(f.add(at, r), step))
            one = f.let(f"fadd float {f.let(f'load float, ptr {to}')}, {_sum(f, total)}")
            f.line(f"store float {one}, ptr {to}")
    if form.bias == "queries":
        for j, s in enumerate(sums):
            to = f.at(target, f.add("%row", j * w))
            store_lanes(f, f.op("fadd", "float", load_lanes(f, to, inside[j]), f.get(s, v)), to, inside[j])
