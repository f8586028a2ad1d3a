"""Norms and checks over all gradients of ranks that have shards, with the same bits for any number of ranks.

A norm is a sum of squares over a fixed number of parts of each gradient, added up in a binary tree: a rank sums those
parts that it has, so that it does not matter how many ranks share them.
"""

from __future__ import annotations

import dataclasses

from ...language.builder import Builder
from ...language.ir import Block, Operator, Value
from ...ops.communication.base import Communication
from ...ops.communication.collectives import AllGather
from ...ops.loss.scale import InverseIfFinite
from ...ops.optimizer.norm_updates import GlobalNorm
from .zero import Sharded


def norms_over_ranks(block: Block, how: Sharded, *, sharded: bool) -> Block:
    """The block with global norms over `how.parts` parts; `sharded`: gradients are shards, also of finite checks."""
    if how.parts == 1:
        return block
    b = Builder.on(block)
    found: list[Operator] = []
    number = 1 + max((o.op.number for o in block.operators if isinstance(o.op, Communication)
                      and o.op.queue == how.axis), default=-1)  # fmt: skip
    for o in block.operators:
        norm = isinstance(o.op, GlobalNorm)
        if not norm and not (sharded and isinstance(o.op, InverseIfFinite)):
            found.append(o)
            continue
        b.operators, b.role, b.prefix = [], o.role, next(o.writes()).name
        made = _norm(b, o, how, number, sharded) if norm else _finite(b, o, how, number)
        found += [x.renamed({made.name: next(o.writes()).name}) for x in b.operators]
        number += 1
    return dataclasses.replace(block, operators=tuple(found), constants=(*block.constants, *b.constants))


def _norm(b: Builder, o: Operator, how: Sharded, number: int, sharded: bool) -> Value:
    """√ of the sums of squares of all parts."""
    squares = b.SquareSums(*o.inputs, parts=how.parts // how.ranks if sharded else how.parts)
    if sharded:
        squares = _gathered(b, squares, how, number)
    norm = b.Sqrt(b.Reshape(b.TreeSum(squares, parts=how.parts), shape=()))
    (out,) = o.writes()
    return norm if norm.dtype == out.dtype else b.Cast(norm, to=out.dtype)


def _finite(b: Builder, o: Operator, how: Sharded, number: int) -> Value:
    """1 / scale, or 0 where any rank found something that is not finite."""
    own = b.emit(o.op, *o.inputs)
    return b.ReduceMin(_gathered(b, b.Reshape(own, shape=(1,)), how, number), axes=(0,), keepdims=0)


def _gathered(b: Builder, x: Value, how: Sharded, number: int) -> Value:
    if how.ranks == 1:
        return x
    return b.CommWait(b.emit(AllGather(how.axis, how.ranks, number), x), x)
