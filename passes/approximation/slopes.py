"""Gradients of activations from a few bits an element in place of their inputs or outputs (arXiv 2202.00441)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError, nearest
from ...language.builder import Names
from ...language.ir import Block, Operator, Role, Value
from ...ops.approximation.levels import PIECEWISE, SMOOTH, Steps, gradient_template, slope_of
from ...ops.approximation.slopes import SlopeCodes, SlopeGrad

#: roles of the operators that run before the backward pass
_FORWARD = (Role.FORWARD, Role.LOSS)


@dataclass(frozen=True)
class Activation:
    """A forward activation and its gradient in a training step.

    `at`: the activation's position; `gradient`: the positions of the gradient's operators, that of dx last; `dy`: what
    flows in; `reads`: the names of the forward values that they read (the activation's input, its output).
    """

    at: int
    gradient: tuple[int, ...]
    dy: Value
    reads: tuple[str, ...]
    steps: Steps


def find_activation(block: Block, value_name: str, bits: int) -> Activation | None:
    """The activation that makes a value, with the step function for its slope.

    None: no known activation makes the value, or its gradient is none or not as its rule emits it.  UsageError if there
    is no such value, or for bits other than 1 to 4.
    """
    values = block.values()
    if value_name not in values:
        raise UsageError(f"there is no value '{value_name}' to keep in few bits{nearest(value_name, values)}")
    at = next((i for i, o in enumerate(block.operators) if any(v.name == value_name for v in o.writes())), None)
    if at is None or block.operators[at].role not in _FORWARD:
        return None
    o = block.operators[at]
    known = {c.value.name: c.numpy() for c in block.constants}
    if o.op.name not in (*SMOOTH, *PIECEWISE) or any(v is not None and v.name not in known for v in o.inputs[1:]):
        return None
    x = o.inputs[0]
    assert x is not None
    steps = slope_of(o.op, bits, x.dtype, [None if v is None else known[v.name] for v in o.inputs[1:]])
    found = None if steps is None else _gradient_in(block, o)
    if steps is None or found is None:
        return None
    positions, dy = found
    read = {v.name for i in positions for v in block.operators[i].reads()}
    return Activation(at, positions, dy, tuple(n for n in (x.name, value_name) if n in read), steps)


def _gradient_in(block: Block, o: Operator) -> tuple[tuple[int, ...], Value] | None:
    """Positions of the operators of an activation's gradient, and the gradient that flows in."""
    template = gradient_template(o.op, [None if v is None else v.type for v in o.inputs])
    if template is None:
        return None
    names: dict[str, Any] = {f"in{i}": v for i, v in enumerate(o.inputs)} | {"x": o.inputs[0], "y": o.outputs[0]}
    for c in template.constants:
        names[c.value.name] = next((d.value for d in block.constants if _same(c, d)), None)
    positions: list[int] = []
    for wanted in template.operators:
        for i, there in enumerate(block.operators):
            if i not in positions and there.role == Role.BACKWARD and _bind(wanted, there, names):
                positions.append(i)
                break
        else:
            return None
    return tuple(positions), names["dy"]


def _same(a: Any, b: Any) -> bool:
    return a.value.type == b.value.type and repr(a.data) == repr(b.data)


def _bind(wanted: Operator, there: Operator, names: dict[str, Any]) -> bool:
    """Whether an operator is that of a template; if so, values of the template that have no counterpart yet get one."""
    if there.op != wanted.op or len(there.inputs) != len(wanted.inputs):
        return False
    new = dict(names)
    for mine, other in zip(wanted.inputs, there.inputs, strict=True):
        if mine is None or other is None:
            if mine is not other:
                return False
        elif new.setdefault(mine.name, other) != other:
            return False
    names.update(new)
    names[next(wanted.writes()).name] = next(there.writes())
    return True


def replace_slopes(block: Block, value_name: str, bits: int) -> Block | None:
    """The training step in which the gradient of the activation that makes a value reads codes of 1 to 4 bits.

    The codes of its input x are made right before the last forward operator that reads x, which may then be written
    over x; the gradient is dy · level.  Activations whose slopes are steps (Relu, Clip, ...) keep exact gradients, with
    the bits that these need.  None where `find_activation` finds none.
    """
    found = find_activation(block, value_name, bits)
    if found is None:
        return None
    steps, operators = found.steps, list(block.operators)
    x = operators[found.at].inputs[0]
    assert x is not None
    op = SlopeCodes(bounds=steps.bounds, even=int(steps.even))
    codes = Value(Names(block.values()).take(f"{value_name}.codes"), op.infer(x.type)[0])
    last = found.gradient[-1]
    dx = operators[last].outputs
    operators[last] = Operator(SlopeGrad(levels=steps.levels), (found.dy, codes), dx, operators[last].role)
    readers = [i for i, o in enumerate(operators) if o.role in _FORWARD and x in o.inputs]
    before = Operator(op, (x,), (codes,), operators[readers[-1]].role)
    unread = _unread(operators, found.gradient[:-1], block.outputs)
    pairs = [([before] if i == readers[-1] else []) + [o] for i, o in enumerate(operators) if i not in unread]
    kept = [o for pair in pairs for o in pair]
    return block.with_operators(kept, constants=_read_constants(block, kept))


def _unread(operators: Sequence[Operator], candidates: Sequence[int], outputs: Sequence[str]) -> set[int]:
    """Those of the candidates whose results nothing else reads; later ones first."""
    gone: set[int] = set()
    for i in sorted(candidates, reverse=True):
        made = {v.name for v in operators[i].writes()}
        read = {v.name for j, o in enumerate(operators) if j not in gone for v in o.reads()}
        if not made & (read | set(outputs)):
            gone.add(i)
    return gone


def _read_constants(block: Block, operators: Sequence[Operator]) -> tuple:
    """The constants that are still read, and those that nothing read before."""
    before = {v.name for o in block.operators for v in o.reads()}
    after = {v.name for o in operators for v in o.reads()}
    return tuple(c for c in block.constants if c.value.name in after or c.value.name not in before)


def slope_values(block: Block, bits: int) -> dict[str, Activation]:
    """The values of a training step that `replace_slopes` can treat, with what is known of each."""
    names = [v.name for o in block.operators if o.role in _FORWARD and o.op.name in (*SMOOTH, *PIECEWISE)
             for v in o.writes()]  # fmt: skip
    found = {name: find_activation(block, name, bits) for name in names}
    return {name: a for name, a in found.items() if a is not None}
