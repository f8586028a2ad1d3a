"""Attention as one operator: found where a softmax stands between two matrix products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import RecomputeError
from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...language.program import Program
from ...ops.attention.tiled import TiledAttention
from ..base import ForwardPass
from ..cleanup.dead_code import prune
from .known import Known
from .levels import Level, finest, refined
from .masks import Bias, Masks
from .scores import NotAttentionError, Scores, Walk, Weights


@dataclass(frozen=True)
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
        """The block itself if there is no attention."""
        return find_attention(block, self.data)[0]

    def changed(self, block: Block, program: Program) -> Block:
        """The same with the program's own arrays."""
        return find_attention(block, program.data)[0]


def find_attention(block: Block, data: Mapping[str, Any] | None = None) -> tuple[Block, list[str]]:
    """The rewritten block, and a note for each softmax: what was found, or why it is none."""
    search: _Search | None = None
    notes: list[str] = []
    made: dict[int, list[Operator]] = {}
    for i, op in enumerate(block.operators):
        if op.op.name not in ("Softmax", "TiledAttention") or op.role is not Role.FORWARD:
            continue
        search = search or _Search(block, data or {})
        search.builder.operators.clear()
        try:
            if op.op.name == "TiledAttention":
                made[i] = search.again(op) or [op]
                at, what = i, described(next(o.op for o in made[i] if isinstance(o.op, TiledAttention)))
            else:
                at, found_here = search.attention(op)
                made[at] = search.once(at, found_here)
                what = described(next(o.op for o in found_here if isinstance(o.op, TiledAttention)))
            notes.append(f"'{next(block.operators[at].writes()).name}' is attention{what}")
        except NotAttentionError as e:
            notes.append(f"softmax '{next(op.writes()).name}' is not attention: {e}")
    if search is None or not made:
        return block, notes
    operators = [new for i, op in enumerate(block.operators) for new in made.get(i, [op])]
    constants = (*block.constants, *search.builder.constants)
    found = block.with_operators(operators, constants=constants)
    kept = prune(operators, found.outputs, (Role.FORWARD,))
    return _without_masks(found.with_operators(kept), block), notes


def described(op: TiledAttention) -> str:
    """What a note says besides that it is attention."""
    found = []
    if (op.first, op.last) != (None, None):
        ends = "the first" if op.first is None else f"{op.first:+d}", "the last" if op.last is None else f"{op.last:+d}"
        found.append(f"keys from {ends[0]} to {ends[1]} of each query")
    if op.cap:
        found.append(f"soft cap {op.cap:g}")
    if op.ratio:
        found.append(f"dropout {op.ratio:g}")
    return f" ({', '.join(found)})" if found else ""


