"""Connectionist temporal classification: the loss of a sequence whose labels are not aligned with its steps.

Graves et al., "Connectionist Temporal Classification" (ICML 2006).  With log-probabilities x [T, N, C] and labels
[N, S], a path visits the states blank, label 1, blank, label 2, ..., blank: W = 2S + 1 of them.  α[t, s] is the
logarithm of the probability of all beginnings of paths that are at state s after step t, β[t, s] that of all their
ends.  What is impossible has the logarithm -1e30, so that nothing is subtracted from infinity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...language.factors import factor
from ...language.op import Cost, Op, OperatorBuilder
from ...language.types import Array, TensorType, Types, Value
from ..shape.reshape import reshape

#: the logarithm of what is impossible, and what a logarithm is below only if a path is impossible
NEVER, IMPOSSIBLE = -1e30, -1e29
#: in the place of a label's entries where the number of them cannot be
NO_LENGTH = -(1 << 31)


class _Rooms(NamedTuple):
    """The temporaries of both operators: types, or arrays."""

    places: Any  # of the states' classes in a step, i64 [N, W]
    counts: Any  # i64 [N, S]
    there: Any  # which entries of labels count, bool [N, S]
    last: Any  # which number of entries, bool [N, S + 1]
    skip: Any  # what the transition over a state costs, 0 or NEVER, [N, W]
    end: Any  # the same of the end at a state; number 0 is before the first state, [N, W + 1]
    states: Any  # α with two numbers before them, or β with two after them, [N, W + 2]
    most: Any  # [N, W]
    made: Any  # [N, W]
    ahead: Any  # [N, W + 1]
    number: Any  # one a sample, [N, 1]
    flags: Any  # bool [N, 1]


class Alignment(Op, abstract=True):
    """The base of the loss and its gradient.

    `blank`: its class.  A label ends at the first `ignore_index`.
    """

    blank: int = 0
    ignore_index: int = -100

    autocast_inputs = (0,)

    def check(self, x: TensorType, labels: TensorType, lengths: TensorType | None) -> None:
        """TypeRuleError where the inputs do not fit each other."""
        if x.ndim != 3 or x.dtype not in ("f32", "f64") or not x.size:
            raise self.fail("log-probabilities must be [T, N, C], f32 or f64", x, labels)
        if labels.ndim != 2 or labels.shape[0] != x.shape[1] or not labels.size or labels.dtype not in ("i32", "i64"):
            raise self.fail("labels must be [N, S], i32 or i64", x, labels)
        if lengths is not None and (lengths.shape != (x.shape[1],) or lengths.dtype not in ("i32", "i64")):
            raise self.fail("lengths must be [N], i32 or i64", x, labels, lengths)
        if not 0 <= self.blank < x.shape[2]:
            raise self.fail(f"there is no class {self.blank} for the blank", x, labels)
        if 0 <= self.ignore_index < x.shape[2]:
            raise self.fail(f"ignore_index {self.ignore_index} must not be a class", x, labels)

    def checks(self, ins, outs):
        labels = (1, ("label", ins[0].shape[2], self.ignore_index, self.blank))
        return (labels, (2, ("count", ins[0].shape[0]))) if len(ins) > 2 and ins[2] is not None else (labels,)

    def cost(self, ins: Types, outs: Types) -> Cost:
        """A dozen operations a step and state."""
        x, labels = ins[0], ins[1]
        assert x is not None and labels is not None
        states = x.shape[0] * labels.shape[0] * (2 * labels.shape[1] + 1)
        return Cost(12 * states, super().cost(ins, outs).bytes)

    # -- numerics -------------------------------------------------------------------------------------------------

    def rooms(self, x: TensorType, labels: TensorType) -> _Rooms:
        """The types of the temporaries."""
        n, s = labels.shape
        w, like = 2 * s + 1, x.with_shape
        count, flag = (functools.partial(TensorType, kind) for kind in ("i64", "bool"))
        return _Rooms(
            count((n, w)), count((n, s)), flag((n, s)), flag((n, s + 1)), like((n, w)), like((n, w + 1)),
            like((n, w + 2)), like((n, w)), like((n, w)), like((n, w + 1)), like((n, 1)), flag((n, 1)),
        )  # fmt: skip

    def prepare(self, x: Array, labels: Array, lengths: Array | None, r: _Rooms) -> None:
        """Fills what depends on labels alone."""
        (steps, n, c), s = x.shape, labels.shape[1]
        np.equal(labels, self.ignore_index, out=r.there)
        np.cumsum(r.there, axis=1, out=r.counts)
        r.skip.fill(NEVER)
        r.skip[:, 1] = 0
        r.places.fill(self.blank)
        np.equal(r.counts, 0, out=r.there)
        np.copyto(r.places[:, 1::2], labels, where=r.there)
        np.equal(np.arange(s + 1), np.sum(r.there, axis=1, keepdims=True), out=r.last)
        r.end.fill(NEVER)
        np.copyto(r.end.reshape(n, s + 1, 2), 0, where=r.last.reshape(n, s + 1, 1))
        self._check(r.places[:, 1::2][r.there], c, lengths, steps)
        if s > 1:
            others = r.there[:, 1:]
            np.not_equal(r.places[:, 3::2], r.places[:, 1:-2:2], out=others)
            np.copyto(r.skip[:, 3::2], 0, where=others)
        np.add(r.places, np.arange(0, n * c, c).reshape(n, 1), out=r.places)

    def _check(self, labels: Array, classes: int, lengths: Array | None, steps: int) -> None:
        """ValueError for labels and lengths that cannot be."""
        wrong = labels[(labels < 0) | (labels >= classes)]
        if (wrong == NO_LENGTH).any():
            raise ValueError("a length of labels is negative, or more than they have entries")
        if wrong.size:
            raise ValueError(f"label {wrong[0]} is outside the {classes} classes (and is not ignore_index)")
        if (labels == self.blank).any():
            raise ValueError(f"label {self.blank} is the blank: labels end at ignore_index, {self.ignore_index}")
        if lengths is not None and not 0 <= (low := int(lengths.min())) <= int(lengths.max()) <= steps:
            raise ValueError(f"length {low if low < 0 else int(lengths.max())} is outside of the {steps} steps")

    def forward(self, x: Array, lengths: Array | None, r: _Rooms, kept: Array | None = None) -> None:
        """α of all steps, into `kept`; log p(label) of each sample into `number`."""
        r.states.fill(NEVER)
        r.states[:, 1] = 0  # before the first step
        jump = r.ahead[:, 1:]
        for t in range(x.shape[0]):
            np.add(r.states[:, :-2], r.skip, out=jump)
            self.joined(r.states[:, 2:], r.states[:, 1:-1], jump, r)
            self.emission(x, t, r)
            np.add(r.made, r.most, out=r.made)
            if kept is not None:
                kept[t] = r.made
            if lengths is None:
                r.states[:, 2:], r.states[:, 1] = r.made, NEVER
            else:
                np.greater(lengths.reshape(-1, 1), t, out=r.flags)
                np.copyto(r.states[:, 2:], r.made, where=r.flags)
                np.copyto(r.states[:, 1:2], NEVER, where=r.flags)
        np.add(r.states[:, 1:], r.end, out=r.ahead)
        np.max(r.ahead, axis=1, keepdims=True, out=r.number)
        np.subtract(r.ahead, r.number, out=r.ahead)
        np.exp(r.ahead, out=r.ahead)
        total = np.sum(r.ahead, axis=1, keepdims=True)
        np.log(total, out=total)
        np.add(r.number, total, out=r.number)

    def emission(self, x: Array, t: int, r: _Rooms) -> None:
        """The log-probabilities of the states' classes at a step, into `most`."""
        np.take(x[t].reshape(-1), r.places, out=r.most, mode="clip")
        np.maximum(r.most, NEVER, out=r.most)

    def joined(self, stay: Array, step: Array, jump: Array, r: _Rooms) -> None:
        """log(eˢᵗᵃʸ + eˢᵗᵉᵖ + eʲᵘᵐᵖ) into `made`; `jump` and `most` are overwritten."""
        np.maximum(stay, step, out=r.most)
        np.maximum(r.most, jump, out=r.most)
        np.subtract(jump, r.most, out=jump)
        np.exp(jump, out=jump)
        for other in (stay, step):
            np.subtract(other, r.most, out=r.made)
            np.exp(r.made, out=r.made)
            np.add(jump, r.made, out=jump)
        np.log(jump, out=jump)
        np.add(jump, r.most, out=r.made)

    @classmethod
    def cases(cls, draw: Any) -> Iterator[tuple[Any, list[Any]]]:
        """Options and inputs: repeated labels, empty ones, one that fits no path; lengths; blank in the middle."""
        for lengths in (None, [4, 5, 2, 1]):
            for blank in (0, 2):
                labels = [[1, 3, -100], [3, 3, 1], [1, -100, -100], [-100, 1, 1]]
                x = draw("f64[5,4,4]")
                log_prob = x - np.log(np.exp(x).sum(2, keepdims=True))
                array = None if lengths is None else np.array(lengths)
                yield {"blank": blank}, [log_prob, np.array(labels), array]
        x = draw("f32[9,3,5]") - 2
        yield {"ignore_index": -1}, [x, np.array([[1, 2], [4, -1], [3, 3]], "i4"), None]


