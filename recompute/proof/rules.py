"""Operators that change form and not contents: one rule for each kind of operator, tested on the operators' samples."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes

from ..language.factors import LOGSUMEXP, MAX, MIN, PROD, SUM
from ..language.op import Op, op_class
from ..language.types import TensorType, Types, need
from ..ops.common import Elementwise, normal_axes, normal_axis
from ..ops.communication.base import CommWait
from ..ops.elementwise.arithmetic import Add, Div, Mul, Sub
from ..ops.fused.loop import Loop
from ..ops.linear.products import Gemm, MatMul
from ..ops.memory.offload import Copy, Store
from ..ops.random.draws import Dropout
from ..ops.random.dropout_part import DropoutPart
from ..ops.recurrent.shared import Recurrent, RecurrentGrad
from ..ops.reduction.extremes import ArgMax
from ..ops.reduction.running import Running
from ..ops.reduction.softmax import LogSoftmax, Softmax
from ..ops.reduction.sums import Reduce, ReduceLogSumExp, ReduceSum
from ..ops.shape.join import Concat, Split
from ..ops.shape.reshape import Copied, Expand, Fill, Reshape, Transpose
from ..ops.shape.slice import Slice
from ..ops.vision.resize import Interpolation
from .numbers import Numbers, expanded, rule
from .table import Index, Wide, merged
from .views import Digit, View, aligned, joined, strides

Given = Sequence[View | None]
#: element-wise operators whose two operands may change places, to the bit
COMMUTE = frozenset({"Add", "Mul", "Equal", "And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor"})
#: element-wise operators of two operands, and reductions, that combine what slices of an index contribute
COMBINE = {"Add": SUM, "Max": MAX, "Min": MIN, "Mul": PROD}
COMBINE |= {"ReduceSum": SUM, "ReduceMax": MAX, "ReduceMin": MIN, "ReduceProd": PROD, "ReduceLogSumExp": LOGSUMEXP}


@rule(Copied, Copy, CommWait, Store)
def same(n: Numbers, op: Any, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """Copies, also to and from the host, and the end of a communication: their first input; or what is stored."""
    return [v for v in (given[1:] if isinstance(op, Store) else given[:1]) if v is not None]


@rule(Reshape, Transpose, Expand)
def moved(n: Numbers, op: Any, operands: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """The same elements, in another order, or some of them more than once; of a vector, none is the only one taken of
    a row."""
    if (x := operands[0]) is None:
        return None
    if isinstance(op, Reshape):
        return [n.within(x.reshaped(op.shape)) if len(op.shape) == 1 else x.reshaped(op.shape)]
    view = x.transposed(op.perm) if isinstance(op, Transpose) else x.expanded(op.shape)
    return [view] if view else None


@rule(Split)
def parts(n: Numbers, op: Split, operands: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """Split: a slice of the elements for each output."""
    axis = normal_axis(op.axis, need(ins[0]).ndim, op)
    starts = itertools.accumulate(op.sizes, initial=0)
    views = [operands[0] and operands[0].sliced(axis, at, size) for at, size in zip(starts, op.sizes, strict=False)]
    return [_resolved(n, v) for v in views if v is not None] if None not in views else None


@rule(Slice)
def sliced(n: Numbers, op: Slice, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """Slice: some of the elements."""
    view = given[0]
    for axis, taken in enumerate(op.taken(need(ins[0]).shape)):
        part = view and view.sliced(axis, taken.start, len(taken), taken.step)
        if view and part is None and len(view.shape) == 1 and taken.step > 0:
            part = n.run_of(view, View(0, taken.start, joined([(len(taken), taken.step)]), (len(taken),)))
        view = part
    return [_resolved(n, view)] if view else None


def _resolved(n: Numbers, v: View) -> View:
    """A slice of values that were joined, or of a function of their elements: of the one value in which it lies."""
    last = v.offset + sum((size - 1) * stride for size, stride in v.digits)
    for start, stop, part in n.joints.get(v.base, ()):
        if start <= v.offset and last < stop:
            return _resolved(n, n.run_of(part, View(part.base, v.offset - start, v.digits, v.shape)))
    joints = n.joints.get(v.base, [])
    if joints and v.digits[:1] == ((len(joints), joints[0][1]),) and v.offset < joints[0][1]:  # the same of each
        size, step = v.digits[0]
        slices = [View(v.base, v.offset + i * step, v.digits[1:], (_size(v.digits[1:]),)) for i in range(size)]
        each = [_resolved(n, x) for x in slices]
        if all(a is not b for a, b in zip(each, slices, strict=True)):
            t = TensorType("f32", each[0].shape)
            joined_ = n.apply(Concat(0), each, (t,) * size, (t.with_shape((size * t.size,)),))[0]
            return v if joined_ is None else joined_.reshaped(v.shape)
    if v.base in n.flat:
        (op, kinds), operands = n.flat[v.base]
        views = [x.part(v) if x.digits else x for x in operands]
        parts = [x and _resolved(n, x) for x in views]
        if None not in parts and any(a is not b for a, b in zip(parts, views, strict=True)):
            ins = [TensorType(kind, x.shape) for kind, x in zip(kinds, parts, strict=True) if x is not None]
            view = n.apply(op, parts, ins, op.infer(*ins)[:1])[0]
            return v if view is None else view
    return v


@rule(Fill)
def filled(n: Numbers, op: Fill, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """Fill: one constant everywhere."""
    return [n.filled(need(outs[0]), op.value)]


@rule(Dropout, DropoutPart)
def dropped(n: Numbers, op: Any, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """Elements times what a number of a stream says of each, of which each element has its own."""
    x, step = given
    if x is None or step is None:
        return None
    t = need(ins[0])
    runs = isinstance(op, DropoutPart) and [(t.size // op.run, op.skip), (op.run, 1)]
    digits = joined(runs or zip(t.shape, strides(t.shape), strict=True))
    use = ("Dropout", op.ratio, t.dtype)
    y, mask = _each((t, t), lambda k: View(n.stream(op.seed, step, (*use, k)), op.first, digits, x.shape))
    return [y if n.scalar(x.base) == 1 else n.apply(Mul(), [x, y], (t, t), (t,))[0], mask]


@rule(Interpolation)
def interpolated(n: Numbers, op: Any, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """Each axis by itself: in the order in which those of the input lie."""
    x, t, y = given[0], need(ins[0]), need(outs[0])
    axes = x.axes() if x is not None else None
    if x is None or axes is None:
        return None
    order = sorted(range(t.ndim), key=lambda i: -axes[i][0][1] if axes[i] else 0)
    last = [i + t.ndim for i in order]
    changes = {"shape": [op.shape[i] for i in order]}
    changes |= {"scales": [op.scales[i] for i in order]} if op.scales else {}
    changes |= {"roi": [op.roi[i] for i in (*order, *last)]} if op.roi else {}
    turned = dataclasses.replace(op, **{name: tuple(values) for name, values in changes.items()})
    types = [t.with_shape([t.shape[i] for i in order])]
    views = n.opaque(turned, [x.transposed(order)], types, [y.with_shape([y.shape[i] for i in order])])
    return [views[0] and views[0].transposed([order.index(i) for i in range(t.ndim)])]


@rule(Recurrent, RecurrentGrad)
def as_it_is(n: Numbers, op: Op, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """Not its expansion: its own account of the axes knows that parts of it add up, its expansion's does not."""
    return n.opaque(op, given, ins, outs)


