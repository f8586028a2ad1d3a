"""Places: where a program runs."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError, nearest


@dataclass(frozen=True)
class CPUPlace:
    """The CPU of this machine, with NumPy and native kernels."""


@dataclass(frozen=True)
class CUDAPlace:
    """CUDA device number `device`, through CuPy (extra `cuda12` or `cuda13`)."""

    device: int = 0


@dataclass(frozen=True)
class EmulatedCUDAPlace(CUDAPlace):
    """An emulated device: CUDA kernels run on the CPU, for tests.

    `backwards`: the last thread of the last block of each launch runs first.
    """

    backwards: bool = False


Place = CPUPlace | CUDAPlace


def named_place(text: str) -> Place:
    """The place called `cpu`, `cuda`, `cuda:1` or `emulated`.  UsageError for other names."""
    kind, _, number = text.partition(":")
    if kind == "cuda" and (number.isdecimal() or number == text[5:] == ""):
        return CUDAPlace(int(number or 0))
    if text not in ("cpu", "emulated"):
        gpu = text.lower().startswith(("gpu", "cuda", "nvidia", "device"))
        number = "".join(c for c in text if c.isdecimal())
        hint = f" (did you mean cuda{':' * bool(number)}{number}?)" if gpu else nearest(text, ("cpu", "emulated"))
        raise UsageError(f"--place knows cpu, cuda, cuda:N and emulated, not '{text}'{hint}")
    return CPUPlace() if text == "cpu" else EmulatedCUDAPlace()
