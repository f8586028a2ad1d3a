"""Operators without a kernel of their own, run as what they expand into: each part by its family, temporaries as
workspace.  `DEVICE` has expansions for devices, beside those of the operators themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...language.builder import Builder
from ...language.ir import Operator, Value, leading_to
from ...language.op import Op
from ...language.types import TensorType, Types
from ...ops.common import normal_axis
from ...ops.reduction.extremes import repeated
from ...ops.tiles import wide
from .code.strided import copy
from .device.kernel import Buffer, Call
from .families import FAMILIES, Buffers, Family

#: runs of a vector of constants, at most
_BENDS = 64


class _Builder(Builder):
    """Constants are filled in; vectors of whole numbers are made of runs with equal steps."""

    def constant(self, value: object, like: Any) -> Value:
        array, dtype = np.asarray(value), like if isinstance(like, str) else like.dtype
        if array.size == 1:
            return self.fill(array.item(), TensorType(dtype, array.shape))
        bends = np.flatnonzero(np.diff(array, 2)) + 2 if array.ndim == 1 and array.dtype.kind == "i" else None
        if bends is None or len(bends) > _BENDS:
            raise TypeRuleError("an array of constants has no kernel")
        runs = []
        for run in np.split(array, bends):
            step = self.fill(int(run[1] - run[0]) if len(run) > 1 else 0, TensorType(dtype, (len(run),)))
            runs.append(
                self.Add(self.CumSum(step, axis=0, exclusive=1), self.fill(int(run[0]), TensorType(dtype, (1,))))
            )
        return self.Concat(*runs, axis=0) if len(runs) > 1 else runs[0]


def _hardmax(b: Any, op: Any, x: Value) -> Any:
    axis = normal_axis(op.axis, x.ndim, op)
    return b.OneHot(b.ArgMax(x, axis=axis, keepdims=0), depth=x.shape[axis], axis=axis, dtype=x.dtype)


def _other_products(b: Any, op: Any, x: Value, dy: Value) -> Any:
    """The product of what comes before each element times that of what comes behind it."""
    axes = repeated(x, dy)
    order = [*(i for i in range(x.ndim) if i not in axes), *axes]
    n = int(np.prod([x.shape[i] for i in axes], dtype=int))
    x, dy = (b.Cast(v, to=wide(v.dtype)) if wide(v.dtype) != v.dtype else v for v in (x, dy))
    moved = b.Transpose(x, perm=tuple(order)) if x.ndim else x
    rows = b.Reshape(moved, shape=(x.size // max(n, 1), n))
    others = b.Mul(*(b.CumProd(rows, axis=1, exclusive=1, reverse=r) for r in (0, 1)))
    back = b.Reshape(others, shape=moved.shape)
    product = b.Mul(b.Transpose(back, perm=tuple(np.argsort(order).tolist())) if x.ndim else back, dy)
    return product


#: (builder, operator, inputs) → the output
DEVICE: dict[str, Callable[..., Any]] = {"Hardmax": _hardmax, "ReduceProdGrad": _other_products}


@dataclass(frozen=True)
class Part:
    """An operator of an expansion, who runs it, and where its operands and workspace are: ("in", i), or ("room", i)
    and an offset in bytes."""

    op: Operator
    family: Family
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    scratch: tuple[Any, ...]


@dataclass(frozen=True)
class Parts:
    """Parts in order, types of the rooms, and where each output is (None: absent)."""

    parts: tuple[Part, ...]
    rooms: tuple[TensorType, ...]
    outputs: tuple[Any, ...]


class _Rooms:
    """Temporaries, each in the first room of its size in bytes that is free by then.

    `ends`: until which part each room is taken.
    """

    def __init__(self) -> None:
        self.types: list[TensorType] = []
        self.ends: list[int] = []

    def take(self, t: TensorType, begin: int, end: int) -> Any:
        fits = (r for r, have in enumerate(self.types) if self.ends[r] < begin and have.nbytes == t.nbytes)
        room = next(fits, len(self.types))
        if room == len(self.types):
            self.types.append(t)
            self.ends.append(end)
        self.ends[room] = end
        return "room", room, 0, t

    def view(self, source: Any, offset: int, t: TensorType, end: int) -> Any:
        kind, number, start, _ = source
        if kind == "room":
            self.ends[number] = max(self.ends[number], end)
        return kind, number, start + offset, t


def _operators(op: Op, ins: Types, outs: Types) -> tuple[list[Operator], list[Value | None]] | None:
    """The expansion's operators that outputs need, over inputs x0, x1, ..., and the outputs; None without one."""
    b = _Builder()
    inputs = [None if t is None else Value(b.names.take(f"x{i}"), t) for i, t in enumerate(ins)]
    try:
        results = DEVICE[op.name](b, op, *inputs) if op.name in DEVICE else op.expand(b, *inputs)
        if isinstance(results, Value) and (t := outs[0]) is not None and results.dtype != t.dtype:
            results = b.Cast(results, to=t.dtype)
    except TypeRuleError:
        return None
    if results is None:
        return None
    values = (results,) if isinstance(results, Value) else results
    wanted = [v if t is not None else None for v, t in zip(values, outs, strict=False)]
    return leading_to(b.operators, wanted), wanted


