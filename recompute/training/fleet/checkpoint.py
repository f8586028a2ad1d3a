"""Parameters, buffers and state of all ranks in one file, the same for every number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import RecomputeError, UsageError
from ...language.program import Program
from ...support.tensor_file import write_arrays
from ..parts import parts_of, stored
from ..state import contents
from .world import current

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
    world, error, arrays, parts = current(), None, {}, parts_of(main_program)
    for v in stored(main_program):
        array, part = contents(main_program, v), parts.get(v.name)
        values = [array] if part is None else world.collect(f"fleet.save_persistables, '{v.name}'", array, 0)
        if world.rank == 0:
            arrays[v.name] = array if part is None else part.joined(values)
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
