"""Symbolic arrays: NumPy functions of them are recorded as steps (see steps.py).

A `Traced` array has a layout: a NumPy array of its shape and strides over memory that is never touched, so that
slices, transposes and broadcasting are NumPy's own.  Nothing has values: numerics that ask for them cannot be recorded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.lib.stride_tricks import as_strided

from ....language.types import DTYPES, TensorType, dtype_name
from ..device.kernel import C_TYPES
from .steps import CannotRecord, Clear, Map, Move, Number, Step, View

#: steps that a recording has at most
STEPS = 2000


class Base:
    """A buffer: `key` says of which operand.  Temporaries go back to where they came from when nobody holds them."""

    def __init__(self, recorder: Recorder, key: tuple[str, int], t: TensorType) -> None:
        self.recorder, self.key, self.type = recorder, key, t
        strides = [math.prod(t.shape[i + 1 :]) * t.numpy.itemsize for i in range(t.ndim)]
        self.layout = _strided(np.empty(1, t.numpy), t.shape, strides)
        self.start = self.layout.__array_interface__["data"][0]

    def __del__(self) -> None:
        if self.key[0] == "temp":
            self.recorder.free.setdefault(self.type.nbytes, []).append(self.key[1])


def _strided(memory: np.ndarray, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """Small floats have no name that `as_strided` knows."""
    return as_strided(memory.view(f"u{memory.itemsize}"), shape, strides).view(memory.dtype)


class Recorder(ABC):
    """What one operator's numerics do.  `beside`: output → inputs whose memory it may have.

    Its arrays hand it NumPy's functions, which are in traced_functions.py.
    """

    def __init__(self, beside: dict[tuple[str, int], set[tuple[str, int]]]) -> None:
        self.beside = beside
        self.steps: list[Step] = []
        self.temps: list[TensorType] = []
        self.free: dict[int, list[int]] = {}

    def add(self, step: Step) -> None:
        """The next step.  CannotRecord where there are too many."""
        if len(self.steps) >= STEPS:
            raise CannotRecord(f"more than {STEPS} steps")
        self.steps.append(step)

    def array(self, key: tuple[str, int], t: TensorType) -> Traced:
        """All of a buffer."""
        base = Base(self, key, t)
        return Traced(base, base.layout)

    def temp(self, shape: Sequence[int], dtype: Any) -> Traced:
        """Room for a result."""
        t = TensorType(dtype_name(dtype), tuple(int(d) for d in shape))
        free = self.free.get(t.nbytes)
        if free:
            return self.array(("temp", free.pop()), t)
        self.temps.append(t)
        return self.array(("temp", len(self.temps) - 1), t)

    @abstractmethod
    def ufunc(self, ufunc: Any, method: str, inputs: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        """A ufunc's call, or one of its methods."""

    @abstractmethod
    def function(self, function: Any, args: Sequence[Any], kw: dict[str, Any]) -> Any:
        """Another of NumPy's functions."""

    # -- operands -------------------------------------------------------------------------------------------------

    def operand(self, x: Any, kind: str | None = None) -> View | Number:
        """An array's view, or a number: Python's own take the element type `kind`."""
        if isinstance(x, Traced):
            return x.view_of()
        if type(x) in (int, float, bool):
            assert kind is not None
            return Number(DTYPES[kind].type(x).item() if kind not in ("f16", "bf16") else float(x), kind)
        a = np.asarray(x)
        if a.dtype.kind in "OSUcMm":
            raise CannotRecord(f"{a.dtype} elements")
        first = a.flat[0] if a.size else 0
        if not a.size or (a == first).all() or (a.size == 1):
            kind = dtype_name(a.dtype)
            return Number(float(first) if kind in ("f16", "bf16") else np.asarray(first, a.dtype).item(), kind)
        raise CannotRecord("an array of constants")

    def traced(self, x: Any) -> Traced:
        """An array that is one of these.  CannotRecord where it is NumPy's."""
        if not isinstance(x, Traced):
            raise CannotRecord("an array of constants")
        return x

    # -- overlaps -------------------------------------------------------------------------------------------------

    def same_memory(self, a: View, b: View) -> bool:
        """Whether two views can be of one buffer."""
        one, two = a.base, b.base
        return one == two or two in self.beside.get(one, ()) or one in self.beside.get(two, ())

    def hazard(self, out: View, x: View, *, aligned: bool) -> bool:
        """Whether a step must not write `out` while it reads x; `aligned`: it reads an element where it writes it."""
        if not out.size or not x.size or not self.same_memory(out, x):
            return False
        (low, high), (first, last) = out.span(), x.span()
        if high <= first or last <= low:
            return False
        same = out.offset == x.offset and x.broadcast(out.shape) == View.broadcast(out, out.shape)
        return not (aligned and same and out.dtype == x.dtype)

    # -- elements -------------------------------------------------------------------------------------------------

    def map(self, name: str, kind: str, out: Traced, operands: Sequence[Any], mask: Any = None) -> None:
        """out[mask] = function(operands)."""
        target = out.view_of()
        given = [self.operand(x, "bool" if name == "where" and i == 0 else kind) for i, x in enumerate(operands)]
        where = None if mask is None else self.traced(mask).view_of()
        for v in (*given, target):
            if v.dtype not in C_TYPES:
                raise CannotRecord(f"elements of type {v.dtype}")
        views = [v for v in (*given, where) if isinstance(v, View)]
        if any(self.hazard(target, v, aligned=True) for v in views):
            beside = self.temp(out.shape, out.dtype)
            self.add(Map(name, kind, beside.view_of(), tuple(given)))
            self.copy(out, beside, mask)
            return
        self.add(Map(name, kind, target, tuple(given), where))

    def copy(self, out: Traced, x: Any, mask: Any = None) -> None:
        """out[mask] = x, in out's element type."""
        target, kind = out.view_of(), dtype_name(out.dtype)
        given = self.operand(x, kind)
        if isinstance(given, Number) and not given.value and mask is None and target.dense:
            self.add(Clear(target)) if not _negative_zero(given.value) else self.map("positive", kind, out, [x])
            return
        if isinstance(given, Number) or given.dtype != kind:
            self.map("positive", kind, out, [x], mask)
            return
        where = None if mask is None else self.traced(mask).view_of()
        if any(self.hazard(target, v, aligned=True) for v in (given, where) if v is not None):
            beside = self.temp(x.shape, out.dtype)
            self.add(Move(beside.view_of(), given))
            self.copy(out, beside, mask)
            return
        self.add(Move(target, given, where, not self.same_memory(target, given)))


