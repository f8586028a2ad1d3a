"""`Optimizer` and `LinearLRScheduler`: updates of the weights with the gradients that a `Module` accumulated."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import numpy as np

from ...errors import UsageError
from ...training.numbers import number
from .files import read_artifact

if TYPE_CHECKING:
    from .module import Module

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-6


class Optimizer:
    """Updates a module's trained weights in place, as ONNX Runtime's optimizers do."""

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        _, metadata = read_artifact(optimizer_uri, "optimizer")
        self._update = {"AdamW": self._adamw, "SGD": self._sgd}[metadata["name"]]
        self._state = module.state
        self._state.optimizer.setdefault("learning_rate", 1e-3)
        self._state.optimizer.setdefault("steps", 0)

    @property
    def steps(self) -> int:
        """The number of steps that were done."""
        return int(self._state.optimizer["steps"])

    def step(self) -> None:
        """Updates the weights.  UsageError before the first training step, which computes the gradients."""
        gradients = self._state.gradients
        if not gradients:
            raise UsageError("there are no gradients yet: call the module in training mode before optimizer.step()")
        self._state.optimizer["steps"] = self.steps + 1
        for name, g in gradients.items():
            self._update(name, self._state.arrays[name], g)

    def _sgd(self, name: str, w: np.ndarray, g: np.ndarray) -> None:
        w -= w.dtype.type(self.get_learning_rate()) * g

    def _adamw(self, name: str, w: np.ndarray, g: np.ndarray) -> None:
        """Hugging Face's AdamW, ONNX Runtime's default: epsilon is added to the uncorrected moment's root."""
        number = w.dtype.type
        m, v = (self._state.moments.setdefault(f"{name}/{k}", np.zeros_like(w)) for k in ("m", "v"))
        m += number(1 - _BETA1) * (g - m)
        v += number(1 - _BETA2) * (g * g - v)
        rate = self.get_learning_rate() * math.sqrt(1 - _BETA2**self.steps) / (1 - _BETA1**self.steps)
        w -= number(rate) * m / (np.sqrt(v) + number(_EPSILON))

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of the next steps."""
        self._state.optimizer["learning_rate"] = number("learning_rate", learning_rate)

    def get_learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._state.optimizer["learning_rate"])


class LinearLRScheduler:
    """The learning rate rises linearly from 0 to `initial_lr` in the warm-up, then falls to 0 at the last step.

    This is what ONNX Runtime's documentation says; its Python package 1.19.2 exchanges the two counts.
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        if not 0 <= warmup_step_count <= total_step_count:
            raise UsageError(
                f"warmup_step_count ({warmup_step_count}) must be from 0 to total_step_count ({total_step_count})"
            )
        self._optimizer, self._warm, self._total = optimizer, warmup_step_count, total_step_count
        self._initial = number("initial_lr", initial_lr)
        self.step()

    def step(self) -> None:
        """Sets the learning rate for the optimizer's next step."""
        done = self._optimizer.steps
        share = (
            done / max(1, self._warm)
            if done < self._warm
            else max(0.0, (self._total - done) / max(1, self._total - self._warm))
        )
        self._optimizer.set_learning_rate(self._initial * share)
