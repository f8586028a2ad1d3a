"""The data of the HTML report, as a dictionary for JSON.

Sizes and addresses of allocations are in units of the arena's alignment, times in nanoseconds.  The pictures are exact:
nothing is sampled, and only for very large programs the smallest allocations are summed (see `_MOST`).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..compiling.compiler import CompiledStep, checkpoint_candidates
from ..cost import kept_values, operator_cost
from ..language.ir import Block, Operator, Role
from ..language.program import Program
from ..language.text import show_attribute
from ..passes import ALIGNMENT
from ..passes.communication.clock import Exchange
from ..passes.recomputation.recompute import forward_producers
from .timeline import COLOURS, ROLES, Timeline, timeline

#: most allocations that are listed for a program; the smallest ones beyond that are summed by role
_MOST = 12_000
#: numbers of equally spaced checkpoints on the memory/time curve
_SPACED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
_FORWARD = (Role.FORWARD, Role.LOSS)


def report_data(
    program: Program,
    plain: CompiledStep,
    step: CompiledStep | None = None,
    *,
    title: dict[str, Any] | None = None,
    curve: Sequence[dict[str, Any]] = (),
    measured: Sequence[float] | None = None,
    run: dict[str, Any] | None = None,
    exchange: Exchange | None = None,
    ranks: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The data of the page, for JSON.

    `program`: the forward pass with its loss; `step`: the recomputed step, or None; `curve`: from `curve_points`;
    `measured`: seconds of each operator of the last of the two steps.  `exchange`: how a rank communicates, and `ranks`
    the estimate of all of them (`RanksEstimate.to_dict`).
    """
    table = _Tables()
    steps = {"plain": plain} if step is None else {"plain": plain, "recompute": step}
    lines = {name: timeline(s.program.block, s.cost, exchange) for name, s in steps.items()}
    last = list(steps)[-1]
    times: dict[str, Sequence[float | None]] = {}
    if measured is not None:
        times[last] = measured
        if last != "plain":
            times["plain"] = same_operators(lines["plain"].operators, lines[last].operators, measured)
    programs = [_program(n, s, lines[n], table, times.get(n)) for n, s in steps.items()]
    return {
        "title": title or {},
        "unit": ALIGNMENT,
        "roles": [{"key": k, "label": label, "colour": COLOURS[k]} for k, label in ROLES.items()],
        **table.as_dict(),
        "programs": programs,
        "checkpoints": [] if step is None else checkpoint_worth(plain.program.forward or program.block, plain, step),
        "notes": [] if step is None or step.plan is None else list(step.plan.notes),
        "curve": list(curve),
        "run": run,
        "ranks": ranks,
    }


