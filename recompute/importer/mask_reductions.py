"""Rules of reductions, and of what looks along an axis: what does not count is replaced by what changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from .mask_selection import Marks
from .mask_work import Work, product

REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip
#: operators along the attribute `axis`, and its default
ALONG = {"Softmax": -1, "LogSoftmax": -1, "Hardmax": -1, "ArgMax": 0, "ArgMin": 0, "TopK": -1, "LpNormalization": -1}
_SHRINKING = ("ArgMax", "ArgMin")


def reduction(work: Work) -> None:
    """Leaves out what does not count."""
    marks, t, op_type = work.marks(0), work.type(0), work.node.op_type
    axes = _axes(work)
    inside = {a: s for a, s in marks.items() if a in axes}
    left = _left(marks, axes, bool(work.attributes.get("keepdims", 1)))
    x = work.name(0)
    everything = len(axes) == t.ndim and bool(inside)
    if everything and op_type == "ReduceSum" and t.dtype == "i64" and counted_within(work):
        return
    if not inside and op_type in ("ReduceL2", "ReduceLogSum"):  # whose derivatives are infinite at 0
        x = work.filled(x, marks, 1)
    if not inside or not t.size:
        work.whole([x, *work.node.input[1:]])
    elif op_type == "ReduceMean":
        total = work.full(
            "ReduceSum", work.filled(x, inside, 0), work.constant(axes), keepdims=work.attributes.get("keepdims", 1)
        )
        count = work.count(product(work.extent(0, a) for a in axes))
        work.whole_as("Div", total, work.cast(count, t.dtype))
    else:
        work.whole([work.filled(x, inside, _neutral(op_type, t.dtype, t.numpy)), *work.node.input[1:]])
    work.mark(left)


def counted_within(work: Work) -> bool:
    """The sum of a mask over entries that another one keeps: a number of the program that may also be a length."""
    numbering, t = work.importer.numbering, work.type(0)
    mask = numbering.cast_from_bool(work.importer.value(work.name(0), "", 0))
    if mask is None:
        return False
    work.importer.env.setdefault(mask.name, mask)
    both = work.full("And", work.reshaped(mask.name, t.shape), work.both(work.marks(0), t.ndim))
    selection = work.selection(both, work.labels())
    shape = (1,) * (t.ndim if work.attributes.get("keepdims", 1) else 0)
    work.whole_as("Reshape", work.count(selection.count), work.constant(shape))
    length = np.empty(shape, object)
    length[...] = selection.count
    work.selected.lengths[work.node.output[0]] = length
    return True


def _axes(work: Work) -> list[int]:
    ndim = work.type(0).ndim
    given = work.need(1, "axes")
    axes = list(work.attributes.get("axes", ())) if given is None else given.reshape(-1).tolist()
    if not axes and not work.attributes.get("noop_with_empty_axes", 0):
        axes = list(range(ndim))
    return sorted({int(a) % ndim for a in axes})


def _left(marks: Marks, axes: list[int], keepdims: bool) -> Marks:
    """The selections that are left without axes."""
    return {a if keepdims else a - sum(r < a for r in axes): s for a, s in marks.items() if a not in axes}


def _neutral(op_type: str, dtype: str, numpy: Any) -> Any:
    """The neutral element of a reduction."""
    if op_type == "ReduceProd":
        return 1
    if op_type in ("ReduceMax", "ReduceMin", "ReduceLogSumExp"):
        return extreme(dtype, numpy, op_type == "ReduceMin")
    return 0


def extreme(dtype: str, numpy: Any, highest: bool) -> Any:
    """The lowest or highest finite number of an element type."""
    if dtype == "bool":
        return highest
    kind = np.dtype(numpy)
    if kind.kind in "iu":
        return np.iinfo(kind).max if highest else np.iinfo(kind).min
    most = 3.3e38 if dtype == "bf16" else float(np.finfo(kind).max)
    return most if highest else -most


def along(work: Work) -> None:
    """Softmax and others along one axis: over the entries that count, where that is the selected axis."""
    op_type, t = work.node.op_type, work.type(0)
    axis, marks = work.axis(0, ALONG[op_type]), work.marks(0)
    ins = list(work.node.input)
    if axis in marks:
        if op_type not in ("Softmax", "LogSoftmax"):
            raise work.fail(0, f"{op_type} gives places or a number of entries along it")
        ins[0] = work.filled(ins[0], {axis: marks[axis]}, extreme(t.dtype, t.numpy, False))
    if op_type == "LpNormalization":
        ins[0] = work.filled(ins[0], marks, 1)
    work.whole(ins)
    if op_type in _SHRINKING:
        marks = _left(marks, [axis], bool(work.attributes.get("keepdims", 1)))
    for i in range(len(work.node.output)):
        work.mark(marks, i)


def running(work: Work) -> None:
    """CumSum and CumProd: entries that do not count add nothing, and stand between those that do."""
    axes = work.need(1, "axis")
    assert axes is not None
    axis = int(axes.reshape(-1)[0]) % work.type(0).ndim
    inside = {a: s for a, s in work.marks(0).items() if a == axis}
    work.whole([work.filled(work.name(0), inside, int(work.node.op_type == "CumProd")), *work.node.input[1:]])
    work.mark(work.marks(0))
