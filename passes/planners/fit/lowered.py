"""The problem of a step as its lowered form needs it: what is proven of it holds for the step that runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set

from ....language.ir import Block, Operator, Value
from ....language.types import TensorType
from ....ops.fused.loop import loops
from ....ops.norm.batch_norm_train import BatchNormApply, BatchNormGrad, BatchNormTrain
from ....ops.shape.reshape import Transpose
from ... import sequence
from ...lowering.channels_last import ChannelsLast
from ...lowering.fold_transposes import FoldTransposes
from ...lowering.heads_last import HeadsLast
from ...lowering.scatter_gradients import ScatterGradients
from ...offloading.transfers import Seconds
from ...recomputation.split_norms import MASKED
from ...target import Target
from ..core.derive import Derived, derive
from ..core.problem import Node

Workspace = Callable[[Operator], tuple[TensorType, ...]]

#: operators that loops consist of once normalisations are opened
_NORMS = (BatchNormTrain, BatchNormApply, BatchNormGrad)


def derive_for(block: Block, target: Target, seconds: Seconds) -> Derived:
    """The problem of a step for a target: what is proven of it holds for the lowered step, too.

    Gradients that will be added row by row take no table in it, what products and attention will read or write
    transposed, or is channels-last already, is the same value, and nodes know what loops may fuse away.  Costs are
    those of the step before it is lowered, as everywhere in planning.
    """
    if not target.kernels:
        return derive(block, seconds, sequence.workspace(target))
    after = HeadsLast(target.kernels).run(FoldTransposes().run(block))
    left, scratch = after.values(), sequence.workspace(target)
    transposes = [_sides(o) for o in block.operators if isinstance(o.op, Transpose)]
    turned = {x.name: y.name for x, y in transposes}
    folded = {name for name in block.values() if name not in left} | ChannelsLast(target.kernels).composed(after)
    readers, others = block.consumers(), after.consumers()
    folded |= {y.name for _, y in transposes if len(readers.get(y.name, ())) > len(others.get(y.name, ()))}
    writers = {v.name: o for o in after.operators for v in o.writes()}

    def workspace(op: Operator) -> tuple[TensorType, ...]:
        name = next(op.writes()).name
        return scratch(writers.get(name) or writers.get(turned.get(name, ""), op))

    return _with_loops(_with_rows_added(block, target, seconds, workspace, folded), target)


def _with_loops(derived: Derived, target: Target) -> Derived:
    """The problem whose nodes say whether loops may run them, and what their loops make again."""
    if not sequence.fuses(target):
        return derived
    operators = derived.block.operators
    remade = _remade(derived.block)
    number = {name: v for v, name in enumerate(derived.problem.values)}

    def node(n: Node, own: tuple[int, ...]) -> Node:
        op = operators[own[0]]
        loop = isinstance(op.op, _NORMS) or loops(op, device=target.on_device)
        again = [number[y] for y in (remade.get(v.name, "") for v in op.writes()) if number.get(y) in n.reads]
        return dataclasses.replace(n, loop=loop, remade=tuple(again))

    nodes = map(node, derived.problem.nodes, derived.operators)
    return dataclasses.replace(derived, problem=dataclasses.replace(derived.problem, nodes=tuple(nodes)))


def _remade(block: Block) -> dict[str, str]:
    """Gradients of Relus behind normalisations → what they read, which their loops make of the norm's x again.

    Transposes between them may be gone once these are channels-last.
    """
    producers = block.producers()

    def written_by(v: Value | None, *kinds: str) -> Operator | None:
        op = None if v is None or v.name not in producers else block.operators[producers[v.name]]
        while op is not None and isinstance(op.op, Transpose):
            at = producers.get(next(op.reads()).name)
            op = None if at is None else block.operators[at]
        return op if op is not None and op.op.name in kinds else None

    remade: dict[str, str] = {}
    for op in block.operators:
        grad = written_by(op.inputs[4], *MASKED) if isinstance(op.op, BatchNormGrad) else None
        relu = grad and written_by(grad.inputs[0], MASKED[grad.op.name])
        norm = relu and written_by(relu.inputs[0], "BatchNormTrain", "BatchNormApply")
        if grad and relu and norm and norm.inputs[0] == op.inputs[0]:
            remade[next(grad.writes()).name] = next(relu.writes()).name
    return remade


def _sides(transpose: Operator) -> tuple[Value, Value]:
    return next(transpose.reads()), next(transpose.writes())


def _with_rows_added(block: Block, target: Target, seconds: Seconds, workspace: Workspace, folded: Set[str]) -> Derived:
    """The problem of a step in which each Add of a GatherGrad is one node."""
    after = ScatterGradients(target.kernels).run(block)
    if after is block:
        return derive(block, seconds, workspace, folded)
    at, producers = {id(o): i for i, o in enumerate(block.operators)}, block.producers()
    origins, costs = list[int](), dict[int, float]()
    for o in after.operators:
        if id(o) not in at:  # an Add and the GatherGrad that it takes in
            add = producers[next(o.writes()).name]
            sparse = {v.name for v in block.operators[add].reads()} - {v.name for v in o.reads()}
            costs[id(o)] = sum(seconds(block.operators[i]) for i in (add, *(producers[name] for name in sparse)))
            at[id(o)] = add
        origins.append(at[id(o)])
    found = derive(after, lambda o: costs[id(o)] if id(o) in costs else seconds(o), workspace, folded)
    return Derived(block, found.problem, tuple(tuple(origins[k] for k in own) for own in found.operators))
