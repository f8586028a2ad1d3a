"""A tile of scores: the product of keys and a panel's queries, the bias, the window.

Whatever else becomes of a score belongs here: both passes make their scores with this code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..code.packing import lanes_below
from ..code.tiles import load_lanes, machine
from .code import Code, lanes, product

#: arguments of both passes, in order.  `cap`: over the scores' unit; `kept`: what dropout multiplies a weight by;
#: `limit`: halves of the random stream's words that are less are dropped
WORDS = ("q", "k", "v", "bias", "bias_row", "bias_column", "scale", "first", "last", "keys", "cap", "seed", "step",
         "limit", "kept")  # fmt: skip
_KINDS = {**dict.fromkeys(("q", "k", "v", "bias", "step"), "ptr"), **dict.fromkeys(("scale", "cap", "kept"), "double")}


@dataclass(frozen=True)
class Form:
    """The parameters of the code of both passes.

    `size`, `values`: elements of a query and of a value; `bias`: "", or which index it varies with: "queries", "keys"
    (or none), "both"; `window`: whether a query sees some keys only; `vectors`: of the panels; `cap`: whether there is
    a soft cap; `drops`: whether there is dropout on the weights; `beside`: operands of which as many matrices lie
    beside each other, row by row (the others' follow each other).
    """

    size: int
    values: int
    bias: str
    window: bool
    vectors: tuple[int, ...]
    cap: bool = False
    drops: bool = False
    beside: tuple[tuple[str, int], ...] = ()

    def apart(self, name: str) -> int:
        """Elements from one row of an operand to the next."""
        return dict(self.beside).get(name, 1) * (self.size if name[-1] in "qk" else self.values)

    @property
    def base(self) -> float:
        """A score is an exponent of 2, whose logarithm is part of the scale, or of e where something is added to it:
        a bias of the largest numbers must not become infinite."""
        return math.e if self.bias else 2.0

    @property
    def unit(self) -> float:
        """Scores of base e over these."""
        return math.log(self.base)


def word(f: Code, name: str) -> str:
    """One of the arguments of `WORDS`."""
    return f.word("%args", WORDS.index(name), _KINDS.get(name, "i64"))


def real(f: Code, name: str) -> str:
    """A double among the arguments, as a float in all lanes."""
    return f.splat(f.let(f"fptrunc double {word(f, name)} to float"))


def weight(f: Code, form: Form, x: str) -> str:
    """The exponential of a score that the largest one, or the log-sum-exp, was subtracted from."""
    return f.power(x if form.base == 2 else f.op("fmul", "float", x, f.f32(1 / math.log(2))))


def seen(f: Code, row: str, there: str, begin: str, end: str) -> tuple[str, str]:
    """The keys between two that a panel's queries may see: (first, behind the last)."""
    low = f.larger(f.add(row, word(f, "first")), begin)
    high = f.smaller(f.add(row, there, word(f, "last")), end)
    return low, f.larger(low, high)


def scores(form: Form, vectors: int, *, slopes: bool = False) -> list[Code]:
    """Functions for the scores of a tile, the last one `scores_N` (args, tile, packed queries, keys, bias, first
    query, queries, first key, keys): scale · q kᵀ + bias, over the unit; -inf where a query does not see a key.

    `slopes`: one more argument, a tile for the derivative of the soft cap."""
    name = f"scores_{vectors}"
    columns = vectors * machine().width
    parts = product(f"{name}_product", columns, (form.apart("k"), 1, lanes(), lanes()))
    arguments = "ptr %args, ptr %s, ptr %q, ptr %k, ptr %bias, i64 %row, i64 %there, i64 %from, i64 %n"
    f = Code(name, arguments + (", ptr %slope" if slopes else ""))
    operands = (("ptr", "%s"), ("ptr", "%k"), ("ptr", "%q"), ("i64", "%n"), ("i64", form.size), ("i1", "false"))
    f.run(f"{name}_product", *operands)
    if form.cap:
        _cap(f, vectors, slopes)
    if form.bias:
        _BIASES[form.bias](f, vectors)
    if form.window:
        _window(f, vectors)
    return [*parts, f]


def _cap(f: Code, vectors: int, slopes: bool) -> None:
    """cap · tanh of what is there: the packed queries' scale is over the cap."""
    cap = real(f, "cap")
    with f.loop(0, "%n") as r:
        for i in range(vectors):
            place = f.add(f.mul(r, lanes()), i * machine().width)
            at = f.at("%s", place)
            turned = f.function("tanh", f.load(at))
            f.store(f.op("fmul", "float", turned, cap), at)
            if slopes:
                slope = f.op("fsub", "float", f.f32(1), f.op("fmul", "float", turned, turned))
                f.store(slope, f.at("%slope", place))


def _both(f: Code, vectors: int) -> None:
    """A bias for each pair: squares of it are turned."""
    apart = word(f, "bias_row")
    source = f.at("%bias", f.add(f.mul("%row", apart), "%from"))

    def add(first: str, column: str, x: str) -> None:
        at = f.at("%s", f.add(f.mul(column, lanes()), first))
        f.store(f.op("fadd", "float", f.load(at), x), at)

    f.turn_in(source, apart, "%there", "%n", add)


def _keys(f: Code, vectors: int) -> None:
    """A bias for each key."""
    step = word(f, "bias_column")
    with f.loop(0, "%n") as r:
        one = f.word("%bias", f.mul(f.add("%from", r), step), "float")
        _add_to_row(f, r, [f.splat(one)] * vectors)


def _queries(f: Code, vectors: int) -> None:
    """A bias for each query."""
    w = machine().width
    columns = []
    for i in range(vectors):
        some = lanes_below(f, f.sub("%there", i * w))
        columns.append(load_lanes(f, f.at("%bias", f.add("%row", i * w)), some))
    with f.loop(0, "%n") as r:
        _add_to_row(f, r, columns)


_BIASES = {"both": _both, "keys": _keys, "queries": _queries}


def _add_to_row(f: Code, row: str, given: list[str]) -> None:
    start = f.at("%s", f.mul(row, lanes()))
    for i, x in enumerate(given):
        at = f.at(start, i * machine().width)
        f.store(f.op("fadd", "float", f.load(at), x), at)


def _window(f: Code, vectors: int) -> None:
    """-inf for keys before `query + first` and behind `query + last`: rows of the tile in which there are some."""
    last, first = word(f, "last"), word(f, "first")
    after = f.sub(f.sub("%from", "%row"), last)  # key `from + r` is seen by the lanes from `after + r` on,
    before = f.sub(f.sub("%from", "%row"), first)  # and by those up to `before + r`
    begin = f.larger(f.sub(1, after), 0)
    with f.loop(begin, "%n") as r:
        _hide(f, r, f.add(after, r), vectors, "slt")
    end = f.smaller(f.sub(vectors * machine().width - 1, before), "%n")
    with f.loop(0, end) as r:
        _hide(f, r, f.add(before, r), vectors, "sgt")


def _hide(f: Code, row: str, bound: str, vectors: int, compare: str) -> None:
    """-inf in the lanes of a row that are less, or more, than a bound."""
    w = machine().width
    start, limit = f.at("%s", f.mul(row, lanes())), f.spread(bound, "i64", w)
    for i in range(vectors):
        numbers = "<" + ", ".join(f"i64 {i * w + j}" for j in range(w)) + ">"
        hidden = f.let(f"icmp {compare} <{w} x i64> {numbers}, {limit}")
        at = f.at(start, i * w)
        f.store(f.select(hidden, "float", f.f32(-math.inf), f.load(at)), at)
