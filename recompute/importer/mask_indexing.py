"""Rules of what makes selections (NonZero, Compress) and of indexing with them."""

from __future__ import annotations

import math

import numpy as np

from .fold import Known
from .mask_selection import Marks, Selection
from .mask_work import Work

#: of ScatterND: what changes nothing
_NEUTRAL = {"add": 0, "mul": 1}


def nonzero(work: Work) -> None:
    """The coordinates of all entries, of which those count whose mask is true."""
    t, x, marks = work.type(0), work.name(0), work.marks(0)
    if not t.ndim:
        raise work.fail(0, "NonZero of a scalar gives one row or none")
    if marks:
        x = work.full("And", work.cast(x, "bool"), work.both(marks, t.ndim))
        x = work.full("Expand", x, work.constant(t.shape)) if work.importer.type_of(x).shape != t.shape else x
    label = work.labels() if marks else work.name(0)
    selection = work.selection(x, label.strip("'"))
    work.importer.known[work.node.output[0]] = Known(work.grid(t.shape), "folded")
    work.mark({1: selection}, space=marks)


def compress(work: Work) -> None:
    """The entries along an axis where a condition is true."""
    x, axis, marks = work.name(0), work.attributes.get("axis"), work.marks(0)
    if axis is None:
        work.unmarked(0, range(work.type(0).ndim), "Compress flattens it")
        x, axis = work.reshaped(x, (work.type(0).size,)), 0
    t = work.importer.type_of(x)
    axis, length = int(axis) % max(t.ndim, 1), work.type(1).size
    condition = work.name(1)
    mark, theirs = marks.get(axis), work.marks(1).get(0)
    if mark != theirs:
        raise work.fail(0 if mark else 1, "Compress chooses from it by a mask of other entries")
    if mark is not None:
        condition = work.full("And", condition, work.mask(mark))
    elif length < t.shape[axis]:
        x = work.full("Slice", x, *(work.constant([n]) for n in (0, length, axis)))
    selection = work.selection(condition, work.name(1))
    work.result(work.filled(x, {axis: selection}, 0), {**marks, axis: selection})


# -- taking -----------------------------------------------------------------------------------------------------------


def _index(work: Work, i: int) -> str:
    """Indices, with 0 where they do not count: computed ones may point anywhere there."""
    return work.name(i) if work.known(i) is not None else work.filled(work.name(i), work.marks(i), 0)


def _same_space(work: Work, inside: Marks, i: int) -> None:
    """ModelError where coordinates (input `i`) do not count as entries of input 0 do."""
    if inside != work.selected.spaces.get(work.name(i), {}):
        raise work.fail(
            0 if inside else i, f"{work.node.op_type} takes coordinates among all entries and among those for the same"
        )


def gather(work: Work) -> None:
    """Entries of one axis by number."""
    data, axis, k = work.marks(0), work.axis(), work.type(1).ndim
    _same_space(work, {0: data[axis]} if axis in data else {}, 1)
    marks = {axis + a: s for a, s in work.marks(1).items()}
    others = {a if a < axis else a + k - 1: s for a, s in data.items() if a != axis}
    indices = work.known(1)
    if k == 1 and indices is not None and np.array_equal(indices, np.arange(work.type(0).shape[axis])):
        taken = work.name(0)
    else:
        taken = work.full("Gather", work.name(0), _index(work, 1), axis=axis)
    work.result(_taken(work, taken, marks), {**marks, **others})


def _taken(work: Work, name: str, marks: Marks) -> str:
    """A value with zeros where its selection excludes it; integers of constant value stay as they are."""
    whole = work.known(name) is not None and work.importer.type_of(name).dtype in ("i32", "i64")
    return name if whole else work.filled(name, marks, 0)


def gather_nd(work: Work) -> None:
    """Parts by coordinates: where those are of all parts in order, nothing moves."""
    t, index = work.type(0), work.type(1)
    taken, inner = index.shape[-1], index.ndim - 1
    if work.attributes.get("batch_dims", 0) or inner in work.marks(1):
        raise work.fail(0 if work.marks(0) else 1, "GatherND takes batches of it")
    data = work.marks(0)
    _same_space(work, {a: s for a, s in data.items() if a < taken}, 1)
    marks = dict(work.marks(1))
    others = {a - taken + inner: s for a, s in data.items() if a >= taken}
    if _in_order(work, t.shape[:taken], 1):
        gathered = work.reshaped(work.name(0), (*index.shape[:-1], *t.shape[taken:]))
    else:
        gathered = work.full("GatherND", work.name(0), _index(work, 1))
    work.result(_taken(work, gathered, marks), {**marks, **others})


def _in_order(work: Work, dims: tuple[int, ...], i: int) -> bool:
    """Whether coordinates (input `i`) are all of these dimensions', in order."""
    indices = work.known(i)
    if indices is None or indices.size != math.prod(dims) * len(dims):
        return False
    grid = work.grid(dims, turned=True)
    return indices is grid or np.array_equal(indices.reshape(-1, len(dims)), grid)


