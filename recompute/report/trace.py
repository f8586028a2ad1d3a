"""`--trace`: the step as a trace that Perfetto and chrome://tracing open, with memory counters.

The format is Google's Trace Event Format: complete events (`ph` "X") with times in microseconds, counters ("C") and
names of processes and threads ("M").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..cost import operator_cost
from ..language.ir import Role
from ..language.text import show_operator
from .timeline import ROLES, Timeline, running_sum


def trace(
    lines: Mapping[str, Timeline], measured: Mapping[str, Sequence[float]] | None = None, title: str = ""
) -> dict[str, Any]:
    """The trace of one or more steps, a process each: a row for each role of operators and for each channel and link
    to other ranks, counters of live bytes by role.

    `measured`: seconds of each operator, by the step's name; other steps have estimated times.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, line) in enumerate(lines.items(), 1):
        times = (measured or {}).get(name)
        kind = "estimated" if times is None else "measured"
        events += _names(pid, f"{name} step ({kind} times)")
        events += _operators(pid, line, times if times is not None else line.seconds)
        events += _transfers(pid, line) if times is None else ()
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}


def _names(pid: int, process: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": process}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, role in enumerate(Role, 1):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": role.value}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _operators(pid: int, line: Timeline, seconds: Sequence[float]) -> Iterator[dict[str, Any]]:
    rows = {role: tid for tid, role in enumerate(Role, 1)}
    totals = line.totals()
    end = 0.0
    for i, (op, start) in enumerate(zip(line.operators, running_sum(seconds), strict=True)):
        cost = operator_cost(op)
        end = start + seconds[i]
        live = {ROLES[role]: totals[role][i] for role in ROLES}
        yield {
            "ph": "X", "pid": pid, "tid": rows[op.role], "ts": round(start * 1e6, 3), "dur": round(seconds[i] * 1e6, 3),
            "name": op.op.name, "cat": op.role.value,
            "args": {"operator": i, "text": show_operator(op), "kernel": op.kernel or "numpy",
                     "flops": cost.flops, "bytes": cost.bytes, "estimated_us": round(line.seconds[i] * 1e6, 3),
                     "live_bytes": sum(live.values())},
        }  # fmt: skip
        yield {"ph": "C", "pid": pid, "ts": round(start * 1e6, 3), "name": "memory by role", "args": live}
        yield {
            "ph": "C", "pid": pid, "ts": round(start * 1e6, 3), "name": "live bytes",
            "args": {"bytes": sum(live.values())},
        }  # fmt: skip
    after = sum(line.persistent.values())
    yield {"ph": "C", "pid": pid, "ts": round(end * 1e6, 3), "name": "live bytes", "args": {"bytes": after}}


def _transfers(pid: int, line: Timeline) -> Iterator[dict[str, Any]]:
    """A row for each channel and each link, below those of the operators."""
    for tid, (queue, moved) in enumerate(line.lanes().items(), len(Role) + 1):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": queue}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for t in moved:
            op = line.block.operators[t.operator]
            yield {
                "ph": "X", "pid": pid, "tid": tid, "ts": round(t.begin * 1e6, 3),
                "dur": round((t.end - t.begin) * 1e6, 3), "name": op.op.name, "cat": "transfer",
                "args": {"text": show_operator(op), "bytes": t.nbytes, "waited_us": round(t.stall * 1e6, 3)},
            }  # fmt: skip