class CTCLoss(Alignment):
    """(log-probabilities [T, N, C], labels [N, S], lengths [N]?) → -log p(label) of each sample [N].

    `lengths`: how many steps of a sample count; without, all do.  A label that fits no path has no gradient, and an
    infinite loss, or with `zero_infinity` the loss 0.
    """

    zero_infinity: bool = False

    def infer(self, x, labels, lengths=None):
        self.check(x, labels, lengths)
        return (x.with_shape((x.shape[1],)),)

    def axis_factors(self, ins, outs):
        return (factor(ins[0].shape[1], [1, 0, *[0 if v is not None else None for v in ins[2:]]], [0]),)

    def scratch(self, ins, outs):
        return self.rooms(ins[0], ins[1])

    def compute(self, ins, outs, scratch):
        """Step by step; nothing of a step is kept."""
        x, labels, lengths = (*ins, None)[:3]
        r = _Rooms(*scratch)
        self.prepare(x, labels, lengths, r)
        self.forward(x, lengths, r)
        np.negative(r.number, out=outs[0].reshape(-1, 1))
        np.less(r.number, IMPOSSIBLE, out=r.flags)
        np.copyto(outs[0].reshape(-1, 1), 0 if self.zero_infinity else math.inf, where=r.flags)

    def gradient(self, b, ins, outs, grads):
        """α is computed again: the gradient reads what the loss reads."""
        op = CTCLossGrad(self.blank, self.ignore_index)
        return [b.emit(op, *ins[:2], (*ins, None)[2], grads[0]), *[None] * (len(ins) - 1)]

    def expand(self, b, x, labels, lengths=None):
        return (_expanded(self, b, x, labels, lengths),)

    @classmethod
    def samples(cls, draw):
        for options, inputs in cls.cases(draw):
            yield draw.case(cls(**options, zero_infinity=True), *inputs)


