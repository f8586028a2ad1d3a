"""Rules of operators that move, join or part entries."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ModelError
from .fold import Known
from .mask_lengths import wanted
from .mask_selection import Extent, Marks, Selection
from .mask_work import Work, product

#: ends of slices that mean "to the end"
_END = 1 << 30


def transpose(work: Work) -> None:
    """Transpose: marks move with their axes."""
    perm = work.attributes.get("perm", range(work.type(0).ndim)[::-1])
    order = work.known(0)
    shape = next((s for (s, turned), grid in work.selected.grids.items() if grid is order and not turned), None)
    if shape is not None and tuple(perm) == (1, 0):
        work.importer.known[work.node.output[0]] = Known(work.grid(shape, turned=True), "folded")
    else:
        work.whole()
    work.mark({i: work.marks(0)[p] for i, p in enumerate(perm) if p in work.marks(0)}, space=_space(work))


def _space(work: Work) -> Marks | None:
    return work.selected.spaces.get(work.name(0))


def squeeze(work: Work) -> None:
    """Axes of 1 go; a selected axis is not one of them, whatever its full size."""
    t, marks = work.type(0), work.marks(0)
    given = work.need(1, "axes")
    axes = [int(a) % t.ndim for a in given.reshape(-1)] if given is not None else [
        a for a, d in enumerate(t.shape) if d == 1 and a not in marks
    ]  # fmt: skip
    work.unmarked(0, axes, "Squeeze takes its axis for one entry")
    work.whole([work.name(0), work.constant(axes)])
    work.mark({a - sum(g < a for g in axes): s for a, s in marks.items()}, space=_space(work))


def unsqueeze(work: Work) -> None:
    """Axes of 1 come."""
    axes = work.need(1, "axes")
    assert axes is not None
    ndim = work.type(0).ndim + axes.size
    new = {int(a) % ndim for a in axes.reshape(-1)}
    work.whole()
    left = [a for a in range(ndim) if a not in new]
    work.mark({left[a]: s for a, s in work.marks(0).items()}, space=_space(work))


def flatten(work: Work) -> None:
    """Flatten: to two dimensions, with the marks of joined axes."""
    t = work.type(0)
    axis = int(work.attributes.get("axis", 1))
    axis = axis % t.ndim if axis != t.ndim else axis
    dims = [work.extent(0, a) for a in range(t.ndim)]
    _reshape(work, [product(dims[:axis]), product(dims[axis:])])


def reshape(work: Work) -> None:
    """Reshape: dimensions are grouped so that each group has as many entries before as after."""
    to = wanted(work, 1)
    dims = [work.extent(0, a) for a in range(work.type(0).ndim)]
    if not work.attributes.get("allowzero", 0):
        to = [dims[i] if isinstance(d, int) and d == 0 else d for i, d in enumerate(to)]
    if any(isinstance(d, int) and d == -1 for d in to):
        rest = _over(product(dims), product(d for d in to if not (isinstance(d, int) and d == -1)))
        if rest is None:
            raise work.fail(0, "Reshape parts it by a number that is no divisor of it")
        to = [rest if isinstance(d, int) and d == -1 else d for d in to]
    _reshape(work, to)


def _over(total: Any, by: Any) -> Any:
    total, by = (e if isinstance(e, Extent) else Extent(e, ()) for e in (total, by))
    selection = total.over(by)
    return selection if selection is None or selection.masks else selection.factor


def _reshape(work: Work, to: list[Any]) -> None:
    dims = [work.extent(0, a) for a in range(work.type(0).ndim)]
    shape: list[int] = []
    marks: Marks = {}
    for before, after in _groups(work, dims, to):
        _regroup(work, before, [to[a] for a in after], shape, marks)
    work.whole_as("Reshape", work.name(0), work.constant(shape), allowzero=1)
    work.mark(marks, space=_space(work))


def _groups(work: Work, dims: list[Any], to: list[Any]) -> list[tuple[list[int], list[int]]]:
    """Axes before and after, the fewest together that have as many entries."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(dims) or j < len(to):
        before: list[int] = []
        after: list[int] = []
        left: Any = 1
        right: Any = 1
        while not (before or after) or left != right:
            if j < len(to) and (i == len(dims) or (right == 1 and left != 1) or _smaller(right, left)):
                right, after, j = right * to[j], [*after, j], j + 1
            elif i < len(dims):
                left, before, i = left * dims[i], [*before, i], i + 1
            else:
                raise work.fail(0, "Reshape gives it another number of entries")
        groups.append((before, after))
    return groups


def _smaller(a: Any, b: Any) -> bool:
    """Whether the product `a` must grow to become `b`."""
    return (a != b and _over(b, a) is not None) if b != 1 else False


