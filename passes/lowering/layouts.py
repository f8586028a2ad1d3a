"""Channels-last forms of operators, checked against their type rules."""

from __future__ import annotations

from ...errors import TypeRuleError
from ...language.ir import Operator, Value
from ...language.layouts import Turned, permuted, to_last
from ...language.types import TensorType, need
from ...ops.channels_last import FORMS, channels_last_form


def turned_type(t: TensorType, rank: int) -> TensorType:
    """The channels-last type of an activation, or of an operand that broadcasts against `rank` dimensions."""
    if t.ndim == rank:
        return permuted(t, to_last(rank))
    shape = [1] * (rank - t.ndim) + list(t.shape)
    shape = [shape[p] for p in to_last(rank)]
    first = next((i for i, d in enumerate(shape) if d != 1), rank - 1)
    return t.with_shape(shape[first:])


def turned(o: Operator) -> Turned | None:
    """The channels-last form of an operator; None if it has none."""
    rank = max((v.ndim for v in (*o.outputs, *o.inputs) if v is not None), default=0)
    if rank < 3 or o.op.updates or o.op.random:
        return None
    form = _rule(o, rank)
    return form if form is not None and _types_fit(o, form) else None


def _rule(o: Operator, rank: int) -> Turned | None:
    form = FORMS.get(type(o.op))
    if form is not None:
        x = o.inputs[form.activations[0]]
        if x is None or x.ndim < 3:
            return None
        ins = tuple(x.ndim if i in form.activations else 0 for i in range(len(o.inputs)))
        op = need(channels_last_form(o.op))
        return Turned(op, ins, tuple(i in form.results for i in range(len(o.outputs))), always=True)
    return o.op.channels_last(o.inputs, o.outputs, rank)


def turned_values(o: Operator, t: Turned) -> tuple[tuple[Value | None, ...], tuple[Value | None, ...]]:
    """The operator's inputs and outputs with their channels-last types."""
    ins = (
        None if v is None else Value(v.name, turned_type(v.type, r)) if r else v
        for v, r in zip(o.inputs, t.inputs, strict=True)
    )
    outs = (
        None if v is None else Value(v.name, turned_type(v.type, v.ndim)) if last else v
        for v, last in zip(o.outputs, t.outputs, strict=True)
    )
    return tuple(ins), tuple(outs)


def turned_operator(o: Operator, t: Turned) -> Operator:
    """The operator applied in its channels-last form."""
    return Operator(t.op, *turned_values(o, t), o.role)


def _types_fit(o: Operator, t: Turned) -> bool:
    """Whether the turned operator gives the turned types."""
    ins, outs = turned_values(o, t)
    try:
        types = t.op.infer(*(None if v is None else v.type for v in ins))
    except TypeRuleError:
        return False
    return all(w is None or w.type == f for w, f in zip(outs, types, strict=False))
