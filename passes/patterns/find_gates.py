"""Swish and Gelu as one operator: found where x is multiplied by a sigmoid, tanh or error function of itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ...language.ir import Block, Operator, Value
from ...language.op import Op
from ...ops.elementwise.gated import Gelu, Swish
from ..base import ForwardPass
from ..matching.graph import Graph, NoMatchError, result
from ..matching.rewrite import Found, Search

#: coefficients of powers of x and of the gate, by their exponents
Polynomial = Mapping[tuple[int, int], float]
#: how exactly the coefficients have to be the formula's: they are rounded to float32, and written with 8 digits
_CLOSE = 1e-6
#: how far x may be above its gate, and the result below
_STEPS = 8
_STEP = ("Mul", "Div", "Add", "Sub")
_TANH = math.sqrt(2 / math.pi)
_HALVES = {(1, 0): 0.5, (1, 1): 0.5}


class FindGates(ForwardPass):
    """Replace x · sigmoid(αx) by Swish, and x/2 · (1 + erf(x/√2)), or the formula with tanh, by Gelu.

    For the forward pass, before differentiation.  Products and sums are compared as polynomials in x and the gate, so
    that it does not matter how a formula is written.  The gradient keeps x only, where that of the composition keeps up
    to seven values of its size.  Results agree to rounding.
    """

    def run(self, block: Block) -> Block:
        return find_gates(block)


def find_gates(block: Block) -> Block:
    """The block with gated activations as operators; values on the way that are read elsewhere, or outputs, stay."""
    return _Search(Graph(block)).rewritten()


def _like(polynomial: Polynomial | None, wanted: Polynomial) -> bool:
    if polynomial is None or polynomial.keys() != wanted.keys():
        return False
    return all(math.isclose(polynomial[k], wanted[k], rel_tol=_CLOSE) for k in wanted)


class _Search(Search):
    """Reads polynomials off a block."""

    kinds = ("Sigmoid", "Tanh", "Erf")

    def at(self, gate: Operator) -> Found:
        """The last operator of an activation with this gate, and what takes its place."""
        z = gate.inputs[0]
        for x in [] if z is None else self.sources(z):
            op, wanted = self.formula(gate.op.name, self.polynomial(z, x, None))
            if op is None:
                continue
            for last in self.graph.below(gate, _STEPS):
                y = result(last)
                if last is not gate and (last.op.name not in _STEP or y.type != x.type):
                    break
                if _like(self.polynomial(y, x, result(gate)), wanted):
                    return Found(last, (replace(last, op=op, inputs=(x,)),))
        raise NoMatchError

    def formula(self, name: str, inside: Polynomial | None) -> tuple[Op | None, Polynomial]:
        """The activation whose gate has this argument, and what its result has to be."""
        if name == "Sigmoid" and inside is not None and inside.keys() == {(1, 0)} and inside[1, 0]:
            return Swish(alpha=_plain(inside[1, 0])), {(1, 1): 1.0}
        if name == "Erf" and _like(inside, {(1, 0): math.sqrt(0.5)}):
            return Gelu(), _HALVES
        if name == "Tanh" and _like(inside, {(1, 0): _TANH, (3, 0): _TANH * 0.044715}):
            return Gelu(approximate="tanh"), _HALVES
        return None, {}

    def sources(self, z: Value) -> list[Value]:
        """Values of z's type from which products and sums lead to z, nearest first."""
        values = {z.name: z}
        front = [z]
        for _ in range(_STEPS):
            makers = [self.graph.producer(v, *_STEP) for v in front]
            above = [v for op in makers if op is not None for v in op.reads() if v.type == z.type]
            front = [v for v in dict.fromkeys(above) if v.name not in values and v not in self.graph.known]
            values.update((v.name, v) for v in front)
        return list(values.values())

    def polynomial(self, v: Value | None, x: Value, gate: Value | None, depth: int = 0) -> Polynomial | None:
        """A value as a polynomial in x and a gate; None where it is none, or none of a low degree."""
        if v == x:
            return {(1, 0): 1.0}
        if v == gate:
            return {(0, 1): 1.0}
        number = self.graph.number(v)
        if number is not None:
            return {(0, 0): number}
        op = self.graph.producer(v, *_STEP)
        if op is None or depth > _STEPS:
            return None
        a, b = (self.polynomial(r, x, gate, depth + 1) for r in op.inputs)
        return None if a is None or b is None else _combined(op.op.name, a, b)


def _plain(alpha: float) -> float:
    """A factor without the digits that rounding to float32 appended."""
    return float(f"{alpha:.7g}")


def _combined(name: str, a: Polynomial, b: Polynomial) -> Polynomial | None:
    terms: dict[tuple[int, int], float] = {}
    if name in ("Add", "Sub"):
        terms.update(a)
        for k, c in b.items():
            terms[k] = terms.get(k, 0.0) + (c if name == "Add" else -c)
    elif name == "Mul":
        for (i, j), c in a.items():
            for (p, q), d in b.items():
                terms[i + p, j + q] = terms.get((i + p, j + q), 0.0) + c * d
    elif b.keys() == {(0, 0)} and b[0, 0]:
        terms.update((k, c / b[0, 0]) for k, c in a.items())
    else:
        return None
    terms = {k: c for k, c in terms.items() if c}
    return terms if terms and max(i + j for i, j in terms) <= 4 else None
