"""From a softmax upwards to the product of queries and keys, and downwards to that with the values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...language.builder import Builder
from ...language.ir import Block, Operator, Value
from ..matching.known import Known
from .levels import Level
from .masks import Masks

#: numbers at or below which a mask or a lower limit hides scores
_HIDES, _LIMIT = -1e4, -1e30
#: operators between a product and its softmax
_BETWEEN = ("Cast", "Identity", "Mul", "Div", "Add", "Sub", "Where", "Reshape", "Max", "Clip", "Tanh")


class NotAttentionError(Exception):
    """Why a softmax is not attention."""


@dataclass
class Weights:
    """What happens between a softmax and the product with the values."""

    product: int = -1
    dropout: Operator | None = None
    levels: list[Level] = field(default_factory=list)
    #: conditions by which weights are set to 0
    cleared: list[tuple[Value, bool]] = field(default_factory=list)


@dataclass
class Scores:
    """What happens between the product of queries and keys and the softmax; `masks` collects what is added."""

    masks: Masks
    scale: float = 1.0
    cap: float = 0.0
    #: factors that are the same for all keys of a query, with their levels
    factors: list[tuple[Value, Level]] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)


class Walk:
    """Follows operators of a block."""

    def __init__(self, block: Block, known: Known, builder: Builder) -> None:
        self.block, self.known, self.builder = block, known, builder
        self.producers = block.producers()
        self.consumers = block.consumers()

    def producer(self, v: Value | None) -> Operator | None:
        """The operator that makes a value."""
        at = None if v is None else self.producers.get(v.name)
        return None if at is None else self.block.operators[at]

    def readers(self, v: Value) -> list[int]:
        """The operators that read a value; NotAttentionError where it is a result of the program."""
        if v.name in self.block.outputs:
            raise NotAttentionError(f"'{v.name}' is an output")
        return list(dict.fromkeys(self.consumers.get(v.name, [])))

    def only_reader(self, v: Value) -> int:
        """The only operator that reads a value."""
        found = self.readers(v)
        if len(found) != 1:
            raise NotAttentionError(f"'{v.name}' has {len(found)} readers")
        return found[0]

    # -- weights ------------------------------------------------------------------------------------------------

    def weights(self, softmax: Operator) -> Weights:
        """Down to the product with the values."""
        found = Weights()
        w = next(softmax.writes())
        while True:
            found.levels.append(w.shape[:-2])
            at = self.after_nan(w)
            if at is not None:
                w = next(self.block.operators[at].writes())
                continue
            at = self.only_reader(w)
            op = self.block.operators[at]
            made = next(op.writes())
            if op.op.name == "MatMul":
                if op.inputs[0] is None or op.inputs[0].name != w.name:
                    raise NotAttentionError("its weights are the right factor of the product")
                if op.op.transA:  # type: ignore[attr-defined]
                    raise NotAttentionError("its weights are transposed")
                found.product = at
                return found
            if not self.passes(op, w, found):
                raise NotAttentionError(f"a {op.op.name} reads its weights")
            w = made

    def after_nan(self, w: Value) -> int | None:
        """The Where that puts 0 for weights that are NaN, of queries that see nothing."""
        readers = self.readers(w)
        if len(readers) != 2:
            return None
        ops = sorted((self.block.operators[i] for i in readers), key=lambda o: o.op.name)
        if [o.op.name for o in ops] != ["IsNaN", "Where"]:
            return None
        bad = next(ops[0].writes())
        condition, zero, kept = ops[1].inputs
        fits = condition is not None and condition.name == bad.name and kept is not None and kept.name == w.name
        if not fits or self.known.number(zero) != 0 or len(self.readers(bad)) != 1:
            return None
        return next(i for i in readers if self.block.operators[i] is ops[1])

    def passes(self, op: Operator, w: Value, found: Weights) -> bool:
        """Whether an operator leaves the weights what they are, up to dropout and zeros."""
        made = next(op.writes())
        name = op.op.name
        if name in ("Cast", "Identity"):
            return True
        if name == "Reshape":
            return made.shape[-2:] == w.shape[-2:]
        if name == "Dropout" and found.dropout is None:
            found.dropout = op
            if len(op.outputs) > 1 and op.outputs[1] is not None and self.readers(op.outputs[1]):
                raise NotAttentionError("dropout's mask has readers")
            if op.op.first:  # type: ignore[attr-defined]
                raise NotAttentionError("its dropout is a slice of a larger one")
            return True
        if name == "Where":
            condition, a, b = op.inputs
            inside = condition is not None and b is not None and b.name == w.name
            if condition is None or self.known.number(a if inside else b) != 0 or made.shape != w.shape:
                return False
            found.cleared.append((condition, inside))
            return True
        return False

    # -- scores -------------------------------------------------------------------------------------------------

    def scores(self, softmax: Operator) -> tuple[Operator, Scores]:
        """Up to the product of queries and keys."""
        v = softmax.inputs[0]
        assert v is not None
        found = Scores(Masks(self.known, self.builder, self.producer, v.shape[-2], v.shape[-1]))
        while True:
            op = self.producer(v)
            if op is None or v is None:
                raise NotAttentionError("its scores are no product")
            self.only_reader(v)
            found.levels.append(v.shape[:-2])
            if op.op.name == "MatMul":
                if found.cap:
                    found.scale *= found.cap
                return op, found
            v = self.above(op, v, found)

    def above(self, op: Operator, v: Value, found: Scores) -> Value | None:
        """The value from which the product is reached through an operator."""
        name = op.op.name
        if name in ("Cast", "Identity"):
            return op.inputs[0]
        if name == "Reshape":
            source = op.inputs[0]
            if source is None or source.shape[-2:] != v.shape[-2:]:
                raise NotAttentionError("a Reshape of more than leading axes makes its scores")
            return source
        if name in ("Mul", "Div"):
            return self.scaled(op, v, found)
        if name in ("Add", "Sub"):
            return self.biased(op, v, found)
        if name == "Where":
            return self.masked(op, v, found)
        if name in ("Max", "Clip"):
            return self.limited(op)
        if name == "Tanh":
            return self.capped(op, found)
        raise NotAttentionError(f"a {name} makes its scores")

    def limited(self, op: Operator) -> Value | None:
        """What is limited from below by a number that only keeps -inf away."""
        a, b = (*op.inputs, None)[:2]
        if len(op.inputs) > 2 and op.inputs[2] is not None:
            raise NotAttentionError("its scores are limited from above")
        for rest, low in ((a, b), (b, a)):
            number = self.known.number(low)
            if number is not None and number <= _LIMIT:
                return rest
        raise NotAttentionError(f"a {op.op.name} limits its scores")

    def capped(self, op: Operator, found: Scores) -> Value | None:
        """The scores before a soft cap c · tanh(score / c)."""
        if found.cap or found.factors or found.scale <= 0:
            raise NotAttentionError("a Tanh that is no soft cap makes its scores")
        found.cap, found.scale = found.scale, 1.0
        return op.inputs[0]

    def scaled(self, op: Operator, v: Value, found: Scores) -> Value | None:
        """The other factor of a product with a number, or with one number for each query."""
        a, b = op.inputs
        for rest, by in ((a, b), (b, a)) if op.op.name == "Mul" else ((a, b),):
            factor = self.known.number(by)
            if rest is None or by is None or rest.shape != v.shape:
                continue
            if factor is not None:
                if not factor or not math.isfinite(factor):
                    raise NotAttentionError(f"its scores are scaled by {factor}")
                found.scale *= factor if op.op.name == "Mul" else 1 / factor
                return rest
            if op.op.name == "Mul" and by.shape[-1:] in ((), (1,)) and self.leads(rest) and not found.cap:
                found.factors.append((by, v.shape[:-2]))
                return rest
        raise NotAttentionError("its scores are scaled by what is no constant")

    def biased(self, op: Operator, v: Value, found: Scores) -> Value | None:
        """The summand that leads to the product; the other is a bias."""
        a, b = op.inputs
        for rest, bias in ((a, b), (b, a)) if op.op.name == "Add" else ((a, b),):
            if rest is None or bias is None or rest.shape != v.shape or not self.leads(rest):
                continue
            self.add_inside(found)
            number = self.known.number(bias)
            if number is None:
                found.masks.add(bias, v.shape[:-2], found.scale if op.op.name == "Add" else -found.scale)
            elif not math.isfinite(number):
                raise NotAttentionError(f"{number} is added to its scores")
            return rest
        raise NotAttentionError("no summand of its scores is a product")

    @staticmethod
    def add_inside(found: Scores) -> None:
        """NotAttentionError where what is added would be capped or multiplied by what is no number."""
        if found.cap:
            raise NotAttentionError("a bias or a mask is added before the soft cap")
        if found.factors:
            raise NotAttentionError("a bias or a mask is scaled by what is no constant")

    def masked(self, op: Operator, v: Value, found: Scores) -> Value | None:
        """The branch of a Where that leads to the product; the other is a number far below 0."""
        condition, a, b = op.inputs
        for rest, low, allowed in ((a, b, True), (b, a, False)):
            number = self.known.number(low)
            if rest is None or low is None or number is None or rest.shape != v.shape or not self.leads(rest):
                continue
            number *= found.scale
            if number > _HIDES:
                raise NotAttentionError(f"a Where puts {number:g} for scores, which is not far below 0")
            self.add_inside(found)
            assert condition is not None
            found.masks.hide(condition, allowed, number, v.shape[:-2], v.dtype)
            return rest
        raise NotAttentionError("a Where of its scores has no branch far below 0")

    def leads(self, v: Value) -> bool:
        """Whether a product of matrices is above, through the operators that are followed."""
        stack = [v]
        for _ in range(24):
            op = self.producer(stack.pop()) if stack else None
            if op is None:
                if not stack:
                    return False
            elif op.op.name == "MatMul":
                return True
            elif op.op.name in _BETWEEN:
                stack += [x for x in op.inputs if x is not None and x.type.is_float and x.shape[-2:] == v.shape[-2:]]
        return False
