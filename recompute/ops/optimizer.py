"""Optimizer updates, in place, and the step counter.

Every update takes the parameter w, its gradient g, the optimizer's state, and the learning rate (a scalar).  It is
computed in the parameter's element type, or in f32 for f16 and bf16 parameters, whose state is f32.  Scalars are
worked out in f64.  The numerics walk over the arrays in parts that fit the processor's cache, so that the temporaries
are small and every array is read once.

`weight_decay` here is the coupled kind unless said otherwise: the gradient is g + weight_decay·w.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..op import Cost, Op
from ..types import DTYPES, TensorType

#: elements that are worked on at a time
PART = 1 << 15


def work_dtype(t: TensorType) -> str:
    """The element type in which a parameter of type `t` is updated and its state is kept."""
    return "f32" if t.dtype in ("f16", "bf16") else t.dtype


def _flat(a: Any) -> Any:
    if not a.flags.c_contiguous:
        raise ValueError("an array that is updated in place must be contiguous")
    return a.reshape(-1)


class Update(Op, abstract=True):
    """Base of the updates: inputs (w, g, ...); the outputs are the inputs that `updates` names, w first.

    A subclass gives `part` (in place, on one part of the flat arrays), `formula` (the same with operators), and
    `scalars`, the names of what both get from `factors`.
    """

    weight_decay: float
    #: position of the learning rate among the inputs, and of the step counter (None: not used)
    rate_at: ClassVar[int]
    step_at: ClassVar[int | None] = None
    flops_per_element: ClassVar[int] = 4

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """Types as they are: state has w's shape, the learning rate is a float scalar, the step counter i64[]."""
        w, g, rate = inputs[0], inputs[1], inputs[self.rate_at]
        assert w is not None and g is not None and rate is not None
        if g.shape != w.shape or not (w.is_float and g.is_float):
            raise self.fail("the gradient must have the parameter's shape", *inputs)
        if rate.shape != () or not rate.is_float:
            raise self.fail("the learning rate must be one floating-point number", *inputs)
        if self.step_at is not None and inputs[self.step_at] != TensorType("i64", ()):
            raise self.fail("the step counter must be i64[]", *inputs)
        state = TensorType(work_dtype(w), w.shape)
        for i in self.updates[1:]:
            if i < len(inputs) and inputs[i] is not None and inputs[i] != state:
                raise self.fail(f"its state must be {state}", *inputs)
        return (w, *[state] * (len(self.updates) - 1))

    @property
    def coupled(self) -> float:
        """The weight decay that goes into the gradient."""
        return self.weight_decay

    def scratch(self, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]) -> tuple[TensorType, ...]:
        """A part for intermediate results, and one each where w and g cannot be worked on as they are."""
        w, g = ins[0], ins[1]
        assert w is not None and g is not None
        part = TensorType(work_dtype(w), (min(w.size, PART),))
        count = 1 + (g.dtype != part.dtype or self.coupled != 0) + (w.dtype != part.dtype)
        return (part,) * count

    def factors(self, m: Any, rate: Any, step: Any) -> tuple[Any, ...]:
        """Scalars of one step in f64, through `m` (NumPy, CuPy, or `Formula`): learning rate first."""
        return (rate,)

    def part(self, xp: Any, w: Any, g: Any, state: Sequence[Any], factors: Sequence[Any], t: Any) -> None:
        """Updates one part; `t` is a temporary.  g is read only."""
        raise NotImplementedError

    def formula(self, b: Any, w: Any, g: Any, state: Sequence[Any], factors: Sequence[Any]) -> tuple[Any, ...]:
        """(new w, new state ...) with operators; None for state that is absent."""
        raise NotImplementedError

    def parts(self, xp: Any, ins: Sequence[Any], scratch: Sequence[Any], *, write: bool = True) -> Iterator[tuple]:
        """(w, g, state, t) in the working type, part by part; what is done to w is stored."""
        w, g = _flat(ins[0]), ins[1].reshape(-1)
        state = [_flat(ins[i]) if i < len(ins) and ins[i] is not None else None for i in self.updates[1:]]
        t, *more = scratch
        direct = w.dtype == t.dtype
        for start in range(0, w.size, PART):
            here = slice(start, min(start + PART, w.size))
            n = here.stop - start
            left = [s[:n] for s in more]
            wp, gp, tp = w[here], g[here], t[:n]
            if not direct:
                wide = left.pop()
                wide[...] = wp
                wp = wide
            if left:
                left[0][...] = gp
                gp = left[0]
            if self.coupled:
                xp.multiply(wp, wp.dtype.type(self.coupled), out=tp)
                xp.add(gp, tp, out=gp)
            yield wp, gp, [None if s is None else s[here] for s in state], tp
            if not direct and write:
                w[here] = wp

    def compute(self, xp, ins, outs, scratch):
        """Part by part, in place."""
        factors = self.numbers(xp, ins)
        for w, g, state, t in self.parts(xp, ins, scratch):
            self.part(xp, w, g, state, factors, t)

    def numbers(self, xp: Any, ins: Sequence[Any]) -> list[Any]:
        """`factors` as scalars of the working type."""
        work = DTYPES[work_dtype(TensorType.of(ins[0]))]
        step = None if self.step_at is None else ins[self.step_at].astype(np.float64) + 1.0
        found = self.factors(xp, ins[self.rate_at].astype(np.float64), step)
        return [f.astype(work) for f in found]

    def expand(self, b, *inputs):
        """The same with plain operators, on new values."""
        w, g = inputs[0], inputs[1]
        work = work_dtype(w.type)
        wide = w if w.dtype == work else b.Cast(w, to=work)
        g = g if g.dtype == work else b.Cast(g, to=work)
        if self.coupled:
            g = b.Add(g, b.Mul(wide, b.constant(self.coupled, wide)))
        state = [inputs[i] if i < len(inputs) else None for i in self.updates[1:]]
        new, *rest = self.formula(b, wide, g, state, self.values(b, inputs, work))
        while rest and rest[-1] is None:
            rest.pop()
        return (new if w.dtype == work else b.Cast(new, to=w.dtype), *rest)

    def values(self, b: Any, inputs: Sequence[Any], work: str) -> list[Any]:
        """`factors` as values of the working type."""

        def f64(v: Any) -> Any:
            return v if v.dtype == "f64" else b.Cast(v, to="f64")

        step = None
        if self.step_at is not None:
            step = Number(b, b.Add(f64(inputs[self.step_at]), b.constant(1.0, "f64")))
        found = self.factors(Formula(b), Number(b, f64(inputs[self.rate_at])), step)
        return [f.value if work == "f64" else b.Cast(f.value, to=work) for f in found]

    def cost(self, ins, outs):
        """`flops_per_element` for each parameter."""
        return Cost(self.flops_per_element * ins[0].size, super().cost(ins, outs).bytes)


