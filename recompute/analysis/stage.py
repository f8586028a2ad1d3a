"""One stage of a pipeline: what its ranks hold, and when they compute and wait."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stage:
    """The ranks at one coordinate of the pipeline: bytes of one of them, and the seconds in which it computes, waits
    for other ranks, and waits for data that move.  `memory`: the bytes that it holds from each of these seconds on.
    `fits`: whether the peak is within the device's memory."""

    place: int
    peak_bytes: int
    persistent_bytes: int
    compute_seconds: float
    pause_seconds: float
    communication_seconds: float
    memory: tuple[tuple[float, int], ...] = ()
    fits: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The figures, without what is held when, for JSON."""
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("place", "memory")}
        return {"stage": self.place, **rest}
