"""Batch normalisations in two operators, so that planners may repeat the cheap one; and in one again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..builder import Names
from ..ir import Block, Operator, Role, Value
from ..ops.batch_norm_train import BatchNormApply, BatchNormStatistics, BatchNormTrain
from ..ops.channels_last import channels_last_form
from .base import Pass

_FORWARD = (Role.FORWARD, Role.LOSS)


@dataclass(frozen=True)
class SplitNorms(Pass):
    """Batch normalisations of the forward pass become two operators: their statistics, and the rest.

        y, mean, var = BatchNormTrain(x, scale, bias)

    becomes

        mean, var = BatchNormStatistics(x); y = BatchNormApply(x, scale, bias, mean, var)

    with the same bits.  The statistics are two vectors that the gradient keeps anyway, so that y costs one pass over x
    wherever it is made again (Bulò et al. 2018, arXiv 1712.02616).
    """

    def run(self, block: Block) -> Block:
        """The block with two operators for each such one."""
        result: list[Operator] = []
        for op in block.operators:
            again = op.op.again(op.inputs, op.outputs) if isinstance(op.op, BatchNormTrain) else None
            if again is None or op.role not in _FORWARD or op.outputs[0] is None:
                result.append(op)
                continue
            rest, given = again
            result.append(Operator(BatchNormStatistics(), op.inputs[:1], op.outputs[1:], op.role))
            result.append(Operator(rest, given, op.outputs[:1], op.role))
        return block.with_operators(result)


@dataclass(frozen=True)
class FuseNorms(Pass):
    """What `split-norms` made becomes one operator again wherever the two still follow each other."""

    def run(self, block: Block) -> Block:
        """The block with one operator for each such pair."""
        result: list[Operator] = []
        for op in block.operators:
            first = result[-1] if result else None
            if first is not None and _belong_together(first, op):
                fused = BatchNormTrain(epsilon=op.op.epsilon)  # type: ignore[attr-defined]
                result[-1] = Operator(fused, op.inputs[:3], (*op.outputs, *first.outputs), op.role)
            else:
                result.append(op)
        return block.with_operators(result)


@dataclass(frozen=True)
class OpenNorms(Pass):
    """Channels-last batch normalisations, recomputed ones too, become two operators with the same bits.

        y, mean, var = ChannelsLastBatchNormTrain(x, scale, bias)

    becomes

        mean, var = ChannelsLastBatchNormStatistics(x); y = ChannelsLastBatchNormApply(x, scale, bias, mean, var)

    The second is element-wise, so that `fusion` makes one loop of it and of what follows.
    """

    def run(self, block: Block) -> Block:
        """The block with two operators for each such one."""
        names = Names(block.values())
        result: list[Operator] = []
        for op in block.operators:
            opened = _opened(op, names) if op.op.name == "ChannelsLastBatchNormTrain" else None
            result += opened or (op,)
        return block.with_operators(result) if len(result) > len(block.operators) else block


def _opened(op: Operator, names: Names) -> tuple[Operator, Operator] | None:
    """Both parts; None where the statistics have a narrower type than they are worked out in."""
    x, y, scale = op.inputs[0], op.outputs[0], op.inputs[1]
    assert x is not None and y is not None and scale is not None
    given = [*op.outputs[1:], None, None][:2]
    vector = scale.type
    mean, var = (v or Value(names.take(f"{y.name}.{i}"), vector) for i, v in enumerate(given, 1))
    again = op.op.again(op.inputs, (y, mean, var))
    statistics = channels_last_form(BatchNormStatistics())
    if again is None or statistics is None:
        return None
    rest, inputs = again
    return Operator(statistics, (x,), (mean, var), op.role), Operator(rest, inputs, (y,), op.role)


def _belong_together(first: Operator, op: Operator) -> bool:
    return (
        isinstance(first.op, BatchNormStatistics)
        and isinstance(op.op, BatchNormApply)
        and first.role is op.role
        and op.inputs[0] == first.inputs[0]
        and op.inputs[3:] == first.outputs
    )


def as_parts(seconds: Callable[[Operator], float]) -> Callable[[Operator], float]:
    """Prices by which both parts of a normalisation cost together what the one operator costs that will run."""

    def price(op: Operator) -> float:
        if not isinstance(op.op, BatchNormStatistics):
            return seconds(op)
        (x,), (mean, var) = op.inputs, op.outputs
        assert x is not None and mean is not None and var is not None
        y = Value(f"{x.name}.y", x.type)
        whole = Operator(BatchNormTrain(), (x, mean, var), (y, mean, var), op.role)
        rest = Operator(BatchNormApply(), (x, mean, var, mean, var), (y,), op.role)
        return max(0.0, seconds(whole) - seconds(rest))

    return price
