"""Callbacks: functions that a run calls at its steps and epochs, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError, expect
from .log import flat


class Callback:
    """Base class: a subclass overrides what it needs.  `trainer` has the program, the executor and the history.

    `trainer.stop(reason)` ends the run after the step.
    """

    def on_begin(self, trainer: Any) -> None:
        """Before the first step."""

    def on_step(self, trainer: Any, step: int, loss: float) -> None:
        """After a step; `step` counts from 1."""

    def on_epoch(self, trainer: Any, results: dict[str, Any]) -> None:
        """After an epoch and its evaluation; `results`: {"epoch": 1, "train": {"loss": ...}, "eval": {...}}."""

    def on_end(self, trainer: Any) -> None:
        """After the last step."""

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs, for JSON."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` returned."""


def better(value: float, best: float | None, mode: str) -> bool:
    """Whether a result is better; NaN never is."""
    if math.isnan(value):
        return False
    return best is None or (value < best if mode == "min" else value > best)


def mode_of(monitor: str, mode: str = "auto") -> str:
    """ "min" or "max": whether a smaller or a larger result is better (auto: by its name)."""
    if mode not in ("auto", "min", "max"):
        raise UsageError(f"mode must be 'auto', 'min' or 'max', not {mode!r}")
    if mode != "auto":
        return mode
    down = ("loss", "error", "perplexity", "mae", "mse", "rmse")
    return "min" if any(monitor.rpartition(".")[2].startswith(name) for name in down) else "max"


def monitored(results: dict[str, Any], monitor: str) -> float:
    """A result by its name, such as "eval.loss".  UsageError where an epoch has no such result."""
    metrics = flat(results)
    if monitor not in metrics:
        has = ", ".join(n for n, v in metrics.items() if isinstance(v, float))
        raise UsageError(f"an epoch has no result '{monitor}'; it has: {has}")
    return float(metrics[monitor])


@dataclass
class EarlyStopping(Callback):
    """Ends the run after `patience` epochs in a row in which `monitor` did not improve by more than `min_delta`."""

    monitor: str = "eval.loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: str = "auto"
    best: float | None = field(default=None, init=False)
    waited: int = field(default=0, init=False)

    def on_epoch(self, trainer: Any, results: dict[str, Any]) -> None:
        """Counts epochs without improvement."""
        value, mode = monitored(results, self.monitor), mode_of(self.monitor, self.mode)
        least = value + self.min_delta if mode == "min" else value - self.min_delta
        if better(least, self.best, mode):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            trainer.stop(f"{self.monitor} has not improved for {self.waited} epochs (best {self.best:.6g})")

    def state(self) -> dict[str, Any]:
        """The best result and the epochs since."""
        return {"best": self.best, "waited": self.waited}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what `state` returned."""
        self.best, self.waited = state.get("best"), int(state.get("waited", 0))


def as_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """The callbacks as a list.  UsageError for all else."""
    listed = expect("callbacks", callbacks, Iterable, "a list of rc.Callback")
    return [expect("a callback", c, Callback, "of a class that inherits from rc.Callback") for c in listed]
