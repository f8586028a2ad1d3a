"""Norms and checks over gradients of which ranks have parts: squares of parts add up, whole gradients count once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...language.program import Program
from ...ops.communication.base import Numbers, communicated
from ...ops.communication.collectives import AllGather, AllReduce
from ...ops.loss.scale import InverseIfFinite
from ...ops.optimizer.norm_updates import GlobalNorm
from ..base import Pass


class NormsOverParts(Pass):
    """Take global norms of gradients of which ranks have parts (`DivideAxis`), and checks of finite values.

    `axes` and `ranks`: of the mesh, what divides operators; `stages`: ranks are stages of a pipeline, too.
    """

    axes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    stages: bool = False

    def run(self, block: Block) -> Block:
        """The block itself: which gradients are divided is known of a program."""
        return block

    def rewrite(self, program: Program) -> Block:
        if not program.divided:
            return program.block
        cuts = {p: frozenset(d.axis for d, _ in v.cuts) for p, v in program.divided.items()}
        gradients = {g: cuts[p] for p, g in program.gradients if p in cuts}
        groups = {frozenset[str](), *cuts.values()} if self.stages else ()
        return norms_over_parts(program.block, gradients, dict(zip(self.axes, self.ranks, strict=True)), groups)


def norms_over_parts(
    block: Block,
    gradients: Mapping[str, frozenset[str]],
    sizes: Mapping[str, int],
    everywhere: Iterable[frozenset[str]] = (),
) -> Block:
    """The block with norms of whole gradients.

    `gradients`: the axes of the mesh that divide each; `sizes`: the ranks along all axes that divide something.
    `everywhere`: axes by which some stage of a pipeline has gradients divided: all stages add up these groups, in the
    same order, whether they have such gradients or not.
    """
    every = [tuple(a for a in sizes if a in axes) for axes in everywhere]
    axes = dict(gradients)
    b = Builder.on(block)
    operators: list[Operator] = []
    numbers = Numbers(block.operators)
    for o in block.operators:
        if o.role is Role.OPTIMIZE and not o.op.updates:
            _follow(o, axes)
        divided = bool(every) or any(axes.get(v.name) for v in o.reads())
        if not divided or not isinstance(o.op, (GlobalNorm, InverseIfFinite)):
            operators.append(o)
            continue
        b.operators, b.role, (out,) = [], o.role, o.writes()
        b.prefix = out.name
        norm = isinstance(o.op, GlobalNorm)
        total = _norm(b, o, axes, sizes, every, numbers) if norm else _finite(b, o, sizes, numbers)
        operators += [x.renamed({total.name: out.name}) for x in b.operators]
    return dataclasses.replace(block, operators=tuple(operators), constants=(*block.constants, *b.constants))


def _follow(o: Operator, axes: dict[str, frozenset[str]]) -> None:
    """Notes that results with a gradient's shape are divided as it is."""
    for v in o.writes():
        same = next((axes[r.name] for r in o.reads() if r.name in axes and r.shape == v.shape), None)
        if same is not None:
            axes[v.name] = same


def _norm(
    b: Builder,
    o: Operator,
    axes: Mapping[str, frozenset[str]],
    sizes: Mapping[str, int],
    every: Iterable[tuple[str, ...]],
    n: Numbers,
) -> Value:
    """The root of the squares of all groups of gradients that the same axes divide."""
    groups: dict[tuple[str, ...], list[Value]] = {over: [] for over in every}
    for v in o.reads():
        groups.setdefault(tuple(a for a in sizes if a in axes.get(v.name, ())), []).append(v)
    squares = []
    for over, values in sorted(groups.items()):
        norm = b.GlobalNorm(*(values or [b.fill(0.0, next(o.reads()).type.with_shape((1,)))]))
        total = b.Reshape(b.Mul(norm, norm), shape=(1,))
        for axis in over:
            total = communicated(b, AllReduce(axis, sizes[axis], n.take(axis)), total)
        squares.append(total)
    norm = b.Sqrt(b.Reshape(b.add_all(squares), shape=()))
    (out,) = o.writes()
    return norm if norm.dtype == out.dtype else b.Cast(norm, to=out.dtype)


def _finite(b: Builder, o: Operator, sizes: Mapping[str, int], n: Numbers) -> Value:
    """1 / scale, or 0 where any rank found something that is not finite."""
    local = b.Reshape(b.emit(o.op, *o.inputs), shape=(1,))
    for axis, ranks in ((a, n) for a, n in sizes.items() if n > 1):
        local = b.ReduceMin(communicated(b, AllGather(axis, ranks, n.take(axis)), local), axes=(0,), keepdims=1)
    return b.Reshape(local, shape=())
