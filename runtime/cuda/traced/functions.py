"""NumPy functions of symbolic arrays, and the module that replaces NumPy while tracing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....language.types import dtype_name
from .arrays import Recorder, Traced
from .kernels import accumulator
from .steps import CannotRecord, Iota, MatMul, PlaceOf, Put, Reduction, Scan, Sort, Sparse, Take, View, parts_of
from .ufuncs import FUNCTIONS, result

# -- ufuncs -----------------------------------------------------------------------------------------------------------

#: a ufunc's reduction → its name here
_REDUCED = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min", "logical_or": "any",
            "logical_and": "all"}  # fmt: skip
#: a shape, or strides
Dims = tuple[int, ...]


def call_ufunc(r: Recorder, ufunc: Any, method: str, inputs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
    """A ufunc's call, or one of its methods."""
    out = kw.pop("out", None)
    out = out[0] if isinstance(out, tuple) else out
    name = ufunc.__name__
    if method == "reduce" and name in _REDUCED:
        return reduction(r, _REDUCED[name], inputs[0], out=out, **{"axis": 0, **kw})
    if method == "accumulate" and name in ("add", "multiply"):
        return scan(r, "cumsum" if name == "add" else "cumprod", inputs[0], out=out, **{"axis": 0, **kw})
    if method == "at" and name in ("add", "multiply", "maximum", "minimum"):
        return put(inputs[0], inputs[1], inputs[2], name)
    if method != "__call__":
        raise CannotRecord(f"{name}.{method}")
    if name == "matmul":
        return matmul(r, inputs[0], inputs[1], out)
    if name not in FUNCTIONS:
        raise CannotRecord(name)
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


def _kind(x: Any) -> Any:
    return type(x) if type(x) in (int, float, bool) else np.asarray(x).dtype if not isinstance(x, Traced) else x.dtype


def matmul(r: Recorder, x: Any, y: Any, out: Any = None) -> Any:
    """Products of matrices, or of a vector and one."""
    if not isinstance(x, Traced) or not isinstance(y, Traced):
        found = sparse_product(r, x, y, out)
        if found is not None:
            return found
    x, y = r.traced(x), r.traced(y)
    a, b = x if x.ndim > 1 else x[None], y if y.ndim > 1 else y[:, None]
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    dtype = np.result_type(a.dtype, b.dtype)
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    wanted = [d for d, there in ((shape[-2], x.ndim > 1), (shape[-1], y.ndim > 1)) if there]
    target = r.temp((*shape[:-2], *wanted), dtype) if out is None else _need(out)
    whole = target.reshape(shape) if len(wanted) < 2 else target
    views = a.view_of(), b.view_of()
    if whole.dtype != dtype or any(r.hazard(whole.view_of(), v, aligned=False) for v in views):
        beside = r.temp(shape, dtype)
        r.add(MatMul(beside.view_of(), *views))
        r.copy(whole, beside)
    else:
        r.add(MatMul(whole.view_of(), *views))
    return target


def sparse_product(r: Recorder, x: Any, y: Any, out: Any) -> Any:
    """Products with a known matrix that has few elements in each row (interpolation); None where it is none."""
    if isinstance(x, Traced):  # from the right: its columns
        known, other, axis = np.asarray(y).T, x, x.ndim - 1
    else:
        known, other, axis = np.asarray(x), y, y.ndim - 2
    if known.ndim != 2 or other.ndim < 2 or known.dtype != other.dtype or known.shape[0] < 1 or not known.shape[1]:
        return None
    terms = max(int(np.count_nonzero(known, axis=1).max()), 1)
    if 2 * terms >= known.shape[1]:
        return None
    index = np.argsort(known == 0, axis=1, kind="stable")[:, :terms].astype(np.int32)
    weights = np.take_along_axis(known, index, axis=1)
    shape = tuple(known.shape[0] if i == axis else d for i, d in enumerate(other.shape))
    target = r.temp(shape, known.dtype) if out is None else _need(out)
    beside = target
    if target.dtype != known.dtype or r.hazard(target.view_of(), other.view_of(), aligned=False):
        beside = r.temp(shape, known.dtype)
    tables = r.constant(weights).view_of(), r.constant(index).view_of()
    r.add(Sparse(beside.view_of(), other.view_of(), *tables, axis))
    if beside is not target:
        r.copy(target, beside)
    return target


# -- reductions -------------------------------------------------------------------------------------------------------


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    given = range(ndim) if axis is None else (axis,) if isinstance(axis, (int, np.integer)) else axis
    return tuple(sorted(int(a) % ndim for a in given)) if ndim else ()


