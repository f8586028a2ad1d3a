"""The base of the optimizers' update operators.

Every update takes the parameter w, its gradient g, the optimizer's state, and the learning rate (a scalar).  It is
computed in the parameter's element type, or in f32 for f16 and bf16 parameters, whose state is f32.  Both can be stored
in fewer bits (storage.py).  Scalars are worked out in f64.  The numerics walk over the arrays in parts that fit the
processor's cache, so that the temporaries are small and every array is read once.

`weight_decay` here is the coupled kind unless said otherwise: the gradient is g + weight_decay·w.

The last input, behind all others, is optional: `unscale`, f32[], for loss scaling.  The gradient is multiplied by it
before all else; where it is 0 the update is skipped: parameter and state keep their bits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...language.element import argument
from ...language.formulas import Elements, through_expansion
from ...language.op import Cost, Draw, OperatorBuilder
from ...language.types import DTYPES, Array, Operands, TensorType, Types, dtype_name, present
from ..array_steps import ArraySteps, updating_steps
from .storage import Stored

#: elements that are worked on at a time
PART = 1 << 15


def work_dtype(t: TensorType) -> str:
    """The element type in which a parameter of type `t` is updated and its state is kept."""
    return "f32" if t.dtype in ("f16", "bf16") else t.dtype


def _flat(a: Array) -> Array:
    if not a.flags.c_contiguous:
        raise ValueError("an array that is updated in place must be contiguous")
    return a.reshape(-1)


class Update(Stored, abstract=True):
    """Base of the updates: inputs (w, g, ...); the outputs are the inputs that `updates` names, w first.

    A subclass gives `formula`, which is run part by part of the flat arrays, and `factors`, the scalars that it takes.
    """

    flops_per_element: ClassVar[int] = 4

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """Types as they are: state has w's shape, the learning rate is a float scalar, the step counter i64[]."""
        needed = dict.fromkeys(self.updates[1 : self.required_outputs], "state")
        needed |= {0: "parameter", 1: "gradient", self.rate_at: "learning rate"}
        needed |= {} if self.counter_at is None else {self.counter_at: "step counter"}
        for i, what in sorted(needed.items()):
            if i >= len(inputs) or inputs[i] is None:
                raise self.fail(f"input {i}, its {what}, is absent", *inputs)
        if len(inputs) > self.unscale_at + 1:
            raise self.fail(f"takes {self.unscale_at + 1} inputs at most", *inputs)
        w, g, rate = present(inputs[0], inputs[1], inputs[self.rate_at])
        if g.shape != w.shape or not (w.is_float and g.is_float):
            raise self.fail("the gradient must have the parameter's shape", *inputs)
        if rate.shape != () or not rate.is_float:
            raise self.fail("the learning rate must be one floating-point number", *inputs)
        if self.counter_at is not None and inputs[self.counter_at] != TensorType("i64", ()):
            raise self.fail("the step counter must be i64[]", *inputs)
        if (unscale := self.unscale(inputs)) is not None and unscale != TensorType("f32", ()):
            raise self.fail("unscale must be f32[]", *inputs)
        self.check_storage(w, len(self.updates) - 1, inputs)
        state = self.state_type(w)
        states = [inputs[i] if i < len(inputs) else None for i in self.updates[1:]]
        if any(t is not None and t != state for t in states):
            raise self.fail(f"its state must be {state}", *inputs)
        while states and states[-1] is None:
            states.pop()
        return (w, *[state] * len(states))

    @property
    def coupled(self: Any) -> float:
        """The weight decay that goes into the gradient."""
        return self.weight_decay

    @property
    def unscale_at(self) -> int:
        """Position of `unscale`: behind all other inputs."""
        return 1 + max(*self.updates, 1, self.rate_at, self.counter_at or 0)

    def unscale(self, inputs: Sequence[Any]) -> Any:
        """The input `unscale`; None where it is absent."""
        return inputs[self.unscale_at] if self.unscale_at < len(inputs) else None

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """A part for intermediate results, one each where w, g or the state cannot be worked on as they are, and with
        `unscale` one each for what w and the state were."""
        w, g = present(ins[0], ins[1])
        part = TensorType(work_dtype(w), (min(w.size, PART),))
        scaled = self.unscale(ins) is not None
        count = 1 + (g.dtype != part.dtype or self.coupled != 0 or scaled) + (w.dtype != part.dtype)
        states = len(self._states(ins))
        return (part,) * (count + (states if self.stores else states + 1 if scaled else 0))

    def counter(self, inputs: Sequence[Any]) -> Any:
        """The step counter among the inputs; None where it is not read."""
        return None if self.counter_at is None else inputs[self.counter_at]

    def _states(self, ins: Sequence[Any]) -> list[int]:
        return [i for i in self.updates[1:] if i < len(ins) and ins[i] is not None]

    def factors(self, m: Any, rate: Any, step: Any) -> tuple[Any, ...]:
        """Scalars of one step in f64, through `m` (NumPy or `Formula`): learning rate first."""
        return (rate,)

    def formula(
        self, b: OperatorBuilder, w: Any, g: Any, state: Sequence[Any], factors: Sequence[Any]
    ) -> tuple[Any, ...]:
        """(new w, new state ...) with operators; None for state that is absent."""
        raise NotImplementedError

    def parts(self, ins: Operands, scratch: Operands, *, write: bool = True) -> Iterator[tuple]:
        """(w, g, state, t) in the working type, part by part; what is done to w is stored."""
        w, g = _flat(ins[0]), ins[1].reshape(-1)
        state = [_flat(ins[i]) if i < len(ins) and ins[i] is not None else None for i in self.updates[1:]]
        t, *more = scratch
        direct = w.dtype == t.dtype
        unscale = self.unscale(ins)
        there = len(self._states(ins))
        before = [more.pop() for _ in range(there + 1)] if unscale is not None and not self.stores else []
        rooms = [more.pop() for _ in range(there)] if self.stores else []
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
            if unscale is not None:
                np.multiply(gp, unscale.astype(gp.dtype), out=gp)
            if self.coupled:
                np.multiply(wp, wp.dtype.type(self.coupled), out=tp)
                np.add(gp, tp, out=gp)
            if self.stores:
                wide_states = self.load([ins[i] if i < len(ins) else None for i in self.updates[1:]], here, rooms)
                yield wp, gp, wide_states, tp
                arrays = [ins[i] if i < len(ins) else None for i in self.updates]
                self.store(arrays, [None if direct else wp, *wide_states], here, self.counter(ins))
                continue
            states = [None if s is None else s[here] for s in state]
            was = list(zip([wp, *(s for s in states if s is not None)], [s[:n] for s in before], strict=False))
            for now, kept in was:
                kept[...] = now
            yield wp, gp, states, tp
            for now, kept in was:
                np.copyto(now, kept, where=unscale == 0)
            if not direct and write:
                w[here] = wp

    def compute(self, ins, outs, scratch):
        if self.stores and self.unscale(ins) == 0:
            return
        factors = self.numbers(ins)
        for w, g, state, t in self.parts(ins, scratch):
            states = [s for s in state if s is not None]
            steps = _steps(self, tuple(s is not None for s in state), len(factors), dtype_name(w.dtype))
            steps.run([w, *states, g, *factors], w, [*states, t])

    def numbers(self, ins: Operands) -> list[Any]:
        """`factors` as scalars of the working type."""
        work = DTYPES[work_dtype(TensorType.of(ins[0]))]
        step = None if self.step_at is None else ins[self.step_at].astype(np.float64) + 1.0
        factors = self.factors(np, ins[self.rate_at].astype(np.float64), step)
        return [f.astype(work) for f in factors]

    def expand(self, b, *inputs):
        """The update in plain operators, on new values; None if no plain operators store so."""
        if self.stores:
            return None
        w = inputs[0]
        state = [inputs[i] if i < len(inputs) else None for i in self.updates[1:]]
        new, *rest = self.widened(b, inputs, state, self.values(b, inputs, work_dtype(w.type)))
        while rest and rest[-1] is None:
            rest.pop()
        return (new if w.dtype == new.dtype else b.Cast(new, to=w.dtype), *rest)

    def widened(
        self, b: OperatorBuilder, inputs: Sequence[Any], state: Sequence[Any], factors: Sequence[Any]
    ) -> tuple[Any, ...]:
        """(new w, new state ...) in the working type, with operators; `state` is in it."""
        w, g = inputs[0], inputs[1]
        work = work_dtype(w.type)
        wide = w if w.dtype == work else b.Cast(w, to=work)
        g = g if g.dtype == work else b.Cast(g, to=work)
        unscale = self.unscale(inputs)
        if unscale is not None:
            g = b.Mul(g, unscale if work == "f32" else b.Cast(unscale, to=work))
        if self.coupled:
            g = b.Add(g, b.Mul(wide, b.constant(self.coupled, wide)))
        results = self.formula(b, wide, g, state, factors)
        if unscale is None:
            return results
        skip = b.Equal(unscale, b.constant(0.0, unscale))
        return tuple(
            None if v is None else b.Where(skip, old, v) for old, v in zip((wide, *state), results, strict=True)
        )

    def element(self, *inputs):
        """The formulas of its expansion, where scalars are computed in f64, too."""
        return None if self.stores else through_expansion(self, inputs)

    def values(self, b: OperatorBuilder, inputs: Sequence[Any], work: str) -> list[Any]:
        """`factors` as values of the working type."""

        def f64(v: Any) -> Any:
            return v if v.dtype == "f64" else b.Cast(v, to="f64")

        step = None
        if self.step_at is not None:
            step = Number(b, b.Add(f64(inputs[self.step_at]), b.constant(1.0, "f64")))
        factors = self.factors(Formula(b), Number(b, f64(inputs[self.rate_at])), step)
        return [f.value if work == "f64" else b.Cast(f.value, to=work) for f in factors]

    def cost(self, ins, outs):
        """`flops_per_element` for each parameter."""
        return Cost(self.flops_per_element * ins[0].size, super().cost(ins, outs).bytes)


