"""Operators given by a formula over rows alone: numerics, kernels for every place and gradient follow from `expand`."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..language.element import Expr, nodes
from ..language.op import Op, OperatorBuilder
from ..language.rows import LENGTH, REDUCTIONS, RowFormula, formula_over_rows, unrounded
from ..language.types import DTYPES, Array, Operands, TensorType, Types, Value, dtype_name, need
from .array_steps import FUNCTIONS
from .tiles import TILE

#: a buffer: its element type, and the dimensions along which it varies
Kind = tuple[str, frozenset[int]]


class OverRows(Op, abstract=True):
    """An operator on floats whose numerics follow from its formula over rows (see language/rows.py), `expand`.

    They walk over tiles of the outermost dimension, in temporaries that are declared; halves are computed in float32
    and rounded once, sums over rows too.  Outputs of a first input without elements are 0.
    """

    def row_formula(self, b: OperatorBuilder, *inputs: Value | None) -> tuple[Value | None, ...] | None:
        """`expand`."""
        return self.expand(b, *inputs)

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """The temporaries of one tile, and sums over rows that are rounded in the end."""
        steps = _steps_of(self, tuple(ins), tuple(outs))
        if steps is None:
            return ()
        tiles = tuple(TensorType(dtype, _shape(steps.found, dims, steps.tile)) for dtype, dims in steps.temporaries)
        sums = [(need(steps.found.outputs[i]).dtype, steps.results[i]) for i in steps.added(self, outs)]
        return (*tiles, *(TensorType(dtype, need(shape)) for dtype, shape in sums))

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """The formula, tile by tile: all outputs of a tile are there before one is written."""
        kinds = tuple(None if a is None else (a.shape, a.dtype) for a in (*ins, *outs))
        steps, added = _of_arrays(self, kinds, len(ins))
        if steps is None:
            for out in outs:
                if out is not None:
                    out[...] = 0
            return
        formula, tile, whole = steps.found, steps.tile, steps.tile >= steps.found.sizes[0]
        operands = [None if a is None else a.reshape(shape) for a, shape in zip(ins, steps.operands, strict=True)]
        results = [None if a is None else a.reshape(shape) for a, shape in zip(outs, steps.results, strict=True)]
        sums = dict(zip(added, scratch[len(scratch) - len(added) :], strict=True))
        for start in range(0, formula.sizes[0], tile):
            part = slice(start, start + tile)
            rows = min(tile, formula.sizes[0] - start)
            buffers = list(scratch) if rows == tile else [b[:rows] if b.shape[0] > 1 else b for b in scratch]
            here: Any = None if steps.output is None else _part(results[0], part)
            if steps.output is not None:
                buffers.insert(steps.output, here)
            values = steps.run(operands if whole else [_part(a, part) for a in operands], buffers)
            # what may be in an input's place comes last: another output may be that input
            for i in sorted(range(len(results)), key=lambda i: i == self.inplace_output):
                out, x = results[i], formula.outputs[i]
                if out is None or x is None or (i == 0 and here is not None):
                    continue
                if i in formula.columns and 0 in x.value:
                    _add(sums.get(i, out), values[id(x)], first=not start)
                    if rows + start == formula.sizes[0] and i in sums:
                        out[...] = sums[i]
                elif rows + start == formula.sizes[0] or 0 in need(formula.results[i]):
                    _part(out, part)[...] = values[id(x)]


class Rowwise(OverRows, abstract=True):
    """One whose inputs and output have one type."""

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """Floats of one type with an axis at least, and an output of that type."""
        x = need(inputs[0])
        if not x.is_float or not x.ndim or any(t != x for t in inputs):
            raise self.fail("takes floats of one type and shape, with an axis at least", *inputs)
        return (x,)


def _add(total: Array, value: Array, *, first: bool) -> None:
    if first:
        total[...] = value
    else:
        np.add(total, value, out=total)


@functools.lru_cache(maxsize=1 << 12)
def _of_arrays(op: Op, kinds: tuple[Any, ...], count: int) -> tuple[_Steps | None, list[int]]:
    """The steps for arrays of these shapes and NumPy's types, of which `count` are inputs, and what is added up beside
    its output; None where the first input has no elements."""
    types = tuple(None if k is None else TensorType(dtype_name(k[1]), k[0]) for k in kinds)
    ins, outs = types[:count], types[count:]
    steps = _steps_of(op, ins, outs)
    if steps is None and need(ins[0]).size and any(t is not None and t.size for t in outs):
        raise op.fail("has no formula over rows for these operands", *ins)
    return steps, steps.added(op, outs) if steps else []


def _steps_of(op: Op, ins: Types, outs: Types) -> _Steps | None:
    formula = formula_over_rows(op, ins, outs)
    return None if formula is None else _steps(_prepared(formula), op.inplace, op.inplace_output)


def _tile(formula: RowFormula, inplace: tuple[int, ...], output: int) -> int:
    """Elements of the outermost dimension that are computed at a time: all, where an output in an input's place would
    be written in another order than that is read."""
    inputs = [formula.operands[i] for i in inplace if i < len(formula.operands)]
    if 0 in formula.row or any(d not in (None, formula.results[output]) for d in inputs):
        return formula.sizes[0]
    return max(1, min(formula.sizes[0], TILE // math.prod(formula.sizes[1:])))


def _shape(found: RowFormula, dims: Sequence[int] | frozenset[int], tile: int) -> tuple[int, ...]:
    sizes = (tile, *found.sizes[1:])
    return tuple(n if d in dims else 1 for d, n in enumerate(sizes))


def _part(a: Any, part: slice) -> Any:
    return a if a is None or a.shape[0] == 1 else a[part]


@dataclass(frozen=True)
class _Steps:
    """Nodes in order, each with the number of its buffer (None: none is needed); `output`: the buffer that is the first
    output itself."""

    found: RowFormula
    order: tuple[tuple[Expr, int | None], ...]
    buffers: tuple[Kind, ...]
    output: int | None
    numbers: dict[int, Any]
    tile: int

    @property
    def temporaries(self) -> list[Kind]:
        """The buffers but for the output."""
        return [kind for i, kind in enumerate(self.buffers) if i != self.output]

    @functools.cached_property
    def operands(self) -> list[tuple[int, ...] | None]:
        """The shapes in which inputs are read."""
        return [None if d is None else _shape(self.found, d, self.found.sizes[0]) for d in self.found.operands]

    @functools.cached_property
    def results(self) -> list[tuple[int, ...] | None]:
        """The shapes in which outputs are written."""
        return [None if d is None else _shape(self.found, d, self.found.sizes[0]) for d in self.found.results]

    def added(self, op: Op, outs: Types) -> list[int]:
        """Outputs that are summed over tiles beside them: in another type, or where an input may be in their place."""
        columns = self.found.columns if self.tile < self.found.sizes[0] else ()
        sums = {i: need(self.found.outputs[i]) for i in columns}
        beside = op.inplace_output if op.inplace else None
        return [i for i, x in sums.items() if 0 in x.value and (i == beside or x.dtype != need(outs[i]).dtype)]

    @functools.cached_property
    def program(self) -> list[tuple[int, str, tuple[int, ...], int, Any]]:
        """(node, function, arguments, buffer, axes) of what is computed; nodes by id."""
        return [
            (id(x), FUNCTIONS.get(x.fn, x.fn), tuple(id(a) for a in x.args), number, _axes(x))
            for x, number in self.order
            if number is not None
        ]

    def run(self, inputs: Sequence[Any], buffers: Sequence[Any]) -> dict[int, Any]:
        """The values of all nodes that are roots or still needed, by id."""
        values = dict(self.numbers)
        for x, number in self.order:
            if number is None and x.fn == "input":
                values[id(x)] = inputs[x.value]
        for node, function, arguments, number, axes in self.program:
            out, args = buffers[number], [values[a] for a in arguments]
            if axes is not None:
                reduce = np.add.reduce if function == "sum" else np.maximum.reduce
                reduce(args[0], axis=axes, dtype=out.dtype, keepdims=True, out=out)
            elif function == "where":
                np.copyto(out, args[2])
                np.copyto(out, args[1], where=args[0])
            elif function == "cast":
                np.copyto(out, args[0], casting="unsafe")
            else:
                getattr(np, function)(*args, out=out)
            values[node] = out
        return values


def _axes(x: Expr) -> tuple[int, ...] | None:
    return tuple(sorted(x.value)) if x.fn in REDUCTIONS else None


def _numbers(order: Sequence[Expr], found: RowFormula) -> dict[int, Any]:
    """Constants and lengths, by id."""
    lengths = {id(x): math.prod(found.sizes[d] for d in x.value) for x in order if x.fn == LENGTH}
    return {id(x): DTYPES[x.dtype].type(lengths.get(id(x), x.value)) for x in order if x.fn in (LENGTH, "constant")}


def _mean_or_sum(x: Expr) -> bool:
    return x.fn == "sum" or (x.fn == "div" and x.args[0].fn == "sum" and x.args[1].fn == LENGTH)


def _rounded_sums(roots: Sequence[Expr]) -> list[Expr]:
    """The expressions with a sum, or a mean, that is only rounded in the type to which it is."""
    order = list(nodes(roots))
    readers = Counter(id(a) for x in order for a in x.args)
    done: dict[int, Expr] = {}
    for x in order:
        args = tuple(done[id(a)] for a in x.args)
        if x.fn == "cast" and readers[id(x.args[0])] == 1 and x.dtype in ("f32", "f64") and _mean_or_sum(args[0]):
            total, *length = args if args[0].fn == "sum" else args[0].args
            done[id(x)] = Expr("sum", total.args, x.dtype, total.value)
            if length:
                done[id(x)] = done[id(x)] / Expr(LENGTH, (), x.dtype, length[0].value)
        else:
            done[id(x)] = Expr(x.fn, args, x.dtype, x.value)
    return [done[id(r)] for r in roots]


@functools.lru_cache(maxsize=1 << 10)
def _prepared(formula: RowFormula) -> RowFormula:
    """The formula that the numerics run."""
    sums = iter(_rounded_sums([x for x in formula.outputs if x is not None]))
    outputs = [None if x is None else next(sums) for x in formula.outputs]
    return replace(
        formula, outputs=tuple(unrounded(need(x)) if i in formula.columns else x for i, x in enumerate(outputs))
    )


@functools.lru_cache(maxsize=1 << 10)
def _steps(formula: RowFormula, inplace: tuple[int, ...], inplace_output: int) -> _Steps:
    """Buffers by liveness; one is written over where its value ends, but by what reads twice."""
    roots = [x for x in formula.outputs if x is not None]
    order = list(nodes(roots))
    last = {id(a): i for i, x in enumerate(order) for a in x.args} | {id(r): len(order) for r in roots}
    dims: dict[int, frozenset[int]] = {}
    place: dict[int, int] = {}
    buffers: list[Kind] = []
    begun: list[int] = []
    free: list[int] = []
    for i, x in enumerate(order):
        axes = frozenset(formula.operands[x.value] or ()) if x.fn == "input" else frozenset()
        dims[id(x)] = frozenset().union(axes, *(dims[id(a)] for a in x.args))
        if x.fn in REDUCTIONS:
            dims[id(x)] -= x.value
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
    whole = (roots[0].dtype, frozenset(formula.results[0] or ()))
    mine = place.get(id(roots[0]))
    good = mine is not None and formula.outputs[0] is not None and buffers[mine] == whole and begun[mine] >= read
    tile = _tile(formula, inplace, inplace_output)
    good = good and (0 in whole[1] or tile == formula.sizes[0])
    output = mine if good else None
    placed = tuple((x, place.get(id(x))) for x in order)
    return _Steps(formula, placed, tuple(buffers), output, _numbers(order, formula), tile)