def reduction(
    r: Recorder, fn: str, x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, **kw: Any
) -> Traced:
    """sum, prod, max, min, any, all."""
    if any(kw.get(k, d) is not d for k, d in (("where", True),)) or kw.get("initial", 0) not in (0, None, np._NoValue):
        raise CannotRecord(f"{fn} with {', '.join(kw)}")
    x = r.traced(x)
    axes = _axes(axis, x.ndim)
    if dtype is None:
        with np.errstate(all="ignore"):
            dtype = getattr(np, fn)(np.ones(1, x.dtype)).dtype
            if out is not None and fn in ("sum", "prod") and not isinstance(out, np.ndarray):
                dtype = np.result_type(dtype, out.dtype) if out.dtype.kind == x.dtype.kind else dtype
    kind = dtype_name(dtype)
    kept = [1 if i in axes else d for i, d in enumerate(x.shape)]
    short = [d for i, d in enumerate(x.shape) if i not in axes]
    target = r.temp(kept if keepdims is True else short, dtype) if out is None else _need(out)
    place = target.reshape(short) if target.shape != tuple(short) else target
    if not axes:
        r.copy(place, x.astype(dtype, copy=False))
        return target
    beside = place
    if r.hazard(place.view_of(), x.view_of(), aligned=False):
        beside = r.temp(short, place.dtype)
    parts = parts_of(x.view_of(), axes, math.prod(short))
    partial = r.temp((math.prod(short), parts), accumulator(fn, kind)) if parts > 1 else None
    r.add(Reduction(fn, kind, beside.view_of(), x.view_of(), axes, None if partial is None else partial.view_of()))
    if beside is not place:
        r.copy(place, beside)
    return target


