"""The forward pass: a panel of queries through all tiles that it sees, with the online softmax between the products."""

from __future__ import annotations

import functools
import math

from ..code.emit import module
from ..code.packing import lanes_below
from ..code.tiles import machine, store_lanes
from . import dropping, scores
from .code import KEYS, Code, lanes, product, whole
from .scores import Form, real, word

#: arguments behind those of `scores.WORDS`
WORDS = (*scores.WORDS, "y", "lse", "heads", "panels", "count", "items", "pieces", "room")
#: columns of two tables: heads (offsets of these; `number` of the first query among those of all weights), and panels
#: (first query, queries, variant)
COLUMNS = ("q", "k", "v", "bias", "y", "lse", "dbias", "number", "dy", "dq", "dk", "dv")
HEAD, PANEL = len(COLUMNS), 3


def room(form: Form) -> int:
    """Floats of workspace for a thread: packed queries, results, a tile, three numbers a lane, dropout's bits."""
    return (whole(form.size) + whole(form.values) + KEYS + 3 + dropping.room(form)) * lanes()


def _word(f: Code, name: str) -> str:
    kind = "i64" if name in ("count", "items", "pieces") else "ptr"
    return f.word("%args", WORDS.index(name), kind)


@functools.cache
def kernel(form: Form) -> str:
    """IR of the kernel over pieces of the work: each takes every so manieth (head, panel)."""
    functions = []
    for v in form.vectors:
        functions += [*scores.scores(form, v), *_weigh(form, v), *dropping.functions(form, v)]
        functions += [_online(form, v), _panel(form, v)]
    f = Code()
    heads, panels, start = (_word(f, n) for n in ("heads", "panels", "room"))
    count, items, pieces = (_word(f, n) for n in ("count", "items", "pieces"))
    with f.loop("%begin", "%end") as piece:
        work = f.at(start, f.mul(piece, room(form)))
        with f.loop(piece, items, pieces) as item:
            head = f.at(heads, f.mul(f.div(item, count), HEAD), "i64")
            at = f.at(panels, f.mul(f.rem(item, count), PANEL), "i64")
            run_panel(f, form, at, ("ptr", head), ("ptr", work))
    return module(*functions, f)


def run_panel(f: Code, form: Form, at: str, head: tuple[str, str], *given: tuple[str, str]) -> None:
    """Calls the function for a row of the table of panels: (args, head, first query, queries, what is given)."""
    row, there, variant = (f.word(at, i) for i in range(PANEL))
    for i, v in enumerate(form.vectors):
        with f.when(f.let(f"icmp eq i64 {variant}, {i}")):
            f.run(f"panel_{v}", ("ptr", "%args"), head, ("i64", row), ("i64", there), *given)


def start(f: Code, name: str) -> str:
    """Where one of `COLUMNS` begins, of the head whose row of the table is %head."""
    return f.word("%head", COLUMNS.index(name))


def pack(f: Code, source: str, apart: int, size: int, target: str, factor: str) -> None:
    """Rows of queries as lanes, times a factor."""

    def put(first: str, column: str, x: str) -> None:
        f.store(f.op("fmul", "float", x, factor), f.at(target, f.add(f.mul(column, lanes()), first)))

    f.turn_in(source, apart, "%there", size, put)


def _weigh(form: Form, vectors: int) -> list[Code]:
    """Values times weights: Oᵀ += Vᵀ Pᵀ."""
    columns = vectors * machine().width
    return product(f"weigh_{vectors}", columns, (1, form.apart("v"), lanes(), lanes()))


def _panel(form: Form, vectors: int) -> Code:
    """The function `panel_N` (args, head, first query, queries, workspace)."""
    f = Code(f"panel_{vectors}", "ptr %args, ptr %head, i64 %row, i64 %there, ptr %room")
    d, e, w = form.size, form.values, machine().width
    q, k, v, bias, y, lse = (start(f, n) for n in ("q", "k", "v", "bias", "y", "lse"))
    packed, result = "%room", f.at("%room", whole(d) * lanes())
    tile = f.at(result, whole(e) * lanes())
    state = f.at(tile, KEYS * lanes())
    bits = f.at(state, 3 * lanes())
    apart = form.apart("q")
    pack(f, f.at(word(f, "q"), f.add(q, f.mul("%row", apart))), apart, d, packed, real(f, "scale"))
    for i in range(vectors):
        f.store(f.f32(-math.inf), f.at(state, i * w))
        f.store(f.f32(0), f.at(state, lanes() + i * w))
    low, high = scores.seen(f, "%row", "%there", "0", word(f, "keys"))
    with f.when(f.let(f"icmp eq i64 {low}, {high}")):
        f.zero(result, whole(e) * lanes() * 4)
    keys, values, biases = (f.at(word(f, n), at) for n, at in (("k", k), ("v", v), ("bias", bias)))
    s = ("ptr", tile)
    with f.loop(low, high, KEYS) as key:
        n = f.smaller(f.sub(high, key), KEYS)
        count = ("i64", n)
        more = f.let(f"icmp sgt i64 {key}, {low}")
        place = (("i64", "%row"), ("i64", "%there"), ("i64", key), count)
        here = ("ptr", f.at(keys, f.mul(key, form.apart("k"))))
        f.run(f"scores_{vectors}", ("ptr", "%args"), s, ("ptr", packed), here, ("ptr", biases), *place)
        if form.drops:
            dropping.call(f, vectors, bits, "%head", key, n)
        f.run(f"online_{vectors}", s, count, ("ptr", state), ("ptr", bits))
        with f.when(more):
            _rescale(f, result, state, e, vectors)
        here = ("ptr", f.at(values, f.mul(key, form.apart("v"))))
        f.run(f"weigh_{vectors}", ("ptr", result), here, s, ("i64", e), count, ("i1", more))
    _finish(f, form, vectors, (result, state, y, lse))
    return f


