"""Selections (which entries of an axis a mask keeps) and extents (how many those are)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Extent:
    """A length that depends on data: `factor` times the numbers of entries that masks keep.

    `masks`: numbers of the masks (see mask_numbering.py), sorted.
    """

    factor: int
    masks: tuple[int, ...]

    def __mul__(self, other: Any) -> Extent:
        """A product of lengths."""
        more = other if isinstance(other, Extent) else Extent(int(other), ())
        return Extent(self.factor * more.factor, tuple(sorted((*self.masks, *more.masks))))

    __rmul__ = __mul__

    def over(self, other: Extent) -> Extent | None:
        """The quotient; None where there is none."""
        left = Counter(self.masks)
        left.subtract(other.masks)
        if not other.factor or self.factor % other.factor or any(n < 0 for n in left.values()):
            return None
        return Extent(self.factor // other.factor, tuple(sorted(left.elements())))


@dataclass(frozen=True)
class Selection:
    """Which entries of an axis count.  Equal selections keep the same entries.

    `number`: of the mask, equal for equal masks; `repeat`: so many neighbours share one element of it.  `mask`: the
    name of the mask as a flat bool value of `length` elements; `label`: its name in the model, for errors.  `extent`:
    how many entries the mask itself keeps.
    """

    number: int
    repeat: int
    mask: str = field(compare=False)
    length: int = field(compare=False)
    label: str = field(compare=False)
    extent: Extent = field(compare=False)

    @property
    def size(self) -> int:
        """The full length of the axis."""
        return self.length * self.repeat

    @property
    def count(self) -> Extent:
        """How many entries of the axis count."""
        return self.extent * self.repeat

    def repeated(self, times: int) -> Selection:
        """The same mask with `times` neighbours for one element."""
        return Selection(self.number, times, self.mask, self.length, self.label, self.extent)


#: axis → the selection along it
Marks = dict[int, Selection]


@dataclass
class Selected:
    """What an import knows of values with selections, by name.

    `marks`: their selections, by axis; a value without marks is what it is in ONNX.  `spaces`: of coordinates that
    count within selected entries, the selections of the dimensions that they count along (a key of -1: numbers of no
    use, such as the greatest coordinate).  `lengths`: shapes with extents in them.  `masks`: each mask by its number;
    `extents`: a selection for each extent; `counts`: values that count masks; `grids`: coordinates of all entries of a
    shape, as NonZero has them, and transposed; `made`: results by what was run.  `whole`: nodes run on full tensors
    now.
    """

    marks: dict[str, Marks] = field(default_factory=dict)
    spaces: dict[str, Marks] = field(default_factory=dict)
    lengths: dict[str, np.ndarray] = field(default_factory=dict)
    masks: dict[int, Selection] = field(default_factory=dict)
    extents: dict[Extent, Selection] = field(default_factory=dict)
    counts: dict[int, str] = field(default_factory=dict)
    made: dict[tuple[str, ...], str] = field(default_factory=dict)
    grids: dict[tuple[tuple[int, ...], bool], np.ndarray] = field(default_factory=dict)
    whole: bool = False

    def alias(self, name: str, other: str) -> None:
        """`name` is another name of `other`."""
        for table in (self.marks, self.spaces):
            if other in table:
                table[name] = table[other]
        if other in self.lengths:
            self.lengths[name] = self.lengths[other]

    def forget(self, name: str) -> None:
        """`name` is an ordinary value."""
        self.marks.pop(name, None)
        self.spaces.pop(name, None)
        self.lengths.pop(name, None)

    def of_extent(self, extent: Extent) -> Selection | None:
        """A selection with so many entries, None where no single mask gives it."""
        if extent in self.extents:
            return self.extents[extent]
        if len(extent.masks) == 1 and extent.masks[0] in self.masks:
            return self.masks[extent.masks[0]].repeated(extent.factor)
        return None
