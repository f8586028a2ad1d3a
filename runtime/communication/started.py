"""Environment variables that MPI launchers set for the processes that they start."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...errors import UsageError

#: a rank's number, by PMIx, which does not say how many there are, and by Slurm
PMIX, _SLURM = "PMIX_RANK", "SLURM_PROCID"
#: where launchers say which rank a process is
_RANKS = ("PMI_RANK", PMIX, "OMPI_COMM_WORLD_RANK", _SLURM)
#: where those of MPI's libraries say how many processes they have started; and where srun does, to a rank
_SIZES, _SLURM_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"), "SLURM_STEP_NUM_TASKS"


def given_rank() -> str:
    """The rank that a launcher has given this process; "" if none has started it."""
    return next((os.environ[name] for name in _RANKS if name in os.environ), "")


def started_together() -> int:
    """How many processes the launcher of an MPI library has started with this one; 1 where none says so."""
    text = os.environ.get(size_variable(os.environ, srun=False), "").strip()
    return int(text) if text.isdigit() else 1


def given_deadline() -> float | None:
    """The environment's RECOMPUTE_DEADLINE in seconds; None where it is not set.  UsageError for other texts."""
    text = os.environ.get("RECOMPUTE_DEADLINE", "")
    try:
        return float(text) if text else None
    except ValueError:
        raise UsageError(f"RECOMPUTE_DEADLINE is '{text}', which is not a number of seconds") from None


def size_variable(environment: Mapping[str, str], *, srun: bool = True) -> str:
    """The variable in which a launcher says how many processes it has started; "" if none does.

    `srun`: Slurm's counts, too.
    """
    names = (*_SIZES, _SLURM_SIZE) if srun and _SLURM in environment else _SIZES
    return next((name for name in names if environment.get(name, "").strip()), "")
