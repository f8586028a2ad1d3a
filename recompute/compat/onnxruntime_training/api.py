"""`onnxruntime.training.api`: the training loop's objects."""

from __future__ import annotations

from .checkpoint import CheckpointState
from .module import Module
from .optimizer import LinearLRScheduler, Optimizer

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer"]