class CTCLossGrad(Alignment):
    """(log-probabilities, labels, lengths?, dloss [N]) → their gradient.

    It is minus the probability that a path is at a class after a step, given the label.
    """

    def infer(self, x, labels, lengths, dloss):
        self.check(x, labels, lengths)
        if dloss.shape != (x.shape[1],) or dloss.dtype != x.dtype:
            raise self.fail("dloss must be one number a sample", x, labels, lengths, dloss)
        return (x,)

    def axis_factors(self, ins, outs):
        return (factor(ins[0].shape[1], [1, 0, None if ins[2] is None else 0, 0], [1]),)

    def scratch(self, ins, outs):
        """The buffers of both; α of all steps, one class of all steps."""
        x, labels = ins[:2]
        (t, n, _), w = x.shape, 2 * labels.shape[1] + 1
        return (*self.rooms(x, labels), x.with_shape((t, n, w)), x.with_shape((t, n)))

    def compute(self, ins, outs, scratch):
        """α of all steps, then β from the last to the first, over which the probabilities of states are written."""
        x, labels, lengths, dloss = ins
        *rooms, kept, column = scratch
        r = _Rooms(*rooms)
        self.prepare(x, labels, lengths, r)
        self.forward(x, lengths, r, kept)
        self._backward(x, lengths, r, kept)
        np.less(r.number, IMPOSSIBLE, out=r.flags)
        np.negative(dloss.reshape(-1, 1), out=r.number)
        np.copyto(r.number, 0, where=r.flags)
        if lengths is not None:
            for t in range(x.shape[0]):
                np.less_equal(lengths.reshape(-1, 1), t, out=r.flags)
                np.copyto(kept[t], 0, where=r.flags)
        np.multiply(kept, r.number, out=kept)
        self._classes(r.places, kept, column, outs[0])

    def _backward(self, x: Array, lengths: Array | None, r: _Rooms, kept: Array) -> None:
        """eᵅ⁺ᵝ / p into `kept`, at most 1."""
        w = r.skip.shape[1]
        beta, ahead = r.states[:, :w], r.ahead[:, 1:]
        r.states.fill(NEVER)
        beta[...] = r.end[:, 1:]
        for t in reversed(range(x.shape[0])):
            if t + 1 < x.shape[0]:
                self.emission(x, t + 1, r)
                np.add(beta, r.most, out=beta)  # the two numbers beside them stay impossible
                ahead.fill(NEVER)
                np.add(beta[:, 2:], r.skip[:, 2:], out=ahead[:, :-2])
                self.joined(beta, r.states[:, 1:-1], ahead, r)
                beta[...] = r.made
                if lengths is not None:
                    np.less_equal(lengths.reshape(-1, 1), t + 1, out=r.flags)
                    np.copyto(beta, r.end[:, 1:], where=r.flags)
            np.add(kept[t], beta, out=ahead)
            np.subtract(ahead, r.number, out=ahead)
            np.minimum(ahead, 0, out=ahead)
            np.exp(ahead, out=kept[t])

    def _classes(self, places: Array, kept: Array, column: Array, out: Array) -> None:
        """Sums of the states of each class; states are added in order."""
        out.fill(0)
        out[:, :, self.blank] = kept[:, :, 0]
        for s in range(2, kept.shape[2], 2):
            np.add(out[:, :, self.blank], kept[:, :, s], out=out[:, :, self.blank])
        flat = out.reshape(len(out), -1)
        for s in range(1, kept.shape[2], 2):
            at = places[:, s]
            np.take(flat, at, axis=1, out=column, mode="clip")
            np.add(column, kept[:, :, s], out=column)
            flat[:, at] = column

    def expand(self, b, x, labels, lengths, dloss):
        """The gradient of the unrolled recursion."""
        op = CTCLoss(self.blank, self.ignore_index)
        return tuple(b.gradient_of_expansion(op, (x, labels, lengths), [dloss])[:1])

    @classmethod
    def samples(cls, draw):
        for options, inputs in cls.cases(draw):
            x = inputs[0]
            yield draw.case(cls(**options), *inputs, draw(f"{'f64' if x.itemsize == 8 else 'f32'}[{x.shape[1]}]"))