class Number:
    """A scalar of a program that takes part in arithmetic with Python's signs: one formula for arrays and programs."""

    def __init__(self, b: Any, value: Any) -> None:
        self.b, self.value = b, value

    def _with(self, name: str, other: Any, *, swap: bool = False) -> Number:
        value = other.value if isinstance(other, Number) else self.b.constant(other, self.value)
        pair = (value, self.value) if swap else (self.value, value)
        return Number(self.b, getattr(self.b, name)(*pair))

    def __mul__(self, other: Any) -> Number:
        return self._with("Mul", other)

    def __truediv__(self, other: Any) -> Number:
        return self._with("Div", other)

    def __rsub__(self, other: Any) -> Number:
        return self._with("Sub", other, swap=True)

    def __rpow__(self, other: Any) -> Number:
        return self._with("Pow", other, swap=True)


@dataclass(frozen=True)
class Formula:
    """Stands where an array module does, for `Number`."""

    b: Any

    def sqrt(self, x: Number) -> Number:
        """Square root."""
        return Number(self.b, self.b.Sqrt(x.value))


def _scaled(b: Any, x: Any, factor: float) -> Any:
    return b.Mul(x, b.constant(factor, x))


def _mixed(b: Any, old: Any, new: Any, keep: float) -> Any:
    """keep·old + (1 - keep)·new."""
    return b.Add(_scaled(b, old, keep), _scaled(b, new, 1 - keep))