@rule(Loop)
def looped(n: Numbers, op: Loop, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """Loop: its body, operator by operator."""
    values, types = dict(enumerate(given)), op.types(ins)
    for m in op.members:
        operands, kinds = ([None if i is None else some[i] for i in m.inputs] for some in (values, types))
        values[m.result] = n.apply(m.op, operands, kinds, (types[m.result],))[0]  # type: ignore[arg-type]
    return [values[y] for y in op.yields]


@rule(Elementwise)
def elementwise(n: Numbers, op: Elementwise, operands: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """A function of elements at the same indices, in whatever order these are.

    None for a composition, which is expanded.
    """
    if op.random or expanded(op, ins, outs) is not None:
        return None
    if op.name == "Cast" and need(ins[0]).dtype == need(outs[0]).dtype:
        return [operands[0]]
    shape = next(t.shape for t in outs if t is not None)
    present = [v for v in operands if v is not None]
    if op.name in COMMUTE:
        present.sort(key=_order)
    if op.name in COMBINE and len(present) == 2 and shape in (present[0].shape, present[1].shape):
        joint = _combined(n, present[0], present[1], COMBINE[op.name])
        if joint is not None:
            return [joint.reshaped(shape)]
    run = next((v for v in present if v.base in n.ordered), None) if n.ordered and len(outs) == 1 else None
    if run and (whole := n.in_run(op, operands, run, ins, need(outs[0]))) is not None:
        return [whole]
    if any(map(n.narrow, present)):
        present = [n.with_ones(v) for v in present]
    indices = _broadcast(tuple([(v.digits, v.shape) for v in present]), shape)
    if indices is None:
        return None
    kinds = tuple(None if t is None else t.dtype for t in ins)
    name = (op.name, op, kinds)
    views = _each(outs, lambda k: n.indexed((*name, k), present, indices, shape=shape))
    if n.pulls and op.name == "Div" and need(outs[0]).is_float and views[0] is not None:
        values, number = (n.operand(views[0].base, k) for k in (0, 1))
        if all(not s for _, s in number.digits):
            n.quotients.setdefault(views[0].base, (values, View(number.base, number.offset, (), ())))
    if n.joints and len(outs) == 1 and len(set(kinds)) == 1:
        _flat(n, op, kinds, present, indices, views[0])
    return views


def _flat(n: Numbers, op: Op, kinds: Any, operands: Sequence[View], indices: Sequence[Index], y: View | None) -> None:
    """Notes a function of the elements of joined values, if these lie one after the other in all of them."""
    if y is None or y.base in n.flat or not any(v.base in n.joints or v.base in n.flat for v in operands):
        return
    wide = n.widest((), operands, indices)
    ordered = merged(sorted(wide.whole, key=lambda x: [-s for s in x[1]]))
    if len(ordered) != 1 or ordered[0][0] != n.sizes[y.base] or any(v.offset for v in wide.operands):
        return
    if all(s == (n.sizes[v.base] > 1) for s, v in zip(ordered[0][1], wide.operands, strict=True)):
        n.flat[y.base] = (op, kinds), [View.whole(v.base, n.nodes[v.base].shape) for v in wide.operands]


@functools.lru_cache(maxsize=1 << 14)
def _broadcast(given: tuple[tuple[tuple[Digit, ...], tuple[int, ...]], ...], shape: tuple[int, ...]) -> Any:
    """The indices of values, of these digits and shapes, that broadcast to a shape; None if there are none."""
    views = [View(0, 0, *of).expanded(shape) for of in given]
    sizes = aligned([v.digits for v in views if v is not None]) if None not in views else None
    return sizes and tuple(sizes)


def _each(outs: Types, made: Callable[[int], View]) -> list[View | None]:
    """A value for each output that is present."""
    return [None if t is None else made(k) for k, t in enumerate(outs)]


def _combined(n: Numbers, a: View, b: View, how: str) -> View | None:
    """The sum, or what else they are combined to, of what slices contribute."""
    x, y = n.partials.get(a.base), n.partials.get(b.base)
    if x is None or y is None or not x.how == y.how == how or a.offset != b.offset:
        return None
    if a.bare().digits != b.bare().digits or (both := x.with_(y)) is None:
        return None
    view = n.partial(both)
    return view if n.complete(a) else n.run_of(view, a)


@rule(Reduce)
def reduced(n: Numbers, op: Reduce, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """A symmetric function of the elements along some indices; a mean is a sum that is divided."""
    x, t, y = given[0], need(ins[0]), need(outs[0])
    count = t.size / max(y.size, 1)
    if op.divides and n.pulls and y.is_float and count <= float(ml_dtypes.finfo(y.numpy).max):
        total = n.apply(ReduceSum(op.axes, op.keepdims), given, ins, outs)[0]
        return n.apply(Div(), [total, n.filled(y.with_shape(()), count)], (y, y.with_shape(())), outs)
    axes = x.axes() if x is not None else None
    if x is None or axes is None:
        return None
    gone = normal_axes(op.axes, t.ndim, op)
    split: tuple[list[Index], list[Index]] = ([], [])
    for i, axis in enumerate(axes):
        split[i in gone].extend((size, (stride,)) for size, stride in axis)
    if not split[1]:
        split[1].append((1, (0,)))
    if op.name in COMBINE and (whole := _of_joined(n, x, *split, COMBINE[op.name])) is not None:
        return [whole.reshaped(y.shape)]
    return [n.indexed((op.name, y.dtype), [x], *split, shape=y.shape, how="" if op.divides else op.partial)]


def _of_joined(n: Numbers, x: View, kept: Sequence[Index], gone: Sequence[Index], how: str) -> View | None:
    """The combination of values that were joined along the reduced index, if they are parts of one result."""
    count = len(n.joints.get(x.base, ()))
    if [size for size, _ in gone] != [count]:
        return None
    digits = joined((size, stride) for size, (stride,) in kept)
    parts = [View(x.base, x.offset + i * gone[0][1][0], digits, (_size(digits),)) for i in range(count)]
    whole: View | None = _resolved(n, parts[0])
    for v in parts[1:]:
        whole = whole and _combined(n, whole, _resolved(n, v), how)
    return whole


@rule(Softmax, LogSoftmax)
def shares(n: Numbers, op: Any, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """The difference to the logarithm of the sum of exponentials, or its exponential."""
    t = need(ins[0])
    total = ReduceLogSumExp(axes=op.reduced(t))
    types = (t, *total.infer(t))
    log = n.apply(Sub(), [given[0], n.apply(total, given, ins, types[1:])[0]], types, outs)
    return n.apply(op_class("Exp")(), log, outs, outs) if isinstance(op, Softmax) else log


@rule(ArgMax, Running)
def along(n: Numbers, op: Any, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """A function of the elements along one axis, in their order."""
    x, t, axis = given[0], need(ins[0]), normal_axis(op.axis, need(ins[0]).ndim, op)
    axes = x.axes() if x is not None else None
    if x is None or axes is None or len(joined(axes[axis])) > 1:
        return None
    rest = [[(size, (stride,)) for size, stride in digits] for digits in axes]
    count = need(outs[0]).size * t.shape[axis] // t.size
    name = (op.name, dataclasses.replace(op, axis=0), t.dtype, count)
    kept = [i for some in (*rest[:axis], *rest[axis + 1 :]) for i in some]
    wide = n.widest(name, [x], kept, rest[axis] or [(1, (0,))], how="")
    if len(wide.kept) != len(kept):
        return None
    return [n.rows(name, wide, count, sum(map(len, rest[:axis])), need(outs[0]).shape)[0]]


@rule(MatMul)
def product(n: Numbers, op: MatMul, operands: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """Sums of products along one index."""
    view = _product(n, (operands[0], operands[1]), (op.transA, op.transB), need(outs[0]).dtype)
    return None if view is None else [view.reshaped(need(outs[0]).shape)]


def _product(n: Numbers, given: Any, swapped: tuple[int, int], dtype: str) -> View | None:
    pair: list[list[list[Digit]]] = []
    for k, (v, swap) in enumerate(zip(given, swapped, strict=True)):
        axes = v.axes()
        if axes is None:
            return None
        if len(axes) == 1:
            axes = [[], axes[0]] if k == 0 else [axes[0], []]
        elif swap:
            axes[-2], axes[-1] = axes[-1], axes[-2]
        pair.append(axes)
    a, b = pair
    depth = max(len(a), len(b)) - 2
    kept: list[Index] = []
    shape: list[int] = []
    for i in range(-depth - 2, -2):
        digits = [x[i] if len(x) >= -i else [] for x in (a, b)]
        size = max(_size(x) for x in digits)
        both = aligned([x if _size(x) == size else [*x, (size, 0)] for x in digits])
        if both is None:
            return None
        kept += both
        shape.append(size)
    kept += [(size, (stride, 0)) for size, stride in a[-2]]
    kept += [(size, (0, stride)) for size, stride in b[-1]]
    shape += [_size(a[-2]), _size(b[-1])]
    summed = aligned([a[-1], b[-2]])
    if summed is None:
        return None
    operands = list(given)
    if sorted(operands, key=_order) != operands:
        operands.reverse()
        kept, summed = ([(size, at[::-1]) for size, at in some] for some in (kept, summed))
    return n.indexed(("MatMul", dtype), operands, kept, summed or [(1, (0, 0))], shape=tuple(shape))


def _order(v: View) -> Any:
    return v.base, v.offset  # not the digits, which depend on the order of the indices


def _size(digits: Sequence[Digit]) -> int:
    return math.prod([d for d, _ in digits])


@rule(Gemm)
def gemm(n: Numbers, op: Gemm, operands: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """A product, and a sum of it and C, each with its factor."""
    t = need(outs[0])
    y = n.apply(MatMul(op.transA, op.transB), operands[:2], ins[:2], (t,))[0]
    add, mul = Add(), Mul()
    if op.alpha != 1:
        y = n.apply(mul, [y, n.filled(t, op.alpha)], (t, t), (t,))[0]
    if len(operands) > 2 and (c := operands[2]) is not None:
        if op.beta != 1:
            c = n.apply(mul, [c, n.filled(need(ins[2]), op.beta)], (ins[2], ins[2]), (need(ins[2]),))[0]
        y = n.apply(add, [y, c], (t, ins[2]), (t,))[0]
    return [y]


@rule(Concat)
def concatenated(n: Numbers, op: Concat, given: Given, ins: Types, outs: Types) -> list[View | None] | None:
    """Neighbouring parts of one value, which they are together; else parts whose other indices are in any order."""
    t = need(outs[0])
    axis = normal_axis(op.axis, t.ndim, op)
    parts = [v for v in given if v is not None]
    if (whole := _one_value(axis, parts)) is not None:
        return [whole]
    pieces, fewer = parts if t.ndim > 1 else [x for v in parts for x in _pieces(n, v)], parts[:0]
    for v in pieces:
        both = _one_value(axis, [fewer[-1], v]) if fewer else None
        fewer[-1:] = [both] if both else [*fewer[-1:], v]
    if len(fewer) < len(pieces) or any(v.base in n.flat for v in parts):
        parts = fewer
    if len(parts) == 1:
        return [*parts]
    axes = [v.axes() for v in parts]
    if None in axes:
        return None
    alike = len({v.shape[axis] for v in parts}) == 1
    extents = () if alike else tuple((v.shape[axis], joined(a[axis])) for v, a in zip(parts, axes, strict=True) if a)
    every = [[] if i == axis and not alike else aligned([a[i] for a in axes if a]) for i in range(t.ndim)]
    rest: list[list[Index]] = [sizes for sizes in every if sizes is not None]
    if len(rest) < t.ndim:
        return None
    wide = n.widest((), parts, [x for some in rest for x in some])
    before = sum(len(some) for some in rest[:axis])
    if len(wide.kept) != sum(map(len, rest)):
        return None
    count = len(parts) if alike else t.shape[axis]
    view, places = n.rows(("Concat", count, extents), wide, count, before, t.shape)
    dense = n.sizes[view.base] // count
    n.joints.setdefault(view.base, _joints(wide, places, extents, dense))
    return [view]


def _pieces(n: Numbers, v: View) -> list[View]:
    """The parts of a run of joined values, or of a function of their elements, one for each of these values."""
    joined_ = n.flat[v.base][1] if v.base in n.flat else [v]
    ends = {stop for x in joined_ for _, stop, _ in n.joints.get(x.base, ())}
    size = v.shape[0]
    borders = [0, *(e - v.offset for e in sorted(ends) if 0 < e - v.offset < size), size]
    if len(borders) == 2 or v.digits != ((size, 1),):
        return [v]
    return [_resolved(n, View(v.base, v.offset + a, ((b - a, 1),), (b - a,))) for a, b in itertools.pairwise(borders)]


def _joints(wide: Wide, places: Sequence[int], extents: Sequence[Any], dense: int) -> list[tuple[int, int, View]]:
    """Where each of the values lies that were joined, whose indices have these places."""
    joints, start = [], 0
    for k, v in enumerate(wide.operands):
        size, first = extents[k] if extents else (1, ())
        rest = [
            (d, at[k])
            for _, d, at in sorted((-place, d, at) for (d, at), place in zip(wide.whole, places, strict=True))
            if any(at)
        ]
        stop = start + size * dense
        joints.append((start, stop, v.at((*first, *rest), (stop - start,))))
        start = stop
    return joints


def _one_value(axis: int, parts: Sequence[View]) -> View | None:
    """The value of which all parts are neighbours along an axis."""
    whole = parts[0]
    for v in parts[1:]:
        axes, others = whole.axes(), v.axes()
        if v.base != whole.base or axes is None or others is None or v.offset <= whole.offset:
            return None
        first, second = ([d for d in joined(some[axis]) if d[0] > 1] for some in (axes, others))
        axes[axis] = [(2, v.offset - whole.offset), *first]
        if first != second:  # the outermost digit goes on
            few, many = sorted([first, second], key=_size)
            axes[axis] = [(many[0][0] + (few[0][0] if few and few[1:] == many[1:] else 1), many[0][1]), *many[1:]]
        size = whole.shape[axis]
        view = whole.at(
            [x for a in axes for x in a], (*whole.shape[:axis], size + v.shape[axis], *whole.shape[axis + 1 :])
        )
        both = view.sliced(axis, 0, size), view.sliced(axis, size, v.shape[axis])
        if [x and x.bare() for x in both] != [whole.bare(), v.bare()]:
            return None
        whole = view
    return whole
