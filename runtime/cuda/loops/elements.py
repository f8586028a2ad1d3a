"""CUDA C of element-wise operators.

A thread works on vectors of neighbouring elements.  Operands that vary along all dimensions, and the outputs, are read
and written as vectors by flat index; of others the offset is computed: once for a vector that stays within the
innermost dimension, else for each element.  What depends on scalars only is computed once a thread, or once a block
where it is long.  A thread reads an element before it writes it, so that an output may be a full operand's buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....language.element import Expr, nodes
from ...shared.loop_plan import hoisted
from ..code.expressions import code, stored
from ..code.parts import VECTORS, Coordinates, division, indented, name_of, pack
from ..device.kernel import C_TYPES, COMPUTE, Kernel

THREADS = 256
#: functions that are worth a block's shared memory where they are of scalars
_LONG = frozenset(("div", "sqrt", "exp", "expm1", "log", "log1p", "tanh", "erf", "sin", "cos", "pow"))


@dataclass(frozen=True)
class Operand:
    """An input: its element type, and the merged dimensions along which it varies; `full`: along all of them."""

    dtype: str
    dims: tuple[int, ...]
    full: bool = False

    @property
    def scalar(self) -> bool:
        """Whether it has one element, and stands for many."""
        return not self.dims and not self.full


@dataclass(frozen=True, eq=False)
class Elements:
    """A kernel over `dims` merged dimensions.

    `lanes`: elements of a vector; `inside`: they never leave the innermost dimension; `ahead`: vectors that a thread
    reads before it computes; `turns`: vectors that it works on one after another; `wide`: sizes beyond 31 bits.
    """

    dims: int
    operands: tuple[Operand, ...]
    outputs: tuple[Expr, ...]
    lanes: int
    inside: bool
    ahead: int = 1
    turns: int = 1
    wide: bool = False

    @property
    def per_block(self) -> int:
        """Elements of a block."""
        return self.step * self.ahead * self.turns

    @property
    def scalars(self) -> tuple[list[Expr], list[Expr]]:
        """The outputs with what depends on scalars only as further inputs; those."""
        varies = [frozenset([0] if o.full else o.dims) for o in self.operands]
        return hoisted(self.outputs, varies, len(self.operands), frozenset())

    @property
    def slow(self) -> bool:
        """Whether a block waits for long functions of scalars before it begins."""
        return any(x.fn in _LONG for x in nodes(self.scalars[1]))

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of an element."""
        return Coordinates(self.dims)

    def kernel(
        self,
        prefix: str = "loop",
        parameters: Sequence[str] = (),
        head: Sequence[str] = (),
        block: str = "(long long)blockIdx.x",
        before: str = "",
    ) -> Kernel:
        """Parameters: operands, outputs, the number of elements, divisors.

        Others may stand in their place, with statements (`head`) that make x0, ..., y0, ... and n, and the number of
        the block among those of one array.
        """
        roots, once = self.scalars
        inputs = [f"i{j}" for j in range(len(self.operands))]
        first, names = code(once, inputs, "s")
        if self.slow:
            first, names = _by_one_thread(first, once, names), [f"once{j}" for j in range(len(once))]
        text = [
            *head,
            *(f"const {COMPUTE[o.dtype]} i{j} = widen(x{j}[0]);" for j, o in enumerate(self.operands) if o.scalar),
            f"const long long start = ({block} * {self.per_block // self.lanes} + threadIdx.x) * {self.lanes};",
            *self.read(),
            *first,
            *self.work(roots, [*inputs, *names]),
        ]
        taken = ", ".join(parameters or self.parameters())
        before = VECTORS + (division(wide=self.wide) if self.dims > 1 else "") + before
        return Kernel(name_of(prefix, self.outputs), taken, indented(text), before, THREADS)

    def parameters(self) -> list[str]:
        """Parameters of the kernel."""
        return [
            *(f"const {C_TYPES[o.dtype]}* x{j}" for j, o in enumerate(self.operands)),
            *(f"{C_TYPES[x.dtype]}* y{j}" for j, x in enumerate(self.outputs)),
            "long long n",
            *self.coordinates.parameters,
        ]

    def read(self) -> list[str]:
        """Vectors of the full operands: all that this thread will need, unless it takes turns."""
        full = [j for j, o in enumerate(self.operands) if o.full]
        if not full or self.turns > 1:
            return []
        if self.ahead == 1:
            return [f"const auto a{j} = fetch<{self.kind(j)}>(x{j}, start, n);" for j in full]
        return [
            *(f"{pack(self.operands[j].dtype, self.lanes)} a{j}s[{self.ahead}];" for j in full),
            "#pragma unroll",
            f"for (int u = 0; u < {self.ahead}; u++) {{",
            *(f"    a{j}s[u] = fetch<{self.kind(j)}>(x{j}, start + u * {self.step}, n);" for j in full),
            "}",
        ]

    def kind(self, j: int) -> str:
        """The parameters of `fetch`."""
        return f"{C_TYPES[self.operands[j].dtype]}, {self.lanes}"

    @property
    def step(self) -> int:
        """Elements between two vectors of a thread."""
        return THREADS * self.lanes

    def work(self, roots: Sequence[Expr], inputs: list[str]) -> list[str]:
        """Statements that compute and write one vector, or several."""
        if self.ahead == self.turns == 1:
            return ["const long long e = start;", "if (e >= n) return;", *self.vector(roots, inputs)]
        full = [j for j, o in enumerate(self.operands) if o.full]
        inner = [
            f"const long long e = start + u * {self.step};",
            "if (e >= n) return;",
            *(f"const auto a{j} = {'fetch<' + self.kind(j) + f'>(x{j}, e, n)' if self.turns > 1 else f'a{j}s[u]'};"
              for j in full),
            *self.vector(roots, inputs),
        ]  # fmt: skip
        how = "#pragma unroll 1" if self.turns > 1 else "#pragma unroll"
        return [how, f"for (int u = 0; u < {self.ahead * self.turns}; u++) {{", *(f"    {x}" for x in inner), "}"]

    def vector(self, roots: Sequence[Expr], inputs: list[str]) -> list[str]:
        """Statements for the vector at e."""
        texts = list(inputs)
        partial = [(j, o) for j, o in enumerate(self.operands) if not o.full and not o.scalar]
        outer: list[str] = []
        inner: list[str] = []
        places = self.coordinates.lines(
            "e" if self.inside else "min((Index)e + k, (Index)n - 1)", [o.dims for _, o in partial]
        )
        (outer if self.inside else inner).extend(places)
        for j, o in partial:
            where = self.coordinates.offset(o.dims)
            if self.inside and self.dims - 1 in o.dims and self.lanes > 1:
                outer.append(f"const auto b{j} = *(const {pack(o.dtype, self.lanes)}*)(x{j} + {where});")
                texts[j] = f"widen(b{j}.of[k])"
            elif self.inside:
                outer.append(f"const {COMPUTE[o.dtype]} i{j} = widen(x{j}[{where}]);")
            else:
                texts[j] = f"widen(x{j}[{where}])"
        for j, o in enumerate(self.operands):
            if o.full:
                texts[j] = f"widen(a{j}.of[k])"
        for j, o in enumerate(self.operands):
            if texts[j] != inputs[j]:
                inner.append(f"const {COMPUTE[o.dtype]} i{j} = {texts[j]};")
        lines, names = code([stored(x) for x in roots], inputs)
        inner += lines
        inner += [
            f"r{j}.of[k] = narrow<{C_TYPES[x.dtype]}>({n});" for j, (x, n) in enumerate(zip(roots, names, strict=True))
        ]
        return [
            *outer,
            *(f"{pack(x.dtype, self.lanes)} r{j};" for j, x in enumerate(roots)),
            "#pragma unroll",
            f"for (int k = 0; k < {self.lanes}; k++) {{",
            *(f"    {x}" for x in inner),
            "}",
            *(f"put(y{j}, r{j}, e, n);" for j in range(len(roots))),
        ]


def _by_one_thread(lines: Sequence[str], once: Sequence[Expr], names: Sequence[str]) -> list[str]:
    """Scalars that the first thread computes for its block."""
    return [
        *(f"__shared__ {COMPUTE[x.dtype]} once{j};" for j, x in enumerate(once)),
        "if (threadIdx.x == 0) {",
        *(f"    {x}" for x in lines),
        *(f"    once{j} = {name};" for j, name in enumerate(names)),
        "}",
        "__syncthreads();",
    ]
