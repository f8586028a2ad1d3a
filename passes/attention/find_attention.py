"""Attention as one operator: found where a softmax stands between two matrix products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...ops.attention.tiled import TiledAttention
from ..base import Pass
from ..cleanup.dead_code import prune


@dataclass(frozen=True)
class FindAttention(Pass):
    """Replace softmax(scale · q kᵀ + bias) v by TiledAttention, which keeps no scores.

    For the forward pass, before differentiation.  What is found: scaling by constants before or after the product, any
    number of added biases and of masks by Where, keys that are transposed or not, casts around the softmax.  The scores
    and weights must have no other readers.  The function `find_attention` also says what was found, or why not.
    """

    def run(self, block: Block) -> Block:
        """The block itself if there is no attention."""
        return find_attention(block)[0]


@dataclass
class _Scores:
    """What is known of the scores while their operators are followed upwards."""

    scale: float = 1.0
    bias: list[Value] = None  # type: ignore[assignment]


class _NotAttentionError(Exception):
    """Why a softmax is not attention."""


def find_attention(block: Block) -> tuple[Block, list[str]]:
    """The rewritten block, and a note for each softmax: what was found, or why it is none."""
    search = _Search(block)
    notes: list[str] = []
    made: dict[int, list[Operator]] = {}
    for op in block.operators:
        if op.op.name != "Softmax" or op.role is not Role.FORWARD:
            continue
        name = next(op.writes()).name
        try:
            at, operators = search.attention(op)
            made[at] = operators
            notes.append(f"'{next(block.operators[at].writes()).name}' is attention")
        except _NotAttentionError as e:
            notes.append(f"softmax '{name}' is not attention: {e}")
    if not made:
        return block, notes
    operators = [new for i, op in enumerate(block.operators) for new in made.get(i, [op])]
    constants = (*block.constants, *search.builder.constants)
    found = block.with_operators(operators, constants=constants)
    return found.with_operators(prune(operators, found.outputs, (Role.FORWARD,))), notes


class _Search:
    """Follows operators of a block."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.producers = block.producers()
        self.consumers = block.consumers()
        self.builder = Builder.on(block)
        self.numbers: Mapping[str, float] = {
            c.value.name: float(c.data[0]) for c in block.constants if len(c.data) == 1 and c.value.type.is_float
        }

    def producer(self, v: Value | None) -> Operator | None:
        at = None if v is None else self.producers.get(v.name)
        return None if at is None else self.block.operators[at]

    def only_reader(self, v: Value) -> int:
        """The index of the only operator that reads a value."""
        readers = self.consumers.get(v.name, [])
        if len(readers) != 1 or v.name in self.block.outputs:
            raise _NotAttentionError(f"'{v.name}' has {len(readers)} readers")
        return readers[0]

    def attention(self, softmax: Operator) -> tuple[int, list[Operator]]:
        """The index of the second product, and the operators that take its place."""
        weights = next(softmax.writes())
        if softmax.op.axis not in (-1, weights.ndim - 1):  # type: ignore[attr-defined]
            raise _NotAttentionError(f"it is along axis {softmax.op.axis}")  # type: ignore[attr-defined]
        at = self.only_reader(weights)
        while (op := self.block.operators[at]).op.name in ("Cast", "Identity"):
            at = self.only_reader(next(op.writes()))
        if op.op.name != "MatMul" or op.op.transA or op.op.transB:  # type: ignore[attr-defined]
            raise _NotAttentionError(f"a {op.op.name} reads its weights")
        v = op.inputs[1]
        path = op.inputs[0]
        while path is not None and path.name != weights.name:
            before = self.producer(path)
            if before is None or before.op.name not in ("Cast", "Identity"):
                raise _NotAttentionError("its weights are the right factor of the product")
            path = before.inputs[0]
        scores = _Scores(bias=[])
        product = self.product(softmax.inputs[0], scores)
        return at, self.emit(op, product, v, scores)

    def product(self, v: Value | None, scores: _Scores) -> Operator:
        """The product of queries and keys, above additions, scalings, masks and casts."""
        while True:
            op = self.producer(v)
            if op is None or v is None:
                raise _NotAttentionError("its scores are no product")
            self.only_reader(v)
            if op.op.name == "MatMul":
                return op
            if op.op.name in ("Cast", "Identity"):
                v = op.inputs[0]
            elif op.op.name in ("Mul", "Div"):
                v = self.scaled(op, scores)
            elif op.op.name == "Add":
                v = self.biased(op, scores)
            elif op.op.name == "Where":
                v = self.masked(op, scores)
            else:
                raise _NotAttentionError(f"a {op.op.name} makes its scores")

    def scaled(self, op: Operator, scores: _Scores) -> Value | None:
        """The other factor of a product with a constant; biases below it would be scaled too."""
        a, b = op.inputs
        if b is not None and b.name in self.numbers:
            factor, rest = self.numbers[b.name], a
        elif op.op.name == "Mul" and a is not None and a.name in self.numbers:
            factor, rest = self.numbers[a.name], b
        else:
            raise _NotAttentionError("its scores are scaled by what is no constant")
        if not factor or not math.isfinite(factor):
            raise _NotAttentionError(f"its scores are scaled by {factor}")
        scores.scale *= factor if op.op.name == "Mul" else 1 / factor
        return rest

    def biased(self, op: Operator, scores: _Scores) -> Value | None:
        """The summand that leads to the product; the other is a bias."""
        if scores.scale != 1.0:
            raise _NotAttentionError("a bias is scaled together with the scores")
        shape = next(op.writes()).shape
        for rest, bias in (op.inputs, op.inputs[::-1]):
            if rest is not None and bias is not None and rest.shape == shape and self.leads(rest):
                scores.bias.append(bias)
                return rest
        raise _NotAttentionError("no summand of its scores is a product")

    def masked(self, op: Operator, scores: _Scores) -> Value | None:
        """The branch of a Where that leads to the product; the other is a number far below 0."""
        if scores.scale != 1.0:
            raise _NotAttentionError("a mask is scaled together with the scores")
        condition, a, b = op.inputs
        for rest, low, swapped in ((a, b, False), (b, a, True)):
            number = None if low is None else self.numbers.get(low.name)
            if rest is None or low is None or number is None or number > -1e4 or not self.leads(rest):
                continue
            zero = self.builder.constant(0.0, rest)
            below = self.builder.constant(-math.inf if number < -1e30 else number, rest)
            scores.bias.append(self.builder.Where(condition, *((below, zero) if swapped else (zero, below))))
            return rest
        raise _NotAttentionError("a Where of its scores has no branch far below 0")

    def leads(self, v: Value) -> bool:
        """Whether a product of matrices is above, through the operators that `product` follows."""
        seen = 0
        stack = [v]
        while stack and seen < 16:
            seen += 1
            op = self.producer(stack.pop())
            if op is None:
                continue
            if op.op.name == "MatMul":
                return True
            if op.op.name in ("Cast", "Identity", "Mul", "Div", "Add", "Where"):
                stack += [x for x in op.inputs if x is not None and x.type.is_float]
        return False

    def emit(self, op: Operator, product: Operator, v: Value | None, scores: _Scores) -> list[Operator]:
        """The operators that take the place of the second product."""
        b = self.builder
        made_before = list(b.operators)  # the masks of this search
        b.operators.clear()
        q, k = product.inputs
        y = next(op.writes())
        if q is None or k is None or v is None or product.op.transA:  # type: ignore[attr-defined]
            raise _NotAttentionError("its queries are transposed")
        if not product.op.transB:  # type: ignore[attr-defined]
            k = self.transposed(k)
        if not (q.ndim == k.ndim == v.ndim and q.dtype == k.dtype == v.dtype):
            raise _NotAttentionError("queries, keys and values differ in rank or type")
        bias = None
        for x in scores.bias:
            x = x if x.dtype == q.dtype else b.Cast(x, to=q.dtype)
            bias = x if bias is None else b.Add(bias, x)
        attention = TiledAttention(scale=scores.scale)
        try:
            attention.infer(*(None if x is None else x.type for x in (q, k, v, bias)))
        except Exception as e:
            raise _NotAttentionError(str(e)) from None
        found = b.emit(attention, *([q, k, v] if bias is None else [q, k, v, bias]), want=1)
        operators = [*made_before, *b.operators]
        b.operators.clear()
        return [replace(o.renamed({found.name: y.name}), role=op.role) for o in operators]

    def transposed(self, k: Value) -> Value:
        """Keys as rows: what was transposed, or a Transpose."""
        op = self.producer(k)
        swap = (*range(k.ndim - 2), k.ndim - 1, k.ndim - 2)
        if op is not None and op.op.name == "Transpose" and op.inputs[0] is not None:
            perm = tuple(op.op.perm)  # type: ignore[attr-defined]
            if perm == swap:
                return op.inputs[0]
            return self.builder.Transpose(op.inputs[0], perm=tuple(perm[i] for i in swap))
        return self.builder.Transpose(k, perm=swap)