def mean(r: Recorder, x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False) -> Traced:
    """A sum, divided."""
    found = reduction(r, "sum", x, axis, dtype or (None if x.dtype.kind == "f" else np.float64), out, keepdims)
    r.map("divide", dtype_name(found.dtype), found, (found, x.size // max(found.size, 1)))
    return found


def place_of(r: Recorder, fn: str, x: Any, axis: Any = None, out: Any = None, *, keepdims: bool = False) -> Traced:
    """argmax, argmin."""
    x = x.reshape(-1) if axis is None else x
    at = 0 if axis is None else axis % x.ndim
    short = tuple(d for i, d in enumerate(x.shape) if i != at)
    kept = tuple(1 if i == at else d for i, d in enumerate(x.shape))
    target = r.temp(kept if keepdims is True else short, np.int64) if out is None else _need(out)
    place = target.reshape(short)
    beside = r.temp(short, place.dtype) if r.hazard(place.view_of(), x.view_of(), aligned=False) else place
    r.add(PlaceOf(fn, beside.view_of(), x.view_of(), at))
    if beside is not place:
        r.copy(place, beside)
    return target


def scan(r: Recorder, fn: str, x: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Traced:
    """cumsum, cumprod."""
    x = x.reshape(-1) if axis is None else x
    at = 0 if axis is None else axis % x.ndim
    if out is None:
        out = r.temp(x.shape, dtype or getattr(np, fn)(np.ones(1, x.dtype)).dtype)
    place = _need(out)
    if r.hazard(place.view_of(), x.view_of(), aligned=True) or (dtype is not None and np.dtype(dtype) != out.dtype):
        place = r.temp(x.shape, dtype or out.dtype)
    r.add(Scan(fn, place.view_of(), x.view_of(), at))
    if place is not out:
        r.copy(out, place)
    return _need(out)


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
    views = x.view_of(), index.view_of()
    beside = target
    if target.dtype != x.dtype or any(r.hazard(target.view_of(), v, aligned=False) for v in views):
        beside = r.temp(shape, x.dtype)
    o = beside.view_of()
    if o.size:
        strides = (o.strides, across, places)
        r.add(Take(o, *views, strides, x.shape[axis], views[0].strides[axis], _MODES[mode]))
    if beside is not target:
        r.copy(target, beside)
    return target


def take_along_axis(r: Recorder, x: Any, indices: Any, axis: int = -1) -> Traced:
    """Elements at places along an axis, others for each row."""
    x, index = r.traced(x), r.traced(indices)
    at = axis % x.ndim
    shape = np.broadcast_shapes(tuple(1 if i == at else d for i, d in enumerate(x.shape)), index.shape)
    v, i = x.view_of(), index.view_of()
    short = View(v.base, v.offset, (*v.shape[:at], 1, *v.shape[at + 1 :]), v.strides, v.dtype)
    return _taken(r, x, index, shape, at, "raise", short.broadcast(shape), i.broadcast(shape), None)


def put(target: Traced, indices: Any, values: Any, fn: str = "set", axis: int = 0) -> None:
    """target[..., indices[j], ...] = or += values[..., j, ...], in the order of j."""
    r = target.recorder
    index = r.traced(indices)
    if index.ndim != 1:
        raise CannotRecord("elements are changed by arrays of several dimensions")
    shape = (*target.shape[:axis], index.size, *target.shape[axis + 1 :])
    x = broadcast_to(r, r.traced(values, target.dtype), shape).astype(target.dtype, copy=False)
    if r.hazard(target.view_of(), x.view_of(), aligned=False):
        x = x.copy()
    r.add(Put(fn, target.view_of(), x.view_of(), index.view_of(), axis))


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


def clip(r: Recorder, x: Any, a_min: Any = None, a_max: Any = None, out: Any = None, **kw: Any) -> Traced:
    """Between two bounds, either of which may be missing."""
    if kw:
        raise CannotRecord("clip with more")
    target = r.temp(x.shape, x.dtype) if out is None else _need(out)
    kind = dtype_name(x.dtype)
    if a_min is not None and a_max is not None:
        r.map("clip", kind, target, (x, a_min, a_max))
    elif a_min is not None or a_max is not None:
        r.map("minimum" if a_min is None else "maximum", kind, target, (x, a_max if a_min is None else a_min))
    else:
        r.copy(target, x)
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


def concatenate(r: Recorder, arrays: Sequence[Any], axis: int = 0, out: Any = None) -> Traced:
    """One behind the other."""
    first = next(a for a in arrays if isinstance(a, Traced))
    at = axis % first.ndim
    total = sum(a.shape[at] for a in arrays)
    shape = (*first.shape[:at], total, *first.shape[at + 1 :])
    target = r.temp(shape, np.result_type(*(a.dtype for a in arrays))) if out is None else _need(out)
    start = 0
    for a in arrays:
        target[(slice(None),) * at + (slice(start, start + a.shape[at]),)] = a
        start += a.shape[at]
    return target


def broadcast_to(r: Recorder, x: Any, shape: Sequence[int]) -> Traced:
    """A view."""
    x = r.traced(x)
    return x.same(np.broadcast_to(x.layout, shape))


#: functions whose result is a view: NumPy finds its layout
_VIEWS = {"moveaxis", "swapaxes", "expand_dims", "squeeze", "transpose", "flip", "rollaxis", "atleast_1d", "diagonal"}
_DIRECT: dict[str, Callable[..., Any]] = {
    "mean": mean, "argsort": argsort, "take": take, "take_along_axis": take_along_axis, "where": where, "clip": clip,
    "copyto": copyto, "putmask": putmask, "stack": stack, "concatenate": concatenate, "broadcast_to": broadcast_to,
}  # fmt: skip


def call_function(r: Recorder, function: Any, args: Sequence[Any], kw: dict[str, Any]) -> Any:
    """One of NumPy's functions that are no ufuncs."""
    name = function.__name__
    name = {"amax": "max", "amin": "min"}.get(name, name)
    kw = {k: v for k, v in kw.items() if v is not np._NoValue}
    if name in _VIEWS:
        return args[0].same(function(args[0].layout, *args[1:], **kw))
    if name in _REDUCED.values():
        return reduction(r, name, *args, **kw)
    if name in ("argmax", "argmin"):
        return place_of(r, name, *args, **kw)
    if name in ("cumsum", "cumprod"):
        return scan(r, name, *args, **kw)
    if name in ("ndim", "shape", "size"):
        return getattr(args[0], name)
    if name == "may_share_memory":
        a, b = (x.view_of() if isinstance(x, Traced) else None for x in args[:2])
        return a is not None and b is not None and r.hazard(a, b, aligned=False)
    if name in ("zeros_like", "ones_like", "empty_like", "full_like"):
        return _like(r, name, *args, **kw)
    if name == "reshape":
        return args[0].reshape(*args[1:], **kw)
    if name in _DIRECT:
        return _DIRECT[name](r, *args, **kw)
    raise CannotRecord(f"numpy.{name}")


def _like(r: Recorder, name: str, x: Any, *value: Any, dtype: Any = None, **_: Any) -> Traced:
    made = r.temp(x.shape, dtype or x.dtype)
    if name != "empty_like":
        made.fill({"zeros_like": 0, "ones_like": 1}.get(name, value[0] if value else 0))
    return made


# -- the recorder, the module -----------------------------------------------------------------------------------------


class FunctionRecorder(Recorder):
    """Records NumPy's functions."""

    def ufunc(self, ufunc: Any, method: str, inputs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        return call_ufunc(self, ufunc, method, inputs, kw)

    def function(self, function: Any, args: Sequence[Any], kw: dict[str, Any]) -> Any:
        return call_function(self, function, args, kw)

    def put(self, target: Traced, indices: Any, values: Any) -> None:
        put(target, indices, values)


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

    def ones(self, shape: Any, dtype: Any = np.float64) -> Traced:
        """As NumPy's."""
        return self.full(shape, 1, dtype)

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

    def ascontiguousarray(self, x: Any) -> Any:
        """As NumPy's."""
        if not isinstance(x, Traced):
            return np.ascontiguousarray(x)
        return x if x.layout.flags.c_contiguous else x.copy()

    def where(self, *args: Any) -> Any:
        """As NumPy's, of three arguments."""
        return where(self._r, *args)

    def add_rows(self, target: Traced, rows: Traced, values: Traced, ufunc: str) -> None:
        """target[:, rows[j], :] += values[:, j, :], in the order of j."""
        put(target, rows, values, ufunc, 1)
