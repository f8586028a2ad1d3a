"""NumPy functions of symbolic arrays, and the module that replaces NumPy while tracing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....language.types import dtype_name
from .arrays import Recorder, Traced
from .kernels import accumulator
from .steps import CannotRecord, Iota, PlaceOf, Put, Reduction, Scan, Sort, Take, View, parts_of
from .ufuncs import FUNCTIONS, result

# -- ufuncs -----------------------------------------------------------------------------------------------------------

#: a shape, or strides
Dims = tuple[int, ...]


def call_ufunc(r: Recorder, ufunc: Any, method: str, inputs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
    """A ufunc's call."""
    out = kw.pop("out", None)
    out = out[0] if isinstance(out, tuple) else out
    name = ufunc.__name__
    if method != "__call__" or name not in FUNCTIONS:
        raise CannotRecord(f"{name}, {method}")
    mask, dtype = kw.get("where", True), kw.get("dtype")
    shape = np.broadcast_shapes(*(np.shape(x) for x in inputs)) if out is None else out.shape
    kind, made = result(name, tuple(_kind(x) for x in inputs))
    if dtype is not None:
        kind = made = dtype_name(dtype)
    target = r.temp(shape, made) if out is None else out
    r.map(name, kind, _need(target), inputs, None if mask is True else mask)
    return target


def _need(out: Any) -> Traced:
    if not isinstance(out, Traced):
        raise CannotRecord("a result goes into an array of the host")
    return out


def _apart(r: Recorder, out: Traced, *read: Traced, aligned: bool = False) -> View:
    """Where a step writes.  CannotRecord where it may read that, too."""
    target = out.view_of()
    if any(r.hazard(target, x.view_of(), aligned=aligned) for x in read):
        raise CannotRecord("a result takes the place of what is read")
    return target


def _kind(x: Any) -> Any:
    return type(x) if type(x) in (int, float, bool) else np.asarray(x).dtype if not isinstance(x, Traced) else x.dtype


# -- reductions -------------------------------------------------------------------------------------------------------


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    given = range(ndim) if axis is None else (axis,) if isinstance(axis, (int, np.integer)) else axis
    return tuple(sorted(int(a) % ndim for a in given)) if ndim else ()


def total(r: Recorder, x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False) -> Traced:
    """numpy.sum."""
    x = r.traced(x)
    axes = _axes(axis, x.ndim)
    if dtype is None:
        dtype = np.sum(np.ones(1, x.dtype)).dtype
        if out is not None:
            dtype = np.result_type(dtype, out.dtype) if out.dtype.kind == x.dtype.kind else dtype
    kind = dtype_name(dtype)
    kept = [1 if i in axes else d for i, d in enumerate(x.shape)]
    short = [d for i, d in enumerate(x.shape) if i not in axes]
    target = r.temp(kept if keepdims is True else short, dtype) if out is None else _need(out)
    place = target.reshape(short) if target.shape != tuple(short) else target
    if not axes:
        r.copy(place, x.astype(dtype, copy=False))
        return target
    parts = parts_of(x.view_of(), axes, math.prod(short))
    partial = r.temp((math.prod(short), parts), accumulator(kind)) if parts > 1 else None
    r.add(Reduction(kind, _apart(r, place, x), x.view_of(), axes, None if partial is None else partial.view_of()))
    return target


def argmax(r: Recorder, x: Any, axis: int, out: Any = None, *, keepdims: bool = False) -> Traced:
    """numpy.argmax along an axis."""
    at = axis % x.ndim
    short = tuple(d for i, d in enumerate(x.shape) if i != at)
    kept = tuple(1 if i == at else d for i, d in enumerate(x.shape))
    target = r.temp(kept if keepdims is True else short, np.int64) if out is None else _need(out)
    r.add(PlaceOf(_apart(r, target.reshape(short), x), x.view_of(), at))
    return target