class _Tables:
    """Tables of strings that many operators share."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.types: dict[str, int] = {}
        self.type_of: list[int] = []
        self.kinds: dict[str, int] = {}
        self.attributes: dict[str, int] = {}
        self.operator_roles: dict[str, int] = {}
        self.kernels: dict[str, int] = {}

    @staticmethod
    def number(table: dict[str, int], key: str) -> int:
        return table.setdefault(key, len(table))

    def value(self, v: Any) -> int:
        """The number of a value; -1 for an absent one."""
        if v is None:
            return -1
        n = self.names.setdefault(v.name, len(self.names))
        if n == len(self.type_of):
            self.type_of.append(self.number(self.types, str(v.type)))
        return n

    def as_dict(self) -> dict[str, list]:
        """The tables for JSON."""
        return {
            "names": list(self.names),
            "types": list(self.types),
            "type_of": self.type_of,
            "kinds": list(self.kinds),
            "attributes": list(self.attributes),
            "operator_roles": list(self.operator_roles),
            "kernels": list(self.kernels),
        }


def _program(
    name: str, step: CompiledStep, line: Timeline, table: _Tables, measured: Sequence[float | None] | None
) -> dict[str, Any]:
    """One step: figures, operators and allocations in columns."""
    ops = line.operators
    listed, rest = _largest(line)
    return {
        "name": name,
        "figures": dataclasses.asdict(step.figures),
        "persistent": line.persistent,
        "operators": {
            "kind": [table.number(table.kinds, op.op.name) for op in ops],
            "role": [table.number(table.operator_roles, op.role.value) for op in ops],
            "inputs": [[table.value(v) for v in op.inputs] for op in ops],
            "outputs": [[table.value(v) for v in op.outputs] for op in ops],
            "scratch": [[table.value(v) for v in op.scratch] for op in ops],
            "attributes": [table.number(table.attributes, _attributes(op)) for op in ops],
            "kernel": [table.number(table.kernels, op.kernel) for op in ops],
            "nanoseconds": [round(s * 1e9) for s in line.seconds],
            "flops": [operator_cost(op).flops for op in ops],
            "measured": None if measured is None else [None if s is None else round(s * 1e9) for s in measured],
        },
        "allocations": {
            "values": [[table.value(v) for v in a.values] for a in listed],
            "role": [list(ROLES).index(a.role) for a in listed],
            "size": [a.size // ALIGNMENT for a in listed],
            "start": [a.start for a in listed],
            "end": [a.end for a in listed],
            "address": [a.address // ALIGNMENT for a in listed],
        },
        "rest": rest,
        "lanes": _lanes(line),
    }


def _lanes(line: Timeline) -> list[dict[str, Any]]:
    """The transfers of each channel and each link: nanoseconds of the step, bytes, and the operator that begins it."""
    number = {at: i for i, at in enumerate(line.positions)}
    return [
        {
            "name": queue,
            "begin": [round(t.begin * 1e9) for t in moved],
            "end": [round(t.end * 1e9) for t in moved],
            "bytes": [t.nbytes for t in moved],
            "operator": [number[t.operator] for t in moved],
        }
        for queue, moved in line.lanes().items()
    ]


def _attributes(op: Operator) -> str:
    return ", ".join(f"{k}={show_attribute(v)}" for k, v in op.op.attributes().items())


def _largest(line: Timeline) -> tuple[list[Any], list[list[int]]]:
    """The allocations to list, and the sums of the others as [role, from operator, to operator, units] ranges."""
    allocations = [a for a in line.allocations if a.size]
    if len(allocations) <= _MOST:
        return allocations, []
    order = sorted(range(len(allocations)), key=lambda i: -allocations[i].size)
    few = set(order[:_MOST])
    others = tuple(a for i, a in enumerate(allocations) if i not in few)
    totals = dataclasses.replace(line, allocations=others, persistent={}).totals()
    rest = []
    for r, levels in enumerate(totals.values()):
        since = 0
        for i in range(1, len(levels) + 1):
            if i == len(levels) or levels[i] != levels[since]:
                if levels[since]:
                    rest.append([r, since, i - 1, levels[since] // ALIGNMENT])
                since = i
    return [allocations[i] for i in sorted(few)], rest


def same_operators(
    wanted: Iterable[Operator], known: Sequence[Operator], seconds: Sequence[float]
) -> list[float | None]:
    """Times of `wanted` operators from those of a step that has the same ones: same outputs, same name."""

    def key(op: Operator) -> tuple:
        return (op.op.name, *(v.name for v in op.writes()))

    times = {key(op): s for op, s in zip(known, seconds, strict=True)}
    return [times.get(key(op)) for op in wanted]


# -- savings of checkpoints --------------------------------------------------------------------------------------


def checkpoint_worth(forward: Block, plain: CompiledStep, step: CompiledStep) -> list[dict[str, Any]]:
    """For each checkpoint, in order of production: the bytes that it keeps, and those that it permits to drop.

    `bytes`: of the value itself; `beside`: other values of its segment that are kept (they cross its border, or are
    checkpoints); `dropped`: values of the segment before it that the plain step keeps and this step does not; `net`:
    how many bytes less the segment keeps than in the plain step; `operators`, `flops`, `seconds` (estimated): the
    recomputed work of that segment.
    """
    producers = forward_producers(forward)
    names = [n for n in (step.plan.checkpoints if step.plan is not None else ()) if n in producers]
    borders = sorted({producers[n] for n in names})
    values, rows = forward.values(), []
    for n in names:
        row = {"name": n, "type": str(values[n].type), "bytes": values[n].nbytes}
        rows.append({**row, "beside": 0, "dropped": 0, "net": 0, "operators": 0, "flops": 0, "seconds": 0.0})
    first: dict[int, dict[str, Any]] = {}  # two checkpoints of one operator share a segment: it counts for the first
    for n, row in zip(names, rows, strict=True):
        first.setdefault(producers[n], row)
    segments = [first[b] for b in borders]
    was, now = kept_values(plain.program.logical), kept_values(step.program.logical)
    _add_optional(producers, plain.program.logical, step.program.logical)
    for n in {**was, **now}:
        i = bisect_left(borders, producers.get(n, len(forward.operators)))
        if i < len(segments):
            segments[i]["net"] += was.get(n, 0) - now.get(n, 0)
            if n not in now:
                segments[i]["dropped"] += was[n]
            elif n not in names:
                segments[i]["beside"] += now[n]
    _count_reruns(step, producers, borders, segments)
    return rows


def _add_optional(producers: dict[str, int], *blocks: Block) -> None:
    """Adds optional outputs that exist only for a gradient to the segment of their operator's other outputs."""
    for block in blocks:
        for op in block.operators:
            at = next((producers[v.name] for v in op.writes() if v.name in producers), None)
            if at is not None and op.role in _FORWARD:
                for v in op.writes():
                    producers.setdefault(v.name, at)


