"""Operators given by a formula over rows alone: numerics, kernels for every place and gradient follow from `expand`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..language.element import Expr, nodes
from ..language.op import Op, OperatorBuilder
from ..language.rows import LENGTH, REDUCTIONS, RowFormula, formula_over_rows
from ..language.types import DTYPES, NumPy, Operands, TensorType, Types, Value, need
from .array_steps import FUNCTIONS
from .tiles import TILE

#: a buffer: its element type, and the dimensions along which it varies
Kind = tuple[str, frozenset[int]]


class Rowwise(Op, abstract=True):
    """An operator on floats whose `expand` is its formula over rows (see language/rows.py).

    The numerics walk over tiles of the outermost dimension, in temporaries that are declared; halves are computed in
    float32 and rounded once.  An output without elements in its rows is 0.
    """

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """Floats of one type with an axis at least, and an output of that type."""
        x = need(inputs[0])
        if not x.is_float or not x.ndim or any(t != x for t in inputs):
            raise self.fail("takes floats of one type and shape, with an axis at least", *inputs)
        return (x,)

    def row_formula(self, b: OperatorBuilder, *inputs: Value | None) -> tuple[Value | None, ...] | None:
        """`expand`."""
        return self.expand(b, *inputs)

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """The temporaries of one tile."""
        found = _formula(self, tuple(ins), tuple(outs))
        if found is None:
            return ()
        kinds = _steps(found, self.inplace).temporaries
        return tuple(TensorType(dtype, _shape(found, dims, _tile(found))) for dtype, dims in kinds)

    def compute(self, xp: NumPy, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """The formula, tile by tile: all outputs of a tile are there before one is written."""
        types = [tuple(None if a is None else TensorType.of(a) for a in arrays) for arrays in (ins, outs)]
        found = _formula(self, *types)
        if found is None or found.columns:
            if any(a is not None and a.size and b.size for a in ins for b in outs if b is not None):
                raise self.fail("has no formula over rows for these operands", *types[0])
            for out in outs:
                if out is not None:
                    out[...] = 0
            return
        steps, tile = _steps(found, self.inplace), _tile(found)
        given = [_view(a, found, d) for a, d in zip(ins, found.operands, strict=True)]
        results = [_view(a, found, d) for a, d in zip(outs, found.results, strict=True)]
        for start in range(0, found.sizes[0], tile):
            part = slice(start, start + tile)
            rows = min(tile, found.sizes[0] - start)
            buffers = [b[:rows] if b.shape[0] > 1 else b for b in scratch]
            here: Any = None if steps.output is None else _part(results[0], part)
            if steps.output is not None:
                buffers.insert(steps.output, here)
            values = steps.run(xp, [_part(a, part) for a in given], buffers, found)
            last = start + tile >= found.sizes[0]
            # what may be in an input's place comes last: another output may be that input
            for i in sorted(range(len(results)), key=lambda i: i == self.inplace_output):
                out, x = results[i], found.outputs[i]
                if out is None or x is None or (i == 0 and here is not None):
                    continue
                if last or 0 in need(found.results[i]):
                    _part(out, part)[...] = values[id(x)]


def _formula(op: Op, ins: Types, outs: Types) -> RowFormula | None:
    found = formula_over_rows(op, ins, outs)
    return None if found is None else _prepared(found)


def _tile(found: RowFormula) -> int:
    """Elements of the outermost dimension that are computed at a time."""
    if 0 in found.row:
        return found.sizes[0]
    return max(1, min(found.sizes[0], TILE // int(np.prod(found.sizes[1:], dtype=np.int64))))


def _shape(found: RowFormula, dims: Sequence[int] | frozenset[int], tile: int) -> tuple[int, ...]:
    sizes = (tile, *found.sizes[1:])
    return tuple(n if d in dims else 1 for d, n in enumerate(sizes))


def _view(a: Any, found: RowFormula, dims: Sequence[int] | None) -> Any:
    return None if a is None or dims is None else a.reshape(_shape(found, dims, found.sizes[0]))


def _part(a: Any, part: slice) -> Any:
    return a if a is None or a.shape[0] == 1 else a[part]


@dataclass(frozen=True)
class _Steps:
    """Nodes in order, each with the number of its buffer (None: none is needed); `output`: the buffer that is the first
    output itself."""

    order: tuple[tuple[Expr, int | None], ...]
    buffers: tuple[Kind, ...]
    output: int | None

    @property
    def temporaries(self) -> list[Kind]:
        """The buffers but for the output."""
        return [kind for i, kind in enumerate(self.buffers) if i != self.output]

    def run(self, xp: NumPy, inputs: Sequence[Any], buffers: Sequence[Any], found: RowFormula) -> dict[int, Any]:
        """The values of all nodes that are roots or still needed, by id."""
        axes = tuple(sorted(found.row))
        values: dict[int, Any] = {}
        for x, number in self.order:
            if number is None:
                values[id(x)] = inputs[x.value] if x.fn == "input" else _number(x, found)
                continue
            out, args = buffers[number], [values[id(a)] for a in x.args]
            if x.fn == "sum":
                xp.sum(args[0], axis=axes, dtype=out.dtype, keepdims=True, out=out)
            elif x.fn == "largest":
                xp.max(args[0], axis=axes, keepdims=True, out=out)
            elif x.fn == "where":
                xp.copyto(out, args[2])
                xp.copyto(out, args[1], where=args[0])
            elif x.fn == "cast":
                xp.copyto(out, args[0], casting="unsafe")
            else:
                getattr(xp, FUNCTIONS[x.fn])(*args, out=out)
            values[id(x)] = out
        return values


def _number(x: Expr, found: RowFormula) -> Any:
    if x.fn == LENGTH:
        return DTYPES[x.dtype].type(np.prod([found.sizes[d] for d in found.row], dtype=np.float64))
    return DTYPES[x.dtype].type(x.value)


def _rounded_sums(roots: Sequence[Expr]) -> list[Expr]:
    """The expressions with a sum that is only rounded in the type to which it is."""
    order = list(nodes(roots))
    readers = Counter(id(a) for x in order for a in x.args)
    done: dict[int, Expr] = {}
    for x in order:
        args = tuple(done[id(a)] for a in x.args)
        if x.fn == "cast" and args[0].fn == "sum" and readers[id(x.args[0])] == 1 and x.dtype in ("f32", "f64"):
            done[id(x)] = Expr("sum", args[0].args, x.dtype, args[0].value)
        else:
            done[id(x)] = Expr(x.fn, args, x.dtype, x.value)
    return [done[id(r)] for r in roots]


@functools.lru_cache(maxsize=1 << 10)
def _prepared(found: RowFormula) -> RowFormula:
    """The formula that the numerics run."""
    made = iter(_rounded_sums([x for x in found.outputs if x is not None]))
    return replace(found, outputs=tuple(None if x is None else next(made) for x in found.outputs))


@functools.lru_cache(maxsize=1 << 10)
def _steps(found: RowFormula, inplace: tuple[int, ...]) -> _Steps:
    """Buffers by liveness; one is written over where its value ends, but by what reads twice."""
    roots = [x for x in found.outputs if x is not None]
    order = list(nodes(roots))
    last = {id(a): i for i, x in enumerate(order) for a in x.args} | {id(r): len(order) for r in roots}
    dims: dict[int, frozenset[int]] = {}
    place: dict[int, int] = {}
    buffers: list[Kind] = []
    begun: list[int] = []
    free: list[int] = []
    for i, x in enumerate(order):
        own = frozenset(found.operands[x.value] or ()) if x.fn == "input" else frozenset()
        dims[id(x)] = frozenset().union(own, *(dims[id(a)] for a in x.args))
        if x.fn in REDUCTIONS:
            dims[id(x)] -= found.row
        if x.fn in ("input", "constant", LENGTH):
            continue
        ending = list(dict.fromkeys(place[id(a)] for a in x.args if id(a) in place and last[id(a)] == i))
        kind, twice = (x.dtype, dims[id(x)]), x.fn in ("where", *REDUCTIONS)
        free += [] if twice else ending
        number = next((b for b in free if buffers[b] == kind), None)
        if number is None:
            number = len(buffers)
            buffers.append(kind)
            begun.append(i)
        else:
            free.remove(number)
        free += ending if twice else []
        place[id(x)] = number
    # an output in an input's place may be written once nothing reads that any more
    read = max((last[id(x)] for x in order if x.fn == "input" and x.value in inplace), default=-1)
    whole = (roots[0].dtype, frozenset(found.results[0] or ()))
    mine = place.get(id(roots[0]))
    good = mine is not None and found.outputs[0] is not None and buffers[mine] == whole and begun[mine] >= read
    good = good and (0 in whole[1] or _tile(found) == found.sizes[0])
    return _Steps(tuple((x, place.get(id(x))) for x in order), tuple(buffers), mine if good else None)
