"""Layer and RMS normalisation as one operator: found where a row is divided by the root of its mean square."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import RecomputeError
from ...language.ir import Block, Operator, Value
from ...ops.norm.fused import LayerNormalization, RMSNormalization
from ..base import ForwardPass
from ..matching.graph import Graph, NoMatchError, result
from ..matching.pattern import Captures, Term, any_of, match, number, op
from ..matching.rewrite import Found, Search


class FindNorms(ForwardPass):
    """Replace x / √(mean(x²) + ε) · scale by RMSNormalization, and what centres x before by LayerNormalization.

    For the forward pass, before differentiation.  What the exporters of PyTorch write is found: a square root and its
    reciprocal, a quotient by either or a division by the root, the mean taken off once or twice, casts of x to float32
    and back.  The gradient keeps x and one or two numbers a row, in place of the squares' source, the
    normalised rows and the roots.  Results agree to rounding.
    """

    def run(self, block: Block) -> Block:
        """The block itself if there is no such normalisation."""
        return find_norms(block)


def find_norms(block: Block) -> Block:
    """The block with normalisations as operators; values on the way that are read elsewhere, or outputs, stay."""
    return _Search(Graph(block)).rewritten()


def _normal(row: Term) -> Term:
    """A row divided by the root of its mean square, perhaps cast back to what it was before a cast to float32."""
    mean = op.ReduceMean(op.Mul(row, row), axes="axes", keepdims=1)
    root = op.Sqrt(op.Add(mean, number("epsilon", lambda c: c >= 0)))
    inverse = any_of(op.Reciprocal(root), op.Div(1.0, root))
    normal = any_of(op.Div(row, root), op.Mul(row, inverse)).named("normal")
    return any_of(op.Cast(normal).named("narrow"), normal)


#: rows without their means, which may be taken off twice, and rows as they are; then times a scale, plus a bias
_CENTRED = op.Mul(_normal(op.Sub("x", op.ReduceMean("x", axes="axes", keepdims=1))), "scale")
_KINDS: tuple[tuple[Term, type[LayerNormalization | RMSNormalization]], ...] = (
    (op.Add(_CENTRED, "bias"), LayerNormalization),
    (_CENTRED, LayerNormalization),
    (op.Mul(_normal("x"), "scale"), RMSNormalization),
)


class _Search(Search):
    """From a square root down to the last operator of a normalisation."""

    kinds = ("Sqrt",)

    def at(self, root: Operator) -> Found:
        """The longest part that is a normalisation."""
        for last in reversed([*self.graph.below(root, 5)]):
            for pattern, kind in _KINDS:
                names = match(pattern, self.graph, result(last))
                if names is not None:
                    try:
                        return self.norm(last, kind, names)
                    except (NoMatchError, RecomputeError):
                        self.b.operators.clear()
        raise NoMatchError

    def norm(self, last: Operator, kind: type[LayerNormalization | RMSNormalization], names: Captures) -> Found:
        """The replacement of a normalisation's last operator."""
        x, axes = names["x"], names["axes"] or ()
        axis = x.ndim - len(axes)
        last_axes = axes and sorted(a % x.ndim for a in axes) == [*range(axis, x.ndim)]
        if not last_axes or not x.size or names["normal"].shape != x.shape:
            raise NoMatchError
        if "narrow" in names:
            x = self.before_cast(x, names["narrow"])
        vectors = [self.vector(names[n], x.shape[axis:]) for n in ("scale", "bias") if n in names]
        return self.emitted(last, self.b.emit(kind(axis=axis, epsilon=names["epsilon"]), x, *vectors, want=1))

    def before_cast(self, x: Value, narrow: Value) -> Value:
        """The value before a cast to float32 that is cast back later; the operator does both."""
        cast = self.graph.producer(x, "Cast")
        before = None if cast is None else cast.inputs[0]
        if before is None or x.dtype != "f32" or before.dtype not in ("f16", "bf16") or narrow.dtype != before.dtype:
            raise NoMatchError
        return before

    def vector(self, v: Value, shape: Sequence[int]) -> Value:
        """A number for each of the normalised axes."""
        if v.size != math.prod(shape) or tuple(v.shape[-len(shape) :]) != tuple(shape):
            raise NoMatchError
        return v if v.shape == shape else self.b.Reshape(v, shape=shape)
