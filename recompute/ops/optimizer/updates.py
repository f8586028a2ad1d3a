"""The optimizers' updates, element by element, and the step counter."""

from __future__ import annotations

import numpy as np

from ...language.op import Draw, Op
from ...language.types import TensorType
from .base import PART, Update, mixed, scaled, stored_samples, update_samples
from .storage import ROW, blocks


class SGDUpdate(Update):
    """(w, g, lr): w ← w - lr·g."""

    weight_decay: float = 0.0
    updates = (0,)
    rate_at = 2
    flops_per_element = 2

    def formula(self, b, w, g, state, factors):
        """w - lr·g."""
        return (b.Sub(w, b.Mul(g, factors[0])),)

    @classmethod
    def samples(cls, draw):
        yield from update_samples(cls(), draw, 0)
        yield from update_samples(cls(weight_decay=0.1), draw, 0)
        yield draw.case(cls(), draw("f16[5]"), draw("f16[5]"), np.array(0.1, np.float32))
        yield from stored_samples(cls(weight_decay=0.1), draw, 0)


class MomentumUpdate(Update):
    """(w, g, v, lr): v ← momentum·v + (1 - dampening)·g, w ← w - lr·v; with `nesterov` w ← w - lr·(g + momentum·v).

    Sutskever et al. 2013, in the form of Paddle and PyTorch (the learning rate is not part of v).  With dampening the
    step counter is an input too: as in PyTorch, the first gradient is taken whole.
    """

    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    updates = (0, 2)
    required_outputs = 2
    rate_at = 3

    @property
    def step_at(self):
        """Only dampening asks which step it is."""
        return 4 if self.dampening else None

    def factors(self, m, rate, step):
        """lr; the factor of g, where there is dampening."""
        if not self.dampening:
            return (rate,)
        first = 0.0 ** ((1 - step) * -1.0)  # 1, and 0 once a step is done
        return rate, 1 - (1 - first) * self.dampening

    def formula(self, b, w, g, state, factors):
        fresh = b.Mul(g, factors[1]) if self.dampening else g
        v = b.Add(scaled(b, state[0], self.momentum), fresh)
        step = b.Add(scaled(b, v, self.momentum), g) if self.nesterov else v
        return b.Sub(w, b.Mul(step, factors[0])), v

    @classmethod
    def samples(cls, draw):
        yield from update_samples(cls(), draw, 1)
        yield from update_samples(cls(nesterov=True, weight_decay=0.1), draw, 1)
        yield from update_samples(cls(dampening=0.3), draw, 1)
        first = np.array(0.1, np.float32), np.array(0, np.int64)
        yield draw.case(cls(dampening=0.3), draw("f64[5]"), draw("f64[5]"), draw("f64[5]"), *first)
        yield draw.case(
            cls(weight_decay=0.1), draw("f16[5]"), draw("f16[5]"), draw("f32[5]"), np.array(0.1, np.float32)
        )
        yield from stored_samples(cls(nesterov=True, dampening=0.3), draw, 1)


