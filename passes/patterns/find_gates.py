"""Swish and Gelu as one operator: found where x is multiplied by a sigmoid, tanh or error function of itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...language.op import Op
from ...ops.elementwise.gated import Gelu, Swish
from ..attention.known import Known
from ..base import ForwardPass
from ..cleanup.dead_code import prune

#: coefficients of powers of x and of the gate, by their exponents
Polynomial = Mapping[tuple[int, int], float]
#: how exactly the coefficients have to be the formula's: they are rounded to float32, and written with 8 digits
_CLOSE = 1e-6
#: how far x may be above its gate, and the result below
_STEPS = 8
_GATES = ("Sigmoid", "Tanh", "Erf")
_TANH = math.sqrt(2 / math.pi)
_HALVES = {(1, 0): 0.5, (1, 1): 0.5}


@dataclass(frozen=True)
class FindGates(ForwardPass):
    """Replace x · sigmoid(αx) by Swish, and x/2 · (1 + erf(x/√2)), or the formula with tanh, by Gelu.

    For the forward pass, before differentiation.  Products and sums are compared as polynomials in x and the gate, so
    that it does not matter how a formula is written.  The gradient keeps x only, where that of the composition keeps up
    to seven values of its size.  Results agree to rounding.
    """

    def run(self, block: Block) -> Block:
        """The block itself if there is none."""
        return find_gates(block)


def find_gates(block: Block) -> Block:
    """The block with gated activations as operators; values on the way that are read elsewhere, or outputs, stay."""
    gates = [op for op in block.operators if op.op.name in _GATES and op.role is Role.FORWARD]
    if not gates:
        return block
    search = _Search(block)
    made = {at: new for gate in gates for at, new in [search.activation(gate) or (-1, gate)] if at >= 0}
    if not made:
        return block
    operators = [made.get(i, op) for i, op in enumerate(block.operators)]
    return block.with_operators(prune(operators, block.outputs, (Role.FORWARD,)))


def _like(found: Polynomial | None, wanted: Polynomial) -> bool:
    if found is None or found.keys() != wanted.keys():
        return False
    return all(math.isclose(found[k], wanted[k], rel_tol=_CLOSE) for k in wanted)


class _Search:
    """Reads polynomials off a block."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.known = Known(block, {})
        self.producers, self.readers = block.producers(), block.consumers()
        self.builder = Builder.on(block)

    def activation(self, gate: Operator) -> tuple[int, Operator] | None:
        """The index of the last operator of an activation with this gate, and what takes its place."""
        z, g = gate.inputs[0], next(gate.writes())
        if z is None or g.name in self.block.outputs:
            return None
        for x in self.sources(z):
            op, wanted = self.formula(gate.op.name, self.polynomial(z, x, None))
            at = None if op is None else self.result(g, x, wanted)
            if at is not None and op is not None:
                last = self.block.operators[at]
                return at, replace(last, op=op, inputs=(x,))
        return None

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
        found = {z.name: z}
        front = [z]
        for _ in range(_STEPS):
            above = [v for f in front for v in self.operands(f) if v.type == z.type]
            front = [v for v in dict.fromkeys(above) if v.name not in found and v not in self.known]
            found.update((v.name, v) for v in front)
        return list(found.values())

    def operands(self, v: Value) -> list[Value]:
        op = self.producer(v)
        return [] if op is None else [r for r in op.inputs if r is not None]

    def producer(self, v: Value) -> Operator | None:
        """The product, quotient, sum or difference that makes a value."""
        at = self.producers.get(v.name)
        op = None if at is None else self.block.operators[at]
        return op if op is not None and op.op.name in ("Mul", "Div", "Add", "Sub") else None

    def polynomial(self, v: Value, x: Value, gate: Value | None, depth: int = 0) -> Polynomial | None:
        """A value as a polynomial in x and a gate; None where it is none, or none of a low degree."""
        if v == x:
            return {(1, 0): 1.0}
        if v == gate:
            return {(0, 1): 1.0}
        number = self.known.number(v)
        if number is not None:
            return {(0, 0): number}
        op = self.producer(v)
        if op is None or depth > _STEPS:
            return None
        a, b = (None if r is None else self.polynomial(r, x, gate, depth + 1) for r in op.inputs)
        return None if a is None or b is None else _combined(op.op.name, a, b)

    def result(self, gate: Value, x: Value, wanted: Polynomial) -> int | None:
        """The index of the operator that makes what is wanted, with all that the gate is for on the way to it."""
        v = gate
        for _ in range(_STEPS):
            readers = self.readers.get(v.name, [])
            if len(readers) != 1 or v.name in self.block.outputs:
                return None
            op = self.block.operators[readers[0]]
            if op.role is not Role.FORWARD or op.op.name not in ("Mul", "Div", "Add", "Sub"):
                return None
            v = next(op.writes())
            if v.type != x.type:
                return None
            if _like(self.polynomial(v, x, gate), wanted):
                return readers[0]
        return None


def _plain(alpha: float) -> float:
    """A factor without the digits that rounding to float32 appended."""
    return float(f"{alpha:.7g}")


def _combined(name: str, a: Polynomial, b: Polynomial) -> Polynomial | None:
    found: dict[tuple[int, int], float] = {}
    if name in ("Add", "Sub"):
        found.update(a)
        for k, c in b.items():
            found[k] = found.get(k, 0.0) + (c if name == "Add" else -c)
    elif name == "Mul":
        for (i, j), c in a.items():
            for (p, q), d in b.items():
                found[i + p, j + q] = found.get((i + p, j + q), 0.0) + c * d
    elif b.keys() == {(0, 0)} and b[0, 0]:
        found.update((k, c / b[0, 0]) for k, c in a.items())
    else:
        return None
    found = {k: c for k, c in found.items() if c}
    return found if found and max(i + j for i, j in found) <= 4 else None
