"""Which values a mesh's axes divide: `rc.shard(program["w"], axis="tp", dim=1)`, and a program's step on one rank."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from ..communication.mesh import Mesh
from ..errors import UsageError, expect, nearest
from ..language.ir import Value
from ..language.program import Program, Variable
from ..passes.sharding.divide_axis import DivideAxis

__all__ = ["shard"]

#: axes of a mesh that divide something else than operators: the batch, and the layers
OTHERS = ("dp", "pp")


@dataclass(frozen=True)
class Sharding:
    """Axis `dim` of a value is cut along the mesh's axis `axis`, in each of its `blocks` equal blocks."""

    axis: str
    dim: int
    blocks: int = 1


def shard(value: Variable | Program, names: str = "", *, axis: str = "tp", dim: int = 0, blocks: int = 1) -> None:
    """Has axis `dim` of a parameter or an activation divided among the ranks of the mesh's axis `axis`.

    Call it before `minimize`, on a variable, or on a program with a name or glob of values.  `blocks`: how many equal
    blocks the axis consists of, each of which is cut, as the queries, keys and values in a matrix [h, 3h] are.
    Everything else follows from the program (docs/distribution.md).  UsageError for what no value has.
    """
    program = value if isinstance(value, Program) else getattr(value, "program", None)
    if program is None:
        raise UsageError(f"rc.shard takes a Variable, or a program and a name, not {value!r}")
    values = _values(program, value.name if isinstance(value, Variable) else names)
    for number, name in ((dim, "dim"), (blocks, "blocks")):
        if isinstance(number, bool) or not isinstance(number, int):
            raise UsageError(f"rc.shard: {name} must be a whole number, not {number!r}")
    if not isinstance(axis, str) or axis in OTHERS:
        raise UsageError(f"rc.shard: axis must be a name of the mesh's other than {' and '.join(OTHERS)}, not {axis!r}")
    added = dict(program.shardings)
    for v in values:
        place = dim + v.type.ndim if dim < 0 else dim
        if not 0 <= place < v.type.ndim or blocks < 1 or v.shape[place] % blocks:
            raise UsageError(f"rc.shard: '{v.name}' is {v.type}: it has no axis {dim} of {blocks} equal blocks")
        kept = tuple(s for s in added.get(v.name, ()) if s.axis != axis)
        added[v.name] = (*kept, Sharding(axis, place, blocks))
    program.shardings = added


def _values(program: Program, name: str) -> list[Value]:
    values = program.block.values()
    name = expect("rc.shard: names", name, str, "the name or glob of values")
    name = program.aliases.get(name, name)
    matches = [values[name]] if name in values else [values[n] for n in fnmatch.filter(values, name)]
    if not matches:
        raise UsageError(f"rc.shard: the program has no value '{name}'{nearest(name, values)}")
    return matches


def axes_of(mesh: Mesh) -> list[tuple[str, int]]:
    """The axes of a mesh that divide operators, with their sizes.

    The axis tp comes last: it cuts the sequence where nothing else is cut, within what others have left.
    """
    axes = [(name, size) for name, size in mesh.axes if name not in OTHERS and size > 1]
    return sorted(axes, key=lambda axis: axis[0] == "tp")


def divisions(mesh: Mesh, rank: int, order: str = "tree", *, sequence: bool = True) -> list[DivideAxis]:
    """The passes that divide a step along the axes that divide operators, for one rank."""
    return [DivideAxis(name, size, mesh.coordinate(rank, name), order, sequence, rank) for name, size in axes_of(mesh)]
