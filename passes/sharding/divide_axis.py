"""A program divided along one axis of a mesh: its operators, and the contents of what a rank has a part of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...errors import UsageError
from ...language.axes import Cut
from ...language.factors import Place
from ...language.ir import Block
from ...language.program import Program
from ...language.types import TensorType
from ..base import Pass
from .choice import choose
from .divide import divide
from .reshard import Division
from .vocabulary import open_losses


@dataclass(frozen=True)
class DividedValue:
    """A parameter, buffer or state of which a rank has a part: its whole type, and for each axis of the mesh that
    divides it the ranks and the place, in this order.  `rank`: this rank's number in the mesh."""

    whole: TensorType
    cuts: tuple[tuple[Division, Cut], ...]
    rank: int = 0

    def part(self, array: np.ndarray) -> np.ndarray:
        """This rank's part of the whole array."""
        for how, cut in self.cuts:
            array = cut.place.cut(array, how.ranks, how.rank, how.rank + 1)
        return array


class DivideAxis(Pass):
    """Divide the operators of a step among the `ranks` ranks along the mesh's axis `axis`; this is the `at`-th there.

    What is divided is what `rc.shard` says of this axis, or else what `choose` finds; `order`: how ranks add up;
    `sequence`: also the sequence between pairs of products.  `rank`: this rank's number in the mesh.  Means over labels
    are opened before (`open-means`).  A program's parameters, buffers and state become this rank's parts.
    """

    axis: str = "tp"
    ranks: int = 1
    at: int = 0
    order: str = "tree"
    sequence: bool = True
    rank: int = 0

    @property
    def division(self) -> Division:
        """The place of this rank along the axis."""
        return Division(self.axis, self.ranks, self.at, self.order)

    def run(self, block: Block) -> Block:
        """The block of this rank, with the cuts that `choose` finds."""
        how = self.division
        cuts = choose(block, how, self.sequence)
        return divide(open_losses(block, cuts), how, cuts).block

    def rewrite(self, program: Program) -> Block:
        """The divided block; the program's gradients and arrays become this rank's parts."""
        block, how = program.block, self.division
        gradients = dict(program.gradients)
        cuts = _asked(program, block, how) or choose(block, how, self.sequence)
        opened = open_losses(block, cuts)
        divided = divide(opened, how, cuts, gradients, whole=(program.loss, *program.fetched))
        program.gradients = list(gradients.items())
        _take_parts(program, block, how, divided.cuts, self.rank)
        return divided.block


class DivideForward(Pass):
    """Divide a forward pass as the program's parameters are divided (`DivideAxis`); `axes`: of the mesh, in order."""

    axes: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        """The block itself: which values are divided is known of a program."""
        return block

    def rewrite(self, program: Program) -> Block:
        """The forward pass of this rank."""
        block = program.block
        how = {d.axis: d for v in program.divided.values() for d, _ in v.cuts}
        for axis in self.axes:
            if axis in how:
                cuts = {n: c for n, v in program.divided.items() for d, c in v.cuts if d.axis == axis}
                block = divide(block, how[axis], cuts, closed=True).block
        return block


def _asked(program: Program, block: Block, how: Division) -> dict[str, Cut]:
    """The cuts along one axis of the mesh that are asked for.  UsageError for unequal parts."""
    values, cuts = block.values(), {}
    for name, wanted in program.shardings.items():
        for s in wanted:
            if s.axis != how.axis or name not in values:
                continue
            cut = how.cut(values[name].type, s.dim, s.blocks)
            if cut is None:
                raise UsageError(
                    f"axis {s.dim} of '{name}', which is {values[name].type}, cannot be divided among {how.ranks} ranks"
                    + (f" in {s.blocks} blocks" if s.blocks > 1 else "")
                )
            cuts[name] = cut
    return cuts


def _part(array: np.ndarray, place: Place, how: Division) -> np.ndarray:
    """A rank's part of an array; of one that is a single number everywhere, which takes no memory, one like it."""
    if array.size and not any(array.strides):
        shape = list(array.shape)
        shape[place.axis] //= how.ranks
        return np.broadcast_to(array[(0,) * array.ndim], shape)
    return np.ascontiguousarray(place.cut(array, how.ranks, how.rank, how.rank + 1))


def _take_parts(program: Program, before: Block, how: Division, cuts: Mapping[str, Cut], rank: int) -> None:
    """Takes the rank's parts of arrays, and notes of what they are parts."""
    divided = dict(program.divided)
    for v in (*before.parameters, *before.buffers, *before.state):
        if v.name in cuts:
            old = divided.get(v.name) or DividedValue(v.type, (), rank)
            divided[v.name] = DividedValue(old.whole, (*old.cuts, (how, cuts[v.name])), rank)
            program.data[v.name] = _part(np.asarray(program.data[v.name]), cuts[v.name].place, how)
    program.divided = divided
