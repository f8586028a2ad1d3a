"""Formulas of operators that work on rows: sums and extremes along some axes, and what is made of them.

    def row_formula(self, b, x):
        e = b.Exp(b.Sub(x, b.ReduceMax(x, axes=(-1,))))
        return (b.Mul(e, b.Reciprocal(b.ReduceSum(e, axes=(-1,)))),)

`Op.row_formula` is written like `Op.expand` (often it is `expand`), of element-wise operators, ReduceSum, ReduceMean,
ReduceMax, Cast and Reshape.  `formula_over_rows` runs it on symbols and gives expressions in which "sum" and "largest"
stand for a reduction; the kernels of every place are generated from them (runtime/cpu/loops/rows.py,
runtime/cuda/loops/rows.py).

Each dimension of an operand is a product of *factors*.  An element-wise operator makes the factors of its operands'
dimensions one, a Reshape regroups them, and a factor that would have to be cut is cut, and all begins again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .element import HALVES, Expr, argument, cast, constant, nodes
from .op import Op, op_class
from .types import FLOATS, TensorType, Types, need

#: functions of an expression that reduce it along the dimensions in `value`
REDUCTIONS = ("sum", "largest")
#: the function without arguments that is the number of elements along the dimensions in `value`
LENGTH = "length"
#: how often factors are cut before an operator is given up
_CUTS = 16


class NotRows(Exception):
    """The operator has no formula over rows."""


class _Cut(Exception):
    """A factor must be two; all begins again."""


@dataclass(frozen=True)
class RowFormula:
    """An operator over merged dimensions `sizes`, row-major.

    `row`: the dimensions that are reduced (none where they have one element).  `operands`, `results`: the dimensions
    along which each input and output varies (None: absent); its elements lie in their order.  `outputs`: an expression
    for each output, whose inputs are the operator's, and whose reductions name dimensions.  Halves are widened where
    they are read.  `columns`: outputs that are sums along other dimensions than the row's, which nothing else reads.
    """

    sizes: tuple[int, ...]
    row: frozenset[int]
    operands: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[Expr | None, ...]
    results: tuple[tuple[int, ...] | None, ...]
    columns: tuple[int, ...] = ()


class _Symbol:
    """A value of a formula: an expression, and for each of its dimensions the factors that it is made of."""

    def __init__(self, expr: Expr, axes: Sequence[tuple[int, ...]], shape: Sequence[int]) -> None:
        self.expr, self.axes, self.shape = expr, tuple(axes), tuple(shape)

    @property
    def type(self) -> TensorType:
        return TensorType(self.expr.dtype, self.shape)

    @property
    def dtype(self) -> str:
        return self.expr.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _Factors:
    """Sizes of factors, which of them are one, and how dimensions of the operands are cut."""

    def __init__(self, cuts: dict[int, tuple[int, ...]]) -> None:
        self.cuts = cuts
        self.sizes: list[int] = []
        self.origin: list[tuple[int, int]] = []
        self.same: list[int] = []
        self.dimensions = 0
        #: factors of each value that an element-wise operator made
        self.made: list[list[int]] = []

    def dimension(self, size: int) -> tuple[int, ...]:
        """The factors of an operand's next dimension."""
        number, self.dimensions = self.dimensions, self.dimensions + 1
        if size == 1:
            return ()
        factors = []
        for part, factor in enumerate(self.cuts.get(number, (size,))):
            factors.append(len(self.sizes))
            self.sizes.append(factor)
            self.same.append(len(self.same))
            self.origin.append((number, part))
        return tuple(factors)

    def root(self, f: int) -> int:
        """The factor that stands for all that are one with it."""
        while self.same[f] != f:
            f = self.same[f]
        return f

    def cut(self, f: int, outer: int) -> None:
        """Cuts a factor into `outer` times the rest, for the next time."""
        size = self.sizes[f]
        if not 1 < outer < size or size % outer:
            raise NotRows
        number, part = self.origin[f]
        parts = [self.sizes[i] for i, o in enumerate(self.origin) if o[0] == number]
        self.cuts[number] = (*parts[:part], outer, size // outer, *parts[part + 1 :])
        raise _Cut

    def join(self, a: Sequence[int], b: Sequence[int]) -> None:
        """Makes the factors of two dimensions of one size the same."""
        left, right = list(a), list(b)
        while left and right:
            x, y = left.pop(0), right.pop(0)
            if self.sizes[x] != self.sizes[y]:
                larger, smaller = (x, y) if self.sizes[x] > self.sizes[y] else (y, x)
                self.cut(larger, self.sizes[smaller])
            self.same[self.root(y)] = self.root(x)
        if left or right:
            raise NotRows

    def regroup(self, axes: Sequence[Sequence[int]], shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The factors of all dimensions, in their order, as dimensions of these sizes."""
        rest = [f for group in axes for f in group]
        groups = []
        for size in shape:
            group, product = [], 1
            while product < size:
                if not rest:
                    raise NotRows
                f = rest.pop(0)
                if size % (product * self.sizes[f]):
                    self.cut(f, math.gcd(self.sizes[f], size // product))
                product *= self.sizes[f]
                group.append(f)
            groups.append(tuple(group))
        if rest:
            raise NotRows
        return groups


class _Rows:
    """A builder on symbols: what `Op.row_formula` and `Op.expand` are called with."""

    def __init__(self, factors: _Factors) -> None:
        self.factors = factors

    def __getattr__(self, name: str) -> Any:
        if not name[:1].isupper():
            raise NotRows(name)
        return functools.partial(self.apply, name)

    def apply(self, name: str, *inputs: _Symbol | None, **attributes: Any) -> Any:
        """One operator on symbols."""
        x = inputs[0]
        if x is not None and name in ("Reshape", "Squeeze", "Unsqueeze"):
            op = op_class(name)(**attributes)
            shape = op.infer(x.type)[0].shape
            return _Symbol(x.expr, self.factors.regroup(x.axes, shape), shape)
        if x is not None and name in ("ReduceSum", "ReduceMean", "ReduceMax"):
            return self.reduced(name, x, **attributes)
        op = op_class(name)(**attributes)
        exprs = op.element(*(None if v is None else v.expr for v in inputs))
        if exprs is None:
            results = op.expand(self, *inputs)
            if results is None:
                raise NotRows(name)
            return results[0] if len(results) == 1 else results
        if isinstance(exprs, tuple):
            raise NotRows(name)
        return self.broadcast(exprs, [v for v in inputs if v is not None])

    def broadcast(self, expr: Expr, inputs: Sequence[_Symbol]) -> _Symbol:
        """The result of an element-wise operator."""
        rank = max((v.ndim for v in inputs), default=0)
        axes: list[tuple[int, ...]] = [()] * rank
        shape = [1] * rank
        for v in inputs:
            for d, (group, size) in enumerate(zip(v.axes, v.shape, strict=True), rank - v.ndim):
                if size == 1:
                    continue
                if shape[d] != 1:
                    if shape[d] != size:
                        raise NotRows
                    self.factors.join(axes[d], group)
                else:
                    axes[d], shape[d] = group, size
        self.factors.made.append([f for group in axes for f in group])
        return _Symbol(expr, axes, shape)

    def reduced(self, name: str, x: _Symbol, axes: Sequence[int] | None = None, keepdims: int = 1) -> _Symbol:
        """A sum, a mean or the largest element; sums are float64 before they are rounded."""
        if x.dtype not in ("f32", "f64"):
            raise NotRows(name)
        taken = {a % x.ndim for a in (range(x.ndim) if axes is None else axes)}
        along = tuple(f for a in sorted(taken) for f in x.axes[a])
        left = [() if a in taken else g for a, g in enumerate(x.axes) if keepdims or a not in taken]
        shape = [1 if a in taken else n for a, n in enumerate(x.shape) if keepdims or a not in taken]
        if not along:
            return _Symbol(x.expr, left, shape)
        if name == "ReduceMax":
            return _Symbol(Expr("largest", (x.expr,), x.dtype, along), left, shape)
        total = Expr("sum", (x.expr,), "f64", along)
        if name == "ReduceMean":
            total = total / Expr(LENGTH, (), "f64", along)
        return _Symbol(cast(total, x.dtype), left, shape)

    def constant(self, value: Any, like: Any) -> _Symbol:
        """A number of `like`'s element type."""
        if getattr(value, "ndim", 0):
            raise NotRows("constant")
        return _Symbol(constant(value, like if isinstance(like, str) else like.dtype), (), ())

    def fill(self, value: float, like: Any) -> _Symbol:
        return self.constant(value, like)


@functools.lru_cache(maxsize=1 << 13)
def formula_over_rows(op: Op, ins: Types, outs: Types) -> RowFormula | None:
    """An operator's formula over rows; None if it has none for these types.  Depends on operator and types only."""
    types = [t for t in (*ins, *outs) if t is not None]
    if type(op).row_formula is Op.row_formula or not all(t.dtype in FLOATS and t.size for t in types):
        return None
    cuts: dict[int, tuple[int, ...]] = {}
    for _ in range(_CUTS):
        try:
            return _formula(op, ins, outs, _Factors(cuts))
        except _Cut:
            continue
        except NotRows:
            return None
    return None


def _formula(op: Op, ins: Types, outs: Types, factors: _Factors) -> RowFormula:
    symbols = [None if t is None else _operand(i, t, factors) for i, t in enumerate(ins)]
    formula: Any = op.row_formula(_Rows(factors), *symbols)  # type: ignore[arg-type]
    if formula is None:
        raise NotRows
    results: list[_Symbol | None] = []
    for s, t in zip((*formula, *[None] * len(outs)), outs, strict=False):
        if t is None:
            results.append(None)
            continue
        if s is None or s.size != t.size:
            raise NotRows
        results.append(_Symbol(cast(s.expr, t.dtype), factors.regroup(s.axes, t.shape), t.shape))
    return _merged(factors, symbols, results)


def _operand(i: int, t: TensorType, factors: _Factors) -> _Symbol:
    x = argument(i, t.dtype)
    return _Symbol(cast(x, "f32") if t.dtype in HALVES else x, [factors.dimension(d) for d in t.shape], t.shape)


def _merged(factors: _Factors, symbols: Sequence[_Symbol | None], results: Sequence[_Symbol | None]) -> RowFormula:
    """Factors that everything treats alike are one dimension."""

    def flat(s: _Symbol) -> list[int]:
        return [factors.root(f) for group in s.axes for f in group]

    lists = [None if s is None else flat(s) for s in (*symbols, *results)]
    order = max((x for x in lists if x is not None), key=len)
    place = {f: i for i, f in enumerate(order)}
    roots = [s.expr for s in results if s is not None]
    along = {id(x): frozenset(factors.root(f) for f in x.value) for x in nodes(roots) if x.fn in REDUCTIONS}
    inner = {id(unrounded(a)) for x in nodes(roots) if x.fn != "cast" for a in x.args} & along.keys()
    rows = {along[i] for i in inner} or {d for d in along.values() if order[-1] in d}
    for x in (*(x for x in lists if x is not None), *along.values()):
        if any(f not in place for f in x):
            raise NotRows  # an axis that no operand has whole
    if any(sorted(x, key=place.__getitem__) != x or len(set(x)) < len(x) for x in lists if x is not None):
        raise NotRows  # transposed, or a diagonal
    if any(len({factors.root(f) for f in x}) < len(x) for x in factors.made):
        raise NotRows  # an operand beside itself, along two dimensions
    if len(rows) > 1:
        raise NotRows
    reduced = next(iter(rows), frozenset())
    marks = [(*(x is not None and f in x for x in lists), *(f in d for d in along.values())) for f in order]
    number: dict[int, int] = {}
    sizes: list[int] = []
    for i, f in enumerate(order):
        if i and marks[i] == marks[i - 1]:
            sizes[-1] *= factors.sizes[f]
        else:
            sizes.append(factors.sizes[f])
        number[f] = len(sizes) - 1
    dims = [None if x is None else tuple(dict.fromkeys(number[f] for f in x)) for x in lists]
    done: dict[int, Expr] = {}
    for e in nodes(roots):
        value = e.value
        if e.fn in (LENGTH, *REDUCTIONS):
            value = frozenset(number[factors.root(f)] for f in value)
        done[id(e)] = Expr(e.fn, tuple(done[id(a)] for a in e.args), e.dtype, value)
    row = frozenset(number[f] for f in reduced)
    outputs = tuple(None if s is None else done[id(s.expr)] for s in results)
    ends = [None if x is None else unrounded(x) for x in outputs]
    columns = tuple(i for i, x in enumerate(ends) if x is not None and x.fn in REDUCTIONS and x.value != row)
    if any(need(ends[i]).fn != "sum" for i in columns):
        raise NotRows
    split = len(symbols)
    return RowFormula(tuple(sizes) or (1,), row, tuple(dims[:split]), outputs, tuple(dims[split:]), columns)


def unrounded(x: Expr) -> Expr:
    """The expression below all casts."""
    while x.fn == "cast":
        x = x.args[0]
    return x


def terms(x: Expr) -> tuple[Expr, ...]:
    """The terms of a reduction: both factors of a product (added in one fma, rounded once), or the operand."""
    body = x.args[0]
    return body.args if x.fn == "sum" and body.fn == "mul" else (body,)


def walks(roots: Sequence[Expr]) -> dict[int, int]:
    """How many walks over the row must be done before each node can be known, by id."""
    counts: dict[int, int] = {}
    for x in nodes(roots):
        counts[id(x)] = max((counts[id(a)] for a in x.args), default=0) + (x.fn in REDUCTIONS)
    return counts
