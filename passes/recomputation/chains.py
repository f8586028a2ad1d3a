"""Cheap chains of operators by which values are made again from what the backward pass keeps anyway."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...language.builder import Names
from ...language.ir import Block, Operator, Role, Value
from ...ops.common import Elementwise

_FORWARD = (Role.FORWARD, Role.LOSS, Role.COMMUNICATE)
#: operations an element that take no longer than memory takes to keep it
_FREE = 16
#: the further cost of a chain, at most: this part of the cost of the operator that reads the value
_SHARE = 1 / 12
#: operators of a chain
_LONGEST = 4


@dataclass
class _Chain:
    """Operators, first to last, and what they take for an element."""

    operators: list[Operator] = field(default_factory=list)
    flops: float = 0.0


def with_chains(block: Block) -> Block:
    """The block in which cheap element-wise values are made again for the backward operators that read them.

        h = Mul(Swish(gate), up)

    The gradients keep `gate` and `up` anyway, so that neither h nor Swish(gate) need wait for the backward pass: each
    is made right before the first operator there that reads it, with the same bits.  A chain may take as much as memory
    takes to keep a value, or a small part of the product that reads it.  It begins with values that something reads as
    late or later, and consists of element-wise operators, views, and the last steps of layer normalisations.
    """
    return _Chains(block).run()


class _Chains:
    """Goes through the forward operators in order: what a value is made from is decided before it."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.names = Names(block.values())
        self.producers, self.readers = block.producers(), block.consumers()
        self.kept = set(block.outputs)
        #: parameters, buffers, state and constants → the first position that updates them, if any does
        self.persistent: dict[str, int | None] = dict.fromkeys(v.name for v in block.persistent())
        for i, op in reversed([*enumerate(block.operators)]):
            if op.op.updates:
                self.persistent.update((v.name, i) for v in op.writes())
        #: recomputed operators, and their copies; position → operators that come before it
        self.renamed: dict[str, Value] = {}
        #: a value that is no view → the names of it and its views that are read late
        self.wanted: dict[str, list[str]] = {}
        self.added: dict[int, list[Operator]] = {}

    def run(self) -> Block:
        for op in self.block.operators:
            if op.role in _FORWARD and op.outputs and op.outputs[0] is not None:
                self.value(op.outputs[0])
        if not self.renamed:
            return self.block
        result: list[Operator] = []
        for i, op in enumerate(self.block.operators):
            result += self.added.get(i, ())
            result.append(op if op.role in _FORWARD else op.reading(self.renamed))
        return self.block.with_operators(result)

    def value(self, v: Value) -> None:
        """Makes a value again where that pays."""
        first = self.first_late(v)
        if first is None or self.shares(v):
            return
        chain = _Chain()
        if not self.extend(chain, v, first, self.allowed(v)) or all(map(_is_view, chain.operators)):
            return
        inside = {next(o.writes()).name for o in chain.operators}
        if all(r.name in inside or r.name in self.persistent for o in chain.operators for r in o.reads()):
            return  # a parameter in another precision, which all of its readers share
        new: dict[str, Value] = {}
        for o in chain.operators:
            output = next(o.writes())
            new[output.name] = output.renamed(self.names.take(f"{output.name}.again"))
        for o in chain.operators:
            copy = Operator(o.op, o.reading(new).inputs, (new[next(o.writes()).name],), Role.BACKWARD)
            self.added.setdefault(first, []).append(copy)
        self.renamed[v.name] = new[v.name]

    def late(self, v: Value) -> list[int]:
        return [i for i in self.readers.get(v.name, ()) if self.block.operators[i].role not in _FORWARD]

    def first_late(self, v: Value) -> int | None:
        """The first position of the backward pass that reads `v`; None where `v` cannot be made again before it."""
        late = self.late(v)
        if not late or v.name in self.kept:
            return None
        early = [i for i in self.readers[v.name] if i not in late]
        backward = all(self.block.operators[i].role is Role.BACKWARD for i in late)
        return late[0] if backward and (not early or early[-1] < late[0]) else None

    def shares(self, v: Value) -> bool:
        """Whether other forward values in its memory are read late too, so that its copy would be another."""
        root = v
        while (op := self.producer(root)) is not None and _is_view(op) and op.inputs[0] is not None:
            root = op.inputs[0]
        if root.name not in self.wanted:
            family = [root]
            for w in family:
                ops = [self.block.operators[i] for i in self.readers.get(w.name, ())]
                family += [next(o.writes()) for o in ops if o.role in _FORWARD and _is_view(o) and o.inputs[0] == w]
            self.wanted[root.name] = [w.name for w in family if self.late(w) or w.name in self.kept]
        return any(name != v.name for name in self.wanted[root.name])

    def producer(self, v: Value) -> Operator | None:
        at = self.producers.get(v.name)
        return None if at is None else self.block.operators[at]

    def extend(self, chain: _Chain, v: Value, at: int, most: float, above: int = 1) -> bool:
        """Adds what makes `v` again before a position to a chain, as operator `above` from its end; False where nothing
        cheap does."""
        op = self.again(v)
        if op is None or above + len(chain.operators) > _LONGEST:
            return False
        for r in op.reads():
            inside = any(next(o.writes()) == r for o in chain.operators)
            if not inside and not self.there(r, at) and not self.extend(chain, r, at, most, above + 1):
                return False
        chain.operators.append(op)
        chain.flops += op.op.flops_per_element if isinstance(op.op, Elementwise) else 0
        return len(chain.operators) <= _LONGEST and chain.flops <= most

    def again(self, v: Value) -> Operator | None:
        """The operator that makes a value, or the last steps of a normalisation that does."""
        op = self.producer(v)
        if op is None or op.role not in _FORWARD or op.op.random or op.op.updates or op.op.copies or op.op.communicates:
            return None
        if len(op.outputs) > 1 and op.outputs[0] == v and (pair := op.op.again(op.inputs, op.outputs)) is not None:
            op = Operator(pair[0], pair[1], (v,), op.role)
        if len(op.outputs) != 1 or not (isinstance(op.op, Elementwise) or _is_view(op)):
            return None
        return op

    def there(self, v: Value, at: int) -> bool:
        """Whether a value is there at a position of the backward pass anyway."""
        if v.name in self.persistent:
            changed = self.persistent[v.name]
            return changed is None or changed >= at
        late = self.late(v)
        return v.name not in self.renamed and bool(late) and late[-1] >= at

    def allowed(self, v: Value) -> float:
        """Operations that it may take to make an element again."""
        most = max((self.flops(i, v) for i in self.late(v)), default=0.0)
        return max(_FREE, _SHARE * most / max(v.size, 1))

    def flops(self, at: int, v: Value) -> float:
        """Operations of a reader; of a view's readers."""
        op = self.block.operators[at]
        if _is_view(op):
            output = next(op.writes())
            return max((self.flops(i, output) for i in self.readers.get(output.name, ())), default=0.0)
        return op.op.cost(
            [None if r is None else r.type for r in op.inputs], [None if w is None else w.type for w in op.outputs]
        ).flops


def _is_view(op: Operator) -> bool:
    return len(op.outputs) == 1 and any(offset is not None for offset in op.views())