@functools.lru_cache(maxsize=256)
def _steps(op: Update, states: tuple[bool, ...], factors: int, dtype: str) -> ArraySteps:
    """The steps of an update in place, of (w, the states that are there ..., g, factors ...)."""
    numbers = itertools.count()
    w, *state = (argument(next(numbers), dtype) if there else None for there in (True, *states))
    g, *scalars = (argument(next(numbers), dtype) for _ in range(1 + factors))
    results = op.formula(Elements(), w, g, state, scalars)  # type: ignore[arg-type]
    return updating_steps([x for x in results if x is not None], dtype)


class Number:
    """A scalar of a program that takes part in arithmetic with Python's signs: one formula for arrays and programs."""

    def __init__(self, b: OperatorBuilder, value: Any) -> None:
        self.b, self.value = b, value

    def _with(self, name: str, other: Any, *, swap: bool = False) -> Number:
        value = other.value if isinstance(other, Number) else self.b.constant(other, self.value)
        pair = (value, self.value) if swap else (self.value, value)
        return Number(self.b, getattr(self.b, name)(*pair))

    def __mul__(self, other: Any) -> Number:
        return self._with("Mul", other)

    def __truediv__(self, other: Number) -> Number:
        return self._with("Div", other)

    def __rsub__(self, other: float) -> Number:
        return self._with("Sub", other, swap=True)

    def __rpow__(self, other: float) -> Number:
        return self._with("Pow", other, swap=True)