def _mix(xp: Any, old: Any, new: Any, keep: float, t: Any) -> None:
    """old ← keep·old + (1 - keep)·new; `new` may be `t`."""
    number = old.dtype.type
    xp.multiply(old, number(keep), out=old)
    xp.multiply(new, number(1 - keep), out=t)
    xp.add(old, t, out=old)


def _samples(op: Update, draw: Any, states: int, *extra: bool) -> Iterator[Any]:
    """A matrix, more than one part of a vector, an empty one, and f32, for (w, g, states..., lr, step?, extra...)."""

    def inputs(text: str) -> list[Any]:
        given: list[Any] = [draw(text), draw(text), *(draw(text, 0.5, 1.0) for _ in range(states))]
        given.append(np.array(0.125, np.float32))
        if op.step_at is not None:
            given.append(np.array(3, np.int64))
        return given + [draw(text, 0.5, 0.6) if e else None for e in extra]

    for text in ("f64[3,4]", "f64[0]", "f64[]", f"f32[{PART + 5}]"):
        yield draw.case(op, *inputs(text))


@dataclass(frozen=True)
class SGDUpdate(Update):
    """(w, g, lr): w ← w - lr·g."""

    weight_decay: float = 0.0
    updates = (0,)
    rate_at = 2
    flops_per_element = 2

    def part(self, xp, w, g, state, factors, t):
        """One product, one difference."""
        xp.multiply(g, factors[0], out=t)
        xp.subtract(w, t, out=w)

    def formula(self, b, w, g, state, factors):
        """w - lr·g."""
        return (b.Sub(w, b.Mul(g, factors[0])),)

    @classmethod
    def samples(cls, draw):
        """With and without weight decay; half precision."""
        yield from _samples(cls(), draw, 0)
        yield from _samples(cls(weight_decay=0.1), draw, 0)
        yield draw.case(cls(), draw("f16[5]"), draw("f16[5]"), np.array(0.1, np.float32))


@dataclass(frozen=True)
class MomentumUpdate(Update):
    """(w, g, v, lr): v ← momentum·v + (1 - dampening)·g, w ← w - lr·v; with `nesterov` w ← w - lr·(g + momentum·v).

    Sutskever et al. 2013, in the form of Paddle and PyTorch (the learning rate is not part of v).  v begins with
    zeros, so dampening acts on the first step too, where PyTorch takes the first gradient whole.
    """

    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    updates = (0, 2)
    required_outputs = 2
    rate_at = 3

    def part(self, xp, w, g, state, factors, t):
        """v first, then the step through t."""
        (v,) = state
        number = w.dtype.type
        xp.multiply(v, number(self.momentum), out=v)
        if self.dampening:
            xp.multiply(g, number(1 - self.dampening), out=t)
            xp.add(v, t, out=v)
        else:
            xp.add(v, g, out=v)
        if self.nesterov:
            xp.multiply(v, number(self.momentum), out=t)
            xp.add(t, g, out=t)
            xp.multiply(t, factors[0], out=t)
        else:
            xp.multiply(v, factors[0], out=t)
        xp.subtract(w, t, out=w)

    def formula(self, b, w, g, state, factors):
        """As the class says."""
        fresh = _scaled(b, g, 1 - self.dampening) if self.dampening else g
        v = b.Add(_scaled(b, state[0], self.momentum), fresh)
        step = b.Add(_scaled(b, v, self.momentum), g) if self.nesterov else v
        return b.Sub(w, b.Mul(step, factors[0])), v

    @classmethod
    def samples(cls, draw):
        """Plain, Nesterov, dampened; half precision."""
        yield from _samples(cls(), draw, 1)
        yield from _samples(cls(nesterov=True, weight_decay=0.1), draw, 1)
        yield from _samples(cls(dampening=0.3), draw, 1)
        yield draw.case(
            cls(weight_decay=0.1), draw("f16[5]"), draw("f16[5]"), draw("f32[5]"), np.array(0.1, np.float32)
        )