def _expanded(op: CTCLoss, b: OperatorBuilder, x: Value, labels: Value, lengths: Value | None) -> Value:
    (steps, n, classes), s = x.shape, labels.shape[1]
    w = 2 * s + 1
    labels = labels if labels.dtype == "i64" else b.Cast(labels, to="i64")
    counts = b.CumSum(b.Cast(b.Equal(labels, b.constant(op.ignore_index, labels)), to="i64"), axis=1)
    there = b.Equal(counts, b.constant(0, counts))
    used = b.Where(there, labels, b.constant(op.blank, labels))
    states = _woven(b, b.Fill(dtype="i64", shape=(n, s + 1), value=op.blank), used)
    skip, end = _costs(b, x, states, there)
    never = b.Fill(dtype=x.dtype, shape=(n, 1), value=NEVER)
    alpha = b.Concat(never, b.Fill(dtype=x.dtype, shape=(n, 1), value=0.0), *[never] * w, axis=1)
    for t in range(steps):
        here = b.Max(b.GatherElements(reshape(b, _cut(b, x, t, t + 1, axis=0), (n, classes)), states, axis=1),
                     b.constant(NEVER, x))  # fmt: skip
        ways = [_cut(b, alpha, 2 - i, 2 - i + w) for i in range(3)]
        ways[2] = b.Add(ways[2], skip)
        joined = b.ReduceLogSumExp(b.Concat(*(b.Reshape(v, shape=(n, w, 1)) for v in ways), axis=2), axes=(2,))
        after = b.Concat(never, never, b.Add(reshape(b, joined, (n, w)), here), axis=1)
        if lengths is not None:
            after = b.Where(b.Greater(b.Reshape(lengths, shape=(n, 1)), b.constant(t, lengths)), after, alpha)
        alpha = after
    loss = b.Neg(b.ReduceLogSumExp(b.Add(_cut(b, alpha, 1, w + 2), end), axes=(1,), keepdims=0))
    impossible = b.Greater(loss, b.constant(-IMPOSSIBLE, loss))
    return b.Where(impossible, b.constant(0 if op.zero_infinity else math.inf, loss), loss)


