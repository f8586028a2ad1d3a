"""Dropout on the weights of a tile: a bit for each key and query, from the random stream of ops/random/philox.py.

The number of a weight in the stream is its number among all weights [..., queries, keys], so that it is dropped or kept
in any tile and slice alike.  Eight keys of a query are a block of the stream: a vector has a block for each query.
"""

from __future__ import annotations

from ....ops.random.philox import _BUMPS, _MULTIPLIERS, _ROUNDS
from ..code.tiles import machine
from .code import KEYS, Code, lanes
from .scores import Form, word

#: bits of a word, and keys of a block of the stream
BITS, BLOCK = 32, 8
_HALF, _LOW = 32, (1 << 32) - 1


def room(form: Form) -> int:
    """Rows of workspace: a bit for each key, and for those of a block that begins before the first key."""
    return KEYS // BITS + 1 if form.drops else 0


def functions(form: Form, vectors: int) -> list[Code]:
    """The function `draw_N`, where there is dropout."""
    return [_draw(vectors)] if form.drops else []


def call(f: Code, vectors: int, bits: str, head: str, key: str, n: str) -> None:
    """Draws the bits of a panel's queries, from `%row` on, with `n` keys from `key` on."""
    first = f.add(f.word(head, 7), "%row")
    f.run(f"draw_{vectors}", ("ptr", "%args"), ("ptr", bits), ("i64", first), ("i64", key), ("i64", n))


def kept(f: Code, bits: str, row: str, vectors: int) -> list[str]:
    """For each vector of a row of the tile, which lanes dropout keeps."""
    words = f.at(bits, f.mul(f.let(f"lshr i64 {row}, 5"), lanes()))
    place = f.let(f"and i64 {row}, {BITS - 1}")
    bit = f.let(f"shl i64 1, {place}")
    mask, masks = f.spread(f.let(f"trunc i64 {bit} to i32"), "i32", machine().width), []
    for j in range(vectors):
        some = f.op("and", "i32", _load(f, f.at(words, j * machine().width)), mask)
        masks.append(f.op("icmp ne", "i32", some, "zeroinitializer"))
    return masks


def _load(f: Code, at: str) -> str:
    return f.let(f"load {f.of('i32')}, ptr {at}, align 4")


def _store(f: Code, value: str, at: str) -> None:
    f.line(f"store {f.of('i32')} {value}, ptr {at}, align 4")


