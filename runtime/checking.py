"""The executor's checking mode: finds reads of memory that was freed or never written, and writes outside of buffers.

Much slower than a run (the whole arena is compared at every operator); meant for tests and for authors of kernels.
"""

from __future__ import annotations

import numpy as np

from ..errors import JobError
from ..ir import Free, Operator, Value
from ..text import show_operator
from .executor import Session, Step, segments

#: NaN in every floating-point type, and a conspicuous number in the others
POISON = 0xFF


def run_checked(session: Session) -> None:
    """Runs a session once on NumPy; JobError with the operator that writes where it should not.

    Before an operator runs, its scratch and those outputs that do not take an input's place are filled with NaN, so
    that what it forgets to write is seen in the results; memory is filled with NaN as soon as nothing alive is in
    it.  After it ran, every byte outside of its outputs and scratch must be what it was.
    """
    steps = iter(session.steps)
    step = next(steps, None)
    live = {v.name for v in session.block.inputs}
    with np.errstate(all="ignore"):
        for op in session.block.operators:
            if isinstance(op.op, Free):
                live.difference_update(v.name for v in op.reads())
                _poison_dead(session, op, live)
                continue
            live.update(v.name for v in op.writes())
            if step is not None and step.op is op:
                _run_one(session, op, step)
                step = next(steps, None)


def _run_one(session: Session, op: Operator, step: Step) -> None:
    inputs = {_range(session, v) for v in op.reads()}
    for v, array in zip((*op.outputs, *op.scratch), (*step.outs, *step.scratch), strict=True):
        if v is not None and not op.op.updates and _range(session, v) not in inputs and array.dtype != np.bool_:
            array.reshape(-1).view(np.uint8)[...] = POISON
    raw = session.arena.bytes()
    before = raw.copy()
    (segment,) = segments([step])
    segment.run()
    allowed = np.zeros(raw.size, np.bool_)
    for v in (*op.writes(), *op.scratch):
        at = _range(session, v)
        if at is not None:
            allowed[at[0] : at[1]] = True
    wrong = np.flatnonzero((raw != before) & ~allowed)
    if wrong.size:
        raise JobError(
            f"bytes {wrong[0]}..{wrong[-1]} of the arena were changed from outside by\n    {show_operator(op)}"
        )


def _range(session: Session, v: Value) -> tuple[int, int] | None:
    at = session.block.addresses.get(v.name)
    return None if at is None or not v.nbytes else (at, at + v.nbytes)


def _poison_dead(session: Session, op: Operator, live: set[str]) -> None:
    """Fills what was just freed with NaN where no live value lies in it."""
    raw = session.arena.bytes()
    dead = np.zeros(raw.size, np.bool_)
    for v in op.reads():
        at = _range(session, v)
        if at is not None:
            dead[at[0] : at[1]] = True
    for name in live:
        if name in session.arrays and name in session.block.addresses:
            start = session.block.addresses[name]
            dead[start : start + session.arrays[name].nbytes] = False
    raw[dead] = POISON