@dataclass(frozen=True)
class AdagradUpdate(Update):
    """(w, g, s, lr): s ← s + g², w ← w - lr·g / (√s + epsilon)  (Duchi et al. 2011)."""

    epsilon: float = 1e-10
    weight_decay: float = 0.0
    updates = (0, 2)
    required_outputs = 2
    rate_at = 3
    flops_per_element = 9

    def part(self, xp, w, g, state, factors, t):
        """In one temporary."""
        (s,) = state
        xp.multiply(g, g, out=t)
        xp.add(s, t, out=s)
        xp.sqrt(s, out=t)
        xp.add(t, w.dtype.type(self.epsilon), out=t)
        xp.divide(g, t, out=t)
        xp.multiply(t, factors[0], out=t)
        xp.subtract(w, t, out=w)

    def formula(self, b, w, g, state, factors):
        """As the class says."""
        s = b.Add(state[0], b.Mul(g, g))
        step = b.Div(g, b.Add(b.Sqrt(s), b.constant(self.epsilon, s)))
        return b.Sub(w, b.Mul(step, factors[0])), s

    @classmethod
    def samples(cls, draw):
        """With and without weight decay."""
        yield from _samples(cls(), draw, 1)
        yield from _samples(cls(weight_decay=0.1), draw, 1)


@dataclass(frozen=True)
class RMSPropUpdate(Update):
    """(w, g, s, lr, a?, v?): s ← rho·s + (1 - rho)·g², w ← w - lr·u with u = g / (√s + epsilon).

    With a (centered): a ← rho·a + (1 - rho)·g, and s - a² stands for s in u (Graves 2013).  With v: v ← momentum·v +
    u stands for u.  Tieleman & Hinton 2012, in PyTorch's form (epsilon outside the root, where Paddle has it inside).
    """

    rho: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    updates = (0, 2, 4, 5)
    required_outputs = 2
    rate_at = 3
    flops_per_element = 12

    def part(self, xp, w, g, state, factors, t):
        """In one temporary."""
        s, a, v = state
        xp.multiply(g, g, out=t)
        _mix(xp, s, t, self.rho, t)
        if a is None:
            xp.sqrt(s, out=t)
        else:
            _mix(xp, a, g, self.rho, t)
            xp.multiply(a, a, out=t)
            xp.subtract(s, t, out=t)
            # rounding may leave a tiny negative number where all gradients were equal
            xp.maximum(t, w.dtype.type(0), out=t)
            xp.sqrt(t, out=t)
        xp.add(t, w.dtype.type(self.epsilon), out=t)
        xp.divide(g, t, out=t)
        if v is not None:
            xp.multiply(v, w.dtype.type(self.momentum), out=v)
            xp.add(v, t, out=v)
            t[...] = v
        xp.multiply(t, factors[0], out=t)
        xp.subtract(w, t, out=w)

    def formula(self, b, w, g, state, factors):
        """As the class says."""
        s, a, v = state
        s = under = _mixed(b, s, b.Mul(g, g), self.rho)
        if a is not None:
            a = _mixed(b, a, g, self.rho)
            under = b.Relu(b.Sub(s, b.Mul(a, a)))
        u = b.Div(g, b.Add(b.Sqrt(under), b.constant(self.epsilon, s)))
        if v is not None:
            u = v = b.Add(_scaled(b, v, self.momentum), u)
        return b.Sub(w, b.Mul(u, factors[0])), s, a, v

    @classmethod
    def samples(cls, draw):
        """Plain, centered, with momentum, with both."""
        for centered in (False, True):
            for momentum in (0.0, 0.9):
                yield from _samples(cls(momentum=momentum, weight_decay=0.1), draw, 1, centered, momentum > 0)