def _negative_zero(x: Any) -> bool:
    return isinstance(x, float) and math.copysign(1, x) < 0


def _method(name: str) -> Any:
    """NumPy's function of that name as a method."""
    return lambda x, *args, **kw: getattr(np, name)(x, *args, **kw)


class Traced(NDArrayOperatorsMixin):
    """An array without values."""

    __slots__ = ("base", "layout")
    __array_priority__ = 1000

    def __init__(self, base: Base, layout: np.ndarray) -> None:
        self.base, self.layout = base, layout

    # -- as an array ----------------------------------------------------------------------------------------------

    @property
    def recorder(self) -> Recorder:
        """Who records."""
        return self.base.recorder

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        return self.layout.shape

    @property
    def dtype(self) -> np.dtype:
        """NumPy's element type."""
        return self.layout.dtype

    ndim = property(lambda self: self.layout.ndim)
    size = property(lambda self: self.layout.size)
    itemsize = property(lambda self: self.layout.itemsize)
    nbytes = property(lambda self: self.layout.nbytes)
    flags = property(lambda self: self.layout.flags)
    T = property(lambda self: self.same(self.layout.T))

    def same(self, layout: np.ndarray) -> Traced:
        """Another layout of the same buffer."""
        return Traced(self.base, layout)

    def view_of(self) -> View:
        """What a step reads or writes."""
        item = self.layout.itemsize
        strides = tuple(s // item for s in self.layout.strides)
        return View(self.base.key, self._offset(), self.layout.shape, strides, dtype_name(self.layout.dtype))

    def _offset(self) -> int:
        return self.layout.__array_interface__["data"][0] - self.base.start

    def __len__(self) -> int:
        return len(self.layout)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def _no_values(self, *_: Any, **__: Any) -> Any:
        raise CannotRecord("the numerics look at values")

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __array__ = item = tolist = nonzero = _no_values
    tobytes = __contains__ = sort = partition = dump = _no_values

    # -- views ----------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Traced:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, (Traced, np.ndarray, list, range)) for k in keys):
            raise CannotRecord("elements are chosen by arrays")
        if not any(k is Ellipsis for k in keys):
            keys = (*keys, Ellipsis)
        return self.same(self.layout[keys])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.recorder.copy(self[key], value)

    def reshape(self, *shape: Any, order: str = "C", copy: Any = None) -> Traced:
        """A view where there can be one, else a copy."""
        wanted = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
        wanted = [int(d) for d in wanted]
        if -1 in wanted:
            wanted[wanted.index(-1)] = self.size // max(-math.prod(wanted), 1)
        assert order == "C" and math.prod(wanted) == self.size, f"{self.shape} is not {wanted}"
        strides = _reshaped(self.shape, self.layout.strides, wanted, self.itemsize)
        if strides is None:
            return self.copy().reshape(wanted)
        return self.same(_strided(self.layout, wanted, strides))

    def view(self, dtype: Any) -> Traced:
        """The same bytes as another element type."""
        return self.same(self.layout.view(dtype))

    def transpose(self, *axes: Any) -> Traced:
        """A view."""
        return self.same(self.layout.transpose(*axes))

    # -- copies ---------------------------------------------------------------------------------------------------

    def astype(self, dtype: Any, copy: bool = True, **_: Any) -> Traced:
        """A copy with another element type."""
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        made = self.recorder.temp(self.shape, np.dtype(dtype))
        self.recorder.copy(made, self)
        return made

    def copy(self, order: str = "C") -> Traced:
        """A temporary with the same elements."""
        return self.astype(self.dtype)

    def fill(self, value: Any) -> None:
        """The same number everywhere."""
        self.recorder.copy(self, value if isinstance(value, Traced) else np.asarray(value, self.dtype)[()])

    sum = _method("sum")
    clip, argmax, cumsum, take = _method("clip"), _method("argmax"), _method("cumsum"), _method("take")

    # -- NumPy's protocols ----------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kw: Any) -> Any:
        return self.recorder.ufunc(ufunc, method, inputs, kw)

    def __array_function__(self, function: Any, types: Any, args: Any, kw: Any) -> Any:
        return self.recorder.function(function, args, kw)


def _reshaped(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int], item: int) -> tuple[int, ...] | None:
    """Strides in bytes of another shape over the same elements; None where there are none."""
    if math.prod(shape) == 0:
        return tuple(math.prod(wanted[i + 1 :]) * item for i in range(len(wanted)))
    dims: list[list[int]] = []  # elements that lie at equal distances: how many, and how far apart
    for d, s in zip(shape, strides, strict=True):
        if d == 1:
            continue
        if dims and dims[-1][1] == d * s:
            dims[-1] = [dims[-1][0] * d, s]
        else:
            dims.append([d, s])
    found = []
    for d in reversed(wanted):
        if d == 1:
            found.append(item)
            continue
        if not dims or dims[-1][0] % d:
            return None
        found.append(dims[-1][1])
        dims[-1] = [dims[-1][0] // d, dims[-1][1] * d]
        if dims[-1][0] == 1:
            dims.pop()
    return tuple(reversed(found))
