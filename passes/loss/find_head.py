"""The head of a language model as one operator: found where a cross entropy stands behind a matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...ops.loss.linear_cross_entropy import LinearCrossEntropy
from ..base import Pass
from ..cleanup.dead_code import prune

#: bytes of logits from which on training makes a head one operator without being asked
LARGE = 1 << 21
#: and rows: with fewer, most of the logits are held at a time
ROWS = 512
_FORWARD = (Role.FORWARD, Role.LOSS)


@dataclass(frozen=True)
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
        """The block itself if there is no head."""
        return find_head(block, self.loss, self.kept, large=self.large)[0]


class _NotHeadError(Exception):
    """Why a cross entropy is no head."""


@dataclass
class _Chain:
    """What is known between a loss and its product while operators are followed upwards.

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
    rows and 2 MiB or more in float32 or float64 (products in halves are left to the libraries of a device).
    """
    search = _Search(block, loss, kept, large=large)
    notes: list[str] = []
    made: dict[int, list[Operator]] = {}
    for i, op in enumerate(block.operators):
        if op.op.name not in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") or op.role not in _FORWARD:
            continue
        name = next(op.writes()).name
        try:
            at, operators = search.head(i, op)
            made[at] = operators
            notes.append(f"'{name}' and its product are a head of {search.words:,} words")
        except _NotHeadError as e:
            notes.append(f"cross entropy '{name}' is not fused with a product: {e}")
    if not made:
        return block, notes
    operators = [new for i, op in enumerate(block.operators) for new in made.get(i, [op])]
    constants = (*block.constants, *search.builder.constants)
    behind = search.behind(operators)
    outputs = tuple(n for n in block.outputs if n not in behind)
    fetchable = (*outputs, *behind.intersection(block.outputs), *([loss] if loss else ()))
    found = block.with_operators(prune(operators, fetchable, _FORWARD), outputs=outputs, constants=constants)
    return found, notes


class _Search:
    """Follows operators of a block."""

    def __init__(self, block: Block, loss: str | None, kept: Sequence[str], *, large: bool) -> None:
        self.block, self.kept, self.large = block, set(kept), large
        self.producers = block.producers()
        self.builder = Builder.on(block)
        self.values = {c.value.name: c for c in block.constants}
        needed = prune(block.operators, [loss, *kept], _FORWARD) if loss is not None else block.operators
        self.readers: dict[str, list[Operator]] = {}
        for op in needed:
            for v in op.reads():
                self.readers.setdefault(v.name, []).append(op)
        self.words = 0
        self.logits: set[str] = set()

    def producer(self, v: Value | None) -> Operator | None:
        at = None if v is None else self.producers.get(v.name)
        return None if at is None else self.block.operators[at]

    def number(self, v: Value | None) -> float | None:
        """A constant's only number."""
        c = None if v is None else self.values.get(v.name)
        return float(c.data[0]) if c is not None and len(c.data) == 1 and c.value.type.is_float else None

    def behind(self, operators: Sequence[Operator]) -> set[str]:
        """Values that are made from the logits of heads that were found."""
        found = set(self.logits)
        for op in operators:
            if any(v.name in found for v in op.reads()):
                found.update(v.name for v in op.writes())
        return found

    # -- a loss ---------------------------------------------------------------------------------------------------

    def head(self, i: int, op: Operator) -> tuple[int, list[Operator]]:
        """The index of the operator that makes the loss, and the operators that take its place."""
        rule: Any = op.op
        scores, labels = op.inputs[:2]
        assert scores is not None and labels is not None
        if len(op.inputs) > 2 and op.inputs[2] is not None:
            raise _NotHeadError("it has class weights")
        if self.large and (scores.nbytes < LARGE or labels.size < ROWS):
            raise _NotHeadError(f"its logits are small ({labels.size} rows, {scores.nbytes:,} bytes)")
        at, smoothing = i, 0.0
        if len(op.outputs) > 1 and (log_prob := op.outputs[1]) is not None and self.readers.get(log_prob.name):
            at, smoothing = self.smoothing(op, log_prob)
        chain = _Chain(logarithms=rule.name == "NegativeLogLikelihoodLoss")
        product = self.product(scores, chain)
        return at, self.emit(op, self.block.operators[at], product, chain, smoothing)

    def only_reader(self, v: Value) -> None:
        count = len(self.readers.get(v.name, ()))
        if count > 1:
            raise _NotHeadError(f"'{v.name}' has {count} readers")
        if v.name in self.kept:
            raise _NotHeadError(f"'{v.name}' is fetched")

    def smoothing(self, op: Operator, log_prob: Value) -> tuple[int, float]:
        """The operator that adds the even part of smoothed labels to a loss, as `losses.cross_entropy` writes it, and
        the share of that part."""
        rule: Any = op.op
        value, labels = next(op.writes()), op.inputs[1]
        ignores, reduction = rule.ignore_index is not None, rule.reduction
        path = ["ReduceSum", "Neg", *(["Where"] if ignores else []), *(["ReduceSum"] if reduction != "none" else [])]
        path += [*(["Div"] if reduction == "mean" else []), "Mul", "Add"]
        steps, v = [], log_prob
        for name in path:
            readers = self.readers.get(v.name, [])
            if len(readers) != 1 or readers[0].op.name != name or v.name in self.kept:
                raise _NotHeadError("its log-probabilities are read")
            steps.append(readers[0])
            v = next(readers[0].writes())
        first, *_, scaled, total = steps
        share = (self.number(scaled.inputs[1]) or 0.0) * log_prob.shape[1]
        rest = self.readers.get(value.name, [])
        fits = len(rest) == 1 and rest[0].op.name == "Mul" and set(rest[0].writes()) < set(total.reads())
        fits = fits and math.isclose((self.number(rest[0].inputs[1]) or 0.0) + share, 1.0, rel_tol=1e-5)
        if not fits or tuple(first.op.axes) != (1,):  # type: ignore[attr-defined]
            raise _NotHeadError("its log-probabilities are read")
        for step in steps:
            if step.op.name == "Where" and not self.ignoring(step.inputs[0], labels, rule.ignore_index):
                raise _NotHeadError("labels of its even part are ignored by another rule")
            if step.op.name == "Div" and not self.counting(step.inputs[1], labels, rule.ignore_index):
                raise _NotHeadError("the mean of its even part has another count")
        return self.producers[v.name], share

    def ignoring(self, condition: Value | None, labels: Value | None, ignored: int) -> bool:
        """Whether a condition is that a label is the ignored one."""
        op = self.producer(condition)
        if op is None or op.op.name != "Equal" or op.inputs[0] != labels or op.inputs[1] is None:
            return False
        c = self.values.get(op.inputs[1].name)
        return c is not None and list(c.data) == [ignored]

    def counting(self, count: Value | None, labels: Value | None, ignored: int | None) -> bool:
        """Whether a value is the number of labels that count."""
        if ignored is None:
            return labels is not None and self.number(count) == labels.size
        op = self.producer(count)
        each = None if op is None or op.op.name != "ReduceSum" else self.producer(op.inputs[0])
        if each is None or each.op.name != "Where" or not self.ignoring(each.inputs[0], labels, ignored):
            return False
        return [self.number(v) for v in each.inputs[1:]] == [0.0, 1.0]

    # -- from the scores up to the product --------------------------------------------------------------------------

    def product(self, v: Value, chain: _Chain) -> Operator:
        """The product with the vocabulary's matrix; `v` [N, words, d1, ...] or [N, words]."""
        classes = 1  # the axis of the words
        seen: Value | None = v
        while True:
            assert seen is not None
            chain.names.append(seen.name)
            self.only_reader(seen)
            op = self.producer(seen)
            if op is None:
                raise _NotHeadError("no product makes its scores")
            if op.op.name in ("MatMul", "Gemm"):
                if chain.logarithms:
                    raise _NotHeadError("no LogSoftmax makes its scores")
                if classes != seen.ndim - 1:
                    raise _NotHeadError("its classes are not the last axis of a product")
                return op
            seen, classes = self.above(op, seen, classes, chain)

    def above(self, op: Operator, v: Value, classes: int, chain: _Chain) -> tuple[Value | None, int]:
        """The value above an operator, and the axis of its words."""
        name, rule, x = op.op.name, op.op, op.inputs[0]
        last = classes == v.ndim - 1
        if x is None:
            raise _NotHeadError(f"a {name} makes its scores")
        if name in ("Cast", "Identity"):
            if not x.type.is_float:
                raise _NotHeadError("its scores are whole numbers")
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
            raise _NotHeadError(f"a {name} makes its log-probabilities")
        if name in ("Mul", "Div"):
            return self.scaled(op, chain), classes
        if name == "Tanh":
            if chain.cap or chain.bias is not None or chain.factor <= 0:
                raise _NotHeadError("a Tanh of its scores is no soft cap")
            chain.cap, chain.factor = chain.factor, 1.0
            return x, classes
        if name == "Add" and last:
            return self.biased(op, v, chain), classes
        raise _NotHeadError(f"a {name} makes its scores")

    def scaled(self, op: Operator, chain: _Chain) -> Value:
        """The other factor of a product with a constant."""
        a, b = op.inputs
        assert a is not None and b is not None
        number, rest = self.number(b), a
        if number is None and op.op.name == "Mul":
            number, rest = self.number(a), b
        if number is None or not number or not math.isfinite(number):
            raise _NotHeadError("its scores are scaled by what is no constant")
        if chain.bias is not None:
            raise _NotHeadError("a bias is added to scaled scores")
        chain.factor *= number if op.op.name == "Mul" else 1 / number
        return rest

    def biased(self, op: Operator, v: Value, chain: _Chain) -> Value:
        """The summand that is the product; the other is a number a word."""
        a, b = op.inputs
        assert a is not None and b is not None
        for rest, bias in ((a, b), (b, a)):
            if rest.shape == v.shape and bias.size == v.shape[-1] == bias.shape[-1] and chain.bias is None:
                chain.bias = bias
                return rest
        raise _NotHeadError("what is added to its scores is no bias")

    # -- what takes their place -----------------------------------------------------------------------------------

    def emit(self, op: Operator, last: Operator, product: Operator, chain: _Chain, smoothing: float) -> list[Operator]:
        """The operators that take the place of the loss's last one."""
        b, rule, made = self.builder, product.op, next(product.writes())
        x, w, transposed, bias, factor = self.factors(product, chain)
        for move in reversed(chain.moves):
            x = move(b, x)
        loss, labels = next(last.writes()), op.inputs[1]
        assert labels is not None
        if x.shape[:-1] != labels.shape:
            raise _NotHeadError("its labels are no rows of the product")
        given: Any = op.op
        head = LinearCrossEntropy(
            reduction=given.reduction,
            ignore_index=given.ignore_index,
            transB=transposed,
            smoothing=smoothing,
            cap=chain.cap,
            scale=factor,
        )
        try:
            head.infer(x.type, w.type, None if bias is None else bias.type, labels.type)
        except Exception as e:
            raise _NotHeadError(str(e)) from None
        found = b.emit(head, x, w, bias, labels)
        if found.dtype != loss.dtype:
            found = b.Cast(found, to=loss.dtype)
        operators = [replace(o.renamed({found.name: loss.name}), role=product.role) for o in b.operators]
        b.operators.clear()
        self.words = made.shape[-1] if rule.name in ("MatMul", "Gemm") else 0
        self.logits.update(n for n in chain.names if n != loss.name)
        return operators

    def factors(self, product: Operator, chain: _Chain) -> tuple[Value, Value, int, Value | None, float]:
        """x, the vocabulary's matrix, whether it is [words, d], the bias, and the factor of the logits."""
        rule: Any = product.op
        x, w = product.inputs[:2]
        bias = product.inputs[2] if len(product.inputs) > 2 else None
        factor = chain.factor
        assert x is not None and w is not None
        if self.large and x.dtype in ("f16", "bf16"):
            raise _NotHeadError("its product is in a low precision")
        if rule.transA or w.ndim != 2 or x.ndim < 2:
            raise _NotHeadError("its product is not of rows and one matrix")
        if rule.name == "Gemm":
            if rule.alpha != 1.0 and not (bias is None and chain.bias is None):
                raise _NotHeadError("its product has a factor besides a bias")
            factor *= rule.alpha
            if rule.beta != 1.0 and bias is not None:
                raise _NotHeadError("its bias has a factor")
        if bias is not None and chain.bias is not None:
            raise _NotHeadError("it has two biases")
        bias = chain.bias if bias is None else bias
        if bias is not None and bias.size != next(product.writes()).shape[-1]:
            raise _NotHeadError("its bias is no number a word")
        transposed = int(rule.transB)
        above = self.producer(w)
        while above is not None and above.op.name == "Transpose" and tuple(above.op.perm) == (1, 0):  # type: ignore[attr-defined]
            assert above.inputs[0] is not None
            w, transposed = above.inputs[0], 1 - transposed
            above = self.producer(w)
        if bias is not None:
            bias = bias if bias.ndim == 1 else self.builder.Reshape(bias, shape=(bias.size,))
            bias = bias if bias.dtype == x.dtype else self.builder.Cast(bias, to=x.dtype)
        return x, w, transposed, bias, factor * (chain.cap or 1.0)


def _transposed(perm: tuple[int, ...], classes: int) -> Callable[[Builder, Value], Value]:
    """What a Transpose of the logits does to x, whose last axis stays there: `classes` is where the words go."""
    order = tuple(p if p < perm[classes] else p - 1 for i, p in enumerate(perm) if i != classes)

    def move(b: Builder, x: Value) -> Value:
        return x if order == tuple(range(len(order))) else b.Transpose(x, perm=(*order, len(order)))

    return move


def _sliced(op: Operator, classes: int) -> Callable[[Builder, Value], Value]:
    """What a Slice of positions does to x."""

    def move(b: Builder, x: Value) -> Value:
        rule: Any = op.op
        every = [a % x.ndim for a in rule.axes]  # x has as many axes as the logits
        kept = [i for i, a in enumerate(every) if a != classes]
        axes = tuple(every[i] - (every[i] > classes) for i in kept)
        parts = {n: tuple(getattr(rule, n)[i] for i in kept) for n in ("starts", "ends", "steps") if getattr(rule, n)}
        return b.emit(replace(rule, axes=axes, **parts), x)

    return move
