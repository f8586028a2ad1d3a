"""Norms and checks over all gradients of ranks that have shards, with the same bits for any number of ranks.

A norm is a sum of squares over a fixed number of parts of each gradient, added up in a binary tree: a rank sums those
parts that it has, so that it does not matter how many ranks share them.
"""

from __future__ import annotations

import dataclasses

from ...language.builder import Builder
from ...language.ir import Block, Operator, Value
from ...ops.communication.base import Numbers, communicated
from ...ops.communication.collectives import AllGather
from ...ops.loss.scale import InverseIfFinite
from ...ops.optimizer.norm_updates import GlobalNorm
from ..base import Pass
from .zero import Sharded


class NormsOverRanks(Pass):
    """Take global norms of gradients over `parts` parts, which the `ranks` ranks of the mesh's axis `axis` share.

    `sharded`: gradients are shards (ZeRO), so that norms, and checks of finite values, are over all ranks.
    """

    axis: str = "dp"
    ranks: int = 1
    rank: int = 0
    parts: int = 1
    sharded: bool = False

    def run(self, block: Block) -> Block:
        return norms_over_ranks(block, Sharded(self.axis, self.ranks, self.rank, self.parts), sharded=self.sharded)


def norms_over_ranks(block: Block, how: Sharded, *, sharded: bool) -> Block:
    """The block with global norms over `how.parts` parts; `sharded`: gradients are shards, also of finite checks."""
    if how.parts == 1:
        return block
    b = Builder.on(block)
    operators: list[Operator] = []
    numbers = Numbers(block.operators)
    for o in block.operators:
        norm = isinstance(o.op, GlobalNorm)
        if not norm and not (sharded and isinstance(o.op, InverseIfFinite)):
            operators.append(o)
            continue
        b.operators, b.role, b.prefix = [], o.role, next(o.writes()).name
        total = _norm(b, o, how, numbers, sharded) if norm else _finite(b, o, how, numbers)
        operators += [x.renamed({total.name: next(o.writes()).name}) for x in b.operators]
    return dataclasses.replace(block, operators=tuple(operators), constants=(*block.constants, *b.constants))


def _norm(b: Builder, o: Operator, how: Sharded, numbers: Numbers, sharded: bool) -> Value:
    """√ of the sums of squares of all parts."""
    squares = b.SquareSums(*o.inputs, parts=how.parts // how.ranks if sharded else how.parts)
    if sharded:
        squares = _gathered(b, squares, how, numbers)
    norm = b.Sqrt(b.Reshape(b.TreeSum(squares, parts=how.parts), shape=()))
    (out,) = o.writes()
    return norm if norm.dtype == out.dtype else b.Cast(norm, to=out.dtype)


def _finite(b: Builder, o: Operator, how: Sharded, numbers: Numbers) -> Value:
    """1 / scale, or 0 where any rank found something that is not finite."""
    local = b.emit(o.op, *o.inputs)
    return b.ReduceMin(_gathered(b, b.Reshape(local, shape=(1,)), how, numbers), axes=(0,), keepdims=0)


def _gathered(b: Builder, x: Value, how: Sharded, numbers: Numbers) -> Value:
    return communicated(b, AllGather(how.axis, how.ranks, numbers.take(how.axis)), x)
