"""The ranks that train together: which of them this process is, and what they do together between steps."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...communication.mesh import Mesh
from ...errors import JobError, UsageError
from .roles import START, Claim, PaddleCloudRoleMaker, UserDefinedRoleMaker, from_environment, launched, need_collective
from .strategy import DistributedStrategy

#: the reductions of `all_reduce`
_MODES = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class World:
    """Rank `rank` of `size`.  `engine`: what carries their communication (None: there is one, or none runs)."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    nodes: int = 1
    endpoints: tuple[str, ...] = ("localhost:0",)
    engine: Any = None
    strategy: DistributedStrategy | None = None

    @property
    def mesh(self) -> Mesh:
        """One axis, "dp", of all ranks."""
        return Mesh.of(dp=self.size)

    def collect(self, what: str, value: Any, root: int | None = None) -> list[Any]:
        """The values of all ranks, in their order; with `root`, on that rank alone (others get nothing)."""
        if self.engine is not None:
            return list(self.engine.collect(what, value, root))
        if self.size > 1:
            raise UsageError(
                f"{what} needs all {self.size} ranks, but no process runs as one: UserDefinedRoleMaker said that there "
                f"are so many; start them with {START.format(n=self.size)}"
            )
        return [value]


class _Current:
    """The world of this process; None before `init`."""

    world: World | None = None


def init(
    role_maker: PaddleCloudRoleMaker | UserDefinedRoleMaker | None = None,
    is_collective: bool = True,
    strategy: DistributedStrategy | None = None,
    log_level: int | str = "INFO",
) -> None:
    """Finds the ranks that train together; every rank calls it, before anything else of Fleet.

    Processes are started by `python -m recompute.launch`, mpiexec or srun, and MPI says which rank each is; a process
    that was started alone is one rank.  `strategy`: the default of `distributed_optimizer`.  `log_level` has no effect.
    UsageError where Paddle's environment variables, or the role maker, say other than MPI.
    """
    need_collective(is_collective)
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise UsageError(f"fleet.init: strategy must be a DistributedStrategy, not {strategy!r}")
    if role_maker is not None and not isinstance(role_maker, (PaddleCloudRoleMaker, UserDefinedRoleMaker)):
        raise UsageError(
            f"fleet.init: role_maker must be a PaddleCloudRoleMaker or UserDefinedRoleMaker, not {role_maker!r}"
        )
    claim = from_environment(os.environ) if role_maker is None else role_maker.claim()
    size = launched(os.environ) or 1
    _Current.world = _together(size, claim, strategy) if size > 1 else _alone(claim, strategy)


def _alone(claim: Claim, strategy: DistributedStrategy | None) -> World:
    """A process that no launcher of MPI started."""
    if claim.by_hand:
        rank, size = claim.rank or 0, claim.size or 1
        return World(rank, size, rank, 1, claim.endpoints or _endpoints(["localhost"] * size), None, strategy)
    if claim.contradicts(0, 1):
        raise UsageError(
            f"{claim.contradicts(0, 1)}, but MPI did not start this process, and ranks communicate through MPI: start "
            f"them with {START.format(n=claim.size or 'N')} (in place of paddle.distributed.launch), or unset the "
            "variables"
        )
    return World(endpoints=claim.endpoints or _endpoints([platform.node()]), strategy=strategy)


def _together(size: int, claim: Claim, strategy: DistributedStrategy | None) -> World:
    """One of several processes, which agree on who they are."""
    from ...runtime.communication.mpi import engine_of, load_mpi

    ranks = load_mpi().COMM_WORLD.size
    if ranks != size:
        raise JobError(
            f"{size} processes were started, but MPI knows of {ranks}: mpiexec and mpi4py's library are of different "
            "MPIs (python -m recompute.launch finds the mpiexec of the mpich wheel), or srun needs --mpi=pmi2 or pmix"
        )
    engine = engine_of(Mesh.of(dp=size))
    said = engine.collect("fleet.init", (platform.node(), claim))
    for rank, (_, other) in enumerate(said):
        if against := other.contradicts(rank, size):
            raise UsageError(
                f"MPI reports rank {rank} of {size}, but {against}: leave it to MPI, which started the processes, and "
                "unset Paddle's variables"
            )
    hosts = [host for host, _ in said]
    here = hosts[: engine.rank].count(hosts[engine.rank])
    return World(engine.rank, size, here, len(set(hosts)), claim.endpoints or _endpoints(hosts), engine, strategy)


def _endpoints(hosts: list[str]) -> tuple[str, ...]:
    return tuple(f"{host}:{rank}" for rank, host in enumerate(hosts))


def current() -> World:
    """The ranks that `init` found.  UsageError before it."""
    if _Current.world is None:
        raise UsageError("call fleet.init(is_collective=True) first")
    return _Current.world


def current_or_one() -> World | None:
    """The ranks that `init` found; None without `init` in a process that is alone.  UsageError in others."""
    size = launched(os.environ)
    if _Current.world is None and size is not None and size > 1:
        raise UsageError(
            f"{size} processes were started, and each would train alone: call fleet.init(is_collective=True) first"
        )
    return _Current.world


def leave() -> None:
    """Forgets what `init` found."""
    _Current.world = None


def worker_index() -> int:
    """This process's rank, from 0."""
    return current().rank


def worker_num() -> int:
    """How many ranks there are."""
    return current().size


def rank() -> int:
    """`worker_index`."""
    return current().rank


def nranks() -> int:
    """`worker_num`."""
    return current().size


def world_size() -> int:
    """`worker_num`."""
    return current().size


def local_rank() -> int:
    """This process's number among those of its machine."""
    return current().local_rank


def node_num() -> int:
    """How many machines there are."""
    return current().nodes


def is_first_worker() -> bool:
    """Whether this is rank 0."""
    return current().rank == 0


def is_worker() -> bool:
    """True: every rank computes."""
    current()
    return True


def is_server() -> bool:
    """False: there are no parameter servers."""
    current()
    return False


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """A name for each rank, PADDLE_TRAINER_ENDPOINTS or HOST:RANK; nothing listens there, as MPI knows the ways."""
    endpoints = list(current().endpoints)
    return ",".join(endpoints) if to_string else endpoints


def barrier_worker() -> None:
    """Waits for all ranks."""
    current().collect("fleet.barrier_worker", None)


def all_reduce(input: Any, mode: str = "sum") -> np.ndarray:
    """The sum of all ranks' arrays or numbers, in a fixed order; `mode`: "sum", "max" or "min".

    For a few small things between steps, such as metrics: gradients are summed by the step itself.
    """
    if mode not in _MODES:
        raise UsageError(f"fleet.all_reduce: mode must be one of {', '.join(_MODES)}, not {mode!r}")
    arrays = [np.asarray(x) for x in current().collect("fleet.all_reduce", np.asarray(input))]
    if len({(x.shape, x.dtype) for x in arrays}) > 1:
        raise UsageError(
            f"fleet.all_reduce: ranks give arrays of different types: {[f'{x.dtype}{list(x.shape)}' for x in arrays]}"
        )
    while len(arrays) > 1:
        arrays = [_MODES[mode](*arrays[i : i + 2]) if len(arrays[i : i + 2]) > 1 else arrays[i]
                 for i in range(0, len(arrays), 2)]  # fmt: skip
    return arrays[0]


def init_worker(*args: Any) -> None:
    """Nothing: there are no parameter servers to connect to."""
    current()


def stop_worker() -> None:
    """Nothing: ranks end when their scripts do, and wait for each other then."""
    current()
