"""ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): each rank keeps a part of every parameter and of its state.

A parameter becomes its shard; what reads the parameter reads all shards gathered.  Gradients become shards, too: where
they are sums over ranks, `Shard` of the sum is a ReduceScatter (passes/slicing/ranks.py).  So updates, clipping and
everything else an optimizer adds run on shards, and their state is a shard without further ado.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...language.program import Program
from ...ops.communication.base import communicated
from ...ops.communication.collectives import AllGather, AllReduce
from ...ops.communication.shard import Shard, padded_size, unsharded
from ...ops.shape.reshape import Cast, Reshape
from ..base import Pass

#: the channel on which parameters are gathered: beside that of gradients, so that neither waits for the other
CHANNEL = "weights"


@dataclass(frozen=True)
class Sharded:
    """How parameters are divided: among `ranks` along the mesh's axis `axis`, of which this is the `rank`-th.

    Their elements, with zeros behind them, can be cut into `parts` equal parts, so that sums over a fixed number of
    parts have the same bits for any number of ranks.  `again`: gathered parameters are not kept from the forward to the
    backward pass, but gathered again (stage 3).
    """

    axis: str
    ranks: int
    rank: int
    parts: int
    again: bool = False

    def size(self, v: Value) -> int:
        """Elements of a rank's part."""
        return padded_size(v.size, self.parts) // self.ranks


class _Zero(Pass, abstract=True):
    """A pass of ZeRO: the fields are those of `Sharded`."""

    axis: str = "dp"
    ranks: int = 1
    rank: int = 0
    parts: int = 1
    again: bool = False

    @property
    def how(self) -> Sharded:
        """How parameters are divided."""
        return Sharded(self.axis, self.ranks, self.rank, self.parts, self.again)


class ShardParameters(_Zero):
    """Make trained parameters and their gradients shards, one a rank (ZeRO), with the shards' contents."""

    needs = ("gradients",)
    refuses = ("updates",)

    def run(self, block: Block) -> Block:
        """The block with shards in place of all parameters, gathered where they are read; gradients stay."""
        return read_gathered(block, [v.name for v in block.parameters], self.how)[0]

    def rewrite(self, program: Program) -> Block:
        """The block with shards of the parameters that train, and of their gradients."""
        how, names = self.how, program.gradients
        whole = {v.name: v.type for v in program.block.parameters if v.name in dict(names)}
        block, shards, program.gradients = shard_parameters(program.block, names, how)
        for name, v in shards.items():
            program.data[name] = _share(np.asarray(program.data[name]), how, v.size)
        program.sharded, program.division = whole, how
        return block


class GatherParameters(_Zero):
    """Gather the parameters of which ranks have shards, in a forward pass; `names`: these."""

    names: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        """The block with shards in place of the parameters."""
        return read_gathered(block, self.names, self.how)[0]


def _share(array: np.ndarray, how: Sharded, size: int) -> np.ndarray:
    """A rank's share of `size` of an array's elements; of one number everywhere, which takes no memory, one like it."""
    if array.size and not any(array.strides):
        first = array[(0,) * array.ndim]
        if not first or (how.rank + 1) * size <= array.size:  # what follows an array are zeros
            return np.broadcast_to(first, (size,))
    flat = np.zeros(padded_size(array.size, how.parts), array.dtype)
    flat[: array.size] = array.reshape(-1)
    return flat[how.rank * size : (how.rank + 1) * size].copy()


