"""Results of a run: its epochs, its steps, its memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class History:
    """The results of `Trainer.fit`.

    `epochs`: one dictionary each, such as {"epoch": 1, "steps": 40, "samples": 1280, "seconds": 1.2, "train": {"loss":
    .61}, "eval": {"loss": .58, "accuracy": .83}}.  `steps`: all steps, those before a resume included.  `peak_bytes`:
    "predicted" before the first step and "measured", "training" and "evaluation" apart.  `stopped`: why the run ended
    before its last epoch; "" if it did not.  `best`: the epoch with the best result, and the result.  `ranks`: with a
    mesh, the memory of each.
    """

    epochs: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    peak_bytes: dict[str, int] = field(default_factory=dict)
    weights_sha256: str = ""
    stopped: str = ""
    best: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    resumed_at: int | None = None
    ranks: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The results for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "ranks" or value}