def gather_elements(work: Work) -> None:
    """Elements by their number along one axis."""
    data, axis, t = work.marks(0), work.axis(), work.type(0)
    _same_space(work, {0: data[axis]} if axis in data else {}, 1)
    marks = dict(work.marks(1))
    for a, s in data.items():
        if a != axis and marks.get(a) != s:
            raise work.fail(0, "GatherElements joins it with indices of other entries")
    if any(a != axis and a not in data for a in marks):
        raise work.fail(1, "GatherElements joins it with all entries")
    indices = work.known(1)
    order = np.arange(t.shape[axis]).reshape([-1 if a == axis else 1 for a in range(t.ndim)])
    if indices is not None and indices.shape == t.shape and bool(np.all(indices == order)):
        taken = work.name(0)
    else:
        taken = work.full("GatherElements", work.name(0), _index(work, 1), axis=axis)
    work.result(_taken(work, taken, marks), marks)


def one_hot(work: Work) -> None:
    """OneHot: marks move behind the new axis."""
    axis = int(work.attributes.get("axis", -1)) % (work.type(0).ndim + 1)
    work.whole([_index(work, 0), *work.node.input[1:]])
    work.mark({a + (a >= axis): s for a, s in work.marks(0).items()})


# -- writing ----------------------------------------------------------------------------------------------------------


def scatter_nd(work: Work) -> None:
    """`x[mask] = v`: Where, if the coordinates are those of the mask; else what does not count is written elsewhere."""
    t, index = work.type(0), work.type(1)
    depth, how = index.shape[-1], work.attributes.get("reduction", "none")
    data, marks = work.marks(0), work.marks(1)
    if not marks and not work.marks(2):  # all is written, beside a selected axis
        raise work.fail(0, "ScatterND writes into it by numbers")
    if marks != {a: s for a, s in work.marks(2).items() if a < index.ndim - 1}:
        raise work.fail(1 if marks else 2, "ScatterND writes other entries there than another mask keeps")
    _same_space(work, {a: s for a, s in data.items() if a < depth}, 1)
    if any(a >= depth for a in data) or any(a >= index.ndim - 1 for a in work.marks(2)):
        raise work.fail(0, "ScatterND writes parts of it")
    if _in_order(work, t.shape[:depth], 1):
        _write_in_place(work, marks[0], how)
    elif how in _NEUTRAL:
        work.whole([work.name(0), _index(work, 1), work.filled(work.name(2), marks, _NEUTRAL[how])])
    else:
        _write_elsewhere(work, marks, how)
    work.mark(data)


def _write_in_place(work: Work, selection: Selection, how: str) -> None:
    t = work.type(0)
    x, v = work.name(0), work.reshaped(work.name(2), t.shape)
    names = {"add": "Add", "mul": "Mul", "min": "Min", "max": "Max"}
    if how in names:
        v = work.full(names[how], x, v)
    depth = work.type(1).shape[-1]
    mask = work.reshaped(work.mask(selection), (*t.shape[:depth], *[1] * (t.ndim - depth)))
    work.whole_as("Where", mask, v, x)


def _write_elsewhere(work: Work, marks: Marks, how: str) -> None:
    """ScatterND with a row more, into which goes what does not count."""
    t, index = work.type(0), work.type(1)
    depth, rows = index.shape[-1], math.prod(index.shape[:-1])
    parts, rest = math.prod(t.shape[:depth]), list(t.shape[depth:])
    at = ""
    for column in range(depth):
        c = work.full("Gather", work.name(1), work.constant(column), axis=-1)
        wrapped = work.full("Add", c, work.constant(t.shape[column]))
        c = work.full("Where", work.full("Less", c, work.constant(0)), wrapped, c)
        c = work.full("Mul", c, work.constant(math.prod(t.shape[column + 1 : depth])))
        at = work.full("Add", at, c) if at else c
    at = work.reshaped(work.filled(at, marks, parts), (rows, 1))
    x = work.reshaped(work.name(0), (parts, *rest))
    spare = work.cast(work.constant(np.zeros((1, *rest)), np.float32), t.dtype)
    x = work.full("Concat", x, spare, axis=0)
    x = work.full("ScatterND", x, at, work.reshaped(work.name(2), (rows, *rest)), reduction=how)
    x = work.full("Slice", x, *(work.constant([n]) for n in (0, parts, 0)))
    work.whole_as("Reshape", x, work.constant(t.shape), allowzero=1)


def scatter_elements(work: Work) -> None:
    """Along an axis: entries that do not count add nothing; beside it, all inputs share their selections."""
    marks, axis, how = work.marks(0), work.axis(), work.attributes.get("reduction", "none")
    written = {a: s for a, s in work.marks(1).items() if a != axis}
    summed = {a: s for a, s in work.marks(1).items() if a == axis}
    if axis in marks or written != marks or work.marks(2) != work.marks(1) or (summed and how not in _NEUTRAL):
        raise work.fail(next(i for i in range(3) if work.marks(i)), "ScatterElements writes by numbers along it")
    values = work.filled(work.name(2), summed, _NEUTRAL[how]) if summed else work.name(2)
    work.whole([work.name(0), _index(work, 1), values])
    work.mark(marks)
