"""Paddle's Fleet: `fleet.init()`, then `fleet.distributed_optimizer(optimizer, strategy).minimize(loss)`.

Names and arguments are Paddle's; the ranks are processes of MPI (docs/fleet.md).  Programs are loaded with the batch of
one rank, and each rank feeds its own.
"""

from __future__ import annotations

from typing import Any

from .absent import absent
from .checkpoint import save_persistables
from .optimizer import distributed_optimizer
from .roles import PaddleCloudRoleMaker, Role, UserDefinedRoleMaker
from .strategy import DistributedStrategy
from .utilities import HybridGroup, Util, get_hybrid_communicate_group
from .world import (
    all_reduce,
    barrier_worker,
    init,
    init_worker,
    is_first_worker,
    is_server,
    is_worker,
    local_rank,
    node_num,
    nranks,
    rank,
    stop_worker,
    worker_endpoints,
    worker_index,
    worker_num,
    world_size,
)

#: Paddle's helper functions
util = Util()

__all__ = [
    "DistributedStrategy",
    "HybridGroup",
    "PaddleCloudRoleMaker",
    "Role",
    "UserDefinedRoleMaker",
    "Util",
    "all_reduce",
    "barrier_worker",
    "distributed_optimizer",
    "get_hybrid_communicate_group",
    "init",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "local_rank",
    "node_num",
    "nranks",
    "rank",
    "save_persistables",
    "stop_worker",
    "util",
    "worker_endpoints",
    "worker_index",
    "worker_num",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """Functions of Paddle's that have no meaning here: calling one says what to do instead."""
    return absent(name, __name__)
