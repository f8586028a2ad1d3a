"""Learning-rate schedules, computed inside the program from its step counter.

Names and meanings are Paddle's (where PyTorch has the same schedule, so are the values), counted in steps: the first
step is number 0.  The arithmetic is done in f64, the result is f32[].  A schedule takes the place of a number:
`Adam(LinearWarmup(CosineAnnealingDecay(1e-3, 1000), 100, 0.0, 1e-3))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UsageError
from ..language.builder import Builder
from ..language.ir import Block, Value
from ..language.types import TensorType
from ..ops.shape.reshape import Cast

__all__ = [
    "CosineAnnealingDecay",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LRScheduler",
    "LinearWarmup",
    "MultiStepDecay",
    "NaturalExpDecay",
    "NoamDecay",
    "OneCycleLR",
    "PiecewiseDecay",
    "PolynomialDecay",
    "Scalar",
    "StepDecay",
]


class LRScheduler:
    """Base class: a subclass defines `rate` as a function of the step, a `Scalar`."""

    def rate(self, step: Scalar) -> Scalar:
        """The learning rate at `step`."""
        raise NotImplementedError

    def build(self, b: Builder, step: Value, *, name: str = "learning_rate") -> Value:
        """Emits operators from the step counter (i64[]) to the learning rate (f32[], called `name`)."""
        rate = self.rate(Scalar(b, b.Cast(step, to="f64")))
        return b.emit(Cast("f32"), rate.value, name=name)

    def value(self, step: int) -> float:
        """The learning rate at `step`, from the same operators."""
        from ..runtime.executor import Executor

        counter = Value("step", TensorType("i64", ()))
        program = _program(self, counter)
        return float(Executor().run(program, {"step": np.array(step, np.int64)}, ["learning_rate"])[0])


def _program(schedule: LRScheduler, counter: Value) -> Any:
    from ..language.program import Program

    block = Block("learning_rate", inputs=(counter,))
    b = Builder.on(block)
    schedule.build(b, counter)
    return Program(block.with_operators(b.operators, constants=tuple(b.constants), outputs=("learning_rate",)))


def _binary(op: str) -> tuple[Callable[[Scalar, Any], Scalar], Callable[[Scalar, Any], Scalar]]:
    """The methods of an operator of Python, with the scalar on the left and on the right."""
    return (lambda self, other: self._apply(op, self, other)), (lambda self, other: self._apply(op, other, self))


@dataclass(frozen=True)
class Scalar:
    """An f64 scalar of a program, with Python's arithmetic operators."""

    b: Builder
    value: Value

    def _of(self, other: Any) -> Value:
        return other.value if isinstance(other, Scalar) else self.b.constant(float(other), "f64")

    def _apply(self, op: str, *inputs: Any) -> Scalar:
        return Scalar(self.b, getattr(self.b, op)(*map(self._of, inputs)))

    __add__, __radd__ = _binary("Add")
    __sub__, __rsub__ = _binary("Sub")
    __mul__, __rmul__ = _binary("Mul")
    __truediv__, __rtruediv__ = _binary("Div")
    __pow__, __rpow__ = _binary("Pow")

    def floor(self) -> Scalar:
        """The largest integer that is not greater."""
        return self._apply("Floor", self)

    def ceil(self) -> Scalar:
        """The smallest integer that is not less."""
        return self._apply("Ceil", self)

    def cos(self) -> Scalar:
        """Cosine."""
        return self._apply("Cos", self)

    def exp(self) -> Scalar:
        """The exponential."""
        return self._apply("Exp", self)

    def at_most(self, limit: Any) -> Scalar:
        """The minimum of the two."""
        return self._apply("Min", self, limit)

    def at_least(self, limit: Any) -> Scalar:
        """The maximum of the two."""
        return self._apply("Max", self, limit)

    def below(self, limit: Any, then: Any, otherwise: Any) -> Scalar:
        """`then` if it is below `limit`, else `otherwise`."""
        b = self.b
        return Scalar(b, b.Where(b.Less(self.value, self._of(limit)), self._of(then), self._of(otherwise)))

    def constant(self, value: float) -> Scalar:
        """A number as a Scalar."""
        return Scalar(self.b, self._of(value))


