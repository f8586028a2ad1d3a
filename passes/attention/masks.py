"""Masks of one attention's scores: a band, and the biases that remain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...language.builder import Builder
from ...language.ir import Operator, Value
from ..matching.graph import Graph
from ..matching.known import FAR_BELOW, Band
from .levels import Level

#: masks below these lose, in rounding, the scores that they are added to
_LOST = {"f64": -1e17, "f16": -6e4}
#: numbers that a Where puts in place of scores, if nothing else is added; least numbers that hide nothing
_LOWEST, _MILD = -1e30, -1e3


@dataclass(frozen=True)
class Bias:
    """A value that is added to the scores, times a factor; `band`: the one that its contents are."""

    value: Value
    level: Level
    factor: float
    band: Band | None = None


@dataclass(frozen=True)
class Hidden:
    """Scores are `number` where the condition is not `allowed`; `band`: the one that the condition is.

    `group`: not 0 for a condition of numbers that are added: of those of one group each score gets one number.
    """

    value: Value
    level: Level
    allowed: bool
    number: float
    dtype: str
    band: Band | None = None
    group: int = 0


@dataclass
class Masks:
    """Biases and masks, as they are found from the softmax upwards; `emit` makes those that are left.

    A known mask that is a band, such as the causal one, becomes a window of the operator, and its values go; not so a
    band of finite numbers beside masks that the step computes from its inputs: a query from which both together hide
    everything sees all keys alike, and not those of the window.  Where all of them put the same number, it stays a
    window, and such queries (`dead`) get the mean of the values afterwards.
    """

    graph: Graph
    builder: Builder
    queries: int
    keys: int
    first: int | None = None
    last: int | None = None
    #: the last that is applied first
    entries: list[Bias | Hidden] = field(default_factory=list)
    #: conditions that hide everything from some queries together,
    dead: list[Hidden] = field(default_factory=list)

    def settle(self) -> None:
        """Makes windows of bands."""
        fed = any(self.graph.known.fed(e.value) for e in self.entries)
        masks = [e for e in self.entries if e.band is not None or self.may_hide(e)]
        bands = [e for e in masks if e.band is not None]
        alike = len({(e.number, e.group) if isinstance(e, Hidden) else e for e in masks}) == 1
        if fed and bands and alike and isinstance(bands[0], Hidden) and self.finite(bands[0]):
            self.dead = [e for e in masks if isinstance(e, Hidden)]
            self.entries = [replace(e, number=-math.inf) if isinstance(e, Hidden) else e for e in self.entries]
        kept: list[Bias | Hidden] = []
        for e in self.entries:
            if e.band is None or (fed and self.finite(e)):
                kept.append(replace(e, band=None))
                continue
            first, last = e.band.first, e.band.last
            self.first = first if self.first is None else self.first if first is None else max(self.first, first)
            self.last = last if self.last is None else self.last if last is None else min(self.last, last)
        self.entries = kept

    def finite(self, e: Bias | Hidden) -> bool:
        """Whether what a band hides has a finite score."""
        if isinstance(e, Hidden):
            return math.isfinite(e.number)
        return math.isfinite(self.graph.known.least(e.value))

    def add(self, v: Value, level: Level, factor: float) -> None:
        """A bias, times a factor: its summands one by one."""
        op = None if v in self.graph.known else self.graph.producer(v)
        name = "" if op is None else op.op.name
        if factor > 0 and (band := self.graph.known.band(v, True, self.queries, self.keys)) is not None:
            if band != Band():
                self.entries.append(Bias(v, level, factor, band))
        elif op is not None and name == "Add":
            for x in op.reads():
                if self.graph.known.number(x) != 0:
                    self.add(x, level, factor)
        elif op is not None and self.passes(op, v):
            self.add(next(op.reads()), level, factor)
        elif op is None or name != "Where" or factor != 1 or not self.choice(op, level, v.dtype):
            self.entries.append(Bias(v, level, factor))

    def passes(self, op: Operator, v: Value) -> bool:
        """Whether an operator leaves a bias what it is: a cast of floats, an Expand that leaves queries and keys as
        they are, or repeats what is the same for all."""
        name, source = op.op.name, op.inputs[0] if op.inputs else None
        if source is None or name == "Identity":
            return name == "Identity"
        repeats = source.ndim >= 2 and v.shape[-2:] == (self.queries, self.keys)
        return (name == "Cast" and source.type.is_float) or (name == "Expand" and repeats)

    def choice(self, op: Operator, level: Level, dtype: str) -> bool:
        """Where(condition, bias, far below), or the other way round, as a mask and a bias."""
        condition, a, b = op.inputs
        for bias, low, allowed in ((a, b, True), (b, a, False)):
            number = self.graph.known.number(low)
            if condition is not None and bias is not None and number is not None and number <= FAR_BELOW:
                constant = self.graph.known.number(bias)
                if constant is not None and constant != 0:
                    return False
                group = 1 + max((e.group for e in self.entries if isinstance(e, Hidden)), default=0)
                self.hide(condition, allowed, number, level, dtype, 0 if number == -math.inf else group)
                if constant is None:
                    self.add(bias, level, 1.0)
                return True
        return False

    def hide(self, condition: Value, allowed: bool, number: float, level: Level, dtype: str, group: int = 0) -> None:
        """Scores are `number` where the condition does not allow them: its parts one by one."""
        band = self.graph.known.band(condition, allowed, self.queries, self.keys) if number <= FAR_BELOW else None
        if band is not None:
            if band != Band():
                self.entries.append(Hidden(condition, level, allowed, number, dtype, band, group))
            return
        op = None if condition in self.graph.known else self.graph.producer(condition)
        name = "" if op is None else op.op.name
        source = None if op is None or not op.inputs else op.inputs[0]
        if op is not None and name == ("And" if allowed else "Or"):
            for x in op.reads():
                self.hide(x, allowed, number, level, dtype, group)
        elif name == "Not" and source is not None:
            self.hide(source, not allowed, number, level, dtype, group)
        elif name in ("Identity", "Expand") and source is not None and source.ndim >= 2:
            self.hide(source, allowed, number, level, dtype, group)
        else:
            self.entries.append(Hidden(condition, level, allowed, number, dtype, group=group))

    def clear(self, condition: Value, inside: bool) -> bool:
        """Whether weights that are set to 0 where a condition is `inside` are those that it hid before.

        They are hidden altogether then, so that a query that sees nothing gets 0.
        """
        parts = Masks(self.graph, self.builder, self.queries, self.keys)
        parts.hide(condition, not inside, -math.inf, (), "f32")
        for x in parts.entries:
            same = [i for i, e in enumerate(self.entries) if _same(e, x)]
            if not same:
                return False
            for i in same:
                self.entries[i] = replace(x, level=self.entries[i].level)
        return True

    # -- emission -----------------------------------------------------------------------------------------------

    def emit(self, q: Value, regrouped: Callable[[Value, Level], Value]) -> tuple[Value, Value | None]:
        """The queries and the sum of all biases that are left, in the queries' type.

        `regrouped` gives a bias of a level the queries' axes.  Where the masks give every key of a query a number far
        below 0, what is added to it is lost in rounding, and the weights depend on the masks alone: the query becomes 0
        and the greatest number is taken off its masks, so that its gradient has the same weights.
        """
        b = self.builder
        masks = [e for e in self.entries if self.may_hide(e)]
        bias = self.sum([e for e in self.entries if e not in masks], q.dtype, regrouped)
        total = self.sum(masks, q.dtype, regrouped)
        if total is None or not any(self.finite_somewhere(e) for e in masks):
            return q, bias if total is None else total if bias is None else b.Add(bias, total)
        most = b.ReduceMax(total, axes=(-1,))
        low = b.constant(_LOST.get(q.dtype, FAR_BELOW), most)
        dead = b.And(b.LessOrEqual(most, low), b.Greater(most, b.constant(-math.inf, most)))
        total = b.Sub(total, b.Where(dead, most, b.constant(0.0, most)))
        if bias is not None:
            total = b.Add(b.Where(dead, b.constant(0.0, bias), bias), total)
        return b.Where(dead, b.constant(0.0, q), q), total

    def may_hide(self, e: Bias | Hidden) -> bool:
        """Whether an entry is a mask: what is learned, and what is known to be mild, is none."""
        if isinstance(e, Hidden):
            return True
        if e.value in self.graph.known:
            return self.graph.known.least(e.value) <= _MILD
        return self.graph.known.fed(e.value) and not self.graph.known.learned(e.value)

    def finite_somewhere(self, e: Bias | Hidden) -> bool:
        """Whether a mask may hide with a finite number."""
        return math.isfinite(e.number) if isinstance(e, Hidden) else True

    def sum(
        self, entries: Sequence[Bias | Hidden], dtype: str, regrouped: Callable[[Value, Level], Value]
    ) -> Value | None:
        """The sum of the entries, as added to scores of 0; None without entries."""
        b = self.builder
        alone = all(isinstance(e, Hidden) and not e.group for e in self.entries)
        numbers = sorted({e.number for e in entries if isinstance(e, Hidden) and e.number > -math.inf}, reverse=True)
        total: Value | None = None
        before: Value | None = None  # the total that a group is added to
        group = 0
        for e in reversed(entries):
            level = e.group if isinstance(e, Hidden) else 0
            if level != group:
                total = total if before is None else b.Add(before, total)
                before, total, group = (total, None, level) if level else (None, total, level)
            if isinstance(e, Bias):
                x = e.value if e.value.dtype == dtype else b.Cast(e.value, to=dtype)
                x = regrouped(x if e.factor == 1 else b.Mul(x, b.constant(e.factor, x)), e.level)
                total = x if total is None else b.Add(total, x)
                continue
            number = e.number
            if alone and number > -math.inf and dtype != "f16":  # so low that the scores are lost in it
                number = _LOWEST * (1 + numbers.index(number))
            kept = b.constant(0.0, dtype) if total is None else total
            below = b.constant(number, dtype)
            total = b.Where(regrouped(e.value, e.level), *((kept, below) if e.allowed else (below, kept)))
        return total if before is None else b.Add(before, total)

    def revived(self, y: Value, v: Value, regrouped: Callable[[Value, Level], Value]) -> Value:
        """The results, with the mean of the values for queries from which everything is hidden.

        Dropout leaves none of these weights out.
        """
        if not self.dead:
            return y
        b = self.builder
        seen: Value | None = None
        for e in self.dead:
            x = regrouped(e.value if e.allowed else b.Not(e.value), e.level)
            seen = x if seen is None else b.And(seen, x)
        assert seen is not None
        alive = b.ReduceMax(b.Cast(seen, to="f32"), axes=(-1,))
        return b.Where(b.Greater(alive, b.constant(0.0, alive)), y, b.ReduceMean(v, axes=(-2,)))


def _same(e: Bias | Hidden, x: Bias | Hidden) -> bool:
    if e.band is not None or x.band is not None:
        return e.band == x.band
    return isinstance(e, Hidden) and isinstance(x, Hidden) and (e.value, e.allowed) == (x.value, x.allowed)
