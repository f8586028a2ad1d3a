"""CUDA C of column sums (over rows), together with element-wise outputs.

A block has `across` neighbouring vectors of columns and `lines` rows at a time; its rows are a chunk.  A thread adds
four rows in the element type, then in double; a block's lines meet in a tree, and a last kernel adds the chunks in the
same way.  Lines and chunks follow from rows and columns alone, so that a sum has the same bits in every loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....language.element import Expr
from ...shared.loop_plan import hoisted
from ..code.expressions import code, stored
from ..code.parts import STORE, Coordinates, division, indented, name_of, pack
from ..device.kernel import C_TYPES, COMPUTE, Kernel
from .elements import Operand

#: rows that are added in the element type; loops of more full operands than `_AHEAD` do not read them all at once
ROWS, _AHEAD = 4, 3
#: vectors of columns in a block, blocks that are enough for any device, rows that a thread has at least
_ACROSS, _BLOCKS, _LEAST = 32, 1024, 8

MEET = """
// x[k] of the lines of a block that stand above each other, together in line 0; `tree` has place for them all
template <int ACROSS, int LINES, int N, class T, class F> DEVICE void meet(T (&x)[N], T* tree, F f)
{
    const int lane = threadIdx.x % ACROSS, line = threadIdx.x / ACROSS;
    __syncthreads();
    for (int k = 0; k < N; k++)
        tree[(k * LINES + line) * ACROSS + lane] = x[k];
    __syncthreads();
    for (int h = LINES / 2; h; h /= 2) {
        if (line < h)
            for (int k = 0; k < N; k++)
                tree[(k * LINES + line) * ACROSS + lane] = f(tree[(k * LINES + line) * ACROSS + lane],
                                                             tree[(k * LINES + line + h) * ACROSS + lane]);
        __syncthreads();
    }
    for (int k = 0; k < N; k++)
        x[k] = tree[k * LINES * ACROSS + lane];
}
"""


def power(n: int) -> int:
    """The least power of two that is not below n (1 for n < 2)."""
    return 1 << max(n - 1, 0).bit_length()


def lines_of(columns: int) -> int:
    """Rows that a block works on at a time."""
    return 8 if columns > 16 else 256 // power(columns)


def across(columns: int, lanes: int) -> int:
    """Vectors of columns in a block."""
    return min(_ACROSS, power(-(-columns // lanes)))


def chunks_of(rows: int, columns: int, batch: int = 1) -> tuple[int, int]:
    """Rows of a chunk, and the number of chunks, for each of `batch` matrices."""
    lines = lines_of(columns)
    tiles = max(-(-columns // 128), 1) * max(batch, 1)
    count = max(min(_up(_BLOCKS, tiles), _up(rows, lines * _LEAST)), 1)
    chunk = max(_up(_up(rows, count), lines), 1) * lines
    return chunk, max(_up(rows, chunk), 1)


def _up(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, eq=False)
class Columns:
    """A kernel over `dims` merged dimensions, the last of which are columns, the others rows.

    `outputs` are written in full; `sums` are what is added.  `direct`: there is one chunk, and the results are written,
    of the element types `direct`; else partial sums [chunks, sums, columns].
    """

    dims: int
    operands: tuple[Operand, ...]
    outputs: tuple[Expr, ...]
    sums: tuple[Expr, ...]
    columns: int
    lanes: int
    direct: tuple[str, ...] = ()
    wide: bool = False

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of a row."""
        return Coordinates(self.dims - 1)

    @property
    def block(self) -> int:
        """Threads."""
        return across(self.columns, self.lanes) * lines_of(self.columns)

    def kernel(self) -> Kernel:
        """Parameters: operands, full outputs, partial sums or results, rows, columns, rows of a chunk, for each result
        by what it is divided, divisors."""
        last = self.dims - 1
        varies = [frozenset(range(self.dims)) if o.full else frozenset(o.dims) for o in self.operands]
        count = len(varies)
        roots, once = hoisted([*self.outputs, *self.sums], varies, count, frozenset())
        varies += [frozenset()] * len(once)
        roots, vectors = hoisted(roots, varies, len(varies), frozenset([last]))
        inputs = [f"i{j}" for j in range(count)]
        first, scalars = code(once, inputs, "s")
        text = [
            *self.head(),
            *(f"const {COMPUTE[o.dtype]} i{j} = widen(x{j}[0]);" for j, o in enumerate(self.operands) if o.scalar),
            *first,
            "if (there) {",
            *(f"    {x}" for x in self.vectors(vectors, [*inputs, *scalars])),
            *(f"    {x}" for x in self.rows(roots, [*inputs, *scalars, *(f"h{j}[k]" for j in range(len(vectors)))])),
            "}",
            *self.tail(),
        ]
        parameters = [
            *(f"const {C_TYPES[o.dtype]}* x{j}" for j, o in enumerate(self.operands)),
            *(f"{C_TYPES[x.dtype]}* y{j}" for j, x in enumerate(self.outputs)),
            *((f"{C_TYPES[t]}* z{j}" for j, t in enumerate(self.direct)) if self.direct else ["double* parts"]),
            "long long rows, long long columns, long long chunk",
            *(f"double count{j}" for j in range(len(self.direct))),
            *self.coordinates.parameters,
        ]
        taken_apart = any(d < last for o in self.operands if not o.full for d in o.dims)
        before = (
            (STORE if self.outputs else "") + MEET + (division(wide=self.wide) if self.dims > 2 or taken_apart else "")
        )
        name = name_of("columns", [*self.outputs, *self.sums])
        return Kernel(name, ", ".join(parameters), indented(text), before, self.block)

    def head(self) -> list[str]:
        """Where this thread is, and its totals."""
        a = across(self.columns, self.lanes)
        return [
            f"const int lane = threadIdx.x % {a}, line = threadIdx.x / {a};",
            f"const long long c = ((long long)blockIdx.x * {a} + lane) * {self.lanes};",
            "const long long begin = blockIdx.y * chunk, end = min(begin + chunk, rows);",
            "const bool there = c < columns;",
            *(f"double total{j}[{self.lanes}] = {{}};" for j in range(len(self.sums))),
        ]

    def vectors(self, found: Sequence[Expr], inputs: list[str]) -> list[str]:
        """Statements for what depends on columns only."""
        columns = [(j, o) for j, o in enumerate(self.operands) if not o.full and o.dims == (self.dims - 1,)]
        text = [f"const auto b{j} = *(const {pack(o.dtype, self.lanes)}*)(x{j} + c);" for j, o in columns]
        if not found:
            return text
        texts = list(inputs)
        for j, _ in columns:
            texts[j] = f"widen(b{j}.of[k])"
        lines, names = code(found, texts, "w")
        return [
            *text,
            *(f"{COMPUTE[x.dtype]} h{j}[{self.lanes}];" for j, x in enumerate(found)),
            "#pragma unroll",
            f"for (int k = 0; k < {self.lanes}; k++) {{",
            *(f"    {x}" for x in lines),
            *(f"    h{j}[k] = {n};" for j, n in enumerate(names)),
            "}",
        ]

    def rows(self, roots: Sequence[Expr], inputs: list[str]) -> list[str]:
        """The loop over rows."""
        lines = lines_of(self.columns)
        full = [j for j, o in enumerate(self.operands) if o.full]
        ahead: list[str] = []
        if 0 < len(full) <= _AHEAD:
            kinds = [pack(self.operands[j].dtype, self.lanes) for j in full]
            at = f"(first + u * {lines}) * columns + c"
            ahead = [
                *(f"{kind} a{j}s[{ROWS}];" for j, kind in zip(full, kinds, strict=True)),
                "#pragma unroll",
                f"for (int u = 0; u < {ROWS}; u++)",
                f"    if (first + u * {lines} < end) {{",
                *(f"        a{j}s[u] = *(const {kind}*)(x{j} + {at});" for j, kind in zip(full, kinds, strict=True)),
                "    }",
            ]
        return [
            f"for (long long first = begin + line; first < end; first += {ROWS * lines}) {{",
            *(f"    {x}" for x in ahead),
            *(f"    {COMPUTE[x.dtype]} part{j}[{self.lanes}] = {{}};" for j, x in enumerate(self.sums)),
            "    #pragma unroll",
            f"    for (int u = 0; u < {ROWS}; u++) {{",
            f"        const long long row = first + u * {lines};",
            "        if (row >= end) break;",
            *(f"        {x}" for x in self.row(roots, inputs, ahead=bool(ahead))),
            "    }",
            f"    for (int k = 0; k < {self.lanes}; k++) {{",
            *(f"        total{j}[k] += part{j}[k];" for j in range(len(self.sums))),
            "    }",
            "}",
        ]

    def row(self, roots: Sequence[Expr], inputs: list[str], *, ahead: bool) -> list[str]:
        """Statements for a vector of a row."""
        texts, outer, last = list(inputs), [], self.dims - 1
        partial = [(j, o) for j, o in enumerate(self.operands) if not o.full and any(d < last for d in o.dims)]
        outer += self.coordinates.lines("row", [[d for d in o.dims if d < last] for _, o in partial])
        for j, o in enumerate(self.operands):
            kind = pack(o.dtype, self.lanes)
            where = self.coordinates.offset([d for d in o.dims if d < last])
            if o.full:
                place = f"a{j}s[u]" if ahead else f"*(const {kind}*)(x{j} + row * columns + c)"
                outer.append(f"const auto a{j} = {place};")
                texts[j] = f"widen(a{j}.of[k])"
            elif o.dims == (last,):
                texts[j] = f"widen(b{j}.of[k])"
            elif last in o.dims:
                outer.append(f"const auto a{j} = *(const {kind}*)(x{j} + (long long)({where}) * columns + c);")
                texts[j] = f"widen(a{j}.of[k])"
            elif o.dims:
                outer.append(f"const {COMPUTE[o.dtype]} i{j} = widen(x{j}[{where}]);")
        count = len(self.outputs)
        lines, names = code([*(stored(x) for x in roots[:count]), *roots[count:]], texts)
        return [
            *outer,
            *(f"{pack(x.dtype, self.lanes)} r{j};" for j, x in enumerate(self.outputs)),
            "#pragma unroll",
            f"for (int k = 0; k < {self.lanes}; k++) {{",
            *(f"    {x}" for x in lines),
            *(f"    r{j}.of[k] = narrow<{C_TYPES[x.dtype]}>({n});"
              for j, (x, n) in enumerate(zip(self.outputs, names[:count], strict=True))),
            *(f"    part{j}[k] += {n};" for j, n in enumerate(names[count:])),
            "}",
            *(f"store(y{j} + row * columns + c, r{j});" for j in range(count)),
        ]  # fmt: skip

    def tail(self) -> list[str]:
        """The lines meet, and the first writes."""
        a, lines = across(self.columns, self.lanes), lines_of(self.columns)
        text = [f"__shared__ double tree[{a * lines * self.lanes}];"]
        for j in range(len(self.sums)):
            target = (
                f"z{j}[c + k] = narrow<{C_TYPES[self.direct[j]]}>(total{j}[k] / count{j})"
                if self.direct
                else f"parts[((long long)blockIdx.y * {len(self.sums)} + {j}) * columns + c + k] = total{j}[k]"
            )
            text += [
                f"meet<{a}, {lines}>(total{j}, tree, Plus());",
                "if (line == 0 && there)",
                f"    for (int k = 0; k < {self.lanes}; k++)",
                f"        {target};",
            ]
        return text