@dataclass(frozen=True)
class AdamUpdate(Update):
    """(w, g, m, v, lr, step, top?): Adam (Kingma & Ba 2015), with t = step + 1 as the steps are counted from 0.

    m ← beta1·m + (1 - beta1)·g, v ← beta2·v + (1 - beta2)·g²,
    w ← w - lr/(1 - beta1ᵗ) · m / (√v/√(1 - beta2ᵗ) + epsilon).
    `decoupled`: weight decay is w ← w - lr·weight_decay·w before that, and not part of the gradient (AdamW,
    Loshchilov & Hutter 2019).  With top: AMSGrad (Reddi et al. 2018), top ← max(top, v) stands for v.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    updates = (0, 2, 3, 6)
    required_outputs = 3
    rate_at = 4
    step_at = 5
    flops_per_element = 15

    @property
    def coupled(self) -> float:
        """None where decay is decoupled."""
        return 0.0 if self.decoupled else self.weight_decay

    def factors(self, m, rate, step):
        """lr / (1 - beta1ᵗ), √(1 - beta2ᵗ), 1 - lr·weight_decay."""
        return (
            rate / (1.0 - self.beta1**step),
            m.sqrt(1.0 - self.beta2**step),
            1.0 - rate * self.weight_decay,
        )

    def part(self, xp, w, g, state, factors, t):
        """In one temporary."""
        m, v, top = state
        rate, root, keep = factors
        if self.decoupled:
            xp.multiply(w, keep, out=w)
        _mix(xp, m, g, self.beta1, t)
        xp.multiply(g, g, out=t)
        _mix(xp, v, t, self.beta2, t)
        if top is not None:
            xp.maximum(top, v, out=top)
            v = top
        xp.sqrt(v, out=t)
        xp.divide(t, root, out=t)
        xp.add(t, w.dtype.type(self.epsilon), out=t)
        xp.divide(m, t, out=t)
        xp.multiply(t, rate, out=t)
        xp.subtract(w, t, out=w)

    def formula(self, b, w, g, state, factors):
        """As the class says."""
        m, v, top = state
        rate, root, keep = factors
        if self.decoupled:
            w = b.Mul(w, keep)
        m = _mixed(b, m, g, self.beta1)
        v = used = _mixed(b, v, b.Mul(g, g), self.beta2)
        if top is not None:
            top = used = b.Max(top, v)
        u = b.Div(m, b.Add(b.Div(b.Sqrt(used), root), b.constant(self.epsilon, v)))
        return b.Sub(w, b.Mul(u, rate)), m, v, top

    @classmethod
    def samples(cls, draw):
        """Adam, with L2, AdamW, AMSGrad; half precision."""
        yield from _samples(cls(), draw, 2)
        yield from _samples(cls(weight_decay=0.1), draw, 2)
        yield from _samples(cls(weight_decay=0.1, decoupled=True), draw, 2)
        yield from _samples(cls(), draw, 2, True)
        lr, step = np.array(0.1, np.float32), np.array(0, np.int64)
        for decoupled in (False, True):
            op = cls(weight_decay=0.1, decoupled=decoupled)
            yield draw.case(op, draw("f16[5]"), draw("f16[5]"), draw("f32[5]"), draw("f32[5]", 0, 1), lr, step)


class TrustUpdate(Update, abstract=True):
    """Base of updates that scale a parameter's step by norms of whole tensors: two walks over the arrays."""

    def norm(self, xp: Any, total: Any, x: Any, t: Any) -> Any:
        """`total` + Σ x², in f64; x may be t."""
        xp.multiply(x, x, out=t)
        return total + xp.sum(t, dtype=np.float64)

    def norm_value(self, b: Any, x: Any) -> Any:
        """√Σ x² in f64, as a value."""
        x = x if x.dtype == "f64" else b.Cast(x, to="f64")
        return b.Sqrt(b.ReduceSum(b.Mul(x, x), keepdims=0))


