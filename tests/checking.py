"""Checked execution: detects reads of freed or unwritten memory, and writes outside of buffers.

Much slower than a run (the whole arena is compared at every operator); meant for tests and for authors of kernels.
"""

from __future__ import annotations

import numpy as np

from recompute.errors import JobError
from recompute.language.ir import Free, Operator, Value
from recompute.language.text import show_operator
from recompute.ops.memory.offload import Copy
from recompute.runtime.cpu.session import Session, Step, segments

#: NaN in every floating-point type, and a conspicuous number in the others
POISON = 0xFF


def run_checked(session: Session) -> None:
    """Runs a session once on NumPy; JobError with the operator that writes outside of its buffers.

    Before an operator runs, its scratch and its outputs that are not in place are filled with NaN, so that unwritten
    elements appear in the results; freed memory is filled with NaN.  After the operator has run, every byte outside of
    its outputs and scratch must be unchanged.

    Copies between device and host are done at the last possible moment, their wait, so that a source that is
    overwritten too early, or a target that is read too early, appears in the results.
    """
    steps = iter(session.steps)
    step = next(steps, None)
    live = {v.name for v in session.block.inputs}
    begun: dict[str, tuple[Operator, Step]] = {}
    with np.errstate(all="ignore"):
        for op in session.block.operators:
            if isinstance(op.op, Free):
                live.difference_update(v.name for v in op.reads())
                _poison_dead(session, op, live)
                continue
            live.update(v.name for v in op.writes())
            waits = isinstance(op.op, Copy) and op.op.waits
            if waits:
                _run_one(session, *begun.pop(next(op.reads()).name))
            if step is not None and step.op is op:
                if op.op.copies and not waits:
                    _poison_outputs(session, op, step)
                    begun[next(op.writes()).name] = op, step
                else:
                    _run_one(session, op, step)
                step = next(steps, None)


def _poison_outputs(session: Session, op: Operator, step: Step) -> None:
    inputs = {_range(session, v) for v in op.reads()}
    for v, array in zip((*op.outputs, *op.scratch), (*step.outs, *step.scratch), strict=True):
        if v is not None and not op.op.updates and _range(session, v) not in inputs and array.dtype != np.bool_:
            array.reshape(-1).view(np.uint8)[...] = POISON


def _run_one(session: Session, op: Operator, step: Step) -> None:
    _poison_outputs(session, op, step)
    before = {host: raw.copy() for host, raw in _arenas(session).items()}
    (segment,) = segments([step])
    try:
        segment.run()
    finally:  # what reports an error has no more right to others' bytes
        _check_others(session, op, before)


def _check_others(session: Session, op: Operator, before: dict[bool, np.ndarray]) -> None:
    for host, raw in _arenas(session).items():
        allowed = np.zeros(raw.size, np.bool_)
        for v in (*op.writes(), *op.scratch):
            at = _range(session, v)
            if at is not None and at[0] is host:
                allowed[at[1] : at[2]] = True
        wrong = np.flatnonzero((raw != before[host]) & ~allowed)
        if wrong.size:
            raise JobError(
                f"bytes {wrong[0]}..{wrong[-1]} of the {'host ' * host}arena were changed from outside by\n"
                f"    {show_operator(op)}"
            )


def _arenas(session: Session) -> dict[bool, np.ndarray]:
    """The bytes of the device's arena and of the host's (True), if there is one."""
    found = {False: session.arena.bytes()}
    return found if session.host is None else {**found, True: session.host.bytes()}


def _range(session: Session, v: Value) -> tuple[bool, int, int] | None:
    """Whether a value is in the host arena, and its range; None for values outside of arenas."""
    at = session.block.addresses.get(v.name)
    return None if at is None or not v.nbytes else (v.type.host, at, at + v.nbytes)


def _poison_dead(session: Session, op: Operator, live: set[str]) -> None:
    """Fills memory that was just freed with NaN, except where live values are."""
    values = session.block.values()
    for host, raw in _arenas(session).items():
        dead = np.zeros(raw.size, np.bool_)
        for v in op.reads():
            at = _range(session, v)
            if at is not None and at[0] is host:
                dead[at[1] : at[2]] = True
        for name in live:
            at = _range(session, values[name]) if name in session.block.addresses else None
            if at is not None and at[0] is host:
                dead[at[1] : at[2]] = False
        raw[dead] = POISON