def _online(form: Form, vectors: int) -> Code:
    """(tile of scores, its rows, state, dropout's bits): weights in place of scores; largest score, sum and factor of
    the state.

    The factor, by which what has been added up so far is multiplied: the exponential of the old largest score minus the
    new one.  The sum is that of all weights; those that dropout leaves out become 0.
    """
    f, w, v = Code(f"online_{vectors}", "ptr %s, i64 %n, ptr %state, ptr %bits"), machine().width, machine().vector
    largest, sums, factors = ([f.at("%state", i * lanes() + j * w) for j in range(vectors)] for i in range(3))
    old = [f.load(x) for x in largest]
    new = [f.variable(v, x) for x in old]
    with f.loop(0, "%n") as r:
        row = f.at("%s", f.mul(r, lanes()))
        for j, x in enumerate(new):
            f.set(x, v, f.most(f.load(f.at(row, j * w)), f.get(x, v)))
    shifts = []
    for j, x in enumerate(new):
        value = f.get(x, v)
        nothing = f.op("fcmp oeq", "float", value, f.f32(-math.inf))  # queries that have seen no key yet
        shifts.append(f.select(nothing, "float", f.f32(0), value))
        factor = scores.weight(f, form, f.op("fsub", "float", old[j], shifts[j]))
        f.store(value, largest[j])
        f.store(factor, factors[j])
        f.store(f.op("fmul", "float", f.load(sums[j]), factor), sums[j])
    total = [f.variable(v, "zeroinitializer") for _ in range(vectors)]
    with f.loop(0, "%n") as r:
        row = f.at("%s", f.mul(r, lanes()))
        kept = dropping.kept(f, "%bits", r, vectors) if form.drops else []
        for j in range(vectors):
            at = f.at(row, j * w)
            weight = scores.weight(f, form, f.op("fsub", "float", f.load(at), shifts[j]))
            f.store(f.select(kept[j], "float", weight, f.f32(0)) if kept else weight, at)
            f.set(total[j], v, f.op("fadd", "float", f.get(total[j], v), weight))
    for j in range(vectors):
        f.store(f.op("fadd", "float", f.load(sums[j]), f.get(total[j], v)), sums[j])
    return f


def _rescale(f: Code, result: str, state: str, values: int, vectors: int) -> None:
    """Multiplies the sums so far by the factor."""
    w = machine().width
    factors = [f.load(f.at(state, 2 * lanes() + j * w)) for j in range(vectors)]
    with f.loop(0, values) as r:
        row = f.at(result, f.mul(r, lanes()))
        for j, x in enumerate(factors):
            at = f.at(row, j * w)
            f.store(f.op("fmul", "float", f.load(at), x), at)


def _finish(f: Code, form: Form, vectors: int, given: tuple[str, str, str, str]) -> None:
    """The results over the sums, times what dropout multiplies by, and the log-sum-exp where it is wanted."""
    result, state, y, lse = given
    w = machine().width
    target = _word(f, "lse")
    wanted = f.let(f"icmp ne ptr {target}, null")
    numerator = real(f, "kept") if form.drops else f.f32(1)
    for j in range(vectors):
        total, factor = f.load(f.at(state, lanes() + j * w)), f.at(state, 2 * lanes() + j * w)
        nothing = f.op("fcmp oeq", "float", total, f.f32(0))
        safe = f.select(nothing, "float", f.f32(1), total)
        f.store(f.op("fdiv", "float", numerator, safe), factor)
        with f.when(wanted):
            largest = f.load(f.at(state, j * w))
            statistic = f.fma(largest, f.f32(form.unit), f.function("log", total))
            to = f.at(target, f.add(lse, "%row", j * w))
            store_lanes(f, statistic, to, lanes_below(f, f.sub("%there", j * w)))
    factors = f.at(state, 2 * lanes())

    def over(first: str, column: str, x: str) -> str:
        return f.op("fmul", "float", x, f.load(f.at(factors, first)))

    apart = form.apart("y")
    target = f.at(_word(f, "y"), f.add(y, f.mul("%row", apart)))
    f.turn_out(result, target, apart, "%there", form.values, over)
