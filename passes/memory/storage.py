"""Storage sharing: views, in-place results, and inputs of joins that are written directly into the output.

The answer follows from the operators and the frees alone, so it is worked out anew wherever it is needed and nothing
has to be written down: in a planned block the addresses say it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...language.ir import Block, Free, Operator, Value
from ...language.types import need
from ...language.verify_addresses import ALIGNMENT


@dataclass(slots=True)
class Storage:
    """One allocation: its bytes, the positions between which it is needed, and its values with their offsets.

    `start` is -1 for inputs; `end` is the last position (inclusive) at which a member is alive.  `host`: it is in
    the separate arena in host memory.
    """

    name: str
    nbytes: int
    start: int
    end: int = -1
    offsets: dict[str, int] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)
    host: bool = False


def storages(block: Block, *, join: bool = False) -> list[Storage]:
    """The allocations of a block with frees, in order of their start; scratch buffers are separate allocations.

    `join`: inputs of a contiguous Concat are written straight into its output's storage.
    """
    return _Sharing(block, join).run()


def unfreed_storages(block: Block, *, join: bool = False) -> list[Storage]:
    """The allocations of a block without frees (as `liveness` would place them), without scratch buffers."""
    return _Sharing(block, join).run(_last_touched(block), scratch=False)


def sharings(block: Block) -> list[list[Storage]]:
    """The allocations of a block with frees, without joins; and with joins, if that makes fewer."""
    apart = storages(block)
    if not any(op.joins() for op in block.operators):
        return [apart]
    joined = storages(block, join=True)
    return [apart] if len(apart) == len(joined) else [apart, joined]


def offsets_inside(op: Operator) -> tuple[int | None, ...]:
    """Where each output lies in its first input's storage; () unless all can: bytes of parts would be there twice."""
    offsets = op.views()
    inside = offsets and all(
        v is None or (i < len(offsets) and (o := offsets[i]) is not None and o % ALIGNMENT == 0)
        for i, v in enumerate(op.outputs)
    )
    return offsets if inside else ()


def dying(block: Block) -> Iterator[tuple[int, Operator, set[str]]]:
    """(position, operator, names freed before the next operator runs) for each operator except frees."""
    operators = block.operators
    for i, op in enumerate(operators):
        if isinstance(op.op, Free):
            continue
        names: set[str] = set()
        j = i + 1
        while j < len(operators) and isinstance(operators[j].op, Free):
            names.update(v.name for v in operators[j].reads())
            j += 1
        yield i, op, names


def _last_touched(block: Block) -> Iterator[tuple[int, Operator, set[str]]]:
    """The result of `dying` once frees are placed."""
    last: dict[str, int] = {}
    for i, op in enumerate(block.operators):
        for v in (*op.inputs, *op.outputs):
            if v is not None:
                last[v.name] = i
    kept = {v.name for v in block.persistent()}.union(block.outputs)
    for i, op in enumerate(block.operators):
        names = {v.name for v in (*op.inputs, *op.outputs) if v is not None and last[v.name] == i}
        yield i, op, names - kept


