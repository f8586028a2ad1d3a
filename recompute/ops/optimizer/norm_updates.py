"""Optimizer updates and clipping that need norms of whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.factors import aligned, needed_whole
from ...language.op import Cost, Op, OperatorBuilder
from ...language.types import Array, TensorType, Value
from .base import PART, Update, mix, mixed, scaled, update_samples


class TrustUpdate(Update, abstract=True):
    """Base of updates that scale a parameter's step by norms of whole tensors: two walks over the arrays."""

    each_alone = False

    def norm(self, total: Any, x: Array, t: Array) -> Any:
        """`total` + Σ x², in f64; x may be t."""
        np.multiply(x, x, out=t)
        return total + np.sum(t, dtype=np.float64)

    def axis_factors(self, ins: Any, outs: Any) -> tuple:
        """All, needed whole: the norms of the parameter and of its step are taken."""
        return needed_whole(aligned(ins, outs))

    def norm_value(self, b: OperatorBuilder, x: Any) -> Value | None:
        """√Σ x² in f64, as a value."""
        x = x if x.dtype == "f64" else b.Cast(x, to="f64")
        return b.Sqrt(b.ReduceSum(b.Mul(x, x), keepdims=0))


class LambUpdate(TrustUpdate):
    """(w, g, m, v, lr, step): LAMB (You et al. 2020, arXiv 1904.00962), t = step + 1.

    m and v as in Adam, r = m/(1 - beta1ᵗ) / (√(v/(1 - beta2ᵗ)) + epsilon) + weight_decay·w,
    w ← w - lr·(‖w‖/‖r‖)·r; the ratio is 1 where a norm is 0.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    updates = (0, 2, 3)
    required_outputs = 3
    rate_at = 4
    step_at = 5
    flops_per_element = 30

    @property
    def coupled(self) -> float:
        """Weight decay is part of r, not of the gradient."""
        return 0.0

    def scratch(self, ins, outs):
        parts = super().scratch(ins, outs)
        return (parts[0], *parts)

    def factors(self, m, rate, step):
        """lr, r / (1 - beta1ᵗ), r·epsilon, with r = √(1 - beta2ᵗ)."""
        root = m.sqrt(1.0 - self.beta2**step)
        return rate, root / (1.0 - self.beta1**step), root * self.epsilon

    def compute(self, ins, outs, scratch):
        """First the moments and both norms, then the step with r worked out once more."""
        rest, scratch = scratch[0], scratch[1:]
        rate, scale, epsilon = self.numbers(ins)
        ww = rr = np.zeros((), np.float64)
        for w, g, (m, v), t in self.parts(ins, scratch, write=False):
            mix(m, g, self.beta1, t)
            np.multiply(g, g, out=t)
            mix(v, t, self.beta2, t)
            ww = self.norm(ww, w, t)
            self._direction(w, m, v, scale, epsilon, t, rest[: t.size])
            rr = self.norm(rr, t, t)
        ok = (ww > 0) & (rr > 0)
        trust = np.where(ok, np.sqrt(ww / np.where(ok, rr, 1.0)), 1.0).astype(scratch[0].dtype)
        for w, _, (m, v), t in self.parts(ins, scratch):
            self._direction(w, m, v, scale, epsilon, t, rest[: t.size])
            np.multiply(t, rate * trust, out=t)
            np.subtract(w, t, out=w)

    def _direction(self, w: Array, m: Array, v: Array, scale: Any, epsilon: Any, t: Array, rest: Array) -> None:
        np.sqrt(v, out=t)
        np.add(t, epsilon, out=t)
        np.divide(m, t, out=t)
        np.multiply(t, scale, out=t)
        np.multiply(w, w.dtype.type(self.weight_decay), out=rest)
        np.add(t, rest, out=t)

    def formula(self, b, w, g, state, factors):
        m, v = state
        rate, scale, epsilon = factors
        m = mixed(b, m, g, self.beta1)
        v = mixed(b, v, b.Mul(g, g), self.beta2)
        u = b.Mul(b.Div(m, b.Add(b.Sqrt(v), epsilon)), scale)
        r = b.Add(u, scaled(b, w, self.weight_decay))
        nw, nr = self.norm_value(b, w), self.norm_value(b, r)
        zero, one = b.constant(0.0, "f64"), b.constant(1.0, "f64")
        ok = b.Less(zero, b.Mul(nw, nr))
        trust = b.Where(ok, b.Div(nw, b.Where(ok, nr, one)), one)
        trust = trust if w.dtype == "f64" else b.Cast(trust, to=w.dtype)
        return b.Sub(w, b.Mul(r, b.Mul(rate, trust))), m, v

    @classmethod
    def samples(cls, draw):
        """With and without weight decay; a parameter of zeros; half precision."""
        yield from update_samples(cls(), draw, 2)
        yield from update_samples(cls(weight_decay=0.0), draw, 2)
        lr, step = np.array(0.1, np.float32), np.array(0, np.int64)
        yield draw.case(cls(), np.zeros(3), draw("f64[3]"), np.zeros(3), np.zeros(3), lr, step)
        yield draw.case(cls(), draw("f16[5]"), draw("f16[5]"), draw("f32[5]"), draw("f32[5]", 0, 1), lr, step)


class LarsUpdate(TrustUpdate):
    """(w, g, v, lr): LARS with momentum (You, Gitman & Ginsburg 2017, arXiv 1708.03888), in Paddle's form.

    local = lr·coefficient·‖w‖ / (‖g‖ + weight_decay·‖w‖ + epsilon), or lr where a norm is 0;
    v ← momentum·v + local·(g + weight_decay·w), w ← w - v.
    """

    momentum: float = 0.9
    coefficient: float = 0.001
    weight_decay: float = 0.0005
    epsilon: float = 0.0
    updates = (0, 2)
    required_outputs = 2
    rate_at = 3
    flops_per_element = 10

    @property
    def coupled(self) -> float:
        """The norm wanted is that of the plain gradient."""
        return 0.0

    def compute(self, ins, outs, scratch):
        ww = gg = np.zeros((), np.float64)
        for w, g, _, t in self.parts(ins, scratch, write=False):
            ww = self.norm(ww, w, t)
            gg = self.norm(gg, g, t)
        nw, ng = np.sqrt(ww), np.sqrt(gg)
        ok = (nw > 0) & (ng > 0)
        below = np.where(ok, ng + self.weight_decay * nw + self.epsilon, 1.0)
        trust = np.where(ok, self.coefficient * nw / below, 1.0)
        local = (ins[self.rate_at].astype(np.float64) * trust).astype(scratch[0].dtype)
        for w, g, (v,), t in self.parts(ins, scratch):
            np.multiply(v, w.dtype.type(self.momentum), out=v)
            np.multiply(w, w.dtype.type(self.weight_decay), out=t)
            np.add(t, g, out=t)
            np.multiply(t, local, out=t)
            np.add(v, t, out=v)
            np.subtract(w, v, out=w)

    def values(self, b: OperatorBuilder, inputs: Sequence[Any], work: str) -> list[Any]:
        """The learning rate in f64: the trust ratio is worked out in it."""
        rate = inputs[self.rate_at]
        return [rate if rate.dtype == "f64" else b.Cast(rate, to="f64")]

    def formula(self, b, w, g, state, factors):
        nw, ng = self.norm_value(b, w), self.norm_value(b, g)
        zero, one = b.constant(0.0, "f64"), b.constant(1.0, "f64")
        ok = b.Less(zero, b.Mul(nw, ng))
        below = b.Add(b.Add(ng, scaled(b, nw, self.weight_decay)), b.constant(self.epsilon, "f64"))
        trust = b.Where(ok, b.Div(scaled(b, nw, self.coefficient), b.Where(ok, below, one)), one)
        local = b.Mul(factors[0], trust)
        local = local if w.dtype == "f64" else b.Cast(local, to=w.dtype)
        step = b.Mul(b.Add(scaled(b, w, self.weight_decay), g), local)
        v = b.Add(scaled(b, state[0], self.momentum), step)
        return b.Sub(w, v), v

    @classmethod
    def samples(cls, draw):
        """With and without weight decay; a gradient of zeros; half precision."""
        yield from update_samples(cls(), draw, 1)
        yield from update_samples(cls(weight_decay=0.0, epsilon=1e-3), draw, 1)
        lr = np.array(0.1, np.float32)
        yield draw.case(cls(), draw("f64[3]"), np.zeros(3), np.zeros(3), lr)
        yield draw.case(cls(), draw("f16[5]"), draw("f16[5]"), draw("f32[5]"), lr)


def _with_squares(total: Any, x: Array, tile: Array) -> Any:
    """`total` + Σ x², tile by tile in f64; x has one dimension."""
    for start in range(0, x.size, PART):
        here = x[start : start + PART]
        t = tile[: here.size]
        t[...] = here
        np.multiply(t, t, out=t)
        total = total + np.sum(t)
    return total


class GlobalNorm(Op):
    """√Σ x² over all elements of all inputs: f32[], or f64[] where the inputs are f64.  Summed in f64."""

    def infer(self, *inputs):
        if not inputs or any(not t.is_float for t in inputs):
            raise self.fail("it takes one or more floating-point tensors", *inputs)
        return (TensorType("f64" if all(t.dtype == "f64" for t in inputs) else "f32", ()),)

    def scratch(self, ins, outs):
        return (TensorType("f64", (min(max(t.size for t in ins), PART),)),)

    def compute(self, ins, outs, scratch):
        total = np.zeros((), np.float64)
        for x in ins:
            total = _with_squares(total, x.reshape(-1), scratch[0])
        outs[0][...] = np.sqrt(total)

    def expand(self, b, *inputs):
        """Sums of squares in f64, added in order."""
        wide = [x if x.dtype == "f64" else b.Cast(x, to="f64") for x in inputs]
        norm = b.Sqrt(b.add_all([b.ReduceSum(b.Mul(x, x), keepdims=0) for x in wide]))
        return (norm if all(x.dtype == "f64" for x in inputs) else b.Cast(norm, to="f32"),)

    def cost(self, ins, outs):
        return Cost(2 * sum(t.size for t in ins), super().cost(ins, outs).bytes)

    @classmethod
    def samples(cls, draw):
        """One and several inputs of different shapes, an empty one; f32."""
        yield draw.case(cls(), draw("f64[3,4]"))
        yield draw.case(cls(), draw("f64[3,4]"), draw("f64[0]"), draw("f64[]"))
        yield draw.case(cls(), draw("f32[3,4]"), draw("f32[5]"))


class SquareSums(Op):
    """Σ x² of each of `parts` equal parts of the elements of all inputs: f64[parts].

    Part i is the i-th of every input, as if so many zeros followed its elements that they can be cut equally.  Each
    part is summed for itself, so that it does not matter how many of them are at hand.
    """

    parts: int = 1

    def infer(self, *inputs):
        if not inputs or any(not t.is_float for t in inputs) or self.parts < 1:
            raise self.fail("it takes one or more floating-point tensors, and one part or more", *inputs)
        return (TensorType("f64", (self.parts,)),)

    def scratch(self, ins, outs):
        return (TensorType("f64", (min(max(-(-t.size // self.parts) for t in ins), PART),)),)

    def compute(self, ins, outs, scratch):
        """Part by part, input by input, tile by tile."""
        for i in range(self.parts):
            total = np.zeros((), np.float64)
            for x in ins:
                each = -(-x.size // self.parts)
                total = _with_squares(total, x.reshape(-1)[i * each : (i + 1) * each], scratch[0])
            outs[0][i] = total

    def expand(self, b, *inputs):
        """Zeros behind each input, squares, sums along parts."""
        sums = []
        for x in inputs:
            wide = x if x.dtype == "f64" else b.Cast(x, to="f64")
            flat = b.Reshape(wide, shape=(x.size,))
            more = -x.size % self.parts
            if more:
                flat = b.Concat(flat, b.fill(0, flat.type.with_shape((more,))), axis=0)
            rows = b.Reshape(flat, shape=(self.parts, flat.size // self.parts))
            sums.append(b.ReduceSum(b.Mul(rows, rows), axes=(1,), keepdims=0))
        return (b.add_all(sums),)

    def axis_factors(self, ins, outs):
        return ()

    def cost(self, ins, outs):
        return Cost(2 * sum(t.size for t in ins), super().cost(ins, outs).bytes)

    @classmethod
    def samples(cls, draw):
        """One and several inputs; parts with zeros, and of zeros alone; an empty input; f32."""
        yield draw.case(cls(parts=4), draw("f64[3,4]"))
        yield draw.case(cls(parts=4), draw("f64[3,5]"), draw("f64[0]"), draw("f64[]"))
        yield draw.case(cls(parts=2), draw("f32[3,4]"), draw("f32[5]"))
