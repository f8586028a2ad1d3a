"""Attention as one operator: found where a softmax stands between two matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import RecomputeError
from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...ops.attention.tiled import TiledAttention
from ..base import Pass
from ..cleanup.dead_code import prune
from .known import Known
from .levels import Level, finest, refined
from .scores import NotAttentionError, Scores, Walk, Weights


@dataclass(frozen=True)
class FindAttention(Pass):
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


def find_attention(block: Block, data: Mapping[str, Any] | None = None) -> tuple[Block, list[str]]:
    """The rewritten block, and a note for each softmax: what was found, or why it is none."""
    search: _Search | None = None
    notes: list[str] = []
    made: dict[int, list[Operator]] = {}
    for op in block.operators:
        if op.op.name != "Softmax" or op.role is not Role.FORWARD:
            continue
        search = search or _Search(block, data or {})
        search.builder.operators.clear()
        try:
            at, operators, what = search.attention(op)
            made[at] = operators
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

    def attention(self, softmax: Operator) -> tuple[int, list[Operator], str]:
        """The index of the second product, the operators that take its place, and what is special."""
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
        return weights.product, self.emit(weights, product, scores), self.described(weights, scores)

    @staticmethod
    def described(weights: Weights, scores: Scores) -> str:
        """What a note says besides that it is attention."""
        masks, found = scores.masks, []
        if (masks.first, masks.last) != (None, None):
            ends = ("the first" if masks.first is None else f"{masks.first:+d}", masks.last)
            found.append(f"keys from {ends[0]} to {'the last' if ends[1] is None else f'{ends[1]:+d}'} of each query")
        if scores.cap:
            found.append(f"soft cap {scores.cap:g}")
        if weights.dropout is not None:
            found.append(f"dropout {weights.dropout.op.ratio:g}")  # type: ignore[attr-defined]
        return f" ({', '.join(found)})" if found else ""

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
        b, op = self.builder, self.block.operators[weights.product]
        if product.op.transA:  # type: ignore[attr-defined]
            raise NotAttentionError("its queries are transposed")
        y, top = next(op.writes()), next(product.writes()).shape[:-2]
        q = self.operand(product.inputs[0], top, False, y.dtype)
        k = self.operand(product.inputs[1], top, not product.op.transB, y.dtype)  # type: ignore[attr-defined]
        v = self.operand(op.inputs[1], y.shape[:-2], bool(op.op.transB), y.dtype)  # type: ignore[attr-defined]
        fine = finest([x.level for x in (q, k, v)] + scores.levels + weights.levels)
        if fine is None:
            raise NotAttentionError("its leading axes are regrouped")
        given = [self.fitted(x, fine) for x in (q, k, v)]
        if len({x.dtype for x in given}) > 1:
            raise NotAttentionError("queries, keys and values differ in type")
        for by, level in scores.factors:
            given[0] = b.Mul(given[0], self.regrouped(by, level, fine))
        if tuple(given[0].shape[:-2]) != fine:
            given[0] = b.Expand(given[0], shape=(*fine, *given[0].shape[-2:]))
        bias = None
        for x, level in scores.masks.emit(given[0].dtype):
            x = self.regrouped(x, level, fine)
            bias = x if bias is None else b.Add(bias, x)
        drop = {} if weights.dropout is None else weights.dropout.op.attributes()
        masks = scores.masks
        attention = TiledAttention(
            scale=scores.scale * q.scale * k.scale, first=masks.first, last=masks.last, cap=scores.cap,
            ratio=drop.get("ratio", 0.5) if weights.dropout is not None else 0.0, seed=drop.get("seed", 0),
        )  # fmt: skip
        step = [] if weights.dropout is None else [weights.dropout.inputs[1]]
        more = [bias, *step] if bias is not None or step else []
        found = self.applied(attention, [*given, *more], v.scale)
        found = found if found.shape == y.shape else b.Reshape(found, shape=y.shape)
        return [replace(o.renamed({found.name: y.name}), role=op.role) for o in b.operators]

    def applied(self, attention: TiledAttention, inputs: list[Value | None], scale: float) -> Value:
        """Emits attention; NotAttentionError where its rule refuses the types."""
        try:
            found = self.builder.emit(attention, *inputs, want=1)
        except RecomputeError as e:
            raise NotAttentionError(str(e)) from None
        assert isinstance(found, Value)
        return found if scale == 1 else self.builder.Mul(found, self.builder.constant(scale, found))

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
