"""Values that are known before a step runs, evaluated a few rows at a time, and the masks among them that are bands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...language.axes import piece, shared
from ...language.factors import Place
from ...language.ir import Block, Operator, Value
from ...language.kernels import EXACT, bits_are_portable

#: most elements of a value of which all is evaluated at once, and of the rows that are
_WHOLE, _ROWS = 1 << 22, 1 << 20
#: scores below 0 by as much weigh nothing: their exponentials are 0 beside any other
FAR_BELOW = -1e9
_FAR_BELOW_F16 = -6.5e4
#: operators in which processors differ by the signs of zeros alone, which `number` drops and no mask tells
_ALL_BUT_ZEROS = ("Max", "Min", "Clip", "Relu")


@dataclass(frozen=True)
class Band:
    """A mask by which query i sees the keys from i + first to i + last (None: all on that side)."""

    first: int | None = None
    last: int | None = None


class Known:
    """The constants of a block, the buffers that nothing updates, and what is computed from them alone.

    `data`: the contents of buffers, by name; those without are not known.
    """

    def __init__(self, block: Block, data: Mapping[str, Any]) -> None:
        self.block, self.data = block, data
        self.producers = block.producers()
        self.constants = {c.value.name: c for c in block.constants}
        updated = {v.name for o in block.operators if o.op.updates for v in o.writes()}
        self.buffers = {v.name for v in block.buffers if v.name in data} - updated
        self.names = {*self.constants, *self.buffers}
        for o in block.operators:
            plain = not (o.op.random or o.op.updates or o.op.copies or _by_machine(o))
            if plain and all(v.name in self.names for v in o.reads()):
                self.names.update(v.name for v in o.writes())
        self._fed = self._from({v.name for v in block.inputs})
        self._learned = self._from({v.name for v in block.parameters})
        self._bands: dict[tuple[str, bool, int, int], Band | None] = {}

    def __contains__(self, v: Value | None) -> bool:
        return v is not None and v.name in self.names

    def _from(self, names: set[str]) -> set[str]:
        """These names, and those of all that is computed from them."""
        for o in self.block.operators:
            if any(v.name in names for v in o.reads()):
                names.update(v.name for v in o.writes())
        return names

    def fed(self, v: Value) -> bool:
        """Whether a value depends on the step's inputs."""
        return v.name in self._fed

    def learned(self, v: Value) -> bool:
        """Whether a value depends on parameters."""
        return v.name in self._learned

    def least(self, v: Value) -> float:
        """The least number of a known value; -inf where it cannot be evaluated."""
        if v.ndim < 2:
            array = self._whole(v)
            return -math.inf if array is None else float(array.min(initial=math.inf))
        parts = [-math.inf if x is None else float(x.min(initial=math.inf)) for _, x in self.rows(v)]
        return min(parts, default=math.inf)

    def number(self, v: Value | None) -> float | None:
        """The one number that a known float is; None for others."""
        if v is None or v.name not in self.names or not v.type.is_float or v.type.size != 1:
            return None
        array = self._whole(v)
        return None if array is None else float(array.reshape(())) or 0.0

    def band(self, v: Value, allowed: bool, queries: int, keys: int) -> Band | None:
        """The band that a mask [..., queries, keys] is, the same for all leading axes; None: it is none.

        Booleans say which keys are seen (`allowed`) or hidden; numbers are 0 where a key is seen and far below 0 where
        not.  Every query must see a key: a mask that hides all weighs all alike, a band none.
        """
        key = (v.name, allowed, queries, keys)
        if key not in self._bands:
            self._bands[key] = self._band(v, allowed, queries, keys)
        return self._bands[key]

    def _band(self, v: Value, allowed: bool, queries: int, keys: int) -> Band | None:
        if v not in self or not v.type.size or v.ndim < 1:
            return None
        if v.shape[-2:] != (queries, keys):  # broadcast along queries or keys: nothing is hidden, or it is no band
            array = self._whole(v)
            return Band() if array is not None and bool(np.all(_seen(array, allowed))) else None
        edges = _Edges(keys)
        for start, rows in self.rows(v):
            seen = None if rows is None else _seen(rows.reshape(-1, *rows.shape[-2:]), allowed)
            if seen is None or not (seen == seen[:1]).all() or not edges.add(start, seen[0]):
                return None
        return edges.band()

    def rows(self, v: Value) -> Iterator[tuple[int, Any]]:
        """The contents of a known value, some of its second to last axis at a time, each with the first one's number.

        None where they cannot be evaluated.
        """
        axis = v.ndim - 2
        total = v.shape[axis]
        count = max(1, _ROWS // max(v.type.size // total, 1))
        for start in range(0, total, count):
            array = self._part(v, (Place(axis), total, start, min(start + count, total)), {})
            yield start, array
            if array is None:
                return

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _whole(self, v: Value) -> Any:
        return self._part(v, None, {}) if v.type.size <= _WHOLE else None

    def _part(self, v: Value, cut: tuple[Place, int, int, int] | None, memo: dict) -> Any:
        """All of a value, or the slice `cut` of it (place, size, start, stop); None where that takes too much."""
        key = (v.name, cut)
        if key not in memo:
            memo[key] = self._made(v, cut, memo)
        return memo[key]

    def _made(self, v: Value, cut: tuple[Place, int, int, int] | None, memo: dict) -> Any:
        if v.name in self.constants or v.name in self.buffers:
            whole = self.constants[v.name].numpy() if v.name in self.constants else np.asarray(self.data[v.name])
            return whole if cut is None else cut[0].cut(whole, *cut[1:])
        o = self.block.operators[self.producers[v.name]]
        if cut is not None and (array := self._sliced(o, v, cut, memo)) is not None:
            return array
        if v.type.size > _WHOLE:
            return None
        if cut is not None:
            whole = self._part(v, None, memo)
            return None if whole is None else cut[0].cut(whole, *cut[1:])
        ins = [None if x is None else self._part(x, None, memo) for x in o.inputs]
        return _run(o.op, ins, o, [None if x is None else x.type for x in o.outputs], v)

    def _sliced(self, o: Operator, v: Value, cut: tuple[Place, int, int, int], memo: dict) -> Any:
        """A slice of a result from slices of the operands; None where the operator cannot be sliced so."""
        place, size, start, stop = cut
        types = [None if x is None else x.type for x in o.inputs], [None if x is None else x.type for x in o.outputs]
        at = next(i for i, x in enumerate(o.outputs) if x is not None and x.name == v.name)
        factors = (f for f in shared(o.op, *types) if not f.whole and f.size == size and f.outputs[at] == place)
        f = next(factors, None)
        if f is None or f.shares or any(isinstance(p, str) for p in f.outputs):
            return None
        op, _, outputs = piece(o.op, f, start, stop - start, *types)
        ins = [
            None if x is None else self._part(x, None if p is None else (p, size, start, stop), memo)
            for x, p in zip(o.inputs, f.inputs, strict=True)
        ]
        return _run(op, ins, o, list(outputs), v)


def _by_machine(o: Operator) -> bool:
    """Whether this process may not depend on what NumPy computes here, as processors differ in it."""
    if not bits_are_portable() or o.op.name in EXACT or o.op.name in _ALL_BUT_ZEROS:
        return False
    before, after = (any(v.type.is_float for v in vs) for vs in (o.reads(), o.writes()))
    return (before and not after) if o.op.name == "Cast" else before or after


def _run(op: Any, ins: list[Any], o: Operator, types: list[Any], wanted: Value) -> Any:
    """One result of an operator's own numerics; None where an input is missing."""
    if any(a is None and v is not None for a, v in zip(ins, o.inputs, strict=True)):
        return None
    arrays = [None if a is None else np.asarray(a, order="C") for a in ins]
    outs = [None if t is None else np.empty(t.shape, t.numpy) for t in types]
    in_types = [
        None if v is None or a is None else v.type.with_shape(a.shape) for v, a in zip(o.inputs, arrays, strict=True)
    ]
    room = [np.empty(t.shape, t.numpy) for t in op.scratch(in_types, types)]
    with np.errstate(all="ignore"):
        op.compute(arrays, outs, room)
    return next(a for a, v in zip(outs, o.outputs, strict=True) if v is not None and v.name == wanted.name)


def _seen(mask: Any, allowed: bool) -> Any:
    """Which keys a mask lets through; None where its numbers are neither 0 nor far below."""
    if mask.dtype == bool:
        return mask if allowed else ~mask
    seen = mask == 0
    low = _FAR_BELOW_F16 if mask.dtype == np.float16 else FAR_BELOW
    return seen if bool((seen | (mask <= low)).all()) else None


class _Edges:
    """The first and last keys that queries see, row by row, and the band that they may be."""

    def __init__(self, keys: int) -> None:
        self.keys = keys
        self.firsts: set[int] = set()
        self.lasts: set[int] = set()
        self.least = 0  # -(number of the last query that sees key 0)
        self.most = 0  # how far the last key is ahead of the first query that sees it
        self.begun = self.ended = False

    def add(self, start: int, seen: Any) -> bool:
        """Whether each query sees one run of keys, and whether the edges can be those of a band."""
        number = start + np.arange(len(seen))
        count = seen.sum(axis=1)
        low = seen.argmax(axis=1)
        high = self.keys - 1 - seen[:, ::-1].argmax(axis=1)
        if not ((count > 0) & (high - low + 1 == count)).all():
            return False
        inner = low > 0
        self.firsts.update(np.unique((low - number)[inner]).tolist()[:2])
        if not inner.all():
            self.least, self.begun = -int(number[~inner].max()), True
        inner = high < self.keys - 1
        self.lasts.update(np.unique((high - number)[inner]).tolist()[:2])
        if not inner.all() and not self.ended:
            self.most, self.ended = self.keys - 1 - int(number[~inner].min()), True
        return len(self.firsts) < 2 and len(self.lasts) < 2

    def band(self) -> Band | None:
        """The band; None where a query at a border does not see what it would show."""
        first = next(iter(self.firsts), None)
        last = next(iter(self.lasts), None)
        if first is not None and self.begun and first > self.least:
            return None
        if last is not None and self.ended and last < self.most:
            return None
        return Band(first, last)
