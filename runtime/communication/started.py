"""Whether an MPI launcher has started this process."""

from __future__ import annotations

import os

#: where launchers say which rank a process is
_NAMES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def given_rank() -> str:
    """The rank that a launcher has given this process; "" if none has started it."""
    return next((os.environ[name] for name in _NAMES if name in os.environ), "")
