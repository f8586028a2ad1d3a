"""CUDA C of operators over rows: a warp for each short row, a block for each long one.

Reductions that need no other one's result share a walk over the row.  What the formula has in float64 for the sake of
sums is float32 here, where no input or output is float64: the row's threads add in a tree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ....language.element import Expr, constant, nodes
from ....language.rows import LENGTH, REDUCTIONS, RowFormula, terms, walks
from ...shared.loop_plan import level
from ..code.expressions import code, literal, stored
from ..code.parts import indented, name_of
from ..code.rows import kind, thread
from ..device.kernel import C_TYPES, COMPUTE, Kernel

_JOIN = {"sum": "Plus", "largest": "Larger"}


def in_place_types(roots: Sequence[Expr], *, double: bool) -> list[Expr]:
    """The expressions as a device computes them."""
    done: dict[int, Expr] = {}
    for x in nodes(roots):
        dtype = "f32" if x.dtype == "f64" and not double else x.dtype
        args = tuple(done[id(a)] for a in x.args)
        if x.fn == "cast" and args[0].dtype == dtype:
            done[id(x)] = args[0]
        elif x.fn == "constant":
            done[id(x)] = constant(x.value, dtype)
        else:
            done[id(x)] = Expr(x.fn, args, dtype, x.value)
    return [done[id(r)] for r in roots]


@dataclass(frozen=True, eq=False)
class Rows:
    """A kernel of a formula: `ins` and `outs` are the types of the operands, None where one is absent.

    Parameters: inputs, outputs, rows, elements of a row, then the sizes of all dimensions but the first.  A thread has
    `pack` elements of the row that lie together, and then others; `aligned`: operands begin where so many of theirs may
    be read at once.
    """

    formula: RowFormula
    ins: tuple[str | None, ...]
    outs: tuple[str | None, ...]
    warp: bool
    pack: int = 1
    aligned: bool = True

    @functools.cached_property
    def outputs(self) -> dict[int, Expr]:
        """Expressions of the outputs that are there."""
        there = [i for i, t in enumerate(self.outs) if t is not None]
        exprs = [x for i in there if (x := self.formula.outputs[i]) is not None]
        return dict(zip(there, in_place_types(exprs, double="f64" in (*self.ins, *self.outs)), strict=True))

    @functools.cached_property
    def level(self) -> dict[int, frozenset[int]]:
        """The dimensions along which nodes vary."""
        return level(list(self.outputs.values()), [frozenset(d or ()) for d in self.formula.operands])

    def kernel(self) -> Kernel:
        """The text."""
        roots = list(self.outputs.values())
        singles = [x for x in nodes(roots) if not self.level[id(x)] & self.formula.row]
        inputs = [f"i{i}" for i in range(len(self.ins))]
        text = [
            *thread(warp=self.warp),
            *self.places(),
            *(f"const {COMPUTE[str(t)]} i{i} = widen(x{i}[b{i}]);" for i, t in self.read if not self.inside(i)),
        ]
        texts = {id(x): f"({COMPUTE[x.dtype]})n" for x in singles if x.fn == LENGTH}
        walk = 0
        while True:
            ready = [x for x in singles if self.depth[id(x)] <= walk and x.fn not in ("input", "constant")]
            todo = [x for x in ready if id(x) not in texts and x.fn not in REDUCTIONS]
            lines, names = code(todo, inputs, f"s{walk}_", texts)
            text += lines
            texts.update((id(x), n) for x, n in zip(todo, names, strict=True))
            walk += 1
            now = [x for x in singles if x.fn in REDUCTIONS and self.depth[id(x)] == walk]
            if not now:
                break
            text += self.reduced(now, inputs, texts, f"r{walk}_")
        return Kernel(
            name_of("rows", roots), ", ".join(self.parameters()), indented([*text, *self.written(inputs, texts)])
        )

    @functools.cached_property
    def depth(self) -> dict[int, int]:
        """How many walks a node takes."""
        return walks(list(self.outputs.values()))

    @functools.cached_property
    def read(self) -> list[tuple[int, str]]:
        """Numbers and types of the inputs that the formula reads."""
        wanted = {x.value for x in nodes(list(self.outputs.values())) if x.fn == "input"}
        return [(i, t) for i, t in enumerate(self.ins) if t is not None and i in wanted]

    def inside(self, i: int) -> bool:
        """Whether an input varies along the row."""
        return bool(self.formula.row & frozenset(self.formula.operands[i] or ()))

    def parameters(self) -> list[str]:
        """The kernel's parameters in C, in the order that the class gives."""
        return [
            *(f"const {C_TYPES[t]}* x{i}" for i, t in enumerate(self.ins) if t is not None),
            *(f"{C_TYPES[t]}* y{i}" for i, t in enumerate(self.outs) if t is not None),
            "long long rows, int n",
            *(f"long long d{d}" for d in range(1, len(self.formula.sizes))),
        ]

    # -- places -----------------------------------------------------------------------------------------------------

    def offset(self, dims: Sequence[int], names: dict[int, str]) -> str:
        """Where an operand with these dimensions has the element of these coordinates; those without a name are 0."""
        text = "0"
        for d in dims:
            text = f"({text}) * d{d}" if text != "0" else "0"
            text = text if d not in names else names[d] if text == "0" else f"{text} + {names[d]}"
        return text

    def places(self) -> list[str]:
        """The coordinates of the row, and where each operand has it."""
        outer = [d for d in range(len(self.formula.sizes)) if d not in self.formula.row]
        lines, rest = [], "row"
        for d in reversed(outer):
            lines.append(f"const long long c{d} = {rest if d == outer[0] else f'{rest} % d{d}'};")
            rest = f"({rest}) / d{d}"
        names = {d: f"c{d}" for d in outer}
        for letter, dims in self.operands():
            lines.append(f"const long long {letter} = {self.offset(dims, names)};")
        return lines

    def operands(self) -> list[tuple[str, tuple[int, ...]]]:
        """The variables of where operands have the row, and their dimensions."""
        return [
            *((f"b{i}", self.formula.operands[i] or ()) for i, _ in self.read),
            *((f"o{i}", self.formula.results[i] or ()) for i in self.outputs),
        ]

    def element(self, letter: str, dims: Sequence[int]) -> str:
        """Where an operand has element j of the row."""
        outer, *more = sorted(self.formula.row)
        names = {outer: f"j / d{more[0]}" if more else "j"} | ({more[0]: f"j % d{more[0]}"} if more else {})
        if more and set(self.formula.row) <= set(dims) and more[0] == dims[-1]:
            return f"{letter} + j"
        return f"{letter} + {self.offset(dims, names)}"

    # -- walks ------------------------------------------------------------------------------------------------------

    def elements(self, roots: Sequence[Expr], known: dict[int, str]) -> list[str]:
        """Statements that read what these expressions need of element j."""
        wanted = {x.value for x in nodes(roots, lambda x: () if id(x) in known else x.args) if x.fn == "input"}
        return [
            f"const {COMPUTE[t]} i{i} = widen({f'p{i}.of[u]' if self.together(i) else f'x{i}[{self.at(i)}]'});"
            for i, t in self.read
            if i in wanted and self.inside(i)
        ]

    def at(self, i: int) -> str:
        """Where input i has element j of the row."""
        return self.element(f"b{i}", self.formula.operands[i] or ())

    def together(self, i: int) -> bool:
        """Whether input i's elements of a row follow each other, and are read by packs."""
        return self.pack > 1 and self.at(i) == f"b{i} + j"

    def loop(
        self, roots: Sequence[Expr], known: dict[int, str], body: Sequence[str], outs: Sequence[int] = ()
    ) -> list[str]:
        """A walk over the row's elements with what the expressions read of them; `outs`: outputs that are written."""
        if self.pack == 1:
            return ["for (int j = first; j < n; j += by) {", *(f"    {s}" for s in body), "}"]
        p, before, after = self.pack, [], []
        wanted = {x.value for x in nodes(roots, lambda x: () if id(x) in known else x.args) if x.fn == "input"}
        for i, t in self.read:
            if i in wanted and self.inside(i) and self.together(i):
                before.append(f"Pack<{C_TYPES[t]}, {p}> p{i};")
                one_by_one = f"for (int u = 0; u < {p}; u++) p{i}.of[u] = x{i}[b{i} + j0 + u];"
                packed = f"p{i} = *(const Pack<{C_TYPES[t]}, {p}>*)(x{i} + b{i} + j0);"
                before.append(packed if self.aligned else one_by_one)
        for i in outs:
            t = C_TYPES[str(self.outs[i])]
            before.append(f"Pack<{t}, {p}> q{i};")
            one_by_one = f"for (int u = 0; u < {p}; u++) y{i}[o{i} + j0 + u] = q{i}.of[u];"
            after.append(f"*(Pack<{t}, {p}>*)(y{i} + o{i} + j0) = q{i};" if self.aligned else one_by_one)
        inner = [f"for (int u = 0; u < {p}; u++) {{", "    const int j = j0 + u;", *(f"    {s}" for s in body), "}"]
        return [
            f"for (int j0 = first * {p}; j0 < n; j0 += by * {p}) {{",
            *(f"    {s}" for s in (*before, *inner, *after)),
            "}",
        ]

    def reduced(self, now: Sequence[Expr], inputs: list[str], known: dict[int, str], prefix: str) -> list[str]:
        """One walk over the row, and what its threads make of it."""
        lines, parts, bodies = [], [], [terms(x) for x in now]
        for k, x in enumerate(now):
            c = COMPUTE[x.args[0].dtype]
            lines.append(f"{c} {prefix}{k}p = {'0' if x.fn == 'sum' else literal(float('-inf'), x.args[0].dtype)};")
        flat = [a for body in bodies for a in body]
        statements, names = code(flat, inputs, f"{prefix}v", known)
        each = iter(names)
        for k, (x, body) in enumerate(zip(now, bodies, strict=True)):
            texts = [next(each) for _ in body]
            total = f"{prefix}{k}p"
            if len(texts) == 2:
                parts.append(f"{total} = fma_of({texts[0]}, {texts[1]}, {total});")
            else:
                parts.append(f"{total} += {texts[0]};" if x.fn == "sum" else f"{total} = larger({total}, {texts[0]});")
        lines += self.loop(flat, known, [*self.elements(flat, known), *statements, *parts])
        for k, x in enumerate(now):
            known[id(x)] = f"{prefix}{k}"
            value = f"{kind(self.warp)}_reduce({prefix}{k}p, {_JOIN[x.fn]}())"
            lines.append(f"const {COMPUTE[x.args[0].dtype]} {prefix}{k} = {value};")
        return lines

    def written(self, inputs: list[str], known: dict[int, str]) -> list[str]:
        """The numbers of the row, by its first thread, then its elements."""
        row, lines = self.formula.row, []
        single = {i: x for i, x in self.outputs.items() if not row & frozenset(self.formula.results[i] or ())}
        full = {i: x for i, x in self.outputs.items() if i not in single}
        if single:
            statements, names = code([stored(x) for x in single.values()], inputs, "w", known)
            lines += ["if (first == 0) {", *(f"    {s}" for s in statements)]
            for (i, x), name in zip(single.items(), names, strict=True):
                lines.append(f"    y{i}[o{i}] = narrow<{C_TYPES[x.dtype]}>({name});")
            lines.append("}")
        if full:
            roots = [stored(x) for x in full.values()]
            statements, names = code(roots, inputs, "v", known)
            inner, packed = [*self.elements(roots, known), *statements], []
            for (i, x), name in zip(full.items(), names, strict=True):
                at = self.element(f"o{i}", self.formula.results[i] or ())
                if self.pack > 1 and at == f"o{i} + j":
                    packed.append(i)
                target = f"q{i}.of[u]" if i in packed else f"y{i}[{at}]"
                inner.append(f"{target} = narrow<{C_TYPES[x.dtype]}>({name});")
            lines += self.loop(roots, known, inner, packed)
        return lines
