"""Inference mode: the forward pass of a training step, with dropout off and running statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...errors import UsageError
from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...language.op import REGISTRY
from ..base import Pass
from .dead_code import prune

#: operators through which a batch statistic goes on its way to the running one (a cast, the factor n / (n - 1))
_ON_THE_WAY = frozenset(["Cast", "Mul"])


class ForTest(Pass):
    """Keep the forward pass and its losses, with every operator in inference mode; nothing is updated.

    Operators that differ between training and inference say how (`Op.inference`).  `outputs`: what is wanted (default:
    the block's outputs); all else is dropped, inputs that only it reads too.
    """

    outputs: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        """UsageError if a batch normalisation has no running statistics."""
        kept = [op for op in block.operators if op.role in (Role.FORWARD, Role.LOSS)]
        names = {v.name for op in kept for v in op.writes()} | {v.name for v in block.declared()}
        outputs = self.outputs or tuple(n for n in block.outputs if n in names)
        block = block.with_operators(kept, outputs=outputs)
        block = in_inference(block, lambda op: True)
        forward = [op for op in block.operators if not op.op.updates]
        operators = prune(forward, outputs)
        read = {v.name for op in operators for v in op.reads()}.union(outputs)
        return block.with_operators(
            operators,
            inputs=tuple(v for v in block.inputs if v.name in read),
            parameters=tuple(v for v in block.parameters if v.name in read),
            buffers=tuple(v for v in block.buffers if v.name in read),
            state=tuple(v for v in block.state if v.name in read),
            constants=tuple(c for c in block.constants if c.value.name in read),
        )


def in_inference(block: Block, chosen: Callable[[Operator], bool]) -> Block:
    """The block with the `chosen` operators in inference mode; running statistics that they feed are not updated.

    UsageError for a batch normalisation without running statistics.
    """
    followed = _running_statistics(block)
    b = Builder.on(block)
    stopped: set[str] = set()
    for op in block.operators:
        if op.op.updates or not chosen(op):
            b.operators.append(op)
            continue
        running = [None if v is None else followed.get(v.name) for v in op.outputs]
        start = len(b.operators)
        evaluated = op.op.inference(b, op.inputs, running)
        if evaluated is None:
            b.operators.append(op)
            continue
        stopped.update(v.name for v in running if v is not None)
        _take_names(b, op, evaluated, start)
    operators = [op for op in b.operators if not (op.op.updates and any(v.name in stopped for v in op.writes()))]
    return block.with_operators(operators, constants=(*block.constants, *b.constants))


def _take_names(b: Builder, op: Operator, found: tuple[Value | None, ...], start: int) -> None:
    """Gives what was emitted since `start` the names and the role of the operator that it replaces."""
    emitted = {v.name for o in b.operators[start:] for v in o.writes()}
    names: dict[str, str] = {}
    for old, new in zip(op.outputs, found, strict=False):
        if old is None:
            continue
        if new is None:
            raise UsageError(f"{op.op.name} '{old.name}' has no form in inference mode for this output")
        if new.name in emitted and new.name not in names:
            names[new.name] = old.name
        else:
            names[b.emit(REGISTRY["Identity"](), new).name] = old.name
    b.operators[start:] = [_as(o.renamed(names), op.role) for o in b.operators[start:]]


def _as(op: Operator, role: Role) -> Operator:
    return op if op.role is role else Operator(op.op, op.inputs, op.outputs, role)


def _running_statistics(block: Block) -> Mapping[str, Value]:
    """Batch statistic → the running statistic that follows it."""
    writers = {v.name: op for op in block.operators for v in op.writes() if not op.op.updates}
    statistics: dict[str, Value] = {}
    for op in block.operators:
        if op.op.name != "RunningUpdate":
            continue
        running, batch = op.inputs
        assert running is not None
        while batch is not None:
            statistics[batch.name] = running
            before = writers.get(batch.name)
            batch = before.inputs[0] if before is not None and before.op.name in _ON_THE_WAY else None
    return statistics