@dataclass(frozen=True)
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
        """One more part: for r."""
        parts = super().scratch(ins, outs)
        return (parts[0], *parts)

    def factors(self, m, rate, step):
        """lr, 1 - beta1ᵗ, √(1 - beta2ᵗ)."""
        return rate, 1.0 - self.beta1**step, m.sqrt(1.0 - self.beta2**step)

    def compute(self, xp, ins, outs, scratch):
        """First the moments and both norms, then the step with r worked out once more."""
        rest, scratch = scratch[0], scratch[1:]
        rate, c1, root = self.numbers(xp, ins)
        ww = rr = xp.zeros((), np.float64)
        for w, g, (m, v), t in self.parts(xp, ins, scratch, write=False):
            _mix(xp, m, g, self.beta1, t)
            xp.multiply(g, g, out=t)
            _mix(xp, v, t, self.beta2, t)
            ww = self.norm(xp, ww, w, t)
            self._direction(xp, w, m, v, c1, root, t, rest[: t.size])
            rr = self.norm(xp, rr, t, t)
        ok = (ww > 0) & (rr > 0)
        trust = xp.where(ok, xp.sqrt(ww / xp.where(ok, rr, 1.0)), 1.0).astype(scratch[0].dtype)
        for w, _, (m, v), t in self.parts(xp, ins, scratch):
            self._direction(xp, w, m, v, c1, root, t, rest[: t.size])
            xp.multiply(t, rate * trust, out=t)
            xp.subtract(w, t, out=w)

    def _direction(self, xp: Any, w: Any, m: Any, v: Any, c1: Any, root: Any, t: Any, rest: Any) -> None:
        """t ← r."""
        number = w.dtype.type
        xp.sqrt(v, out=t)
        xp.divide(t, root, out=t)
        xp.add(t, number(self.epsilon), out=t)
        xp.divide(m, t, out=t)
        xp.divide(t, c1, out=t)
        xp.multiply(w, number(self.weight_decay), out=rest)
        xp.add(t, rest, out=t)

    def formula(self, b, w, g, state, factors):
        """As the class says."""
        m, v = state
        rate, c1, root = factors
        m = _mixed(b, m, g, self.beta1)
        v = _mixed(b, v, b.Mul(g, g), self.beta2)
        u = b.Div(b.Div(m, b.Add(b.Div(b.Sqrt(v), root), b.constant(self.epsilon, v))), c1)
        r = b.Add(u, _scaled(b, w, self.weight_decay))
        nw, nr = self.norm_value(b, w), self.norm_value(b, r)
        zero, one = b.constant(0.0, "f64"), b.constant(1.0, "f64")
        ok = b.Less(zero, b.Mul(nw, nr))
        trust = b.Where(ok, b.Div(nw, b.Where(ok, nr, one)), one)
        trust = trust if w.dtype == "f64" else b.Cast(trust, to=w.dtype)
        return b.Sub(w, b.Mul(r, b.Mul(rate, trust))), m, v

    @classmethod
    def samples(cls, draw):
        """With and without weight decay; a parameter of zeros; half precision."""
        yield from _samples(cls(), draw, 2)
        yield from _samples(cls(weight_decay=0.0), draw, 2)
        lr, step = np.array(0.1, np.float32), np.array(0, np.int64)
        yield draw.case(cls(), np.zeros(3), draw("f64[3]"), np.zeros(3), np.zeros(3), lr, step)
        yield draw.case(cls(), draw("f16[5]"), draw("f16[5]"), draw("f32[5]"), draw("f32[5]", 0, 1), lr, step)


