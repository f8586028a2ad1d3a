"""Numbers for values: equal numbers for what is the same expression of inputs, parameters and state.

Value numbering (Cocke & Schwartz 1970) over a block: an operator on numbered inputs has the number of its expression.
Before they are numbered, expressions take one form: fused operators become their expansions, moved elements become
views (views.py), and element-wise operators, sums and products of matrices are written by indices, whose order does not
depend on the layout in which values are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TypeRuleError
from ..language.axes import piece, shared
from ..language.builder import Builder
from ..language.exact import exact
from ..language.factors import SUM, Factor, Place
from ..language.ir import Constant, Operator, Value
from ..language.layouts import permuted, to_last
from ..language.op import Op
from ..language.types import TensorType, Types
from .views import Digit, View, joined, strides

#: more numbers than any step draws from one stream
STREAM = 1 << 62
#: an index of an expression: its size, and its stride in each operand
Index = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Node:
    """A numbered expression, for messages: what it is called, and the values that it reads."""

    name: str
    operands: tuple[View, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Partial:
    """What slice [start, stop) of an index of `size` contributes to the sum `total`."""

    total: View
    index: Any
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Wide:
    """The whole expression of which another is a part: its operands and indices, beside the part's.

    `begun`, `ended`: of kept and summed indices that differ, which it is, where the part begins, and its whole size.
    """

    operands: list[View]
    kept: list[Index]
    summed: list[Index]
    whole: list[Index]
    totals: list[Index]
    begun: list[tuple[int, int, int]]
    ended: list[tuple[int, int, int]]
    #: whether operands begin or end at different places of an index
    unlike: bool


class Numbers:
    """The table of expressions, which all blocks that are compared share."""

    def __init__(self) -> None:
        self.table: dict[Any, int] = {}
        self.nodes: list[Node] = []
        self.partials: dict[int, Partial] = {}

    def number(self, key: Any, name: str, shape: Sequence[int], operands: Sequence[View] = ()) -> int:
        """The number of an expression, whose elements lie densely in `shape`."""
        found = self.table.get(key)
        if found is None:
            found = self.table[key] = len(self.nodes)
            self.nodes.append(Node(name, tuple(operands), tuple(shape)))
        return found

    def partial(self, part: Partial) -> View:
        """The number of a partial sum; the sum's where it is all of it."""
        if part.start == 0 and part.stop == part.size:
            return part.total
        shape = part.total.shape
        base = self.number(("partial", part), "partial sum", shape, [part.total])
        self.partials[base] = part
        return View.whole(base, shape)

    def span(self, v: View, digits: Sequence[Digit], digit: Digit) -> tuple[int, int] | None:
        """Where a digit begins in a dimension of the base, and how many values it could have up to the next digit.

        `digits`: all of the view.  None where they are not evenly apart.
        """
        size, stride = digit
        shape = self.nodes[v.base].shape
        above = [s for n, s in digits if s >= size * stride and s > stride]
        end = 0
        for d, low in zip(reversed(shape), reversed(strides(shape)), strict=True):
            high = d * low
            if not end and d > 1 and (low < size * stride <= high if size > 1 else low <= stride < high):
                end = high
            elif end and not any(low <= s < high for s in above):
                end = high  # of this dimension the view has no digit: what it takes is one element
            elif end:
                break
        end = min([end, *(s for s in above if s < end)])
        return (v.offset // stride % (end // stride), end // stride) if end and end % stride == 0 else None

    def cuts(self, v: View, indices: Sequence[Index], k: int) -> list[Index]:
        """Indices, split where operand `k`, this view, crosses a dimension of its base."""
        shape = self.nodes[v.base].shape
        borders = strides(shape)
        found: list[Index] = []
        for size, at in indices:
            inner: list[Index] = []
            for border in reversed(borders):
                low = at[k]
                if low and low < border < size * low and border % low == 0 and size % (border // low) == 0:
                    n = border // low
                    inner.append((n, at))
                    size, at = size // n, tuple(s * n for s in at)
            found += [(size, at), *inner[::-1]]
        return found

    # -- leaves -------------------------------------------------------------------------------------------------------

    def declared(self, kind: str, v: Value) -> View:
        """An input, or the contents of a persistent value before the step."""
        return View.whole(self.number((kind, v.name, v.type), v.name, v.shape), v.shape)

    def constant(self, c: Constant) -> View:
        """Its elements; one number for all if they are equal."""
        if c.data and all(exact(x) == exact(c.data[0]) for x in c.data):
            return self.filled(c.value.type, c.data[0])
        key = ("constant", c.value.type, exact(c.data))
        return View.whole(self.number(key, c.value.name, c.value.shape), c.value.shape)

    def filled(self, t: TensorType, value: Any) -> View:
        """A value all of whose elements are `value`."""
        x = t.numpy.type(value)
        base = self.number(("constant", t.dtype, x.tobytes()), str(x), ())
        return View.whole(base, ()).at([(t.size, 0)], t.shape) if t.size != 1 else View(base, 0, (), t.shape)

    def stream(self, seed: int, step: View) -> View:
        """The random numbers of a seed and a step, one after the other."""
        return View(self.number(("stream", seed, step.bare()), "random numbers", (STREAM,), [step]), 0, (), ())

    # -- expressions --------------------------------------------------------------------------------------------------

    def apply(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View | None]:
        """The results of an operator on numbered inputs; `outs`: the types of all its outputs."""
        rule = next((RULES[c] for c in type(op).__mro__ if c in RULES), None)
        if 0 not in (t.size for t in (*ins, *outs) if t is not None):
            found = rule(self, op, inputs, ins, outs) if rule is not None else None
            if found is not None:
                return found
            if (body := expansion(op, tuple(ins), tuple(t is not None for t in outs))) is not None:
                return self.through(body, inputs)
            if type(op).channels_last is not Op.channels_last:
                return self.turned(op, inputs, ins, outs)
        return self.opaque(op, inputs, ins, outs)

    def opaque(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View | None]:
        """Expressions that are equal only if operator and inputs are; of slices: the slice of the whole one."""
        given = [v for v in inputs if v is not None]
        if any(math.prod(self.nodes[v.base].shape) != math.prod(n for n, s in v.digits if s) for v in given):
            found = self.lifted(op, inputs, ins, outs)
            if found is not None:
                return found
        key = tuple(None if v is None else v.bare() for v in inputs)
        return [
            t and View.whole(self.number((op, key, k), f"{op.name}.{k}" if k else op.name, t.shape, given), t.shape)
            for k, t in enumerate(outs)
        ]

    def lifted(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View | None] | None:
        """The results for a slice of inputs as slices of the whole results, or their parts of a sum.

        By the operator's own account of its axes (`Op.axis_factors`, language/axes.py), by which slices are made, too.
        """
        if op.random:
            return None
        for f in shared(op, ins, outs):
            cut = [(k, p.axis) for k, p in enumerate(f.inputs) if isinstance(p, Place)]
            found = self.slice_of(inputs, cut) if cut and not f.whole and not f.shares else None
            results = found and self.part_of(op, f, found, ins, outs)
            if results is not None:
                return results
        return self.single(op, inputs, ins, outs)

    def single(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View | None] | None:
        """The same for a slice of one element, of which factors of the operator itself say nothing."""
        axes = [v.axes() if v is not None else None for v in inputs]
        cut = [
            (k, i) for k, own in enumerate(axes) for i, digits in enumerate(own or ()) if [n for n, _ in digits] == [1]
        ]
        found = self.slice_of(inputs, cut)
        if found is None:
            return None
        types = [t and v and t.with_shape(v.shape) for t, v in zip(ins, found[3], strict=True)]
        shape = getattr(op, "shape", ())
        ones = [i for i, d in enumerate(shape) if d == 1]
        others = [dataclasses.replace(op, shape=(*shape[:i], found[2], *shape[i + 1 :])) for i in ones]  # type: ignore[call-arg]
        for other in (op, *others):
            try:
                wide = tuple(t and w for t, w in zip(outs, other.infer(*types), strict=False))
            except TypeRuleError:
                continue
            for f in shared(other, types, wide):
                places = [(k, p.axis) for k, p in enumerate(f.inputs) if isinstance(p, Place)]
                if places == cut and f.size == found[2] and not f.whole and not f.shares:
                    results = self.part_of(op, f, found, ins, outs)
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
        types = [t and v and t.with_shape(v.shape) for t, v in zip(ins, whole, strict=True)]
        for other in _candidates(op, f, extent, outs):
            made = self.of_whole(other, f, extent, types)
            if made is None:
                continue
            part, _, made_ = piece(other, made[0], start, size, types, made[1])
            if part != op or tuple(made_)[: len(outs)] != tuple(outs):
                continue
            results = self.apply(other, whole, types, made[1])
            parts = [
                v
                if v is None
                else v.sliced(p.axis, start, size)
                if isinstance(p, Place)
                else self.partial(Partial(v.bare(), ("factor", f.inputs), start, start + size, extent))
                for v, p in zip(results, f.outputs, strict=False)
            ]
            if all(v is None or part is not None for v, part in zip(results, parts, strict=False)):
                return parts
        return None

    def of_whole(self, op: Op, f: Factor, extent: int, ins: Types) -> tuple[Factor, Types] | None:
        """The factor of `extent` values that is where `f` is, and the types of all outputs; None where there is none."""
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
            own = joined(axes[axis]) if axes is not None else ()
            own = tuple(d for d in own if d[0] > 1) or own
            if v is None or axes is None or len(own) != 1:
                return None
            size, stride = own[0]
            found = self.span(v, [d for a in axes for d in a if d[1]], own[0]) if stride else (0, size)
            if found is None:
                return None
            if stride:
                spans.add((found[0], size, found[1]))
        if len(spans) != 1:
            return None
        start, size, extent = spans.pop()
        if size == extent or start + size > extent:
            return None
        for k, axis in cut:
            v = whole[k]
            axes = v.axes() if v is not None else None
            assert v is not None and axes is not None
            own = joined(axes[axis])
            size, stride = next((d for d in own if d[0] > 1), own[0])
            axes[axis] = [(extent, stride) if d == (size, stride) else d for d in own]
            shape = (*v.shape[:axis], extent, *v.shape[axis + 1 :])
            whole[k] = v.at([d for a in axes for d in a], shape, -start * stride)
        return start, size, extent, whole

    def turned(self, op: Op, inputs: Sequence[View | None], ins: Types, outs: Types) -> list[View | None]:
        """An operator that has channels-last forms: of these, the one whose first input lies most densely."""
        best, at, whole = (inputs, op, outs), 0, ()
        form, rank = (list(inputs), op, list(outs)), max((t.ndim for t in (*ins, *outs) if t is not None), default=0)
        for turns in range(1, rank - 1):
            other = _turn(*form, rank)
            if other is None:
                break
            form, whole = other[:3], other[3]
            if _lie(form[0]) > _lie(best[0]):
                best, at = form, turns
        types = [t and v and t.with_shape(v.shape) for t, v in zip(ins, best[0], strict=False)]
        found = self.opaque(best[1], best[0], types, best[2])
        for _ in range((rank - 1 - at) % (rank - 1) if at else 0):
            found = [(v.transposed(to_last(rank)) if w and v else v) for v, w in zip(found, whole, strict=True)]
        return found

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
        found = self.apply(o.op, [None if v is None else env[v.name] for v in o.inputs], ins, outs)
        for v, number in zip(o.outputs, found, strict=False):
            if v is not None:
                assert number is not None
                env[v.name] = number

    def expression(
        self,
        name: Any,
        operands: Sequence[View],
        kept: Sequence[Index],
        summed: Sequence[Index] = (),
        *,
        first: int = 1,
    ) -> tuple[int, list[int]]:
        """An expression by indices: for each value of `kept`, a function of the operands' elements there.

        Of those at all values of `summed`, where there are any, a symmetric function, such as a sum.  Gives its number,
        the same in whatever order the indices are given, and the stride of each of `kept` in it.  `first`: values of
        an index of its own, outside of these.
        """
        inner = [i for i, (size, at) in enumerate(kept) if size > 1 and any(at)]
        order = sorted(inner, key=lambda i: tuple(-s for s in kept[i][1]))
        shape = [kept[i][0] for i in order]
        place = dict(zip(order, strides(shape), strict=True))
        key = (
            name,
            tuple((v.base, v.offset) for v in operands),
            merged([kept[i] for i in order]),
            merged(sorted(summed, key=lambda x: tuple(-s for s in x[1]))),
        )
        shape = shape if first == 1 else [first, *shape]
        return self.number(key, str(name[0]), shape, operands), [place.get(i, 0) for i in range(len(kept))]

    def indexed(
        self, name: Any, operands: Sequence[View], kept: Sequence[Index], summed: Sequence[Index] = (), shape: Any = ()
    ) -> View:
        """The value of such an expression, with the indices in the order given.

        Of parts of its operands that begin and end at the same values of an index: the part of the whole expression.
        """
        wide = self.widest(operands, kept, summed)
        base, places = self.expression(name, wide.operands, wide.whole, wide.totals)
        offset = sum(start * places[i] for i, start, _ in wide.begun)
        digits = joined((n, s) for (n, _), s in zip(wide.kept, places, strict=True))
        found = View(base, offset, digits, tuple(shape))
        for i, start, size in wide.ended:
            found = self.partial(Partial(found.bare(), wide.totals[i], start, start + wide.summed[i][0], size))
        return found

    def widest(self, operands: Sequence[View], kept: Sequence[Index], summed: Sequence[Index] = ()) -> Wide:
        """The whole expression of which one by indices is a part.

        A slice of one element may be seen as one of the next larger index or as one of the next smaller: both are tried.
        """
        found = self.wider(operands, kept, summed)
        if found.unlike:
            next_ = self.wider(operands, *_without_ones(kept, summed))
            found = found if next_.unlike else next_
        return found

    def wider(self, operands: Sequence[View], kept: Sequence[Index], summed: Sequence[Index]) -> Wide:
        """The same with the indices as they are."""
        operands, kept, summed = list(operands), list(kept), list(summed)
        cut = [
            k
            for k, v in enumerate(operands)
            if math.prod(self.nodes[v.base].shape) != math.prod(n for n, at in (*kept, *summed) if at[k])
        ]
        for k in cut:
            kept, summed = self.cuts(operands[k], kept, k), self.cuts(operands[k], summed, k)
        digits = [[(n, at[k]) for n, at in (*kept, *summed) if at[k]] for k in range(len(operands))] if cut else []
        spans = [[self.spans(operands, digits, x) if cut else set() for x in some] for some in (kept, summed)]
        begun, ended = (
            [(i, *one) for i, some in enumerate(every) if len(some) == 1 for one in some if one[1] != among[i][0]]
            for every, among in zip(spans, (kept, summed), strict=True)
        )
        unlike = any(len(some) > 1 for every in spans for some in every)
        whole, totals = list(kept), list(summed)
        for some, all_ in ((begun, whole), (ended, totals)):
            for i, start, size in some:
                at = all_[i][1]
                all_[i] = (size, at)
                operands = [
                    View(v.base, v.offset - start * s, v.digits, v.shape) for v, s in zip(operands, at, strict=True)
                ]
        return Wide(operands, kept, summed, whole, totals, begun, ended, unlike)

    def spans(self, operands: Sequence[View], digits: Sequence[Sequence[Digit]], index: Index) -> set[tuple[int, int]]:
        """Where an index begins in the dimensions that it is part of, and their sizes, for operands that have it."""
        size, at = index
        found = {
            self.span(v, own, (size, s)) or (-1, 0)
            for v, own, s in zip(operands, digits, at, strict=True)
            if s and self.nodes[v.base].shape != (STREAM,)
        }
        return {(-1, 0), (0, 0)} if any(not 0 <= start <= whole - size for start, whole in found) else found


def _without_ones(kept: Sequence[Index], summed: Sequence[Index]) -> tuple[list[Index], list[Index]]:
    """Indices of which those of one element are left out in operands in which they are next to another."""
    every = [*kept, *summed]

    def one(size: int, at: tuple[int, ...]) -> Index:
        near = (any(n > 1 and n * other[k] == s for n, other in every) for k, s in enumerate(at))
        return size, tuple(0 if size == 1 and beside else s for s, beside in zip(at, near, strict=True))

    return [one(*x) for x in kept], [one(*x) for x in summed]


def _candidates(op: Op, f: Factor, extent: int, outs: Types) -> Iterator[Op]:
    """What the operator of the whole may be whose slice `op` is."""
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
    given: list[View | None] = []
    for v, r in zip(inputs, form.inputs, strict=False):
        if v is not None and r and len(v.shape) != rank:
            return None
        moved = v.transposed(to_last(rank)) if v is not None and r else v
        if v is not None and moved is None:
            return None
        given.append(moved)
    types = [t and permuted(t, to_last(rank)) if w else t for t, w in zip(outs, form.outputs, strict=False)]
    return given, form.op, types, tuple(form.outputs)


def merged(indices: Sequence[Index]) -> tuple[Index, ...]:
    """Indices, neighbours joined that lie one after the other in all operands."""
    found: list[Index] = []
    for size, at in indices:
        if size == 1:
            continue
        if found and all(a == size * b for a, b in zip(found[-1][1], at, strict=True)):
            found[-1] = (found[-1][0] * size, at)
        else:
            found.append((size, at))
    return tuple(found)


# -- expansions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expansion:
    """The operators of a composition, over inputs x0, x1, ..."""

    operators: tuple[Operator, ...]
    constants: tuple[Constant, ...]
    outputs: tuple[Value | None, ...]


@functools.lru_cache(maxsize=1 << 14)
def expansion(op: Op, ins: Types, present: tuple[bool, ...]) -> Expansion | None:
    """The composition that an operator is on these types, for the outputs that are present; None for a primitive one."""
    if type(op).expand is Op.expand:
        return None
    b = Builder()
    inputs = [None if t is None else Value(b.names.take(f"x{i}"), t) for i, t in enumerate(ins)]
    made = op.expand(b, *inputs)
    if made is None:
        return None
    wanted = tuple(v if p else None for v, p in zip(made, present, strict=False))
    needed = {v.name for v in wanted if v is not None}
    operators: list[Operator] = []
    for o in reversed(b.operators):
        outs = tuple(v if v is not None and v.name in needed else None for v in o.outputs)
        if any(v is not None for v in outs):
            needed.update(v.name for v in o.reads())
            operators.append(dataclasses.replace(o, outputs=outs))
    return Expansion(tuple(operators[::-1]), tuple(b.constants), wanted)


#: class of operators → what gives the numbers of their results; None: it does not apply
Rule = Callable[[Numbers, Any, Sequence[View | None], Types, Types], "list[View | None] | None"]
RULES: dict[type, Rule] = {}


def rule(*classes: type) -> Callable[[Rule], Rule]:
    """Registers a rule for classes of operators, and those derived from them."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(classes, function))
        return function

    return register