def _count_reruns(
    step: CompiledStep, producers: dict[str, int], borders: list[int], rows: list[dict[str, Any]]
) -> None:
    for op in step.program.logical.operators:
        if op.role is not Role.RECOMPUTE:
            continue
        original = next(op.writes()).name.rpartition("@")[0]
        i = bisect_left(borders, producers.get(original, len(producers)))
        if i < len(rows):
            rows[i]["operators"] += 1
            rows[i]["flops"] += operator_cost(op).flops
            rows[i]["seconds"] += step.cost.seconds(op)


# -- the curve of memory against time ----------------------------------------------------------------------------


def curve_points(
    program: Program,
    plain: CompiledStep,
    step: CompiledStep | None,
    compile_with: Callable[[list[str]], CompiledStep],
    most: int = 7,
) -> list[dict[str, Any]]:
    """Peak and estimated time of the plain step, of this plan, and of equally spaced checkpoint candidates.

    `compile_with` compiles the program with given checkpoints; nothing is run.
    """
    points = [_point("plain", "plain", plain)]
    if step is not None:
        points.append(_point("plan", "this plan", step))
    candidates = [c.value.name for c in checkpoint_candidates(program.block)[0]]
    for count in _spaced_counts(len(candidates), most):
        chosen = [candidates[(2 * i + 1) * len(candidates) // (2 * count)] for i in range(count)]
        label = f"{count} equally spaced" if count < len(candidates) else f"all {count} candidates"
        points.append(_point("spaced", label, compile_with(chosen), chosen))
    return points


def _spaced_counts(n: int, most: int) -> list[int]:
    """At most `most` of the numbers up to `n`, and `n` itself."""
    counts = [k for k in _SPACED if k < n]
    while len(counts) >= most:
        del counts[-2::-2]
    return [*counts, n] if n else []


def _point(kind: str, label: str, step: CompiledStep, chosen: Sequence[str] | None = None) -> dict[str, Any]:
    f = step.figures
    names = chosen if chosen is not None else step.plan.checkpoints if step.plan is not None else ()
    return {
        "kind": kind,
        "label": label,
        "checkpoints": list(names),
        "peak_bytes": f.peak_bytes,
        "kept_bytes": f.kept_bytes,
        "seconds": f.estimated_step_seconds,
        "repeated": f.repeated_forward_share,
    }
