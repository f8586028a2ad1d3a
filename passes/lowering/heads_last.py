"""Folding of transposes into attention."""

from __future__ import annotations

from collections.abc import Sequence

from ...language.builder import Names
from ...language.ir import Block, Operator, Value
from ...language.kernels import accepting, with_variants
from ...language.layouts import permuted
from ...language.types import TensorType
from ...ops.attention.heads_last import FORMS, MATRICES, heads_last_form, swapped
from ...ops.shape.reshape import Transpose
from ..base import Pass

#: which input of the gradient is the forward operator's result
_RESULT = 4


class HeadsLast(Pass):
    """Fold Transposes of the heads' and the queries' axes into the attention before and behind them.

    An operand is folded if it is the result of such a Transpose, a result if nobody but such Transposes and the
    operator's gradient reads it, and the operator only where the provider of `providers` that would run it accepts its
    form (none given: always).  Nothing is folded across an update of the value that would be read.  What is folded
    depends on an operator's neighbours, its numbers do not: a kernel computes the same from both orders of axes.
    """

    providers: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        """The same values but for transposed ones that nobody reads any more."""
        if not any(type(op.op) in FORMS for op in block.operators):
            return block
        return _Folding(block, self.providers).run()


def _swaps(op: Operator) -> bool:
    """Whether an operator is a Transpose of the heads' and the queries' axes."""
    return isinstance(op.op, Transpose) and len(op.op.perm) > 2 and op.op.perm == swapped(len(op.op.perm))


class _Folding:
    """The search for transposes to fold in a block."""

    def __init__(self, block: Block, providers: tuple[str, ...]) -> None:
        self.block, self.providers = block, with_variants(providers, block.products)
        self.readers: dict[str, list[Operator]] = {}
        for op in block.operators:
            for name in {v.name for v in op.reads()}:
                self.readers.setdefault(name, []).append(op)
        changing = {v.name for op in block.operators if op.op.updates for v in op.writes()}
        self.kept = changing.union(block.outputs)
        self.sources: dict[str, Value] = {}  # a transposed value → what it was made of
        for op in filter(_swaps, block.operators):
            (x,), (y,) = op.reads(), op.writes()
            if x.name not in changing:
                self.sources[y.name] = x

    def run(self) -> Block:
        """Without operators whose form is not accepted, nor results that those would read."""
        members = {i: op for i, op in enumerate(self.block.operators) if type(op.op) in FORMS}
        while True:
            swaps = self._results(members)
            turned = self._turned(swaps)
            sources = {n: x for n, x in self.sources.items() if x.name not in swaps}
            forms = {i: _form(op, {**sources, **turned}, turned) for i, op in members.items()}
            refused = [i for i, form in forms.items() if not self._served(members[i], form)]
            if not refused:
                return self._rewritten(forms, swaps)
            for i in refused:
                del members[i]

    def _results(self, members: dict[int, Operator]) -> dict[str, list[Operator]]:
        """Results that can be turned, with the Transposes that read them, of which all but the first can go."""
        operators, there = {}, {id(op) for op in members.values()}
        for op in members.values():
            for y in (op.outputs[i] for i in MATRICES[type(op.op)][1] if i < len(op.outputs)):
                readers = [] if y is None or y.name in self.kept else self.readers.get(y.name, [])
                swaps = [r for r in readers if _swaps(r)]
                swaps.sort(key=lambda r: next(r.writes()).name not in self.kept)
                others = [r for r in readers if not _swaps(r) and not (id(r) in there and _reads_result(r, y))]
                lone = all(next(r.writes()).name not in self.kept for r in swaps[1:])
                if y is not None and readers and not others and lone:
                    operators[y.name] = swaps
        return operators

    def _turned(self, swaps: dict[str, list[Operator]]) -> dict[str, Value]:
        """Names of turned results: those of a Transpose of them, or new ones."""
        values, names = self.block.values(), Names(self.block.values())
        return {
            n: next(s[0].writes()) if s else Value(names.take(f"{n}.last"), _swapped(values[n]))
            for n, s in swaps.items()
        }

    def _served(self, op: Operator, form: Operator) -> bool:
        """Whether the form has a kernel of the same provider."""
        if form is op or not self.providers:
            return True
        return accepting(self.providers, op) == accepting(self.providers, form) != ""

    def _rewritten(self, forms: dict[int, Operator], swaps: dict[str, list[Operator]]) -> Block:
        """The block with these operators, without Transposes of their results, nor those that nobody reads now."""
        gone = {id(r) for s in swaps.values() for r in s}
        first = {next(r.writes()).name: next(s[0].writes()) for s in swaps.values() for r in s[1:]}
        kept = ((i, op) for i, op in enumerate(self.block.operators) if id(op) not in gone)
        operators = [forms.get(i, op).reading(first) for i, op in kept]
        read = {v.name for op in operators for v in op.reads()} | set(self.block.outputs)
        return self.block.with_operators(
            op for op in operators if not (_swaps(op) and all(v.name not in read for v in op.writes()))
        )


def _swapped(v: Value) -> TensorType:
    return permuted(v.type, swapped(v.ndim))


def _reads_result(op: Operator, y: Value | None) -> bool:
    """Whether an operator reads a value as attention's result, and as nothing else."""
    return [i for i, v in enumerate(op.inputs) if v is not None and y is not None and v.name == y.name] == [_RESULT]


def _form(op: Operator, inputs: dict[str, Value], outputs: dict[str, Value]) -> Operator:
    """The operator with these values turned; itself where it has none of them."""

    def among(values: Sequence[Value | None], which: Sequence[int], there: dict[str, Value]) -> tuple[int, ...]:
        return tuple(i for i in which if i < len(values) and (v := values[i]) is not None and v.name in there)

    ins, outs = MATRICES[type(op.op)]
    activations, results = among(op.inputs, ins, inputs), among(op.outputs, outs, outputs)
    if not activations and not results:
        return op
    return Operator(
        heads_last_form(op.op, activations, results),
        tuple(inputs[v.name] if i in activations and v else v for i, v in enumerate(op.inputs)),
        tuple(outputs[v.name] if i in results and v else v for i, v in enumerate(op.outputs)),
        op.role,
    )
