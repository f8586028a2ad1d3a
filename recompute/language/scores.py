"""Which scores a model's output is made of: what losses, metrics and new heads look for behind it.

Looks through what only moves or converts numbers, to Softmax, LogSoftmax or Sigmoid, or a softmax that is written out:
exp(z) / Σ exp(z), with or without the largest z subtracted; [1 - sigmoid(z), sigmoid(z)] is the softmax of [0, z].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .ir import Block, Operator
from .program import Program, Variable

#: operators that only move or convert numbers
MOVES = frozenset(["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Cast", "Identity"])


@dataclass(frozen=True)
class Step:
    """How a value is made: the operator's name, the names it reads, and its axis, if it has one."""

    kind: str
    reads: tuple[str, ...]
    axis: int | None = None


@dataclass(frozen=True)
class Scores:
    """The scores behind a value: `kind` is "Softmax", "LogSoftmax", "Sigmoid", or "" where it is none of these.

    `source`: the name of what that operator reads (or of the value itself); `axis`: of its classes, in `source`;
    `moves`: names of the values that are moved copies of its result, in order, the value itself last.  `among`: the
    place of `source` among two classes along `axis`, of which the other one has the score 0; None: it has all scores.
    """

    kind: str
    source: str
    axis: int | None = None
    moves: tuple[str, ...] = ()
    among: int | None = None


def scores_of(name: str, step_of: Callable[[str], Step | None]) -> Scores:
    """The scores behind a value; `step_of` returns the step that computes a value (None: it is declared)."""
    moves, base = before_moves(name, step_of)
    step = step_of(base)
    scores = None if step is None else _activation(step, step_of)
    return Scores("", name) if scores is None else replace(scores, moves=tuple(reversed(moves)))


def before_moves(name: str, made: Callable[[str], Step | None]) -> tuple[list[str], str]:
    """Moved copies from a value back, and what they are copies of."""
    moves = []
    while (step := made(name)) is not None and step.kind in MOVES:
        moves.append(name)
        name = step.reads[0]
    return moves, name


def _activation(step: Step, step_of: Callable[[str], Step | None]) -> Scores | None:
    if step.kind in ("Softmax", "LogSoftmax", "Sigmoid"):
        return Scores(step.kind, step.reads[0], step.axis)
    if step.kind == "Concat":
        return _two_classes(step, step_of)
    inner = step_of(step.reads[0]) if step.reads else None
    if step.kind == "Log" and inner is not None:
        scores = _activation(inner, step_of)
        return replace(scores, kind="LogSoftmax") if scores is not None and scores.kind == "Softmax" else None
    if step.kind not in ("Div", "Mul") or inner is None or inner.kind != "Exp":
        return None
    total = _before_spread(step.reads[1], step_of)
    if step.kind == "Mul":
        total = _before_spread(total.reads[0], step_of) if total is not None and total.kind == "Reciprocal" else None
    if total is None or total.kind != "ReduceSum" or total.reads[0] != step.reads[0] or total.axis is None:
        return None
    z = inner.reads[0]
    shifted = step_of(z)
    if shifted is not None and shifted.kind == "Sub":
        most = _before_spread(shifted.reads[1], step_of)
        if most is not None and most.kind == "ReduceMax" and most.reads[0] == shifted.reads[0]:
            z = shifted.reads[0]
    return Scores("Softmax", z, total.axis)


def _two_classes(step: Step, step_of: Callable[[str], Step | None]) -> Scores | None:
    """The scores behind a sigmoid that is joined with 1 minus itself."""
    for among, name in enumerate(step.reads if len(step.reads) == 2 else ()):
        first, other = step_of(name), step_of(step.reads[1 - among])
        if first is None or first.kind != "Sigmoid" or other is None or other.kind != "Sub" or other.reads[1] != name:
            continue
        one = step_of(other.reads[0])
        if one is None or one.kind == "Constant":
            return Scores("Softmax", first.reads[0], step.axis, among=among)
    return None


def _before_spread(name: str, step_of: Callable[[str], Step | None]) -> Step | None:
    """The step behind a value, before reshapes, expansions, Detach, and bounds by a constant (JAX: max(-inf, m))."""
    step = step_of(name)
    while step is not None and (step.kind in MOVES or step.kind in ("Expand", "Detach", "Max")):
        reads = step.reads if step.kind == "Max" else step.reads[:1]
        makers = [m for n in reads if (m := step_of(n)) is not None and m.kind != "Constant"]
        step = makers[0] if len(makers) == 1 else None
    return step


def steps_of(block: Block) -> Callable[[str], Step | None]:
    """How the values of a block are made."""
    producers = block.producers()

    def made(name: str) -> Step | None:
        at = producers.get(name)
        if at is None:
            return None
        op = block.operators[at]
        axes = getattr(op.op, "axes", None)
        axis = axes[0] if axes is not None and len(axes) == 1 else getattr(op.op, "axis", None)
        return Step(op.op.name, tuple(v.name if v is not None else "" for v in op.inputs), axis)

    return made


def main_outputs(program: Program) -> list[Variable]:
    """The floating-point outputs that no other one is made of, as hidden states and caches beside scores are."""
    outputs = [v for v in program.outputs if v.value.type.is_float and v.value.ndim]
    if len(outputs) < 2:
        return outputs
    step_of = steps_of(program.block)
    roots = {v.name: v.name for v in outputs}
    for name in roots:
        while (step := step_of(roots[name])) is not None and step.kind == "Identity":
            roots[name] = step.reads[0]
    wanted, inner = set(roots.values()), set[str]()
    for op in reversed(program.operators):
        writes = {v.name for v in op.writes()}
        if writes & inner:
            inner |= writes  # the states beside the sequence that is used
        if writes & (inner | wanted):
            inner.update(v.name for v in op.reads())
    return [v for v in outputs if roots[v.name] not in inner] or outputs


def moved(op: Operator, shape: tuple[int, ...], axis: int | None) -> tuple[tuple[int, ...], int | None] | None:
    """The shape and the class axis behind an operator of MOVES; None where classes are no longer along one axis."""
    after: tuple[int, ...] = next(iter(op.writes())).shape
    if axis is None or op.op.name in ("Cast", "Identity"):
        return after, axis
    if op.op.name == "Transpose":
        perm: Any = op.op.perm  # type: ignore[attr-defined]
        return after, tuple(perm).index(axis)
    sizes = {_before(shape, axis): shape[axis]}
    place = [i for i, n in enumerate(after) if sizes.get(_before(after, i)) == n]
    return (after, place[0]) if place else None


def _before(shape: tuple[int, ...], axis: int) -> int:
    count = 1
    for n in shape[:axis]:
        count *= n
    return count
