"""From a softmax upwards to the product of queries and keys, and downwards to that with the values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...language.ir import Operator, Value
from ..matching.graph import NoMatchError, operands, result
from ..matching.pattern import match, op
from ..matching.rewrite import Search
from .levels import Level
from .masks import Masks

#: numbers at or below which a mask or a lower limit hides scores
_HIDES, _LIMIT = -1e4, -1e30
#: operators between a product and its softmax
_BETWEEN = ("Cast", "Identity", "Mul", "Div", "Add", "Sub", "Where", "Reshape", "Max", "Clip", "Tanh")
#: 0 for weights that are NaN, of queries that see nothing
_AFTER_NAN = op.Where(op.IsNaN("weights").named("bad"), 0.0, "weights")


@dataclass
class Weights:
    """The steps between a softmax and the product with the values."""

    product: Operator
    dropout: Operator | None = None
    levels: list[Level] = field(default_factory=list)
    #: conditions by which weights are set to 0
    cleared: list[tuple[Value, bool]] = field(default_factory=list)


@dataclass
class Scores:
    """The steps between the product of queries and keys and the softmax; `masks` collects the terms added."""

    masks: Masks
    scale: float = 1.0
    cap: float = 0.0
    #: factors that are the same for all keys of a query, with their levels
    factors: list[tuple[Value, Level]] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)


class Walk(Search):
    """Follows operators of a block."""

    # -- weights ------------------------------------------------------------------------------------------------

    def weights(self, softmax: Operator) -> Weights:
        """Down to the product with the values."""
        found = Weights(softmax)
        w = result(softmax)
        while True:
            found.levels.append(w.shape[:-2])
            reader = self.after_nan(w)
            if reader is None:
                reader = self.graph.only_reader(w)
                if reader.op.name == "MatMul":
                    break
                if not self.passes(reader, w, found):
                    raise NoMatchError(f"a {reader.op.name} reads its weights")
            w = result(reader)
        if reader.inputs[0] != w:
            raise NoMatchError("its weights are the right factor of the product")
        if reader.op.transA:  # type: ignore[attr-defined]
            raise NoMatchError("its weights are transposed")
        found.product = reader
        return found

    def after_nan(self, w: Value) -> Operator | None:
        """The Where that puts 0 for weights that are NaN."""
        readers = self.graph.readers(w)
        if len(readers) != 2 or w.name in self.block.outputs:
            return None
        for reader in readers:
            names = match(_AFTER_NAN, self.graph, result(reader))
            if names is not None and names["weights"] == w and self.graph.only_reader(names["bad"]) is reader:
                return reader
        return None

    def passes(self, op: Operator, w: Value, found: Weights) -> bool:
        """Whether an operator leaves the weights what they are, up to dropout and zeros."""
        name, output = op.op.name, result(op)
        if name == "Reshape":
            return output.shape[-2:] == w.shape[-2:]
        if name == "Dropout" and found.dropout is None:
            found.dropout = op
            mask = op.outputs[1] if len(op.outputs) > 1 else None
            if mask is not None and (self.graph.readers(mask) or mask.name in self.block.outputs):
                raise NoMatchError("dropout's mask has readers")
            if op.op.first:  # type: ignore[attr-defined]
                raise NoMatchError("its dropout is a slice of a larger one")
            return True
        if name == "Where":
            condition, a, b = op.inputs
            inside = b == w
            if condition is None or self.graph.number(a if inside else b) != 0 or output.shape != w.shape:
                return False
            found.cleared.append((condition, inside))
            return True
        return name in ("Cast", "Identity")

    # -- scores -------------------------------------------------------------------------------------------------

    def scores(self, softmax: Operator) -> tuple[Operator, Scores]:
        """Up to the product of queries and keys."""
        v = softmax.inputs[0]
        assert v is not None
        found = Scores(Masks(self.graph, self.b, v.shape[-2], v.shape[-1]))
        while True:
            op = self.graph.producer(v)
            if op is None or v is None:
                raise NoMatchError("its scores are no product")
            self.graph.only_reader(v)
            found.levels.append(v.shape[:-2])
            if op.op.name == "MatMul":
                found.scale *= found.cap or 1.0
                return op, found
            v = self.above(op, v, found)

    def above(self, op: Operator, v: Value, found: Scores) -> Value | None:
        """The value from which the product is reached through an operator."""
        name, source = op.op.name, op.inputs[0] if op.inputs else None
        if name in ("Cast", "Identity"):
            return source
        if name == "Reshape":
            if source is None or source.shape[-2:] != v.shape[-2:]:
                raise NoMatchError("a Reshape of more than leading axes makes its scores")
            return source
        if name in ("Mul", "Div"):
            return self.scaled(op, v, found)
        if name in ("Add", "Sub"):
            return self.biased(op, v, found)
        if name == "Where":
            return self.masked(op, v, found)
        if name in ("Max", "Clip"):
            return self.limited(op)
        if name == "Tanh":  # a soft cap c · tanh(score / c)
            if found.cap or found.factors or found.scale <= 0:
                raise NoMatchError("a Tanh that is no soft cap makes its scores")
            found.cap, found.scale = found.scale, 1.0
            return source
        raise NoMatchError(f"a {name} makes its scores")

    def limited(self, op: Operator) -> Value:
        """The operand that a Clip or Max bounds from below by a number that only keeps -inf away."""
        if len(op.inputs) > 2 and op.inputs[2] is not None:
            raise NoMatchError("its scores are limited from above")
        for rest, low in operands(op):
            number = self.graph.number(low)
            if number is not None and number <= _LIMIT:
                return rest
        raise NoMatchError(f"a {op.op.name} limits its scores")

    def scaled(self, op: Operator, v: Value, found: Scores) -> Value:
        """The other factor of a product with a number, or with one number for each query."""
        scaled = self.graph.scaled(op)
        if scaled is not None:
            if not scaled[1] or not math.isfinite(scaled[1]):
                raise NoMatchError(f"its scores are scaled by {scaled[1]}")
            found.scale *= scaled[1]
            return scaled[0]
        for rest, by in operands(op) if op.op.name == "Mul" and not found.cap else ():
            if rest.shape == v.shape and by.shape[-1:] in ((), (1,)) and self.leads(rest):
                found.factors.append((by, v.shape[:-2]))
                return rest
        raise NoMatchError("its scores are scaled by a value that is not constant")

    def biased(self, op: Operator, v: Value, found: Scores) -> Value:
        """The summand that leads to the product; the other is a bias."""
        for rest, bias in operands(op):
            if rest.shape != v.shape or not self.leads(rest):
                continue
            self.add_inside(found)
            number = self.graph.known.number(bias)
            if number is None:
                found.masks.add(bias, v.shape[:-2], found.scale if op.op.name == "Add" else -found.scale)
            elif not math.isfinite(number):
                raise NoMatchError(f"{number} is added to its scores")
            return rest
        raise NoMatchError("no summand of its scores is a product")

    @staticmethod
    def add_inside(found: Scores) -> None:
        """NoMatchError where what is added would be capped, or multiplied by anything but a number."""
        if found.cap:
            raise NoMatchError("a bias or a mask is added before the soft cap")
        if found.factors:
            raise NoMatchError("a bias or a mask is scaled by a value that is not constant")

    def masked(self, op: Operator, v: Value, found: Scores) -> Value | None:
        """The branch of a Where that leads to the product; the other is a number far below 0."""
        condition, a, b = op.inputs
        for rest, low, allowed in ((a, b, True), (b, a, False)):
            number = self.graph.known.number(low)
            if rest is None or low is None or number is None or rest.shape != v.shape or not self.leads(rest):
                continue
            number *= found.scale
            if number > _HIDES:
                raise NoMatchError(f"a Where puts {number:g} for scores, which is not far below 0")
            self.add_inside(found)
            assert condition is not None
            found.masks.hide(condition, allowed, number, v.shape[:-2], v.dtype)
            return rest
        raise NoMatchError("a Where of its scores has no branch far below 0")

    def leads(self, v: Value) -> bool:
        """Whether a product of matrices is above, through the operators that are followed."""
        stack = [v]
        for _ in range(24):
            if not stack:
                return False
            op = self.graph.producer(stack.pop(), "MatMul", *_BETWEEN)
            if op is not None and op.op.name == "MatMul":
                return True
            above = () if op is None else op.reads()
            stack += [x for x in above if x.type.is_float and x.shape[-2:] == v.shape[-2:]]
        return False