def scan(r: Recorder, fn: str, x: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Traced:
    """cumsum, cumprod along an axis."""
    place = _need(out)
    if (dtype is not None and np.dtype(dtype) != place.dtype) or (axis is None and x.ndim > 1):
        raise CannotRecord(f"{fn} of all axes, or with other elements than its result's")
    r.add(Scan(fn, _apart(r, place, x, aligned=True), x.view_of(), (axis or 0) % x.ndim))
    return place


def argsort(r: Recorder, x: Any, axis: int = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Traced:
    """Stable, whatever is asked for."""
    made = r.temp(x.shape, np.int64)
    r.add(Sort(made.view_of(), x.view_of(), axis % x.ndim))
    return made


# -- by index ---------------------------------------------------------------------------------------------------------

_MODES = {"raise": 0, "clip": 1, "wrap": 2}


def take(r: Recorder, x: Any, indices: Any, axis: int | None = None, out: Any = None, mode: str = "raise") -> Traced:
    """Elements at places along an axis.  Those out of range: the last ones where NumPy raises an error."""
    x = r.traced(x)
    x = x.reshape(-1) if axis is None else x
    at = 0 if axis is None else axis % x.ndim
    index = r.traced(indices)
    shape = (*x.shape[:at], *index.shape, *x.shape[at + 1 :])
    v, i = x.view_of(), index.view_of()
    across = (v.strides[:at], (0,) * index.ndim, v.strides[at + 1 :])
    places = ((0,) * at, i.strides, (0,) * (x.ndim - at - 1))
    return _taken(r, x, index, shape, at, mode, tuple(sum(across, ())), tuple(sum(places, ())), out)


def _taken(
    r: Recorder, x: Traced, index: Traced, shape: Dims, axis: int, mode: str, across: Dims, places: Dims, out: Any
) -> Traced:
    target = r.temp(shape, x.dtype) if out is None else _need(out)
    views, o = (x.view_of(), index.view_of()), _apart(r, target, x, index)
    if target.dtype != x.dtype:
        raise CannotRecord("take into other elements")
    if o.size:
        strides = (o.strides, across, places)
        r.add(Take(o, *views, strides, x.shape[axis], views[0].strides[axis], _MODES[mode]))
    return target


def take_along_axis(r: Recorder, x: Any, indices: Any, axis: int = -1) -> Traced:
    """Elements at places along an axis, others for each row."""
    x, index = r.traced(x), r.traced(indices)
    at = axis % x.ndim
    shape = np.broadcast_shapes(tuple(1 if i == at else d for i, d in enumerate(x.shape)), index.shape)
    v, i = x.view_of(), index.view_of()
    short = View(v.base, v.offset, (*v.shape[:at], 1, *v.shape[at + 1 :]), v.strides, v.dtype)
    return _taken(r, x, index, shape, at, "raise", short.broadcast(shape), i.broadcast(shape), None)


def add_rows(target: Traced, index: Traced, values: Traced, axis: int) -> None:
    """target[..., index[j], ...] += values[..., j, ...], in the order of j."""
    r = target.recorder
    shape = (*target.shape[:axis], index.size, *target.shape[axis + 1 :])
    x = broadcast_to(r, r.traced(values), shape).astype(target.dtype, copy=False)
    r.add(Put(_apart(r, target, x), x.view_of(), index.view_of(), axis))


# -- others -----------------------------------------------------------------------------------------------------------


def where(r: Recorder, condition: Any, x: Any, y: Any) -> Traced:
    """x or y."""
    shape = np.broadcast_shapes(*(np.shape(v) for v in (condition, x, y)))
    plain = [v for v in (x, y) if type(v) not in (int, float, bool)]
    dtype = np.result_type(*(_sample(v) for v in (x, y))) if plain else np.result_type(type(x), type(y))
    made = r.temp(shape, dtype)
    r.map("where", dtype_name(dtype), made, (condition, x, y))
    return made


def _sample(x: Any) -> Any:
    return x if type(x) in (int, float, bool) else np.empty(0, x.dtype)


def clip(r: Recorder, x: Any, a_min: Any, a_max: Any, out: Any = None) -> Traced:
    """Between two bounds."""
    target = r.temp(x.shape, x.dtype) if out is None else _need(out)
    r.map("clip", dtype_name(x.dtype), target, (x, a_min, a_max))
    return target


def copyto(r: Recorder, dst: Any, src: Any, casting: str = "same_kind", where: Any = True) -> None:
    """A copy, of what a mask says."""
    r.copy(_need(dst), src, None if where is True else where)


def putmask(r: Recorder, a: Any, mask: Any, values: Any) -> None:
    """A copy where a mask says so."""
    if np.ndim(values) and np.shape(values) != a.shape and np.size(values) != 1:
        raise CannotRecord("putmask repeats its values")
    r.copy(_need(a), values if np.shape(values) == a.shape or not np.ndim(values) else values.reshape(()), mask)


def stack(r: Recorder, arrays: Sequence[Any], axis: int = 0, out: Any = None) -> Traced:
    """A new dimension."""
    first = next(a for a in arrays if isinstance(a, Traced))
    at = axis % (first.ndim + 1)
    shape = (*first.shape[:at], len(arrays), *first.shape[at:])
    target = r.temp(shape, np.result_type(*(a.dtype for a in arrays))) if out is None else _need(out)
    for i, a in enumerate(arrays):
        target[(slice(None),) * at + (i,)] = a
    return target


def broadcast_to(r: Recorder, x: Any, shape: Sequence[int]) -> Traced:
    """A view."""
    x = r.traced(x)
    return x.same(np.broadcast_to(x.layout, shape))


#: functions whose result is a view: NumPy finds its layout
_VIEWS = {"moveaxis", "swapaxes", "expand_dims", "squeeze", "transpose", "flip", "rollaxis", "atleast_1d", "diagonal"}
_DIRECT: dict[str, Callable[..., Any]] = {
    "sum": total, "argmax": argmax, "argsort": argsort, "take": take, "take_along_axis": take_along_axis,
    "where": where, "clip": clip, "copyto": copyto, "putmask": putmask, "stack": stack, "broadcast_to": broadcast_to,
}  # fmt: skip


def call_function(r: Recorder, function: Any, args: Sequence[Any], kw: dict[str, Any]) -> Any:
    """One of NumPy's functions that are no ufuncs."""
    name = function.__name__
    kw = {k: v for k, v in kw.items() if v is not np._NoValue}
    if name in _VIEWS:
        return args[0].same(function(args[0].layout, *args[1:], **kw))
    if name in ("cumsum", "cumprod"):
        return scan(r, name, *args, **kw)
    if name in ("ndim", "shape", "size"):
        return getattr(args[0], name)
    if name in _DIRECT:
        return _DIRECT[name](r, *args, **kw)
    raise CannotRecord(f"numpy.{name}")


# -- the recorder, the module -----------------------------------------------------------------------------------------


class FunctionRecorder(Recorder):
    """Records NumPy's functions."""

    def ufunc(self, ufunc: Any, method: str, inputs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        return call_ufunc(self, ufunc, method, inputs, kw)

    def function(self, function: Any, args: Sequence[Any], kw: dict[str, Any]) -> Any:
        return call_function(self, function, args, kw)


class Module:
    """Stands where NumPy does: what makes arrays is recorded, all else is NumPy's and comes back through protocols."""

    __name__ = "recorded"

    def __init__(self, recorder: Recorder) -> None:
        self._r = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def zeros(self, shape: Any, dtype: Any = np.float64) -> Traced:
        """As NumPy's."""
        return self.full(shape, 0, dtype)

    def full(self, shape: Any, value: float, dtype: Any = None) -> Traced:
        """As NumPy's."""
        made = self.empty(shape, dtype or np.asarray(value).dtype)
        made.fill(value)
        return made

    def empty(self, shape: Any, dtype: Any = np.float64) -> Traced:
        """As NumPy's."""
        return self._r.temp((int(shape),) if isinstance(shape, (int, np.integer)) else shape, np.dtype(dtype))

    def arange(self, *args: float, dtype: Any = None) -> Traced:
        """As NumPy's."""
        start, stop, by = {1: (0, *args, 1), 2: (*args, 1)}.get(len(args), args)
        made = self._r.temp((max(math.ceil((stop - start) / by), 0),), dtype or np.result_type(*map(type, args)))
        self._r.add(Iota(made.view_of(), start, by, (1,)))
        return made

    def asarray(self, x: Any, dtype: Any = None) -> Any:
        """As NumPy's."""
        if isinstance(x, Traced):
            return x if dtype is None else x.astype(dtype, copy=False)
        return np.asarray(x, dtype)

    array = asarray

    def ascontiguousarray(self, x: Traced) -> Traced:
        """As NumPy's."""
        return x if x.layout.flags.c_contiguous else x.copy()

    def where(self, *args: Any) -> Any:
        """As NumPy's, of three arguments."""
        return where(self._r, *args)

    def add_rows(self, target: Traced, rows: Traced, values: Traced, ufunc: str) -> None:
        """target[:, rows[j], :] += values[:, j, :], in the order of j."""
        if ufunc != "add":
            raise CannotRecord(f"{ufunc} at places")
        add_rows(target, rows, values, 1)
