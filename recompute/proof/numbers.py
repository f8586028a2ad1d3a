"""Numbers for values: equal numbers for what is the same expression of inputs, parameters and state.

Value numbering (Cocke & Schwartz 1970) over a block: an operator on numbered inputs has the number of its expression.
Before they are numbered, expressions take one form: fused operators become their expansions, moved elements become
views (views.py), and element-wise operators, sums and products of matrices are written by indices, whose order does not
depend on the layout in which values are kept (table.py).  What one kind of operator is, is a rule (rules.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..errors import TypeRuleError
from ..language.axes import piece, shared
from ..language.builder import Builder
from ..language.factors import SUM, Factor, Place
from ..language.ir import Constant, Operator, Value, leading_to
from ..language.layouts import permuted, to_last
from ..language.op import Op
from ..language.types import TensorType, Types, need
from ..ops.common import Elementwise
from ..ops.elementwise.arithmetic import Div
from .table import Partial, Table
from .views import View, joined


class Numbers(Table):
    """The numbers of the values of blocks."""

    def apply(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View | None]:
        """The results of an operator on numbered inputs; `outs`: the types of all its outputs."""
        sums = self.quotients or self.partials
        if sums and (op.linear or op.name == "Where") and len(outs) == 1 and need(outs[0]).is_float:
            view = self.linear(op, inputs, ins, outs)
            if view is not None:
                return [view]
        rule = _rule(type(op))  # type: ignore[arg-type]
        if not any(t is not None and 0 in t.shape for t in (*ins, *outs)):
            views = rule(self, op, inputs, ins, outs) if rule is not None else None
            if views is not None:
                return views
            if (body := expanded(op, ins, outs)) is not None:
                return self.through(body, inputs)
            if type(op).channels_last is not Op.channels_last:
                return self.turned(op, inputs, ins, outs)
        return self.opaque(op, inputs, ins, outs)

    def linear(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> View | None:
        """What an operator gives for parts of sums, or values divided by a number, in which it is linear: a part of
        what it gives for the sums, or what it gives for the values, divided by the number.

        So it does not matter where a mean's gradient is divided by its count.  Of some numbers, the first one first.
        """
        bases, t = {k: v.base for k, v in enumerate(inputs) if v is not None}, need(outs[0])
        summed = {k for k, b in bases.items() if b in self.partials}
        for group in ((1, 2),) if op.name == "Where" else op.linear:
            held = [k for k in group if k in bases and self.scalar(bases[k]) != 0]
            if summed and summed == set(held):
                parts = sorted((self.partials[bases[k]] for k in held), key=lambda p: p.total.base)
                sources = {k: self.partials[bases[k]].total for k in held}
                number = None
            elif held and all(bases[k] in self.quotients and need(ins[k]).dtype == t.dtype for k in held):
                parts, sources = [], {k: self.quotients[bases[k]][0] for k in held}
                numbers = {self.quotients[bases[k]][1] for k in held}
                number = numbers.pop()
                last = op.name == "Div" and (v := inputs[1]) is not None and v.base >= number.base and _one(v)
                if numbers or last:
                    continue
            else:
                continue
            whole = [v and (sources[k].part(v) if k in sources else v) for k, v in enumerate(inputs)]
            if any(whole[k] is None for k in held) or not _alike(parts):
                continue
            view = need(self.apply(op, whole, ins, outs)[0])
            if number is not None:
                return self.apply(Div(), [view, number], (t, t.with_shape(())), (t,))[0]
            total, index = parts[0].total, parts[0].index
            if len(held) == 1 and self.in_order(view.base, total):
                return View(bases[held[0]], view.offset, view.digits, view.shape)
            if view.base != total.base:  # not the same elements elsewhere: the result may be a sum of its own
                index = op, frozenset(self.slot(op, k, inputs[k], whole[k], t) for k in held)
            return self.partial(dataclasses.replace(parts[0], index=index, total=view.bare(), seen=view))
        return None

    def slot(self, op: Op, k: int, part: View | None, whole: View | None, t: TensorType) -> Any:
        """The sum of which operand `k` is a part; of an element-wise operator, how this lies in its result."""
        of = self.partials[need(part).base]
        v = whole and (whole.expanded(t.shape) if isinstance(op, Elementwise) else whole.bare())
        return 0 if isinstance(op, Elementwise) else k, of.index, of.size, v and (v.base, v.offset, v.digits)

    def opaque(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View | None]:
        """Expressions that are equal only if operator and inputs are; of slices: the slice of the whole one."""
        operands = [v for v in inputs if v is not None]
        if any(map(self.narrow, operands)):
            lifted = self.lifted(op, inputs, ins, outs)
            if lifted is not None:
                return lifted
        key = tuple(None if v is None else v.bare() for v in inputs)
        views: list[View | None] = []
        for k, t in enumerate(outs):
            name = f"{op.name}.{k}" if k else op.name
            number = None if t is None else self.number((op, key, k), name, t.shape, operands)
            views.append(None if t is None or number is None else View.whole(number, t.shape))
        return views

    def in_run(self, op: Op, inputs: Sequence[View | None], run: View, ins: Types, out: TensorType) -> View | None:
        """A function of a run of elements in another order than they lie in: the run of the function of all of them."""
        size, wholes = self.sizes[run.base], list(inputs)
        for k, v in enumerate(inputs):
            if v is not None and not _one(v):
                wholes[k] = self.ordered.get(v.base) or View.whole(v.base, (size,))
                if self.sizes[v.base] != size or (v.offset, v.bare().digits) != (run.offset, run.bare().digits):
                    return None
            elif v is not None:
                wholes[k] = View(v.base, v.offset, ((size, 0),), (size,))
        t = out.with_shape((size,))
        view = need(self.apply(op, wholes, [x and x.with_shape((size,)) for x in ins], (t,))[0])
        return self.run_of(view, View(0, run.offset, run.digits, out.shape))

    def lifted(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View | None] | None:
        """The results for a slice of inputs as slices of the whole results, or their parts of a sum.

        By the operator's own account of its axes (`Op.axis_factors`, language/axes.py), by which slices are made, too.
        """
        if op.random:
            return None
        plain = [v and v.plain() for v in inputs]
        for f, some in itertools.product(shared(op, ins, outs), [inputs] if plain == inputs else [inputs, plain]):
            cut = [(k, p.axis) for k, p in enumerate(f.inputs) if isinstance(p, Place)]
            view = self.slice_of(some, cut) if cut and not f.whole and not f.shares else None
            results = view and self.part_of(op, f, view, ins, outs)
            if results is not None:
                return results
        return self.single(op, inputs, ins, outs)

    def single(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View | None] | None:
        """Views of the results for a slice of one element, about which the operator's own factors say nothing."""
        axes = [v.axes() if v is not None else None for v in inputs]
        cut = [
            (k, i)
            for k, axis in enumerate(axes)
            for i, digits in enumerate(axis or ())
            if [n for n, _ in digits] == [1]
        ]
        view = self.slice_of(inputs, cut)
        if view is None:
            return None
        types = _types(ins, view[3])
        shape = getattr(op, "shape", ())
        ones = [i for i, d in enumerate(shape) if d == 1]
        others = [dataclasses.replace(op, shape=(*shape[:i], view[2], *shape[i + 1 :])) for i in ones]  # type: ignore[call-arg]
        for other in (op, *others):
            try:
                wide = tuple(t and w for t, w in zip(outs, other.infer(*types), strict=False))
            except TypeRuleError:
                continue
            for f in shared(other, types, wide):
                places = [(k, p.axis) for k, p in enumerate(f.inputs) if isinstance(p, Place)]
                if places == cut and f.size == view[2] and not f.whole and not f.shares:
                    results = self.part_of(op, f, view, ins, outs)
                    if results is not None:
                        return results
        return None

    def part_of(
        self, op: Op, f: Factor, found: tuple[int, int, int, list[View | None]], ins: Types, outs: Types
    ) -> list[View | None] | None:
        """The part of the whole operator's results that `op` gives; None where it is not that operator's slice."""
        start, size, extent, whole = found
        if any(p not in (None, SUM) and not isinstance(p, Place) for p in f.outputs):
            return None
        types = _types(ins, whole)
        for other in _candidates(op, f, extent, outs):
            views = self.of_whole(other, f, extent, types)
            if views is None:
                continue
            part, _, made_ = piece(other, views[0], start, size, types, views[1])
            if part != op or tuple(made_)[: len(outs)] != tuple(outs):
                continue
            results = self.apply(other, whole, types, views[1])
            parts = [
                v
                if v is None
                else cut_at(v, p, start, size, extent)
                if isinstance(p, Place)
                else self.partial(Partial(v.bare(), ("factor", f.inputs), ((start, start + size),), extent, v))
                for v, p in zip(results, f.outputs, strict=False)
            ]
            if all(v is None or part is not None for v, part in zip(results, parts, strict=False)):
                return parts
        return None

    def of_whole(self, op: Op, f: Factor, extent: int, ins: Types) -> tuple[Factor, Types] | None:
        """The factor of `extent` values that is where `f` is, and the types of all outputs; None without one."""
        try:
            outs = tuple(t if p is not None else None for t, p in zip(op.infer(*ins), f.outputs, strict=False))
        except TypeRuleError:
            return None
        for g in shared(op, ins, outs):
            if (g.size, g.inputs, g.outputs, g.whole) == (extent, f.inputs, f.outputs, False):
                return g, outs
        return None

    def slice_of(
        self, inputs: Sequence[View | None], cut: Sequence[tuple[int, int]]
    ) -> tuple[int, int, int, list[View | None]] | None:
        """Start, size and extent of the slice that these (input, axis) are, and the whole inputs."""
        whole = list(inputs)
        spans: set[tuple[int, int, int]] = set()
        for k, axis in cut:
            v = inputs[k]
            axes = v.axes() if v is not None else None
            axis_digits = joined(axes[axis]) if axes is not None else ()
            axis_digits = tuple(d for d in axis_digits if d[0] > 1) or axis_digits
            if v is None or axes is None or len(axis_digits) != 1:
                return None
            size, stride = axis_digits[0]
            view = self.span(v, [d for a in axes for d in a if d[1]], axis_digits[0]) if stride else (0, size)
            if view is None:
                return None
            if stride:
                spans.add((view[0], size, view[1]))
        if len(spans) != 1:
            return None
        start, size, extent = spans.pop()
        if size == extent or start + size > extent:
            return None
        for k, axis in cut:
            v = whole[k]
            axes = v.axes() if v is not None else None
            assert v is not None and axes is not None
            axis_digits = joined(axes[axis])
            size, stride = next((d for d in axis_digits if d[0] > 1), axis_digits[0])
            axes[axis] = [(extent, stride) if d == (size, stride) else d for d in axis_digits]
            shape = (*v.shape[:axis], extent, *v.shape[axis + 1 :])
            whole[k] = v.at([d for a in axes for d in a], shape, -start * stride)
        return start, size, extent, whole

    def turned(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View | None]:
        """An operator that has channels-last forms: of these, the one whose first input lies most densely."""
        best: Any = (inputs, op, outs)
        at, whole = 0, (False,) * len(outs)
        form, rank = (list(inputs), op, list(outs)), max((t.ndim for t in (*ins, *outs) if t is not None), default=0)
        for turns in range(1, rank - 1):
            other = _turn(*form, rank)
            if other is None:
                break
            form, whole = other[:3], other[3]
            if _lie(form[0]) > _lie(best[0]):
                best, at = form, turns
        types = _types(ins, best[0])
        views = self.opaque(best[1], best[0], types, best[2])
        for _ in range((rank - 1 - at) % (rank - 1) if at else 0):
            views = [(v.transposed(to_last(rank)) if w and v else v) for v, w in zip(views, whole, strict=True)]
        return views

    def through(self, body: Expansion, inputs: Sequence[View | None]) -> list[View | None]:
        """The results of an expansion."""
        env = {f"x{i}": v for i, v in enumerate(inputs) if v is not None}
        for c in body.constants:
            env[c.value.name] = self.constant(c)
        for o in body.operators:
            self.run(o, env)
        return [None if v is None else env[v.name] for v in body.outputs]

    def run(self, o: Operator, env: dict[str, View]) -> None:
        """Numbers what an operator writes."""
        ins, outs = o.types
        views = self.apply(o.op, [None if v is None else env[v.name] for v in o.inputs], ins, outs)
        for v, number in zip(o.outputs, views, strict=False):
            if v is not None:
                assert number is not None and number.shape == v.shape
                assert math.prod([n for n, _ in number.digits]) == v.size
                env[v.name] = number