@dataclass(frozen=True)
class Formula:
    """Stands where an array module does, for `Number`."""

    b: Any

    def sqrt(self, x: Number) -> Number:
        """Square root."""
        return Number(self.b, self.b.Sqrt(x.value))


def scaled(b: OperatorBuilder, x: Any, factor: float) -> Any:
    """x times a constant of its element type."""
    return b.Mul(x, b.constant(factor, x))


def mixed(b: OperatorBuilder, old: Any, new: Any, keep: float) -> Any:
    """keep·old + (1 - keep)·new."""
    return b.Add(scaled(b, old, keep), scaled(b, new, 1 - keep))


def mix(old: Array, new: Array, keep: float, t: Array) -> None:
    """old ← keep·old + (1 - keep)·new; `new` may be `t`."""
    number = old.dtype.type
    np.multiply(old, number(keep), out=old)
    np.multiply(new, number(1 - keep), out=t)
    np.add(old, t, out=old)


def update_samples(op: Update, draw: Draw, states: int, *extra: bool) -> Iterator[Any]:
    """A matrix, more than one part of a vector, an empty one, and f32, for (w, g, states..., lr, step?, extra...)."""

    def inputs(text: str) -> list[Any]:
        values: list[Any] = [draw(text), draw(text), *(draw(text, 0.5, 1.0) for _ in range(states))]
        values.append(np.array(0.125, np.float32))
        if op.step_at is not None:
            values.append(np.array(3, np.int64))
        return values + [draw(text, 0.5, 0.6) if e else None for e in extra]

    for text in ("f64[3,4]", "f64[0]", "f64[]", f"f32[{PART + 5}]"):
        yield draw.case(op, *inputs(text))
    for unscale in (0.5, 0.0):
        values = inputs("f32[7]")
        values += [None] * (op.unscale_at - len(values))
        if not unscale:
            values[1][2] = np.inf
        yield draw.case(op, *values, np.array(unscale, np.float32))


def stored_samples(op: Update, draw: Draw, states: int, *extra: bool) -> Iterator[Any]:
    """Samples in bfloat16 with stochastic rounding: more than a part, with a first element, without any."""
    for shape, first, unscale in ((f"[{PART + 5}]", 6, None), ("[3,5]", 0, 0.5), ("[7]", 0, 0.0), ("[0]", 0, None)):
        rule = dataclasses.replace(op, stochastic=True, seed=2**63 + 5, first=first)
        values: list[Any] = [draw(f"bf16{shape}"), draw(f"bf16{shape}")]
        values += [draw(f"bf16{shape}", 0.5, 1.0) for _ in range(states)]
        values.append(np.array(0.125, np.float32))
        values += [None] * (rule.unscale_at - len(values))
        assert rule.counter_at is not None
        values[rule.counter_at] = np.array(3, np.int64)
        for i, wanted in zip(rule.updates[states + 1 :], extra, strict=False):
            values[i] = draw(f"bf16{shape}", 0.5, 0.6) if wanted else None
        more = [] if unscale is None else [np.array(unscale, np.float32)]
        yield draw.case(rule, *values, *more, export=False)
