"""Recomputation of normalised values and activations from what is kept anyway."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import UsageError
from ...language.builder import Names
from ...language.ir import Block, Free, Operator, Role, Value
from ...language.types import Values, need, present
from ...ops.common import Elementwise
from ..base import Pass
from .chains import with_chains

#: a copy to the host does not need its source again: what reads it later reads what comes back
_FORWARD = (Role.FORWARD, Role.LOSS, Role.COMMUNICATE)
#: operations an element that an activation may take to be run again
_CHEAP = 5


class Rebuild(Pass):
    """Make normalised values, and cheap activations, again for the backward operators that read them.

        y = Relu(BatchNormTrain(x))

    A batch normalisation's gradient keeps x and the statistics anyway, so that y need not wait for the backward pass:
    right before the first operator there that reads it, y is made again by one pass over x, in y's own buffer and
    with the same bits (Bulò et al. 2018, arXiv 1712.02616; Pleiss et al. 2017, arXiv 1707.06990).  Nothing is rebuilt
    that outlives the step, that recomputation reads, or whose source is gone by then.  Comes after recomputation,
    whose values are made right before they are read as it is.  Values that cheap element-wise operators make from
    what gradients keep are made again in the same way: see `chains.py`.
    """

    def run(self, block: Block) -> Block:
        """The block with rebuilding operators among the backward ones; but for a few vectors, memory is never more."""
        if any(isinstance(op.op, Free) for op in block.operators):
            raise UsageError("'rebuild' comes before 'liveness': it adds operators, and frees must follow")
        if any(op.op.small_outputs for op in block.operators):
            block = _Rebuilder(block).run()
        return with_chains(block)


class _Rebuilder:
    """Goes through the forward operators from the last to the first: what is rebuilt reads its source once more."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.names = Names(block.values())
        #: value → the positions that read it, in order; for rebuilt ones those of what is made from them too
        self.readers: dict[str, list[int]] = {}
        #: state and parameters → the positions that update them
        self.updated: dict[str, list[int]] = {}
        for i, op in enumerate(block.operators):
            for name in dict.fromkeys(v.name for v in op.reads()):
                self.readers.setdefault(name, []).append(i)
            if op.op.updates:
                for v in op.writes():
                    self.updated.setdefault(v.name, []).append(i)
        self.kept = set(block.outputs)
        self.constant = {c.value.name for c in block.constants}
        #: position → operators that come before it
        self.added: dict[int, list[Operator]] = {}
        #: value → what later readers read in its place
        self.renamed: dict[str, Value] = {}

    def run(self) -> Block:
        operators = self.block.operators
        for i in range(len(operators) - 1, -1, -1):
            if operators[i].role in _FORWARD and operators[i].op.small_outputs:
                self.normalisation(i, operators[i])
        result: list[Operator] = []
        for i, op in enumerate(operators):
            result += (o.reading(self.renamed) for o in self.added.get(i, ()))
            result.append(op if op.role in _FORWARD else op.reading(self.renamed))
        return self.block.with_operators(result)

    def normalisation(self, at: int, op: Operator) -> None:
        """Rebuilds an operator's output, and activations of it, where the backward pass reads them."""
        again = op.op.again(op.inputs, op.outputs)
        t = op.outputs[0]
        if again is None or t is None:
            return
        needs = again[1]
        candidates = ((self.first_late(y, at, op, needs), a, y) for a, y in self.activations(t))
        wanted = [(f, a, y) for f, a, y in candidates if f is not None]
        first = self.first_late(t, at, op, needs)
        sources = [*([] if first is None else [t]), *(y for _, _, y in wanted)]
        rounding = [q for y in sources for q in self.rounded(y)]
        rounded = [(g, q) for q in rounding if (g := self.first_late(next(q.writes()), at, op, needs)) is not None]
        soonest = {y.name: min([f, *(g for g, q in rounded if q.inputs[0] == y)]) for f, _, y in wanted}
        new: dict[int, list[Operator]] = {}
        shared = None if first is None else self.fresh(t)
        if first is not None and shared is not None:
            self.renamed[t.name] = shared
            first = min([first, *soonest.values(), *(g for g, q in rounded if q.inputs[0] == t)])
            new[first] = [Operator(again[0], needs, (shared,), Role.BACKWARD)]
        for _, a, y in wanted:
            if shared is None and 0 not in a.op.inplace:
                continue  # it would take two buffers for a moment
            source, f = shared or self.fresh(t), soonest[y.name]
            if shared is None:
                new.setdefault(f, []).append(Operator(again[0], needs, (source,), Role.BACKWARD))
            self.renamed[y.name] = self.fresh(y)
            inputs = tuple(source if v == t else v for v in a.inputs)
            new.setdefault(f, []).append(Operator(a.op, inputs, (self.renamed[y.name],), Role.BACKWARD))
        for g, q in rounded:
            exact, z = q.inputs[0], next(q.writes())
            if exact is not None and exact.name in self.renamed:
                self.renamed[z.name] = self.fresh(z)
                inputs = (self.renamed[exact.name], *q.inputs[1:])
                new.setdefault(g, []).append(Operator(q.op, inputs, (self.renamed[z.name],), Role.BACKWARD))
        for f, operators in new.items():
            self.added[f] = operators + self.added.get(f, [])
            for v in needs:
                if v is not None:
                    self.readers[v.name].append(f)

    def fresh(self, v: Value) -> Value:
        return v.renamed(self.names.take(f"{v.name}.again"))

    def activations(self, t: Value) -> Iterator[tuple[Operator, Value]]:
        """Cheap element-wise operators of the forward pass whose only input, constants aside, is `t`; outputs."""
        for i in self.readers.get(t.name, ()):
            op = self.block.operators[i]
            if op.role not in _FORWARD or not isinstance(op.op, Elementwise) or op.op.random or len(op.outputs) != 1:
                continue
            others = [v.name for v in op.reads() if v != t]
            (y,) = present(*op.outputs)
            if y.type == t.type and op.op.flops_per_element <= _CHEAP and self.constant.issuperset(others):
                yield op, y

    def rounded(self, y: Value) -> list[Operator]:
        """The operators that round a value to 8 bits in the forward pass."""
        readers = (self.block.operators[i] for i in self.readers.get(y.name, ()))
        return [op for op in readers if op.op.name == "FakeQuantize" and op.role in _FORWARD and op.inputs[0] == y]

    def first_late(self, v: Value, at: int, op: Operator, needs: Values) -> int | None:
        """The first position of the backward pass that reads `v`; None where `v` cannot be made again before it."""
        roles = [(i, self.block.operators[i].role) for i in self.readers.get(v.name, ())]
        late = [i for i, role in roles if role not in _FORWARD]
        if not late or v.name in self.kept or any(role is Role.RECOMPUTE for _, role in roles):
            return None
        first = min(late)
        x = need(op.inputs[0])
        kept = max(self.readers[x.name]) >= first
        early = any(i > first for i, role in roles if role in _FORWARD)
        changed = any(at < i < first for n in needs if n is not None for i in self.updated.get(n.name, ()))
        return None if early or changed or not kept else first
