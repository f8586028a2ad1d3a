"""Identical layers: where a forward pass repeats itself, and the same network with fewer of them.

A network of many layers says the same many times.  What one stage of a pipeline takes depends on its own layers, and
on what its neighbours send: so a stage is compiled in a network that has all of its own layers, and one in place of
each run of identical layers of the other stages.  Names, types, borders and channels are those of the whole network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ...language.ir import Block, Operator
from .borders import unbound
from .cuts import places_of

#: the most segments that a layer consists of: a transformer's has two, attention and the feed-forward network
_LONGEST = 6
#: fields of operators that say which random numbers they draw, which may differ between identical layers
_SEEDS = ("seed", "first")


@dataclass(frozen=True)
class Segment:
    """The operators `operators` (positions) that make the value `made` of the value `given` (None: the first)."""

    given: str | None
    made: str
    operators: range
    signature: tuple[object, ...]


def segments(block: Block) -> list[Segment]:
    """A forward pass cut wherever a single value crosses, but for what comes behind the last such place."""
    declared = {v.name for v in (*block.parameters, *block.buffers, *block.state)}
    free, result = unbound(block), list[Segment]()
    name, begin = None, 0
    for at, crossing in places_of(block):
        operators = range(begin, at + 1)
        result.append(Segment(name, crossing, operators, _signature(block, operators, name, declared, free)))
        name, begin = crossing, at + 1
    return result


def _signature(
    block: Block, operators: range, entry: str | None, declared: Collection[str], free: Collection[str]
) -> tuple[object, ...]:
    """A key that is equal for segments of equal computations: operators and types, with values by number.

    Parameters count by order.  What follows from inputs or parameters alone counts by name, unless it is made here.
    """
    numbers: dict[str, object] = {} if entry is None else {entry: "given"}
    rows: list[object] = []
    for i in operators:
        o = block.operators[i]
        for v in (*o.reads(), *o.writes()):
            if v.name not in numbers:
                local = v.name in declared or v.name not in free or any(w.name == v.name for w in o.writes())
                numbers[v.name] = len(numbers) if local else v.name
        fields = tuple((f.name, repr(getattr(o.op, f.name))) for f in dataclasses.fields(o.op) if f.name not in _SEEDS)
        values = tuple(None if v is None else (numbers[v.name], v.type) for v in (*o.inputs, *o.outputs))
        rows.append((o.op.name, fields, o.role, values))
    return tuple(rows)


def repeats(parts: Sequence[Segment]) -> Iterator[tuple[int, int]]:
    """(first, segments) of each layer that the layer behind it is identical to, in order."""
    at = 0
    while at < len(parts):
        for size in range(1, _LONGEST + 1):
            here = [s.signature for s in parts[at : at + size]]
            if here == [s.signature for s in parts[at + size : at + 2 * size]]:
                yield at, size
                at += size
                break
        else:
            at += 1


def shortened(block: Block, cuts: Sequence[str], whole: Collection[int]) -> Block:
    """A forward pass that is to be cut into stages behind `cuts`, with one layer in place of identical neighbours in
    every stage but those of `whole`; the block itself where several values cross a cut.
    """
    parts = segments(block)
    ends = {s.made: k for k, s in enumerate(parts)}
    if any(name not in ends for name in cuts):
        return block
    names: dict[str, str] = {}
    gone: set[int] = set()
    begin = 0
    for stage, end in enumerate([*(ends[name] + 1 for name in cuts), len(parts)]):
        part = parts[begin:end]
        for first, size in repeats(part) if stage not in whole else ():
            layer = part[first : first + size]
            if layer[0].given is not None:
                names[layer[-1].made] = layer[0].given
                gone.update(i for s in layer for i in s.operators)
        begin = end
    return _without(block, gone, names) if gone else block


def _without(block: Block, gone: Collection[int], names: dict[str, str]) -> Block:
    """The block without operators, but for those of them that others need; what they made is read under other names."""
    values = block.values()

    def final(name: str) -> str:
        while name in names:
            name = names[name]
        return name

    new = {name: values[final(name)] for name in names}
    kept: list[Operator] = []
    needed = {final(n) for n in block.outputs}
    for i in reversed(range(len(block.operators))):
        o = block.operators[i]
        if i in gone and (o.op.updates or not any(v.name in needed for v in o.writes())):
            continue
        o = o.reading({v.name: new[v.name] for v in o.reads() if v.name in new})
        needed.update(v.name for v in o.reads())
        kept.append(o)
    before = {v.name for i in gone for v in block.operators[i].reads()}
    left = before - {v.name for o in kept for v in (*o.reads(), *o.writes())}
    return dataclasses.replace(
        block,
        operators=tuple(kept[::-1]),
        parameters=tuple(v for v in block.parameters if v.name not in left),
        buffers=tuple(v for v in block.buffers if v.name not in left),
    )
