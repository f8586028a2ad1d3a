"""What each operator is when its activations are channels-last: the rules that `channels-last` goes by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import TypeRuleError
from ...language.ir import Operator, Value
from ...language.op import Op
from ...language.types import TensorType
from ...ops.channels_last import FORMS, channels_last_form, permuted, to_last
from ...ops.common import Elementwise
from ...ops.reduction.sums import Reduce
from ...ops.shape.join import Concat, Split
from ...ops.shape.pad import Pad, PadGrad
from ...ops.shape.reshape import Expand, Fill, Identity, Reshape
from ...ops.shape.slice import Slice, SliceGrad
from ...ops.vision.resize import Resize, ResizeGrad


@dataclass(frozen=True)
class Turned:
    """An operator whose activations are channels-last.

    `inputs`: for each the rank of the activations it goes with, 0 where it stays as it is; one of fewer dimensions is
    broadcast against them.  `outputs`: whether each is channels-last.  `always`: the form does not depend on what
    stands around the operator, as the order of its sums, or its kernel, depends on it.
    """

    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[bool, ...]
    always: bool = False


def turned_type(t: TensorType, rank: int) -> TensorType:
    """The channels-last type of an activation, or of what is broadcast against activations of `rank` dimensions."""
    if t.ndim == rank:
        return permuted(t, to_last(rank))
    shape = [1] * (rank - t.ndim) + list(t.shape)
    shape = [shape[p] for p in to_last(rank)]
    first = next((i for i, d in enumerate(shape) if d != 1), rank - 1)
    return t.with_shape(shape[first:])


def turned(o: Operator) -> Turned | None:
    """The channels-last form of an operator; None where it has none."""
    rank = max((v.ndim for v in (*o.outputs, *o.inputs) if v is not None), default=0)
    if rank < 3 or o.op.updates or o.op.random:
        return None
    found = _rule(o, rank)
    return found if found is not None and _types_fit(o, found) else None


def _rule(o: Operator, rank: int) -> Turned | None:
    form = FORMS.get(type(o.op))
    if form is not None:
        x = o.inputs[form.activations[0]]
        if x is None or x.ndim < 3:
            return None
        ins = tuple(x.ndim if i in form.activations else 0 for i in range(len(o.inputs)))
        op = channels_last_form(o.op)
        assert op is not None
        return Turned(op, ins, tuple(i in form.results for i in range(len(o.outputs))), always=True)
    if isinstance(o.op, Reduce):
        return _reduction(o, o.op, rank)
    if isinstance(o.op, Elementwise):
        return _spread(o, o.op)
    rule = _RULES.get(type(o.op))
    return None if rule is None else rule(o, o.op, rank)


def turned_values(o: Operator, t: Turned) -> tuple[tuple[Value | None, ...], tuple[Value | None, ...]]:
    """The operator's inputs and outputs with their turned types."""
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
        found = t.op.infer(*(None if v is None else v.type for v in ins))
    except TypeRuleError:
        return False
    return all(w is None or w.type == f for w, f in zip(outs, found, strict=False))


def turned_axis(axis: int, rank: int) -> int:
    """Where an axis stands in the channels-last form."""
    return to_last(rank).index(axis % rank)


def _spread(o: Operator, op: Op) -> Turned | None:
    """All inputs broadcast to the output."""
    y = o.outputs[0]
    if y is None or y.ndim < 3:
        return None
    ins = tuple(0 if v is None or (v.size == 1 and v.ndim < y.ndim) else y.ndim for v in o.inputs)
    return Turned(op, ins, (True,) * len(o.outputs))


def _same(o: Operator, op: Any, rank: int, **changes: Any) -> Turned:
    """Everything of one rank is turned; `changes`: other attributes."""
    return Turned(dataclasses.replace(op, **changes), (rank,) * len(o.inputs), (True,) * len(o.outputs))


def _reduction(o: Operator, op: Any, rank: int) -> Turned | None:
    """Over all axes but the channels', and over images' positions."""
    if op.axes is None or o.outputs[0] is None:
        return None
    axes = {a % rank for a in op.axes}
    positions = set(range(2, rank))
    if axes != {0, *positions} and (axes != positions or rank < 4):
        return None
    new = dataclasses.replace(op, axes=tuple(sorted(turned_axis(a, rank) for a in axes)))
    return Turned(new, (rank,), (o.outputs[0].ndim == rank,), always=True)


def _shaped(o: Operator, op: Any, rank: int) -> Turned | None:
    """Operators that say the shape of what they make."""
    if len(op.shape) != rank or any(v is not None and v.ndim > rank for v in o.inputs):
        return None
    return _same(o, op, rank, shape=_turned_list(op.shape))


def _reshape(o: Operator, op: Any, rank: int) -> Turned | None:
    """Images and channels stay, positions are counted in another way."""
    x, y = o.inputs[0], o.outputs[0]
    if x is None or y is None or min(x.ndim, y.ndim) < 3 or x.shape[:2] != y.shape[:2]:
        return None
    return Turned(Reshape(_turned_list(y.shape)), (x.ndim,), (True,))


def _turned_list(values: Sequence[Any]) -> tuple[Any, ...]:
    """One entry an axis, in channels-last order."""
    return tuple(values[p] for p in to_last(len(values)))


def _pads(pads: Sequence[int]) -> tuple[int, ...]:
    half = len(pads) // 2
    return (*_turned_list(pads[:half]), *_turned_list(pads[half:]))


def _axes(op: Any, rank: int) -> tuple[int, ...]:
    return tuple(turned_axis(a, rank) for a in op.axes)


def _folded(o: Operator, op: Any, rank: int) -> Turned | None:
    """Borders are folded axis by axis: the order of the sums stays if no channels are among them."""
    if any(op.pads[a] or op.pads[a + rank] for a in (0, 1)):
        return None
    return _same(o, op, rank, pads=_pads(op.pads))


def _resized(o: Operator, op: Any, rank: int) -> Turned | None:
    """Each axis by a product of its own: the order of its sums may depend on what stands beside it."""
    x, y = o.inputs[0], o.outputs[0]
    if rank < 4 or x is None or y is None or x.shape[:2] != y.shape[:2]:
        return None
    roi = _pads(op.roi) if op.roi else ()
    scales = _turned_list(op.scales) if op.scales else ()
    found = _same(o, op, rank, shape=_turned_list(op.shape), scales=scales, roi=roi)
    return dataclasses.replace(found, always=True)


_RULES: dict[type[Op], Callable[[Operator, Any, int], Turned | None]] = {
    Identity: lambda o, op, r: _same(o, op, r),
    Concat: lambda o, op, r: _same(o, op, r, axis=turned_axis(op.axis, r)),
    Split: lambda o, op, r: _same(o, op, r, axis=turned_axis(op.axis, r)),
    Slice: lambda o, op, r: _same(o, op, r, axes=_axes(op, r)),
    SliceGrad: lambda o, op, r: _same(o, op, r, axes=_axes(op, r), shape=_turned_list(op.shape)),
    Pad: lambda o, op, r: _same(o, op, r, pads=_pads(op.pads)),
    PadGrad: _folded,
    Resize: _resized,
    ResizeGrad: _resized,
    Expand: _shaped,
    Fill: _shaped,
    Reshape: _reshape,
}
