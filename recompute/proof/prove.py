"""`prove`: whether a step computes what another does, whatever passes lie between the two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..boundary import as_block, as_texts
from ..errors import VerifyError
from ..language.ir import Block, Free
from ..language.program import Program
from ..language.verify import verify
from . import rows, rules  # noqa: F401  register them
from .alike import Alike
from .numbers import Numbers
from .views import View

#: values of which a proof says where they part
SHOWN = 5


@dataclass(frozen=True)
class Proof:
    """The result of a comparison: `proved` are names of values that are the same expression, up to the order of sums.

    `unproved`: for each other name the first expressions at which the two part.  It may be the same number: no
    rule says so.  `expressions`: how many different ones there are in both.
    """

    proved: tuple[str, ...]
    unproved: Mapping[str, str]
    expressions: int

    def __str__(self) -> str:
        count = len(self.proved) + len(self.unproved)
        summary = f"{len(self.proved)} of {count} values are proved equal ({self.expressions:,} expressions)"
        return "\n".join([summary, *(f"  not proved: {name}: {why}" for name, why in self.unproved.items())])


def prove(
    before: Block | Program, after: Block | Program, *, values: Sequence[str] = (), partly: bool = False
) -> Proof:
    """Proves that a step computes the same as another: outputs, and parameters, buffers and state after it.

    Both are numbered by the same table of expressions (numbers.py), where recomputation, order, layouts, fused
    operators, slices and copies leave no trace; no pass is asked.  Compared are the outputs of `after`, all that
    persists, what is sent to other ranks, and `values`, names that both have.  Sums may be added in another order:
    numbers differ by no more than the rounding of sums.

    VerifyError for a block that cannot be (`rc.verify`), and with the first expressions that differ, unless `partly`:
    then the proof lists what is not proved.  What is proved rests on the operators' own `expand` and `axis_factors`,
    which their tests compare with their numerics.
    """
    first, second = (verify(as_block(p.block if isinstance(p, Program) else p)) for p in (before, after))
    held = (v.name for block in (first, second) for v in (*block.parameters, *block.buffers, *block.state))
    names = dict.fromkeys([*second.outputs, *as_texts(values, "values"), *held])
    alike = Alike()
    before_, sent_ = alike.read(first)
    after_, other_ = alike.read(second, before_)
    if sent_ == other_ and all(n in before_ and before_[n] == after_.get(n) for n in names):
        return Proof(tuple(names), {}, len(alike.rows))
    numbers = Numbers()
    (a, sent), (b, other) = (final(numbers, block) for block in (first, second))
    unequal = [n for n in names if n not in a or a[n] != b.get(n)]
    why = _Differences(numbers, a, b) if unequal or sent != other else None
    result = (
        {n: why.of(n) if i < SHOWN else "it has other expressions, too" for i, n in enumerate(unequal)} if why else {}
    )
    if sent != other:
        result["communication"] = "the ranks are sent other values, or in another order"
    proof = Proof(tuple(n for n in names if n not in result), result, len(numbers.nodes))
    if result and not partly:
        name, said = next(iter(result.items()))
        raise VerifyError(
            f"program '{second.name}': it is not proved that '{name}' is what '{first.name}' computes: {said}"
            f" ({len(result)} of {len(result) + len(proof.proved)} values are not proved)"
        )
    return proof


def final(numbers: Numbers, block: Block) -> tuple[dict[str, View], dict[str, list[object]]]:
    """The numbers of all values at the end of a block; and of what is sent on each channel, in order."""
    env = {v.name: numbers.declared("input", v) for v in block.inputs}
    env |= {v.name: numbers.declared("state", v) for v in (*block.parameters, *block.buffers, *block.state)}
    env |= {c.value.name: numbers.constant(c) for c in block.constants}
    sent: dict[str, list[object]] = {"": [block.products]}
    for o in block.operators:
        if isinstance(o.op, Free):
            continue
        if o.op.communicates == "begin":
            sent.setdefault(o.op.queue, []).append((o.op, *(env[v.name].bare() for v in o.reads())))  # type: ignore[attr-defined]
        numbers.run(o, env)
    return {name: v.bare() for name, v in env.items()}, sent


class _Differences:
    """Where the expressions of two blocks part."""

    def __init__(self, numbers: Numbers, a: Mapping[str, View], b: Mapping[str, View]) -> None:
        self.numbers, self.a, self.b = numbers, a, b
        self.known = self.below(v.base for v in a.values())

    def below(self, roots: Iterable[int], known: set[int] | None = None) -> set[int]:
        """Numbers of all expressions of which these consist, but for known ones."""
        names: set[int] = set()
        todo = list(roots)
        while todo:
            at = todo.pop()
            if at not in names and at not in (known or ()):
                names.add(at)
                todo += [v.base for v in self.numbers.nodes[at].operands]
        return names

    def of(self, name: str) -> str:
        """The first expression of a value that the other block lacks; and of its kind, one that only the other has."""
        if name not in self.a or name not in self.b:
            return "one of the two lacks it"
        mine = self.below([self.b[name].base], self.known)
        if not mine:
            return f"it is {self.shown(self.b[name])}, not {self.shown(self.a[name])}"
        first = min(mine)
        kind = self.numbers.nodes[first].name
        theirs = self.below([self.a[name].base], self.below(v.base for v in self.b.values()))
        other = min((n for n in theirs if self.numbers.nodes[n].name == kind), default=min(theirs, default=None))
        said = f"it computes {self.expression(first)}"
        return f"{said}, where the other computes {self.expression(other)}" if other is not None else said

    def expression(self, number: int) -> str:
        """An expression and its operands."""
        node = self.numbers.nodes[number]
        return f"{node.name}({', '.join(map(self.shown, node.operands))})"

    def shown(self, v: View) -> str:
        """A value: the name of its expression, its shape, and where it begins in that."""
        at = f" from {v.offset}" if v.offset else ""
        return f"{self.numbers.nodes[v.base].name}{list(v.shape)}{at}"
