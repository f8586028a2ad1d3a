"""A rank's parts of parameters and state that are divided among ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..communication.mesh import Mesh
from ..language.axes import Cut
from ..language.ir import Value
from ..language.program import Program
from ..language.types import TensorType
from ..passes.sharding.reshard import Division


def stored(program: Program) -> tuple[Value, ...]:
    """Parameters, buffers and state, as this process has them, wherever a step keeps them."""
    b = program.block
    values = (*b.parameters, *b.buffers, *b.state)
    return tuple(Value(v.name, v.type.placed(host=False)) if v.type.host else v for v in values)


#: the mesh of one rank
ONE = Mesh()


@dataclass(frozen=True)
class Part:
    """A rank's part of a value that is divided among ranks; `whole`: its type where one process has all of it.

    Axes of the mesh that divide operators: `cuts` along axes of the value, on the ranks of `mesh`, of which this is the
    `rank`-th.  ZeRO, of the value or of what cuts leave of it: `count` elements, from `low` on; zeros may follow them,
    up to `padded` in all, along the mesh's axis `along`.
    """

    whole: TensorType
    low: int
    count: int
    cuts: tuple[tuple[Division, Cut], ...] = ()
    mesh: Mesh = ONE
    rank: int = 0
    padded: int = 0
    along: str = ""

    def joined(self, parts: Sequence[np.ndarray | None]) -> np.ndarray:
        """The whole value from what all ranks have, in their order; None: a rank of another stage has nothing."""
        if self.mesh == ONE:
            return np.concatenate([p for p in parts if p is not None])[: self.whole.size].reshape(self.whole.shape)
        array = np.empty(self.whole.size, self.whole.numpy)
        for rank, part in enumerate(parts):
            if part is None:
                continue
            places = self.elements(rank)
            array[places] = part.reshape(-1)[: places.size].reshape(places.shape)
        return array.reshape(self.whole.shape)

    def elements(self, rank: int) -> np.ndarray:
        """The positions, in the whole value's elements, of those that a rank of the mesh has."""
        places = np.arange(self.whole.size).reshape(self.whole.shape)
        for how, cut in self.cuts:
            at = self.mesh.coordinate(rank, how.axis)
            places = cut.place.cut(places, how.ranks, at, at + 1)
        if not self.padded:
            return places
        at = self.mesh.coordinate(rank, self.along)
        return places.reshape(-1)[at * self.padded : (at + 1) * self.padded]

    def spans(self) -> list[tuple[int, int, int]]:
        """The runs of this rank's elements: position in the whole value, position in the part, length."""
        if not self.cuts:
            return [(self.low, 0, self.count)]
        at = self.elements(self.rank).reshape(-1)
        borders = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), at.size]
        return [(int(at[a]), a, b - a) for a, b in itertools.pairwise(borders) if b > a]


def parts_of(program: Program) -> dict[str, Part]:
    """The parameters, buffers and state of which this rank has a part; the rest is the same on all ranks."""
    parts = _divided(program)
    if program.division is None:
        return parts
    owners = sorted(program.sharded, key=len, reverse=True)
    shapes = {v.name: v.shape for v in program.block.parameters if v.name in program.sharded}
    for v in (*program.block.parameters, *program.block.state):
        owner = next((n for n in owners if f"{v.name}.".startswith(f"{n}.") and v.shape == shapes[n]), None)
        if owner is not None:
            own_type = v.type.with_shape(program.sharded[owner].shape)
            low = min(program.division.rank * v.size, own_type.size)
            count = min(v.size, own_type.size - low)
            how: dict[str, Any] = {}
            if program.mesh is not None:
                how = {"mesh": program.mesh, "padded": v.size, "along": program.division.axis}
            if owner in program.divided:
                d = program.divided[owner]
                how |= {"cuts": d.cuts, "rank": d.rank}
                own_type = v.type.with_shape(d.whole.shape)
            parts[v.name] = Part(own_type, low, count, **how)
    return parts


def _divided(program: Program) -> dict[str, Part]:
    """The parts along axes of the mesh that divide operators."""
    parts: dict[str, Part] = {}
    if not program.divided:
        return parts
    values = {v.name: v for v in stored(program)}
    for v in stored(program):
        owner = v.name  # an optimizer's state has the name of its parameter and more behind a dot
        while owner and owner not in program.divided:
            owner = owner.rpartition(".")[0]
        if owner and v.shape == values[owner].shape:
            d = program.divided[owner]
            whole = v.type.with_shape(d.whole.shape)
            parts[v.name] = Part(whole, 0, v.size, d.cuts, program.mesh, d.rank)
    return parts


def whole_types(program: Program) -> dict[str, TensorType]:
    """The types of parameters, buffers and state as one process has them."""
    parts = parts_of(program)
    return {v.name: parts[v.name].whole if v.name in parts else v.type for v in stored(program)}
