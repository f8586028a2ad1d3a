"""Few-bit slopes: the gradient of an activation from codes of a few bits an element in place of its input or output.

    dx = GeluGrad(x, dy)        x.slopes = SlopeCodes(x) {bounds=...}            before x's last forward reader
                                dx = SlopeGrad(dy, x.slopes) {levels=...}

The slope is replaced by the best step function (Novikov, Bershatsky et al. 2022, arXiv 2202.00441); activations whose
slopes are steps, such as Relu, keep their exact gradients, in the bits that these need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from ...language.ir import Operator, Value
from ...language.op import Op
from ...language.types import TensorType
from ...ops.approximation.levels import PIECEWISE, SMOOTH, Steps, gradient_template, slope_of
from ...ops.approximation.slopes import MOST_BITS, SlopeCodes, SlopeGrad
from .base import Approximation
from .edits import Edits
from .step import Leaf, Step


@dataclass(frozen=True)
class FewBitSlopes(Approximation):
    """Slopes of activations in at most `bits` bits an element."""

    name = "bits"
    usage = f"bits:1..{MOST_BITS} (bits of the slope of an activation)"

    bits: int

    def __str__(self) -> str:
        return f"{self.name}:{self.bits}"

    @classmethod
    def parse(cls, settings: Sequence[str]) -> FewBitSlopes:
        if len(settings) != 1 or settings[0] not in map(str, range(1, MOST_BITS + 1)):
            raise UsageError(
                f"'{':'.join([cls.name, *settings])}': the slope of an activation takes 1 to {MOST_BITS} bits"
            )
        return cls(int(settings[0]))

    def keeps(self, step: Step, leaf: Leaf) -> TensorType | None:
        """Codes for a reader that belongs to the gradient of a known activation."""
        gradient = self._gradients(step).get(leaf.at)
        return None if gradient is None else gradient.codes.infer(gradient.x.type)[0]

    def replace(self, step: Step, leaf: Leaf, edits: Edits) -> None:
        """One operator in place of the gradient's last one; the others are left without readers."""
        gradient = self._gradients(step)[leaf.at]
        last = step.operators[gradient.last]
        (codes,) = edits.kept(gradient.codes, gradient.x, gradient.x.shape, "slopes")
        op = SlopeGrad(levels=gradient.steps.levels)
        edits.replaced.setdefault(leaf.at, [step.operators[leaf.at]])
        edits.replaced[gradient.last] = [Operator(op, (gradient.dy, codes), last.outputs, last.role)]

    def _gradients(self, step: Step) -> dict[int, ActivationGradient]:
        """Position → the gradient that it belongs to."""
        return step.remembered(self, lambda: {i: g for g in activation_gradients(step, self.bits) for i in g.positions})


@dataclass(frozen=True)
class ActivationGradient:
    """The gradient of an activation y of `x`: its operators' positions, of which `last` makes it, from `dy`."""

    x: Value
    y: Value
    dy: Value
    positions: tuple[int, ...]
    last: int
    steps: Steps

    @property
    def codes(self) -> Op:
        """The operator that stores the codes of x."""
        return SlopeCodes(bounds=self.steps.bounds, even=int(self.steps.even))


def activation_gradients(step: Step, bits: int) -> Iterator[ActivationGradient]:
    """The gradients of a step's activations that are as their rules emit them, with steps for their slopes."""
    constants = {c.value.name: c for c in step.block.constants}
    for i, o in enumerate(step.operators):
        if not step.early(i) or o.op.name not in (*SMOOTH, *PIECEWISE):
            continue
        x, others = o.inputs[0], o.inputs[1:]
        if x is None or x.name not in step.origin or any(v is not None and v.name not in constants for v in others):
            continue
        steps = slope_of(o.op, bits, x.dtype, [None if v is None else constants[v.name].numpy() for v in others])
        match = None if steps is None else _matched(step, o)
        if steps is not None and match is not None:
            positions, dy = match
            yield ActivationGradient(step.origin[x.name], next(o.writes()), dy, positions, positions[-1], steps)


def _matched(step: Step, o: Operator) -> tuple[tuple[int, ...], Value] | None:
    """Positions of the operators of an activation's gradient as its rule emits them, and the gradient that flows in."""
    template = gradient_template(o.op, [None if v is None else v.type for v in o.inputs])
    if template is None:
        return None
    names: dict[str, Any] = {f"in{i}": v for i, v in enumerate(o.inputs)} | {"x": o.inputs[0], "y": o.outputs[0]}
    for c in template.constants:
        names[c.value.name] = next((d.value for d in step.block.constants if _same(c, d)), None)
    positions: list[int] = []
    for wanted in template.operators:
        at = next(
            (i for i in _readers(step, wanted, names) if i not in positions and _bind(step, wanted, i, names)), -1
        )
        if at < 0:
            return None
        positions.append(at)
    inside = [v for i in positions[:-1] for v in step.operators[i].writes()]
    if any(r not in positions for v in inside for r in step.readers.get(v.name, ())) or "dy" not in names:
        return None
    return tuple(positions), names["dy"]


def _same(a: Any, b: Any) -> bool:
    return a.value.type == b.value.type and repr(a.data) == repr(b.data)


def _readers(step: Step, wanted: Operator, names: dict[str, Any]) -> Iterator[int]:
    """Late operators that read what an operator of a template reads, as far as that is known."""
    for v in wanted.reads():
        numbers = names.get(v.name)
        if numbers is not None:
            if numbers.name in step.origin:
                yield from (leaf.at for leaf in step.leaves(step.origin[numbers.name]))
            else:
                yield from step.readers.get(numbers.name, ())


def _bind(step: Step, wanted: Operator, at: int, names: dict[str, Any]) -> bool:
    """Whether an operator is that of a template; if so, values of the template that have no counterpart yet get one."""
    there = step.operators[at]
    if step.early(at) or there.op != wanted.op or len(there.inputs) != len(wanted.inputs):
        return False
    new = dict(names)
    for mine, other in zip(wanted.inputs, there.inputs, strict=True):
        if mine is None or other is None:
            if mine is not other:
                return False
            continue
        partner = new.setdefault(mine.name, other)
        if partner is None or step.origin.get(partner.name, partner) != step.origin.get(other.name, other):
            return False
    names.update(new)
    names[next(wanted.writes()).name] = next(there.writes())
    return True
