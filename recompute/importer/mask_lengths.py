"""Rules of shape arithmetic with lengths that depend on data, and of what makes tensors of such shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ModelError
from ..language.types import dtype_from_onnx
from .mask_selection import Extent, Marks
from .mask_work import Work, product


def shape(work: Work) -> None:
    """Shape and Size of a value with selections."""
    sizes = [work.extent(0, a) for a in range(work.type(0).ndim)]
    if work.node.op_type == "Size":
        return work.lengths(_array(product(sizes)))
    start, end = work.attributes.get("start", 0), work.attributes.get("end", len(sizes))
    return work.lengths(_array(sizes[start:end]))


def _array(extents: Any) -> np.ndarray:
    """Lengths as an array of objects."""
    if not isinstance(extents, list):
        return np.array(extents, object)
    array = np.empty(len(extents), object)
    array[:] = extents
    return array


def arithmetic(work: Work) -> bool:
    """Computes a shape from shapes; False where it is a number that the step computes."""
    rule = _ARITHMETIC.get(work.node.op_type)
    ins = [_lengths(work, n) for n in work.node.input if n]
    if rule is None or any(a is None for a in ins):
        return False
    result = rule(work, *ins)
    if result is None:
        return False
    work.lengths(np.asarray(result, object))
    return True


def _lengths(work: Work, name: str) -> np.ndarray | None:
    if name in work.selected.lengths:
        return work.selected.lengths[name]
    lengths = work.known(name)
    return lengths if lengths is not None and lengths.dtype.kind in "biu" else None


def _equal(work: Work, a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    """Whether lengths are equal; one that depends on data equals no negative number, what else is not known."""
    a, b = np.broadcast_arrays(a, b)
    result = np.zeros(a.shape, bool)
    for at in np.ndindex(a.shape):
        x, y = a[at], b[at]
        if isinstance(x, Extent) != isinstance(y, Extent) and (y if isinstance(x, Extent) else x) >= 0:
            return None
        result[at] = x == y
    work.importer.known[work.node.output[0]] = work.importer.constant(result)
    return result


def _slice(work: Work, x: np.ndarray, *more: np.ndarray) -> np.ndarray | None:
    if x.ndim != 1 or any(isinstance(e, Extent) for m in more for e in m.reshape(-1)):
        return None
    start, end, step = (int(m.reshape(-1)[0]) for m in (*more[:2], more[3] if len(more) > 3 else np.ones(1, int)))
    return x[slice(start, None if step < 0 and end < -x.size else end, step)]


def _each(work: Work, *ins: np.ndarray) -> np.ndarray | None:
    """Max, Min, Add and Sub of lengths, where the result is one of them or a plain number."""
    parts = np.broadcast_arrays(*ins)
    array = np.empty(parts[0].shape, object)
    for at in np.ndindex(array.shape):
        result = _one(work.node.op_type, [p[at] for p in parts])
        if result is None:
            return None
        array[at] = result
    return array


def _one(op_type: str, lengths: list[Any]) -> Any:
    """A length is 0 or more; what else it is is not known."""
    extents, plain = (
        [e for e in lengths if isinstance(e, Extent)],
        [int(e) for e in lengths if not isinstance(e, Extent)],
    )
    if op_type in ("Max", "Min"):
        best = max if op_type == "Max" else min
        if not extents or (plain and op_type == "Min" and min(plain) <= 0):
            return best(plain)
        return extents[0] if all(e == extents[0] for e in extents) and max(plain, default=0) <= 0 else None
    if not extents:
        return plain[0] + plain[1] if op_type == "Add" else plain[0] - plain[1]
    if plain == [0] and (op_type == "Add" or lengths[1] == 0):
        return extents[0]
    return 0 if op_type == "Sub" and lengths[0] == lengths[1] else None


def _axes(more: tuple[np.ndarray, ...]) -> tuple[int, ...] | None:
    return tuple(int(a) for a in more[0].reshape(-1)) if more else None


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Identity": lambda work, x: x,
    "Cast": lambda work, x: x if dtype_from_onnx(work.attributes.get("to", 0)) in ("i32", "i64") else None,
    "Gather": lambda work, x, at: np.take(x, at.astype(np.int64), axis=0) if at.dtype != object else None,
    "Slice": _slice,
    "Squeeze": lambda work, x, *axes: np.squeeze(x, _axes(axes)),
    "Unsqueeze": lambda work, x, axes: np.expand_dims(x, _axes((axes,)) or ()),
    "Concat": lambda work, *parts: np.concatenate([np.asarray(p, object) for p in parts]),
    "Reshape": lambda work, x, to: x.reshape(tuple(int(d) for d in to)),
    "Mul": lambda work, a, b: np.asarray(np.asarray(a, object) * np.asarray(b, object), object),
    "ReduceProd": lambda work, x, *axes: np.array(product(x.reshape(-1).tolist()), object),
    "Where": lambda work, condition, a, b: np.where(condition, a, b) if condition.dtype == bool else None,
    **dict.fromkeys(("Max", "Min", "Add", "Sub"), _each),
}


def number(work: Work, name: str) -> str:
    """A shape as a value of the program."""
    if name in work.importer.env:
        return name
    lengths = work.selected.lengths[name]
    parts = [work.reshaped(work.count(e), (1,)) for e in lengths.reshape(-1)]
    whole = work.full("Concat", *parts, axis=0) if len(parts) != 1 else parts[0]
    return work.reshaped(whole, lengths.shape)


def compare(work: Work) -> bool:
    """Equal of shapes, where the answer is known."""
    ins = [_lengths(work, n) for n in work.node.input]
    return all(a is not None for a in ins) and _equal(work, *ins) is not None  # type: ignore[arg-type]


def counted(work: Work) -> None:
    """ReduceSum of a mask: a number of the program that may also be a length."""
    out = work.node.output[0]
    work.whole()
    if out not in work.importer.env:
        return
    value = work.importer.env[out]
    mask = work.importer.numbering.counted(value)
    if mask is None:
        return
    base, times = work.importer.numbering.base(mask)
    masks = work.selected.masks.get(work.importer.numbering.number(base))
    if masks is not None:
        length = np.empty(value.shape, object)
        length[...] = masks.repeated(times).count
        work.selected.lengths[out] = length


# -- tensors of such shapes -------------------------------------------------------------------------------------------


def wanted(work: Work, i: int) -> list[Any]:
    """The shape that input `i` asks for, extents in it."""
    extents = _lengths(work, work.name(i))
    if extents is None:
        raise work.fail(0, f"the shape '{work.name(i)}' is computed from data")
    return [e if isinstance(e, Extent) else int(e) for e in extents.reshape(-1).tolist()]


def full_shape(work: Work, lengths: list[Any]) -> tuple[list[int], Marks]:
    """Full dimensions, and selections, of a shape."""
    dims: list[int] = []
    marks: Marks = {}
    for axis, e in enumerate(lengths):
        if isinstance(e, Extent):
            selection = work.selected.of_extent(e)
            if selection is None:
                raise ModelError(
                    f"dimension {axis} of its shape is a product of the numbers of entries of {len(e.masks)} masks"
                )
            marks[axis], e = selection, selection.size
        dims.append(e)
    return dims, marks


def fill(work: Work) -> None:
    """ConstantOfShape."""
    dims, marks = full_shape(work, wanted(work, 0))
    work.whole([work.constant(dims)])
    work.mark(marks)


def expand(work: Work) -> None:
    """Expand, by a shape with extents or of a value with selections."""
    t, to = work.type(0), wanted(work, 1)
    ndim = max(t.ndim, len(to))
    target = [1] * (ndim - len(to)) + to
    for axis in range(t.ndim):
        at = axis + ndim - t.ndim
        extent = work.extent(0, axis)
        if target[at] == 1 or (isinstance(extent, Extent) and extent == target[at]):
            target[at] = extent
        elif extent != 1 and extent != target[at]:
            raise work.fail(0, f"Expand asks for {_show(target[at])} in dimension {at} of {_show(extent)}")
    dims, marks = full_shape(work, target)
    for axis, s in work.marks(0).items():
        marks[axis + ndim - t.ndim] = s
    work.whole([work.name(0), work.constant(dims)])
    work.mark(marks, space=work.selected.spaces.get(work.name(0)))


def _show(length: Any) -> str:
    return "a number of entries" if isinstance(length, Extent) else str(length)


def counting(work: Work) -> None:
    """Range(0, n, 1) for a length that depends on data: the places of the entries that count."""
    start, step = work.known(0), work.known(2)
    if work.name(1) in work.selected.lengths and start is not None and step is not None and not start and step == 1:
        dims, marks = full_shape(work, [work.selected.lengths[work.name(1)].reshape(())[()]])
        name = work.constant(np.arange(dims[0]), work.importer.type_of(work.name(0)).numpy)
        work.result(name, marks, marks)
        return
    raise work.fail(1, "Range counts to it from elsewhere than 0, or not by 1")
