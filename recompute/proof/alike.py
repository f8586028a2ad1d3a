"""The values that two blocks compute alike, by congruence: equal operators on equal values have equal results.

Most of a step is the same in both blocks, and takes one look into a table.  Where an operator differs, but writes a
value that has the name of one of the other block, a window of both is numbered by itself: what lies between the two
values and those that both blocks have in common, which stand there for anything.  Names are hints: a value is the
other's only if the window proves it.  Windows that are alike up to the values they read, as those of equal layers are,
are proved once in a process; those of operators that say nothing of sizes, once for all sizes (`pattern`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import VerifyError
from ..language.exact import exact
from ..language.ir import Block, Constant, Free, Operator, Value
from ..language.layouts import permuted, to_last
from ..language.op import Op
from ..language.types import TensorType, need
from ..ops.channels_last import Laid
from ..ops.communication.base import CommWait
from ..ops.memory.offload import Copy, Store
from ..ops.shape.reshape import Copied, Reshape, Transpose
from .kinds import KNOWN, SIZES, form_of, is_product, known, with_count
from .numbers import Numbers
from .views import View

#: most operators of a window
WINDOW = 64
#: windows that are not proved before no more are tried
FAILURES = 8
#: suffixes that passes add to names of values that they recompute, or lay out channels last
AGAIN, LAST = ".again", ".last"
#: operators whose result is their first input (of a Store, the second)
COPIES = (Copied, Copy, CommWait)
#: operators whose result has the elements of their input, through which windows look
VIEWS = (Reshape, Transpose)
#: types in which counts are rounded
LOW = frozenset({"f16", "bf16"})
#: windows, and whether they are proved; operators with their axes turned
_WINDOWS: dict[tuple[Any, ...], bool] = {}
_FORMS: dict[tuple[Any, ...], Any] = {}
#: the communications of each channel
Sent = dict[str, list[object]]
#: an order of so many axes
Perm = Callable[[int], tuple[int, ...]]


class Alike:
    """The values of blocks, numbered: equal numbers are equal values."""

    def __init__(self) -> None:
        self.table: dict[tuple[Any, ...], int] = {}
        #: operator, inputs, outputs by position
        self.rows: list[tuple[Op, tuple[int | None, ...], dict[int, int]]] = []
        #: of a value: the row that makes it (-1: declared), and its type
        self.makers: list[int] = []
        self.types: list[TensorType] = []
        self.constants: dict[int, Constant] = {}
        self.same: dict[int, int] = {}
        #: values that are others with their axes in another order, and this order
        self.moves: set[tuple[int | None, int | None, Perm]] = set()
        self.numbers = Numbers(pulls=False)
        #: results of operators on numbers
        self.done: dict[tuple[Any, ...], list[View | None]] = {}
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
            if op.communicates == "begin":
                sent.setdefault(op.queue, []).append((op, *(env[v.name] for v in o.reads())))  # type: ignore[attr-defined]
            copied = _copied(type(op))  # type: ignore[arg-type]
            if copied is None:
                if self.run(o, env) and others is not None:
                    self.settle(op, o.outputs, env, others)
            elif copied >= 0:
                env[need(o.outputs[0]).name] = env[need(o.inputs[copied]).name]
        self.border = len(self.rows)
        return env, sent

    def declare(self, block: Block) -> dict[str, int]:
        """The numbers of what a block declares."""
        env = {}
        held = (*block.parameters, *block.buffers, *block.state)
        for kind, values in (("input", block.inputs), ("state", held)):
            for v in values:
                t = v.type.placed(host=False) if v.type.host else v.type
                env[v.name] = self.declared((kind, v.name, t.dtype, t.shape), t)
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

    def row(self, op: Op, inputs: tuple[int | None, ...]) -> int:
        """The row of an operator on these inputs."""
        number = self.table.setdefault((op, *inputs), len(self.rows))
        if number == len(self.rows):
            self.rows.append((op, inputs, {}))
        return number

    def run(self, o: Operator, env: dict[str, int]) -> bool:
        """Numbers what an operator writes; whether some of it is new."""
        row = self.row(o.op, tuple([None if v is None else env[v.name] for v in o.inputs]))
        outs, new = self.rows[row][2], False
        for k, v in enumerate(o.outputs):
            if v is None:
                continue
            number, t = outs.get(k), v.type
            if number is None:
                number = outs[k] = len(self.types)
                self.makers.append(row)
                self.types.append(t)
                new = True
            elif (same := self.types[number]) is not t and (same.shape != t.shape or same.dtype != t.dtype):
                raise VerifyError(f"'{v.name}' is {t}, and {same} for the same operator elsewhere")
            env[v.name] = self.same.get(number, number)
        return new

    def settle(self, op: Op, results: Sequence[Value | None], env: dict[str, int], others: Mapping[str, int]) -> None:
        """Gives what an operator writes the numbers of the other block's values of these names, if a window says so."""
        pairs = [(v.name, env[v.name], self.meant(v, others)) for v in results if v is not None]
        wanted = [(mine, other) for _, mine, other in pairs if other is not None and mine != other]
        if not wanted or self.failures == FAILURES:
            return
        if not (self.turned(op, wanted) or self.proved(wanted)):
            self.failures += 1
            return
        for name, mine, other in pairs:
            if other is not None:
                self.same[mine] = env[name] = other

    def meant(self, v: Value, others: Mapping[str, int]) -> int | None:
        """The other block's value that this one's name says it is."""
        name, last = v.name, False
        while name not in others:
            if name.endswith(LAST):
                last = True
            elif not name.endswith(AGAIN):
                return None
            name = name[: name.rindex(".")]
        value = others[name]
        t = self.types[value]
        if last and len(t.shape) > 2 and tuple([t.shape[p] for p in to_last(len(t.shape))]) == v.shape:
            return self.turn(value, to_last(len(t.shape)), v.type)
        return value if t.shape == v.shape else None

    def turned(self, op: Op, pairs: Sequence[tuple[int, int]]) -> bool:
        """Whether results are the others' because an operator is the other one on values with their axes turned."""
        at = self.makers[pairs[0][1]]
        while at >= 0 and isinstance(self.rows[at][0], Transpose) and not isinstance(op, Transpose):
            at = self.makers[need(self.rows[at][1][0])]
        if at < 0:
            return False
        plain, operands, outs = self.rows[at]
        _, inputs, own = self.rows[self.makers[pairs[0][0]]]
        form = self.form(op, plain, operands, outs) if len(inputs) == len(operands) else None
        if form is None:
            return False
        turned, results, *perms = form
        there = perms[0]
        for a, b, turns in zip(inputs, operands, turned, strict=False):
            if a != b if not turns else (a, b, there) not in self.moves and not self.moved(a, b, *perms):
                return False
        for mine, other in pairs:
            k = 0 if own.get(0) == mine else next(k for k, v in own.items() if v == mine)
            if k not in outs or not (self.moved(other, outs[k], *perms) if results[k] else other == outs[k]):
                return False
        return True

    def form(self, op: Op, plain: Op, operands: Sequence[int | None], outs: Mapping[int, int]) -> Any:
        """Which inputs and outputs have their axes turned if `op` is such a form of another operator, and how."""
        if not isinstance(op, Laid) and (type(op) is not type(plain) or type(plain).channels_last is Op.channels_last):
            return None
        types = [None if v is None else self.types[v] for v in (*operands, *map(outs.get, range(max(outs) + 1)))]
        key = (known(op).number, known(plain).number, len(operands), *[t and t.shape for t in types])
        if key not in _FORMS:
            if len(_FORMS) >= KNOWN:
                _FORMS.clear()
            _FORMS[key] = form_of(op, plain, types[: len(operands)], types[len(operands) :])
        return _FORMS[key]

    def moved(self, a: int | None, b: int | None, there: Perm, back: Perm) -> bool:
        """Whether a is b with its axes in another order, by one Transpose that is known."""
        if a is None or b is None:
            return a is b
        n = len(self.types[b].shape)
        if n != len(self.types[a].shape) or not (self.turn(b, there(n)) == a or self.turn(a, back(n)) == b):
            return False
        self.moves.add((a, b, there))
        return True

    def turn(self, v: int, perm: tuple[int, ...], new: TensorType | None = None) -> int | None:
        """A value with its axes in another order, if there is that; `new`, its type: in any case."""
        op = _transpose(perm)
        if op is None:
            return v
        row = self.table.get((op, v))
        if row is None:
            if new is None:
                return None
            row = self.row(op, (v,))
        outs = self.rows[row][2]
        if 0 not in outs:
            outs[0] = self.value(row, new or permuted(self.types[v], perm))
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
                todo += [x for x in self.rows[row][1] if x is not None]
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
            self.same[v] for row in rows if row >= self.border for v in self.rows[row][2].values() if v in self.same
        ]
        for v in beside:
            while isinstance(self.rows[self.makers[v]][0], VIEWS):
                v = need(self.rows[self.makers[v]][1][0])
            leaves.discard(v)
        if not self.below([*(other for _, other in pairs), *beside], 0, leaves, rows):
            return False
        order = sorted(rows)
        return any(self.decided(order, pairs, any_size=some) for some in (True, False))

    def decided(self, order: Sequence[int], pairs: Sequence[tuple[int, int]], *, any_size: bool) -> bool:
        """Whether values are the others', at their sizes or at any, by what is known of windows, or by numbers."""
        pattern = self.pattern(order, any_size=any_size)
        if pattern is None:
            return False
        rows, places, sizes = pattern
        ends = tuple([(places.get(a), places.get(b)) for a, b in pairs])
        if any(None in pair for pair in ends):
            return False
        key = (any_size, rows, ends)
        if (known := _WINDOWS.get(key)) is None:
            if len(_WINDOWS) >= KNOWN:
                _WINDOWS.clear()
            known = _WINDOWS[key] = self.numbered(order, pairs, places, sizes)
        return known

    def pattern(self, order: Sequence[int], *, any_size: bool) -> tuple[Any, dict[int, int], dict[int, int]] | None:
        """A key of the expressions that rows compute, whatever their values, and each value's place in it; `any_size`:
        whatever their sizes, too, and the sizes that stand for these, or None where the rows depend on sizes."""
        places: dict[Any, Any] = {None: None}
        v: Any
        entries: list[Any] = []
        sizes, shapes, others = {1: 1}, dict[tuple[int, ...], tuple[int, ...]](), iter(SIZES)
        for row in order:
            op, inputs, outs = self.rows[row]
            record = known(op)
            kind = record.sizes if any_size else None
            if any_size and kind is None:
                return None
            entries.append(kind.number if kind else record.number)
            for v in (*inputs, *outs.values()):
                if v not in places:
                    t, c, places[v] = self.types[v], self.constants.get(v), len(places)
                    shape = t.shape
                    if any_size:
                        if t.dtype in LOW or (c is not None and (len(c.data) > 1 or is_product(c.data[0]))):
                            return None
                        if shape not in shapes:
                            for d in shape:
                                if d not in sizes:
                                    sizes[d] = next(others, 0) if d else 0
                                    if not sizes[d]:
                                        return None
                            if len(shape) > 5:  # more than MOST elements, perhaps
                                return None
                            shapes[shape] = tuple([sizes[d] for d in shape])
                        shape = shapes[shape]
                    entries += (t.dtype, shape, c)
                entries.append(places[v])
            entries.append(tuple(outs))
            if kind and kind.count is not None and kind.count != kind.counted(self.sized(inputs)):
                return None
        return tuple(entries), places, sizes if any_size else {}

    def sized(self, values: Iterable[int | None], sizes: Mapping[int, int] | None = None) -> list[TensorType | None]:
        """The types of values, with other sizes."""
        types = [None if v is None else self.types[v] for v in values]
        return [t and TensorType(t.dtype, tuple([sizes[d] for d in t.shape])) for t in types] if sizes else types

    def numbered(
        self, order: Sequence[int], pairs: Sequence[tuple[int, int]], places: Mapping[int, int], sizes: dict[int, int]
    ) -> bool:
        """Numbers the rows by expressions of values that may be anything; or, in more time, with means pulled apart."""
        for pulls in (False, True):
            numbers, done = (Numbers(), {}) if pulls else (self.numbers, self.done)
            env: dict[int, View] = {}

            def view(v: int, numbers: Numbers = numbers, env: dict[int, View] = env) -> View:
                if v not in env:  # from outside
                    t, c = need(self.sized((v,), sizes)[0]), self.constants.get(v)
                    any_ = ("value", places[v], t.dtype, t.shape)
                    env[v] = numbers.constant(c) if c else View.whole(numbers.number(any_, "value", t.shape), t.shape)
                return env[v]

            for row in order:
                op, inputs, outs = self.rows[row]
                values = [outs.get(k) for k in range(max(outs) + 1)]
                ins, kind = self.sized(inputs, sizes), known(op).sizes if sizes else None
                if kind and kind.count is not None:
                    op = with_count(op, kind.counted(ins))
                views = [None if v is None else view(v) for v in inputs]
                key = (op, *views, *ins, *outs)
                if (results := done.get(key)) is None:
                    results = done[key] = numbers.apply(op, views, ins, self.sized(values, sizes))
                for v, result in zip(values, results, strict=False):
                    if v is not None:
                        env.setdefault(v, need(result))
            if all(view(a).bare() == view(b).bare() for a, b in pairs):
                return True
        return False


@functools.cache
def _transpose(perm: tuple[int, ...]) -> Op | None:
    """The operator that puts axes in this order; None where they are."""
    return None if perm == tuple(range(len(perm))) else Transpose(perm=perm)


@functools.cache
def _copied(cls: type[Op]) -> int | None:
    """The input that is the result of such operators; -1 where they free it, None for others."""
    return -1 if issubclass(cls, Free) else int(issubclass(cls, Store)) if issubclass(cls, COPIES) else None
