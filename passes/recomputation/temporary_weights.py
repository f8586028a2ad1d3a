"""Weights in another precision than they are stored in, made again for each operator that reads them."""

from __future__ import annotations

from dataclasses import replace

from ...language.builder import Names
from ...language.element import HALVES
from ...language.ir import Block, Operator, Role, Value
from ...ops.shape.reshape import Cast
from ..base import Pass
from ..cleanup.eager_updates import EagerUpdates

_FORWARD = (Role.FORWARD, Role.LOSS)
#: element types in which weights are stored
_CODES = frozenset(["i8", "u8", "i4", "u4", "i2", "u2", "f8e4m3fn", "f8e5m2"])
#: operators that make a weight from its codes, at most
_LONGEST = 8


class TemporaryWeights(Pass):
    """Dequantise frozen weights, and cast parameters to 16 bits, again for the backward operators that read them.

        w = Mul(Cast(codes), scale)        y = MatMul(x, w)        dx = MatMul(dy, Transpose(w))

    The codes, or the parameter, are there at all times, so that w need not wait for the backward pass: it is made right
    before each operator there that reads it, with the same bits, and is gone after it.  A weight is what forward
    operators make of buffers, parameters and constants alone, with 8-bit integers or floats among them; or a parameter
    cast to 16 bits, and moved.  An optimizer's update of a parameter waits for its last cast.  Nothing is made
    again that the block returns, that recomputation makes again, or whose sources something else updates before; nor
    where a forward operator still reads it later, as that of another micro-batch: it is there anyway.
    """

    def run(self, block: Block) -> Block:
        """The block itself where it stores no such weights."""
        codes = {v.name for v in block.buffers if v.dtype in _CODES}
        chains = {**(_weights(block, codes) if codes else {}), **_casts(block)}
        if not chains:
            return block
        names, updated = Names(block.values()), _first_updates(block)
        recomputed = {v.name for op in block.operators if op.role is Role.RECOMPUTE for v in op.reads()}
        fixed = recomputed.union(block.outputs)
        last = {v.name: i for i, op in enumerate(block.operators) if op.role in _FORWARD for v in op.reads()}
        result: list[Operator] = []
        late = False
        for i, op in enumerate(block.operators):
            if op.role is Role.BACKWARD:
                made = (v for v in op.reads() if v.name in chains and v.name not in fixed)
                for v in dict.fromkeys(v for v in made if last.get(v.name, -1) < i):
                    chain = [block.operators[k] for k in chains[v.name]]
                    before = {k for o in chain for r in o.reads() if (k := updated.get(r.name, i)) < i}
                    if all(block.operators[k].role is Role.OPTIMIZE for k in before):
                        copies, again = _again(chain, v, names)
                        result += copies
                        op = op.reading({v.name: again})
                        late = late or bool(before)
            result.append(op)
        made_again = block.with_operators(result)
        return EagerUpdates().run(made_again) if late else made_again


def _weights(block: Block, codes: set[str]) -> dict[str, tuple[int, ...]]:
    """Forward values that are made of stored ones alone, codes among them → the operators that make them, in order."""
    stored = {v.name for v in block.persistent()}
    chains: dict[str, tuple[int, ...]] = {}
    coded = set(codes)
    for i, op in enumerate(block.operators):
        reads = [v.name for v in op.reads()]
        once = op.op.random or op.op.updates or op.op.copies or op.op.communicates
        if op.role not in _FORWARD or len(op.outputs) != 1 or once:
            continue
        if reads and all(n in stored or n in chains for n in reads):
            chain = tuple(sorted({i}.union(*(chains[n] for n in reads if n in chains))))
            y = next(op.writes()).name
            if len(chain) <= _LONGEST:
                chains[y] = chain
                coded.update([y] if coded.intersection(reads) else ())
    return {n: chain for n, chain in chains.items() if n in coded}


def _casts(block: Block) -> dict[str, tuple[int, ...]]:
    """Forward values that are parameters cast to 16 bits, and moved → the operators that make them, in order."""
    parameters = {v.name for v in block.parameters if v.dtype not in HALVES}
    chains: dict[str, tuple[int, ...]] = {}
    for i, op in enumerate(block.operators):
        if op.role not in _FORWARD or len(op.outputs) != 1 or not op.inputs or op.inputs[0] is None:
            continue
        x, y = op.inputs[0].name, next(op.writes())
        if isinstance(op.op, Cast) and x in parameters and y.dtype in HALVES:
            chains[y.name] = (i,)
        elif x in chains and len(op.inputs) == 1 and op.op.moves_data and len(chains[x]) < _LONGEST:
            chains[y.name] = (*chains[x], i)
    return chains


def _first_updates(block: Block) -> dict[str, int]:
    updates: dict[str, int] = {}
    for i, op in enumerate(block.operators):
        if op.op.updates:
            for v in op.writes():
                updates.setdefault(v.name, i)
    return updates


def _again(chain: list[Operator], v: Value, names: Names) -> tuple[list[Operator], Value]:
    """Copies of the operators that make a value, and the copy of the value."""
    new: dict[str, Value] = {}
    copies: list[Operator] = []
    for op in chain:
        y = next(op.writes())
        new[y.name] = y.renamed(names.take(f"{y.name}.again"))
        copies.append(replace(op.reading(new), outputs=(new[y.name],), role=Role.BACKWARD))
    return copies, new[v.name]