class AdagradUpdate(Update):
    """(w, g, s, lr): s ← s + g², w ← w - lr·g / (√s + epsilon)  (Duchi et al. 2011)."""

    epsilon: float = 1e-10
    weight_decay: float = 0.0
    updates = (0, 2)
    required_outputs = 2
    rate_at = 3
    flops_per_element = 9

    def formula(self, b, w, g, state, factors):
        s = b.Add(state[0], b.Mul(g, g))
        step = b.Div(g, b.Add(b.Sqrt(s), b.constant(self.epsilon, s)))
        return b.Sub(w, b.Mul(step, factors[0])), s

    @classmethod
    def samples(cls, draw):
        yield from update_samples(cls(), draw, 1)
        yield from update_samples(cls(weight_decay=0.1), draw, 1)
        yield from stored_samples(cls(), draw, 1)


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

    def infer(self, *inputs):
        if self.momentum and (len(inputs) < 6 or inputs[5] is None):
            raise self.fail("input 5, the state of its momentum, is absent", *inputs)
        return super().infer(*inputs)

    def formula(self, b, w, g, state, factors):
        s, a, v = state
        s = under = mixed(b, s, b.Mul(g, g), self.rho)
        if a is not None:
            a = mixed(b, a, g, self.rho)
            under = b.Relu(b.Sub(s, b.Mul(a, a)))
        u = b.Div(g, b.Add(b.Sqrt(under), b.constant(self.epsilon, s)))
        if v is not None:
            u = v = b.Add(scaled(b, v, self.momentum), u)
        return b.Sub(w, b.Mul(u, factors[0])), s, a, v

    @classmethod
    def samples(cls, draw):
        for centered in (False, True):
            for momentum in (0.0, 0.9):
                yield from update_samples(cls(momentum=momentum, weight_decay=0.1), draw, 1, centered, momentum > 0)
        yield from stored_samples(cls(momentum=0.9), draw, 1, True, True)


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
    signs = (True, False, False)
    flops_per_element = 14

    @property
    def coupled(self) -> float:
        return 0.0 if self.decoupled else self.weight_decay

    def factors(self, m, rate, step):
        """r·lr / (1 - beta1ᵗ), r·epsilon, 1 - lr·weight_decay, with r = √(1 - beta2ᵗ) on both sides of the quotient."""
        root = m.sqrt(1.0 - self.beta2**step)
        return rate * root / (1.0 - self.beta1**step), root * self.epsilon, 1.0 - rate * self.weight_decay

    def formula(self, b, w, g, state, factors):
        m, v, top = state
        rate, epsilon, keep = factors
        if self.decoupled:
            w = b.Mul(w, keep)
        m = mixed(b, m, g, self.beta1)
        v = used = mixed(b, v, b.Mul(g, g), self.beta2)
        if top is not None:
            top = used = b.Max(top, v)
        u = b.Div(m, b.Add(b.Sqrt(used), epsilon))
        return b.Sub(w, b.Mul(u, rate)), m, v, top

    @classmethod
    def samples(cls, draw):
        yield from update_samples(cls(), draw, 2)
        yield from update_samples(cls(weight_decay=0.1), draw, 2)
        yield from update_samples(cls(weight_decay=0.1, decoupled=True), draw, 2)
        yield from update_samples(cls(), draw, 2, True)
        lr, step = np.array(0.1, np.float32), np.array(0, np.int64)
        for decoupled in (False, True):
            op = cls(weight_decay=0.1, decoupled=decoupled)
            yield draw.case(op, draw("f16[5]"), draw("f16[5]"), draw("f32[5]"), draw("f32[5]", 0, 1), lr, step)
            yield from stored_samples(op, draw, 2, decoupled)
        yield from cls._eight_bit_samples(draw)

    @classmethod
    def _eight_bit_samples(cls, draw):
        """With moments of 8 bits: several types, more than a part, AMSGrad, a step that is skipped."""
        cases = [("f32", f"{PART + 300}", False, None), ("f32", "20,30", True, 0.5), ("f32", "300", False, 0.0)]
        cases += [("bf16", "20,30", False, None), ("f16", "300", False, None), ("bf16", "0", False, None)]
        for dtype, shape, stochastic, unscale in [*cases, ("bf16", "257", True, None), ("bf16", "520", True, 0.0)]:
            op = cls(weight_decay=0.1, eight_bits=True, stochastic=stochastic and dtype == "bf16", seed=7)
            w, g = draw(f"{dtype}[{shape}]"), draw(f"{dtype}[{shape}]")
            inputs = [w, g, *(_eight_bits(draw, w.size) for _ in range(2)), np.array(0.1, np.float32), np.array(3)]
            inputs += [_eight_bits(draw, w.size)] if stochastic else [None]
            more = [] if unscale is None else [np.array(unscale, np.float32)]
            yield draw.case(op, *inputs, *more, export=False)


def _eight_bits(draw: Draw, size: int) -> np.ndarray:
    """State of 8 bits with any codes, and magnitudes in [0.5, 1)."""
    rows = np.empty((blocks(size), ROW), np.uint8)
    rows[...] = np.arange(rows.size).reshape(rows.shape) * 37 % 256
    rows[:, -4:] = draw(f"f32[{len(rows)},1]", 0.5, 1.0).view(np.uint8)
    return rows


class Increment(Op):
    """(x, unscale?): x ← x + 1, for the step counter; nothing where `unscale` is 0 (see update.py)."""

    updates = (0,)

    def infer(self, x, unscale=None):
        if unscale is not None and unscale != TensorType("f32", ()):
            raise self.fail("unscale must be f32[]", x, unscale)
        return (x,)

    def compute(self, ins, outs, scratch):
        kind = ins[0].dtype
        one = kind.type(1) if len(ins) < 2 or ins[1] is None else (ins[1] != 0).astype(kind)
        np.add(ins[0], one, out=outs[0])

    def expand(self, b, x, unscale=None):
        if unscale is None:
            return (b.Add(x, b.constant(1, x)),)
        skip = b.Equal(unscale, b.constant(0.0, unscale))
        return (b.Where(skip, x, b.Add(x, b.constant(1, x))),)

    @classmethod
    def samples(cls, draw):
        """A counter; one that stays, one that does not."""
        yield draw.case(cls(), np.array(41, np.int64))
        yield draw.case(cls(), np.array(41, np.int64), np.array(0, np.float32))
        yield draw.case(cls(), np.array(41, np.int64), np.array(2.0**-16, np.float32))
