"""Fleet in one process: any rank of any number."""

from __future__ import annotations

from recompute import fleet


def at(rank: int, ranks: int) -> None:
    """From now on this process is one of so many ranks, whose programs it can make."""
    fleet.init(fleet.UserDefinedRoleMaker(current_id=rank, worker_num=ranks))
