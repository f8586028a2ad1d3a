"""The plan of a generated loop: expressions, column sums, and merged dimensions, for any machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...language.element import Expr, argument, cast, nodes
from ...language.formulas import formula
from ...language.op import Op
from ...language.rows import REDUCTIONS
from ...language.types import TensorType, need
from ...ops.fused.loop import Loop, iteration
from ...ops.reduction.sums import Reduce, ReduceMean

Types = tuple[TensorType | None, ...]


@dataclass(frozen=True)
class Sum:
    """A column sum: which output it is, its factor, and whether that is a mean's."""

    output: int
    factor: float
    mean: bool = False


def outputs(op: Op, ins: Types, outs: Types) -> tuple[list[Expr | None], list[Sum]]:
    """The expression of each output (None: absent), and which are sums."""
    dtypes = tuple(None if t is None else t.dtype for t in ins)
    shape = iteration(op, ins, outs)
    mean = 1.0 / max(math.prod(shape[:-1]), 1)
    if isinstance(op, Loop):
        sums = [_sum(i, m.op, mean) for i, m in enumerate(op.makers) if m.sums]
        return list(op.expressions(dtypes)), sums
    if isinstance(op, Reduce):
        return [argument(0, dtypes[0] or "f32")], [_sum(0, op, mean)]
    exprs = need(formula(op, dtypes))
    return [x if i < len(outs) and outs[i] is not None else None for i, x in enumerate(exprs)], []


def _sum(output: int, op: Op, mean: float) -> Sum:
    return Sum(output, mean, True) if isinstance(op, ReduceMean) else Sum(output, 1.0)


def merged(
    shape: Sequence[int], operands: Sequence[Sequence[int] | None], *, last: bool
) -> tuple[tuple[int, ...], list[frozenset[int]]]:
    """Sizes after neighbouring dimensions that all operands treat alike are one, and along which each operand varies.

    `last`: the last dimension stays alone.  There is at least one.
    """
    groups: list[tuple[int, frozenset[int]]] = []
    for d, size in enumerate(shape):
        last_axis = d == len(shape) - 1 and last
        mask = frozenset(
            i for i, s in enumerate(operands) if s is not None and (at := d - len(shape) + len(s)) >= 0 and s[at] != 1
        )
        if size == 1 and not last_axis:
            continue
        if groups and groups[-1][1] == mask and not last_axis:
            groups[-1] = (groups[-1][0] * size, mask)
        else:
            groups.append((size, mask))
    groups = groups or [(1, frozenset())]
    if last and len(groups) == 1:
        groups.insert(0, (1, frozenset()))
    patterns = [frozenset(d for d, (_, mask) in enumerate(groups) if i in mask) for i in range(len(operands))]
    return tuple(size for size, _ in groups), patterns


#: the formula of an element, of its inputs and of numbers: an expression for each output
Formula: TypeAlias = Callable[..., Sequence[Expr]]


def formula_roots(
    formula: Formula, numbers: tuple[float, ...], kind: str, ins: Types, outs: Types
) -> tuple[tuple[int, ...], list[frozenset[int]], tuple[Expr, ...]]:
    """Sizes and patterns as of `merged`, and the outputs' expressions, which are worked out in the element type `kind`;
    inputs broadcast to the outputs, which have one shape."""
    sizes, patterns = merged(need(outs[0]).shape, [need(t).shape for t in ins], last=False)
    exprs = formula(*(cast(argument(i, need(t).dtype), kind) for i, t in enumerate(ins)), *numbers)
    return sizes, patterns, tuple(cast(x, need(t).dtype) for x, t in zip(exprs, outs, strict=True))


def compact(roots: Sequence[Expr]) -> tuple[list[Expr], tuple[int, ...]]:
    """The expressions with their inputs renumbered without gaps, one node for each; the old numbers."""
    order: dict[int, Expr] = {}
    new: dict[int, Expr] = {}
    for x in nodes(roots):
        if x.fn == "input":
            if x.value not in order:
                order[x.value] = argument(len(order), x.dtype)
            new[id(x)] = order[x.value]
        else:
            new[id(x)] = Expr(x.fn, tuple(new[id(a)] for a in x.args), x.dtype, x.value)
    return [new[id(r)] for r in roots], tuple(order)


def level(roots: Sequence[Expr], inputs: Sequence[frozenset[int]]) -> dict[int, frozenset[int]]:
    """The dimensions along which each node varies: the union of its inputs' sets, less reduced ones; by id."""
    levels: dict[int, frozenset[int]] = {}
    for x in nodes(roots):
        axes: frozenset[int] = inputs[x.value] if x.fn == "input" else frozenset()
        levels[id(x)] = frozenset().union(axes, *(levels[id(a)] for a in x.args))
        if x.fn in REDUCTIONS:
            levels[id(x)] -= x.value
    return levels


def hoisted(
    roots: Sequence[Expr], varies: Sequence[frozenset[int]], inputs: int, along: frozenset[int]
) -> tuple[list[Expr], list[Expr]]:
    """The expressions with what varies along these dimensions exactly as further inputs, from `inputs` on; those."""
    levels = level(roots, varies)
    exprs: list[Expr] = []
    new: dict[int, Expr] = {}

    def replaced(x: Expr) -> Expr:
        if id(x) not in new:
            if x.args and levels[id(x)] == along:
                new[id(x)] = argument(inputs + len(exprs), x.dtype)
                exprs.append(x)
            else:
                new[id(x)] = Expr(x.fn, tuple(map(replaced, x.args)), x.dtype, x.value) if x.args else x
        return new[id(x)]

    return [replaced(r) for r in roots], exprs
