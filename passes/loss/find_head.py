"""The head of a language model as one operator: found where a cross entropy stands behind a matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...language.builder import Builder
from ...language.ir import Block, Operator, Value
from ...ops.loss.cross_entropy import LabelLoss
from ...ops.loss.linear_cross_entropy import LinearCrossEntropy
from ..base import Pass
from ..cleanup.dead_code import prune
from ..matching.graph import FORWARD, Graph, NoMatchError, operands, result
from ..matching.pattern import Pattern, match, number, op
from ..matching.rewrite import Found, Search

#: bytes of logits from which on training makes a head one operator without being asked
LARGE = 1 << 21
#: and rows: with fewer, most of the logits are held at a time
ROWS = 512


class FindHead(Pass):
    """Replace a product with the vocabulary's matrix and its cross entropy by LinearCrossEntropy, without the logits.

    `loss`: the trained loss; `kept`: values that are fetched, for which the logits have to be made anyway; `large`:
    only where it is known to pay.  For the forward pass, before differentiation; see `find_head`.
    """

    refuses = ("gradients",)

    loss: str = "loss"
    kept: tuple[str, ...] = ()
    large: bool = True

    def run(self, block: Block) -> Block:
        return find_head(block, self.loss, self.kept, large=self.large)[0]


@dataclass
class _Chain:
    """The state of the walk from a loss upwards to its product.

    `moves`: what has to be done to x, as (axes of the logits that it is about) → a function that emits it; `factor` and
    `cap` as in LinearCrossEntropy, from the logits upwards; `logarithms`: a LogSoftmax is still to come; `names`: the
    values passed.
    """

    logarithms: bool = False
    moves: list[Callable[[Builder, Value], Value]] = field(default_factory=list)
    factor: float = 1.0
    cap: float = 0.0
    bias: Value | None = None
    names: list[str] = field(default_factory=list)


def find_head(
    block: Block, loss: str | None = None, kept: Sequence[str] = (), *, large: bool = False
) -> tuple[Block, list[str]]:
    """The rewritten block, and a note for each cross entropy of class labels: what was found, or why it is no head.

    What is found: SoftmaxCrossEntropyLoss, or LogSoftmax and NegativeLogLikelihoodLoss, without class weights, with or
    without the label smoothing of `losses.cross_entropy`; between it and the product reshapes, casts, slices of
    positions, classes moved to the second axis, constant factors, a soft cap, a bias.  The logits must have no other
    readers on the way to `loss` (None: to any value).  Outputs made from them, such as the logits themselves, leave the
    block's outputs, but can be fetched: a product of their own makes them then.  `large`: only logits of 512
    rows and 2 MiB or more in float32 or float64 (products in 16-bit floats are left to the libraries of a device).
    """
    search = _Search(Graph(block, outputs=None if loss is None else [loss, *kept]), kept, large=large)
    if not search.run():
        return block, search.notes
    operators = search.operators()
    constants = (*block.constants, *search.b.constants)
    behind = search.behind(operators)
    outputs = tuple(n for n in block.outputs if n not in behind)
    fetchable = (*outputs, *behind.intersection(block.outputs), *([loss] if loss else ()))
    return block.with_operators(
        prune(operators, fetchable, FORWARD), outputs=outputs, constants=constants
    ), search.notes


def _smoothed(rule: LabelLoss, labels: Value) -> Pattern:
    """Smoothed labels as `losses.cross_entropy` writes them: the loss, and an even part from its log-probabilities."""
    ignored = op.Equal("labels", "ignored")
    even: Pattern = op.Neg(op.ReduceSum("logarithms", axes=(1,)))
    if rule.ignore_index is not None:
        even = op.Where(ignored, 0.0, even)
    if rule.reduction != "none":
        even = op.ReduceSum(even)
    if rule.reduction == "mean":
        counted = op.ReduceSum(op.Where(ignored, 0.0, 1.0))
        even = op.Div(even, float(labels.size) if rule.ignore_index is None else counted)
    return op.Add(op.Mul("value", number("rest")), op.Mul(even, number("share")))


class _Search(Search):
    """Follows operators of a block."""

    kinds = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
    roles = FORWARD

    def __init__(self, graph: Graph, kept: Sequence[str], *, large: bool) -> None:
        super().__init__(graph)
        self.kept, self.large = set(kept), large
        graph.outputs = tuple(kept)  # others may leave the block's outputs
        self.words = 0
        self.logits: set[str] = set()

    def behind(self, operators: Sequence[Operator]) -> set[str]:
        """Values that are made from the logits of heads that were found."""
        names = set(self.logits)
        for o in operators:
            if any(v.name in names for v in o.reads()):
                names.update(v.name for v in o.writes())
        return names

    def note(self, op: Operator, found: Found | NoMatchError) -> str:
        """A note: the head that was found, or why it is none."""
        if isinstance(found, Found):
            return f"'{result(op).name}' and its product are a head of {self.words:,} words"
        return f"cross entropy '{result(op).name}' is not fused with a product: {found}"

    # -- a loss ---------------------------------------------------------------------------------------------------

    def at(self, op: Operator) -> Found:
        """The operator that makes the loss, and the operators that take its place."""
        scores, labels = op.inputs[:2]
        assert scores is not None and labels is not None
        if len(op.inputs) > 2 and op.inputs[2] is not None:
            raise NoMatchError("it has class weights")
        if self.large and (scores.nbytes < LARGE or labels.size < ROWS):
            raise NoMatchError(f"its logits are small ({labels.size} rows, {scores.nbytes:,} bytes)")
        last, smoothing = op, 0.0
        if len(op.outputs) > 1 and (logarithms := op.outputs[1]) is not None and self.graph.readers(logarithms):
            last, smoothing = self.smoothing(op, logarithms, labels)
        chain = _Chain(logarithms=op.op.name == "NegativeLogLikelihoodLoss")
        product = self.product(scores, chain)
        return self.emit(op, last, product, chain, smoothing)

    def smoothing(self, op: Operator, logarithms: Value, labels: Value) -> tuple[Operator, float]:
        """The operator that adds the even part of smoothed labels to a loss, and the share of that part."""
        assert isinstance(op.op, LabelLoss)
        pattern, value = _smoothed(op.op, labels), result(op)
        for last in self.graph.below(self.graph.readers(logarithms)[0], 7):
            names = match(pattern, self.graph, result(last), labels=labels, logarithms=logarithms, value=value)
            if names is None or len(self.graph.readers(logarithms)) + len(self.graph.readers(value)) != 2:
                continue
            share = names["share"] * logarithms.shape[1]
            ignored = self.graph.known.constants.get(names["ignored"].name) if "ignored" in names else None
            same = op.op.ignore_index is None or (ignored is not None and ignored.data == (op.op.ignore_index,))
            if same and math.isclose(names["rest"] + share, 1.0, rel_tol=1e-5):
                return last, share
        raise NoMatchError("its log-probabilities are read")

    def only_reader(self, v: Value) -> None:
        count = len(self.graph.readers(v))
        if count > 1:
            raise NoMatchError(f"'{v.name}' has {count} readers")
        if v.name in self.kept:
            raise NoMatchError(f"'{v.name}' is fetched")

    # -- from the scores up to the product --------------------------------------------------------------------------

    def product(self, v: Value, chain: _Chain) -> Operator:
        """The product with the vocabulary's matrix; `v` [N, words, d1, ...] or [N, words]."""
        classes = 1  # the axis of the words
        seen: Value | None = v
        while True:
            assert seen is not None
            chain.names.append(seen.name)
            self.only_reader(seen)
            op = self.graph.producer(seen)
            if op is None:
                raise NoMatchError("no product makes its scores")
            if op.op.name in ("MatMul", "Gemm"):
                if chain.logarithms:
                    raise NoMatchError("no LogSoftmax makes its scores")
                if classes != seen.ndim - 1:
                    raise NoMatchError("its classes are not the last axis of a product")
                return op
            seen, classes = self.above(op, seen, classes, chain)

    def above(self, op: Operator, v: Value, classes: int, chain: _Chain) -> tuple[Value | None, int]:
        """The value above an operator, and the axis of its words."""
        name, rule, x = op.op.name, op.op, op.inputs[0]
        last = classes == v.ndim - 1
        if x is None:
            raise NoMatchError(f"a {name} makes its scores")
        if name in ("Cast", "Identity"):
            if not x.type.is_float:
                raise NoMatchError("its scores are whole numbers")
            return x, classes
        if name == "LogSoftmax" and chain.logarithms and rule.axis % v.ndim == classes:  # type: ignore[attr-defined]
            chain.logarithms = False
            return x, classes
        if name == "Transpose":
            perm = tuple(rule.perm)  # type: ignore[attr-defined]
            chain.moves.append(_transposed(perm, classes))
            return x, perm[classes]
        if name == "Reshape" and last and x.shape[-1] == v.shape[-1]:
            rows = v.shape[:-1]
            chain.moves.append(lambda b, y: b.Reshape(y, shape=(*rows, y.shape[-1])))
            return x, x.ndim - 1
        if name == "Slice" and classes in rule.untouched(x.shape):  # type: ignore[attr-defined]
            chain.moves.append(_sliced(op, classes))
            return x, classes
        if chain.logarithms:
            raise NoMatchError(f"a {name} makes its log-probabilities")
        if name in ("Mul", "Div"):
            return self.scaled(op, chain), classes
        if name == "Tanh":
            if chain.cap or chain.bias is not None or chain.factor <= 0:
                raise NoMatchError("a Tanh of its scores is no soft cap")
            chain.cap, chain.factor = chain.factor, 1.0
            return x, classes
        if name == "Add" and last:
            return self.biased(op, v, chain), classes
        raise NoMatchError(f"a {name} makes its scores")

    def scaled(self, op: Operator, chain: _Chain) -> Value:
        """The other factor of a product with a constant."""
        rest, number = self.graph.scaled(op) or (None, 0.0)
        if rest is None or not number or not math.isfinite(number):
            raise NoMatchError("its scores are scaled by a value that is not constant")
        if chain.bias is not None:
            raise NoMatchError("a bias is added to scaled scores")
        chain.factor *= number
        return rest

    def biased(self, op: Operator, v: Value, chain: _Chain) -> Value:
        """The summand that is the product; the other is a number a word."""
        for rest, bias in operands(op):
            if rest.shape == v.shape and bias.size == v.shape[-1] == bias.shape[-1] and chain.bias is None:
                chain.bias = bias
                return rest
        raise NoMatchError("the value added to its scores is not a bias")

    # -- what takes their place -----------------------------------------------------------------------------------

    def emit(self, op: Operator, last: Operator, product: Operator, chain: _Chain, smoothing: float) -> Found:
        """The operators that take the place of the loss's last one."""
        b = self.b
        x, w, transposed, bias, factor = self.factors(product, chain)
        for move in reversed(chain.moves):
            x = move(b, x)
        loss, labels = result(last), op.inputs[1]
        assert labels is not None
        if x.shape[:-1] != labels.shape:
            raise NoMatchError("its labels are no rows of the product")
        operation: Any = op.op
        head = LinearCrossEntropy(
            reduction=operation.reduction,
            ignore_index=operation.ignore_index,
            transB=transposed,
            smoothing=smoothing,
            cap=chain.cap,
            scale=factor,
        )
        try:
            head.infer(x.type, w.type, None if bias is None else bias.type, labels.type)
        except Exception as e:
            raise NoMatchError(str(e)) from None
        output = b.emit(head, x, w, bias, labels)
        if output.dtype != loss.dtype:
            output = b.Cast(output, to=loss.dtype)
        done = self.emitted(last, output, product.role)
        self.words = result(product).shape[-1]
        self.logits.update(n for n in chain.names if n != loss.name)
        return done

    def factors(self, product: Operator, chain: _Chain) -> tuple[Value, Value, int, Value | None, float]:
        """x, the vocabulary's matrix, whether it is [words, d], the bias, and the factor of the logits."""
        rule: Any = product.op
        x, w = product.inputs[:2]
        bias = product.inputs[2] if len(product.inputs) > 2 else None
        factor = chain.factor
        assert x is not None and w is not None
        if self.large and x.dtype in ("f16", "bf16"):
            raise NoMatchError("its product is in a low precision")
        if rule.transA or w.ndim != 2 or x.ndim < 2:
            raise NoMatchError("its product is not of rows and one matrix")
        if rule.name == "Gemm":
            if rule.alpha != 1.0 and not (bias is None and chain.bias is None):
                raise NoMatchError("its product has a factor besides a bias")
            factor *= rule.alpha
            if rule.beta != 1.0 and bias is not None:
                raise NoMatchError("its bias has a factor")
        if bias is not None and chain.bias is not None:
            raise NoMatchError("it has two biases")
        bias = chain.bias if bias is None else bias
        if bias is not None and bias.size != result(product).shape[-1]:
            raise NoMatchError("its bias is no number a word")
        transposed = int(rule.transB)
        while (above := self.graph.producer(w, "Transpose")) is not None and above.op.perm == (1, 0):  # type: ignore[attr-defined]
            assert above.inputs[0] is not None
            w, transposed = above.inputs[0], 1 - transposed
        if bias is not None:
            bias = bias if bias.ndim == 1 else self.b.Reshape(bias, shape=(bias.size,))
            bias = bias if bias.dtype == x.dtype else self.b.Cast(bias, to=x.dtype)
        return x, w, transposed, bias, factor * (chain.cap or 1.0)


def _transposed(perm: tuple[int, ...], classes: int) -> Callable[[Builder, Value], Value]:
    """A Transpose of the logits, applied to x, whose last axis stays last; `classes`: the words' new axis."""
    order = tuple(p if p < perm[classes] else p - 1 for i, p in enumerate(perm) if i != classes)

    def move(b: Builder, x: Value) -> Value:
        return x if order == tuple(range(len(order))) else b.Transpose(x, perm=(*order, len(order)))

    return move


def _sliced(op: Operator, classes: int) -> Callable[[Builder, Value], Value]:
    """A Slice of positions, applied to x."""

    def move(b: Builder, x: Value) -> Value:
        rule: Any = op.op
        every = [a % x.ndim for a in rule.axes]  # x has as many axes as the logits
        kept = [i for i, a in enumerate(every) if a != classes]
        axes = tuple(every[i] - (every[i] > classes) for i in kept)
        parts = {n: tuple(getattr(rule, n)[i] for i in kept) for n in ("starts", "ends", "steps") if getattr(rule, n)}
        return b.emit(replace(rule, axes=axes, **parts), x)

    return move