def _cut(b: OperatorBuilder, x: Value, start: int, end: int, axis: int = 1, step: int = 1) -> Value:
    return b.Slice(x, starts=(start,), ends=(end,), axes=(axis,), steps=(step,))


def _woven(b: OperatorBuilder, even: Value, odd: Value) -> Value:
    """[N, S + 1] and [N, S] → [N, 2 S + 1], in turns."""
    n, s = odd.shape
    pairs = b.Concat(*(b.Reshape(v, shape=(n, s, 1)) for v in (_cut(b, even, 0, s), odd)), axis=2)
    return b.Concat(reshape(b, pairs, (n, 2 * s)), _cut(b, even, s, s + 1), axis=1)


def _costs(b: OperatorBuilder, x: Value, states: Value, there: Value) -> tuple[Value, Value]:
    """The costs, 0 or NEVER, of the transition over a state and of the end at a state; see `Alignment`."""
    (n, w), s = states.shape, there.shape[1]
    zero, never = b.constant(0, x), b.constant(NEVER, x)
    jumps = b.Fill(dtype=x.dtype, shape=(n, 1), value=0.0)
    if s > 1:
        same = b.Equal(_cut(b, states, 3, w, step=2), _cut(b, states, 1, w - 3, step=2))
        jumps = b.Concat(jumps, b.Where(same, never, zero), axis=1)
    skip = _woven(b, b.Fill(dtype=x.dtype, shape=(n, s + 1), value=NEVER), jumps)
    yes = b.Fill(dtype="bool", shape=(n, 1), value=True)
    ends = b.And(b.Concat(yes, there, axis=1), b.Concat(b.Not(there), yes, axis=1))  # labels of so many entries
    cost = b.Reshape(b.Where(ends, zero, never), shape=(n, s + 1, 1))
    return skip, reshape(b, b.Concat(cost, cost, axis=2), (n, 2 * s + 2))
