"""Compressed values: what waits is a value's codes of few bits, or the value in a smaller element type.

    x.codes, x.ranges = CompressGroups(x, step) {bits=8}          before x's last forward reader
    ...
    x.again = DecompressGroups(x.codes, x.ranges) {...}           right before the operators that read x late

ActNN (Chen et al. 2021, arXiv 2104.14129) and GACT (Liu et al. 2022, arXiv 2206.11357) store so what gradients read.
With stochastic rounding, a gradient that is linear in the stored value has the right expectation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UsageError, nearest
from ...language.ir import Operator, Role, Value
from ...language.op import Op
from ...language.types import TensorType
from ...ops.approximation.groups import BITS, CompressGroups, DecompressGroups
from ...ops.shape.reshape import Cast
from .base import Approximation, seed_of
from .edits import Edits
from .step import Step, whole_view

#: element type → the cast.  f8 has the range of float16: what is beyond it is infinite, as NaN is NaN, where
#: f8e4m3fn would make 448 of both 449 and infinity.  It rounds to 2 bits behind the point and has a bias
CASTS: dict[str, Cast] = {
    "bf16": Cast(to="bf16"), "f16": Cast(to="f16"), "f8": Cast(to="f8e5m2", saturate=0),
}  # fmt: skip
#: elements that share a range
GROUP = 256
#: readers that are no more operators apart share a copy.  The readers of one layer's gradient are; between those of
#: different layers the copy would take the memory that storing has freed, and another one costs less than a copy does
APART = 8
_HOWS = (*map(str, BITS), *CASTS)


@dataclass(frozen=True)
class StoredValues(Approximation):
    """Values in 8, 4 or 2 bits with a range for each group of elements, or in a smaller element type."""

    name = "store"
    usage = f"store:{'|'.join(_HOWS)} (bits an element, or its type)"
    whole = True

    how: str

    def __str__(self) -> str:
        return f"{self.name}:{self.how}"

    @classmethod
    def parse(cls, settings: Sequence[str]) -> StoredValues:
        if len(settings) != 1:
            raise UsageError(f"'{':'.join([cls.name, *settings])}': give {cls.usage}")
        if settings[0] not in _HOWS:
            raise UsageError(
                f"values cannot be stored as '{settings[0]}'{nearest(settings[0], _HOWS)}; known: {', '.join(_HOWS)}"
            )
        return cls(settings[0])

    def form(self, value: Value) -> tuple[TensorType, ...] | None:
        """Codes and ranges of floats; a smaller type of larger ones."""
        if value.type.numpy.kind not in "fV" or value.dtype.startswith("f8"):
            return None
        if self.how in CASTS:
            types = value.type.with_dtype(CASTS[self.how].to)
            return (types,) if types.nbytes < value.nbytes else None
        return CompressGroups(int(self.how), GROUP).compressed(value.type)

    def packing(self, value: Value) -> Op:
        """The operator that makes what waits."""
        return CASTS[self.how] if self.how in CASTS else CompressGroups(int(self.how), GROUP, seed_of(value.name))

    def unpacking(self, value: Value) -> Op:
        """The operator that makes the value again."""
        if self.how in CASTS:
            return Cast(to=value.dtype)
        return DecompressGroups(int(self.how), GROUP, value.shape, value.dtype)

    def store(self, step: Step, value: Value, edits: Edits) -> None:
        """One copy for readers that stand together."""
        kept = edits.kept(self.packing(value), value, value.shape, "stored")
        copies: dict[str, Value] = {}
        before = -APART - 1
        for at in sorted(_first_readers(step, value)):
            to = edits.before(at)
            if at - before > APART:
                copies = {
                    value.name: edits.emit(to, self.unpacking(value), kept, f"{value.name}.again", Role.BACKWARD)[0]
                }
            for v in step.operators[at].reads():
                if step.origin.get(v.name) == value and step.is_early(v.name):
                    edits.read(at, v.name, _shaped(edits, to, copies, value, v))
            before = at


def _first_readers(step: Step, value: Value) -> list[int]:
    """The late operators that read a forward value or forward views of it."""
    names, readers = [value], set()
    for v in names:
        for i in step.readers.get(v.name, ()):
            if not step.early(i):
                readers.add(i)
            elif whole_view(step.operators[i]):
                names += list(step.operators[i].writes())
    return sorted(readers)


def _shaped(edits: Edits, to: list[Operator], copies: dict[str, Value], value: Value, wanted: Value) -> Value:
    """The copy under the shape of a view."""
    if wanted.name not in copies:
        copies[wanted.name] = edits.shaped(to, copies[value.name], wanted.shape, Role.BACKWARD)
    return copies[wanted.name]
