"""Which value of a step first became NaN or infinite: the forward pass, operator by operator, after a failed check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import RecomputeError
from ..language.ir import Block, Operator, Role, Value
from ..language.program import Program
from ..language.text import show_operator
from ..ops.communication.base import Communication, CommWait
from ..ops.loss.finite import CheckFinite
from ..passes import Target
from ..passes.offloading.offload import without_copies
from ..passes.sequence import cleaned, planned
from .communication.engine import Engine
from .cpu.session import Session, segments
from .lowering import resolved

#: most operands that a message describes
_MOST = 4
_ADVICE = "a lower learning rate, or gradient clipping (rc.clip), may help"


class _Facts(NamedTuple):
    """Facts about an array: NaN, infinities, and the range of its numbers."""

    value: Value
    nan: bool
    infinite: bool
    low: float
    high: float

    def __str__(self) -> str:
        has = " and ".join(["nan"] * self.nan + ["infinities"] * self.infinite)
        inside = f"from {self.low:.4g} to {self.high:.4g}" if self.low <= self.high else ""
        return f"%{self.value.name} {'has ' + has if has else 'is'}{', else ' * bool(has and inside) or ' '}{inside}"


def first_not_finite(program: Program, feed: Mapping[str, Any], engine: Engine | None = None) -> str:
    """A text that says which value of a step is the first that is NaN, or infinite if there is no NaN.

    The forward pass runs once more, on NumPy and with the operators' own numerics; nothing is updated.  With an
    `engine` all ranks do so together, and each says what it has found.
    """
    try:
        session = _session(program, engine)
        for v in session.block.inputs:
            session.feed(v.name, np.asarray(feed[v.name]))
        if engine is not None:
            engine.compare(session.block)
        reason = _persistent(session) or _fed(session)
        return reason if reason and engine is None else _walked(session, reason)
    except (RecomputeError, MemoryError) as e:
        return f"the first such value was not looked for ({str(e).partition(chr(10))[0]})"


def _session(program: Program, engine: Engine | None) -> Session:
    """The operators that the checked losses need, bound on the CPU without native kernels."""
    block = without_copies(program.logical)
    checked = [next(op.reads()).name for op in block.operators if isinstance(op.op, CheckFinite)]
    kept = [op for op in block.operators if op.role in (Role.FORWARD, Role.LOSS) and not op.op.updates]
    kept = [op for op in kept if not isinstance(op.op, CheckFinite)]
    target = resolved(Target(providers=("numpy",), schedule=False, rebuild=False))
    forward = block.with_operators(kept, outputs=tuple(dict.fromkeys(checked)))
    return Session(planned(cleaned(forward, target), target), program.data, engine=engine)


def _persistent(session: Session) -> str:
    """About the first parameter that is not finite, or buffer or state with NaN."""
    block: Block = session.block
    for kind, values in (("parameter", block.parameters), ("buffer", block.buffers), ("state", block.state)):
        for v in values:
            facts = _facts(v, session.arrays[v.name])
            if facts is not None and (facts.nan or (facts.infinite and kind == "parameter")):
                return (
                    f"{kind} {facts} before this step: an earlier update has made it so (its gradient was not finite), "
                    "or it was loaded like this"
                )
    return ""


def _fed(session: Session) -> str:
    for v in session.block.inputs:
        facts = _facts(v, session.arrays[v.name])
        if facts is not None and facts.nan:
            return f"the input {facts}: look at the data"
    return ""


def _walked(session: Session, text: str = "") -> str:
    """About the first operator that makes NaN of numbers, else infinities of finite numbers; `text` is known already.

    With other ranks the walk goes to the end in any case: they may wait for what comes.
    """
    overflowed = ""
    with np.errstate(all="ignore"):
        for step in session.steps:
            rule = step.op.op
            outputs = slice(isinstance(rule, CommWait), None)  # what comes from others may be there before the wait
            before = [] if isinstance(rule, Communication) else _all(step.op.inputs[outputs], step.ins[outputs])
            (segment,) = segments([step])
            segment.run()
            if text or isinstance(rule, Communication):
                continue
            after = _all(step.op.outputs, step.outs)
            if any(f.nan for f in after) and not any(f.nan for f in before):
                cause = f"\n  {overflowed}" if overflowed and any(f.infinite for f in before) else ""
                text = f"{_said('nan', step.op, before)}{cause}\n  {_ADVICE}"
                if session.engine is None:
                    return text
            if not overflowed and any(f.infinite for f in after) and not any(f.infinite for f in before):
                overflowed = _said("infinite value", step.op, before)
    if text:
        return text
    if not overflowed:
        return "with the operators' own numerics, on NumPy, all values are finite"
    return f"{overflowed}\n  {_ADVICE}"


def _said(what: str, op: Operator, before: list[_Facts]) -> str:
    if isinstance(op.op, CommWait):
        return f"the first {what} comes from another rank, by\n    {show_operator(op)}"
    shown = ", ".join(map(str, before[:_MOST]))
    return f"the first {what} comes from\n    {show_operator(op)}" + f"\n    where {shown}" * bool(shown)


def _all(values: tuple[Value | None, ...], arrays: tuple[Any, ...]) -> list[_Facts]:
    facts = (_facts(v, a) for v, a in zip(values, arrays, strict=True) if v is not None)
    return [f for f in facts if f is not None]


def _facts(v: Value, array: Any) -> _Facts | None:
    """None for arrays that are not floating-point numbers, and empty ones."""
    if not v.type.is_float or not v.size:
        return None
    if np.isfinite(array).all():
        return _Facts(v, False, False, float(array.min()), float(array.max()))
    inside = array[np.isfinite(array)].astype(np.float64)
    low, high = (inside.min(), inside.max()) if inside.size else (np.inf, -np.inf)
    return _Facts(v, bool(np.isnan(array).any()), bool(np.isinf(array).any()), float(low), float(high))