@dataclass(frozen=True)
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

    def compute(self, xp, ins, outs, scratch):
        """First both norms, then the step."""
        ww = gg = xp.zeros((), np.float64)
        for w, g, _, t in self.parts(xp, ins, scratch, write=False):
            ww = self.norm(xp, ww, w, t)
            gg = self.norm(xp, gg, g, t)
        nw, ng = xp.sqrt(ww), xp.sqrt(gg)
        ok = (nw > 0) & (ng > 0)
        below = xp.where(ok, ng + self.weight_decay * nw + self.epsilon, 1.0)
        trust = xp.where(ok, self.coefficient * nw / below, 1.0)
        local = (ins[self.rate_at].astype(np.float64) * trust).astype(scratch[0].dtype)
        for w, g, (v,), t in self.parts(xp, ins, scratch):
            xp.multiply(v, w.dtype.type(self.momentum), out=v)
            xp.multiply(w, w.dtype.type(self.weight_decay), out=t)
            xp.add(t, g, out=t)
            xp.multiply(t, local, out=t)
            xp.add(v, t, out=v)
            xp.subtract(w, v, out=w)

    def values(self, b: Any, inputs: Sequence[Any], work: str) -> list[Any]:
        """The learning rate in f64: the trust ratio is worked out in it."""
        rate = inputs[self.rate_at]
        return [rate if rate.dtype == "f64" else b.Cast(rate, to="f64")]

    def formula(self, b, w, g, state, factors):
        """As the class says."""
        nw, ng = self.norm_value(b, w), self.norm_value(b, g)
        zero, one = b.constant(0.0, "f64"), b.constant(1.0, "f64")
        ok = b.Less(zero, b.Mul(nw, ng))
        below = b.Add(b.Add(ng, _scaled(b, nw, self.weight_decay)), b.constant(self.epsilon, "f64"))
        trust = b.Where(ok, b.Div(_scaled(b, nw, self.coefficient), b.Where(ok, below, one)), one)
        local = b.Mul(factors[0], trust)
        local = local if w.dtype == "f64" else b.Cast(local, to=w.dtype)
        step = b.Mul(b.Add(_scaled(b, w, self.weight_decay), g), local)
        v = b.Add(_scaled(b, state[0], self.momentum), step)
        return b.Sub(w, v), v

    @classmethod
    def samples(cls, draw):
        """With and without weight decay; a gradient of zeros; half precision."""
        yield from _samples(cls(), draw, 1)
        yield from _samples(cls(weight_decay=0.0, epsilon=1e-3), draw, 1)
        lr = np.array(0.1, np.float32)
        yield draw.case(cls(), draw("f64[3]"), np.zeros(3), np.zeros(3), lr)
        yield draw.case(cls(), draw("f16[5]"), draw("f16[5]"), draw("f32[5]"), lr)


@dataclass(frozen=True)
class Increment(Op):
    """(x): x ← x + 1, for the step counter."""

    updates = (0,)

    def infer(self, x):
        """The same type."""
        return (x,)

    def compute(self, xp, ins, outs, scratch):
        """In place."""
        xp.add(ins[0], ins[0].dtype.type(1), out=outs[0])

    def expand(self, b, x):
        """x + 1."""
        return (b.Add(x, b.constant(1, x)),)

    @classmethod
    def samples(cls, draw):
        """A counter."""
        yield draw.case(cls(), np.array(41, np.int64))


@dataclass(frozen=True)
class GlobalNorm(Op):
    """√Σ x² over all elements of all inputs: f32[], or f64[] where the inputs are f64.  Summed in f64."""

    def infer(self, *inputs):
        """A scalar."""
        if not inputs or any(not t.is_float for t in inputs):
            raise self.fail("it takes one or more floating-point tensors", *inputs)
        return (TensorType("f64" if all(t.dtype == "f64" for t in inputs) else "f32", ()),)

    def scratch(self, ins, outs):
        """A part for squares."""
        return (TensorType("f64", (min(max(t.size for t in ins), PART),)),)

    def compute(self, xp, ins, outs, scratch):
        """Part by part, in order."""
        total = xp.zeros((), np.float64)
        for x in ins:
            x = x.reshape(-1)
            for start in range(0, x.size, PART):
                here = x[start : start + PART]
                t = scratch[0][: here.size]
                t[...] = here
                xp.multiply(t, t, out=t)
                total = total + xp.sum(t)
        outs[0][...] = xp.sqrt(total)

    def expand(self, b, *inputs):
        """Sums of squares in f64, added in order."""
        wide = [x if x.dtype == "f64" else b.Cast(x, to="f64") for x in inputs]
        norm = b.Sqrt(b.add_all([b.ReduceSum(b.Mul(x, x), keepdims=0) for x in wide]))
        return (norm if all(x.dtype == "f64" for x in inputs) else b.Cast(norm, to="f32"),)

    def cost(self, ins, outs):
        """Two operations an element."""
        return Cost(2 * sum(t.size for t in ins), super().cost(ins, outs).bytes)

    @classmethod
    def samples(cls, draw):
        """One and several inputs of different shapes, an empty one; f32."""
        yield draw.case(cls(), draw("f64[3,4]"))
        yield draw.case(cls(), draw("f64[3,4]"), draw("f64[0]"), draw("f64[]"))
        yield draw.case(cls(), draw("f32[3,4]"), draw("f32[5]"))