def _need(ok: bool, what: str) -> None:
    if not ok:
        raise UsageError(what)


@dataclass(frozen=True)
class StepDecay(LRScheduler):
    """learning_rate · gamma^⌊step / step_size⌋ (PyTorch: StepLR)."""

    learning_rate: float
    step_size: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _need(self.step_size > 0, f"StepDecay: step_size must be positive, not {self.step_size}")

    def rate(self, step):
        return self.learning_rate * self.gamma ** (step / self.step_size).floor()


@dataclass(frozen=True)
class PiecewiseDecay(LRScheduler):
    """values[i] until step boundaries[i], then the next; the last value from the last boundary on."""

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        ordered = list(self.boundaries) == sorted(set(self.boundaries))
        _need(ordered, f"the boundaries must rise, but they are {list(self.boundaries)}")
        _need(
            len(self.values) == len(self.boundaries) + 1,
            f"{len(self.boundaries)} boundaries need {len(self.boundaries) + 1} values, not {len(self.values)}",
        )

    def rate(self, step):
        """A chain of selections, from the last piece to the first."""
        result = step.constant(self.values[-1])
        for limit, value in zip(reversed(self.boundaries), reversed(self.values[:-1]), strict=True):
            result = step.below(limit, value, result)
        return result


@dataclass(frozen=True)
class MultiStepDecay(LRScheduler):
    """learning_rate · gamma^(number of milestones reached) (PyTorch: MultiStepLR)."""

    learning_rate: float
    milestones: Sequence[int]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        self._pieces()

    def _pieces(self) -> PiecewiseDecay:
        values = [self.learning_rate * self.gamma**i for i in range(len(self.milestones) + 1)]
        return PiecewiseDecay(tuple(self.milestones), values)

    def rate(self, step):
        return self._pieces().rate(step)


@dataclass(frozen=True)
class ExponentialDecay(LRScheduler):
    """learning_rate · gamma^step (PyTorch: ExponentialLR)."""

    learning_rate: float
    gamma: float

    def rate(self, step):
        return self.learning_rate * self.gamma**step


@dataclass(frozen=True)
class NaturalExpDecay(LRScheduler):
    """learning_rate · e^(-gamma·step)."""

    learning_rate: float
    gamma: float

    def rate(self, step):
        return self.learning_rate * (step * -self.gamma).exp()


@dataclass(frozen=True)
class InverseTimeDecay(LRScheduler):
    """learning_rate / (1 + gamma·step)."""

    learning_rate: float
    gamma: float

    def rate(self, step):
        return self.learning_rate / (1 + self.gamma * step)


@dataclass(frozen=True)
class CosineAnnealingDecay(LRScheduler):
    """eta_min + (learning_rate - eta_min)·(1 + cos(π·step / T_max)) / 2 (Loshchilov & Hutter 2017, without restarts).

    PyTorch: CosineAnnealingLR.
    """

    learning_rate: float
    T_max: int
    eta_min: float = 0.0

    def __post_init__(self) -> None:
        _need(self.T_max > 0, f"CosineAnnealingDecay: T_max must be positive, not {self.T_max}")

    def rate(self, step):
        half = (self.learning_rate - self.eta_min) / 2
        return self.eta_min + half * (1 + (step * (math.pi / self.T_max)).cos())


@dataclass(frozen=True)
class PolynomialDecay(LRScheduler):
    """(learning_rate - end_lr)·(1 - s / decay_steps)^power + end_lr, s = min(step, decay_steps).

    With `cycle`, decay_steps is multiplied by the smallest whole number that makes it reach the step.
    PyTorch: PolynomialLR (end_lr = 0).
    """

    learning_rate: float
    decay_steps: int
    end_lr: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def __post_init__(self) -> None:
        _need(self.decay_steps > 0, f"PolynomialDecay: decay_steps must be positive, not {self.decay_steps}")
        _need(self.power > 0, f"PolynomialDecay: power must be positive, not {self.power}")

    def rate(self, step):
        if self.cycle:
            share = step / ((step / self.decay_steps).ceil().at_least(1) * self.decay_steps)
        else:
            share = step.at_most(self.decay_steps) / self.decay_steps
        return (self.learning_rate - self.end_lr) * (1 - share) ** self.power + self.end_lr


