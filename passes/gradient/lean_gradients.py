"""Rewrites of the backward pass that keep fewer forward values, with bit-identical results."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...language.builder import Builder
from ...language.ir import Operator, Value

#: operators (y, dy) → f(y) · dy, element by element, with f(y) 0 or 1, y an activation's output
_MASKS = ("ReluGrad", "Relu6Grad", "ThresholdedReluGrad")


def mask_before_routing(
    b: Builder, forward: Sequence[Operator], backward: Sequence[Operator], wanted: Collection[str]
) -> list[Operator]:
    """Masks the gradient of a pooled activation before it is routed through MaxPool, not after.

        g = MaxPoolGrad(number, dy); dx = ReluGrad(y, g)

    becomes

        m = ReluGrad(pooled, dy); dx = MaxPoolGrad(number, m)

    where `pooled` and `number` are MaxPool's outputs for y.  An element that got any gradient is the largest of its
    window, so that `pooled` says of it what y says; y itself, four times as large or more, need not be kept.  `wanted`
    gradients, and those that something else reads, stay.
    """
    pools = {o.outputs[2].name: o for o in forward if o.op.name == "MaxPool" and len(o.outputs) > 2 and o.outputs[2]}
    if not pools:
        return list(backward)
    readers: dict[str, int] = {}
    for o in backward:
        for v in o.reads():
            readers[v.name] = readers.get(v.name, 0) + 1
    routed: dict[str, tuple[int, Operator]] = {}
    result: list[list[Operator]] = [[o] for o in backward]
    for i, o in enumerate(backward):
        if o.op.name == "MaxPoolGrad":
            number, g = o.inputs[0], o.outputs[0]
            assert number is not None and g is not None
            if number.name in pools and readers.get(g.name) == 1 and g.name not in wanted:
                routed[g.name] = (i, pools[number.name])
        elif o.op.name in _MASKS and _reads_routed(o, routed):
            at, pool = routed[o.inputs[1].name]  # type: ignore[union-attr]
            result[at], result[i] = _swapped(b, pool, backward[at], o), []
    return [o for part in result for o in part]


def _reads_routed(o: Operator, routed: dict[str, tuple[int, Operator]]) -> bool:
    """Whether a mask's gradient came through a MaxPool of the very activation that the mask is made from."""
    y, dy = o.inputs
    if y is None or dy is None or dy.name not in routed:
        return False
    pooled = routed[dy.name][1].inputs[0]
    return pooled is not None and pooled.name == y.name


def _swapped(b: Builder, pool: Operator, routing: Operator, mask: Operator) -> list[Operator]:
    number, dy = routing.inputs
    pooled = pool.outputs[0]
    assert dy is not None and pooled is not None
    masked = Value(b.names.take(f"{pooled.name}.grad.masked"), dy.type)
    return [
        Operator(mask.op, (pooled, dy), (masked,), mask.role),
        Operator(routing.op, (number, masked), mask.outputs, routing.role),
    ]


def drop_again(b: Builder, forward: Sequence[Operator], backward: Sequence[Operator]) -> list[Operator]:
    """Recomputes dropout for the gradients that read its output, if its input is kept anyway.

    An example is attention: the gradient of its softmax reads the weights before dropout, the gradient of the values
    those after it.  As dropout's gradient is dropout, no mask is kept, and the results are bit-identical.
    """
    dropouts = [o for o in forward if o.op.name == "Dropout"]
    if not dropouts:
        return list(backward)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, o in enumerate(backward):
        for v in o.reads():
            first.setdefault(v.name, i)
            last[v.name] = i
    before: dict[int, list[Operator]] = {}
    again: dict[str, Value] = {}
    for o in dropouts:
        x, y = o.inputs[0] if o.inputs else None, o.outputs[0] if o.outputs else None
        if x is None or y is None or y.name not in first:
            continue
        if last.get(x.name, -1) >= first[y.name]:
            again[y.name] = y.renamed(b.names.take(f"{y.name}.again"))
            before.setdefault(first[y.name], []).append(Operator(o.op, o.inputs, (again[y.name],), b.role))
    result: list[Operator] = []
    for i, o in enumerate(backward):
        result += before.get(i, ())
        result.append(o.reading(again))
    return result
