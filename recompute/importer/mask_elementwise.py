"""Rules of element-wise operators: they run on all entries.

Where a derivative may be infinite (log, sqrt, 1 / x) or a value overflow (exp), what does not count is replaced before:
its gradient is zero, and zero times infinity is not.
"""

from __future__ import annotations

import numpy as np

from .mask_selection import Marks
from .mask_work import Work

#: (operator, input) → what is read there in place of entries that do not count
_GUARDS = {
    "Log": (0, 1), "Sqrt": (0, 1), "Reciprocal": (0, 1), "Exp": (0, 0), "Sinh": (0, 0), "Cosh": (0, 0), "Tan": (0, 0),
    "Asin": (0, 0), "Acos": (0, 0), "Atanh": (0, 0), "Acosh": (0, 2), "Div": (1, 1), "Mod": (1, 1), "Pow": (0, 1),
}  # fmt: skip

#: of one input
UNARY = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "Ceil", "Celu", "Cos", "Cosh",
    "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log",
    "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus",
    "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu",
)  # fmt: skip
#: of inputs that broadcast
NARY = (
    "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Clip", "Div", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum",
    "Where", "Xor",
)  # fmt: skip


def elementwise(work: Work) -> None:
    """Runs an element-wise node on all entries, selected or not; inputs where it could fail are replaced."""
    marks = broadcast(work, range(len(work)))
    ins = list(work.node.input)
    guard = _GUARDS.get(work.node.op_type)
    if guard is not None and not _harmless(work):
        at, value = guard
        ins[at] = work.filled(ins[at], work.marks(at), value)
    work.whole(ins)
    spaces = [work.selected.spaces[n] for n in work.node.input if n in work.selected.spaces]
    if spaces and len(work) > 1:
        spaces = [dict.fromkeys([-1], next(iter(spaces[0].values())))]
    work.mark(marks, space=spaces[0] if spaces else None)


def like_first(work: Work) -> None:
    """Further inputs give a type or settings: CastLike, Dropout."""
    work.whole()
    for i in range(len(work.node.output)):
        work.mark(work.marks(0), i)


def _harmless(work: Work) -> bool:
    """Whether a power has a whole exponent of at least 1."""
    exponent = work.known(1) if work.node.op_type == "Pow" else None
    return exponent is not None and bool(np.all((exponent >= 1) & (exponent == np.floor(exponent))))


def broadcast(work: Work, inputs: range | tuple[int, ...], last: int = 0) -> Marks:
    """The selections of inputs that broadcast, but for their `last` axes; ModelError where they do not fit."""
    present = [i for i in inputs if work.name(i)]
    ndim = max(work.type(i).ndim for i in present)
    marks: Marks = {}
    for i in present:
        for axis, s in work.marks(i).items():
            at = axis + ndim - work.type(i).ndim
            if at < ndim - last and marks.setdefault(at, s) != s:
                raise work.fail(
                    i, f"{work.node.op_type} joins it with what another mask keeps: entries of two masks have no "
                    "common order"
                )  # fmt: skip
    for i in present:
        t = work.type(i)
        for at in marks:
            axis = at - (ndim - t.ndim)
            if axis >= 0 and axis not in work.marks(i) and t.shape[axis] != 1:
                other = next(j for j in present if work.marks(j))
                raise work.fail(other, f"{work.node.op_type} joins it with all {t.shape[axis]} of '{work.name(i)}'")
    return marks
