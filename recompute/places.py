"""Where a program runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CPUPlace:
    """The processor of this machine, through NumPy and the kernels that it has."""


@dataclass(frozen=True)
class CUDAPlace:
    """CUDA device number `device`, through CuPy (extra `cuda12` or `cuda13`)."""

    device: int = 0


@dataclass(frozen=True)
class EmulatedCUDAPlace(CUDAPlace):
    """No device: the kernels for CUDA run on this machine's processor, for tests (see cuda/emulator.py).

    `backwards`: the last thread and block of each launch first.
    """

    backwards: bool = False


Place = CPUPlace | CUDAPlace
