"""Estimates of the steps of many ranks as printed text."""

from __future__ import annotations

from typing import Any

from ..support.tables import human_bytes, human_seconds, plain_table, render


def ranks_text(e: Any) -> str:
    """A `RanksEstimate` as text: memory of each class of ranks, bytes by channel and link, time, efficiency."""
    zero = f", ZeRO stage {e.zero}" if e.zero else ""
    batch = "" if e.batch is None else f", batch {e.batch:,} ({e.batch_per_rank:,} a rank)"
    lines = [f"mesh {e.mesh}: {e.ranks:,} ranks{zero}{batch}, {e.micro_batches:,} micro-batches"]
    lines.append(_memory(e))
    if e.channels:
        lines.append(_traffic(e))
    lines += _time(e)
    return "\n".join([*lines, *(f"note: {n}" for n in e.notes)])


def _memory(e: Any) -> str:
    names = [f"rank{'s' if c.count > 1 else ''} {c.ranks}" for c in e.classes]
    table = plain_table("peak of each rank, by role", *names, overflow="fold")
    roles = [r for r in e.classes[0].by_role if any(c.by_role[r] for c in e.classes)]
    for role in roles:
        table.add_row(f"  {role}", *(f"{c.by_role[role]:,}" for c in e.classes))
    table.add_row("peak", *(f"{c.peak_bytes:,}" for c in e.classes))
    table.add_row("", *(human_bytes(c.peak_bytes) for c in e.classes))
    return render(table)


def _traffic(e: Any) -> str:
    timed = e.network is not None
    table = plain_table(
        "a rank sends in a step", "times", "bytes", *(("busy", "of the step") if timed else ()), overflow="fold"
    )
    for c in e.channels:
        more = [human_seconds(c.seconds), f"{c.share:.1%}"] if timed else []
        table.add_row(f"channel {c.channel}", f"{c.communications:,}", f"{c.bytes:,}", *more)
    for k in e.links:
        table.add_row(f"link {k.link}", "", f"{k.bytes:,}", "", f"{k.share:.1%}")
    return render(table)


def _time(e: Any) -> list[str]:
    if e.network is None:
        said = "; for times of communication, say how fast ranks send: --link node=8,nvlink=450GB/s,net=50GB/s"
        return [f"computation of a rank: {human_seconds(e.compute_seconds)} a step ({e.costs}){said}"]
    hidden = e.hidden_seconds / e.communication_seconds if e.communication_seconds else 0.0
    lines = [
        f"estimated step time {human_seconds(e.step_seconds)} ({e.costs}; {e.network}): "
        f"{human_seconds(e.compute_seconds)} of computation, {human_seconds(e.stalled_seconds)} of waiting",
        f"communication {human_seconds(e.communication_seconds)}, of which {hidden:.1%} beside computation",
    ]
    if e.efficiency is not None:
        lines.append(
            f"scaling efficiency {e.efficiency:.1%}: one rank alone takes {human_seconds(e.one_rank_seconds)} for a "
            "step of the same batch a rank"
        )
    if e.batch is not None and e.step_seconds:
        lines.append(f"{e.batch / e.step_seconds:,.1f} samples a second")
    return lines
