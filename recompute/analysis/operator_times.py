"""`--run N --profile`: the measured time of each operator of a step, compared with the roofline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..cost import Device, operator_cost
from ..language.ir import Block, Free, Operator, Role
from ..language.program import Program
from ..support.tables import human_flops, human_seconds, plain_table, render

#: most steps that are timed operator by operator
_MOST = 10
#: number of single operators in the table
_SHOWN = 20
_WIDTH = 120


@dataclass(frozen=True)
class Timing:
    """Operators of one kind, or one operator: its calls per step, seconds, FLOPs and bytes.

    `kernel`: its kernel provider ("numpy": its own numerics); `again`: how many of the calls recompute;
    `roofline`: the seconds at this machine's peak rates.
    """

    name: str
    kernel: str
    calls: int
    again: int
    seconds: float
    flops: int
    bytes: int
    roofline: float
    share: float
    result: str = ""
    role: str = ""
    index: int | None = None

    @property
    def flops_per_second(self) -> float:
        """Achieved FLOP/s."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Achieved bytes/s, by the bytes of operands and results."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        """Roofline seconds divided by measured seconds: 1 is the machine's peak; above 1, data came from caches."""
        return self.roofline / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """All fields with the rates, for JSON; fields of a single operator only for one."""
        fields = {k: v for k, v in asdict(self).items() if v is not None and (v != "" or k == "kernel")}
        rates = {k: getattr(self, k) for k in ("flops_per_second", "bytes_per_second", "efficiency")}
        return fields | rates


@dataclass(frozen=True)
class StepTimes:
    """Measured times of a step: `operators` in their order, `kinds` by operator name and kernel, the longest first."""

    steps: int
    device: Device
    operators: tuple[Timing, ...]
    kinds: tuple[Timing, ...]

    @property
    def seconds(self) -> float:
        """The seconds of all operators."""
        return sum(t.seconds for t in self.operators)

    def as_json(self) -> dict[str, Any]:
        """The times for `--json`, without operators that take no time (views)."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "roofline": {"flops_per_second": self.device.flops, "bytes_per_second": self.device.bandwidth},
            "kinds": [t.as_json() for t in self.kinds],
            "operators": [t.as_json() for t in self.operators if t.seconds],
        }


def operator_seconds(
    program: Program, loss: str, feed: Mapping[str, Any], steps: int = 1, executor: Any = None
) -> list[float]:
    """Measured seconds of each operator of a planned step (frees apart), medians of `steps` steps with a clock; one
    step before them warms up.

    Parameters change as in that many training steps.  Operators whose result is already in place take no time.
    """
    from ..runtime import Executor

    executor = executor or Executor()
    executor.run(program, feed, [loss])
    session = executor.session(program, [loss])
    taken: dict[int, list[float]] = {}
    for _ in range(steps):
        for v in session.block.inputs:
            session.feed(v.name, np.asarray(feed[v.name]))
        for op, seconds in session.run_timed():
            taken.setdefault(id(op), []).append(seconds)
    real = [op for op in session.block.operators if not isinstance(op.op, Free)]
    return [statistics.median(taken[id(op)]) if id(op) in taken else 0.0 for op in real]


def step_times(block: Block, seconds: Sequence[float], device: Device, steps: int = 1) -> StepTimes:
    """The times of a step from its operators' seconds (see `operator_seconds`) and a roofline."""
    total = sum(seconds) or 1.0
    real = [op for op in block.operators if not isinstance(op.op, Free)]
    timings = tuple(_timing(i, op, s, device, total) for i, (op, s) in enumerate(zip(real, seconds, strict=True)))
    groups: dict[tuple[str, str], list[Timing]] = {}
    for t in timings:
        if t.seconds:
            groups.setdefault((t.name, t.kernel), []).append(t)
    kinds = [_together(group) for group in groups.values()]
    return StepTimes(steps, device, timings, tuple(sorted(kinds, key=lambda t: -t.seconds)))


def timed_steps(wanted: int) -> int:
    """The number of steps to time if `steps` steps are run."""
    return min(wanted, _MOST)


def _timing(index: int, op: Operator, seconds: float, device: Device, total: float) -> Timing:
    cost = operator_cost(op)
    first = next(op.writes(), None)
    again = int(op.role is Role.RECOMPUTE)
    roofline = max(device.seconds(op) - device.launch, 0.0)
    result = "" if first is None else f"{first.name}: {first.type}"
    kernel = op.kernel or "numpy"
    return Timing(op.op.name, kernel, 1, again, seconds, cost.flops, cost.bytes, roofline, seconds / total, result,
                  op.role.value, index)  # fmt: skip


def _together(group: Sequence[Timing]) -> Timing:
    def total(key: str) -> Any:
        return sum(getattr(t, key) for t in group)

    keys = ("calls", "again", "seconds", "flops", "bytes", "roofline", "share")
    return Timing(group[0].name, group[0].kernel, **{k: total(k) for k in keys})


# -- the tables -------------------------------------------------------------------------------------------------------


def tables(times: StepTimes) -> str:
    """The printed tables: times by kind of operator, then the longest operators."""
    peak = f"{times.device.flops / 1e9:,.0f} GFLOP/s, {times.device.bandwidth / 1e9:,.1f} GB/s"
    again = sum(t.seconds for t in times.operators if t.again)
    recomputed = f", {human_seconds(again)} of them in recomputation" if again else ""
    lines = [
        f"operators of a step: {human_seconds(times.seconds)}{recomputed} (median of {times.steps} steps); "
        f"the roofline of this machine: {peak}",
        _table(times.kinds, single=False),
        _table(sorted(times.operators, key=lambda t: -t.seconds)[:_SHOWN], single=True),
    ]
    return "\n".join(lines)


def _table(rows: Sequence[Timing], *, single: bool) -> str:
    table = plain_table()
    heads = (f"the {len(rows)} longest", "result", "kernel") if single else ("operator", "kernel", "calls")
    for head in heads:
        justify = "right" if head == "calls" else "left"
        table.add_column(head, no_wrap=True, max_width=32 if head == "result" else None, justify=justify)
    for head in ("time", "share", *(() if single else ("work",)), "GFLOP/s", "GB/s", "roofline"):
        table.add_column(head, justify="right", no_wrap=True)
    for t in rows:
        calls = f"{t.calls}" + (f" ({t.again} recomputed)" if t.again else "")
        shown = f"{t.name} (recomputed)" if t.again else t.name
        name = (shown, t.result, t.kernel) if single else (t.name, t.kernel, calls)
        rates = (f"{t.flops_per_second / 1e9:.1f}", f"{t.bytes_per_second / 1e9:.1f}", f"{t.efficiency:.0%}")
        work = () if single else (human_flops(t.flops),)
        cells = (*name, human_seconds(t.seconds), f"{t.share:.1%}", *work, *rates)
        table.add_row(*cells)
    return render(table, _WIDTH)
