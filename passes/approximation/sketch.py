"""Sketches: the gradient of a weight, a product over the batch, from a random sketch of its input.

    dW = MatMul(X, dY) {transA=1}        X.sketch = Sketch(X, step)                  in the forward pass
                                         dY.sketch = Sketch(dY, step)                the same S
                                         dW = MatMul(X.sketch, dY.sketch) {transA=1}

Bershatsky et al. 2022, arXiv 2201.13195.  S is drawn again from the step counter, and X need not wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UsageError, nearest
from ...language.ir import Operator, Role, Value
from ...language.types import TensorType
from ...ops.approximation.sketch import KINDS, Sketch
from ...ops.convolution.conv import ConvGradWeight
from ...ops.linear.products import MatMul
from ...ops.shape.reshape import Reshape, Transpose
from .base import Approximation, seed_of
from .edits import Edits
from .step import Leaf, Step

_DEFAULT = "rows"
#: the product of a weight's gradient: [B, n], [B, m] → [n, m]
_OVER_ROWS = MatMul(transA=1)


@dataclass(frozen=True)
class SketchedProducts(Approximation):
    """Weight gradients from `rate` (a share) or `rows` (a number) of the rows of a product over the batch."""

    name = "sketch"
    usage = f"sketch:RATE[:{'|'.join(KINDS)}] (a share of the rows, such as 0.2, or a number of them)"

    rate: float | None
    rows: int | None
    kind: str = _DEFAULT

    def __str__(self) -> str:
        amount = f"{self.rate:g}" if self.rate is not None else str(self.rows)
        return f"{self.name}:{amount}:{self.kind}"

    @classmethod
    def parse(cls, settings: Sequence[str]) -> SketchedProducts:
        """RATE or ROWS, and the kind of the sketch."""
        if not 1 <= len(settings) <= 2:
            raise UsageError(f"'{':'.join([cls.name, *settings])}': give {cls.usage}")
        kind = settings[1] if len(settings) > 1 else _DEFAULT
        if kind not in KINDS:
            raise UsageError(f"there is no sketch '{kind}'{nearest(kind, KINDS)}; known: {', '.join(KINDS)}")
        try:
            amount = float(settings[0])
        except ValueError:
            amount = math.nan
        if amount > 1 and amount.is_integer():
            return cls(None, int(amount), kind)
        if not 0 < amount < 1:
            raise UsageError(
                f"'{cls.name}:{settings[0]}': the rate must lie between 0 and 1 (of the rows are kept), or be a whole "
                "number of rows"
            )
        return cls(amount, None, kind)

    def kept_rows(self, batch: int) -> int:
        """Rows that are kept of a batch."""
        return self.rows if self.rows is not None else max(1, round(self.rate * batch))  # type: ignore[operator]

    def keeps(self, step: Step, leaf: Leaf) -> TensorType | None:
        """The sketch of the forward pass's factor of a product over the batch."""
        product = _product(step, leaf)
        if product is None:
            return None
        rows = self.kept_rows(product.batch)
        return leaf.read.type.with_shape((rows, product.features)) if rows < product.batch else None

    def why_nothing(self, step: Step) -> str:
        """Where a number of rows is no less than any product has."""
        products = [p.batch for v in step.waiting() for leaf in step.leaves(v) if (p := _product(step, leaf))]
        if self.rows is None or not products or self.rows < max(products):
            return ""
        return f"it keeps {self.rows:,} rows, and the products over the batch have {max(products):,} at most"

    def replace(self, step: Step, leaf: Leaf, edits: Edits) -> None:
        """The product of two sketches."""
        o, product = step.operators[leaf.at], _product(step, leaf)
        assert product is not None
        op = Sketch(self.kept_rows(product.batch), self.kind, seed_of(leaf.origin.name))
        (kept,) = edits.kept(op, leaf.origin, leaf.read.shape, "sketch", product.turned)
        operators: list[Operator] = []
        factors: list[Value] = []
        for v in o.inputs:
            assert v is not None
            if v == leaf.read:
                factors.append(kept)
                continue
            x = (
                v
                if product.turned is None
                else edits.emit(operators, product.turned, [v], f"{v.name}.turned", o.role)[0]
            )
            factors += edits.emit(operators, op, [x, *edits.counter(op)], f"{v.name}.sketch", Role.BACKWARD)
        if product.turned is None:
            operators.append(Operator(o.op, tuple(factors), o.outputs, o.role))
        else:  # [k, c], [k, m] → [m, c, 1, ...]
            (y,), w = edits.emit(operators, _OVER_ROWS, factors[::-1], f"{kept.name}.product", o.role), next(o.writes())
            operators.append(Operator(Reshape(w.shape), (y,), o.outputs, o.role))
        edits.replaced[leaf.at] = operators


@dataclass(frozen=True)
class _Product:
    """A product over `batch` rows, of which one factor, [batch, features], is a forward value.

    `turned`: what makes rows of both factors first.
    """

    batch: int
    features: int
    turned: Transpose | None = None


def _product(step: Step, leaf: Leaf) -> _Product | None:
    """The product over the batch that a reader is, whose other factor the backward pass made; None if it is none."""
    o = step.operators[leaf.at]
    if len(o.inputs) != 2 or step.counter is None or not leaf.read.type.is_float:
        return None
    other = o.inputs[1] if o.inputs[0] == leaf.read else o.inputs[0]
    if other is None or other.name in step.origin:
        return None
    if isinstance(o.op, ConvGradWeight):
        return _pointwise(o.op, leaf.read) if o.inputs[0] == leaf.read else None
    if o.op != _OVER_ROWS or leaf.read.ndim != 2 or other.ndim != 2:
        return None
    batch, features = leaf.read.shape
    return _Product(batch, features)


def _pointwise(op: ConvGradWeight, x: Value) -> _Product | None:
    """The weight's gradient of a convolution that is a product of channels: a kernel of one element, no stride."""
    if op.group != 1 or any(op.pads) or {*op.kernel, *op.strides} != {1}:
        return None
    turned = Transpose((0, *range(2, x.ndim), 1))
    return _Product(x.size // x.shape[1], x.shape[1], turned)