def _draw(vectors: int) -> Code:
    """(args, bits, number of the first query, first key, keys): words of 32 keys, from the lowest bit on."""
    f, w = Code(f"draw_{vectors}", "ptr %args, ptr %bits, i64 %first, i64 %key, i64 %n"), machine().width
    keys, halves = word(f, "keys"), f"<{2 * w} x i32>"
    limit = f.spread(f.let(f"trunc i64 {word(f, 'limit')} to i32"), "i32", 2 * w)
    round_keys = _round_keys(f)
    apart = f.let(f"and i64 {f.let(f'or i64 {keys}, %key')}, {BLOCK - 1}")
    before = f.let(f"select i1 {f.let(f'icmp ne i64 {apart}, 0')}, i64 {BLOCK - 1}, i64 0")
    blocks = f.div(f.add("%n", before, BLOCK - 1), BLOCK)
    numbers = "<" + ", ".join(f"i64 {i}" for i in range(w)) + ">"
    with f.loop(0, vectors * w, w) as lane:
        queries = f.op("add", "i64", f.spread(f.add("%first", lane), "i64", w), numbers)
        number = f.op("mul", "i64", queries, f.spread(keys, "i64", w))
        number = f.op("add", "i64", number, f.spread("%key", "i64", w))
        start = f.op("lshr", "i64", number, f.literal(3, "i64"))
        skipped = f.convert("trunc", f.op("and", "i64", number, f.literal(BLOCK - 1, "i64")), "i64", "i32")
        address = f.at("%bits", lane)
        with f.loop(0, blocks, BITS // BLOCK) as begin:
            mask = f.variable(halves, "zeroinitializer")
            end = f.smaller(f.add(begin, BITS // BLOCK), blocks)
            with f.loop(begin, end) as block:
                counter = f.op("add", "i64", start, f.spread(f.add(block, 1), "i64", w))
                _add_bits(f, mask, _cipher(f, counter, round_keys), limit)
            missing = f.sub(BITS, f.mul(f.sub(end, begin), BLOCK))
            shift = f.spread(f.let(f"trunc i64 {missing} to i32"), "i32", w)
            even_odd = f.let(f"bitcast {halves} {f.get(mask, halves)} to {f.of('i64')}")
            whole = f.op("or", "i64", even_odd, f.op("lshr", "i64", even_odd, f.literal(_HALF, "i64")))
            some = f.op("lshr", "i32", f.convert("trunc", whole, "i64", "i32"), shift)
            _store(f, some, f.at(address, f.mul(f.div(begin, BITS // BLOCK), lanes())))
        with f.loop(0, f.div(f.add("%n", BITS - 1), BITS)) as i:
            here, behind = (f.at(address, f.mul(x, lanes())) for x in (i, f.add(i, 1)))
            _store(f, f.call("fshr", "i32", _load(f, behind), _load(f, here), skipped), here)
    return f


def _round_keys(f: Code) -> list[tuple[str, str]]:
    """Both words of the key, in all lanes, for each round."""
    words_in = word(f, "seed"), f.word(word(f, "step"), 0)

    def key(i: int, part: int) -> str:
        return f.spread(f.add(words_in[part], _signed(_BUMPS[part] * i)), "i64", machine().width)

    return [(key(i, 0), key(i, 1)) for i in range(_ROUNDS)]


def _cipher(f: Code, counter: str, keys: list[tuple[str, str]]) -> list[str]:
    """The four words of the block (counter, 0, 0, 0) of each lane."""
    c0, c1, c2, c3 = counter, *["zeroinitializer"] * 3
    for k0, k1 in keys:
        h0, l0 = _wide_product(f, c0, _MULTIPLIERS[0])
        h1, l1 = _wide_product(f, c2, _MULTIPLIERS[1])
        c0 = f.op("xor", "i64", f.op("xor", "i64", h1, c1), k0)
        c2 = f.op("xor", "i64", f.op("xor", "i64", h0, c3), k1)
        c1, c3 = l1, l0
    return [c0, c1, c2, c3]


def _wide_product(f: Code, a: str, b: int) -> tuple[str, str]:
    """The upper and lower 64 bits of a · b: four products of halves."""
    low, half = f.literal(_LOW, "i64"), f.literal(_HALF, "i64")
    b0, b1 = f.literal(b & _LOW, "i64"), f.literal(b >> _HALF, "i64")

    def lower(x: str) -> str:
        return f.op("and", "i64", x, low)

    def upper(x: str) -> str:
        return f.op("lshr", "i64", x, half)

    a0, a1 = lower(a), upper(a)
    first = f.op("mul", "i64", a0, b0)
    middle = f.op("add", "i64", f.op("mul", "i64", a1, b0), upper(first))
    other = f.op("add", "i64", f.op("mul", "i64", a0, b1), lower(middle))
    most = f.op("add", "i64", f.op("mul", "i64", a1, b1), upper(middle))
    least = f.op("or", "i64", f.op("shl", "i64", other, half), lower(first))
    return f.op("add", "i64", most, upper(other)), least


def _add_bits(f: Code, mask: str, words: list[str], limit: str) -> None:
    """Whether halves of words reach the limit: the upper eight bits, over what was there before."""
    n = 2 * machine().width
    kind = f"<{n} x i32>"
    total = f.let(f"lshr {kind} {f.get(mask, kind)}, {_pairs(BLOCK, BLOCK)}")
    for i, x in enumerate(words):
        both = f.let(f"bitcast {f.of('i64')} {x} to {kind}")
        some = f.let(f"icmp uge {kind} {both}, {limit}")
        bits = _pairs(1 << 24 + 2 * i, 1 << 25 + 2 * i)
        total = f.let(f"or {kind} {total}, {f.let(f'select <{n} x i1> {some}, {kind} {bits}, {kind} zeroinitializer')}")
    f.set(mask, kind, total)


def _pairs(even: int, odd: int) -> str:
    return "<" + ", ".join([f"i32 {even}, i32 {odd}"] * machine().width) + ">"


def _signed(bits: int) -> int:
    """A word of 64 bits as LLVM writes it."""
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits
