"""Splitting of batch normalisations into two operators, so that planners may recompute the cheap one; and joining."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from ...language.builder import Names
from ...language.ir import Block, Operator, Role, Value
from ...ops.channels_last import channels_last_form
from ...ops.fused.loop import SMALLEST
from ...ops.norm.batch_norm_parts import BatchNormFactor, BatchNormSlope, CentredProduct, CentreScale
from ...ops.norm.batch_norm_train import BatchNormApply, BatchNormStatistics, BatchNormTrain
from ...ops.reduction.sums import ReduceSum
from ..base import Pass

_FORWARD = (Role.FORWARD, Role.LOSS)


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
            rest, operands = again
            result.append(Operator(BatchNormStatistics(), op.inputs[:1], op.outputs[1:], op.role))
            result.append(Operator(rest, operands, op.outputs[:1], op.role))
        return block.with_operators(result)


class FuseNorms(Pass):
    """Merge the two operators of `split-norms` into one again wherever they still follow each other."""

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


class OpenNorms(Pass):
    """Channels-last batch normalisations, recomputed ones too, become what loops are made of, with the same bits.

        y, mean, var = ChannelsLastBatchNormTrain(x, scale, bias)

    becomes

        mean, var = ChannelsLastBatchNormStatistics(x)
        factor = BatchNormFactor(scale, var); y = CentreScale(x, mean, factor, bias)

    and ChannelsLastBatchNormApply the second line.  CentreScale is element-wise, so that `fusion` makes one loop of it
    and of what follows.  The gradient becomes two column sums, which belong to the loop that makes dy, and an
    element-wise operator; other bits than its own, but the same for an operator and its types.  Where dy comes through
    a Relu behind the normalisation, its gradient makes y again from x, which the sums read anyway: one operand less.
    """

    def run(self, block: Block) -> Block:
        """The block with these operators for each such one."""
        names = Names(block.values())
        result: list[Operator] = []
        for op in block.operators:
            opened = _OPEN[op.op.name](op, names) if op.op.name in _OPEN else None
            result += opened or (op,)
        return block.with_operators(_masks_again(result, names)) if len(result) > len(block.operators) else block


def _masks_again(operators: list[Operator], names: Names) -> list[Operator]:
    """Gradients of Relu that read y = Relu(CentreScale(x, ...)) last make it again, where a CentredProduct reads x."""
    maker = {v.name: i for i, op in enumerate(operators) for v in op.writes()}
    last = {v.name: i for i, op in enumerate(operators) for v in op.reads()}
    before: dict[int, list[Operator]] = {}

    def made_by(v: Value | None, *kinds: str) -> tuple[int, Operator] | None:
        at = -1 if v is None else maker.get(v.name, -1)
        return (at, operators[at]) if at >= 0 and operators[at].op.name in kinds else None

    for product in operators:
        gradient = made_by(product.inputs[2], *MASKED) if isinstance(product.op, CentredProduct) else None
        if gradient is None:
            continue
        at, grad = gradient
        y = grad.inputs[0]
        relu = made_by(y, MASKED[grad.op.name])
        scaled = relu and made_by(relu[1].inputs[0], "CentreScale")
        factor = scaled and made_by(scaled[1].inputs[2], "BatchNormFactor")
        if not relu or not scaled or not factor or scaled[1].inputs[:2] != product.inputs[:2]:
            continue
        assert y is not None
        if last[y.name] == at and at not in before:
            before[at] = _again([factor[1], scaled[1], relu[1]], grad.role, names)
            operators[at] = dataclasses.replace(grad, inputs=(before[at][-1].outputs[0], *grad.inputs[1:]))
    return [o for i, op in enumerate(operators) for o in (*before.get(i, ()), op)]


#: a gradient that reads its operator's result → that operator
MASKED = {"ReluGrad": "Relu", "Relu6Grad": "Relu6"}


def _again(chain: list[Operator], role: Role, names: Names) -> list[Operator]:
    """Clones of operators, of which some read others' results."""
    new: dict[str, Value] = {}
    operators = []
    for op in chain:
        ins = tuple(v and new.get(v.name, v) for v in op.inputs)
        outs = tuple(v and Value(names.take(f"{v.name}.again"), v.type) for v in op.outputs)
        new.update((v.name, w) for v, w in zip(op.outputs, outs, strict=True) if v and w)
        operators.append(dataclasses.replace(op, inputs=ins, outputs=outs, role=role, scratch=()))
    return operators


def _open_training(op: Operator, names: Names) -> list[Operator] | None:
    """Statistics, and the rest opened; None where the statistics have another type than x."""
    x, y, scale = op.inputs[0], op.outputs[0], op.inputs[1]
    assert x is not None and y is not None and scale is not None
    outputs = [*op.outputs[1:], None, None][:2]
    mean, var = (v or Value(names.take(f"{y.name}.{i}"), scale.type) for i, v in enumerate(outputs, 1))
    again = op.op.again(op.inputs, (y, mean, var))
    statistics = channels_last_form(BatchNormStatistics())
    if again is None or statistics is None:
        return None
    rest = _open_rest(Operator(again[0], again[1], (y,), op.role), names)
    return rest and [Operator(statistics, (x,), (mean, var), op.role), *rest]


def _open_rest(op: Operator, names: Names) -> list[Operator] | None:
    """The element-wise rest of a normalisation with given statistics; None if types differ."""
    x, scale, bias, mean, var = op.inputs
    y = op.outputs[0]
    assert x is not None and y is not None and scale is not None
    if any(v is None or v.dtype != x.dtype for v in op.inputs):
        return None
    factor = Value(names.take(f"{y.name}.factor"), scale.type)
    epsilon = op.op.epsilon  # type: ignore[attr-defined]
    return [
        Operator(BatchNormFactor(epsilon=epsilon), (scale, var), (factor,), op.role),
        Operator(CentreScale(), (x, mean, factor, bias), (y,), op.role),
    ]


def _open_gradient(op: Operator, names: Names) -> list[Operator] | None:
    """Sums, and an element-wise operator with them; None where types differ, or loops would not run them."""
    x, scale, mean, var, dy = op.inputs
    assert x is not None and scale is not None and dy is not None
    if x.size < SMALLEST or x.ndim < 2 or any(v is None or v.dtype != x.dtype for v in op.inputs):
        return None
    epsilon, role = op.op.epsilon, op.role  # type: ignore[attr-defined]
    dx, dscale, dbias = (*op.outputs, None, None)[:3]
    base = (dx or dscale or dbias or x).name
    product = Value(names.take(f"{base}.product"), x.type)
    total = dbias or Value(names.take(f"{base}.total"), scale.type)
    against = Value(names.take(f"{base}.against"), scale.type)
    sums = ReduceSum(axes=tuple(range(x.ndim - 1)), keepdims=0)
    operators = [
        Operator(sums, (dy,), (total,), role),
        Operator(CentredProduct(), (x, mean, dy), (product,), role),
        Operator(sums, (product,), (against,), role),
    ]
    if dscale is not None:
        operators.append(Operator(BatchNormFactor(epsilon=epsilon), (against, var), (dscale,), role))
    if dx is not None:
        slope = BatchNormSlope(count=x.size // scale.size, epsilon=epsilon)
        operators.append(Operator(slope, (x, mean, scale, var, total, against, dy), (dx,), role))
    return operators


_OPEN = {
    "ChannelsLastBatchNormTrain": _open_training,
    "ChannelsLastBatchNormApply": _open_rest,
    "ChannelsLastBatchNormGrad": _open_gradient,
}


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
    prices: dict[Hashable, float] = {}

    def price(op: Operator) -> float:
        if not isinstance(op.op, BatchNormStatistics):
            return seconds(op)
        if op.types not in prices:
            prices[op.types] = statistics(op)
        return prices[op.types]

    def statistics(op: Operator) -> float:
        (x,), (mean, var) = op.inputs, op.outputs
        assert x is not None and mean is not None and var is not None
        y = Value(f"{x.name}.y", x.type)
        whole = Operator(BatchNormTrain(), (x, mean, var), (y, mean, var), op.role)
        rest = Operator(BatchNormApply(), (x, mean, var, mean, var), (y,), op.role)
        return max(0.0, seconds(whole) - seconds(rest))

    return price
