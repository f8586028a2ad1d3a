"""Runs planned programs."""

from .executor import Executor, Session
from .places import CPUPlace, CUDAPlace, EmulatedCUDAPlace

__all__ = ["CPUPlace", "CUDAPlace", "EmulatedCUDAPlace", "Executor", "Session"]
