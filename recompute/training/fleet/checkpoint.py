"""Parameters, buffers and state of all ranks in one file, the same for every number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...errors import RecomputeError, UsageError
from ...language.ir import Value
from ...language.program import Program
from ...support.tensor_file import write_arrays
from ..state import contents
from .world import World, current

#: the file in the folder
FILE = "persistables.safetensors"


def save_persistables(executor: Any, dirname: str, main_program: Program | None = None, mode: int = 0) -> None:
    """Writes parameters, buffers and optimizer state to DIRNAME/persistables.safetensors; every rank calls it.

    Rank 0 writes, with the parts that other ranks have of what is divided (`strategy.sharding`), so that the file is
    that of one process.  `executor` and `mode` are accepted as Paddle's.  UsageError without a program; the error of
    rank 0 on all ranks.
    """
    if not isinstance(main_program, Program):
        raise UsageError(
            "fleet.save_persistables needs the program, as there is no default: save_persistables(exe, folder, program)"
        )
    world, error, arrays = current(), None, {}
    for v in (*main_program.block.parameters, *main_program.block.buffers, *main_program.block.state):
        found = _whole(world, main_program, v)
        if found is not None:
            arrays[v.name] = found
    if world.rank == 0:
        try:
            Path(dirname).mkdir(parents=True, exist_ok=True)
            write_arrays(arrays, Path(dirname) / FILE)
        except OSError as e:
            error = UsageError(f"cannot make the folder '{dirname}': {e.strerror or e}")
        except RecomputeError as e:
            error = e  # type: ignore[assignment]
    error = world.collect("fleet.save_persistables", error)[0]
    if error is not None:
        raise error


def _whole(world: World, program: Program, v: Value) -> np.ndarray | None:
    """The array of a value as one process has it; None on ranks that do not write."""
    own, owner = contents(program, v), _owner(program, v)
    if owner is None:
        return own if world.rank == 0 else None
    whole = program.sharded[owner]
    parts = world.collect(f"fleet.save_persistables, '{v.name}'", own, 0)
    return np.concatenate(parts)[: whole.size].reshape(whole.shape) if parts else None


def _owner(program: Program, v: Value) -> str | None:
    """The divided parameter to which a value belongs."""
    shapes = {p.name: p.shape for p in program.block.parameters if p.name in program.sharded}
    names = sorted(shapes, key=len, reverse=True)
    return next((n for n in names if f"{v.name}.".startswith(f"{n}.") and v.shape == shapes[n]), None)
