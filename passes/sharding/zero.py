"""ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): each rank keeps a part of every parameter and of its state.

A parameter becomes its shard; what reads the parameter reads all shards gathered.  Gradients become shards, too: where
they are sums over ranks, `Shard` of the sum is a ReduceScatter (passes/slicing/ranks.py).  So updates, clipping and
everything else an optimizer adds run on shards, and their state is a shard without further ado.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...ops.communication.base import communicated
from ...ops.communication.collectives import AllGather
from ...ops.communication.shard import Shard, padded_size, unsharded
from ...ops.shape.reshape import Cast

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


def shard_parameters(
    block: Block, pairs: Sequence[tuple[str, str]], how: Sharded
) -> tuple[Block, dict[str, Value], list[tuple[str, str]]]:
    """The block with shards in place of the parameters of `pairs`, and of their gradients.

    Returns it, the shards by name, and the pairs of shards: a parameter's has the parameter's name.
    """
    values = block.values()
    found, shards = read_gathered(block, [p for p, _ in pairs], how)
    b = Builder.on(found, role=Role.BACKWARD)
    made = []
    for p, g in pairs:
        part = b.emit(Shard(how.ranks, how.rank, how.parts), values[g], name=f"{g}.shard")
        made.append((p, part.name))
    found = dataclasses.replace(
        found, operators=(*found.operators, *b.operators), constants=(*found.constants, *b.constants)
    )
    return found, shards, made


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
        own = b.Cast(shards[v.name], to=low) if low else shards[v.name]
        whole = unsharded(b, gathered(b, own, how, number), v.type.with_dtype(own.dtype))
        if low:  # what was cast is cast already
            for o in readers[v.name]:
                renamed[next(o.writes()).name] = whole
                gone.add(next(o.writes()).name)
        else:
            renamed[v.name] = whole
    kept = [o.reading(renamed) for o in block.operators if not _writes_one_of(o, gone)]
    found = dataclasses.replace(
        block,
        parameters=tuple(shards.get(v.name, v) for v in block.parameters),
        operators=(*b.operators, *kept),
        constants=(*block.constants, *b.constants),
    )
    return found, shards


def gathered(b: Builder, shard: Value, how: Sharded, number: int) -> Value:
    """All ranks' shards behind one another."""
    return communicated(b, AllGather(how.axis, how.ranks, number, CHANNEL, repeat=how.again), shard)


def _low(readers: Sequence[Operator]) -> str:
    """The lower precision in which alone a parameter is read; "" if there is none."""
    kinds = {o.op.to if isinstance(o.op, Cast) else "" for o in readers}
    return kinds.pop() if len(kinds) == 1 else ""


def _writes_one_of(o: Operator, names: set[str]) -> bool:
    return any(v.name in names for v in o.writes())
