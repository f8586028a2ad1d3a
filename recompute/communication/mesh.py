"""The mesh of ranks: named axes, each rank a point."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError, expect, nearest

_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, init=False)
class Mesh:
    """Axes and their sizes: `Mesh(dp=2, pp=4)`, `Mesh("dp=2,pp=4")` or `Mesh((("dp", 2), ("pp", 4)))`.

    Ranks are numbered in row-major order: those that are neighbours along the last axis have consecutive numbers.
    """

    axes: tuple[tuple[str, int], ...] = ()

    def __init__(self, axes: Mesh | str | Mapping[str, int] | Sequence[tuple[str, int]] = (), **sizes: int) -> None:
        if sizes and axes:
            raise UsageError("a mesh is given by its axes or as a text: give one of them")
        given: Any = sizes or axes
        if isinstance(given, str):
            given = Mesh.parse(given)
        pairs = given.axes if isinstance(given, Mesh) else given.items() if isinstance(given, Mapping) else given
        wanted = "rc.Mesh(dp=2, pp=4) or a text such as 'dp=2,pp=4'"
        expect("mesh", pairs, Iterable, wanted)
        pairs = tuple(tuple(expect("mesh", pair, (tuple, list), wanted)) for pair in pairs)
        for pair in pairs:
            if len(pair) != 2 or not isinstance(pair[0], str):
                raise UsageError(f"mesh must be {wanted}, not {axes!r}")
        object.__setattr__(self, "axes", pairs)
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if not _AXIS.match(name) or names.count(name) > 1:
                raise UsageError(f"mesh: '{name}' cannot be the name of an axis, or names two of them")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(f"mesh: axis '{name}' must have a whole number of at least 1 ranks, not {size!r}")

    @staticmethod
    def of(**sizes: int) -> Mesh:
        """`Mesh.of(dp=2, pp=4)`."""
        return Mesh(tuple(sizes.items()))

    @staticmethod
    def parse(text: str) -> Mesh:
        """A mesh from `dp=2,pp=4`.  UsageError for other texts."""
        axes = []
        for part in filter(None, expect("mesh", text, str, "a text such as 'dp=2,pp=4'").replace(" ", "").split(",")):
            name, equals, size = part.partition("=")
            if not equals or not re.fullmatch(r"[0-9]{1,9}", size):
                raise UsageError(f"mesh '{text}': give AXIS=RANKS, separated by commas, such as dp=2,pp=4")
            axes.append((name, int(size)))
        return Mesh(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along an axis.  UsageError for an unknown one."""
        return self.axes[self._place(axis)][1]

    def coordinate(self, rank: int, axis: str) -> int:
        """Where a rank is along an axis."""
        return rank // self._stride(axis) % self.size(axis)

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from this one in their coordinate along `axis` alone, itself included, in order."""
        stride = self._stride(axis)
        first = rank - self.coordinate(rank, axis) * stride
        return tuple(range(first, first + stride * self.size(axis), stride))

    def last(self, rank: int, axis: str) -> int:
        """The last rank of a rank's group along `axis`; itself where the mesh has no such axis."""
        return self.group(rank, axis)[-1] if axis in dict(self.axes) else rank

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along an axis: each rank is in one of them."""
        return tuple(self.group(r, axis) for r in range(self.ranks) if self.coordinate(r, axis) == 0)

    def _place(self, axis: str) -> int:
        names = [name for name, _ in self.axes]
        if axis not in names:
            raise UsageError(f"the mesh {self or 'without axes'} has no axis '{axis}'{nearest(axis, names)}")
        return names.index(axis)

    def _stride(self, axis: str) -> int:
        return _strides(self.axes)[self._place(axis)]


def as_mesh(mesh: Mesh | str | Mapping[str, int]) -> Mesh:
    """A mesh, or one from a text such as "dp=2,pp=4" or from sizes by axis.  UsageError for all else."""
    return mesh if isinstance(mesh, Mesh) else Mesh(mesh)


@functools.lru_cache(maxsize=64)
def _strides(axes: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    return tuple(math.prod(size for _, size in axes[i + 1 :]) for i in range(len(axes)))