def _regroup(work: Work, before: list[int], after: list[Any], shape: list[int], marks: Marks) -> None:
    """Appends the full dimensions and selections of one group."""
    selections = {a: work.marks(0)[a] for a in before if a in work.marks(0)}
    if not selections:
        shape += [int(d) for d in after]
        return
    sizes = {a: work.type(0).shape[a] for a in before}
    first = next(iter(selections))
    selection: Selection
    if len(selections) == 1 and all(sizes[a] == 1 for a in before if a < first):
        inner = product(sizes[a] for a in before if a > first)
        selection = selections[first].repeated(selections[first].repeat * inner)
    else:
        selection = _product(work, selections, before)
    places = [i for i, d in enumerate(after) if isinstance(d, Extent)]
    if len(places) != 1 or any(d != 1 for d in after[: places[0]]):
        raise work.fail(0, "Reshape parts it otherwise than at its end")
    inner = product(d for d in after if not isinstance(d, Extent))
    if selection.repeat % inner:
        raise work.fail(0, "Reshape parts it otherwise than at its end")
    selection = selection.repeated(selection.repeat // inner)
    for d in after:
        if isinstance(d, Extent):
            marks[len(shape)] = selection
        shape.append(selection.size if isinstance(d, Extent) else d)


def _product(work: Work, selections: Marks, before: list[int]) -> Selection:
    """The selection of an axis that several axes become."""
    at = {a: i for i, a in enumerate(before)}
    mask = work.both({at[a]: s for a, s in selections.items()}, len(before))
    mask = work.full("Expand", mask, work.constant([work.type(0).shape[a] for a in before]))
    return work.selection(mask, work.labels(), product(work.extent(0, a) for a in before))


def concat(work: Work) -> None:
    """Joins along an axis; where it is a selected one, masks are joined as well."""
    axis, marks = work.axis(0), dict(work.marks(0))
    inputs = range(len(work))
    for i in inputs:
        rest = {a: s for a, s in work.marks(i).items() if a != axis}
        if rest != {a: s for a, s in marks.items() if a != axis}:
            other = i if work.marks(i) else 0
            raise work.fail(other, "Concat joins it with what another mask keeps")
    if any(axis in work.marks(i) for i in inputs):
        parts = [
            work.mask(work.marks(i)[axis])
            if axis in work.marks(i)
            else work.constant(np.ones(work.type(i).shape[axis], bool), np.bool_)
            for i in inputs
        ]
        marks[axis] = work.selection(work.full("Concat", *parts, axis=0) if len(parts) > 1 else parts[0], work.labels())
    work.whole()
    work.mark(marks, space=_columns(work, axis))


def _columns(work: Work, axis: int) -> Marks:
    """The selections that each column of coordinates, joined along their last axis, counts along."""
    marks: Marks = {}
    before = 0
    for i in range(len(work)):
        space = work.selected.spaces.get(work.name(i), {})
        fits = axis == work.type(i).ndim - 1 and -1 not in space
        marks.update({before + a if fits else -1: s for a, s in space.items()})
        before += work.type(i).shape[axis]
    return marks


def split(work: Work) -> None:
    """Parts along an axis that is not a selected one."""
    work.unmarked(0, [work.axis()], "Split parts it")
    work.whole()
    for i in range(len(work.node.output)):
        work.mark(work.marks(0), i)


def slices(work: Work) -> None:
    """Slice: of other axes, or of all entries that count; the first n of a full axis, for the n that a mask keeps."""
    t, n = work.type(0), len(wanted(work, 1))
    starts, ends = wanted(work, 1), wanted(work, 2)
    axes = [int(a) % t.ndim for a in wanted(work, 3)] if work.name(3) else list(range(n))
    steps = wanted(work, 4) if work.name(4) else [1] * n
    marks, x, left = dict(work.marks(0)), work.name(0), []
    for k, axis in enumerate(axes):
        plain = starts[k] == 0 and steps[k] == 1
        if axis in marks:
            end = ends[k]
            whole = end == marks[axis].count if isinstance(end, Extent) else end >= min(t.shape[axis], _END)
            if not plain or not whole:
                raise work.fail(0, "Slice takes a part of it by number")
        elif isinstance(ends[k], Extent) and plain:
            x, marks[axis] = _first(work, x, axis, ends[k])
        elif isinstance(starts[k], Extent) or isinstance(ends[k], Extent):
            raise work.fail(0, "Slice counts from it")
        else:
            left.append((starts[k], ends[k], axis, steps[k]))
    if left:
        x = work.full("Slice", x, *(work.constant([p[i] for p in left]) for i in range(4)))
    work.result(x, marks)


def _first(work: Work, x: str, axis: int, extent: Extent) -> tuple[str, Selection]:
    """The first entries of a full axis, spread over the places that a mask keeps."""
    selection = work.selected.of_extent(extent)
    if selection is None:
        raise ModelError("its end is a product of the numbers of entries that several masks keep")
    ones = work.cast(work.mask(selection), "i64")
    places = work.full("Sub", work.full("CumSum", ones, work.constant(0)), work.constant(1))
    last = work.importer.type_of(x).shape[axis] - 1
    places = work.full("Clip", places, work.constant(0), work.constant(max(last, 0)))
    t = work.importer.type_of(x)
    gathered = work.full("Gather", x, places, axis=axis)
    return work.filled(gathered, {axis: selection}, np.zeros((), t.numpy)), selection


def eye(work: Work) -> None:
    """EyeLike: the diagonal of entries against themselves."""
    marks = work.marks(0)
    if marks.get(0) != marks.get(1) or work.attributes.get("k", 0):
        raise work.fail(0, "EyeLike wants the diagonal of entries against others")
    work.whole()
    work.mark(marks)


def tile(work: Work) -> None:
    """Repeats along axes that are not selected."""
    repeats = work.need(1, "repeats")
    assert repeats is not None
    work.unmarked(0, [a for a, r in enumerate(repeats.reshape(-1)) if r != 1], "Tile repeats it")
    work.whole()
    work.mark(work.marks(0))