def shard_parameters(
    block: Block, pairs: Sequence[tuple[str, str]], how: Sharded
) -> tuple[Block, dict[str, Value], list[tuple[str, str]]]:
    """The block with shards in place of the parameters of `pairs`, and of their gradients.

    Returns it, the shards by name, and the pairs of shards: a parameter's has the parameter's name.
    """
    values = block.values()
    gathered_block, shards = read_gathered(block, [p for p, _ in pairs], how)
    b = Builder.on(gathered_block, role=Role.BACKWARD)
    parts, gone = dict[str, str](), set[int]()
    graph = gathered_block, gathered_block.producers(), gathered_block.consumers()
    for g in dict.fromkeys(g for _, g in pairs):  # parameters that are added up have one gradient
        whole, sums, members = _unsummed(*graph, values[g], how.axis)
        part = b.emit(Shard(how.ranks, how.rank, how.parts), whole, name=f"{g}.shard")
        for op in sums:
            part = communicated(b, op, part)
        parts[g] = part.name
        gone |= members
    gathered_block = dataclasses.replace(
        gathered_block,
        operators=(*(o for i, o in enumerate(gathered_block.operators) if i not in gone), *b.operators),
        constants=(*gathered_block.constants, *b.constants),
    )
    return gathered_block, shards, [(p, parts[g]) for p, g in pairs]


def _unsummed(
    block: Block, producers: Mapping[str, int], consumers: Mapping[str, list[int]], v: Value, axis: str
) -> tuple[Value, list[AllReduce], set[int]]:
    """What a gradient is the sum of over ranks of other axes than `axis`, and these sums, which can be sums of shards;
    the positions of the operators that make nothing else."""
    operators, sums, members = block.operators, list[AllReduce](), set[int]()
    result = v, sums[:], set(members)
    while v.name in producers and v.name not in block.outputs and members.issuperset(consumers.get(v.name, ())):
        at = [producers[v.name]]
        if operators[at[0]].op.communicates == "wait":
            at.append(producers[next(operators[at[0]].reads()).name])
        members.update(at)
        o = operators[at[-1]]
        if isinstance(o.op, AllReduce) and o.op.axis != axis:
            sums.append(o.op)
            result = next(o.reads()), sums[:], set(members)
        elif not isinstance(o.op, Reshape):
            break
        v = next(o.reads())
    return result


def read_gathered(block: Block, names: Sequence[str], how: Sharded) -> tuple[Block, dict[str, Value]]:
    """The block with shards in place of the parameters `names`, which are gathered where something reads them.

    Returns it, and the shards by name.
    """
    b = Builder.on(block)
    shards = {
        v.name: dataclasses.replace(v, type=v.type.with_shape((how.size(v),)))
        for v in block.parameters
        if v.name in set(names)
    }
    readers: dict[str, list[Operator]] = {}
    for o in block.operators:
        for v in {v.name: v for v in o.reads()}.values():
            if v.name in shards:
                readers.setdefault(v.name, []).append(o)
    b.role = Role.FORWARD
    renamed: dict[str, Value] = {}
    gone: set[str] = set()
    for number, v in enumerate(w for w in block.parameters if w.name in readers):
        low = _low(readers[v.name])
        shard = b.Cast(shards[v.name], to=low) if low else shards[v.name]
        whole = unsharded(b, gathered(b, shard, how, number), v.type.with_dtype(shard.dtype))
        if low:  # what was cast is cast already
            for o in readers[v.name]:
                renamed[next(o.writes()).name] = whole
                gone.add(next(o.writes()).name)
        else:
            renamed[v.name] = whole
    kept = [o.reading(renamed) for o in block.operators if not any(v.name in gone for v in o.writes())]
    gathered_block = dataclasses.replace(
        block,
        parameters=tuple(shards.get(v.name, v) for v in block.parameters),
        operators=(*b.operators, *kept),
        constants=(*block.constants, *b.constants),
    )
    return gathered_block, shards


def gathered(b: Builder, shard: Value, how: Sharded, number: int) -> Value:
    """All ranks' shards behind one another."""
    return communicated(b, AllGather(how.axis, how.ranks, number, CHANNEL, repeat=how.again), shard)


def _low(readers: Sequence[Operator]) -> str:
    """The lower precision in which alone a parameter is read; "" if there is none."""
    kinds = {o.op.to if isinstance(o.op, Cast) else "" for o in readers}
    return kinds.pop() if len(kinds) == 1 else ""