@dataclass(frozen=True)
class LinearWarmup(LRScheduler):
    """Linear from start_lr to end_lr over warmup_steps steps, then `learning_rate`.

    `learning_rate`: a number, or a schedule, whose step 0 is the first after the warm-up.
    """

    learning_rate: float | LRScheduler
    warmup_steps: int
    start_lr: float
    end_lr: float

    def __post_init__(self) -> None:
        _need(self.warmup_steps > 0, f"LinearWarmup: warmup_steps must be positive, not {self.warmup_steps}")

    def rate(self, step):
        line = self.start_lr + (self.end_lr - self.start_lr) * (step / self.warmup_steps)
        after: Any = self.learning_rate
        if isinstance(after, LRScheduler):
            after = after.rate((step - self.warmup_steps).at_least(0))
        return step.below(self.warmup_steps, line, after)


@dataclass(frozen=True)
class NoamDecay(LRScheduler):
    """learning_rate · d_model^-0.5 · min(step^-0.5, step·warmup_steps^-1.5)  (Vaswani et al. 2017); 0 at step 0."""

    d_model: int
    warmup_steps: int
    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        _need(self.d_model > 0 and self.warmup_steps > 0, "NoamDecay: d_model and warmup_steps must be positive")

    def rate(self, step):
        """The rate at a step; step^-0.5 is bounded by 1, so that step 0 is no division by zero."""
        falling = step.at_least(1) ** -0.5
        return self.learning_rate * self.d_model**-0.5 * falling.at_most(step * self.warmup_steps**-1.5)


@dataclass(frozen=True)
class OneCycleLR(LRScheduler):
    """From max_learning_rate / divide_factor up to max_learning_rate, then down to end_learning_rate.

    Smith & Topin 2019.  The rise takes `phase_pct` of `total_steps`; with `three_phase` the fall back to the start
    takes as long as the rise, and the rest goes to end_learning_rate.  `anneal_strategy`: "cos" or "linear".
    """

    max_learning_rate: float
    total_steps: int
    divide_factor: float = 25.0
    end_learning_rate: float = 0.0001
    phase_pct: float = 0.3
    anneal_strategy: str = "cos"
    three_phase: bool = False

    def __post_init__(self) -> None:
        _need(self.total_steps > 1, f"OneCycleLR: total_steps must be at least 2, not {self.total_steps}")
        _need(0 <= self.phase_pct <= (0.5 if self.three_phase else 1), "OneCycleLR: phase_pct is out of range")
        _need(
            self.anneal_strategy in ("cos", "linear"),
            f"OneCycleLR: anneal_strategy must be 'cos' or 'linear', not {self.anneal_strategy!r}",
        )

    def rate(self, step):
        """Phase by phase; after total_steps the last value stays."""
        top, start, end = self.max_learning_rate, self.max_learning_rate / self.divide_factor, self.end_learning_rate
        rise, last = self.phase_pct * self.total_steps - 1, self.total_steps - 1
        if self.three_phase:
            phases = [(0, rise, start, top), (rise, 2 * rise, top, start), (2 * rise, last, start, end)]
        else:
            phases = [(0, rise, start, top), (rise, last, top, end)]
        step = step.at_most(last)
        result = None
        for first, until, begin, finish in reversed([p for p in phases if p[1] > p[0]]):
            here = self._anneal((step - first) / (until - first), begin, finish)
            result = here if result is None else step.below(until, here, result)
        return result

    def _anneal(self, share: Scalar, begin: float, finish: float) -> Scalar:
        if self.anneal_strategy == "linear":
            return begin + (finish - begin) * share
        return finish + (begin - finish) / 2 * (1 + (share * math.pi).cos())
