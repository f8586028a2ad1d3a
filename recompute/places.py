"""Places: where a program runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import UsageError, expect, nearest


@dataclass(frozen=True)
class CPUPlace:
    """The CPU of this machine, with NumPy and native kernels.

    `disk`: a folder that takes the part of host memory: with a budget, parameters, optimizer state and values of the
    step stay in a file there while no operator needs them (docs/offload.md).
    """

    disk: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.disk is not None:
            folder = os.fspath(expect("CPUPlace: disk", self.disk, (str, os.PathLike), "the path of a folder"))
            if not os.path.isdir(folder):
                raise UsageError(f"disk '{folder}': there is no such folder")
            missing = [f for f in ("preadv", "posix_fallocate", "posix_fadvise") if not hasattr(os, f)]
            if missing:
                raise UsageError(f"state on disk needs Linux: this system has no {', '.join(missing)}")
            object.__setattr__(self, "disk", os.path.abspath(folder))


@dataclass(frozen=True)
class CUDAPlace:
    """CUDA device number `device`, through CuPy (extra `cuda12` or `cuda13`)."""

    device: int = 0

    def __post_init__(self) -> None:
        expect("CUDAPlace: device", self.device, int, "the number of a device")


@dataclass(frozen=True)
class EmulatedCUDAPlace(CUDAPlace):
    """An emulated device: CUDA kernels run on the CPU, for tests.

    `backwards`: the last thread of the last block of each launch runs first.
    """

    backwards: bool = False


Place = CPUPlace | CUDAPlace


def as_place(place: Place | str | None) -> Place:
    """A place, or the one called `cpu`, `cpu:FOLDER`, `cuda`, `cuda:1` or `emulated`; None: the CPU.

    UsageError for all else.
    """
    if place is None:
        return CPUPlace()
    if not isinstance(place, str):
        wanted = "rc.CPUPlace(), rc.CUDAPlace(0) or a name such as 'cuda:0'"
        return expect("place", place, (CPUPlace, CUDAPlace), wanted)
    text = place
    kind, _, number = text.partition(":")
    if kind == "cpu" and number:
        return CPUPlace(number)
    if kind == "cuda" and (number.isdecimal() or number == text[5:] == ""):
        return CUDAPlace(int(number or 0))
    if text not in ("cpu", "emulated"):
        gpu = text.lower().startswith(("gpu", "cuda", "nvidia", "device"))
        number = "".join(c for c in text if c.isdecimal())
        hint = f" (did you mean cuda{':' * bool(number)}{number}?)" if gpu else nearest(text, ("cpu", "emulated"))
        raise UsageError(f"place must be cpu, cpu:FOLDER, cuda, cuda:N or emulated, not '{text}'{hint}")
    return CPUPlace() if text == "cpu" else EmulatedCUDAPlace()
