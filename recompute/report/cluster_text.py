"""Meshes and the stages of pipelines as printed text."""

from __future__ import annotations

from typing import Any

from ..communication.mesh import Mesh
from ..support.tables import human_bytes, human_seconds, plain_table, render

#: the most stages that are printed one by one; of more, the first and the last few, and the one with the largest peak
_MOST = 12


def stages_text(e: Any) -> str:
    """A `StagesEstimate`: memory and time of the stages, and the step."""
    table = plain_table("stage", "peak", "", "parameters and state", "computes", "pauses", "communicates", no_wrap=True)
    last = -1
    for s in _some(e.stages):
        if s.place != last + 1:
            table.add_row("...", *[""] * 6)
        last = s.place
        times = map(human_seconds, (s.compute_seconds, s.pause_seconds, s.communication_seconds))
        peak = human_bytes(s.peak_bytes) + ("" if s.fits else ", too large")
        table.add_row(str(s.place), f"{s.peak_bytes:,}", peak, f"{s.persistent_bytes:,}", *times)
    mfu = "" if e.mfu is None else f"; MFU {e.mfu:.1%}"
    return "\n".join(
        [
            f"mesh {e.mesh}, {e.schedule}, batch {e.batch:,} in {e.micro_batches:,} micro-batches, {e.precision}",
            render(table),
            *_memory(e),
            f"step {human_seconds(e.step_seconds)}, of which {e.bubble:.1%} pauses; communication that nothing hides: "
            f"{human_seconds(e.exposed_communication_seconds)}{mfu} ({e.costs}; {e.precision}, "
            f"{e.micro_batches:,} micro-batches{'' if e.fits else '; exceeds the device'})",
        ]
    )


def _memory(e: Any) -> list[str]:
    """Stages that exceed the device's memory, and which peaks are extrapolated from fewer micro-batches."""
    lines = []
    if large := [s for s in e.stages if not s.fits]:
        named = ", ".join(str(s.place) for s in large[:_MOST]) + (", ..." if len(large) > _MOST else "")
        lines.append(
            f"exceeds the device: stage{'s' * (len(large) > 1)} {named} of {human_bytes(e.budget)}, at most by "
            f"{human_bytes(e.peak_bytes - e.budget)}; give more ranks, smaller micro-batches, or --checkpoints"
        )
    replicas = dict(Mesh(e.mesh).axes).get("dp", 1)
    if e.simulated_micro_batches * replicas < e.micro_batches and e.timeline.classes:
        largest = " but the largest" if e.exact else ""
        lines.append(
            f"all peaks{largest} are extrapolated from {e.simulated_micro_batches} micro-batches of each data-parallel "
            "replica: each further one adds its input rows"
        )
    return lines


def _some(stages: Any) -> list[Any]:
    """All stages if they are few, else some of them."""
    if len(stages) <= _MOST:
        return list(stages)
    largest = max(stages, key=lambda s: s.peak_bytes)
    kept = {*range(_MOST // 2), *range(len(stages) - _MOST // 2, len(stages)), largest.place}
    return [s for s in stages if s.place in kept]


def mesh_text(plans: Any) -> str:
    """`MeshPlans`: the candidates that were compiled, the fastest that fits first, and the stages of the best."""
    lines = [
        f"{plans.model} on {plans.ranks:,} ranks, batch {plans.batch:,}, {human_bytes(plans.budget)} a rank: "
        f"{plans.counted:,} ways priced by formulas, {len(plans.rows)} compiled"
    ]
    heads = ("mesh", "micro-batches", "schedule", "ZeRO", "recompute", "peak", "", "step", "pauses", "exposed", "MFU")
    table = plain_table("", *heads, no_wrap=True)
    for i, r in enumerate(plans.rows, 1):
        c = r.candidate
        schedule = "" if c.pp == 1 else c.schedule + (f" x{c.chunks}" if c.chunks > 1 else "")
        what = (f"{i}" if r.fits else "too large", str(c.mesh), f"{r.micro_batches:,} x {c.micro_batch}", schedule)
        step, exposed = human_seconds(r.step_seconds), human_seconds(r.exposed_communication_seconds)
        memory = (str(c.zero), c.recompute, f"{r.peak_bytes:,}", human_bytes(r.peak_bytes))
        table.add_row(*what, *memory, step, f"{r.bubble:.1%}", exposed, f"{r.mfu:.1%}")
    lines.append(render(table, 150))
    lines.append(f"times: {plans.costs}; {plans.precision}; {plans.network}")
    if plans.best is not None:
        lines += ["", _best(plans), stages_text(plans.best)]
    return "\n".join([*lines, *(f"note: {n}" for n in plans.notes)])


def _best(plans: Any) -> str:
    row, best = plans.rows[0], plans.best
    if best.simulated_micro_batches == row.micro_batches:
        return f"the first, all {len(best.stages)} stages compiled, {plans.ranks:,} ranks verified:"
    peak = (
        f"the peak above is that of the largest stage with all {row.micro_batches:,}"
        if row.exact
        else f"with all {row.micro_batches:,}, peaks are a few per cent larger at most: for these, give the mesh"
    )
    return (
        f"the first, all {len(best.stages)} stages compiled, {plans.ranks:,} ranks verified and simulated with the "
        f"micro-batches after which its schedule repeats itself ({peak}):"
    )