@functools.lru_cache(maxsize=1 << 12)
def parts_of(op: Op, ins: Types, outs: Types) -> Parts | None:
    """The parts of an operator for these types; None where it has no expansion, or one of a part without a kernel."""
    found = None if op.on_host or op.updates else _operators(op, ins, outs)
    if found is None:
        return None
    operators, wanted = found
    last = {v.name: i for i, o in enumerate(operators) for v in o.reads()}
    last.update((v.name, len(operators)) for v in wanted if v is not None)
    rooms, places = _Rooms(), dict[str, Any]((f"x{i}", ("in", i, 0, t)) for i, t in enumerate(ins))
    parts = []
    for i, o in enumerate(operators):
        family = family_of(o)
        if family is None:
            return None
        views = o.op.views(*o.types)
        source = places[o.inputs[0].name] if views and o.inputs[0] is not None else None
        for k, v in enumerate(o.outputs):
            at = views[k] if k < len(views) else None
            if v is not None:
                end = last.get(v.name, i)
                seen = None if source is None or at is None else rooms.view(source, at, v.type, end)
                places[v.name] = seen or rooms.take(v.type, i, end)
        if not views or None in views:
            scratch = tuple(rooms.take(t, i, i) for t in family.scratch(o))
            read, written = (tuple(v and places[v.name] for v in vs) for vs in (o.inputs, o.outputs))
            parts.append(Part(o, family, read, written, scratch))
    outputs = tuple(None if v is None else places[v.name] for v in wanted)
    return Parts(tuple(parts), tuple(rooms.types), outputs)


class Expanded(Family):
    """See the module's text."""

    def accepts(self, op: Operator) -> bool:
        return parts_of(op.op, *op.types) is not None

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        return _parts(op).rooms

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Part by part; then copies, as an output may have an input's memory."""
        parts, calls = _parts(op), list[Call]()

        def at(place: Any) -> Buffer | None:
            if place is None:
                return None
            kind, i, offset, t = place
            whole = ins[i] if kind == "in" else scratch[i]
            return None if whole is None else Buffer(whole.address + offset, t)

        for p in parts.parts:
            read, written = ([*map(at, places), *(None,) * 8] for places in (p.ins, p.outs))
            calls += p.family.bind(p.op, read, written, [b for s in p.scratch if (b := at(s)) is not None])
        for place, out in zip(parts.outputs, outs, strict=False):
            if out is not None and (target := at(place)) is not None:
                calls += copy(out, target)
        return calls


class Nothing(Family):
    """Operators whose outputs have no elements."""

    def accepts(self, op: Operator) -> bool:
        return not any(v.size for v in op.writes())

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        return ()


_OTHERS: tuple[Family, ...] = (Nothing(), Expanded())


def _parts(op: Operator) -> Parts:
    parts = parts_of(op.op, *op.types)
    assert parts is not None
    return parts


def family_of(op: Operator) -> Family | None:
    """The family that runs an operator; None where there is none."""
    return FAMILIES.find(op) or next((f for f in _OTHERS if f.accepts(op)), None)