def _without_masks(block: Block, before: Block) -> Block:
    """The block without the buffers that were read before and are read no more."""
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

    def __init__(self, block: Block, data: Mapping[str, Any]) -> None:
        super().__init__(block, Known(block, data), Builder.on(block))
        #: what was emitted, and before which operator: masks of several layers are made once
        self.emitted: dict[tuple[Any, ...], tuple[int, Value]] = {}

    def attention(self, softmax: Operator) -> tuple[int, list[Operator]]:
        """The index of the second product, and the operators that take its place."""
        made = next(softmax.writes())
        if softmax.op.axis not in (-1, made.ndim - 1):  # type: ignore[attr-defined]
            raise NotAttentionError(f"it is along axis {softmax.op.axis}")  # type: ignore[attr-defined]
        if made.ndim < 2:
            raise NotAttentionError("its scores are no matrix")
        weights = self.weights(softmax)
        product, scores = self.scores(softmax)
        for condition, inside in weights.cleared:
            if not scores.masks.clear(condition, inside):
                raise NotAttentionError("its weights are set to 0 where its scores are not hidden")
        return weights.product, self.emit(weights, product, scores)

    def once(self, at: int, operators: list[Operator]) -> list[Operator]:
        """The operators that come before operator `at`, but those that an earlier attention has too."""
        names: dict[str, Value] = {}
        found = []
        for i, op in enumerate(operators):
            o = op.reading(names)
            made = next(o.writes())
            key = (o.op, o.inputs)
            before, same = self.emitted.get(key, (at, made))
            if before < at and i < len(operators) - 1:
                names[made.name] = same
                continue
            self.emitted.setdefault(key, (at, made))
            found.append(o)
        return found

    # -- operands -----------------------------------------------------------------------------------------------

    def operand(self, v: Value | None, level: Level, swapped: bool, dtype: str) -> _Operand:
        """Where queries, keys or values come from, above scaling, transposition, repetition, regrouping, and casts from
        `dtype`, in which the values are."""
        if v is None or v.ndim < 2:
            raise NotAttentionError("queries, keys or values are no matrices")
        own = (1,) * (len(level) - v.ndim + 2) + v.shape[:-2]
        best = at = _Operand(v, own, level, swapped=swapped)
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
        op = self.producer(at.value)
        source = op.inputs[0] if op is not None and op.inputs else None
        if op is None or source is None:
            return None
        name, shape = op.op.name, at.value.shape
        if name == "Identity" or (name == "Cast" and source.dtype == dtype != at.value.dtype):
            return replace(at, value=source)
        if name in ("Mul", "Div"):
            return self.scaling(op, at)
        lead = source.shape[:-2]
        if name == "Transpose" and op.op.perm == (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2):  # type: ignore[attr-defined]
            return replace(at, value=source, swapped=not at.swapped)
        if name == "Reshape" and source.ndim >= 2 and source.shape[-2:] == shape[-2:] and at.own == at.level:
            return replace(at, value=source, own=lead, level=lead)
        if name == "Expand" and source.ndim >= 2 and source.shape[-2:] == shape[-2:] and at.own == at.level:
            return replace(at, value=source, own=(1,) * (len(at.level) - len(lead)) + lead)
        return None

    def scaling(self, op: Operator, at: _Operand) -> _Operand | None:
        """Above a product with a number."""
        for rest, by in (op.inputs, op.inputs[::-1]) if op.op.name == "Mul" else (op.inputs,):
            factor = self.known.number(by)
            if factor and rest is not None and rest.shape == at.value.shape:
                return replace(at, value=rest, scale=at.scale * (factor if op.op.name == "Mul" else 1 / factor))
        return None

    # -- the operator -------------------------------------------------------------------------------------------

    def emit(self, weights: Weights, product: Operator, scores: Scores) -> list[Operator]:
        """The operators that take the place of the second product."""
        op = self.block.operators[weights.product]
        if product.op.transA:  # type: ignore[attr-defined]
            raise NotAttentionError("its queries are transposed")
        y, top = next(op.writes()), next(product.writes()).shape[:-2]
        q = self.operand(product.inputs[0], top, False, y.dtype)
        k = self.operand(product.inputs[1], top, not product.op.transB, y.dtype)  # type: ignore[attr-defined]
        v = self.operand(op.inputs[1], y.shape[:-2], bool(op.op.transB), y.dtype)  # type: ignore[attr-defined]
        drop = weights.dropout
        ratio, seed = (0.0, 0) if drop is None else (drop.op.ratio, drop.op.seed)  # type: ignore[attr-defined]
        attention = TiledAttention(scale=scores.scale, cap=scores.cap, ratio=ratio, seed=seed)
        levels = scores.levels + weights.levels
        made = self.built(attention, (q, k, v), levels, scores, y, None if drop is None else drop.inputs[1])
        return [replace(o, role=op.role) for o in made]

    def again(self, op: Operator) -> list[Operator] | None:
        """An attention that is one operator already, with windows in place of masks and without copies of shared heads;
        None where it has none of these."""
        attention, (q, k, v, bias, step) = op.op, (*op.inputs, None, None)[:5]
        assert isinstance(attention, TiledAttention) and q is not None and k is not None and v is not None
        if attention.rows or len(op.outputs) > 1:
            return None
        level, y = q.shape[:-2], next(op.writes())
        masks = Masks(
            self.known, self.builder, self.producer, q.shape[-2], k.shape[-2], attention.first, attention.last
        )
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
        b, masks = self.builder, scores.masks
        fine = finest([*(x.level for x in operands), *levels])
        if fine is None:
            raise NotAttentionError("its leading axes are regrouped")
        q, k, v = (self.fitted(x, fine) for x in operands)
        if len({x.dtype for x in (q, k, v)}) > 1:
            raise NotAttentionError("queries, keys and values differ in type")
        for by, level in scores.factors:
            q = b.Mul(q, self.regrouped(by, level, fine))
        if tuple(q.shape[:-2]) != fine:
            q = b.Expand(q, shape=(*fine, *q.shape[-2:]))
        masks.settle()
        q, bias = masks.emit(q, lambda x, level: self.regrouped(x, level, fine))
        scale = attention.scale * operands[0].scale * operands[1].scale
        attention = replace(attention, scale=scale, first=masks.first, last=masks.last)
        more = [bias] if bias is not None or step is not None else []
        found = self.applied(attention, [q, k, v, *more, *([] if step is None else [step])])
        found = masks.revived(found, v, lambda x, level: self.regrouped(x, level, fine))
        factor = operands[2].scale
        found = found if factor == 1 else b.Mul(found, b.constant(factor, found))
        found = found if found.shape == y.shape else b.Reshape(found, shape=y.shape)
        return [o.renamed({found.name: y.name}) for o in b.operators]

    def applied(self, attention: TiledAttention, inputs: list[Value | None]) -> Value:
        """Emits attention; NotAttentionError where its rule refuses the types."""
        try:
            found = self.builder.emit(attention, *inputs, want=1)
        except RecomputeError as e:
            raise NotAttentionError(str(e)) from None
        assert isinstance(found, Value)
        return found

    def fitted(self, x: _Operand, fine: Level) -> Value:
        """An operand at the finest level, as rows."""
        lead = refined(x.own, x.level, fine)
        if lead is None:
            raise NotAttentionError("its leading axes are regrouped")
        v = self.rows(x.value) if x.swapped else x.value
        shape = (*lead, *v.shape[-2:])
        return v if v.shape == shape else self.builder.Reshape(v, shape=shape)

    def rows(self, v: Value) -> Value:
        """A matrix with its last two axes swapped: what was transposed, or a Transpose."""
        op = self.producer(v)
        swap = (*range(v.ndim - 2), v.ndim - 1, v.ndim - 2)
        if op is not None and op.op.name == "Transpose" and op.inputs[0] is not None:
            perm = tuple(op.op.perm)  # type: ignore[attr-defined]
            return self.builder.Transpose(op.inputs[0], perm=tuple(perm[i] for i in swap))
        return self.builder.Transpose(v, perm=swap)

    def regrouped(self, x: Value, level: Level, fine: Level) -> Value:
        """A bias or factor at the finest level."""
        if x.ndim <= 2:
            return x
        lead = refined(x.shape[:-2], level, fine)
        if lead is None:
            raise NotAttentionError("a bias does not broadcast to the scores")
        shape = (*lead, *x.shape[-2:])
        return x if x.shape == shape else self.builder.Reshape(x, shape=shape)
