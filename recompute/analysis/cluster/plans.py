"""What `find_mesh` found: candidates that were compiled, the best of them, and its stages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ...report.cluster_text import mesh_text
from ..facts import Facts
from ..stages import StagesEstimate
from .candidates import Candidate


@dataclass(frozen=True)
class Row:
    """A candidate whose first stages and last one were compiled.

    `peak_bytes`: their largest peak; `step_seconds`: by the slowest one; `exposed_communication_seconds`: in
    which it waits for data that move; `bubble`: the share of the step in which a rank waits for others; `mfu`: a part
    of the device's peak.  `fits`: whether the peak is within the budget.
    """

    candidate: Candidate
    micro_batches: int
    peak_bytes: int
    persistent_bytes: int
    step_seconds: float
    bubble: float
    exposed_communication_seconds: float
    mfu: float
    fits: bool
    exact: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "candidate"}
        c = dataclasses.asdict(self.candidate)
        return {"mesh": str(self.candidate.mesh), **c, **rest}


@dataclass(frozen=True)
class MeshPlans:
    """What was found for so many ranks: compiled candidates, the fastest that fits first, and its stages.

    `budget`: bytes of a rank.  `counted`: candidates that formulas priced.  `best`: the whole step of the first row, of
    all micro-batches; None if nothing fits.  `notes`: what was left out, and why.
    """

    model: str
    ranks: int
    batch: int
    budget: int
    facts: Facts
    rows: tuple[Row, ...]
    counted: int
    best: StagesEstimate | None
    costs: str
    network: str
    notes: tuple[str, ...] = ()
    precision: str = "fp32"

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON: `mesh`, `ranks` (peaks by stage), and times are those of the best."""
        rest = {
            n: getattr(self, n)
            for n in ("model", "batch", "budget", "counted", "costs", "network", "notes", "precision")
        }
        report: dict[str, Any] = {**rest, "candidates": [r.to_dict() for r in self.rows]}
        if self.best is None:
            return {**report, "mesh": None, "ranks": []}
        row = self.rows[0]
        best = self.best.to_dict()
        return {
            **report, **row.to_dict(), **{n: best[n] for n in ("mesh", "schedule", "ranks")},
            "simulated_micro_batches": self.best.simulated_micro_batches,
        }  # fmt: skip

    def __str__(self) -> str:
        return mesh_text(self)


def described(c: Candidate) -> str:
    """A candidate in words."""
    schedule = "" if c.pp == 1 else f", {c.schedule}" + (f" of {c.chunks} chunks" if c.chunks > 1 else "")
    zero = f", ZeRO {c.zero}" if c.zero else ""
    again = ", layers recomputed" if c.recompute == "full" else ""
    return f"{c.mesh}, micro-batches of {c.micro_batch}{schedule}{zero}{again}"
