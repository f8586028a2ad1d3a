"""CUDA C of reductions: along the innermost dimensions, along outer ones, and of partial results of chunks.

An element is read as `v`, its place among those that are reduced is `r`, `m` is what a first pass found for its output.
Several elements are reduced in the type `part`, then in `total`.  Which thread has which elements follows from shapes
and types alone, whether or not they can be read as vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..code.parts import division, indented, pack
from ..device.kernel import C_TYPES, COMPUTE, Kernel
from .columns import MEET, power

TIMES = """
struct Times { template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a * b; } };
"""
FINITE = """
DEVICE float finite_or_zero(float x) { return fabsf(x) == infinity<float>() ? 0.0f : x; }
DEVICE double finite_or_zero(double x) { return fabs(x) == infinity<double>() ? 0.0 : x; }
"""
#: rows that a thread reduces in `part`
ROWS = 4


@dataclass(frozen=True)
class Fold:
    """A reduction of elements: `f` is a function object, `start` its neutral element, `value` what it is given.

    `finish`: the result, of `t`, `m`, `count` and `{o}`, its place.  `best`: the element type of m, "" where there is
    none, and `usable` what is read of it.
    """

    name: str
    x: str
    out: str
    part: str
    total: str
    start: str
    f: str
    value: str = "v"
    finish: str = "t"
    best: str = ""
    usable: str = "{}"

    @property
    def parameters(self) -> list[str]:
        """Parameters of every kernel: results of the first pass."""
        return [f"const {C_TYPES[self.best]}* best"] if self.best else []

    def found(self, o: str) -> str:
        """The statement that reads m."""
        return f"const auto m = {self.usable.format(f'widen(best[{o}])')};"

    def result(self, o: str) -> str:
        """The statement that writes an output, of `t` and `m`."""
        return f"out[{o}] = narrow<{C_TYPES[self.out]}>({self.finish.replace('{o}', o)});"

    @property
    def before(self) -> str:
        """Function objects that are not in the prelude."""
        return (TIMES if self.f == "Times" else "") + (FINITE if "finite_or_zero" in self.usable else "")


@dataclass(frozen=True)
class Shape:
    """`kept` and `reduced` merged dimensions; `inner`: the innermost is reduced; `wide`: sizes beyond 31 bits."""

    kept: int
    reduced: int
    inner: bool
    wide: bool

    @property
    def parameters(self) -> list[str]:
        """Strides and, but for the outermost of each kind, sizes."""
        return [f"{t} {letter}{i}{kind}"
                for letter, count in (("k", self.kept), ("r", self.reduced))
                for kind, t, first in (("stride", "long long", 0), ("size", "Divisor", 1))
                for i in range(first, count)]  # fmt: skip

    def place(self, letter: str, index: str, name: str) -> list[str]:
        """Statements that make `name`, the offset of an output ("k") or of a reduced element ("r")."""
        count = self.kept if letter == "k" else self.reduced
        if not count:
            return [f"const long long {name} = 0;"]
        lines, rest, terms = [], f"(Index)({index})", []
        for i in range(count - 1, 0, -1):
            lines.append(f"const Index {name}{i} = over({rest}, {letter}{i}size);")
            terms.append(f"({rest} - {name}{i} * (Index){letter}{i}size.by) * {letter}{i}stride")
            rest = f"{name}{i}"
        return [*lines, f"const long long {name} = {' + '.join([f'{rest} * {letter}0stride', *terms])};"]

    @property
    def before(self) -> str:
        """The declarations that `place` needs."""
        return division(wide=self.wide)


def _kernel(fold: Fold, shape: Shape, kind: str, text: Sequence[str], chunked: bool, threads: int) -> Kernel:
    parameters = [
        f"const {C_TYPES[fold.x]}* x",
        *fold.parameters,
        f"{fold.total}* parts" if chunked else f"{C_TYPES[fold.out]}* out",
        "long long outputs, long long n, long long chunk, double count",
        *shape.parameters,
    ]
    before = fold.before + shape.before + (MEET if kind == "columns" else "")
    return Kernel(f"{kind}_{fold.name}", ", ".join(parameters), indented(text), before, threads)


def _written(fold: Fold, *, chunked: bool, o: str, t: str) -> list[str]:
    if chunked:
        return [f"parts[blockIdx.y * outputs + {o}] = {t};"]
    return [f"const {fold.total} t = {t};", fold.result(o)]


@functools.lru_cache(maxsize=1 << 10)
def along(fold: Fold, shape: Shape, group: int, lanes: int, *, vectors: bool, chunked: bool) -> Kernel:
    """`group` threads (up to 32, or all 256 of a block) for an output, whose elements are neighbours.

    Parameters: x, what was found, chunks' results or outputs, outputs, elements of each, rows of a chunk, by what is
    divided, strides and sizes.
    """
    block = group > 32
    text = [
        "const long long o = blockIdx.x;" if block
        else f"const long long o = ((long long)blockIdx.x * 256 + threadIdx.x) / {group};",
        f"const int lane = threadIdx.x % {group};",
        "const bool there = o < outputs;",
        "const long long begin = blockIdx.y * chunk, end = there ? min(begin + chunk, n) : 0;",
        *shape.place("k", "there ? o : 0", "base"),
        *([fold.found("there ? o : 0")] if fold.best else []),
        f"{fold.total} total = {fold.start};",
        *_walk_along(fold, shape, group, lanes, vectors=vectors),
    ]  # fmt: skip
    if block:
        text.append(f"total = block_reduce(total, {fold.f}());")
    elif group > 1:
        text += [
            f"for (int h = {group // 2}; h; h >>= 1)",
            f"    total = {fold.f}()(total, __shfl_xor_sync(0xffffffffu, total, h));",
        ]
    text += ["if (there && lane == 0) {", *(f"    {x}" for x in _written(fold, chunked=chunked, o="o", t="total")), "}"]
    return _kernel(fold, shape, "rows", text, chunked, 256)


def _walk_along(fold: Fold, shape: Shape, group: int, lanes: int, *, vectors: bool) -> list[str]:
    widened = f"const {COMPUTE[fold.x]} v = widen"
    if vectors:
        read = [*shape.place("r", "e", "at"), f"const auto p = *(const {pack(fold.x, lanes)}*)(x + base + at);"]
        element = [f"{widened}(p.of[k]);"]
    else:
        read = []
        element = ["if (e + k >= end) break;", *shape.place("r", "e + k", "at"), f"{widened}(x[base + at]);"]
    return [
        "#pragma unroll 4",
        f"for (long long e = begin + lane * {lanes}; e < end; e += {group * lanes}) {{",
        *(f"    {x}" for x in read),
        f"    {fold.part} part = {fold.start};",
        "    #pragma unroll",
        f"    for (int k = 0; k < {lanes}; k++) {{",
        *(f"        {x}" for x in element),
        "        const long long r = e + k;",
        f"        part = {fold.f}()(part, ({fold.part})({fold.value}));",
        "    }",
        f"    total = {fold.f}()(total, ({fold.total})part);",
        "}",
    ]


@functools.lru_cache(maxsize=1 << 10)
def down(fold: Fold, shape: Shape, across: int, lines: int, lanes: int, *, chunked: bool) -> Kernel:
    """A block for `across` vectors of outputs that are neighbours, with `lines` threads for each of them.

    Parameters as above.
    """
    text = [
        f"const int lane = threadIdx.x % {across}, line = threadIdx.x / {across};",
        f"const long long o = ((long long)blockIdx.x * {across} + lane) * {lanes};",
        "const bool there = o < outputs;",
        "const long long begin = blockIdx.y * chunk, end = there ? min(begin + chunk, n) : 0;",
        *shape.place("k", "there ? o : 0", "base"),
        f"{fold.total} total[{lanes}];",
        f"for (int k = 0; k < {lanes}; k++) total[k] = {fold.start};",
        *_walk_down(fold, shape, lines, lanes),
    ]
    if lines > 1:
        text += [
            f"__shared__ {fold.total} tree[{across * lines * lanes}];",
            f"meet<{across}, {lines}>(total, tree, {fold.f}());",
        ]
    text += [
        "if (line == 0 && there)",
        f"    for (int k = 0; k < {lanes}; k++) {{",
        *([f"        {fold.found('o + k')}"] if fold.best and not chunked else []),
        *(f"        {x}" for x in _written(fold, chunked=chunked, o="o + k", t="total[k]")),
        "    }",
    ]
    return _kernel(fold, shape, "columns", text, chunked, across * lines)


def _walk_down(fold: Fold, shape: Shape, lines: int, lanes: int) -> list[str]:
    kind = pack(fold.x, lanes)
    return [
        f"for (long long first = begin + line; first < end; first += {ROWS * lines}) {{",
        f"    {kind} ahead[{ROWS}];",
        "    #pragma unroll",
        f"    for (int u = 0; u < {ROWS}; u++)",
        f"        if (first + u * {lines} < end) {{",
        *(f"            {x}" for x in shape.place("r", f"first + u * {lines}", "at")),
        f"            ahead[u] = *(const {kind}*)(x + base + at);",
        "        }",
        "    #pragma unroll",
        f"    for (int k = 0; k < {lanes}; k++) {{",
        *([f"        {fold.found('o + k')}"] if fold.best else []),
        f"        {fold.part} part = {fold.start};",
        "        #pragma unroll",
        f"        for (int u = 0; u < {ROWS}; u++) {{",
        f"            const long long r = first + u * {lines};",
        f"            const {COMPUTE[fold.x]} v = widen(ahead[u].of[k]);",
        f"            if (r < end) part = {fold.f}()(part, ({fold.part})({fold.value}));",
        "        }",
        f"        total[k] = {fold.f}()(total[k], ({fold.total})part);",
        "    }",
        "}",
    ]


@functools.lru_cache(maxsize=1 << 10)
def rest(fold: Fold, chunks: int, outputs: int) -> tuple[Kernel, int]:
    """The kernel that reduces the chunks' results [chunks, outputs], and the number of outputs of a block.

    Parameters: their results, what was found, outputs, chunks, outputs' number, by what is divided.
    """
    across = min(32, power(outputs))
    lines = max(min(1024 // across, power(chunks)), 32 // across)
    text = [
        f"const int lane = threadIdx.x % {across}, line = threadIdx.x / {across};",
        f"const long long o = (long long)blockIdx.x * {across} + lane;",
        f"{fold.total} total[1] = {{{fold.start}}};",
        "if (o < outputs)",
        f"    for (long long i = line; i < chunks; i += {lines})",
        f"        total[0] = {fold.f}()(total[0], parts[i * outputs + o]);",
        f"__shared__ {fold.total} tree[{across * lines}];",
        f"meet<{across}, {lines}>(total, tree, {fold.f}());",
        "if (line || o >= outputs) return;",
        *([fold.found("o")] if fold.best else []),
        f"const {fold.total} t = total[0];",
        fold.result("o"),
    ]
    parameters = [
        f"const {fold.total}* parts",
        *fold.parameters,
        f"{C_TYPES[fold.out]}* out",
        "long long chunks, long long outputs, double count",
    ]
    return Kernel(
        f"chunks_{fold.name}", ", ".join(parameters), indented(text), fold.before + MEET, across * lines
    ), across