class _Sharing:
    """Walks a block once and assigns every value of the arena to a storage."""

    def __init__(self, block: Block, join: bool) -> None:
        self.block = block
        self.persistent = {v.name for v in block.persistent()}
        self.of: dict[str, Storage] = {}
        self.found: list[Storage] = []
        self.joined = _joins(block, self.persistent) if join else {}

    def new(self, v: Value, at: int) -> Storage:
        s = Storage(v.name, v.nbytes, at, host=v.type.host)
        self.found.append(s)
        return s

    def put(self, v: Value, s: Storage, offset: int) -> None:
        s.offsets[v.name] = offset
        s.alive.add(v.name)
        self.of[v.name] = s

    def run(
        self, walk: Iterator[tuple[int, Operator, set[str]]] | None = None, *, scratch: bool = True
    ) -> list[Storage]:
        end = len(self.block.operators)
        for v in self.block.inputs:
            self.put(v, self.new(v, -1), 0)
        for i, op, dead in walk or dying(self.block):
            self.place(op, i, dead)
            for v in op.scratch if scratch else ():
                s = self.new(v, i)
                s.end, s.offsets = i, {v.name: 0}
            self.free(dead, i)
        for s in self.found:
            if s.alive:
                s.end = end
        return self.found

    def free(self, names: set[str], at: int) -> None:
        for name in names:
            s = self.of.get(name)
            if s is not None and name in s.alive:
                s.alive.discard(name)
                if not s.alive:
                    s.end = at

    def place(self, op: Operator, at: int, dead: set[str]) -> None:
        """Gives each output of an operator its storage."""
        offsets = offsets_inside(op)
        for i, v in enumerate(op.outputs):
            if v is None or v.name in self.persistent:
                continue
            if i < len(op.op.updates):  # of what was fetched from host memory: in place
                x = need(op.inputs[op.op.updates[i]])
                self.put(v, self.of[x.name], self.of[x.name].offsets[x.name])
                continue
            base = self.of.get(op.inputs[0].name) if op.inputs and op.inputs[0] is not None else None
            offset = offsets[i] if i < len(offsets) else None
            if base is not None and offset is not None:
                assert op.inputs[0] is not None
                self.put(v, base, base.offsets[op.inputs[0].name] + offset)
            elif v.name in self.joined:
                self.join(v, at)
            elif v.name in self.of:  # a joined value: its parts came first
                pass
            else:
                taken = self.overwritten(op, i, v, dead)
                if taken is not None:
                    self.put(v, self.of[taken.name], self.of[taken.name].offsets[taken.name])
                else:
                    self.put(v, self.new(v, at), 0)

    def overwritten(self, op: Operator, i: int, out: Value, dead: set[str]) -> Value | None:
        """The input whose place output `i` takes: one that dies here and shares its storage with nothing that lives on.

        Nor with another output of the same operator, though that may be freed at once.
        """
        taken = [self.of[v.name] for v in op.outputs[:i] if v is not None and v.name in self.of]
        for k in op.op.overwrites(i):
            x = op.inputs[k] if k < len(op.inputs) else None
            if x is None or x.name not in dead or x.name not in self.of:
                continue
            s = self.of[x.name]
            if any(s is t for t in taken):
                continue
            others = [v for j, v in enumerate(op.inputs) if j != k and v is not None and self.of.get(v.name) is s]
            if x.type == out.type and not others and s.alive <= dead and s.nbytes == out.nbytes:
                return x
        return None

    def join(self, v: Value, at: int) -> None:
        """Puts a part of a Concat into the Concat's storage, which begins with its first part."""
        whole, offset = self.joined[v.name]
        if whole.name not in self.of:
            self.put(whole, self.new(whole, at), 0)
        self.put(v, self.of[whole.name], offset)


def _joins(block: Block, persistent: set[str]) -> dict[str, tuple[Value, int]]:
    """Part → (joined value, offset), where every part is made by an ordinary operator just for this."""
    makers: dict[str, Operator] = {}
    uses: dict[str, int] = {}
    outputs = set(block.outputs)
    for op in block.operators:
        if isinstance(op.op, Free):
            continue
        for v in op.reads():
            uses[v.name] = uses.get(v.name, 0) + 1
        for v in op.writes():
            makers[v.name] = op
    found: dict[str, tuple[Value, int]] = {}
    for op in block.operators:
        whole = op.outputs[0] if op.outputs else None
        offsets = op.joins()
        if whole is None or not offsets or any(o is None or o % ALIGNMENT for o in offsets):
            continue
        parts = [v for v in op.inputs if v is not None]
        ordinary = all(
            v.name in makers and v.name not in persistent and uses[v.name] == 1 and v.name not in found
            and v.name not in outputs and not any(o is not None for o in makers[v.name].views())
            and not makers[v.name].joins()
            for v in parts
        )  # fmt: skip
        if ordinary:
            found.update((v.name, (whole, o)) for v, o in zip(parts, offsets, strict=True) if o is not None)
    return found
