"""Runs planned programs."""

from .executor import CPUPlace, CUDAPlace, Executor, Session

__all__ = ["CPUPlace", "CUDAPlace", "Executor", "Session"]
