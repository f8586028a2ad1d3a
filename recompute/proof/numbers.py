"""Numbers for values: equal numbers for what is the same expression of inputs, parameters and state.

Value numbering (Cocke & Schwartz 1970) over a block: an operator on numbered inputs has the number of its expression.
Before they are numbered, expressions take one form: fused operators become their expansions, moved elements become
views (views.py), and element-wise operators, sums and products of matrices are written by indices, whose order does not
depend on the layout in which values are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..language.builder import Builder
from ..language.exact import exact
from ..language.layouts import permuted, to_last
from ..language.ir import Constant, Operator, Value
from ..language.op import Op
from ..language.types import TensorType, Types
from .views import View, joined, strides

#: an index of an expression: its size, and its stride in each operand
Index = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Node:
    """A numbered expression, for messages: what it is called, and the values that it reads."""

    name: str
    operands: tuple[View, ...]


class Numbers:
    """The table of expressions, which all blocks that are compared share."""

    def __init__(self) -> None:
        self.table: dict[Any, int] = {}
        self.nodes: list[Node] = []

    def number(self, key: Any, name: str, operands: Sequence[View] = ()) -> int:
        """The number of an expression."""
        found = self.table.get(key)
        if found is None:
            found = self.table[key] = len(self.nodes)
            self.nodes.append(Node(name, tuple(operands)))
        return found

    # -- leaves -------------------------------------------------------------------------------------------------------

    def declared(self, kind: str, v: Value) -> View:
        """An input, or the contents of a persistent value before the step."""
        return View.whole(self.number((kind, v.name, v.type), v.name), v.shape)

    def constant(self, c: Constant) -> View:
        """Its elements; one number for all if they are equal."""
        if c.data and all(exact(x) == exact(c.data[0]) for x in c.data):
            return self.filled(c.value.type, c.data[0])
        return View.whole(self.number(("constant", c.value.type, exact(c.data)), c.value.name), c.value.shape)

    def filled(self, t: TensorType, value: Any) -> View:
        """A value all of whose elements are `value`."""
        x = t.numpy.type(value)
        base = self.number(("constant", t.dtype, x.tobytes()), str(x))
        return View.whole(base, ()).at([(t.size, 0)], t.shape) if t.size != 1 else View(base, 0, (), t.shape)

    # -- expressions --------------------------------------------------------------------------------------------------

    def apply(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View]:
        """The results of an operator on numbered inputs; `outs`: the types of all its outputs."""
        rule = next((RULES[c] for c in type(op).__mro__ if c in RULES), None)
        if 0 not in (t.size for t in (*ins, *outs) if t is not None):
            found = rule(self, op, inputs, ins, outs) if rule is not None else None
            if found is not None:
                return found
            if (body := expansion(op, tuple(ins))) is not None:
                return self.through(body, inputs)
            if type(op).channels_last is not Op.channels_last:
                return self.turned(op, inputs, ins, outs)
        return self.opaque(op, inputs, outs)

    def opaque(self, op: Op, inputs: Sequence[View | None], outs: Types) -> list[View]:
        """Expressions that are equal only if operator and inputs are."""
        given = [v for v in inputs if v is not None]
        return [
            View.whole(self.number((op, tuple(inputs), k), f"{op.name}.{k}" if k else op.name, given), t.shape)
            for k, t in enumerate(outs)
            if t is not None
        ]

    def turned(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View]:
        """An operator that has channels-last forms: of these, the one whose first input lies most densely."""
        best, at, whole = (inputs, op, outs), 0, ()
        form, rank = (list(inputs), op, list(outs)), max((t.ndim for t in (*ins, *outs) if t is not None), default=0)
        for turns in range(1, rank - 1):
            other = _turn(*form, rank)
            if other is None:
                break
            form, whole = other[:3], other[3]
            if _lie(form[0]) > _lie(best[0]):
                best, at = form, turns
        found = self.opaque(best[1], best[0], best[2])
        for _ in range((rank - 1 - at) % (rank - 1) if at else 0):
            found = [v.transposed(to_last(rank)) or v if w else v for v, w in zip(found, whole, strict=True)]
        return found

    def through(self, body: Expansion, inputs: Sequence[View | None]) -> list[View]:
        """The results of an expansion."""
        env = {f"x{i}": v for i, v in enumerate(inputs) if v is not None}
        for c in body.constants:
            env[c.value.name] = self.constant(c)
        for o in body.operators:
            self.run(o, env)
        return [env[v.name] for v in body.outputs if v is not None]

    def run(self, o: Operator, env: dict[str, View]) -> None:
        """Numbers what an operator writes."""
        ins = o.types[0]
        types = o.op.infer(*ins)
        found = self.apply(o.op, [None if v is None else env[v.name] for v in o.inputs], ins, types)
        for v, number in zip(o.outputs, found, strict=False):
            if v is not None:
                env[v.name] = number

    def expression(
        self, name: Any, operands: Sequence[View], kept: Sequence[Index], summed: Sequence[Index] = ()
    ) -> tuple[int, list[int]]:
        """An expression by indices: for each value of `kept`, a function of the operands' elements there.

        Of those at all values of `summed`, where there are any, a symmetric function, such as a sum.  Gives its number,
        the same in whatever order the indices are given, and the stride of each of `kept` in it.
        """
        inner = [i for i, (_, at) in enumerate(kept) if any(at)]
        order = sorted(inner, key=lambda i: tuple(-s for s in kept[i][1]))
        place = dict(zip(order, strides([kept[i][0] for i in order]), strict=True))
        key = (
            name,
            tuple((v.base, v.offset) for v in operands),
            merged([kept[i] for i in order]),
            merged(sorted(summed, key=lambda x: tuple(-s for s in x[1]))),
        )
        return self.number(key, str(name[0]), operands), [place.get(i, 0) for i in range(len(kept))]

    def indexed(
        self, name: Any, operands: Sequence[View], kept: Sequence[Index], summed: Sequence[Index] = (), shape: Any = ()
    ) -> View:
        """The value of such an expression, with the indices in the order given."""
        base, found = self.expression(name, operands, kept, summed)
        return View(base, 0, joined((n, s) for (n, _), s in zip(kept, found, strict=True)), tuple(shape))


def _lie(inputs: Sequence[View | None]) -> tuple[int, ...]:
    """The strides of the axes of the first input."""
    axes = inputs[0].axes() if inputs and inputs[0] is not None else None
    return tuple(a[0][1] if a else 0 for a in axes or ())


def _turn(
    inputs: list[View | None], op: Op, outs: list[TensorType | None], rank: int
) -> tuple[list[View | None], Op, list[TensorType | None], tuple[bool, ...]] | None:
    """The channels-last form of an operator, its inputs and the types of its outputs, and which of these are turned."""
    ins = [None if v is None else Value("x", TensorType("f32", v.shape)) for v in inputs]
    form = op.channels_last(ins, [None if t is None else Value("y", t) for t in outs], rank)
    if form is None:
        return None
    given: list[View | None] = []
    for v, r in zip(inputs, form.inputs, strict=False):
        if v is not None and r and len(v.shape) != rank:
            return None
        moved = v.transposed(to_last(rank)) if v is not None and r else v
        if v is not None and moved is None:
            return None
        given.append(moved)
    types = [t and permuted(t, to_last(rank)) if w else t for t, w in zip(outs, form.outputs, strict=False)]
    return given, form.op, types, tuple(form.outputs)


def merged(indices: Sequence[Index]) -> tuple[Index, ...]:
    """Indices, neighbours joined that lie one after the other in all operands."""
    found: list[Index] = []
    for size, at in indices:
        if found and all(a == size * b for a, b in zip(found[-1][1], at, strict=True)):
            found[-1] = (found[-1][0] * size, at)
        else:
            found.append((size, at))
    return tuple(found)


# -- expansions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expansion:
    """The operators of a composition, over inputs x0, x1, ..."""

    operators: tuple[Operator, ...]
    constants: tuple[Constant, ...]
    outputs: tuple[Value | None, ...]


@functools.lru_cache(maxsize=1 << 14)
def expansion(op: Op, ins: Types) -> Expansion | None:
    """The composition that an operator is on these types; None for a primitive one."""
    b = Builder()
    inputs = [None if t is None else Value(b.names.take(f"x{i}"), t) for i, t in enumerate(ins)]
    if type(op).expand is Op.expand:
        return None
    made = op.expand(b, *inputs)
    return None if made is None else Expansion(tuple(b.operators), tuple(b.constants), tuple(made))


#: class of operators → what gives the numbers of their results; None: it does not apply
Rule = Callable[[Numbers, Any, Sequence[View | None], Types, Types], "list[View] | None"]
RULES: dict[type, Rule] = {}


def rule(*classes: type) -> Callable[[Rule], Rule]:
    """Registers a rule for classes of operators, and those derived from them."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(classes, function))
        return function

    return register
