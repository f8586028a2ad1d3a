"""Where a program runs."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError


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


def named_place(text: str) -> Place:
    """`cpu`, `cuda`, `cuda:1`, `emulated`.  UsageError for anything else."""
    kind, _, number = text.partition(":")
    if kind == "cuda" and (number.isdecimal() or number == text[5:] == ""):
        return CUDAPlace(int(number or 0))
    if text not in ("cpu", "emulated"):
        raise UsageError(f"--place knows cpu, cuda, cuda:N and emulated, not '{text}'")
    return CPUPlace() if text == "cpu" else EmulatedCUDAPlace()
