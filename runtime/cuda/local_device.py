"""Which device a rank has: its number among the ranks of its machine, one each."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...communication.mesh import Mesh
from ...errors import MissingExtraError, UsageError
from ..communication.engine import Engine
from ..communication.watch import machine


@dataclass(frozen=True)
class Seen:
    """A rank's view: its machine, how many devices there are, or why it can use none."""

    machine: Any
    devices: int
    why: str = ""


def seen(number: int) -> Seen:
    """This rank's view; nothing is started on a device."""
    from .device.device import count, unavailable

    why = unavailable(number)
    return Seen(machine(), 0 if why else count(), why)


def device_of(rank: int, ranks_seen: Sequence[Seen], wanted: int = 0) -> int:
    """The device's number in the process of a rank, from what all ranks see.

    `wanted`: the place's; 0 leaves the choice.  All ranks raise the same errors: MissingExtraError where one has none,
    UsageError where a machine has fewer devices than ranks.
    """
    for r, one in enumerate(ranks_seen):
        if one.why:
            raise MissingExtraError(
                f"rank {r} has no device: {one.why}; rc.CPUPlace() runs the same programs on the CPU"
            )
    for name, ranks in Counter(one.machine for one in ranks_seen).items():
        devices = min(one.devices for one in ranks_seen if one.machine == name)
        if not wanted and 1 < devices < ranks:
            raise UsageError(
                f"a machine has {devices} CUDA devices for {ranks} ranks, and each rank needs one of its own: start "
                f"{devices} ranks on it, or more machines"
            )
    if wanted or ranks_seen[rank].devices == 1:  # a scheduler may show each rank one of its own
        return wanted
    return sum(one.machine == ranks_seen[rank].machine for one in ranks_seen[:rank])


def check_apart(identities: Sequence[str]) -> None:
    """UsageError where two ranks have the same device (`identities`: by rank, machine and device)."""
    first: dict[str, int] = {}
    for rank, name in enumerate(identities):
        if name in first:
            raise UsageError(
                f"ranks {first[name]} and {rank} have the same CUDA device, and NCCL needs one for each: start as many "
                "ranks on a machine as it has devices, and leave the place's number out"
            )
        first[name] = rank


def open_engine(mesh: Mesh, number: int) -> Engine:
    """The engine of this rank on its device.  `number`: the place's.

    MissingExtraError where MPI, CuPy, a device or NCCL is missing; UsageError where there are too few devices.
    """
    from ..communication.mpi import MpiEngine
    from .device.device import open_device
    from .nccl import NcclEngine

    control = MpiEngine(mesh)
    if control.mesh.ranks == 1:
        return control
    seen_by_all = control.gather("the choice of devices", seen(number))
    device = open_device(device_of(control.rank, seen_by_all, number))
    check_apart(control.gather("the choice of devices", f"{seen_by_all[control.rank].machine} {device.identity}"))
    return NcclEngine(control, device)


@functools.cache
def engine_on(mesh: Mesh, number: int) -> Engine:
    """The engine of this process, which executors share."""
    return open_engine(mesh, number)
