"""Who this process is: what MPI, Paddle's environment variables and the user say."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from ...runtime.communication.started import PMIX, size_variable

#: how processes are started
START = "`python -m recompute.launch --nproc {n} SCRIPT`, mpiexec or srun"


class Role:
    """Paddle's names of what a process is; here all are workers."""

    WORKER, SERVER, HETER_WORKER, ALL, COORDINATOR = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Claim:
    """A claim about this process's rank; None: nothing is said.  `source`: who says it, for errors.

    `by_hand`: no process need run, so that the programs of all ranks can be made in one.
    """

    source: str
    rank: int | None = None
    size: int | None = None
    endpoints: tuple[str, ...] = ()
    by_hand: bool = False

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise UsageError(f"{self.source}: there must be at least 1 rank, not {self.size}")
        if self.rank is not None and not 0 <= self.rank < (self.size or self.rank + 1):
            raise UsageError(f"{self.source}: there is no rank {self.rank} among {self.size}")
        if self.endpoints and self.size is not None and len(self.endpoints) != self.size:
            raise UsageError(f"{self.source}: {len(self.endpoints)} endpoints for {self.size} ranks")

    def contradicts(self, rank: int, size: int) -> str:
        """How the claim contradicts being rank `rank` of `size`; "" if it does not."""
        if self.size not in (None, size):
            return f"{self.source}: {self.size} ranks"
        return f"{self.source}: rank {self.rank}" if self.rank not in (None, rank) else ""


class PaddleCloudRoleMaker:
    """This process as PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM and PADDLE_TRAINER_ENDPOINTS say, if they are set.

    MPI knows better where it started the process; then they must say the same.
    """

    def __init__(self, is_collective: bool = True, **options: Any) -> None:
        need_collective(is_collective)

    def claim(self) -> Claim:
        """The environment's claim."""
        return from_environment(os.environ)


class UserDefinedRoleMaker:
    """Rank `current_id` of `worker_num`.

    Where MPI started the process, it must say the same.  Where it did not, programs of this rank can be made, printed
    and estimated, but not run.
    """

    def __init__(
        self,
        is_collective: bool = True,
        init_gloo: bool = False,
        *,
        current_id: int = 0,
        role: int = Role.WORKER,
        worker_num: int | None = None,
        worker_endpoints: Sequence[str] = (),
        server_endpoints: Sequence[str] = (),
    ) -> None:
        need_collective(is_collective and role == Role.WORKER and not server_endpoints)
        size = len(worker_endpoints) or 1 if worker_num is None else worker_num
        for what, value in (("current_id", current_id), ("worker_num", size)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"UserDefinedRoleMaker: {what} must be a whole number, not {value!r}")
        self._claim = Claim("UserDefinedRoleMaker", current_id, size, tuple(worker_endpoints), by_hand=True)

    def claim(self) -> Claim:
        """The user's claim."""
        return self._claim


def need_collective(is_collective: Any) -> None:
    """UsageError for parameter servers."""
    if is_collective is not True:
        raise UsageError(
            "fleet has no parameter servers: every rank computes, with fleet.init(is_collective=True) and all roles "
            "Role.WORKER"
        )


def from_environment(environment: Mapping[str, str]) -> Claim:
    """The claim of Paddle's environment variables.  UsageError if one is not a number."""
    endpoints = tuple(filter(None, environment.get("PADDLE_TRAINER_ENDPOINTS", "").replace(" ", "").split(",")))
    rank, size = (_number(environment, n) for n in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"))
    told = [n for n in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS") if environment.get(n)]
    size = len(endpoints) or None if size is None else size
    return Claim(f"the environment ({', '.join(f'{n}={environment[n]}' for n in told)})", rank, size, endpoints)


def launched(environment: Mapping[str, str]) -> int | None:
    """How many processes MPI's launcher has started; None where it did not start this one."""
    if name := size_variable(environment):
        return _number(environment, name)
    if PMIX in environment or "mpi4py.MPI" in sys.modules:
        from ...runtime.communication.mpi import load_mpi

        size = int(load_mpi().COMM_WORLD.size)
        return size if size > 1 else None
    return None


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise UsageError(f"the environment variable {name} is '{text}', which is no number")
    return int(text)
