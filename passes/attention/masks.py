"""What is added to the scores of one attention: a band, and biases that remain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ...language.builder import Builder
from ...language.ir import Operator, Value
from .known import FAR_BELOW, Band, Known
from .levels import Level


@dataclass
class Masks:
    """Biases and masks, as they are found from the softmax upwards; `emit` makes those that are left.

    A known mask that is a band, such as the causal one, becomes a window of the operator, and its values go.  Scores
    that are far below 0 are hidden altogether: a query from which everything is hidden gets 0, and not the mean of all
    values, which softmax makes of scores that are all the least number there is.
    """

    known: Known
    builder: Builder
    producer: Callable[[Value | None], Operator | None]
    queries: int
    keys: int
    first: int | None = None
    last: int | None = None
    #: values to add, their levels and factors
    biases: list[tuple[Value, Level, float]] = field(default_factory=list)
    #: conditions by which scores are hidden: where they are true or false, the number, the level, the element type
    hidden: list[tuple[Value, bool, float, Level, str]] = field(default_factory=list)

    def narrow(self, band: Band) -> None:
        """Queries also see no more than a band."""
        if band.first is not None:
            self.first = band.first if self.first is None else max(self.first, band.first)
        if band.last is not None:
            self.last = band.last if self.last is None else min(self.last, band.last)

    def add(self, v: Value, level: Level, factor: float) -> None:
        """A bias, times a factor: its summands one by one."""
        op = self.producer(v)
        name = "" if op is None else op.op.name
        if factor > 0 and (band := self.known.band(v, True, self.queries, self.keys)) is not None:
            return self.narrow(band)
        if op is None or v in self.known:
            pass
        elif name == "Add":
            for x in op.inputs:
                if x is not None and self.known.number(x) != 0:
                    self.add(x, level, factor)
            return None
        elif name == "Identity" or (name == "Cast" and self.floats(op)) or (name == "Expand" and self.repeats(op, v)):
            assert op.inputs[0] is not None
            return self.add(op.inputs[0], level, factor)
        elif name == "Where" and factor == 1 and self.choice(op, level, v.dtype):
            return None
        self.biases.append((v, level, factor))
        return None

    @staticmethod
    def floats(op: Operator) -> bool:
        """Whether a cast is of floats."""
        return op.inputs[0] is not None and op.inputs[0].type.is_float

    def repeats(self, op: Operator, v: Value) -> bool:
        """Whether an Expand leaves queries and keys as they are, or repeats what is the same for all."""
        source = op.inputs[0]
        return source is not None and source.ndim >= 2 and v.shape[-2:] == (self.queries, self.keys)

    def choice(self, op: Operator, level: Level, dtype: str) -> bool:
        """Where(condition, bias, far below), or the other way round, as a mask and a bias."""
        condition, a, b = op.inputs
        for bias, low, allowed in ((a, b, True), (b, a, False)):
            number = self.known.number(low)
            if condition is not None and bias is not None and number is not None and number <= FAR_BELOW:
                if self.known.number(bias) is None:
                    self.add(bias, level, 1.0)
                elif self.known.number(bias) != 0:
                    return False
                self.hide(condition, allowed, number, level, dtype)
                return True
        return False

    def hide(self, condition: Value, allowed: bool, number: float, level: Level, dtype: str) -> None:
        """Scores are `number` where the condition does not allow them: its parts one by one."""
        band = self.known.band(condition, allowed, self.queries, self.keys) if number <= FAR_BELOW else None
        if band is not None:
            return self.narrow(band)
        op = self.producer(condition)
        name = "" if op is None or condition in self.known else op.op.name
        if op is not None and name == "Not" and op.inputs[0] is not None:
            return self.hide(op.inputs[0], not allowed, number, level, dtype)
        if op is not None and name == ("And" if allowed else "Or"):
            for x in op.inputs:
                if x is not None:
                    self.hide(x, allowed, number, level, dtype)
            return None
        if op is not None and name in ("Identity", "Expand") and op.inputs[0] is not None and op.inputs[0].ndim >= 2:
            return self.hide(op.inputs[0], allowed, number, level, dtype)
        self.hidden.append((condition, allowed, number, level, dtype))
        return None

    def clear(self, condition: Value, inside: bool) -> bool:
        """Whether weights that are set to 0 where a condition is `inside` are those that it hid before.

        They are hidden altogether then, so that a query that sees nothing gets 0.
        """
        parts = Masks(self.known, self.builder, self.producer, self.queries, self.keys)
        parts.hide(condition, not inside, -math.inf, (), "f32")
        band = Band(parts.first, parts.last)
        if (band.first, band.last) != (None, None) and (band.first, band.last) != (self.first, self.last):
            return False
        for x, allowed, *_ in parts.hidden:
            at = next((i for i, h in enumerate(self.hidden) if (h[0].name, h[1]) == (x.name, allowed)), None)
            if at is None:
                return False
            self.hidden[at] = (*self.hidden[at][:2], -math.inf, *self.hidden[at][3:])
        return True

    def emit(self, dtype: str) -> list[tuple[Value, Level]]:
        """All biases that are left, of one element type, with their levels."""
        b = self.builder
        found = []
        for condition, allowed, number, level, kind in self.hidden:
            zero, below = b.constant(0.0, kind), b.constant(-math.inf if number <= FAR_BELOW else number, kind)
            made = b.Where(condition, *((zero, below) if allowed else (below, zero)))
            found.append((made if kind == dtype else b.Cast(made, to=dtype), level))
        for v, level, factor in self.biases:
            x = v if v.dtype == dtype else b.Cast(v, to=dtype)
            found.append((x if factor == 1 else b.Mul(x, b.constant(factor, x)), level))
        return found
