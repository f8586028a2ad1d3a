"""Attention as one operator: found where a softmax stands between two matrix products."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import RecomputeError
from ...language.ir import Block, Operator, Value
from ...language.program import Program
from ...ops.attention.tiled import TiledAttention
from ..base import ForwardPass
from ..matching.graph import Graph, NoMatchError, result
from ..matching.rewrite import Found
from .levels import Level, finest, refined
from .masks import Bias, Masks
from .scores import Scores, Walk, Weights


class FindAttention(ForwardPass):
    """Replace softmax(scale · q kᵀ + bias) v by TiledAttention, which keeps no scores.

    For the forward pass, before differentiation.  What is found: scaling by constants before or after the product, any
    number of biases and masks, soft caps, dropout, keys that are transposed or not, heads that share keys and values,
    leading axes that are joined and split on the way, casts around the softmax.  Masks that are known and hide what is
    outside of a band, such as the causal one, become windows.  The scores and weights must have no other readers.
    `data`: contents of buffers, where masks may be.  `find_attention` also says what was found, or why not.
    """

    data: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def run(self, block: Block) -> Block:
        return find_attention(block, self.data)[0]

    def changed(self, block: Block, program: Program) -> Block:
        """The rewritten block; masks and scales may be arrays of the program."""
        return find_attention(block, program.data)[0]


def find_attention(block: Block, data: Mapping[str, Any] | None = None) -> tuple[Block, list[str]]:
    """The rewritten block, and a note for each softmax: what was found, or why it is none."""
    search = _Search(Graph(block, data))
    rewritten = search.rewritten()
    return _without_masks(rewritten, block), search.notes


def described(op: TiledAttention) -> str:
    """Details of an attention for a note: bounds of keys, cap and so on."""
    reasons = []
    if (op.first, op.last) != (None, None):
        ends = "the first" if op.first is None else f"{op.first:+d}", "the last" if op.last is None else f"{op.last:+d}"
        reasons.append(f"keys from {ends[0]} to {ends[1]} of each query")
    if op.cap:
        reasons.append(f"soft cap {op.cap:g}")
    if op.ratio:
        reasons.append(f"dropout {op.ratio:g}")
    return f" ({', '.join(reasons)})" if reasons else ""


def _without_masks(block: Block, before: Block) -> Block:
    """The block without the buffers that were read before and are read no more."""
    if block is before:
        return block
    read, had = ({v.name for o in b.operators for v in o.reads()}.union(b.outputs) for b in (block, before))
    gone = had - read
    return block.with_operators(block.operators, buffers=tuple(v for v in block.buffers if v.name not in gone))


@dataclass
class _Operand:
    """Queries, keys or values: `value` is [*own, rows, columns], its `own` axes at `level` full or 1."""

    value: Value
    own: Level
    level: Level
    scale: float = 1.0
    swapped: bool = False


class _Search(Walk):
    """Rewrites one attention of a block at a time."""

    kinds = ("Softmax", "TiledAttention")

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        #: emitted operators, and those before which they are: masks of several layers are made once
        self.shared: dict[tuple[Any, ...], tuple[int, Value]] = {}

    def at(self, op: Operator) -> Found:
        """The second product, and the operators that take its place."""
        if op.op.name == "TiledAttention":
            return Found(op, self.again(op) or [op])
        weights = result(op)
        if op.op.axis not in (-1, weights.ndim - 1):  # type: ignore[attr-defined]
            raise NoMatchError(f"it is along axis {op.op.axis}")  # type: ignore[attr-defined]
        if weights.ndim < 2:
            raise NoMatchError("its scores are no matrix")
        return self.attention(op)

    def note(self, op: Operator, found: Found | NoMatchError) -> str:
        """A note: the attention that was found, or why it is none."""
        if not isinstance(found, Found):
            return f"softmax '{result(op).name}' is not attention: {found}"
        attention = next(o.op for o in found.operators if isinstance(o.op, TiledAttention))
        return f"'{result(found.op).name}' is attention{described(attention)}"

    def attention(self, softmax: Operator) -> Found:
        """From a softmax down to the second product, and up to the first."""
        weights = self.weights(softmax)
        product, scores = self.scores(softmax)
        for condition, inside in weights.cleared:
            if not scores.masks.clear(condition, inside):
                raise NoMatchError("its weights are set to 0 where its scores are not hidden")
        return Found(weights.product, self.once(weights.product, self.emit(weights, product, scores)))

    def once(self, last: Operator, operators: list[Operator]) -> list[Operator]:
        """The operators that come before an operator, but those that an earlier attention has too."""
        names: dict[str, Value] = {}
        found = []
        at = self.graph.places[result(last).name]
        for i, op in enumerate(operators):
            o = op.reading(names)
            output = result(o)
            key = (o.op, o.inputs)
            before, same = self.shared.get(key, (at, output))
            if before < at and i < len(operators) - 1:
                names[output.name] = same
                continue
            self.shared.setdefault(key, (at, output))
            found.append(o)
        return found

    # -- operands -----------------------------------------------------------------------------------------------

    def operand(self, v: Value | None, level: Level, swapped: bool, dtype: str) -> _Operand:
        """Where queries, keys or values come from, above scaling, transposition, repetition, regrouping, and casts from
        `dtype`, in which the values are."""
        if v is None or v.ndim < 2:
            raise NoMatchError("queries, keys or values are no matrices")
        lead = (1,) * (len(level) - v.ndim + 2) + v.shape[:-2]
        best = at = _Operand(v, lead, level, swapped=swapped)
        for _ in range(24):
            above = self.step(at, dtype)
            if above is None:
                return best
            at = above
            gained = at.own.count(1) > best.own.count(1) or at.scale != best.scale
            if gained or at.level == best.level or at.value.dtype != best.value.dtype:
                best = at
        return best

    def step(self, at: _Operand, dtype: str) -> _Operand | None:
        """One operator further up; None where it does something else."""
        op = self.graph.producer(at.value)
        source = op.inputs[0] if op is not None and op.inputs else None
        if op is None or source is None:
            return None
        name, shape, lead = op.op.name, at.value.shape, source.shape[:-2]
        if name == "Identity" or (name == "Cast" and source.dtype == dtype != at.value.dtype):
            return replace(at, value=source)
        if name in ("Mul", "Div"):
            rest, factor = self.graph.scaled(op) or (source, 0.0)
            return replace(at, value=rest, scale=at.scale * factor) if factor and math.isfinite(factor) else None
        if name == "Transpose" and op.op.perm == _swapped(len(shape)):  # type: ignore[attr-defined]
            return replace(at, value=source, swapped=not at.swapped)
        same = name in ("Reshape", "Expand") and source.ndim >= 2 and source.shape[-2:] == shape[-2:]
        if not same or at.own != at.level:
            return None
        if name == "Reshape":
            return replace(at, value=source, own=lead, level=lead)
        return replace(at, value=source, own=(1,) * (len(at.level) - len(lead)) + lead)

    # -- the operator -------------------------------------------------------------------------------------------

    def emit(self, weights: Weights, product: Operator, scores: Scores) -> list[Operator]:
        """The operators that take the place of the second product."""
        op = weights.product
        if product.op.transA:  # type: ignore[attr-defined]
            raise NoMatchError("its queries are transposed")
        y, top = result(op), result(product).shape[:-2]
        q = self.operand(product.inputs[0], top, False, y.dtype)
        k = self.operand(product.inputs[1], top, not product.op.transB, y.dtype)  # type: ignore[attr-defined]
        v = self.operand(op.inputs[1], y.shape[:-2], bool(op.op.transB), y.dtype)  # type: ignore[attr-defined]
        drop = weights.dropout
        ratio, seed = (0.0, 0) if drop is None else (drop.op.ratio, drop.op.seed)  # type: ignore[attr-defined]
        attention = TiledAttention(scale=scores.scale, cap=scores.cap, ratio=ratio, seed=seed)
        levels = scores.levels + weights.levels
        output = self.built(attention, (q, k, v), levels, scores, y, None if drop is None else drop.inputs[1])
        return [replace(o, role=op.role) for o in output]

    def again(self, op: Operator) -> list[Operator] | None:
        """An attention that is one operator already, with windows in place of masks and without copies of shared heads;
        None where it has none of these."""
        attention, (q, k, v, bias, step) = op.op, (*op.inputs, None, None)[:5]
        assert isinstance(attention, TiledAttention) and q is not None and k is not None and v is not None
        if attention.rows or len(op.outputs) > 1:
            return None
        level, y = q.shape[:-2], result(op)
        masks = Masks(self.graph, self.b, q.shape[-2], k.shape[-2], attention.first, attention.last)
        if bias is not None:
            masks.add(bias, level, 1.0)
        operands = [_Operand(q, level, level), *(self.operand(x, level, False, q.dtype) for x in (k, v))]
        if (
            all(isinstance(e, Bias) and e.band is None for e in masks.entries)
            and [e.value for e in masks.entries] == [x for x in (bias,) if x is not None]
            and (all(x.value == old for x, old in zip(operands, (q, k, v), strict=True)))
        ):
            return None
        return self.built(attention, operands, [level], Scores(masks), y, step)

    def built(
        self,
        attention: TiledAttention,
        operands: Sequence[_Operand],
        levels: Sequence[Level],
        scores: Scores,
        y: Value,
        step: Value | None,
    ) -> list[Operator]:
        """The operators that make y."""
        b, masks = self.b, scores.masks
        fine = finest([*(x.level for x in operands), *levels])
        if fine is None:
            raise NoMatchError("its leading axes are regrouped")
        q, k, v = (self.fitted(x, fine) for x in operands)
        if len({x.dtype for x in (q, k, v)}) > 1:
            raise NoMatchError("queries, keys and values differ in type")
        for by, level in scores.factors:
            q = b.Mul(q, self.regrouped(by, level, fine))
        if tuple(q.shape[:-2]) != fine:
            q = b.Expand(q, shape=(*fine, *q.shape[-2:]))
        masks.settle()
        q, bias = masks.emit(q, lambda x, level: self.regrouped(x, level, fine))
        scale = attention.scale * operands[0].scale * operands[1].scale
        attention = replace(attention, scale=scale, first=masks.first, last=masks.last)
        more = [bias] if bias is not None or step is not None else []
        output = self.applied(attention, [q, k, v, *more, *([] if step is None else [step])])
        output = masks.revived(output, v, lambda x, level: self.regrouped(x, level, fine))
        factor = operands[2].scale
        output = output if factor == 1 else b.Mul(output, b.constant(factor, output))
        output = output if output.shape == y.shape else b.Reshape(output, shape=y.shape)
        return [o.renamed({output.name: y.name}) for o in b.operators]

    def applied(self, attention: TiledAttention, inputs: list[Value | None]) -> Value:
        """Emits attention; NoMatchError where its rule refuses the types."""
        try:
            output = self.b.emit(attention, *inputs, want=1)
        except RecomputeError as e:
            raise NoMatchError(str(e)) from None
        assert isinstance(output, Value)
        return output

    def fitted(self, x: _Operand, fine: Level) -> Value:
        """An operand at the finest level, as rows."""
        lead = refined(x.own, x.level, fine)
        if lead is None:
            raise NoMatchError("its leading axes are regrouped")
        v = self.rows(x.value) if x.swapped else x.value
        shape = (*lead, *v.shape[-2:])
        return v if v.shape == shape else self.b.Reshape(v, shape=shape)

    def rows(self, v: Value) -> Value:
        """A matrix with its last two axes swapped: what was transposed, or a Transpose."""
        op, perm = self.graph.producer(v, "Transpose"), _swapped(v.ndim)
        if op is None:
            return self.b.Transpose(v, perm=perm)
        return self.b.Transpose(op.inputs[0], perm=tuple(op.op.perm[i] for i in perm))  # type: ignore[attr-defined]

    def regrouped(self, x: Value, level: Level, fine: Level) -> Value:
        """A bias or factor at the finest level."""
        if x.ndim <= 2:
            return x
        lead = refined(x.shape[:-2], level, fine)
        if lead is None:
            raise NoMatchError("a bias does not broadcast to the scores")
        shape = (*lead, *x.shape[-2:])
        return x if x.shape == shape else self.b.Reshape(x, shape=shape)


def _swapped(ndim: int) -> tuple[int, ...]:
    """The order of axes with the last two swapped."""
    return (*range(ndim - 2), ndim - 1, ndim - 2)
