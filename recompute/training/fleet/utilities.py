"""Paddle's `fleet.util`, and the groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import UsageError
from . import world
from .combining import shards


class Util:
    """Helper functions, all of all ranks."""

    def all_reduce(self, input: Any, mode: str = "sum", comm_world: str = "worker") -> np.ndarray:
        """`fleet.all_reduce`."""
        _workers(comm_world)
        return world.all_reduce(input, mode)

    def all_gather(self, input: Any, comm_world: str = "worker") -> list[Any]:
        """The values of all ranks, in their order."""
        _workers(comm_world)
        return world.current().collect("fleet.util.all_gather", input)

    def barrier(self, comm_world: str = "worker") -> None:
        """`fleet.barrier_worker`."""
        _workers(comm_world)
        world.barrier_worker()

    def get_file_shard(self, files: Sequence[str]) -> list[str]:
        """This rank's part of a list: consecutive ones, the first ranks one more where they cannot be equal."""
        if isinstance(files, str) or not all(isinstance(f, str) for f in files):
            raise UsageError(f"fleet.util.get_file_shard takes a list of names, not {files!r}")
        here = world.current()
        each, more = divmod(len(files), here.size)
        low = here.rank * each + min(here.rank, more)
        return list(files[low : low + each + (here.rank < more)])

    def print_on_rank(self, message: Any, rank_id: int) -> None:
        """Prints on one rank."""
        if world.current().rank == rank_id:
            print(message)


def _workers(comm_world: str) -> None:
    if comm_world not in ("worker", "all"):
        raise UsageError(f"fleet.util: comm_world must be 'worker', as there are no servers, not {comm_world!r}")


@dataclass(frozen=True)
class HybridGroup:
    """This rank's groups by Paddle's names: along data parallelism alone, as other ways are not there yet."""

    rank: int
    size: int
    sharded: bool = False

    def get_global_rank(self) -> int:
        """Its rank among all."""
        return self.rank

    def get_data_parallel_rank(self) -> int:
        """Its rank among those with other samples."""
        return 0 if self.sharded else self.rank

    def get_data_parallel_world_size(self) -> int:
        """How many have other samples and whole parameters."""
        return 1 if self.sharded else self.size

    def get_sharding_parallel_rank(self) -> int:
        """Its rank among those that divide parameters."""
        return self.rank if self.sharded else 0

    def get_sharding_parallel_world_size(self) -> int:
        """How many divide parameters."""
        return self.size if self.sharded else 1

    def get_model_parallel_rank(self) -> int:
        """0: the pipeline has one stage, and no tensor is divided."""
        return 0

    def get_model_parallel_world_size(self) -> int:
        """1."""
        return 1

    get_stage_id = get_model_parallel_rank
    get_pipe_parallel_world_size = get_sep_parallel_world_size = get_model_parallel_world_size


def get_hybrid_communicate_group() -> HybridGroup:
    """The groups of this rank, by the strategy given to `init`."""
    here = world.current()
    return HybridGroup(here.rank, here.size, here.strategy is not None and shards(here.strategy))