def together(dtypes: Sequence[str], chunks: int, columns: int) -> tuple[Kernel, int]:
    """The kernel that adds the chunks' sums [chunks, sums, columns], and how many columns a block has.

    Parameters: the sums, the results, chunks, columns, by what each result is divided.  A row of blocks for each.
    """
    a = min(_ACROSS, power(columns))
    lines = max(min(1024 // a, power(chunks)), _ACROSS // a)
    text = [
        f"const int lane = threadIdx.x % {a}, line = threadIdx.x / {a};",
        f"const long long c = (long long)blockIdx.x * {a} + lane;",
        "double total[1] = {};",
        "if (c < columns)",
        f"    for (long long i = line; i < chunks; i += {lines})",
        f"        total[0] += parts[(i * {len(dtypes)} + blockIdx.y) * columns + c];",
        f"__shared__ double tree[{a * lines}];",
        f"meet<{a}, {lines}>(total, tree, Plus());",
        "if (line || c >= columns) return;",
        *(f"if (blockIdx.y == {j}) z{j}[c] = narrow<{C_TYPES[t]}>(total[0] / count{j});" for j, t in enumerate(dtypes)),
    ]
    parameters = [
        "const double* parts",
        *(f"{C_TYPES[t]}* z{j}" for j, t in enumerate(dtypes)),
        "long long chunks, long long columns",
        *(f"double count{j}" for j in range(len(dtypes))),
    ]
    return Kernel("add_chunks", ", ".join(parameters), indented(text), MEET, a * lines), a