def _alike(parts: Sequence[Partial]) -> bool:
    """Whether parts of sums are of the same share of each."""
    shares = {(p.how, *(Fraction(at, p.size) for span in p.spans for at in span)) for p in parts}
    return not parts or (len(shares) == 1 and parts[0].how == SUM)


def _one(v: View) -> bool:
    """Whether all elements are the same one."""
    return all(not s for _, s in v.digits)


def cut_at(v: View, p: Place, start: int, size: int, extent: int) -> View | None:
    """The slice [start, start + size) of an index of `extent` values at a place; None where it is not evenly apart."""
    before, after = v.shape[: p.axis], v.shape[p.axis + 1 :]
    view = v.reshaped((*before, p.outer, extent, p.inner, *after)).sliced(p.axis + 1, start, size)
    return view and view.reshaped((*before, p.extent(size), *after))


def _types(types: Types, views: Sequence[View | None]) -> list[TensorType | None]:
    """The types with the shapes of these values."""
    return [None if t is None or v is None else t.with_shape(v.shape) for t, v in zip(types, views, strict=False)]


def _candidates(op: Op, f: Factor, extent: int, outs: Types) -> Iterator[Op]:
    """Candidates for the operator on full tensors of which `op` is a slice."""
    if f.counts:
        op = dataclasses.replace(op, **{f.counts: getattr(op, f.counts) * extent // f.size})
    yield op
    shape, p, t = getattr(op, "shape", None), f.outputs[0], outs[0]
    if shape is not None and t is not None and isinstance(p, Place) and len(shape) == t.ndim:
        yield dataclasses.replace(op, shape=p.resized(t, extent).shape)  # type: ignore[call-arg]


def _lie(inputs: Sequence[View | None]) -> tuple[int, ...]:
    """The strides of the axes of the first input."""
    axes = inputs[0].axes() if inputs and inputs[0] is not None else None
    return tuple(a[0][1] if a else 0 for a in axes or ())


def _turn(
    inputs: list[View | None], op: Op, outs: list[TensorType | None], rank: int
) -> tuple[list[View | None], Op, list[TensorType | None], tuple[bool, ...]] | None:
    """The channels-last form of an operator, its inputs and the types of its outputs, and which of these are turned."""
    ins = [None if v is None else Value("x", TensorType("f32", v.shape)) for v in inputs]
    form = op.channels_last(ins, [None if t is None else Value("y", t) for t in outs], rank)
    if form is None:
        return None
    views: list[View | None] = []
    for v, r in zip(inputs, form.inputs, strict=False):
        if v is not None and r and len(v.shape) != rank:
            return None
        moved = v.transposed(to_last(rank)) if v is not None and r else v
        if v is not None and moved is None:
            return None
        views.append(moved)
    types = [t and permuted(t, to_last(rank)) if w else t for t, w in zip(outs, form.outputs, strict=False)]
    return views, form.op, types, tuple(form.outputs)


@dataclass(frozen=True)
class Expansion:
    """The operators of a composition, over inputs x0, x1, ..."""

    operators: tuple[Operator, ...]
    constants: tuple[Constant, ...]
    outputs: tuple[Value | None, ...]


def expanded(op: Op, ins: Types, outs: Types) -> Expansion | None:
    """The composition that an operator is on these types, for the outputs present; None for a primitive one."""
    if type(op).expand is Op.expand:
        return None
    return _expansion(op, tuple(ins), tuple([t is not None for t in outs]))


@functools.lru_cache(maxsize=1 << 14)
def _whole_expansion(op: Op, ins: Types) -> tuple[Builder, Any]:
    b = Builder()
    return b, op.expand(b, *(None if t is None else Value(b.names.take(f"x{i}"), t) for i, t in enumerate(ins)))


@functools.lru_cache(maxsize=1 << 14)
def _expansion(op: Op, ins: Types, present: tuple[bool, ...]) -> Expansion | None:
    b, results = _whole_expansion(op, ins)
    if results is None:
        return None
    wanted = tuple(v if p else None for v, p in zip(results, present, strict=False))
    kept = leading_to(b.operators, wanted)
    read = {v.name for v in wanted if v is not None}.union(v.name for o in kept for v in o.reads())
    operators = (
        o
        if len(o.outputs) == 1
        else dataclasses.replace(o, outputs=tuple(v if v is not None and v.name in read else None for v in o.outputs))
        for o in kept
    )
    return Expansion(tuple(operators), tuple(b.constants), wanted)


#: class of operators → what gives the numbers of their results; None: it does not apply
Rule = Callable[[Numbers, Any, Sequence[View | None], Types, Types], "list[View | None] | None"]
RULES: dict[type, Rule] = {}


@functools.cache
def _rule(cls: type) -> Rule | None:
    return next((RULES[c] for c in cls.__mro__ if c in RULES), None)


def rule(*classes: type) -> Callable[[Rule], Rule]:
    """Registers a rule for classes of operators, and those derived from them."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(classes, function))
        return function

    return register
