"""Execution of planned programs."""

from ..places import CPUPlace, CUDAPlace, EmulatedCUDAPlace
from .executor import Executor, Session

__all__ = ["CPUPlace", "CUDAPlace", "EmulatedCUDAPlace", "Executor", "Session"]
