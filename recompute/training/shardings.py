"""Which values a mesh's axes divide: `rc.shard(program["w"], axis="tp", dim=1)`, and a program's step on one rank."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..communication.mesh import Mesh
from ..errors import UsageError, expect, nearest
from ..language.axes import Cut
from ..language.factors import Place
from ..language.ir import Block, Value
from ..language.program import Program, Variable
from ..language.types import TensorType
from ..language.verify import verify
from ..passes.sharding.choice import choose
from ..passes.sharding.divide import divide
from ..passes.sharding.reshard import Division
from ..passes.sharding.vocabulary import open_losses
from ..passes.slicing.open_means import open_means

__all__ = ["shard"]

#: axes of a mesh that divide something else than operators: the batch, and the layers
OTHERS = ("dp", "pp")


@dataclass(frozen=True)
class Sharding:
    """Axis `dim` of a value is cut along the mesh's axis `axis`, in each of its `blocks` equal blocks."""

    axis: str
    dim: int
    blocks: int = 1


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


def shard(value: Variable | Program, names: str = "", *, axis: str = "tp", dim: int = 0, blocks: int = 1) -> None:
    """Has axis `dim` of a parameter or an activation divided among the ranks of the mesh's axis `axis`.

    Call it before `minimize`, on a variable, or on a program with a name or glob of values.  `blocks`: how many equal
    blocks the axis consists of, each of which is cut, as the queries, keys and values in a matrix [h, 3h] are.
    Everything else follows from the program (docs/distribution.md).  UsageError for what no value has.
    """
    program = value if isinstance(value, Program) else getattr(value, "program", None)
    if program is None:
        raise UsageError(f"rc.shard takes a Variable, or a program and a name, not {value!r}")
    found = _values(program, value.name if isinstance(value, Variable) else names)
    for number, name in ((dim, "dim"), (blocks, "blocks")):
        if isinstance(number, bool) or not isinstance(number, int):
            raise UsageError(f"rc.shard: {name} must be a whole number, not {number!r}")
    if not isinstance(axis, str) or axis in OTHERS:
        raise UsageError(f"rc.shard: axis must be a name of the mesh's other than {' and '.join(OTHERS)}, not {axis!r}")
    added = dict(program.shardings)
    for v in found:
        own = dim + v.type.ndim if dim < 0 else dim
        if not 0 <= own < v.type.ndim or blocks < 1 or v.shape[own] % blocks:
            raise UsageError(f"rc.shard: '{v.name}' is {v.type}: it has no axis {dim} of {blocks} equal blocks")
        kept = tuple(s for s in added.get(v.name, ()) if s.axis != axis)
        added[v.name] = (*kept, Sharding(axis, own, blocks))
    program.shardings = added


def _values(program: Program, name: str) -> list[Value]:
    values = program.block.values()
    name = expect("rc.shard: names", name, str, "the name or glob of values")
    name = program.aliases.get(name, name)
    found = [values[name]] if name in values else [values[n] for n in fnmatch.filter(values, name)]
    if not found:
        raise UsageError(f"rc.shard: the program has no value '{name}'{nearest(name, values)}")
    return found


def axes_of(mesh: Mesh) -> list[tuple[str, int]]:
    """The axes of a mesh that divide operators, with their sizes.

    The axis tp comes last: it cuts the sequence where nothing else is cut, within what others have left.
    """
    found = [(name, size) for name, size in mesh.axes if name not in OTHERS and size > 1]
    return sorted(found, key=lambda axis: axis[0] == "tp")


def divisions(mesh: Mesh, rank: int, order: str = "tree") -> list[Division]:
    """This rank's place along the axes that divide operators."""
    return [Division(name, size, mesh.coordinate(rank, name), order) for name, size in axes_of(mesh)]


def divide_program(
    program: Program,
    how: Sequence[Division],
    pairs: Iterable[tuple[Variable, Variable]],
    rank: int = 0,
    sequence: bool = True,
) -> list[tuple[Variable, Variable]]:
    """Makes a program, with its backward pass, that of one rank: its block, its arrays; the pairs in it."""
    gradients = {p.name: g.name for p, g in pairs}
    program.block = open_means(program.block)
    for d in how:
        block = program.block
        cuts = _cuts(program, block, d) or choose(block, d, sequence)
        opened = open_losses(block, cuts)
        made = divide(opened, d, cuts, gradients, whole=(program.loss, *program.fetched))
        program.block = verify(made.block)
        _take_parts(program, block, d, made.cuts, rank)
    program.gradients = list(gradients.items())
    return [(program[p], program[g]) for p, g in gradients.items()]


def divided_forward(program: Program, block: Block) -> Block:
    """A forward pass of a program that is divided, for the parts of its parameters that a rank has."""
    how = {d.axis: d for v in program.divided.values() for d, _ in v.cuts}
    for axis, _ in axes_of(program.mesh):
        if axis in how:
            cuts = {n: c for n, v in program.divided.items() for d, c in v.cuts if d.axis == axis}
            block = divide(block, how[axis], cuts, closed=True).block
    return block


def _cuts(program: Program, block: Block, how: Division) -> dict[str, Cut]:
    """The cuts along one axis of the mesh that are asked for.  UsageError for unequal parts."""
    values, found = block.values(), {}
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
            found[name] = cut
    return found


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
