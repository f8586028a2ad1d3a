"""The values that two blocks compute alike, by congruence: equal operators on equal values have equal results.

Most of a step is the same in both blocks, and takes one look into a table.  Where an operator differs, but writes a
value that has the name of one of the other block, a window of both is numbered by itself: what lies between the two
values and those that both blocks have in common, which stand there for anything.  Names are hints: a value is the
other's only if the window proves it.  Windows that are alike up to the values they read, as those of equal layers are,
are proved once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import VerifyError
from ..language.exact import exact
from ..language.ir import Block, Constant, Free, Operator, Value
from ..language.layouts import permuted, to_first, to_last
from ..language.op import Op
from ..language.types import TensorType, Types, need
from ..ops.channels_last import Laid
from ..ops.communication.base import CommWait
from ..ops.memory.offload import Copy, Store
from ..ops.shape.reshape import Copied, Reshape, Transpose
from .numbers import Numbers
from .views import View

#: most operators of a window
WINDOW = 64
#: windows that are not proved before no more are tried
FAILURES = 8
#: suffixes that passes add to names of values that they recompute, or lay out channels last
SUFFIXES = (".again", ".last")
#: operators whose result is their first input (of a Store, the second)
COPIES = (Copied, Copy, CommWait)
#: operators whose result has the elements of their input, through which windows look
VIEWS = (Reshape, Transpose)
#: the communications of each channel
Sent = dict[str, list[object]]
#: an order of so many axes
Perm = Callable[[int], tuple[int, ...]]


class Alike:
    """The values of blocks, numbered: equal numbers are equal values."""

    def __init__(self) -> None:
        self.kinds: dict[Op, int] = {}
        self.kind_of: dict[int, int] = {}
        self.table: dict[tuple[Any, ...], int] = {}
        #: operator and its number, inputs, outputs by position
        self.rows: list[tuple[Op, int, tuple[int | None, ...], dict[int, int]]] = []
        #: of a value: the row that makes it (-1: declared), and its type
        self.makers: list[int] = []
        self.types: list[TensorType] = []
        self.constants: dict[int, Constant] = {}
        self.same: dict[int, int] = {}
        self.windows: dict[tuple[Any, ...], bool] = {}
        self.numbers = Numbers(pulls=False)
        self.turns: dict[tuple[int, ...], Op] = {}
        self.failures = 0
        #: the first row of the block that is compared
        self.border = 0

    def read(self, block: Block, others: Mapping[str, int] | None = None) -> tuple[dict[str, int], Sent]:
        """The numbers of all values at the end of a block; and of what is sent on each channel, in order.

        `others`: those of the block with which this one is compared.
        """
        env = self.declare(block)
        sent: Sent = {"": [block.products]}
        for o in block.operators:
            op = o.op
            if isinstance(op, Free):
                continue
            if op.communicates == "begin":
                sent.setdefault(op.queue, []).append((op, *(env[v.name] for v in o.reads())))  # type: ignore[attr-defined]
            if isinstance(op, COPIES):
                env[need(o.outputs[0]).name] = env[need(o.inputs[isinstance(op, Store)]).name]
            elif self.run(o, env) and others is not None:
                self.settle(o, env, others)
        self.border = len(self.rows)
        return env, sent

    def declare(self, block: Block) -> dict[str, int]:
        """The numbers of what a block declares."""
        env = {v.name: self.declared(("input", v.name, v.type), v.type) for v in block.inputs}
        held = (*block.parameters, *block.buffers, *block.state)
        near = [(v.name, v.type.placed(host=False)) for v in held]
        env |= {name: self.declared(("state", name, t), t) for name, t in near}
        for c in block.constants:
            number = env[c.value.name] = self.declared(("constant", c.value.type, exact(c.data)), c.value.type)
            self.constants[number] = c
        return env

    def declared(self, key: tuple[Any, ...], t: TensorType) -> int:
        """The number of a declared value."""
        number = self.table.get(key)
        if number is None:
            number = self.table[key] = self.value(-1, t)
        return number

    def value(self, row: int, t: TensorType) -> int:
        """A new number."""
        self.makers.append(row)
        self.types.append(t)
        return len(self.types) - 1

    def kind(self, op: Op) -> int:
        """The number of an operator with its attributes."""
        number = self.kind_of.get(id(op))
        if number is None:
            number = self.kind_of[id(op)] = self.kinds.setdefault(op, len(self.kinds))
        return number

    def row(self, op: Op, inputs: tuple[int | None, ...]) -> int:
        """The row of an operator on these inputs."""
        kind = self.kind(op)
        key = (kind, *inputs)
        number = self.table.get(key)
        if number is None:
            number = self.table[key] = len(self.rows)
            self.rows.append((op, kind, inputs, {}))
        return number

    def run(self, o: Operator, env: dict[str, int]) -> bool:
        """Numbers what an operator writes; whether some of it is new."""
        row = self.row(o.op, tuple([None if v is None else env[v.name] for v in o.inputs]))
        outs, new = self.rows[row][3], False
        for k, v in enumerate(o.outputs):
            if v is None:
                continue
            number = outs.get(k)
            if number is None:
                number, new = self.value(row, v.type), True
                outs[k] = number
            elif self.types[number].shape != v.shape or self.types[number].dtype != v.dtype:
                raise VerifyError(f"'{v.name}' is {v.type}, and {self.types[number]} for the same operator elsewhere")
            env[v.name] = self.same.get(number, number)
        return new

    def settle(self, o: Operator, env: dict[str, int], others: Mapping[str, int]) -> None:
        """Gives what an operator writes the numbers of the other block's values of these names, if a window says so."""
        pairs = [(env[v.name], self.meant(v, others), v.name) for v in o.writes()]
        wanted = [(mine, other) for mine, other, _ in pairs if other is not None and mine != other]
        if not wanted or self.failures == FAILURES:
            return
        if not (self.turned(o.op, wanted) or self.proved(wanted)):
            self.failures += 1
            return
        for mine, other, name in pairs:
            if other is not None:
                self.same[mine] = env[name] = other

    def meant(self, v: Value, others: Mapping[str, int]) -> int | None:
        """The other block's value that this one's name says it is."""
        name, last = v.name, False
        while name not in others:
            suffix = next((s for s in SUFFIXES if name.endswith(s)), None)
            if suffix is None:
                return None
            name, last = name.removesuffix(suffix), last or suffix == ".last"
        value = others[name]
        t = self.types[value]
        if last and v.ndim == t.ndim > 2 and permuted(t, to_last(t.ndim)).shape == v.shape:
            return self.turn(value, to_last(t.ndim), new=True)
        return value if t.shape == v.shape else None

    def turned(self, op: Op, pairs: Sequence[tuple[int, int]]) -> bool:
        """Whether results are the others' because an operator is the other one on values with their axes turned."""
        at = self.makers[pairs[0][1]]
        while at >= 0 and isinstance(self.rows[at][0], Transpose) and not isinstance(op, Transpose):
            at = self.makers[need(self.rows[at][2][0])]
        if at < 0:
            return False
        plain, _, operands, outs = self.rows[at]
        form = _form(op, plain, [None if v is None else self.types[v] for v in operands], self.outputs(outs))
        _, _, inputs, own = self.rows[self.makers[pairs[0][0]]]
        if form is None or len(inputs) != len(operands):
            return False
        turned, results, *perms = form
        if not all(
            self.moved(a, b, *perms) if t else a == b for a, b, t in zip(inputs, operands, turned, strict=False)
        ):
            return False
        places = {v: k for k, v in own.items()}
        for mine, other in pairs:
            k = places[mine]
            if k not in outs or not (self.moved(other, outs[k], *perms) if results[k] else other == outs[k]):
                return False
        return True

    def outputs(self, outs: Mapping[int, int]) -> list[TensorType | None]:
        """Their types, None where one is absent."""
        return [self.types[outs[k]] if k in outs else None for k in range(max(outs) + 1)]

    def moved(self, a: int | None, b: int | None, there: Perm, back: Perm) -> bool:
        """Whether a is b with its axes in another order, by one Transpose that is known."""
        if a is None or b is None:
            return a is b
        n = len(self.types[b].shape)
        return n == len(self.types[a].shape) and (self.turn(b, there(n)) == a or self.turn(a, back(n)) == b)

    def turn(self, v: int, perm: tuple[int, ...], *, new: bool = False) -> int | None:
        """A value with its axes in another order, if there is that; `new`: in any case."""
        if perm == tuple(range(len(perm))):
            return v
        op = self.turns.setdefault(perm, Transpose(perm=perm))
        key = (self.kind(op), v)
        if key not in self.table and not new:
            return None
        outs = self.rows[self.row(op, (v,))][3]
        if 0 not in outs:
            outs[0] = self.value(self.table[key], permuted(self.types[v], perm))
        return self.same.get(outs[0], outs[0])

    def below(self, roots: Iterable[int], border: int, leaves: set[int], rows: set[int]) -> bool:
        """Adds the rows from `border` on of which these values consist, and the values they start from.

        Where these are views of others, the others.  False if there are too many.
        """
        todo = list(roots)
        while todo:
            v = todo.pop()
            row = self.makers[v]
            if v in leaves or row < 0 or (row < border and not isinstance(self.rows[row][0], VIEWS)):
                leaves.add(v)
            elif row not in rows:
                rows.add(row)
                todo += [x for x in self.rows[row][2] if x is not None]
                if len(rows) > WINDOW:
                    return False
        return True

    def proved(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Whether values are the others', whatever the values are that both blocks have."""
        rows: set[int] = set()
        leaves: set[int] = set()
        if not self.below((mine for mine, _ in pairs), self.border, leaves, rows):
            return False
        # what the window computes beside, and is known to be another's, is that there, too
        beside = [
            self.same[v] for row in rows if row >= self.border for v in self.rows[row][3].values() if v in self.same
        ]
        for v in beside:
            while isinstance(self.rows[self.makers[v]][0], VIEWS):
                v = need(self.rows[self.makers[v]][2][0])
            leaves.discard(v)
        if not self.below([*(other for _, other in pairs), *beside], 0, leaves, rows):
            return False
        order = sorted(rows)
        key, places = self.pattern(order)
        key = (key, *((places.get(a), places.get(b)) for a, b in pairs))
        if None in itertools.chain(*key[1:]):
            return False
        number = self.windows.get(key)
        if number is None:
            number = self.windows[key] = self.numbered(order, pairs)
        return number

    def pattern(self, order: Sequence[int]) -> tuple[tuple[Any, ...], dict[int, int]]:
        """A key of the expressions that rows compute, whatever their values, and each value's place in it."""
        places: dict[int, int] = {}
        entries: list[Any] = []
        for row in order:
            _, kind, inputs, outs = self.rows[row]
            entries.append(kind)
            for v in (*inputs, *outs.values()):
                place = None if v is None else places.get(v)
                if v is not None and place is None:
                    place = places[v] = len(places)
                    entries.append((self.types[v], v if v in self.constants else None))
                entries.append(place)
            entries.append(tuple(outs))
        return tuple(entries), places

    def numbered(self, order: Sequence[int], pairs: Sequence[tuple[int, int]]) -> bool:
        """Numbers the rows by expressions of values that may be anything; or, in more time, with means pulled apart."""
        for numbers in (self.numbers, Numbers()):
            env: dict[int, View] = {}
            for row in order:
                op, _, inputs, outs = self.rows[row]
                views = [None if v is None else self.view(v, numbers, env) for v in inputs]
                ins = [None if v is None else self.types[v] for v in inputs]
                results = numbers.apply(op, views, ins, self.outputs(outs))
                for k, v in outs.items():
                    env.setdefault(v, need(results[k]))
            if all(self.view(a, numbers, env).bare() == self.view(b, numbers, env).bare() for a, b in pairs):
                return True
        return False

    def view(self, v: int, numbers: Numbers, env: dict[int, View]) -> View:
        """A value of a window; one from outside stands for anything."""
        if v not in env:
            t = self.types[v]
            c = self.constants.get(v)
            env[v] = numbers.constant(c) if c else View.whole(numbers.number(("value", v), "value", t.shape), t.shape)
        return env[v]


def _form(op: Op, plain: Op, ins: Types, outs: Types) -> Any:
    """Which inputs and outputs have their axes turned if `op` is such a form of another operator, and how."""
    if isinstance(op, Laid):
        if op.plain != plain:
            return None
        of = [[i in some for i in range(len(types))] for some, types in ((op.activations, ins), (op.results, outs))]
        return (*of, op.laid, op.unlaid)
    rank = max(t.ndim for t in (*ins, *outs) if t is not None)
    if type(op) is not type(plain) or type(plain).channels_last is Op.channels_last or rank < 3:
        return None
    values, results = ([None if t is None else Value("x", t) for t in types] for types in (ins, outs))
    form = plain.channels_last(values, results, rank)
    return (form.inputs, form.outputs, to_last, to_first) if form is not None and form.op == op else None
